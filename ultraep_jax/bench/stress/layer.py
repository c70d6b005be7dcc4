"""The whole layer on kernels beside the portable one: on two mesh axes, in domains, in training.

Where a mesh has two ``data`` groups, one group's loads need several rounds and the other's one.
Further rounds add to the gradients of the first, so one mesh is compared with room for all rows as
well.
"""

import concurrent.futures
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ultraep_jax import testing
from ultraep_jax.bench.kernels.portable import AXIS
from ultraep_jax.config import BalanceConfig, Implementation
from ultraep_jax.planning.capacity import row_capacity
from ultraep_jax.sharded import sharded_moe
from ultraep_jax.tools import processes
from ultraep_jax.types import Array, ExpertWeights, LayerStats

Say = Callable[[str], None]

TOLERANCE = 1e-2  # relative, of bfloat16 results
TOP_K, HOME = 4, 8
_LAYERS, _MICROBATCHES, _STEPS = 2, 2, 2
_BY_TOKEN = ("data", AXIS)
_RATE = 0.01  # of a parameter's norm


class Batch(NamedTuple):
  """Tokens of the whole mesh, and choices of one layer or, with a leading axis, of several."""

  x: Array
  index: Array
  gate: Array


class Problem(NamedTuple):
  """A mesh of ``data`` and ``expert`` axes, and sizes of a layer on it.

  Attributes:
    domain_size: ``None``: one domain.
    room: for all rows of all ranks, so that there is one round whatever the loads.
  """

  mesh: jax.sharding.Mesh
  tokens: int
  width: int
  inner: int
  seed: int
  domain_size: int | None = None
  room: bool = False

  @classmethod
  def make(
    cls, devices: Sequence[Any], data: int, scale: int, seed: int, domain_size: int | None = None
  ) -> "Problem":
    sizes = (data, len(devices) // data)
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh(sizes, _BY_TOKEN, axis_types, devices=devices)
    tokens, width, inner = (max(size // scale, 16) for size in (1024, 512, 256))
    return cls(mesh, tokens, width, inner, seed, domain_size)

  @property
  def groups_and_ranks(self) -> tuple[int, int]:
    return self.mesh.shape["data"], self.mesh.shape[AXIS]

  @property
  def capacity(self) -> int:
    return row_capacity(self.tokens, TOP_K, self.groups_and_ranks[1], self.config("portable"))

  def config(self, implementation: Implementation) -> BalanceConfig:
    return BalanceConfig(
      replica_slots=1,
      objective="balance",
      capacity_factor=float(self.groups_and_ranks[1]) if self.room else 1.0,
      domain_size=self.domain_size,
      implementation=implementation,
    )

  def place(self, value: Any, *axes: Any) -> Array:
    return processes.put(value, NamedSharding(self.mesh, P(*axes)))

  def index(self, seed: int, hot: int) -> np.ndarray:
    """Choices ``[N, K]``; all of group ``hot`` are of experts of its first rank. Some masked."""
    groups, ranks = self.groups_and_ranks
    sizes = (HOME * ranks, ranks, self.tokens, TOP_K)
    parts = []
    for group in range(groups):
      load_GE = testing.balanced_loads(seed, *sizes)
      if group == hot:
        load_GE = testing.flat_loads(seed, *sizes, ratio=ranks, shuffle=False)
      parts.append(testing.expert_indices(seed + group, load_GE, TOP_K).reshape(-1, TOP_K))
    index = np.concatenate(parts)
    masked = np.random.default_rng(seed).random(index.shape) < 0.03
    return np.where(masked, -1, index).astype(np.int32)

  def batch(self, *lead: int) -> Batch:
    """One batch, or microbatches of several layers: ``lead`` is their numbers."""
    groups, _ = self.groups_and_ranks
    rng = np.random.default_rng(self.seed)
    count = int(np.prod(lead, dtype=int))
    parts = [
      self.index(self.seed + i, i // max(lead[-1:], default=1) % groups) for i in range(count)
    ]
    index = np.stack(parts).reshape(*lead, -1, TOP_K)
    gate = rng.random(index.shape).astype(np.float32)
    x = rng.standard_normal((*lead[:1], index.shape[-2], self.width), np.float32)
    none = [None] * len(lead)
    return Batch(
      self.place(x.astype(jnp.bfloat16), *none[:1], _BY_TOKEN),
      self.place(index, *none, _BY_TOKEN),
      self.place(gate, *none, _BY_TOKEN),
    )

  def weights(self, dtype: Any, *lead: int) -> ExpertWeights:
    """Random ones, the same at every call."""
    experts, width, inner = HOME * self.groups_and_ranks[1], self.width, self.inner
    rng = np.random.default_rng(self.seed + 1)

    def normal(*sizes: int) -> Array:
      value = rng.standard_normal((*lead, experts, *sizes), np.float32) * sizes[0] ** -0.5
      return self.place(value.astype(dtype), *[None] * len(lead), AXIS)

    return ExpertWeights(normal(width, inner), normal(width, inner), normal(inner, width))


def layer(
  devices: Sequence[Any], scale: int, seed: int, implementation: Implementation, say: Say
) -> list[str]:
  """Compares output, gradients and statistics on all meshes; returns what is wrong."""
  meshes: list[tuple[int, int | None]] = [(1, None)]
  if len(devices) % 2 == 0:
    meshes.append((2, None))
  if len(devices) % 4 == 0:
    meshes.append((1, 2))
  problems = [Problem.make(devices, data, scale, seed, domain) for data, domain in meshes]
  problems.append(problems[0]._replace(room=True))
  calls: list[tuple[Any, tuple[Any, ...]]] = []
  for problem in problems:
    batch = problem.batch()
    arguments = (batch, problem.weights(jnp.bfloat16), jnp.flip(batch.x, axis=0))
    for chosen in (implementation, "portable"):
      calls.append((value_and_grads(problem, chosen), arguments))
  runs = zip(_compiled(calls, say), [arguments for _, arguments in calls], strict=True)
  wrong = []
  for problem in problems:
    name = f"mesh {problem.groups_and_ranks}"
    if problem.domain_size is not None:
      name += f" in domains of {problem.domain_size}"
    if problem.room:
      name += " with room"
    results = []
    for chosen in (implementation, "portable"):
      run, arguments = next(runs)
      results.append(processes.gather(run(*arguments)))
      say(f"{name}, {chosen}: ran")
    stats: LayerStats = results[0][-1]
    most = [int(load.max()) for load in stats.load_after_G]
    say(f"busiest ranks {most}, capacity {problem.capacity}, rounds {stats.rounds.tolist()}")
    found = compare(*results)
    if problem.room:
      if len(devices) > 1 and not stats.replicas.all():
        found.append("expected copies, got none")
    elif problem.groups_and_ranks[1] > 1 and not most[0] > problem.capacity >= max(most[1:] or [0]):
      found.append(f"expected several rounds in the first group only, got loads {most}")
    wrong += (f"{name}: {text}" for text in found)
  return wrong


def _compiled(calls: Sequence[tuple[Any, tuple[Any, ...]]], say: Say) -> list[Any]:
  """Jitted functions, compiled for their arguments at the same time: it takes the longest."""
  start = time.perf_counter()
  lowered = {function: function.lower(*arguments) for function, arguments in calls}
  with concurrent.futures.ThreadPoolExecutor() as pool:
    compiled = pool.map(lambda each: each.compile(), lowered.values())
  programs = dict(zip(lowered, compiled, strict=True))
  say(f"{len(programs)} programs compiled in {time.perf_counter() - start:.1f} s")
  return [programs[function] for function, _ in calls]


def value_and_grads(problem: Problem, implementation: Implementation) -> Any:
  """A jitted ``(batch, weights, cotangent) -> y, gradients of x, gate and weights, statistics``."""
  config = problem.config(implementation)

  def run(batch: Batch, weights: ExpertWeights, cotangent: Array) -> Any:
    def apply(x: Array, gate: Array, weights: ExpertWeights) -> tuple[Array, LayerStats]:
      return sharded_moe(x, batch.index, gate, weights, config=config, mesh=problem.mesh)

    y, vjp, stats = jax.vjp(apply, batch.x, batch.gate, weights, has_aux=True)
    return y, vjp(cotangent), stats

  return jax.jit(run)


def scan(
  devices: Sequence[Any], scale: int, seed: int, implementation: Implementation, say: Say
) -> list[str]:
  """Compares layers in a scan, whose bfloat16 weights are slices of what it goes through.

  With room for all rows there is one round and nothing else reads the weights: XLA hands the
  slices to kernels without a copy, and wraps these for it.
  """
  problem = Problem.make(devices, 1, scale, seed)._replace(room=True)
  batch = jax.tree.map(lambda leaf: leaf[0], problem.batch(1, _LAYERS))
  arguments = problem.weights(jnp.bfloat16, _LAYERS), batch
  implementations: tuple[Implementation, ...] = (implementation, "portable")
  calls = [(residual_layers(problem, chosen), arguments) for chosen in implementations]
  results = [
    processes.gather(run(*arguments))
    for run, (_, arguments) in zip(_compiled(calls, say), calls, strict=True)
  ]
  stats: LayerStats = results[0][1]
  say(f"mesh {problem.groups_and_ranks}: {stats.replicas.ravel().tolist()} copies a layer")
  found = compare(*results)
  if len(devices) > 1 and not (stats.replicas > 0).all():
    found.append(f"expected copies in every layer, got {stats.replicas.tolist()}")
  return found


def residual_layers(problem: Problem, implementation: Implementation) -> Any:
  """A jitted ``(weights, batch) -> x, statistics``."""
  return jax.jit(functools.partial(apply_layers, problem.mesh, problem.config(implementation)))


def apply_layers(
  mesh: jax.sharding.Mesh, config: BalanceConfig, weights: ExpertWeights, batch: Batch
) -> tuple[Array, LayerStats]:
  """Residual layers in a scan, and the statistics of each."""

  @jax.checkpoint
  def block(x: Array, layer: Any) -> tuple[Array, LayerStats]:
    y, stats = sharded_moe(x, *layer, config=config, mesh=mesh)
    return x + y, stats

  return lax.scan(block, batch.x, (batch.index, batch.gate, weights))


def train(
  devices: Sequence[Any], scale: int, seed: int, implementation: Implementation, say: Say
) -> list[str]:
  """Compares what steps change: layers in a scan, made again, over microbatches, in place."""
  data = 2 if len(devices) % 2 == 0 else 1
  problem = Problem.make(devices, data, scale, seed)
  batches = problem.batch(_MICROBATCHES, _LAYERS)
  before = problem.weights(jnp.float32, _LAYERS)
  implementations: tuple[Implementation, ...] = (implementation, "portable")
  calls = [(update_step(problem, chosen), (before, batches)) for chosen in implementations]
  results = []
  for chosen, step in zip(implementations, _compiled(calls, say), strict=True):
    weights, seen = problem.weights(jnp.float32, _LAYERS), []
    for _ in range(_STEPS):
      weights, *rest = step(weights, batches)
      seen.append(rest)
    changes = jax.tree.map(jnp.subtract, weights, before)
    results.append(processes.gather((changes, seen)))
    say(f"mesh {problem.groups_and_ranks}, {chosen}: losses {np.ravel([s[0] for s in seen])}")
  return compare(*results)


def update_step(problem: Problem, implementation: Implementation) -> Any:
  """A jitted ``(weights, microbatches) -> weights, losses, statistics`` that gives up weights."""
  config = problem.config(implementation)

  def loss(weights: ExpertWeights, batch: Batch) -> tuple[Array, LayerStats]:
    x, stats = apply_layers(problem.mesh, config, weights, batch)
    return jnp.mean(jnp.square(x.astype(jnp.float32))), stats

  def step(weights: ExpertWeights, batches: Batch) -> tuple[ExpertWeights, Array, LayerStats]:
    def accumulate(total: ExpertWeights, batch: Batch) -> tuple[ExpertWeights, Any]:
      seen, grads = jax.value_and_grad(loss, has_aux=True)(weights, batch)
      return jax.tree.map(jnp.add, total, grads), seen

    zeros = jax.tree.map(jnp.zeros_like, weights)
    grads, (losses, stats) = lax.scan(accumulate, zeros, batches)

    def change(leaf: Array, grad: Array) -> Array:
      return leaf - _RATE * jnp.linalg.norm(leaf) / jnp.linalg.norm(grad) * grad

    return jax.tree.map(change, weights, grads), losses, stats

  by_expert = NamedSharding(problem.mesh, P(None, AXIS))
  return jax.jit(step, donate_argnums=0, out_shardings=(by_expert, None, None))


def compare(got: Any, want: Any) -> list[str]:
  """What of two pytrees differs: integers at all, numbers by more than ``TOLERANCE``."""
  wrong = []
  for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
    name, a, b = jax.tree_util.keystr(path), np.asarray(a), np.asarray(b)
    if np.issubdtype(a.dtype, np.integer):
      if (a != b).any():
        wrong.append(f"{name}: {a.tolist()} is not {b.tolist()}")
      continue
    a, b = a.astype(np.float64), b.astype(np.float64)
    error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)
    if not error < TOLERANCE:  # NaN too
      wrong.append(f"{name}: relative error {error:.1e}")
  return wrong
