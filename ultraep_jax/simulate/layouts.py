"""Experts inside each node and data across nodes, or experts across all: what both layouts cost."""

from typing import NamedTuple

import numpy as np

from ultraep_jax.devices.device import Device
from ultraep_jax.simulate.cost import GRAD_BYTES, WEIGHT_BYTES, Setting
from ultraep_jax.simulate.models import ModelShape
from ultraep_jax.simulate.replay import tokens_of
from ultraep_jax.simulate.run import simulate


class Layout(NamedTuple):
  """One layout on nodes that a network joins.

  Attributes:
    ranks: of an expert group: those of a node, or all.
    groups: expert groups, each with experts of its own.
    layer_seconds: of an MoE layer for one microbatch, of the slowest group.
    exchange_seconds: of these, dispatch and combine.
    sum_seconds: of a step, summing a layer's gradients of experts over the groups; 0 in prefill.
    imbalance: busiest over mean rank of a group, as computed.
    expert_bytes: bf16 weights of all experts of a rank, in all MoE layers.
  """

  ranks: int
  groups: int
  layer_seconds: float
  exchange_seconds: float
  sum_seconds: float
  imbalance: float
  expert_bytes: int

  def microbatch_seconds(self, microbatches: int = 1) -> float:
    """Seconds of a layer and microbatch, with its share of the step's sums of gradients."""
    return self.layer_seconds + self.sum_seconds / microbatches


def compare_layouts(
  model: ModelShape,
  device: Device,
  loads: np.ndarray,
  *,
  node_size: int,
  strategy: str = "quota (time)",
  tokens: int | None = None,
  replica_slots: int = 2,
  training: bool = True,
) -> tuple[Layout, Layout]:
  """The layout with experts inside each node, and the one with experts across nodes.

  Copies stay inside a node in both. Gradients of experts are summed in float32 by a ring through
  one rank of each node, which nothing hides.

  Args:
    model: its shape.
    device: its description; ``device.on_nodes()`` is the layer as ``"auto"`` runs it on several
      nodes. ``network_rate`` is of one rank: ``device.replace("25 GB/s", network_rate=25e9)``.
    loads: ``[step, layer, G, E]``, of all ranks of all nodes, a node after the other.
    node_size: ranks of a node; divides G.
    strategy: as for ``simulate``.
    tokens: T; ``None``: as many as a rank has in the loads on average.
    replica_slots: S.
    training: forward and backward, or forward alone.

  Raises:
    ValueError: the nodes are not whole, or as ``simulate``.
  """
  if loads.ndim != 4:
    raise ValueError(f"loads: expected [step, layer, G, E], got {list(loads.shape)}")
  steps, layers, num_ranks, num_experts = loads.shape
  if node_size < 1 or num_ranks % node_size:
    raise ValueError(f"node_size: expected a divisor of {num_ranks} ranks, got {node_size}")
  if tokens is None:  # ``simulate`` refuses what is no count
    tokens = tokens_of(loads.sum(axis=-1), model.top_k) if loads.dtype.kind in "iu" else 1

  def layout(ranks: int) -> Layout:
    setting = Setting(
      model=model,
      device=device,
      num_ranks=ranks,
      domain_size=node_size,
      tokens=tokens,
      replica_slots=replica_slots,
      training=training,
    )
    groups = num_ranks // ranks
    by_group = loads.reshape(steps, layers * groups, ranks, num_experts)
    outcome = simulate(by_group, setting, (strategy,))[strategy]
    slowest = outcome.seconds.reshape(steps, layers, groups).max(axis=-1)
    exchange = outcome.forward.exchange + outcome.backward.exchange
    weights = num_experts // ranks * model.expert_params
    summed = 2 * (groups - 1) / groups * weights * GRAD_BYTES * training
    return Layout(
      ranks=ranks,
      groups=groups,
      layer_seconds=float(slowest.mean()),
      exchange_seconds=float(exchange.mean()),
      sum_seconds=summed / device["network_rate"],
      imbalance=float(outcome.imbalance.mean()),
      expert_bytes=WEIGHT_BYTES * weights * model.moe_layers,
    )

  return layout(node_size), layout(num_ranks)
