"""The frozen configuration of a balanced layer."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ultraep_jax.devices.device import Device
from ultraep_jax.types import Array, Plan, PlanCost

Implementation = Literal["auto", "mosaic_gpu", "portable"]
DispatchDtype = Literal["float8_e4m3fn"]
Objective = Literal["balance", "time"]
TransferTree = Literal["auto", "direct", "relay"]
# Strategies that need nothing but the batch; those with a history are given as planners.
StrategyName = Literal["quota", "none", "ideal", "exact", "eplb+"]
_MOST_SLOTS = 2**16  # more than any model's experts; with the ranks, an int32 counts all


@dataclasses.dataclass(frozen=True, kw_only=True)
class BalanceConfig:
  """How a layer balances its experts. Hashable, so it can be a static argument of ``jax.jit``.

  NumPy's numbers become Python's.

  Attributes:
    replica_slots: S, copies of other ranks' experts that a rank can hold; 0 balances nothing.
      ``"auto"``: ``M (G - 1) / G`` of a domain's G ranks, rounded up, which reach exact balance
      of every load there. In one domain no load then needs a second round where the layer plans
      (``planning/fit.py``). A layer takes fewer if these and their gradients, which live while
      the layer runs, would take more than an eighth of the device's memory.
    strategy: ``"quota"`` (balance on the exact load), ``"none"``, ``"exact"`` (no rank above the
      mean; needs slots that suffice for every load), ``"eplb+"`` (replicas by load, equal
      shares), ``"ideal"`` (overrides the router to equal loads, for measuring only), a planner
      function ``(load_GE, config, cost) -> Plan`` such as ``strategies.eplb.planner(state)``, or
      a ``strategies.Strategy``.
    objective: ``"balance"`` asks for the lowest maximum load; ``"time"`` for the least time
      of plans that fit one round, where copies cost what ``PlanCost`` says and doing nothing is
      a candidate. Layers of so few tokens that likely loads gain nothing do not plan at all. That
      is decided for calls with gradients and without.
    target: stop at a busiest rank of ``ceil(target * mean)`` and use the fewest replicas that
      reach it, e.g. 1.01. ``None``: as low as possible.
    min_tokens_per_replica: no copy is made to serve fewer assignments than this.
    capacity_factor: a rank's buffer holds ``ceil(T * K * capacity_factor)`` rows, rounded up to a
      multiple of 8, or of 64 from 1024 rows on. A busier rank takes more rounds, and nothing is
      dropped. By time, a plan that fits is taken first, whatever its copies cost. ``"auto"``:
      2 up to 512 MiB of rows (2 GiB without gradients), 1.25 for larger batches, and more for
      small ones, so that no copies are made only to fit (``planning/capacity.py``).
    domain_size: ranks among which copies of experts are made; they never leave a domain. Domains
      are contiguous. ``"auto"``: the ranks of a node; all of them for a planner that is called
      without a mesh. ``None``: all ranks are one domain.
    node_size: devices of the mesh, one after another, that scale-up links such as NVLink join. Only
      they reach each other's memory, so kernels that write into it need a mesh of one node.
      ``"auto"``: as JAX numbers them (``nodes.py``); ``doctor`` shows how.
    transfer: the trees that ``Plan.parent`` describes: ``"relay"`` (holders forward), ``"direct"``
      (the home sends each copy), ``"auto"`` (a relay where it lowers the busiest sender's
      egress). The portable implementation lets homes send all copies.
    copy_rows: rows of matmul that sending one expert costs, for ``objective="time"``.
      ``None``: as ``device`` says for such weights. A number includes the copy's group of rows, and
      groups at home do not count.
    batch_invariant: a token's result does not depend on the other tokens of the batch, through
      the plan that they bring about. Every assignment crosses the links for itself, up to K
      times the bytes, and a token's experts are summed in the order of its choices.
    implementation: ``"mosaic_gpu"`` (kernels for Hopper GPUs), ``"portable"`` (plain JAX) or
      ``"auto"``: per operation, a kernel if it can do it here. In the Flax modules also of the
      router's choice.
    dispatch_dtype: what tokens cross to their experts in: ``"float8_e4m3fn"``, with a float32
      scale per 128 channels, or ``None``, the compute dtype. Experts compute on the rounded
      tokens, wherever they run; gradients are those of the tokens as they are (straight-through)
      and cross in the compute dtype, as the experts' results do.
    device: the description of the devices: what copies cost, and how kernels are laid out.
      ``None``: the package's for the devices at hand; ``doctor`` says which. Of CPUs there is none:
      copies then weigh nothing.

  Raises:
    ValueError: a value is outside its range.
    TypeError: a value has the wrong type.

  >>> BalanceConfig(replica_slots=2, objective="balance").strategy
  'quota'
  >>> BalanceConfig(target=0.5)
  Traceback (most recent call last):
  ValueError: target: expected a finite number of at least 1, got 0.5
  """

  replica_slots: int | Literal["auto"] = "auto"
  strategy: "str | Strategy | Planner" = "quota"
  objective: Objective = "time"
  target: float | None = None
  min_tokens_per_replica: int = 1
  capacity_factor: float | Literal["auto"] = "auto"
  domain_size: int | Literal["auto"] | None = "auto"
  node_size: int | Literal["auto"] = "auto"
  transfer: TransferTree = "auto"
  copy_rows: int | None = None
  batch_invariant: bool = False
  implementation: Implementation = "auto"
  dispatch_dtype: DispatchDtype | None = None
  device: Device | None = None

  def __post_init__(self) -> None:
    as_python_numbers(self)
    if self.replica_slots != "auto":
      check_int("replica_slots", self.replica_slots, minimum=0, maximum=_MOST_SLOTS)
    check_int("min_tokens_per_replica", self.min_tokens_per_replica, minimum=1)
    if self.domain_size not in ("auto", None):
      check_int("domain_size", self.domain_size, minimum=1)
    if self.node_size != "auto":
      check_int("node_size", self.node_size, minimum=1)
    if self.copy_rows is not None:
      check_int("copy_rows", self.copy_rows, minimum=0)
    check_type("batch_invariant", self.batch_invariant, bool)
    if self.capacity_factor != "auto":
      check_factor("capacity_factor", self.capacity_factor)
    if self.target is not None:
      check_factor("target", self.target)
    check_choice("objective", self.objective, get_args(Objective))
    check_choice("transfer", self.transfer, get_args(TransferTree))
    check_choice("implementation", self.implementation, get_args(Implementation))
    check_choice("dispatch_dtype", self.dispatch_dtype, (None, *get_args(DispatchDtype)))
    if self.device is not None and not isinstance(self.device, Device):
      raise TypeError(f"device: expected a Device or None, got {type(self.device).__name__}")
    if isinstance(self.strategy, str):
      check_choice("strategy", self.strategy, get_args(StrategyName))
    elif not callable(self.strategy) and not callable(getattr(self.strategy, "plan", None)):
      raise TypeError(
        "strategy: expected a name, a planner function or a Strategy, "
        f"got {type(self.strategy).__name__}"
      )
    try:
      hash(self.strategy)
    except TypeError:
      got = type(self.strategy).__name__
      raise TypeError(f"strategy: expected a planner with a hash, got {got} without") from None

  def domain_of(self, num_ranks: int) -> int:
    """Ranks of a domain, of so many; ``"auto"`` that no mesh has settled counts as all of them.

    Raises:
      ValueError: ``domain_size`` does not divide them.
    """
    size = num_ranks if self.domain_size in ("auto", None) else self.domain_size
    if num_ranks % size:
      raise ValueError(f"domain_size: expected a divisor of {num_ranks} ranks, got {size}")
    return size


Planner = Callable[[Array, BalanceConfig, PlanCost | None], Plan]
Reassign = Callable[[Array, Array | int, int, int], Array]


class Strategy(NamedTuple):
  """How a layer is balanced.

  Attributes:
    name: for messages.
    plan: makes a ``Plan`` from the load matrix; the same on every rank, which otherwise wait for
      each other for ever.
    reassign: ``(expert_index_TK, rank, num_experts, num_ranks) -> expert_index_TK``, replaces
      the router's choice before loads are counted. ``None``: the choice stands.

  One of your own that needs no ``reassign`` is just a planner. This one lets rank 1 serve half of
  expert 0, whose home is rank 0:

  >>> import jax.numpy as jnp
  >>> import ultraep_jax as uep
  >>> def halve(load_GE, config, cost=None):
  ...   quota_EG = jnp.zeros(load_GE.shape[::-1], jnp.int32)
  ...   load_E, expert_E = load_GE.sum(axis=0), jnp.arange(load_GE.shape[1])
  ...   quota_EG = quota_EG.at[expert_E, expert_E // 2].set(load_E)
  ...   given = load_E[0] // 2
  ...   quota_EG = quota_EG.at[0].add(jnp.stack([-given, given]))
  ...   expert_GS = jnp.array([[-1], [0]], jnp.int32)  # rank 1 has a copy of expert 0,
  ...   parent_GS = jnp.array([[-1], [0]], jnp.int32)  # which rank 0 sends
  ...   return uep.Plan(expert_GS, quota_EG, parent_GS)
  >>> config = uep.BalanceConfig(replica_slots=1, strategy=halve)
  >>> load_GE = jnp.array([[4, 1, 0, 0], [4, 1, 0, 0]])
  >>> plan = uep.strategies.resolve(config.strategy).plan(load_GE, config, None)
  >>> uep.testing.assert_legal_plan(plan, load_GE, config)
  >>> plan
  Plan(2 ranks, 4 experts, 1 slot: 1 copy, busiest / mean rank 1.20)
  """

  name: str
  plan: Planner
  reassign: Reassign | None = None


def strategy_name(strategy: str | Planner | Strategy) -> str:
  """Its own name, or that of the planner function."""
  if isinstance(strategy, str):
    return strategy
  function = getattr(strategy, "func", strategy)  # of a Partial
  return getattr(function, "name", getattr(function, "__name__", "custom"))


def as_python_numbers(config: Any) -> None:
  """Makes Python's numbers of NumPy's in a frozen dataclass, tuples of them included."""
  for field in dataclasses.fields(config):
    object.__setattr__(config, field.name, as_python(getattr(config, field.name)))


def as_python(value: Any) -> Any:
  """Python's number, if the value is one of NumPy's; tuples of them too."""
  if isinstance(value, np.integer | np.floating):
    return value.item()
  return tuple(map(as_python, value)) if type(value) is tuple else value


def check_type(name: str, value: object, kind: type) -> None:
  if not isinstance(value, kind):
    raise TypeError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")


def check_int(name: str, value: object, minimum: int, maximum: float = math.inf) -> None:
  if isinstance(value, bool) or not isinstance(value, int):
    raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
  if value < minimum:
    raise ValueError(f"{name}: expected at least {minimum}, got {value}")
  if value > maximum:
    raise ValueError(f"{name}: expected at most {maximum}, got {value}")


def check_factor(name: str, value: object) -> None:
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise TypeError(f"{name}: expected a float, got {type(value).__name__}")
  if not 1 <= value < math.inf:
    raise ValueError(f"{name}: expected a finite number of at least 1, got {value}")


def check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
  if value not in choices:
    raise ValueError(f"{name}: expected one of {choices}, got {value!r}")
