"""How long a layer takes: from where rows run to seconds.

Every part waits for the rank that is busiest in it, then the parts are added: what overlaps is in
the description of the device, as the share that stays exposed. All functions work on numpy arrays
with any leading axes.

A token crosses to a rank once, however many of its experts run there. With ``q`` the share of
tokens that have the expert of a slot and are sent to it, a source's token goes to a rank with
probability ``1 - prod(1 - q)`` over the slots: experts are taken to be chosen independently, and
sources to be alike.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from ultraep_jax.config import as_python_numbers, check_factor, check_int
from ultraep_jax.devices.device import Device
from ultraep_jax.planning import cost as planning
from ultraep_jax.simulate.balancers import Balancer, Placed
from ultraep_jax.simulate.models import ModelShape
from ultraep_jax.transport import node_exchange
from ultraep_jax.types import PlanCost

# Bytes of a weight that moves with an expert: bf16 alone, or with a float32 copy and two moments.
_SERVED_BYTES, _TRAINED_BYTES = 2, 14
WEIGHT_BYTES, GRAD_BYTES = 2, 4  # gradients are float32 where nodes sum them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """What is simulated.

  Attributes:
    model: the model's shape.
    device: the description of the machine.
    num_ranks: G, ranks of one expert group.
    domain_size: ranks joined by fast links; at most G, a divisor of it.
    tokens: T, tokens of a rank in a microbatch.
    replica_slots: S.
    training: forward and backward, or forward alone (prefill).
    context: tokens of a sequence.
    capacity_factor: rows of a buffer over T·K; ``None``: as many as there are.
    token_bytes: of one value of a dispatched token; combine is bf16.
    relay: copies may be forwarded; else homes send all.
    locality: sources take their own quota first.

  Raises:
    ValueError: a number is outside its range, or ranks, domains and experts do not fit each other.
    TypeError: a number is no integer.
  """

  model: ModelShape
  device: Device
  num_ranks: int
  domain_size: int
  tokens: int = 8192
  replica_slots: int = 2
  training: bool = True
  context: int = 4096
  capacity_factor: float | None = None
  token_bytes: int = 2
  relay: bool = True
  locality: bool = True

  def __post_init__(self) -> None:
    as_python_numbers(self)
    for name in ("num_ranks", "domain_size", "tokens", "context", "token_bytes"):
      check_int(name, getattr(self, name), minimum=1)
    check_int("replica_slots", self.replica_slots, minimum=0)
    if self.capacity_factor is not None:
      check_factor("capacity_factor", self.capacity_factor)
    if self.model.num_experts % self.num_ranks:
      raise ValueError(
        f"num_ranks: expected a divisor of {self.model.num_experts} experts, got {self.num_ranks}"
      )
    if self.num_ranks % self.domain_size:
      raise ValueError(
        f"domain_size: expected a divisor of {self.num_ranks} ranks, got {self.domain_size}"
      )

  @property
  def plan_cost(self) -> PlanCost:
    """What the planner of ``objective="time"`` weighs, forward and backward together.

    Groups of rows count for copies alone, as in layers without kernels.
    """
    shape = self.device, self.model.embed_dim, self.model.expert_dim
    size = self.model.expert_params * WEIGHT_BYTES
    row = copy = 0.0
    for each in ("forward", "backward")[: 1 + self.training]:
      row += planning.row_seconds(*shape, each)
      copy += planning.copy_seconds(self.device, size, each) + planning.slot_seconds(*shape, each)
    factor = self.capacity_factor or self.num_ranks
    return PlanCost(round(copy / row), round(self.tokens * self.model.top_k * factor))


class Times(NamedTuple):
  """Seconds of the parts of a layer, arrays with the leading axes of the placement.

  Attributes:
    plan: counting, planning, routing.
    copy: expert weights to replicas, as far as exposed.
    exchange: dispatch and combine of tokens, or of their gradients.
    matmul: the routed experts.
    reduce: gradients of replicas to their homes, as far as exposed.
    rest: everything else in the layer.
    move: a rearrangement of experts after the batch.
  """

  plan: Any
  copy: Any
  exchange: Any
  matmul: Any
  reduce: Any
  rest: Any
  move: Any

  @property
  def total(self) -> Any:
    """Seconds of the layer."""
    return sum(self)


def layer_times(setting: Setting, balancer: Balancer, placed: Placed) -> tuple[Times, Times]:
  """Seconds of a layer's forward and backward pass; of prefill, backward is zero."""
  forward = _pass(setting, balancer, placed, backward=False)
  if not setting.training:
    return forward, Times(*[np.zeros_like(forward.total)] * len(forward))
  return forward, _pass(setting, balancer, placed, backward=True)


def copy_seconds(setting: Setting, placed: Placed) -> np.ndarray:
  """Seconds of one replication with nothing hidden; 0 without copies."""
  rates = setting.device
  sent = placed.egress.max(axis=-1) if setting.relay else placed.direct
  busiest = np.maximum(sent, placed.ingress.max(axis=-1))
  hops = np.maximum(placed.depth - 1, 0) if setting.relay else 0
  seconds = busiest * float(setting.model.expert_params * WEIGHT_BYTES) / rates["copy_rate"]
  seconds = seconds * _steps(setting)
  seconds = seconds + rates["copy_seconds"] + hops * rates["copy_hop_seconds"]
  return np.where(busiest > 0, seconds, 0.0)


