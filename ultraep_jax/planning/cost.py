"""What the planner weighs: seconds of a layer's parts, as rows of expert matmul.

Seconds come from the description of the devices (``devices/``) and the shape of an expert. Rows are
integers, so that every rank plans the same.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from ultraep_jax import differentiated, implementation
from ultraep_jax.config import BalanceConfig
from ultraep_jax.devices import known
from ultraep_jax.devices.device import Device
from ultraep_jax.types import ExpertWeights, PlanCost

_WEIGHT_BYTES = 2  # of a weight that a matmul reads
_LIKELY_PER_DOUBLING = 0.3  # of ranks: what the busiest one has beyond the mean, over the mean
_FIXED = 3  # times what balancing takes in any case, what a likely load must gain
_LITTLE = 2  # times, where that is little: at most one of so many parts of what equal loads take
_PARTS = 18
_SEARCHED = 2  # times all its costs, what it must gain where no kernel plans
_RARE = 6  # times what a likely load must gain, what one must that is far from likely
_STEPS_PER_COPY = 1.6  # docs/lab/portable.md, Kernels with portable transfers
# What a copy travels longer than its bytes do, beside forward's matmuls: with copies of 6 and 9 MB
# those of an H200 end as if links gave 230 to 250 GB/s (docs/lab/layer.md, Plans for fewer tokens).
_COPY_MORE = 8e-6
# Fits of when more copies delay three models than their rows did (docs/lab/layer.md, What backward
# hides): how much more than a matmul lasts may travel beside it, and what each matrix takes more.
# They were fitted when copies of both projections travelled beside one matmul, and still serve.
_COPIES, _GRADIENTS = (1.73, 10.6e-6), (1.15, 5e-6)
# A fit of how much longer ranks of as many rows took that computed more groups (docs/lab/layer.md,
# Ranks of equally many rows): of ``slot_seconds``, the rest is hidden by other groups' tiles.
_GROUP_EXPOSED = 0.7
_WORK = {"forward": 1, "backward": 2}


class LayerCost(NamedTuple):
  """What balancing a layer costs, in rows of its expert matmul.

  Attributes:
    plan: what the planner weighs.
    fixed_rows: what a layer that may copy costs more than one that cannot, whatever it copies.
    training: what the planner weighs where gradients are taken: copies travel twice then, and
      their gradients go home. ``None``: the same.
    by_kernel: a kernel plans, so that a plan costs little beside the rest.
    read_rows: what reading the weights of an expert takes.
    training_fixed_rows: ``fixed_rows`` where gradients are taken, in rows of a call with these.
  """

  plan: PlanCost
  fixed_rows: int
  training: PlanCost | None = None
  by_kernel: bool = True
  read_rows: int = 0
  training_fixed_rows: int = 0

  @property
  def of_training(self) -> "LayerCost":
    """The same as it decides where gradients are taken.

    Weights are read twice and their gradients written then. That is three times as much, of rows
    that take three times as long. Where no kernel plans, it decides as forward: what it would gain
    was not measured.
    """
    if self.training is None or not self.by_kernel:
      return self
    return self._replace(plan=self.training, fixed_rows=self.training_fixed_rows)

  def weighed(self, *operands: Any) -> PlanCost:
    """``plan``, or ``training`` where the layer is differentiated by any of its operands."""
    if self.training is None or self.training == self.plan:
      return self.plan
    taken = differentiated.taken(operands)
    return PlanCost(
      *(jnp.where(taken, *pair) for pair in zip(self.training, self.plan, strict=True))
    )

  def with_capacities(self, kept: int, transient: int) -> "LayerCost":
    """The same, with buffers of so many rows where gradients are taken, and where they are not."""
    training = self.plan if self.training is None else self.training
    return self._replace(
      plan=self.plan._replace(capacity_rows=transient),
      training=training._replace(capacity_rows=kept),
    )

  def can_gain(
    self,
    config: BalanceConfig,
    *,
    tokens: int,
    top_k: int,
    num_experts: int,
    num_ranks: int,
  ) -> bool:
    """Whether loads of these sizes are worth a plan. Without, a program need not plan at all.

    A token chooses distinct experts, so a rank of M experts gets at most
    ``G * T * min(K, M)`` rows. If these may need a second round, a plan by a kernel is worth it.
    Else a likely load must gain, since every load pays for the planning. Likely is that the busiest
    rank has more than the mean by 0.3 of it, for each doubling of the ranks that share its load. To
    share it evenly must spare more rows than ``must_spare``, or less where a plan takes little
    beside what equal loads take. ``objective="balance"`` asks for no gain in time.

    Args:
      config: ``objective`` and ``domain_size`` are used.
      tokens: T, of a rank.
      top_k: K.
      num_experts: E.
      num_ranks: G.
    """
    if config.objective == "balance":
      return True
    domain = config.domain_of(num_ranks)
    most = most_rows(tokens, top_k, num_experts // num_ranks, num_ranks)
    if self.by_kernel and domain > 1 and most > int(self.plan.capacity_rows):
      return True  # a plan that fits one round is taken before any other
    mean = tokens * top_k
    likely = min(most, math.ceil(mean * (1 + _LIKELY_PER_DOUBLING * math.log2(domain))))
    spared = likely - max(mean, int(self.plan.link_rows))
    equal = mean + num_experts // num_ranks * self.read_rows
    little = self.by_kernel and _PARTS * self.fixed_rows <= equal
    return spared > self.must_spare - (_FIXED - _LITTLE) * self.fixed_rows * little

  def can_gain_much(self, most: int, domain: int) -> bool:
    """Whether a load with ``most`` rows on one rank spares six times what a likely one must.

    Its domain shares them. Such a load is rare, so that less is not worth a plan in every call.
    """
    return most - max(-(-most // domain), int(self.plan.link_rows)) > _RARE * self.must_spare

  @property
  def must_spare(self) -> int:
    """Rows that balancing must spare a likely load, so that a plan in every call is worth it.

    One copy with its group, and three times what balancing takes in any case: every load pays
    that, equal ones too. Where no kernel plans, twice both, as a search that finds nothing costs
    as much.
    """
    copy_rows = int(self.plan.copy_rows) + int(self.plan.group_rows)
    if self.by_kernel:
      return copy_rows + _FIXED * self.fixed_rows
    return _SEARCHED * (copy_rows + self.fixed_rows)


def most_rows(tokens: int, top_k: int, num_home: int, num_ranks: int) -> int:
  """What one rank may get of all tokens, which choose distinct experts."""
  return num_ranks * tokens * min(top_k, num_home)


def by_kernel(operation: str, config: BalanceConfig) -> bool:
  """Whether a kernel is tried for an operation."""
  return "mosaic_gpu" in implementation.resolve(config.implementation, operation, config.node_size)


def multiplied_by_kernel(config: BalanceConfig, dtype: jnp.dtype) -> bool:
  """Whether a kernel is tried for the experts, which pass over used rows alone."""
  return by_kernel("matmul", config) and dtype == jnp.bfloat16


def layer_cost(
  dtype: jnp.dtype,
  weights: ExpertWeights,
  capacity: int,
  config: BalanceConfig,
  domain: int = 2,
) -> LayerCost:
  """What balancing a layer costs on the devices at hand, or as ``config.device`` describes.

  Args:
    dtype: that the layer computes in.
    weights: for the shapes of an expert, ``[..., D, F]``, and their dtype.
    capacity: C, rows that a rank computes in one round.
    config: ``copy_rows``, ``device``, ``implementation`` and ``node_size`` are used.
    domain: ranks that copies stay among.
  """
  cost = cost_on(
    known.resolve(config.device),
    dtype,
    weights,
    capacity,
    moving=by_kernel("replicate", config),
    multiplying=by_kernel("matmul", config),
    planning=by_kernel("plan", config),
    domain=domain,
  )
  if config.copy_rows is None:
    return cost
  return cost._replace(plan=PlanCost(config.copy_rows, capacity), training=None)


def cost_on(
  device: Device | None,
  dtype: jnp.dtype,
  weights: ExpertWeights,
  capacity: int,
  *,
  moving: bool = True,
  multiplying: bool = True,
  planning: bool = True,
  domain: int = 2,
) -> LayerCost:
  """What balancing a layer costs on such devices.

  Copies weigh nothing on devices without a description, such as CPUs. The planner then balances as
  well as it can, with as few copies as that takes. No kernels are assumed on devices whose
  description has none.

  Args:
    device: the description.
    dtype: that the layer computes in.
    weights: for the shapes of an expert, and their dtype.
    capacity: C.
    moving: copies move by kernels, else in plain JAX: in steps, in which ranks send over the same
      distance.
    multiplying: experts are multiplied by kernels.
    planning: a kernel plans.
    domain: ranks that copies stay among.
  """
  if device is None:
    return LayerCost(PlanCost(0, capacity), 0)
  if device.portable is None:  # it runs no kernels
    moving = multiplying = planning = False
  multiplying &= dtype == jnp.bfloat16  # others in plain JAX
  inner, width = weights.wo.shape[-2:]
  shape = width, inner, "forward", weights.num_matrices
  matmuls = device.running(kernels=multiplying)
  links, size = device.running(kernels=moving), copy_bytes(dtype, weights)
  steps = 1.0 if moving else steps_per_copy(domain)
  beside = moving and multiplying  # else copies travel alone
  row = row_seconds(matmuls, *shape)
  # Kernels take as long for every group of rows, so a rank's load counts its groups. In plain JAX
  # only those of copies were measured.
  group = slot_seconds(matmuls, *shape)
  copy = _launch_seconds(matmuls, *shape[2:])
  planner = device.running(kernels=planning)
  fixed_rows = round(_fixed_seconds(planner, domain) / row)
  read_rows = round(_WEIGHT_BYTES * weights.expert_size / matmuls["memory_rate"] / row)
  copy += steps * copy_seconds(links, size, beside=beside)
  travelling = size / links["copy_rate"]

  def rounded(hidden_by: float) -> PlanCost:
    link_rows = round(hidden_by) if beside else 0
    if multiplying:
      return PlanCost(round(copy / row), capacity, link_rows, round(_GROUP_EXPOSED * group / row))
    return PlanCost(round((copy + group) / row), capacity, link_rows)

  forward = (travelling + _COPY_MORE) / row
  plan = rounded(forward)
  shape, home = (width, inner, "backward", weights.num_matrices), grad_bytes(weights)
  backward, gradients = row_seconds(matmuls, *shape), home / links["reduce_rate"]
  row += backward
  group += slot_seconds(matmuls, *shape)
  copy += _launch_seconds(matmuls, *shape[2:])
  copy += steps * copy_seconds(links, size, "backward", beside=beside)
  copy += steps * (links["reduce_exposed"] if beside else 1.0) * gradients
  travelling += size / links["copy_rate"] + gradients
  # What has which of backward's matmuls beside it: copies of projections the gradient of wo, those
  # of up that of gate; gradients what comes after, half of it all (compute/homeward.py).
  matrices, (more, seconds) = weights.num_matrices, _COPIES
  projections = size / matrices / links["copy_rate"] + seconds
  projections *= (matrices - 1) / len(weights.projections)
  projections /= more * backward / (2 * matrices)
  more, seconds = _GRADIENTS
  homeward = (gradients + matrices * seconds) / (more * backward / 2)
  training = rounded(max(forward, travelling / row, projections, homeward))
  training_fixed_rows = round(_fixed_seconds(planner, domain, "balance_training_seconds") / row)
  return LayerCost(plan, fixed_rows, training, planning, read_rows, training_fixed_rows)


def row_seconds(
  device: Device, width: int, inner: int, direction: str = "forward", matrices: int = 3
) -> float:
  """What one row more takes. What its slot takes in any case is in ``slot_seconds``."""
  rate = device.matmul_rate(width, inner, backward=direction == "backward")
  return _WORK[direction] * 2 * matrices * width * inner / rate


def slot_seconds(
  device: Device, width: int, inner: int, direction: str = "forward", matrices: int = 3
) -> float:
  """What one slot more takes for the same rows: half a tile, and reading an expert's weights."""
  rows = device["matmul_tile"] / 2 * row_seconds(device, width, inner, direction, matrices)
  return rows + reading_seconds(device, width, inner, direction, matrices)


