"""Times the first matmul of forward with copies of weights before it, and beside it.

Run on every GPU of a host: ``ultraep bench beside``. Of a layer only the gated matmul
is run, on the rows that a plan gives every rank. What is exposed is the time over that of the same
matmul with copies that are there already; all run in turn.
"""

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import Projections, TransferTuning, gated_beside, replicate, replication
from ultraep_jax import testing
from ultraep_jax.activations import swiglu
from ultraep_jax.bench import timing
from ultraep_jax.bench.kernels.matmul_problems import swiglu_matmul
from ultraep_jax.bench.kernels.portable import AXIS
from ultraep_jax.bench.kernels.transfers import open_mesh, tunings_of
from ultraep_jax.bench.layer.problem import SHAPES, random_normal
from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning.plan import plan_quotas
from ultraep_jax.tables import table
from ultraep_jax.tools.arguments import factor, positive
from ultraep_jax.types import Array

HOME, _SLOTS, TOKENS = 16, 2, 8192  # experts and replica slots of a rank, its tokens
CAPACITY_FACTOR = 1.0625
_SCALE = 0.02  # of rows and weights

Call = Callable[..., Any]


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--shape", default="qwen3-235b", choices=list(SHAPES))
  parser.add_argument("--ratios", nargs="+", type=factor, default=[1.3, 1.5])
  parser.add_argument(
    "--tunings", nargs="*", default=["12x3x16384"], help="of the copies, BLOCKSx3xBYTES"
  )
  parser.add_argument("--calls", type=positive, default=10, help="calls chained inside one jit")
  parser.add_argument("--repeats", type=positive, default=5)
  return run(parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
  mesh = open_mesh()
  shape = SHAPES[args.shape]
  capacity = int(TOKENS * shape.top_k * CAPACITY_FACTOR)
  data = random_arrays(mesh, capacity, shape.width, shape.inner)
  calls = variants(tunings_of(args.tunings))
  programs = {name: sharded(timing.chain(call, args.calls), mesh) for name, call in calls.items()}
  for ratio in args.ratios:
    plan = make_plan(mesh.size, TOKENS, shape.top_k, ratio)
    arguments = (*data, *(on_ranks(mesh, part) for part in plan))
    runs = {name: functools.partial(f, *arguments) for name, f in programs.items()}
    seconds = timing.in_turn(runs, args.repeats, args.calls)
    times = {name: 1e6 * timing.median(values) for name, values in seconds.items()}
    print(f"ratio {ratio}, rows of replicas {plan.rows_GP[:, HOME:].sum(axis=1).tolist()}")
    rows = [[name, micro, micro - times["copies known"]] for name, micro in times.items()]
    print(table(["copies", "us", "exposed us"], rows, digits=0), flush=True)
  return 0


class Plan(NamedTuple):
  """Rows of each slot ``[G, M + S]``, and for each rank all copies and trees ``[G, G, S]``."""

  rows_GP: np.ndarray
  expert_GS: np.ndarray
  parent_GS: np.ndarray


def make_plan(ranks: int, tokens: int, top_k: int, ratio: float) -> Plan:
  """The planner's, for skewed loads."""
  load_GE = testing.zipf_loads(1, HOME * ranks, ranks, tokens, top_k, ratio)
  config = BalanceConfig(replica_slots=_SLOTS, objective="balance", implementation="portable")
  with jax.default_device(jax.local_devices(backend="cpu")[0]):
    plan = jax.device_get(plan_quotas(jnp.asarray(load_GE), config))
  rank_G = np.arange(ranks)
  quota_GE = np.asarray(plan.quota).T
  home_GM = quota_GE.reshape(ranks, ranks, HOME)[rank_G, rank_G]
  expert_GS = np.asarray(plan.replica_expert)
  replica_GS = np.where(expert_GS >= 0, quota_GE[rank_G[:, None], expert_GS], 0)
  every = [np.stack([part] * ranks) for part in (expert_GS, np.asarray(plan.parent))]
  return Plan(np.concatenate([home_GM, replica_GS], axis=1).astype(np.int32), *every)


def random_arrays(
  mesh: jax.sharding.Mesh, capacity: int, width: int, inner: int
) -> tuple[Array, Array, Array, Array]:
  """Rows, and the three matrices of every home expert."""
  experts = mesh.size * HOME
  projection = experts, width, inner
  return (
    random_normal(mesh, 0, _SCALE, mesh.size * capacity, width),
    random_normal(mesh, 1, _SCALE, *projection),
    random_normal(mesh, 2, _SCALE, *projection),
    random_normal(mesh, 3, _SCALE, experts, inner, width),
  )


def on_ranks(mesh: jax.sharding.Mesh, part: np.ndarray) -> Array:
  """``[G, …]`` of all ranks, sharded over them without the leading axis."""
  return jax.device_put(part.reshape(-1, *part.shape[2:]), NamedSharding(mesh, P(AXIS)))


def sharded(function: Call, mesh: jax.sharding.Mesh) -> Call:
  return jax.jit(
    jax.shard_map(
      lambda *args: function(*args)[None],
      mesh=mesh,
      in_specs=(P(AXIS),) * 7,
      out_specs=P(AXIS),
      check_vma=False,
    )
  )


def variants(tunings: Mapping[str, TransferTuning]) -> dict[str, Call]:
  """Calls of ``(i, rows, gate, up, wo, sizes, experts, parents)``."""

  def known(
    _: Array, rows: Array, gate: Array, up: Array, wo: Array, sizes_P: Array, *plan: Array
  ) -> Any:
    slots = plan[0].shape[1]
    copies = gate[:slots], up[:slots]
    return swiglu_matmul(rows, gate, up, *copies, sizes_P, keep_hidden=False).inner_CN

  def before(
    _: Array, rows: Array, gate: Array, up: Array, wo: Array, sizes_P: Array, *plan: Array
  ) -> Any:
    copies = replicate([gate, up], *plan, axis_name=AXIS)
    more_gate, more_up = copies
    results = swiglu_matmul(rows, gate, up, more_gate, more_up, sizes_P, keep_hidden=False)
    return results.inner_CN, copies

  def beside(
    tuning: TransferTuning,
    _: Array,
    rows: Array,
    gate: Array,
    up: Array,
    wo: Array,
    sizes_P: Array,
    *plan: Array,
  ) -> Any:
    copying = replication([gate, up], *plan, axis_name=AXIS, tuning=tuning, flat=False)
    assert copying is not None, "expected slots"
    results, copies = gated_beside(
      copying,
      rows,
      Projections((gate, up)),
      sizes_P,
      swiglu,
      keep_hidden=False,
    )
    return results.inner_CN, copies

  riding = {f"beside, {label}": functools.partial(beside, t) for label, t in tunings.items()}
  return {"copies known": known, "copies before": before, **riding}


if __name__ == "__main__":
  raise SystemExit(main())
