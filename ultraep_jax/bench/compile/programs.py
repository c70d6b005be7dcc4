"""What is compiled: every operation's kernels by themselves, and the layer."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels as kernels
from ultraep_jax.activations import clamped_swiglu, swiglu
from ultraep_jax.bench.layer.problem import AXIS, SHAPES
from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning import search
from ultraep_jax.planning.capacity import row_capacity
from ultraep_jax.sharded import sharded_moe
from ultraep_jax.types import Array, ExpertWeights

WIDTH, INNER, TOP_K, EXPERTS = SHAPES["qwen3-30b"]
TOKENS, SLOTS, RANKS = 8192, 8, 2
HOME = EXPERTS // RANKS
CAPACITY = row_capacity(TOKENS, TOP_K, RANKS, BalanceConfig())

Program = tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]
_Shape = tuple[Sequence[int], Any]
_OnMesh = Callable[[jax.sharding.Mesh], tuple[Callable[..., Any], Sequence[_Shape]]]


def build(name: str, devices: Sequence[Any]) -> Program:
  """A function of global arrays on the devices, and what they are.

  Args:
    name: one of ``NAMES``.
    devices: ``RANKS``, described or not.
  """
  mesh = jax.sharding.Mesh(np.array(devices), (AXIS,))
  function, local = _PROGRAMS[name](mesh)
  arguments = [_global(mesh, shape, dtype) for shape, dtype in local]
  return function, arguments


def _global(mesh: jax.sharding.Mesh, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
  first, *others = shape
  return jax.ShapeDtypeStruct(
    (first * mesh.size, *others), dtype, sharding=NamedSharding(mesh, P(AXIS))
  )


def _on_ranks(operation: Callable[..., Any], *local: _Shape) -> _OnMesh:
  """An operation of one rank's arrays."""

  def on(mesh: jax.sharding.Mesh) -> tuple[Callable[..., Any], Sequence[_Shape]]:
    return jax.shard_map(
      operation, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    ), local

  return on


def _replicated(value: Array) -> Array:
  """The same matrix on all ranks, of a row of each."""
  return jax.lax.all_gather(value, AXIS, tiled=True)


def _plan(load: Array, cost: Array) -> list[Array]:
  return list(
    kernels.plan_quota(
      _replicated(load),
      domain_size=jax.lax.axis_size(AXIS),
      num_slots=SLOTS,
      min_tokens=1,
      transfer="auto",
      by_time=True,
      target=None,
      cost=_replicated(cost)[:4],
      steps=search.STEPS,
    )
  )


def _route(index: Array, load: Array, slots: Array, quota: Array) -> list[Array]:
  size = jax.lax.axis_size(AXIS)
  quota = jnp.tile(quota, (1, size))[: load.shape[1]]
  rank = jax.lax.axis_index(AXIS)
  routed = kernels.route_rows(index, _replicated(load), _replicated(slots), quota, rank)
  return list(routed)


def _replicate(weights: Array, slots: Array) -> list[Array]:
  placed = _replicated(slots)
  return kernels.replicate([weights], placed, placed, axis_name=AXIS)


def _reduce(replicas: Array, homes: Array, slots: Array) -> list[Array]:
  placed = _replicated(slots)
  return kernels.reduce_replicas([replicas], [homes], placed, placed, axis_name=AXIS)


def _dispatch(tokens: Array, dest: Array, row: Array) -> kernels.Dispatched:
  gate = row.astype(jnp.float32)
  return kernels.dispatch([tokens], dest, row, gate, capacity=CAPACITY, axis_name=AXIS)


def _dispatch_scaled(tokens: Array, scales: Array, dest: Array, row: Array) -> kernels.Dispatched:
  gate = row.astype(jnp.float32)
  return kernels.dispatch_scaled(
    tokens, scales, dest, row, gate, dtype=jnp.bfloat16, capacity=CAPACITY, axis_name=AXIS
  )


def _gather(load: Array) -> tuple[Array, Array]:
  loads, rank = kernels.gather(load, axis_name=AXIS)
  return loads, rank[None]  # a scalar has no axis for the mesh


def _combine(rows: Array, gate: Array, dest: Array, row: Array) -> Array:
  received, gates = jax.lax.all_gather((row, gate), AXIS)
  return kernels.combine(rows, gates, dest, received, axis_name=AXIS)


def _combine_values(rows: Array, value: Array, dest: Array, row: Array) -> tuple[Array, Array]:
  received = jax.lax.all_gather(row, AXIS)
  return kernels.combine_values(rows, value, dest, received, axis_name=AXIS)


def _gated(rows: Array, up: Array, replica_up: Array, sizes: Array) -> list[Array]:
  home, replica = (kernels.Projections((each, each)) for each in (up, replica_up))
  gated = kernels.gated_matmul(rows, home, replica, sizes, swiglu, keep_hidden=True)
  return [gated.inner_CN, *gated.hidden]