def _launch_seconds(device: Device, direction: str, matrices: int) -> float:
  """What a copy's tile in every matmul takes the host, where it launches tiles."""
  return _WORK[direction] * matrices * device["tile_seconds"]


def _fixed_seconds(device: Device, domain: int, fact: str = "balance_seconds") -> float:
  """Of a layer that may copy over one that cannot; described for two ranks that share."""
  return device[fact] + (domain - 2) * device["plan_seconds_per_rank"]


def reading_seconds(
  device: Device, width: int, inner: int, direction: str = "forward", matrices: int = 3
) -> float:
  """What reading an expert's weights adds to its matmuls; backward also writes gradients."""
  seconds = _WORK[direction] * _WEIGHT_BYTES * matrices * width * inner / device["memory_rate"]
  return device["weights_exposed"] * seconds


def steps_per_copy(domain: int) -> float:
  """Steps in plain JAX for each copy that the busiest rank of a domain sends or gets."""
  return _STEPS_PER_COPY if domain > 2 else 1.0


def copy_seconds(
  device: Device, size: int, direction: str = "forward", *, beside: bool = True
) -> float:
  """By what sending one copy of so many bytes delays a layer.

  Args:
    device: the description.
    size: bytes.
    direction: ``"forward"`` or ``"backward"``.
    beside: the copy travels beside matmuls, which hide a part of it.
  """
  exposed = device[f"copy_exposed_{direction}"] if beside else 1.0
  return exposed * size / device["copy_rate"]


def copy_bytes(dtype: jnp.dtype, weights: ExpertWeights) -> int:
  """Of one expert's weights, in the dtype that they travel in."""
  return weights.expert_size * dtype.itemsize


def grad_bytes(weights: ExpertWeights) -> int:
  """Of one expert's gradient, in the dtype that it travels home in."""
  return weights.expert_size * weights.grad_dtype.itemsize
