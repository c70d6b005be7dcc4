"""Checks of a layer's arguments at trace time; every error says what was expected and got."""

import contextlib
import inspect
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType
from jax.typing import DTypeLike

from ultraep_jax.activations import Activation, GatedUnit, mixes_columns
from ultraep_jax.config import BalanceConfig, check_type
from ultraep_jax.mesh import Mesh, axis_size
from ultraep_jax.types import Array, AxisName, ExpertWeights, Layout, Plan

_COMPUTE_DTYPES = tuple(jnp.dtype(name) for name in ("bfloat16", "float16", "float32"))


def check_array(name: str, value: Any, shape: tuple[int | str, ...] | None, kind: Any) -> None:
  """Raises unless ``value`` is an array of that kind and shape.

  Letters match any size, and ``None`` any shape.

  Raises:
    TypeError: not an array, or a dtype that is no subtype of ``kind``.
    ValueError: another shape.
  """
  if not hasattr(value, "shape") or not hasattr(value, "dtype"):
    raise TypeError(f"{name}: expected an array, got {type(value).__name__}")
  if not jnp.issubdtype(value.dtype, kind):
    raise TypeError(f"{name}: expected a dtype of kind {kind.__name__}, got {value.dtype}")
  if shape is None:
    return
  fits = len(value.shape) == len(shape) and all(
    isinstance(want, str) or want == got for want, got in zip(shape, value.shape, strict=True)
  )
  if not fits:
    expected = "[" + ", ".join(map(str, shape)) + "]"
    raise ValueError(f"{name}: expected shape {expected}, got {list(value.shape)}")


def check_config(config: object) -> None:
  """Raises unless ``config`` is a ``BalanceConfig`` that this version can run."""
  if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
    raise ValueError("jax_enable_x64: expected False (loads and rows are int32), got True")
  check_type("config", config, BalanceConfig)


def check_compute_dtype(name: str, value: Any) -> None:
  """Raises unless the dtype of an array is one that the layer computes in."""
  if value.dtype not in _COMPUTE_DTYPES:
    raise TypeError(f"{name}: expected bfloat16, float16 or float32, got {value.dtype}")


def as_compute_dtype(name: str, value: DTypeLike | None, others: str = "") -> jnp.dtype:
  """One of the dtypes that the layer computes in.

  Args:
    name: of the argument.
    value: the dtype.
    others: what else the argument may be, for the message.

  Raises:
    TypeError: another dtype, or none at all.
  """
  found = None
  if value is not None:  # which NumPy takes for float64
    with contextlib.suppress(TypeError, ValueError):
      found = jnp.dtype(value)
  if found is None or found not in _COMPUTE_DTYPES:
    got = repr(value) if found is None else found
    raise TypeError(f"{name}: expected bfloat16, float16 or float32{others}, got {got}")
  return found


def check_plan(plan: Any, num_experts: int, num_ranks: int) -> None:
  """Raises unless a planner's answer has the type, shapes and dtypes of a ``Plan``."""
  if not isinstance(plan, Plan):
    raise TypeError(f"strategy: expected its planner to return a Plan, got {type(plan).__name__}")
  check_array("plan.replica_expert", plan.replica_expert, (num_ranks, "S"), jnp.int32)
  slots = plan.replica_expert.shape[1]
  check_array("plan.quota", plan.quota, (num_experts, num_ranks), jnp.int32)
  check_array("plan.parent", plan.parent, (num_ranks, slots), jnp.int32)


