"""What the measurements of transfers share: options, plans to follow, and times on the device."""

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import TransferTuning
from ultraep_jax import testing
from ultraep_jax.bench import timing
from ultraep_jax.bench.kernels.portable import AXIS
from ultraep_jax.bench.machine import devices_for_kernels
from ultraep_jax.config import BalanceConfig
from ultraep_jax.devices import known
from ultraep_jax.planning.capacity import row_capacity
from ultraep_jax.planning.cost import cost_on
from ultraep_jax.planning.plan import plan_quotas
from ultraep_jax.planning.relay import egress_per_rank
from ultraep_jax.tables import table
from ultraep_jax.tools import processes
from ultraep_jax.tools.arguments import amount, factor, natural, positive
from ultraep_jax.types import Array, ExpertWeights

Placement = tuple[np.ndarray, np.ndarray]  # replica_expert_GS, parent_GS

_PROFILED = 10  # calls in a trace
_RATIOS = (1.5, 2.0, 2.5, 3.0)


def add_arguments(parser: argparse.ArgumentParser, *, plans: int, megabytes: float) -> None:
  """The options of a kernel's program, with these defaults."""
  processes.add_argument(parser)
  add = parser.add_argument
  add("--plans", type=natural, default=plans, help="random plans to check per shape")
  add("--scale", type=positive, default=1, help="divide all sizes, to try it on a CPU")
  add("--megabytes", nargs="*", type=amount, default=[megabytes], help="per expert")
  add("--tunings", nargs="*", default=["2x16384"], help="[BLOCKSx]WORKERSxBYTES")
  add("--calls", type=positive, default=20, help="calls chained inside one jit")
  add("--repeats", type=positive, default=5)
  add("--portable", action="store_true", help="time the portable operation too")
  add("--objective", default="balance", choices=("balance", "time"), help="of the plans timed")
  add("--target", type=factor, help="of the plans timed, e.g. 1.01")


def open_mesh() -> jax.sharding.Mesh:
  """All devices, which it prints.

  Raises:
    CommandError: kernels that reach other devices do not run on these.
  """
  devices_for_kernels(least=2)
  mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
  print(f"jax {jax.__version__}, {mesh.size} x {jax.devices()[0].device_kind}", flush=True)
  return mesh


def tunings_of(texts: Sequence[str]) -> dict[str, TransferTuning]:
  """The tunings that ``--tunings`` names, by a label for people.

  >>> tunings_of(["2x16384", "12x3x8192"])["12 x 3 x 8192"]
  TransferTuning(blocks=12, workers=3, tile_bytes=8192)
  """
  return {text.replace("x", " x "): _tuning_of(text) for text in texts}


def _tuning_of(text: str) -> TransferTuning:
  *blocks, workers, tile_bytes = map(int, text.split("x"))
  return TransferTuning(*(blocks or [None]), workers=workers, tile_bytes=tile_bytes)


def planner(args: argparse.Namespace) -> BalanceConfig:
  """Whose plans are timed."""
  # On a CPU, where "auto" would see the process's GPUs and choose kernels.
  return BalanceConfig(
    replica_slots=2, objective=args.objective, target=args.target, implementation="portable"
  )


