"""The two projections into a gated expert and their product, in one kernel."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from pallas_kernels.matmul_pipeline import Array, Tuning
from pallas_kernels.row_matmul import Contraction, multiply_rows

Activation = Callable[[Array], Array]

# What Mosaic GPU computes element by element in registers.
_ELEMENTWISE = frozenset(
  {
    *("abs", "add", "clamp", "copy", "cos", "div", "erf", "exp", "exp2", "integer_pow", "log"),
    *("logistic", "max", "min", "mul", "neg", "rsqrt", "sign", "sin", "sqrt", "square", "sub"),
    *("tanh", "and", "eq", "ge", "gt", "le", "lt", "ne", "not", "or", "select_n"),
    *("convert_element_type", "stop_gradient"),
  }
)


def gated_matmul(
  rows_CK: Array,
  home_gate_MKN: Array,
  home_up_MKN: Array,
  replica_gate_SKN: Array,
  replica_up_SKN: Array,
  group_size_P: Array,
  activation: Activation,
  *,
  keep_hidden: bool,
  tuning: Tuning | None = None,
) -> tuple[Array, Array | None, Array | None]:
  """``activation(rows gate) * (rows up)`` for each group of rows by the weights of its slot.

  Both projections are rounded to bfloat16, as if they were stored; activation and product of the
  rounded values are computed in float32 and rounded once.

  Args:
    rows_CK: ``[C, K]`` bfloat16, grouped by slot from row 0 on. Rows at or beyond the sum of
      the group sizes may hold anything, NaN included.
    home_gate_MKN: ``[M, K, N]`` bfloat16.
    home_up_MKN: ``[M, K, N]`` bfloat16.
    replica_gate_SKN: ``[S, K, N]`` bfloat16; S may be 0.
    replica_up_SKN: ``[S, K, N]`` bfloat16.
    group_size_P: ``[M + S]`` int32, rows per slot; the sum is at most C.
    activation: elementwise, given float32.
    keep_hidden: whether to return the projections, too, which the backward pass needs.
    tuning: how the kernel is laid out.

  Returns:
    ``[C, N]`` bfloat16: the product, and the projections by gate and up or None. Rows at or
    beyond the sum of the group sizes are not written: they hold anything.

  Raises:
    NotImplementedError: an activation that the kernel cannot compute, or as ``grouped_matmul``.
    ValueError: shapes that do not fit together.
  """
  elementwise(activation, (64, 64))  # only whether it is

  def inner(gate: Any, up: Any) -> Any:
    activated = elementwise(activation, gate.shape)(gate.astype(jnp.float32))
    return (activated * up.astype(jnp.float32)).astype(jnp.bfloat16)

  hidden = (lambda gate, up: gate, lambda gate, up: up)
  weights = (home_gate_MKN, home_up_MKN), (replica_gate_SKN, replica_up_SKN)
  (inner_CN, *hidden_CN), _ = multiply_rows(
    [Contraction(rows_CK, *weights)],
    group_size_P,
    transpose_rhs=False,
    results=[inner, *(hidden if keep_hidden else ())],
    tuning=tuning,
    kernel_name="gated_matmul",
    approx_math=True,  # of 11 bits or more: the result has 8
  )
  gate_CN, up_CN = hidden_CN or (None, None)
  return inner_CN, gate_CN, up_CN


def elementwise(activation: Activation, shape: tuple[int, ...]) -> Activation:
  """The activation of float32 of this shape, as operations that Mosaic GPU has.

  Calls are inlined: it knows no custom derivatives.

  Raises:
    NotImplementedError: an operation that it does not have, or that is not elementwise.
  """
  closed: Any = jax.make_jaxpr(activation)(jax.ShapeDtypeStruct(shape, jnp.float32))
  if [(x.shape, x.dtype) for x in closed.out_avals] != [(shape, jnp.float32)]:
    raise NotImplementedError(
      f"activation: expected float32 of its argument's shape, got {closed.out_avals}"
    )
  _expect_elementwise(closed, shape)
  return lambda x: _evaluate(closed, [x])[0]


def _inlined(eqn: core.JaxprEqn) -> Any:
  """The closed jaxpr that an operation calls, if all that it does is to call, else ``None``."""
  for name in ("jaxpr", "call_jaxpr"):
    inner = eqn.params.get(name)
    if hasattr(inner, "jaxpr") and hasattr(inner, "consts"):
      return inner
  return None


def _expect_elementwise(closed: Any, shape: tuple[int, ...]) -> None:
  if closed.consts:
    raise NotImplementedError(f"activation: expected no captured arrays, got {closed.consts}")
  shapes = {x.aval.shape for eqn in closed.jaxpr.eqns for x in eqn.outvars}
  if strange := sorted(shapes - {(), shape}):
    raise NotImplementedError(f"activation: expected scalars and arrays of {shape}, got {strange}")
  for eqn in closed.jaxpr.eqns:
    name, inner = eqn.primitive.name, _inlined(eqn)
    if inner is not None:
      _expect_elementwise(inner, shape)
    elif name not in _ELEMENTWISE and (name != "broadcast_in_dim" or eqn.invars[0].aval.shape):
      raise NotImplementedError(f"activation: expected elementwise operations, got {name}")


def _evaluate(closed: Any, args: list[Any]) -> list[Any]:
  jaxpr = closed.jaxpr
  values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))

  def read(x: Any) -> Any:
    return x.val if isinstance(x, core.Literal) else values[x]

  for eqn in jaxpr.eqns:
    operands = [read(x) for x in eqn.invars]
    if (inner := _inlined(eqn)) is not None:
      results = _evaluate(inner, operands)
    else:
      results = eqn.primitive.bind(*operands, **eqn.params)
      results = results if eqn.primitive.multiple_results else [results]
    values |= zip(eqn.outvars, results, strict=True)
  return [read(x) for x in jaxpr.outvars]
