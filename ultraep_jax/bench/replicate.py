"""Checks and times the replication kernel beside the portable operation.

Run on every GPU of a host: ``python -m ultraep_jax.bench.replicate``. Checks compare random
experts bit for bit over random legal plans. Times are of many calls chained inside one jit; each
line is the median of several runs and names the copies that the busiest rank sends or receives.
"""

import argparse
import functools
import itertools
import pathlib
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.replicate import replicate
from pallas_kernels.tiles import Tuning
from ultraep_jax import replicate as portable
from ultraep_jax import testing
from ultraep_jax.bench.portable import AXIS, timed
from ultraep_jax.config import BalanceConfig
from ultraep_jax.plan import plan_quotas
from ultraep_jax.relay import egress_per_rank
from ultraep_jax.types import Array

Placement = tuple[np.ndarray, np.ndarray]  # replica_expert_GS, parent_GS

DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "int8")
_PROFILED = 10  # calls in a trace
RATIOS = (1.5, 2.0, 2.5, 3.0)


def main() -> None:
  parser = argparse.ArgumentParser(description="Checks and times the replication kernel.")
  parser.add_argument("--plans", type=int, default=20, help="random plans to check per shape")
  parser.add_argument("--scale", type=int, default=1, help="divide all sizes, to try it on a CPU")
  parser.add_argument("--megabytes", nargs="*", type=float, default=[37.7], help="per expert")
  parser.add_argument("--tunings", nargs="*", default=["132x2x16384"], help="BLOCKSxWORKERSxBYTES")
  parser.add_argument("--calls", type=int, default=20, help="calls chained inside one jit")
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument("--portable", action="store_true", help="time the portable operation too")
  args = parser.parse_args()
  mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
  print(f"jax {jax.__version__}, {mesh.size} x {jax.devices()[0].device_kind}", flush=True)
  tunings = [Tuning(*map(int, text.split("x"))) for text in args.tunings]
  check(mesh, args.plans, tunings[0], 200_000 // args.scale)
  cases = time_cases(mesh.size)
  for megabytes in args.megabytes:
    arrays = random_experts(mesh, 16, [(int(megabytes * 1e6) // (16 * args.scale) * 8,)])
    for tuning in tunings:
      run = functools.partial(replicate, axis_name=AXIS, tuning=tuning)
      label = f"{tuning.blocks} x {tuning.workers} x {tuning.tile_bytes}"
      report(label, run, mesh, arrays, cases, args.calls, args.repeats)
    if args.portable:
      report("portable", ring, mesh, arrays, cases, args.calls, args.repeats)


Operation = Callable[[list[Array], Array, Array], list[Array]]


def ring(arrays: list[Array], replica_expert_GS: Array, parent_GS: Array) -> list[Array]:
  del parent_GS
  return portable.replicate(arrays, replica_expert_GS, axis_name=AXIS)


# --- plans -----------------------------------------------------------------------------------


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


def time_cases(ranks: int) -> dict[str, Placement]:
  """Plans for skewed loads of 16 experts a rank, and one expert to all ranks, two ways."""
  cases: dict[str, Placement] = {"empty": (np.full((ranks, 2), -1), np.full((ranks, 2), -1))}
  config = BalanceConfig(objective="balance")
  for ratio in (r for r in RATIOS if r < ranks):
    load_GE = testing.zipf_loads(0, 16 * ranks, ranks, 8192, 8, ratio, shuffle=False)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
      plan = plan_quotas(jnp.asarray(load_GE), config)
    cases[f"ratio {ratio}"] = (np.asarray(plan.replica_expert), np.asarray(plan.parent))
  for name, parents in (("direct", [0] * (ranks - 1)), ("chain", range(ranks - 1))):
    replica_GS, parent_GS = np.full((2, ranks, 2), -1)
    replica_GS[1:, 0] = 0
    parent_GS[1:, 0] = parents
    cases[f"one to all, {name}"] = (replica_GS, parent_GS)
  return cases


# --- checks ----------------------------------------------------------------------------------


def check(mesh: jax.sharding.Mesh, plans: int, tuning: Tuning, most_units: int) -> None:
  """Raises AssertionError unless every copy equals its expert bit for bit."""
  rng = np.random.default_rng(0)
  run = sharded(functools.partial(replicate, axis_name=AXIS, tuning=tuning), mesh)
  for home, slots, dtypes in ((2, 2, DTYPES[:1]), (4, 3, DTYPES), (1, 1, DTYPES[1:2])):
    for index in range(plans):
      if index % 5 == 0:  # another shape is another compilation
        row = 16 * int(rng.integers(1, most_units))
      shapes = [(row * (1 + i),) for i in range(len(dtypes))]
      arrays = random_experts(mesh, home, shapes, dtypes, seed=index)
      placement = random_placement(rng, mesh.size, home, slots)
      copies = run(arrays, *map(jnp.asarray, placement))
      expert_R = placement[0].reshape(-1)
      for copy, array in zip(copies, arrays, strict=True):
        got, want = np.asarray(copy).view(np.uint8), np.asarray(array).view(np.uint8)
        wrong = (got[expert_R >= 0] != want[expert_R[expert_R >= 0]]).sum()
        assert not wrong, f"{wrong} bytes differ, {placement}, {shapes}, {dtypes}"
    print(f"correct: {plans} plans, M{home} S{slots} {dtypes}", flush=True)


def random_experts(
  mesh: jax.sharding.Mesh,
  home: int,
  shapes: list[tuple[int, ...]],
  dtypes: tuple[str, ...] = ("bfloat16",),
  seed: int = 0,
) -> list[Array]:
  @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P(AXIS)))
  def make(key: Array) -> list[Array]:
    keys = jax.random.split(key, len(shapes))
    bits = [
      jax.random.bits(k, (mesh.size * home, *s), f"uint{8 * jnp.dtype(d).itemsize}")
      for k, s, d in zip(keys, shapes, dtypes, strict=True)
    ]
    return [lax.bitcast_convert_type(b, d) for b, d in zip(bits, dtypes, strict=True)]

  return make(jax.random.key(seed))


def sharded(operation: Operation, mesh: jax.sharding.Mesh) -> Callable[..., list[Array]]:
  in_specs = (P(AXIS), P(), P())
  return jax.jit(
    jax.shard_map(operation, mesh=mesh, in_specs=in_specs, out_specs=P(AXIS), check_vma=False)
  )


# --- times -----------------------------------------------------------------------------------


def report(
  label: str,
  operation: Operation,
  mesh: jax.sharding.Mesh,
  arrays: list[Array],
  cases: dict[str, Placement],
  calls: int,
  repeats: int,
) -> None:
  megabytes = sum(array[0].nbytes for array in arrays) / 1e6

  def once(plan_2GS: Array, *arrays: Array) -> Array:
    copies = operation(list(arrays), plan_2GS[0], plan_2GS[1])
    bits = lax.bitcast_convert_type(copies[0].reshape(-1)[0], jnp.uint16)
    return plan_2GS + (bits.astype(jnp.int32) >> 20)  # a zero that the compiler cannot see

  for name, placement in cases.items():
    stacked = jnp.tile(jnp.asarray(np.stack(placement), jnp.int32), (mesh.size, 1, 1))
    seconds = timed((once, (stacked, *arrays)), mesh, calls, repeats)
    device = device_times(once, (stacked, *arrays), mesh)
    sent = int(jnp.max(egress_per_rank(jnp.asarray(placement[1]))))
    copies = max(sent, int((placement[0] >= 0).sum(axis=1).max()))
    rate = copies * megabytes / 1e3 / seconds
    print(
      f"{label:16} {name:19} {megabytes:6.1f} MB x {copies} {seconds * 1e6:8.1f} us"
      f" {rate:7.1f} GB/s; {device}",
      flush=True,
    )


def device_times(
  function: Callable[..., Array], args: tuple[Array, ...], mesh: jax.sharding.Mesh
) -> str:
  """Microseconds on the device: the kernel, and all of a call."""
  spec = P(AXIS)
  call = jax.jit(
    jax.shard_map(
      function, mesh=mesh, in_specs=(spec,) * len(args), out_specs=spec, check_vma=False
    )
  )
  first, *rest = jax.device_put(args, NamedSharding(mesh, spec))
  first = jax.block_until_ready(call(first, *rest))
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      for _ in range(_PROFILED):
        first = jax.block_until_ready(call(first, *rest))
    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(path))
  kernel, span = [], []
  for plane in profile.planes:
    if plane.name.startswith("/device:GPU"):
      lines = [line.events for line in plane.lines if line.name.startswith("Stream")]
      events = sorted(itertools.chain(*lines), key=lambda event: event.start_ns)
      kernel += [e.duration_ns for e in events if e.name.startswith("replicate")]
      for call in np.array_split(np.array(events, object), _PROFILED):
        span.append(call[-1].start_ns + call[-1].duration_ns - call[0].start_ns)
  return f"device: kernel {_micro(kernel)}, call {_micro(span)} us"


def _micro(nanoseconds: list[float]) -> str:
  return f"{np.median(nanoseconds) / 1e3:.1f}" if nanoseconds else "-"


if __name__ == "__main__":
  main()
