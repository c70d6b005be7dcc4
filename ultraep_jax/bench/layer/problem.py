"""What the bench of a layer works on: sizes, sharded arrays, loads that change with each call."""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ultraep_jax import testing
from ultraep_jax.config import BalanceConfig
from ultraep_jax.simulate import published, traffic
from ultraep_jax.simulate.shapes import SHAPES as SHAPES
from ultraep_jax.simulate.shapes import Shape as Shape
from ultraep_jax.simulate.shapes import shape_of as shape_of
from ultraep_jax.strategies import eplb
from ultraep_jax.tools import processes
from ultraep_jax.types import Array, ExpertWeights

DATA, AXIS = "data", "expert"
LOADS = ("zipf", "flat", "drifting")


LARGE = ("qwen3-235b", "glm4.5-106b", "deepseek-v3")
TUNED = (*LARGE, "qwen3-30b")


def scaled(name: str, args: argparse.Namespace) -> Shape:
  shape = SHAPES[name].narrowed(args.scale)
  return shape._replace(top_k=args.top_k or shape.top_k)


def mesh_of(devices: Sequence[Any], data: int = 1) -> jax.sharding.Mesh:
  """Of experts, or of several such meshes beside one another, which share weights alone."""
  sizes, names = ((data, -1), (DATA, AXIS)) if data > 1 else ((-1,), (AXIS,))
  axis_types = (jax.sharding.AxisType.Auto,) * len(names)
  array = np.array(devices).reshape(sizes)
  return jax.sharding.Mesh(array, names, axis_types=axis_types)  # make_mesh refuses several nodes


def tokens_spec(mesh: jax.sharding.Mesh) -> P:
  """Of arrays whose leading axis has every rank's tokens."""
  return P(mesh.axis_names)


def specs(mesh: jax.sharding.Mesh) -> tuple[P, ...]:
  """Of a problem's arguments, on the mesh."""
  tokens = tokens_spec(mesh)
  return tokens, P(None, *tokens), tokens, P(AXIS), P()


def random_normal(
  mesh: jax.sharding.Mesh,
  seed: int,
  scale: float,
  *sizes: int,
  spec: P | None = None,
  dtype: DTypeLike = jnp.bfloat16,
) -> Array:
  """The leading axis is over the experts' ranks; each rank makes its own part."""
  make = _random_normal(sizes, NamedSharding(mesh, spec or P(AXIS)), jnp.dtype(dtype))
  return make(jax.random.key(seed), scale)


@functools.cache  # else every array has a program of its own
def _random_normal(
  sizes: tuple[int, ...], sharding: NamedSharding, dtype: jnp.dtype
) -> Callable[[Array, float], Array]:
  @functools.partial(jax.jit, out_shardings=sharding)
  def make(key: Array, scale: float) -> Array:
    return (scale * jax.random.normal(key, sizes)).astype(dtype)

  return make


@dataclasses.dataclass(frozen=True)
class Arrays:
  """What all loads of a shape share, sharded."""

  x: Array
  gate: Array
  weights: ExpertWeights

  @classmethod
  def make(
    cls,
    mesh: jax.sharding.Mesh,
    shape: Shape,
    args: argparse.Namespace,
    dtype: DTypeLike = jnp.bfloat16,
  ) -> "Arrays":
    """Tokens in bfloat16, weights in ``dtype``."""
    width, inner, tokens = shape.width, shape.inner, tokens_spec(mesh)
    experts = args.experts or 16 * mesh.shape[AXIS]

    normal = functools.partial(random_normal, mesh)
    weight = functools.partial(normal, dtype=dtype)
    weights = ExpertWeights(
      weight(1, width**-0.5, experts, width, inner),
      weight(2, width**-0.5, experts, width, inner),
      weight(3, inner**-0.5, experts, inner, width),
    )
    total = mesh.size * args.tokens
    gate = np.random.default_rng(0).random((total, shape.top_k)).astype(np.float32)
    return cls(
      normal(0, 1.0, total, width, spec=tokens),
      processes.put(gate, NamedSharding(mesh, tokens)),
      weights,
    )


