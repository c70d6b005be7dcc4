"""The contenders of the bench of a layer, and the calls that it times."""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ultraep_jax import strategies
from ultraep_jax.bench.layer import peers
from ultraep_jax.bench.layer.problem import AXIS, Problem
from ultraep_jax.config import BalanceConfig
from ultraep_jax.moe import moe
from ultraep_jax.planning.sizes import Sizes, settle
from ultraep_jax.strategies import eplb
from ultraep_jax.types import Array, ExpertWeights, PlanCost

# By quota, with the objective of the flags and with "time"; EPLB by the window of past loads.
VARIANTS = ("none", "quota", "quota-time", "eplb", "ideal", "plain", "tuned")
ELSEWHERE = ("nodes", "portable")  # by quota, as if each rank were a node by itself; in plain JAX
BALANCED = ("quota", "quota-time", "eplb", *ELSEWHERE)
SLACK = 1.0625

Factor = float | Literal["auto"]
Layer = Callable[[Array, Array, Array, ExpertWeights, eplb.History], tuple[Array, Any]]


def layer(
  variant: str, problem: Problem, args: argparse.Namespace, capacity_factor: Factor | None = None
) -> Layer:
  """The layer of a variant on one rank's part; also returns what it did, if it says so.

  Args:
    variant: one of ``VARIANTS`` or ``ELSEWHERE``.
    problem: whose loads the buffers are made for.
    args: slots, objective and implementation.
    capacity_factor: of the buffers; ``None``: what the variant needs.
  """
  if variant in peers.LAYERS:
    buffers = peers.Buffers.of(problem.load_NGE)

    def peer(
      x: Array, index: Array, gate: Array, weights: ExpertWeights, state: eplb.History
    ) -> tuple[Array, None]:
      del state
      return peers.LAYERS[variant](x, index, gate, weights, buffers, AXIS), None

    return peer
  config = config_of(variant, args, capacity_factor or capacity(variant, problem, args))

  def ours(
    x: Array, index: Array, gate: Array, weights: ExpertWeights, state: eplb.History
  ) -> tuple[Array, Any]:
    return moe(x, index, gate, weights, config=with_history(config, variant, state), axis_name=AXIS)

  return ours


def config_of(variant: str, args: argparse.Namespace, capacity_factor: Factor) -> BalanceConfig:
  """The configuration of one of our layers; EPLB's still lacks its history."""
  strategy = "quota" if variant in BALANCED else variant
  return BalanceConfig(
    replica_slots=args.slots,
    strategy="none" if variant == "eplb" else strategy,
    objective="time" if variant == "quota-time" else args.objective,
    implementation="portable" if variant == "portable" else args.implementation,
    node_size=1 if variant == "nodes" else "auto",
    domain_size=None if variant == "nodes" else "auto",
    dispatch_dtype=args.dispatch_dtype,
    capacity_factor=capacity_factor,
  )


def with_history(config: BalanceConfig, variant: str, state: eplb.History) -> BalanceConfig:
  return dataclasses.replace(config, strategy=eplb.planner(state)) if variant == "eplb" else config


def capacity(variant: str, problem: Problem, args: argparse.Namespace) -> Factor:
  """``capacity_factor``, made to measure for those that leave a rank busier than others."""
  if variant not in ("none", "eplb"):
    return "auto"
  return max(SLACK, planned(variant, problem, args))


def planned(variant: str, problem: Problem, args: argparse.Namespace) -> float:
  """Busiest over mean rank as a variant plans it, the worst of all loads."""
  if variant == "none":
    return problem.busiest
  if variant == "ideal":
    return 1.0
  config = config_of(variant, args, "auto")
  cost = settled(problem, config).cost.plan
  mean = float(problem.load_NGE[0].sum(axis=1).mean())
  rows_N = [
    int(_busiest(jnp.asarray(load_GE), problem.state(n), config, variant, cost))
    for n, load_GE in enumerate(problem.load_NGE)
  ]
  return max(rows_N) / mean


def settled(problem: Problem, config: BalanceConfig, direction: str = "forward") -> Sizes:
  """The sizes of the program of such a configuration."""
  arrays, ranks = problem.arrays, problem.load_NGE.shape[1]
  shape = problem.tokens, arrays.gate.shape[1], ranks, arrays.x.dtype
  return sizes_of_layer(config, arrays.weights, *shape, direction)


def sizes_of_layer(
  config: BalanceConfig,
  weights: ExpertWeights,
  tokens: int,
  top_k: int,
  ranks: int,
  dtype: jnp.dtype,
  direction: str,
) -> Sizes:
  """The same, with the weights of all ranks and the tokens of one."""
  of_rank = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] // ranks, *leaf.shape[1:]), leaf.dtype),
    weights,
  )
  return settle(config, tokens=tokens, top_k=top_k, num_ranks=ranks, dtype=dtype, weights=of_rank)


@functools.partial(jax.jit, static_argnames=("config", "variant", "cost"))
def _busiest(
  load_GE: Array, state: eplb.History, config: BalanceConfig, variant: str, cost: PlanCost
) -> Array:
  strategy = strategies.resolve(with_history(config, variant, state).strategy)
  return jnp.max(jnp.sum(strategy.plan(load_GE, config, cost).quota, axis=0))


def one_call(apply: Layer, direction: str) -> Any:
  """``(i, x, index, gate, weights, history) -> results`` of the i-th call."""

  def forward(
    i: Array, x: Array, index: Array, gate: Array, weights: ExpertWeights, history: eplb.History
  ) -> Any:
    index_TK, state = jax.tree.map(lambda leaf: leaf[i % leaf.shape[0]], (index, history))
    return apply(x, index_TK, gate, weights, state)[0]

  def train(
    i: Array, x: Array, index: Array, gate: Array, weights: ExpertWeights, history: eplb.History
  ) -> Any:
    def run_layer(x: Array, gate: Array, weights: ExpertWeights) -> Array:
      return forward(i, x, index, gate, weights, history)

    y, vjp = jax.vjp(run_layer, x, gate, weights)
    # Of half the sum of squares: backward waits for forward, as it does under any loss.
    return y, vjp(y)

  return forward if direction == "forward" else train


def bound(load_GE: np.ndarray, slots: int) -> float:
  """Busiest over mean rank that no plan with S replica slots a rank can go below.

  A rank has M experts and the others S slots each, so at least M - S (G - 1) of its experts have
  no copy, and it keeps what these have: at the least, the load of the smallest of them.
  """
  ranks, experts = load_GE.shape
  load_GM = np.sort(load_GE.sum(axis=0).reshape(ranks, experts // ranks), axis=1)
  kept = max(experts // ranks - slots * (ranks - 1), 0)
  mean = load_GE.sum() / ranks
  return float(max(-(-load_GE.sum() // ranks), load_GM[:, :kept].sum(axis=1).max()) / mean)
