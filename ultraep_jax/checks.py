"""Checks of a layer's arguments at trace time; every error says what was expected and got."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ultraep_jax.config import BalanceConfig
from ultraep_jax.mesh import Mesh
from ultraep_jax.types import Array, ExpertWeights, Plan


def check_array(name: str, value: Any, shape: tuple[int | str, ...], kind: Any) -> None:
  """Raises unless ``value`` is an array of that kind and shape; letters match any size.

  Raises:
    TypeError: not an array, or a dtype that is no subtype of ``kind``.
    ValueError: another shape.
  """
  if not hasattr(value, "shape") or not hasattr(value, "dtype"):
    raise TypeError(f"{name}: expected an array, got {type(value).__name__}")
  if not jnp.issubdtype(value.dtype, kind):
    raise TypeError(f"{name}: expected a dtype of kind {kind.__name__}, got {value.dtype}")
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
  if not isinstance(config, BalanceConfig):
    raise TypeError(f"config: expected a BalanceConfig, got {type(config).__name__}")


def check_compute_dtype(name: str, value: Any) -> None:
  """Raises unless the dtype is one that the layer computes in."""
  if value.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
    raise TypeError(f"{name}: expected bfloat16, float16 or float32, got {value.dtype}")


def check_plan(plan: Any, num_experts: int, num_ranks: int) -> None:
  """Raises unless a planner's answer has the type, shapes and dtypes of a ``Plan``."""
  if not isinstance(plan, Plan):
    raise TypeError(f"strategy: expected its planner to return a Plan, got {type(plan).__name__}")
  check_array("plan.replica_expert", plan.replica_expert, (num_ranks, "S"), jnp.int32)
  slots = plan.replica_expert.shape[1]
  check_array("plan.quota", plan.quota, (num_experts, num_ranks), jnp.int32)
  check_array("plan.parent", plan.parent, (num_ranks, slots), jnp.int32)


def check_weights(weights: Any, leading: int | str, hidden: int | str = "D") -> None:
  """Raises unless ``weights`` are expert weights that fit together."""
  if not isinstance(weights, ExpertWeights):
    raise TypeError(f"weights: expected ExpertWeights, got {type(weights).__name__}")
  check_array("weights.wi_gate", weights.wi_gate, (leading, hidden, "F"), jnp.floating)
  count, width, inner = weights.wi_gate.shape
  check_array("weights.wi_up", weights.wi_up, (count, width, inner), jnp.floating)
  check_array("weights.wo", weights.wo, (count, inner, width), jnp.floating)
  if not weights.wi_gate.size:
    raise ValueError(f"weights.wi_gate: expected no empty axis, got {[count, width, inner]}")
  dtypes = {str(leaf.dtype) for leaf in weights}
  if len(dtypes) > 1:
    raise TypeError(f"weights: expected one dtype, got {sorted(dtypes)}")
  check_compute_dtype("weights", weights.wo)  # numbers in FP8 mean nothing without scales


def check_activation(activation: Any, shape: tuple[int, ...], dtype: Any) -> None:
  """Raises unless an activation keeps shapes and needs nothing but its argument.

  Raises:
    TypeError: not a function, or one that returns no floats.
    ValueError: it closes over a traced array, for which there would be no gradient, or returns
      another shape.
  """
  if not callable(activation):
    raise TypeError(f"activation: expected a function, got {type(activation).__name__}")
  argument = jax.ShapeDtypeStruct(shape, dtype)
  traced, out = jax.make_jaxpr(activation, return_shape=True)(argument)
  for value in traced.consts:
    if isinstance(value, Tracer):
      raise ValueError(
        f"activation: expected a function of its argument alone, got one that closes over a traced "
        f"{jax.typeof(value)}"
      )
  check_array("activation's result", out, shape, jnp.floating)


def check_layer(
  x: Array,
  expert_index: Array,
  gate: Array,
  weights: ExpertWeights,
  activation: Any,
  config: BalanceConfig,
  mesh: Mesh,
  axis_name: str,
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
  check_array("x", x, getattr(x, "shape", ()), jnp.floating)
  check_compute_dtype("x", x)
  check_array("expert_index", expert_index, (*x.shape[:-1], "K"), jnp.integer)
  check_array("gate", gate, expert_index.shape, jnp.floating)
  check_weights(weights, "M" if local else "E", x.shape[-1])
  check_activation(activation, (8, weights.wo.shape[1]), x.dtype)
  num_ranks = mesh.shape[axis_name]
  tokens = math.prod(x.shape[:-1]) // (1 if local else check_divides(x, mesh, token_axes))
  num_experts = weights.wo.shape[0] * (num_ranks if local else 1)
  check_sizes(tokens, expert_index.shape[-1], num_experts, num_ranks, config)
  check_expert_index(expert_index, num_experts)


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
    ValueError: no tokens, K outside [1, E], E not divisible by G, domains that do not divide
      the ranks, or more assignments than int32 counts.
  """
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