def check_weights(weights: Any, leading: int | str, hidden: int | str = "D") -> None:
  """Raises unless ``weights`` are expert weights that fit together.

  Raises:
    TypeError: something else, a leaf that is no array, as quantised ones are, or a wrong dtype.
    ValueError: leaves that the layout does not have or that are missing, or shapes that do not fit.
  """
  if not isinstance(weights, ExpertWeights):
    raise TypeError(f"weights: expected ExpertWeights, got {type(weights).__name__}")
  if not isinstance(weights.layout, Layout):
    raise TypeError(f"weights.layout: expected a Layout, got {type(weights.layout).__name__}")
  apart = weights.layout is Layout.APART
  matrices, others = (("wi_gate", "wi_up"), ("wi",)) if apart else (("wi",), ("wi_gate", "wi_up"))
  for name in (name for other in others for name in (other, f"{other}_bias")):
    if getattr(weights, name) is not None:
      raise ValueError(f"weights.{name}: expected None in layout {weights.layout!s}, got a value")
  _check_one_array("wo", weights.wo)
  check_array("weights.wo", weights.wo, (leading, "F", hidden), jnp.floating)
  count, inner, width = weights.wo.shape
  if not weights.wo.size:
    raise ValueError(f"weights.wo: expected no empty axis, got {[count, inner, width]}")
  cols = 2 * inner if weights.layout in (Layout.FUSED, Layout.INTERLEAVED) else inner
  for name in matrices:
    _check_one_array(name, getattr(weights, name))
    check_array(f"weights.{name}", getattr(weights, name), (count, width, cols), jnp.floating)
  biases = {f"{name}_bias": getattr(weights, f"{name}_bias") for name in matrices}
  given = [name for name, bias in biases.items() if bias is not None]
  for name, bias in biases.items():
    if bias is None and given:
      raise ValueError(f"weights.{name}: expected an array, as {given[0]} is given, got None")
  for name, size in [*((name, cols) for name in given), ("wo_bias", width)]:
    if (bias := getattr(weights, name)) is not None:
      _check_one_array(name, bias)
      check_array(f"weights.{name}", bias, (count, size), jnp.floating)
  dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(weights)}
  if len(dtypes) > 1:
    raise TypeError(f"weights: expected one dtype, got {sorted(dtypes)}")
  check_compute_dtype("weights", weights.wo)  # numbers in FP8 mean nothing without scales


def _check_one_array(name: str, value: Any) -> None:
  """Raises TypeError of values that hold arrays, whatever they pretend to be."""
  leaves = jax.tree.leaves(value)
  if len(leaves) == 1 and leaves[0] is value:
    return
  hint = ""
  if len(leaves) > 1:
    hint = f" of {len(leaves)} arrays (quantised weights are not known here: dequantise them)"
  elif hasattr(value, "__jax_array__"):  # a Flax variable
    hint = f": pass {name}[...]"
  raise TypeError(f"weights.{name}: expected an array, got {type(value).__name__}{hint}")


def check_function(activation: Any) -> None:
  """Raises TypeError unless an activation is a function, or a ``GatedUnit`` of one, with a hash."""
  function = activation.function if isinstance(activation, GatedUnit) else activation
  if not callable(function):
    raise TypeError(f"activation: expected a function, got {type(function).__name__}")
  try:
    hash(function)
  except TypeError:
    name = type(function).__name__
    raise TypeError(f"activation: expected a function with a hash, got {name} without") from None


def check_activation(
  activation: Any, layout: Layout, shape: tuple[int, ...], dtype: Any, *, explicit: bool = False
) -> None:
  """Raises unless an activation suits the experts, keeps shapes and needs its arguments alone.

  Args:
    activation: of the layer.
    layout: of its experts.
    shape: of what it is called with.
    dtype: likewise.
    explicit: whether it is taken into a ``shard_map`` over Explicit axes.

  Raises:
    TypeError: not a function, one without a hash or of another number of arguments, or one that
      returns no floats.
    ValueError: it closes over a traced array, for which there would be no gradient, or over any
      of JAX on Explicit axes, or returns another shape.
  """
  gated = isinstance(activation, GatedUnit)
  function = activation.function if gated else activation
  check_function(activation)
  if gated and layout is Layout.UNGATED:
    raise TypeError("activation: expected a function of one argument (ungated), got a GatedUnit")
  arguments = [jax.ShapeDtypeStruct(shape, jnp.float32 if gated else dtype)] * (2 if gated else 1)
  _check_arity(function, gated)
  traced, out = jax.make_jaxpr(function, return_shape=True)(*arguments)
  for value in _closed_over(traced):
    if isinstance(value, Tracer):
      raise ValueError(
        f"activation: expected a function of its argument alone, got one that closes over a traced "
        f"{jax.typeof(value)}"
      )
    on_axes = jax.typeof(value).sharding.mesh.axis_types
    if explicit and isinstance(value, jax.Array) and AxisType.Explicit in on_axes:
      raise ValueError(
        "activation: expected numbers of Python or NumPy in a function on Explicit axes, got one "
        f"that closes over a jax.Array {jax.typeof(value)}"
      )
  check_array("activation's result", out, shape, jnp.floating)