def _steps(setting: Setting) -> float:
  return planning.steps_per_copy(setting.domain_size) if setting.device.in_blocks else 1.0


def _pass(setting: Setting, balancer: Balancer, placed: Placed, *, backward: bool) -> Times:
  rates, shape = setting.device, setting.model
  suffix = "backward" if backward else "forward"
  zero = np.zeros(placed.rows.shape[:-2])
  rounds = zero + 1
  if setting.capacity_factor is not None:
    capacity = np.ceil(setting.tokens * shape.top_k * setting.capacity_factor)
    rounds = np.maximum(np.ceil(placed.load.max(axis=-1) / capacity), 1)

  tile, widths = rates["matmul_tile"], (shape.embed_dim, shape.expert_dim)
  padded = (np.ceil(placed.rows / tile) * tile).sum(axis=-1)
  used = (placed.rows > 0).sum(axis=-1)
  reading = planning.reading_seconds(rates, *widths, suffix)
  matmul = (padded * planning.row_seconds(rates, *widths, suffix) + used * reading).max(axis=-1)
  work = shape.rest_flops(setting.context) * setting.tokens * (2 if backward else 1)
  routing = rates[f"routing_{suffix}"] if balancer.real_routing else 1.0

  plan = zero
  if balancer.plans and not backward:
    plan = zero + sum(rates[name] for name in ("load_seconds", "plan_seconds", "route_seconds"))
    plan = plan + rates["plan_seconds_per_rank"] * setting.domain_size
  gathered = placed.direct * float(shape.expert_params * WEIGHT_BYTES) / rates["reduce_rate"]
  gathered = gathered * _steps(setting)
  moved_bytes = _TRAINED_BYTES if setting.training else _SERVED_BYTES
  moved = placed.moved.max(axis=-1) * float(shape.expert_params * moved_bytes) / rates["copy_rate"]
  return Times(
    plan=plan,
    copy=copy_seconds(setting, placed) * rates[f"copy_exposed_{suffix}"],
    exchange=exchange_seconds(setting, placed, rounds) * routing,
    matmul=matmul,
    reduce=gathered * rates["reduce_exposed"] if backward else zero,
    rest=zero + work / rates[f"rest_{suffix}"],
    move=zero if backward else moved,
  )


def exchange_seconds(setting: Setting, placed: Placed, rounds: Any = 1) -> np.ndarray:
  """Seconds of a dispatch and a combine: the busiest rank's links, the slower of both kinds."""
  rates, shape = setting.device, setting.model
  num_ranks, size = setting.num_ranks, setting.domain_size
  if num_ranks == 1:
    return np.zeros(placed.rows.shape[:-2])
  crossings = remote_tokens(setting, placed)
  received = crossings.max(axis=-1)
  kept = placed.kept if setting.locality else placed.kept_by_chance
  away = np.maximum(setting.tokens * shape.top_k - kept, 0)
  mean = np.maximum(away.mean(axis=-1), 1e-9)
  sent = crossings.mean(axis=-1) * away.max(axis=-1) / mean
  busiest = np.maximum(received, sent)
  bytes_out = busiest * shape.embed_dim * setting.token_bytes
  bytes_back = busiest * shape.embed_dim * 2
  dispatch, combine = bytes_out / rates["dispatch_rate"], bytes_back / rates["combine_rate"]
  if size < num_ranks:
    # A token crosses to another domain once and is handed on inside it, in plain JAX afterwards.
    outside, both = _domain_tokens(setting, placed), np.maximum
    if rates.in_blocks:
      sizes = setting.tokens, shape.top_k, num_ranks, size
      outside = node_exchange.network_tokens(*sizes) * rounds
      both = np.add if node_exchange.saves(*sizes) else np.maximum
    outside = outside * shape.embed_dim
    dispatch = both(dispatch, outside * setting.token_bytes / rates["network_rate"])
    combine = both(combine, outside * 2 / rates["network_rate"])
  return dispatch + combine + 2 * rates["exchange_seconds"] * rounds


def remote_tokens(setting: Setting, placed: Placed) -> np.ndarray:
  """``[..., G]``, tokens that a rank receives from others, each counted once."""
  load = placed.load
  if setting.num_ranks == 1:
    return np.zeros(load.shape)
  kept = placed.kept if setting.locality else placed.kept_by_chance
  share = np.where(load > 0, np.maximum(load - kept, 0) / np.maximum(load, 1), 0.0)
  others = (setting.num_ranks - 1) * setting.tokens
  has = np.minimum(placed.rows * share[..., None] / others, 1.0)
  return others * (1 - np.prod(1 - has, axis=-1))


def _domain_tokens(setting: Setting, placed: Placed) -> np.ndarray:
  """Tokens of other domains that the busiest domain receives, for each of its ranks' links."""
  size, num_ranks = setting.domain_size, setting.num_ranks
  domains = num_ranks // size
  rows = placed.rows.reshape(*placed.rows.shape[:-2], domains, -1)
  outside = (num_ranks - size) * setting.tokens
  has = np.minimum(rows / (num_ranks * setting.tokens), 1.0)
  return (outside * (1 - np.prod(1 - has, axis=-1))).max(axis=-1) / size
