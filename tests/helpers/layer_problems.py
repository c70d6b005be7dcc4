"""Small layers on virtual devices: their inputs, output and gradients, and what a dense MoE gives.

All problems have the same tokens and experts by default, whatever their mesh, so that one program
computes their dense references.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ultraep_jax as uep
from ultraep_jax.planning import sizes
from ultraep_jax.planning.cost import LayerCost
from ultraep_jax.planning.relay import transfer_tree
from ultraep_jax.testing import dense_moe

TOKENS, EXPERTS, WIDTH, INNER = 96, 16, 8, 12
BIASES = ("into", "out")  # of the projections, and of the matrix out
MOST_CHOICES = 8  # of the dense reference, which takes fewer as masked


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["x", "expert_index", "gate", "weights", "cotangent"],
  meta_fields=["mesh"],
)
@dataclasses.dataclass(frozen=True)
class Problem:
  """One layer's inputs on global arrays, with the mesh to run it on."""

  mesh: jax.sharding.Mesh
  x: jax.Array
  expert_index: jax.Array
  gate: jax.Array
  weights: uep.ExpertWeights
  cotangent: jax.Array


def make_mesh(ranks: int, data: int = 1, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
  shape, names = ((data, ranks), ("data", "expert")) if data > 1 else ((ranks,), ("expert",))
  return jax.make_mesh(
    shape, names, axis_types=(kind,) * len(names), devices=jax.devices()[: data * ranks]
  )


def make_problem(
  mesh: jax.sharding.Mesh,
  *,
  tokens: int = TOKENS,
  experts: int = EXPERTS,
  top_k: int = 2,
  load: str = "skewed",
  masked: bool = False,
  width: int = WIDTH,
  inner: int = INNER,
  seed: int = 0,
  dtype: jnp.dtype = jnp.float32,
  weights_dtype: jnp.dtype | None = None,
  layout: str = "apart",
  biases: tuple[str, ...] = (),
) -> Problem:
  """A layer and its tokens.

  ``tokens`` and ``experts`` are those of all ranks; ``biases`` are of ``BIASES``. Weights have the
  values that ``dtype`` has, in a dtype of their own if asked.
  """
  rng = np.random.default_rng(seed)
  if load == "balanced":
    index = (np.arange(tokens)[:, None] * top_k + np.arange(top_k)) % experts
  elif load == "all-to-one":
    index = np.broadcast_to(np.arange(top_k), (tokens, top_k))
  else:
    scores = 2.0 * rng.normal(size=experts) + rng.gumbel(size=(tokens, experts))
    index = np.argsort(-scores, axis=1)[:, :top_k]
  index = np.where(masked & (rng.random((tokens, top_k)) < 0.2), -1, index).astype(np.int32)

  def normal(*shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(scale * rng.normal(size=shape), dtype)

  weights = make_weights(normal, experts, width, layout, biases, inner)
  weights = jax.tree.map(lambda leaf: leaf.astype(weights_dtype or dtype), weights)
  gate = jnp.asarray(rng.random((tokens, top_k)), jnp.float32)
  x, cotangent = normal(tokens, width), normal(tokens, width)
  problem = Problem(mesh, x, jnp.asarray(index), gate, weights, cotangent)
  return on_mesh(problem, mesh, P(mesh.axis_names))


def make_weights(
  normal: Callable[..., Any],
  experts: int,
  width: int,
  layout: str,
  biases: tuple[str, ...],
  inner: int = INNER,
) -> uep.ExpertWeights:
  """Random weights in a form, which of ``BIASES`` among them."""
  assert {*biases} <= {*BIASES}
  cols = 2 * inner if layout in ("fused", "interleaved") else inner
  count = 2 if layout == "apart" else 1
  into = [normal(experts, width, cols, scale=width**-0.5) for _ in range(count)]
  wo = normal(experts, inner, width, scale=inner**-0.5)
  into_bias = [normal(experts, cols) if "into" in biases else None for _ in range(count)]
  wo_bias = normal(experts, width) if "out" in biases else None
  if layout == "apart":
    return uep.ExpertWeights(*into, wo, *into_bias, wo_bias)
  if layout == "ungated":
    return uep.ExpertWeights.ungated(*into, wo, *into_bias, wo_bias)
  interleaved = layout == "interleaved"
  return uep.ExpertWeights.fused(*into, wo, *into_bias, wo_bias, interleaved=interleaved)


def on_mesh(problem: Problem, mesh: jax.sharding.Mesh, by_token: P) -> Problem:
  """The same problem on another mesh."""
  local = dataclasses.replace(jax.device_get(problem), mesh=mesh)
  shardings = jax.tree.map(lambda _: NamedSharding(mesh, by_token), local)
  by_expert = NamedSharding(mesh, P("expert"))
  weights = jax.tree.map(lambda _: by_expert, local.weights)
  return jax.device_put(local, dataclasses.replace(shardings, weights=weights))


def pile_up(load_GE: jax.Array, config: uep.BalanceConfig, cost: object) -> uep.Plan:
  """A legal plan that fills rank 0's slots and gives it all of those experts' load."""
  num_ranks, num_experts = load_GE.shape
  home = num_experts // num_ranks
  load_E = jnp.sum(load_GE, axis=0, dtype=jnp.int32)
  slots = min(config.replica_slots, num_experts - home)
  replica = np.full((num_ranks, config.replica_slots), -1, np.int32)
  replica[0, :slots] = home + np.arange(slots)
  host = np.arange(num_experts) // home
  host[home : home + slots] = 0
  quota = jnp.where(host[:, None] == np.arange(num_ranks), load_E[:, None], 0)
  served = jnp.pad(load_E, (0, 1))[replica] > 0  # -1 finds the padding
  replica_expert = jnp.where(served, replica, -1)
  parent = transfer_tree(replica_expert, num_experts=num_experts, transfer="direct")
  return uep.Plan(replica_expert, quota, parent)


# Compiled in half the time: a plan that takes no search, and room for all rows of four ranks.
QUICK = uep.BalanceConfig(
  replica_slots=2, objective="balance", strategy=pile_up, capacity_factor=4.0
)


def planning_in_one_pass(*, training: bool) -> contextlib.AbstractContextManager[object]:
  """Layers by time plan with gradients alone, or forward alone, where their buffers hold all rows.

  Copies are free, and a plan in the other pass costs more than it may gain.
  """
  free, dear = uep.PlanCost(0, 0), 10**9
  fixed, training_fixed = (dear, 0) if training else (0, dear)
  cost = LayerCost(free, fixed, free, training_fixed_rows=training_fixed)
  return mock.patch.object(sizes, "layer_cost", lambda *_: cost)


def layer(
  problem: Problem, config: uep.BalanceConfig, *, check_vma: bool = True, **kwargs: Any
) -> Callable[..., Any]:
  """The layer on global arrays, in a shard_map of the test's own.

  It is the same function for the same settings, so that problems of one shape share a program.
  """
  return new_layer(problem.mesh, config, check_vma, **kwargs)


@functools.cache
def new_layer(
  mesh: jax.sharding.Mesh, config: uep.BalanceConfig, check_vma: bool, **kwargs: Any
) -> Callable[..., Any]:
  by_token = P(mesh.axis_names)

  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(by_token, by_token, by_token, P("expert")),
    out_specs=(by_token, P(mesh.axis_names[:-1] or None)),
    check_vma=check_vma,
  )
  def run(x, expert_index, gate, weights):
    y, stats = uep.moe(x, expert_index, gate, weights, config=config, **kwargs)
    return y, jax.tree.map(lambda leaf: leaf[None], stats)

  return run


def output(apply: Callable[..., Any], problem: Problem) -> Any:
  """Output and statistics."""
  with jax.set_mesh(problem.mesh):
    return _jitted(apply)(problem.x, problem.expert_index, problem.gate, problem.weights)


def value_and_grads(apply: Callable[..., Any], problem: Problem) -> Any:
  """Output, statistics and the gradients to x, gate and the weights."""
  with jax.set_mesh(problem.mesh):
    (_, (y, stats)), grads = _differentiated(apply)(
      problem.x, problem.gate, problem.weights, problem.expert_index, problem.cotangent
    )
  return y, stats, grads


@functools.cache
def _jitted(apply: Callable[..., Any]) -> Callable[..., Any]:
  return jax.jit(apply)


@functools.cache
def _differentiated(apply: Callable[..., Any]) -> Callable[..., Any]:
  def loss(x, gate, weights, expert_index, cotangent):
    y, stats = apply(x, expert_index, gate, weights)
    return jnp.sum(y.astype(jnp.float32) * cotangent.astype(jnp.float32)), (y, stats)

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


def repeated(apply: Callable[..., Any], layers: int) -> Callable[..., Any]:
  """A scan over ``layers`` residual layers whose weights grow."""

  def scanned(x, expert_index, gate, weights):
    def body(x, scale):
      y, stats = apply(x, expert_index, gate, jax.tree.map(lambda leaf: leaf * scale, weights))
      return x + y, stats

    return jax.lax.scan(body, x, jnp.arange(1.0, layers + 1))

  return scanned


def dense(problem: Problem, layers: int | None = None, activation: Any = jax.nn.silu) -> Any:
  """Output and gradients of the dense reference, on one device; of repeated layers if asked."""
  local = jax.device_get(problem)
  top_k = local.gate.shape[1]
  more = ((0, 0), (0, MOST_CHOICES - top_k))
  padded = dataclasses.replace(
    local,
    mesh=make_mesh(1),
    expert_index=np.pad(local.expert_index, more, constant_values=-1),
    gate=np.pad(local.gate, more),
  )
  y, _, (x_grad, gate_grad, weight_grads) = value_and_grads(
    _dense_layers(layers, activation), padded
  )
  return y, (x_grad, gate_grad[:, :top_k], weight_grads)


@functools.cache
def _dense_layers(layers: int | None, activation: Any) -> Callable[..., Any]:
  def apply(*args):
    return dense_moe(*args, activation), None

  return repeated(apply, layers) if layers else apply


def relative_error(got: object, expected: object) -> float:
  got, expected = jax.device_get((got, expected))
  errors = []
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    scale = np.linalg.norm(b)
    errors.append(np.linalg.norm(a - b) / scale if scale else np.linalg.norm(a))
  return float(np.max(errors))  # NaN, which no bound accepts, if any is