def _closed_over(traced: Any) -> Iterator[Any]:
  """The values that a function closes over, those of jitted functions in it too."""
  yield from traced.consts
  for eqn in traced.jaxpr.eqns:
    for value in eqn.params.values():
      if hasattr(value, "consts"):
        yield from _closed_over(value)


def _check_arity(function: Any, gated: bool) -> None:
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):
    return  # of some builtins nothing is known before they are called
  takes = [_takes(signature, count) for count in (1, 2)]
  of_any = any(x.kind is x.VAR_POSITIONAL for x in signature.parameters.values())
  # Where the second argument may be left out, it is no projection: ``gelu(x, approximate=True)``.
  if of_any or (takes[1] and not takes[0] if gated else takes[0]):
    return
  expected = "a GatedUnit of a function of (gate, up)" if gated else "a function of one argument"
  advice = "" if gated else "; ultraep_jax.GatedUnit(function) makes one of (gate, up)"
  name = getattr(function, "__name__", type(function).__name__)
  raise TypeError(f"activation: expected {expected}, got {name}{signature}{advice}")


def _takes(signature: inspect.Signature, count: int) -> bool:
  try:
    signature.bind(*range(count))
  except TypeError:
    return False
  return True


def check_layer(
  x: Array,
  expert_index: Array,
  gate: Array,
  weights: ExpertWeights,
  activation: Any,
  config: BalanceConfig,
  mesh: Mesh,
  axis_name: AxisName,
  token_axes: tuple[str, ...] | None,
) -> None:
  """Checks the arguments of ``sharded_moe``, or without ``token_axes`` of ``moe``, all at once.

  Raises:
    ValueError: shapes, sizes or concrete indices do not fit.
    TypeError: a type or dtype is wrong.
  """
  check_config(config)
  local = token_axes is None
  if getattr(x, "ndim", 2) < 2 or (local and getattr(x, "ndim", 2) > 2):
    expected = "[T, D]" if local else "[N, ..., D]"
    raise ValueError(f"x: expected shape {expected}, got {list(x.shape)}")
  check_array("x", x, None, jnp.floating)
  check_compute_dtype("x", x)
  check_array("expert_index", expert_index, (*x.shape[:-1], "K"), jnp.integer)
  check_array("gate", gate, expert_index.shape, jnp.floating)
  check_weights(weights, "M" if local else "E", x.shape[-1])
  explicit = not local and AxisType.Explicit in mesh.axis_types
  columns = 8, weights.wo.shape[1]
  check_activation(activation, weights.layout, columns, x.dtype, explicit=explicit)
  num_ranks = axis_size(mesh, axis_name)
  tokens = math.prod(x.shape[:-1]) // (1 if local else check_divides(x, mesh, token_axes))
  num_experts = weights.wo.shape[0] * (num_ranks if local else 1)
  check_sizes(tokens, expert_index.shape[-1], num_experts, num_ranks, config)
  check_expert_index(expert_index, num_experts)


def check_tokens(x: Array, mask: Array | None, embed_dim: int) -> None:
  """Checks what a Flax module is called with.

  Raises:
    ValueError: another shape.
    TypeError: no array, or a wrong dtype.
  """
  check_array("x", x, None, jnp.floating)
  if x.ndim < 2 or x.shape[-1] != embed_dim:
    raise ValueError(f"x: expected shape [..., {embed_dim}] with token axes, got {x.shape}")
  if mask is not None:
    check_array("mask", mask, x.shape[:-1], jnp.bool_)