@dataclasses.dataclass(frozen=True)
class Problem:
  """The arrays that all variants work on, and the loads on the host.

  Attributes:
    load_NGE: the loads that calls cycle through. On a mesh with a data axis each call has as many
      of them as that axis has ranks, and G counts ranks of the other.
    index: ``[steps, ranks * T, K]`` int32, tokens with these loads.
    history: what EPLB knew before each of the N, leaves with a leading axis N.
    arrays: the rest.
  """

  load_NGE: np.ndarray
  index: Array
  history: eplb.History
  arrays: Arrays

  @classmethod
  def make(
    cls, mesh: jax.sharding.Mesh, arrays: Arrays, ratio: float, args: argparse.Namespace
  ) -> "Problem":
    top_k, experts = arrays.gate.shape[1], arrays.weights.wo.shape[0]
    ranks = mesh.shape[AXIS]
    load_WGE, load_NGE = make_loads(ratio, experts, ranks, top_k, args, mesh.size // ranks)
    index = [
      testing.expert_indices(seed, load_GE, top_k).reshape(-1, top_k)
      for seed, load_GE in enumerate(load_NGE)
    ]
    history = histories(load_WGE.sum(axis=1), load_NGE.sum(axis=1), ranks, args.slots)
    index = np.stack(index).astype(np.int32).reshape(args.steps, -1, top_k)
    sharded = processes.put(index, NamedSharding(mesh, specs(mesh)[1]))
    return cls(load_NGE, sharded, processes.put(history, NamedSharding(mesh, P())), arrays)

  @property
  def busiest(self) -> float:
    """Busiest over mean rank, the worst of all loads."""
    steps, ranks, experts = self.load_NGE.shape
    rank_NG = self.load_NGE.sum(axis=1).reshape(steps, ranks, experts // ranks).sum(-1)
    return float((rank_NG.max(axis=1) / rank_NG.mean(axis=1)).max())

  @property
  def tokens(self) -> int:
    """T, of each rank."""
    steps, tokens, _ = self.index.shape
    loads, ranks, _ = self.load_NGE.shape
    return steps * tokens // (loads * ranks)

  def state(self, n: int) -> eplb.History:
    """What EPLB knew before the n-th load."""
    return jax.tree.map(lambda leaf: leaf[n], self.history)

  @property
  def arguments(self) -> tuple[Any, ...]:
    a = self.arrays
    return a.x, self.index, a.gate, a.weights, self.history


def make_loads(
  ratio: float, experts: int, ranks: int, top_k: int, args: argparse.Namespace, data: int = 1
) -> tuple[np.ndarray, np.ndarray]:
  """A window of past loads ``[W, G, E]``, and those to measure, ``[steps * data, G, E]``.

  ``zipf`` and ``flat`` shuffle every step, so that the past says nothing. ``drifting`` changes as
  in the simulator's training, and has the ratio on average only.
  """
  here = args.steps * data
  steps = args.window + here
  sizes = experts, ranks, args.tokens, top_k
  if ratio == 1.0:
    loads = np.stack([testing.balanced_loads(seed, *sizes) for seed in range(steps)])
  elif args.loads == "drifting":
    loads = traffic.generate_loads(
      0,
      published.training_traffic(ratio),
      num_experts=experts,
      num_ranks=ranks,
      tokens=args.tokens,
      top_k=top_k,
      steps=steps,
    )[:, 0]
  else:
    make = testing.zipf_loads if args.loads == "zipf" else testing.flat_loads
    loads = np.stack([make(seed, *sizes, ratio) for seed in range(steps)])
  # The first seeds are measured, whatever the window; the past of drifting loads comes first.
  measured = slice(args.window, None) if args.loads == "drifting" else slice(here)
  past = slice(args.window) if args.loads == "drifting" else slice(here, None)
  return loads[past], loads[measured]


@functools.partial(jax.jit, static_argnames=("ranks", "slots"))
def histories(
  past_WE: Array, load_NE: Array, ranks: int, slots: int | Literal["auto"]
) -> eplb.History:
  """EPLB's state before each of N batches, which come after a window of W.

  It places copies by the whole window once that is over, and again W batches later.
  """
  config = BalanceConfig(replica_slots=slots)
  window, experts = past_WE.shape

  def step(state: eplb.History, load_E: Array) -> tuple[eplb.History, eplb.History]:
    return eplb.update(state, load_E, config, period=window), state

  start = eplb.init(experts, ranks, config)
  _, states = lax.scan(step, start, jnp.concatenate([past_WE, load_NE]))
  return jax.tree.map(lambda leaf: leaf[window:], states)