def random_placement(rng: np.random.Generator, ranks: int, home: int, slots: int) -> Placement:
  """Any legal placement and trees of any depth, with a few hot experts."""
  weight_E = rng.random(ranks * home) ** rng.integers(1, 9)
  replica_GS = np.full((ranks, slots), -1, np.int32)
  for rank, slot in itertools.product(range(ranks), range(slots)):
    own_E = np.arange(ranks * home) // home == rank
    choice = rng.choice(np.flatnonzero(~own_E), p=weight_E[~own_E] / weight_E[~own_E].sum())
    if rng.random() < 0.8 and choice not in replica_GS[rank]:
      replica_GS[rank, slot] = choice
  parent_GS = np.full_like(replica_GS, -1)
  for expert in range(ranks * home):
    members, relay = [expert // home], rng.random()
    for rank, slot in rng.permutation(np.argwhere(replica_GS == expert)):
      parent_GS[rank, slot] = rng.choice(members) if rng.random() < relay else members[-1]
      members.append(rank)
  return replica_GS, parent_GS


def time_cases(ranks: int, config: BalanceConfig) -> dict[str, Placement]:
  """Plans for skewed loads of 16 experts a rank, and one expert to all ranks, two ways."""
  cases: dict[str, Placement] = {"empty": (np.full((ranks, 2), -1), np.full((ranks, 2), -1))}
  # What copies cost by time: experts of 37.7 MB, three matrices of 4096 by 1536 in bf16.
  sizes = (1, 4096, 1536), (1, 1536, 4096)
  into, out = (cast("Array", jax.ShapeDtypeStruct(size, jnp.bfloat16)) for size in sizes)
  experts = ExpertWeights(into, into, out)
  capacity = row_capacity(8192, 8, ranks, config)
  cost = cost_on(known.resolve(), jnp.dtype(jnp.bfloat16), experts, capacity).plan
  for ratio in (r for r in _RATIOS if r < ranks):
    load_GE = testing.zipf_loads(0, 16 * ranks, ranks, 8192, 8, ratio, shuffle=False)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
      plan = plan_quotas(jnp.asarray(load_GE), config, cost)
    load_G = np.asarray(plan.quota).sum(axis=0)
    name = f"ratio {ratio}, max/mean {load_G.max() / load_G.mean():.4f}"
    cases[name] = (np.asarray(plan.replica_expert), np.asarray(plan.parent))
  for name, parents in (("direct", [0] * (ranks - 1)), ("chain", range(ranks - 1))):
    replica_GS, parent_GS = np.full((2, ranks, 2), -1)
    replica_GS[1:, 0] = 0
    parent_GS[1:, 0] = parents
    cases[f"one to all, {name}"] = (replica_GS, parent_GS)
  return cases


def busiest(placement: Placement) -> int:
  """The copies that the busiest rank sends or receives."""
  sent = int(jnp.max(egress_per_rank(jnp.asarray(placement[1]))))
  return max(sent, int((placement[0] >= 0).sum(axis=1).max()))


def stacked(placement: Placement, mesh: jax.sharding.Mesh) -> Array:
  """The two parts of a placement for every rank, sharded over all."""
  plan_2GS = np.stack(placement).astype(np.int32)
  return processes.put(np.tile(plan_2GS, (mesh.size, 1, 1)), NamedSharding(mesh, P(AXIS)))


def device_times(
  kernel_name: str,
  function: Callable[..., Array],
  args: tuple[Array, ...],
  mesh: jax.sharding.Mesh,
  donate: bool = False,
) -> str:
  """Microseconds on the slowest device: the kernel, and all of a call; ``donate``: as ``timed``."""
  spec = P(AXIS)
  call = jax.jit(
    jax.shard_map(
      function, mesh=mesh, in_specs=(spec,) * len(args), out_specs=spec, check_vma=False
    ),
    donate_argnums=0 if donate else (),
  )
  first, *rest = jax.device_put(args, NamedSharding(mesh, spec))
  first = jax.block_until_ready(call(first, *rest))

  def run() -> Array:
    nonlocal first  # each call may use up the result of the one before
    first = call(first, *rest)
    return first

  devices = timing.device_events(run, _PROFILED)
  kernel = [[e.duration_ns for e in d if e.name.startswith(kernel_name)] for d in devices]
  span = [timing.spans(events, _PROFILED) for events in devices]
  return f"device: kernel {_micro(kernel)}, call {_micro(span)} us"


def times_table(
  label: str, megabytes: float, measured: Sequence[tuple[str, Placement, float, str]]
) -> str:
  """How long an operation took.

  Args:
    label: of its layout.
    megabytes: of one copy.
    measured: for each plan its name, the placement, seconds of a call, and ``device_times``.
  """
  rows = []
  for name, placement, seconds, device in measured:
    copies = busiest(placement)
    rate = copies * megabytes / 1e3 / seconds
    rows.append([label, name, megabytes, copies, seconds * 1e6, rate, device])
  header = ["layout", "plan", "MB", "copies", "us", "GB/s", "on the device"]
  return table(header, rows, digits=1)


def _micro(nanoseconds: list[list[float]]) -> str:
  medians = [np.median(device) for device in nanoseconds if device]
  return f"{max(medians) / 1e3:.1f}" if medians else "-"
