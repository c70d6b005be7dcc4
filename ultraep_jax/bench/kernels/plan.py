"""Checks and times the kernels that choose, plan and route, beside what is portable.

Run on one GPU: ``ultraep bench plan``. Checks compare plans bit for bit over random
and degenerate loads, and choices over random scores, ties and special values. Times are the
device's, from a profiler trace: of the kernels alone, and from the start of a call's first kernel
to the end of its last.
"""

import argparse
import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import RoutingTuning, top_k
from ultraep_jax import testing
from ultraep_jax.bench import timing
from ultraep_jax.bench.machine import devices_for_kernels
from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning import plan as planner
from ultraep_jax.planning import route
from ultraep_jax.planning.exact import slots_that_suffice
from ultraep_jax.tools.arguments import natural, positive
from ultraep_jax.types import Array, Plan, PlanCost, Routes

_PROFILED = 20  # calls in a trace
# Those beyond what the shape can have become its largest; at 1 there is nothing to plan.
RATIOS = (1.0, 1.3, 1.5, 2.0, 2.5, 3.0, 6.0)
COST = PlanCost(copy_rows=900, capacity_rows=69_632, group_rows=100)

Shape = tuple[int, int, int, dict[str, Any]]  # experts, ranks, slots and options

# "All fit" have slots that suffice for every load.
SHAPES: dict[str, Shape] = {
  "E64 G4 S2": (64, 4, 2, {}),
  "E256 G64 S2": (256, 64, 2, {}),
  "E512 G64 S2": (512, 64, 2, {}),
  "E256 G64 S4, all fit": (256, 64, 4, {}),
  "E64 G4 S16, all fit": (64, 4, 16, {}),
  "E128 G2 S32, all fit": (128, 2, 32, {}),
  "E384 G2 S96, all fit": (384, 2, 96, {}),
  "E512 G2 S128, all fit": (512, 2, 128, {}),
  "E512 G2 S256, all fit": (512, 2, 256, {}),
  "E512 G8 S56, all fit": (512, 8, 56, {}),
  "E512 G8 S64, all fit": (512, 8, 64, {}),
  "E384 G2 S95": (384, 2, 95, {}),
  "E16 G2 S2": (16, 2, 2, {}),
  "E128 G8 S3": (128, 8, 3, {}),
  "E64 G4 S2 target": (64, 4, 2, {"target": 1.01, "min_tokens_per_replica": 128}),
  "E256 G64 S2 domains": (256, 64, 2, {"domain_size": 8}),
  "E256 G64 S2 direct": (256, 64, 2, {"transfer": "direct"}),
}
TIMED = tuple(SHAPES)[:11]
RANKS, HOMES, SLOTS = (
  (2, 3, 8, 16, 32, 64),
  (1, 2, 7, 32, 33, 64, 128, 256),
  (1, 2, 8, 65, 128, 256),
)
EXPERTS = (16, 2048)  # least and most, of shapes at random
ROUTED = ((256, 64), (64, 4))  # experts and ranks, at T8192 K8
CHOSEN = ((64, 6), (128, 8), (256, 8), (512, 10))  # experts and choices


