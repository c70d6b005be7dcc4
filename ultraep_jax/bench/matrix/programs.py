"""The programs of a group of cells: the contenders, and what tells of their plans."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from ultraep_jax.bench import timing
from ultraep_jax.bench.layer.problem import AXIS, shape_of, specs
from ultraep_jax.bench.layer.variants import sizes_of_layer
from ultraep_jax.bench.matrix.cells import Group
from ultraep_jax.config import BalanceConfig
from ultraep_jax.moe import moe
from ultraep_jax.tools.errors import described
from ultraep_jax.types import Array, ExpertWeights, LayerStats

BALANCED = "balanced"
UNBALANCED = ("none", "none, worst-case buffer")
STEPS = 2  # loads of a cell, which calls cycle through
_SECONDS = {"forward": 0.04, "train": 0.12}  # about, of all calls
_FLOPS_PER_SECOND = 600e12  # as on an H200
_CALLS = (8, 40)  # at least and at most
_SCALARS = "scalars"

Compiled = Callable[..., Any]


class Programs(NamedTuple):
  """What a group's cells run.

  Attributes:
    variants: by name, ``calls`` calls of a layer, one after another.
    scalars: of the balanced layer, for the first load of its argument.
    calls: of each variant.
  """

  variants: Mapping[str, Compiled]
  scalars: Compiled
  calls: int


def variants(ranks: int, implementation: Any) -> dict[str, BalanceConfig]:
  """The default settings, and what they compete with."""
  make = functools.partial(BalanceConfig, implementation=implementation)
  return {
    BALANCED: make(),
    UNBALANCED[0]: make(strategy="none"),
    UNBALANCED[1]: make(strategy="none", capacity_factor=float(ranks)),
    "ideal": make(strategy="ideal"),
  }


def compile_group(
  mesh: jax.sharding.Mesh, group: Group, implementation: Any, arguments: Sequence[Any]
) -> Programs:
  """Compiles the group's programs side by side, as far as XLA does. It takes about 40 s on a GPU.

  A contender that fails, out of memory say, is reported and left out. Where both buffers of not
  balancing are one program it is measured once: the faster of two measurements of it would be
  faster than it is.

  Args:
    mesh: of all ranks.
    group: of the cells.
    implementation: of the layers.
    arguments: of the layer in any of the cells: x, index, gate, weights.
  """
  with futures.ThreadPoolExecutor() as pool:
    pending = {
      name: pool.submit(lowered.compile)
      for name, lowered in _lowered(mesh, group, implementation, arguments)
    }
  failed = {name: error for name, each in pending.items() if (error := each.exception())}
  for name in (BALANCED, _SCALARS):
    if name in failed:
      raise failed[name]
  for name, error in failed.items():
    print(f"{group}, {name}: {described(error)}", flush=True)
  compiled = {name: each.result() for name, each in pending.items() if name not in failed}
  return Programs(compiled, compiled.pop(_SCALARS), calls_of(group))


def _lowered(
  mesh: jax.sharding.Mesh, group: Group, implementation: Any, arguments: Sequence[Any]
) -> Iterator[tuple[str, Any]]:
  configs = variants(mesh.size, implementation)
  default, worst_case = (_buffer(configs[name], group, arguments, mesh.size) for name in UNBALANCED)
  if default == worst_case:
    del configs[UNBALANCED[1]]
  for name, config in configs.items():
    with timing.quiet():
      chained = timing.chain(_one_call(config, group.direction), calls_of(group))
      yield name, _on_mesh(mesh, lambda *a, f=chained: f(*a)[None], P(AXIS)).lower(*arguments)
  scalars = _on_mesh(mesh, _scalars(configs[BALANCED], group.direction), P())
  yield _SCALARS, scalars.lower(*of_step(arguments, 0))


def _buffer(config: BalanceConfig, group: Group, arguments: Sequence[Any], ranks: int) -> int:
  """Rows of a buffer, by which alone programs without balancing differ."""
  x, _, _, weights = arguments
  shape = group.tokens, shape_of(group.shape).top_k, ranks, x.dtype
  return sizes_of_layer(config, weights, *shape, group.direction).capacity


def of_step(arguments: Sequence[Any], step: int) -> tuple[Any, ...]:
  """Arguments with the loads of one step alone."""
  x, index, gate, weights = arguments
  return x, index[step : step + 1], gate, weights


def calls_of(group: Group) -> int:
  """Calls of a layer in one program: so many that its start takes little, as far as 40 allow it.

  Before a program's first kernel, ranks tell each other where the memory is that kernels reach.
  That is once for all calls of a loop. On two H200 it takes about 0.3 ms, and 1 ms for a balanced
  layer with gradients.
  """
  shape = shape_of(group.shape)
  flops = 6 * shape.width * shape.inner * shape.top_k * group.tokens
  flops *= 1 if group.direction == "forward" else 3
  calls = round(_SECONDS[group.direction] * _FLOPS_PER_SECOND / flops)
  return min(max(calls + calls % STEPS, _CALLS[0]), _CALLS[1])


def _on_mesh(mesh: jax.sharding.Mesh, function: Any, out_specs: Any) -> Any:
  return jax.jit(
    jax.shard_map(
      function, mesh=mesh, in_specs=specs(mesh)[:-1], out_specs=out_specs, check_vma=False
    )
  )


def _one_call(config: BalanceConfig, direction: str) -> Any:
  """``(i, x, index, gate, weights) -> results`` of the i-th call."""

  def call(i: Array, x: Array, index: Array, gate: Array, weights: ExpertWeights) -> Any:
    return _layer(config, direction, x, index[i % len(index)], gate, weights)[0]

  return call


def _scalars(config: BalanceConfig, direction: str) -> Any:
  """What the layer reports of its plan, which depends on whether gradients are taken."""

  def on_rank(x: Array, index: Array, gate: Array, weights: ExpertWeights) -> Any:
    return _layer(config, direction, x, index[0], gate, weights)[1].scalars()

  return on_rank


def _layer(
  config: BalanceConfig,
  direction: str,
  x: Array,
  index: Array,
  gate: Array,
  weights: ExpertWeights,
) -> tuple[Any, LayerStats]:
  """All results of a call, and its statistics."""

  def layer(x: Array, gate: Array, weights: ExpertWeights) -> tuple[Array, LayerStats]:
    return moe(x, index, gate, weights, config=config, axis_name=AXIS)

  if direction == "forward":
    return layer(x, gate, weights)
  y, vjp, stats = jax.vjp(layer, x, gate, weights, has_aux=True)
  return (y, vjp(y)), stats