def _gated_grads(both: Array, grad: Array, gate: Array, sizes: Array) -> list[Array]:
  """Of GPT-OSS's experts, which need the most registers."""
  unit = clamped_swiglu()
  grads = kernels.gated_grads((both,), grad, gate, sizes, unit, columns="interleaved")
  return [grads.inner_CN, *grads.hidden_grad, grads.gate_grad_C]


def _rows_grad(grad: Array, up: Array, replica_up: Array, sizes: Array) -> Array:
  return kernels.grouped_matmul_sum(
    [grad, grad], [up, up], [replica_up, replica_up], sizes, transpose_rhs=True
  )


def _wgrad(rows: Array, grad: Array, sizes: Array) -> list[Array]:
  num_home = sizes.shape[0] - SLOTS
  return list(kernels.grouped_matmul_wgrad(rows, grad, sizes, num_home))


def _layer(gradients: bool, mesh: jax.sharding.Mesh) -> tuple[Callable[..., Any], Sequence[_Shape]]:
  config = BalanceConfig(implementation="auto", replica_slots=SLOTS)

  def forward(x: Array, index: Array, gate: Array, weights: ExpertWeights) -> Array:
    return sharded_moe(x, index, gate, weights, config=config, mesh=mesh)[0]

  def loss(x: Array, gate: Array, weights: ExpertWeights, index: Array) -> Array:
    return jnp.sum(forward(x, index, gate, weights).astype(jnp.float32))

  def call(x: Array, index: Array, gate: Array, up: Array, down: Array) -> Any:
    weights = ExpertWeights(up, up, down)
    if gradients:
      return jax.grad(loss, argnums=(0, 1, 2))(x, gate, weights, index)
    return forward(x, index, gate, weights)

  down = ((HOME, INNER, WIDTH), jnp.bfloat16)
  return call, [_TOKENS, _CHOICES, _GATES, _UP, down]


_TOKENS = ((TOKENS, WIDTH), jnp.bfloat16)
_CHOICES = ((TOKENS, TOP_K), jnp.int32)
_GATES = ((TOKENS, TOP_K), jnp.float32)
_LOAD = ((1, EXPERTS), jnp.int32)
_COST = ((2,), jnp.int32)  # of two ranks; of more, the first four numbers count
_SLOTS = ((1, SLOTS), jnp.int32)
_ROWS = ((CAPACITY, WIDTH), jnp.bfloat16)
_INNER = ((CAPACITY, INNER), jnp.bfloat16)
_BOTH = ((CAPACITY, 2 * INNER), jnp.bfloat16)
_ROW_GATES = ((CAPACITY,), jnp.float32)
_UP = ((HOME, WIDTH, INNER), jnp.bfloat16)
_REPLICA_UP = ((SLOTS, WIDTH, INNER), jnp.bfloat16)
_SIZES = ((HOME + SLOTS,), jnp.int32)
_GRADS = ((HOME, WIDTH, INNER), jnp.float32)
_REPLICA_GRADS = ((SLOTS, WIDTH, INNER), jnp.float32)
_BYTES = ((TOKENS, WIDTH), jnp.float8_e4m3fn)
_SCALES = ((TOKENS, kernels.num_scales(WIDTH)), jnp.float32)

_PROGRAMS: Mapping[str, _OnMesh] = {
  "choose": _on_ranks(
    lambda scores: kernels.top_k(scores, TOP_K), ((TOKENS, EXPERTS), jnp.float32)
  ),
  "plan": _on_ranks(_plan, _LOAD, _COST),
  "route": _on_ranks(_route, _CHOICES, _LOAD, _SLOTS, ((EXPERTS, 1), jnp.int32)),
  "replicate": _on_ranks(_replicate, _UP, _SLOTS),
  "reduce": _on_ranks(_reduce, _REPLICA_GRADS, _GRADS, _SLOTS),
  "gather": _on_ranks(_gather, ((EXPERTS,), jnp.int32)),
  "dispatch": _on_ranks(_dispatch, _TOKENS, _CHOICES, _CHOICES),
  "dispatch fp8": _on_ranks(_dispatch_scaled, _BYTES, _SCALES, _CHOICES, _CHOICES),
  "combine": _on_ranks(_combine, _ROWS, _GATES, _CHOICES, _CHOICES),
  "combine values": _on_ranks(_combine_values, _ROWS, _ROW_GATES, _CHOICES, _CHOICES),
  "matmul": _on_ranks(kernels.grouped_matmul, _ROWS, _UP, _REPLICA_UP, _SIZES),
  "matmul gated": _on_ranks(_gated, _ROWS, _UP, _REPLICA_UP, _SIZES),
  "gated gradients": _on_ranks(_gated_grads, _BOTH, _INNER, _ROW_GATES, _SIZES),
  "matmul rows' gradient": _on_ranks(_rows_grad, _INNER, _UP, _REPLICA_UP, _SIZES),
  "matmul weights' gradient": _on_ranks(_wgrad, _ROWS, _INNER, _SIZES),
  "layer": functools.partial(_layer, False),
  "layer and gradients": functools.partial(_layer, True),
}
NAMES = tuple(_PROGRAMS)