def check_inner_axis(
  weights: ExpertWeights,
  activation: Activation,
  mesh: Mesh,
  inner_axis: str,
  token_axes: tuple[str, ...],
) -> None:
  """Raises ValueError unless F can be divided over a mesh axis that no token is divided over."""
  others = tuple(axis for axis in mesh.axis_names if axis not in token_axes)
  if inner_axis not in others:
    expected = f"a mesh axis of {others}, those without tokens"
    if not others:
      expected = f"None, as tokens are on every mesh axis of {mesh.axis_names}"
    raise ValueError(f"inner_axis: expected {expected}, got {inner_axis!r}")
  if weights.layout is Layout.FUSED:
    raise ValueError(
      "weights.layout: expected one whose columns can be divided (apart, interleaved or ungated) "
      f"with inner_axis={inner_axis!r}, got fused"
    )
  if weights.wo.shape[1] % mesh.shape[inner_axis]:
    raise ValueError(
      f"weights.wo: expected F divisible by {mesh.shape[inner_axis]} (mesh axis {inner_axis!r}), "
      f"got {weights.wo.shape[1]}"
    )
  parts = mesh.shape[inner_axis]
  check_columns_apart(activation, weights.layout, weights.wo.shape[1] // parts, parts)


def check_columns_apart(activation: Activation, layout: Layout, width: int, parts: int) -> None:
  """Raises ValueError where parts of F may give another result than all of it."""
  if parts > 1 and mixes_columns(activation, layout, width):
    raise ValueError(
      "activation: expected an elementwise function (inner_axis divides its columns), got one "
      "with operations across columns or of other shapes"
    )


@contextlib.contextmanager
def arguments_of(function: str) -> Iterator[None]:
  """Notes on errors whose arguments they are about."""
  try:
    yield
  except (TypeError, ValueError) as error:
    error.add_note(f"(an argument of {function})")
    raise


def check_divides(x: Array, mesh: Mesh, token_axes: tuple[str, ...]) -> int:
  """The devices along the axes, unless these do not divide the first axis of ``x``.

  Raises:
    ValueError: they do not.
  """
  parts = math.prod(mesh.shape[axis] for axis in token_axes)
  if x.shape[0] % parts:
    raise ValueError(
      f"x: expected a first axis divisible by {parts} (mesh axes {token_axes}), got {x.shape[0]}"
    )
  return parts


def check_sizes(
  tokens: int, top_k: int, num_experts: int, num_ranks: int, config: BalanceConfig
) -> None:
  """Checks the sizes of a layer against each other.

  Raises:
    ValueError: no tokens, or a symbolic number of them, K outside [1, E], E not divisible by G,
      domains that do not divide the ranks, or more assignments than int32 counts.
  """
  if not isinstance(tokens, int):  # what jax.export makes of a shape
    raise ValueError(
      f"tokens per rank: expected a number, got {tokens}; buffers follow from it, so export a "
      "program for each number of tokens"
    )
  if tokens < 1:
    raise ValueError(f"tokens per rank: expected at least 1, got {tokens}")
  if num_experts % num_ranks:
    raise ValueError(
      f"num_experts: expected a multiple of the {num_ranks} ranks, got {num_experts}"
    )
  if not 1 <= top_k <= num_experts:
    raise ValueError(f"top_k: expected 1 to {num_experts} (the experts), got {top_k}")
  config.domain_of(num_ranks)
  if num_ranks * tokens * top_k >= 1 << 31:
    raise ValueError(
      "assignments: expected ranks * tokens * top_k below 2**31 (int32 counts), "
      f"got {num_ranks} * {tokens} * {top_k}"
    )


def check_expert_index(expert_index: Array, num_experts: int) -> None:
  """Raises if a concrete index is outside ``[-1, num_experts)``; traced values pass.

  An eager call waits for the values. Of several processes, each checks what it holds.

  Raises:
    ValueError: names the range and the first offender.
  """
  if isinstance(expert_index, Tracer):
    return
  if isinstance(expert_index, jax.Array):
    shards = [shard.data for shard in expert_index.addressable_shards if shard.replica_id == 0]
  else:
    shards = [expert_index]
  for values in map(np.asarray, shards):
    wrong = values[(values < -1) | (values >= num_experts)]
    if wrong.size:
      raise ValueError(
        f"expert_index: expected values in [-1, {num_experts}), got {wrong.flat[0]} "
        f"({wrong.size} outside)"
      )