def main() -> None:
  parser = argparse.ArgumentParser(description="Checks and times the planner kernels.")
  parser.add_argument("what", nargs="*", default=["check", "time", "route", "choose"])
  parser.add_argument("--loads", type=natural, default=100, help="random loads to check per shape")
  parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
  parser.add_argument("--random-shapes", type=natural, default=0, help="more to check")
  parser.add_argument("--seed", type=natural, default=0, help="of random shapes")
  parser.add_argument("--route-tunings", nargs="*", default=[], help="more, GROUPSxPEERSxCLUSTERS")
  parser.add_argument("--tokens", type=positive, default=8192, help="per rank")
  args = parser.parse_args()
  print(f"jax {jax.__version__}, {devices_for_kernels()[0].device_kind}", flush=True)
  routings = [RoutingTuning()]
  for text in args.route_tunings:
    groups, peers, clusters = map(int, text.split("x"))
    routings.append(RoutingTuning(groups=groups, peers=peers, clusters=clusters))
  if "check" in args.what:
    shapes = {name: SHAPES[name] for name in args.shapes}
    shapes |= random_shapes(args.random_shapes, args.seed)
    for name, shape in shapes.items():
      for objective in ("balance", "time", "exact")[: 2 + suffice(shape)]:
        check(name, shape, objective, args.loads, args.tokens)
    count = max(1, args.loads // 10)
    for size, tokens, tuning in itertools.product(
      ROUTED, (args.tokens, 4 * args.tokens, 77), routings
    ):
      check_routes(*size, tokens, count, tuning)
    for size, tokens in itertools.product((*CHOSEN, (60, 16), (8, 1)), (args.tokens, 77, 1)):
      check_choices(*size, tokens)
  if "time" in args.what:
    timed = [name for name in args.shapes if name in TIMED]
    for name, objective in itertools.product(timed, ("balance", "time")):
      time_plans(name, objective, args.tokens)
  if "route" in args.what:
    for num_experts, num_ranks in ROUTED:
      time_routes(num_experts, num_ranks, args.tokens, routings)
  if "choose" in args.what:
    for size in CHOSEN:
      time_choices(*size, args.tokens)


Planner = Callable[[Array], Plan]


def random_shapes(count: int, seed: int) -> dict[str, Shape]:
  rng = np.random.default_rng(seed)
  shapes: dict[str, Shape] = {}
  while len(shapes) < count:
    ranks, home, slots = (int(rng.choice(values)) for values in (RANKS, HOMES, SLOTS))
    if EXPERTS[0] <= ranks * home <= EXPERTS[1]:
      transfer = str(rng.choice(["auto", "direct"]))
      name = f"E{ranks * home} G{ranks} S{slots} {transfer}"
      shapes[name] = (ranks * home, ranks, slots, {"transfer": transfer})
  return shapes


def suffice(shape: Shape) -> bool:
  """Whether the slots balance every load, with the options that a shape has."""
  num_experts, num_ranks, slots, options = shape
  return slots >= slots_that_suffice(num_experts, num_ranks) and set(options) <= {"transfer"}


def planners(shape: Shape, objective: str) -> tuple[Planner, Planner]:
  """The kernels and the portable planner, for a shape and an objective or by construction."""
  num_experts, num_ranks, slots, options = shape
  by = "balance" if objective == "exact" else objective
  config = BalanceConfig(replica_slots=slots, **{"objective": by, **options})
  setup, cost = planner.set_up(jnp.zeros((num_ranks, num_experts), jnp.int32), config, COST)
  setup = setup._replace(searches=objective != "exact")
  return (
    lambda load_GE: planner._plan_on_gpu(load_GE, setup, cost),
    lambda load_GE: planner._plan(load_GE, setup, cost),
  )


# --- checks ----------------------------------------------------------------------------------


def loads(num_experts: int, num_ranks: int, tokens: int, count: int) -> Iterator[np.ndarray]:
  """``[G, E]`` int32: degenerate ones, those that are hard for planners, then random ones."""
  size = (num_experts, num_ranks, tokens, 8)
  yield np.zeros((num_ranks, num_experts), np.int32)
  yield np.ones((num_ranks, num_experts), np.int32)
  yield testing.balanced_loads(0, *size)
  for rank in (0, num_ranks - 1):
    yield testing.all_to_one_loads(*size, rank=rank)
    yield testing.all_to_one_loads(num_experts, num_ranks, tokens, 1, rank=rank)
  for seed, kind in itertools.product(range(3), testing.ADVERSARIAL_KINDS):
    yield testing.adversarial_loads(seed, *size, kind=kind)
  rng = np.random.default_rng(0)
  for seed in range(count):
    most = max_ratio(num_experts, num_ranks, 8)
    if seed % 4 == 0:
      yield testing.zipf_loads(seed, *size, min(float(rng.uniform(1.3, 6)), most))
    elif seed % 4 == 1:
      ratio = min(float(rng.uniform(1.3, 6)), num_ranks, num_experts / 8)
      yield testing.flat_loads(seed, *size, ratio)
    elif seed % 4 == 2:  # many ties
      yield rng.integers(0, 4, (num_ranks, num_experts)).astype(np.int32)
    else:  # power laws up to int32
      weight_E = rng.permutation((np.arange(num_experts) + 1.0) ** -rng.uniform(0, 6))
      weight_GE = weight_E * rng.uniform(0.5, 1.5, (num_ranks, num_experts))
      yield (weight_GE / weight_GE.sum() * 2 ** rng.uniform(2, 30.9)).astype(np.int32)


@functools.cache
def max_ratio(num_experts: int, num_ranks: int, top_k: int) -> float:
  """The largest ratio that ``zipf_loads`` has for a shape, a little rounded down."""
  low, high = 1.0, float(num_ranks)
  for _ in range(12):
    middle = (low + high) / 2
    try:
      testing.zipf_loads(0, num_experts, num_ranks, 64, top_k, middle)
      low = middle
    except ValueError:
      high = middle
  return low


def differ(left: Plan | Routes, right: Plan | Routes) -> Array:
  """Whether two results differ anywhere, field by field."""
  return jnp.stack([jnp.any(x != y) for x, y in zip(left, right, strict=True)])


def where_wrong(kind: type[Plan | Routes], wrong_LF: np.ndarray) -> dict[str, list[int]]:
  """The cases in which a field is wrong, of those in which any is."""
  by_field = zip(kind._fields, wrong_LF.T, strict=True)
  return {field: np.flatnonzero(wrong).tolist() for field, wrong in by_field if wrong.any()}


def check(name: str, shape: Shape, objective: str, count: int, tokens: int) -> None:
  """Raises AssertionError unless all plans are equal bit for bit, and fit where they must."""
  num_experts, num_ranks, *_ = shape
  kernel, plain = planners(shape, objective)

  @jax.jit
  def compare(load_LGE: Array) -> tuple[Array, Array, Array]:
    def both(load_GE: Array) -> tuple[Array, Array, Array]:
      left, right = kernel(load_GE), plain(load_GE)
      busiest = jnp.max(jnp.sum(right.quota, axis=0))
      return differ(left, right), jnp.sum(right.replica_expert >= 0), busiest

    return lax.map(both, load_LGE)

  load_LGE = np.stack(list(loads(num_experts, num_ranks, tokens, count)))
  try:
    wrong_L3, replicas_L, busiest_L = map(np.asarray, compare(load_LGE))
  except NotImplementedError as reason:
    print(f"not by kernels: {name}: {reason}", flush=True)
    return
  bad = where_wrong(Plan, wrong_L3)
  assert not bad, f"{name} by {objective}: plans differ for loads {bad}"
  could_fit_L = load_LGE.sum((1, 2), dtype=np.int64) <= COST.capacity_rows * num_ranks
  above = int(np.sum(could_fit_L & (busiest_L > COST.capacity_rows)))
  assert not (above and suffice(shape)), f"{name} by {objective}: {above} plans do not fit"
  print(
    f"correct: {name} by {objective}, {len(load_LGE)} loads, up to {replicas_L.max()} replicas, "
    f"{above} plans above a capacity that the mean is not",
    flush=True,
  )


# --- times -----------------------------------------------------------------------------------


def time_plans(name: str, objective: str, tokens: int) -> None:
  num_experts, num_ranks, *_ = SHAPES[name]
  most = max_ratio(num_experts, num_ranks, 8)
  kernel, plain = planners(SHAPES[name], objective)  # once: another function is another compilation
  for ratio in sorted({min(ratio, most) for ratio in RATIOS}):
    load_GE = testing.zipf_loads(0, num_experts, num_ranks, tokens, 8, ratio)
    lines = []
    for label, plan in (("kernels", kernel), ("portable", plain)):
      lines.append(f"{label} {profile(plan, jnp.asarray(load_GE))}")
    print(f"{name} by {objective}, ratio {ratio:.2f}: {'; '.join(lines)}", flush=True)


def named(tuning: RoutingTuning) -> str:
  return f"kernel {tuning.groups} x {tuning.peers} x {tuning.clusters}"


def time_routes(
  num_experts: int, num_ranks: int, tokens: int, tunings: Sequence[RoutingTuning]
) -> None:
  load_GE = testing.zipf_loads(0, num_experts, num_ranks, tokens, 8, 2.0)
  index_TK = testing.expert_indices(0, load_GE, 8)[0]
  config = BalanceConfig(replica_slots=2, objective="balance")
  plan = planner.plan_quotas(jnp.asarray(load_GE), config)

  args = (jnp.asarray(index_TK), jnp.asarray(load_GE), plan, jnp.int32(0))
  operations = {named(t): functools.partial(route._route_on_gpu, tuning=t) for t in tunings}
  for name, operation in (operations | {"portable": route._route}).items():
    print(f"route E{num_experts} G{num_ranks} T{tokens} K8, {name}: {profile(operation, *args)}")


def check_routes(
  num_experts: int, num_ranks: int, tokens: int, count: int, tuning: RoutingTuning
) -> None:
  """Raises AssertionError unless all routes are equal bit for bit."""
  config = BalanceConfig(replica_slots=2, objective="balance")
  rng = np.random.default_rng(0)

  @jax.jit
  def compare(index_GTK: Array, load_GE: Array) -> Array:
    plan = planner.plan_quotas(load_GE, config)

    def both(args: tuple[Array, Array]) -> Array:
      index_TK, rank = args
      left = route._route_on_gpu(index_TK, load_GE, plan, rank, tuning)
      right = route._route(index_TK, load_GE, plan, rank)
      return differ(left, right)

    return lax.map(both, (index_GTK, jnp.arange(num_ranks, dtype=jnp.int32)))

  for seed in range(count):
    ratio = min(float(rng.uniform(1.3, 6)), max_ratio(num_experts, num_ranks, 8))
    load_GE = testing.zipf_loads(seed, num_experts, num_ranks, tokens, 8, ratio)
    index_GTK = testing.expert_indices(seed, load_GE, 8)
    # The load matrix is to be that of the assignments, so the masked ones are taken out.
    index_GTK = np.where(rng.random(index_GTK.shape) < 0.05 * (seed % 2), -1, index_GTK)
    flat = index_GTK.reshape(num_ranks, -1)
    load_GE = np.stack([np.bincount(f[f >= 0], minlength=num_experts) for f in flat])
    wrong_G4 = np.asarray(compare(index_GTK, load_GE.astype(np.int32)))
    bad = where_wrong(Routes, wrong_G4)
    assert not bad, (
      f"E{num_experts} G{num_ranks} T{tokens}, load {seed}: routes differ on ranks {bad}"
    )
  print(
    f"correct: routes of E{num_experts} G{num_ranks} T{tokens}, {count} loads, {named(tuning)}",
    flush=True,
  )


def scores(num_experts: int, tokens: int) -> dict[str, np.ndarray]:
  """``[T, E]`` float32, of several kinds."""
  rng, shape = np.random.default_rng(0), (tokens, num_experts)
  bits = rng.integers(0, 2**32, shape, np.uint32)
  special = np.array([0.0, -0.0, 1e-45, np.inf, -np.inf, np.nan, -np.nan], np.float32)
  return {
    "random": rng.random(shape, np.float32),
    "ties": rng.integers(0, 3, shape).astype(np.float32),
    "special": rng.choice(special, shape),
    "any bits": bits.view(np.float32),
    "any NaN": (bits | 0x7F800000).view(np.float32),
  }


def check_choices(num_experts: int, top: int, tokens: int) -> None:
  """Raises AssertionError unless all choices are equal."""

  @jax.jit
  def wrong(scores_TE: Array) -> Array:
    return jnp.sum(top_k(scores_TE, top) != lax.top_k(scores_TE, top)[1])

  for kind, scores_TE in scores(num_experts, tokens).items():
    count = int(wrong(scores_TE))
    assert not count, f"E{num_experts} T{tokens} K{top}, {kind}: {count} choices differ"
  print(f"correct: choices of E{num_experts} T{tokens} K{top}", flush=True)


def time_choices(num_experts: int, top: int, tokens: int) -> None:
  scores_TE = scores(num_experts, tokens)["random"]
  kinds = {"kernel": top_k, "portable": lambda x, k: lax.top_k(x, k)[1]}
  for name, choose in kinds.items():
    text = profile(functools.partial(choose, k=top), scores_TE)
    print(f"choose E{num_experts} T{tokens} K{top}, {name}: {text}", flush=True)


def profile(function: Callable[..., Any], *args: Any) -> str:
  """Microseconds on the device: all of a call, and its longest kernels."""
  call = jax.jit(function)
  args = jax.device_put(args)
  jax.block_until_ready(call(*args))
  devices = timing.device_events(lambda: call(*args), _PROFILED)
  names = collections.Counter()
  for event in itertools.chain(*devices):
    names[event.name] += event.duration_ns
  spans = [span for events in devices for span in timing.spans(events, _PROFILED)]
  kernels = sum(map(len, devices))
  longest = ", ".join(f"{n} {ns / _PROFILED / 1e3:.1f}" for n, ns in names.most_common(4))
  total = f"{np.median(spans) / 1e3:.1f}" if spans else "-"
  return f"{total} us, {kernels / _PROFILED:g} kernels ({longest})"


if __name__ == "__main__":
  main()
