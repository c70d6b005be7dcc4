"""Measures the portable operations beside the alternatives that JAX offers.

Run on every GPU of a host: ``ultraep bench portable``. Each line is the median of
several runs of many calls chained inside one jit, so that neither launches nor the host count.
"""

import argparse
import functools
import json
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ultraep_jax import testing
from ultraep_jax.bench.machine import devices
from ultraep_jax.compute import grouped, tile_matmul
from ultraep_jax.config import BalanceConfig
from ultraep_jax.files import check_output, write_text
from ultraep_jax.moe import moe
from ultraep_jax.planning import route
from ultraep_jax.planning.capacity import row_capacity
from ultraep_jax.planning.load import expert_load
from ultraep_jax.planning.plan import home_quota, plan_quotas
from ultraep_jax.tables import table
from ultraep_jax.tools.arguments import positive
from ultraep_jax.tools.errors import described
from ultraep_jax.transport import block_exchange, local_rows, replicate
from ultraep_jax.types import Array, ExpertWeights, Plan, Routes

AXIS = "expert"


def main() -> None:
  parser = argparse.ArgumentParser(description="Measures the portable operations.")
  parser.add_argument("--what", nargs="+", default=list(BENCHES), choices=list(BENCHES))
  parser.add_argument(
    "--scale", type=positive, default=1, help="divide all sizes, to try it on a CPU"
  )
  parser.add_argument("--calls", type=positive, default=10, help="calls chained inside one jit")
  parser.add_argument("--repeats", type=positive, default=5)
  parser.add_argument("--json", type=pathlib.Path, help="write the results to this file too")
  args = parser.parse_args()
  check_output(args.json)
  found = devices(full_size=args.scale == 1)
  mesh = jax.make_mesh((len(found),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
  print(f"jax {jax.__version__}, {mesh.size} x {found[0].device_kind}")
  results = {}
  for name in args.what:
    rows = []
    for label, run, amount, unit in BENCHES[name](mesh, args.scale):
      try:
        seconds = timed(run, mesh, args.calls, args.repeats)
      except Exception as error:  # an alternative that this backend lacks
        rows.append([name, label, None, None, described(error, most=60)])
        continue
      results[f"{name}/{label}"] = seconds
      rows.append([name, label, seconds * 1e6, amount / seconds / 1e9, unit])
    print(table(["", "operation", "us", "rate", "unit"], rows, digits=1), flush=True)
  if args.json:
    write_text(args.json, json.dumps(results, indent=1))


Run = tuple[Callable[..., Array], tuple[Array, ...]]
Case = tuple[str, Run, float, str]


def timed(
  run: Run, mesh: jax.sharding.Mesh, calls: int, repeats: int, donate: bool = False
) -> float:
  """Median seconds of one call of ``function(first, *rest) -> like first`` on every rank.

  ``donate`` gives up ``first``, which the calls may then update in place.
  """
  function, args = run

  def chain(*args: Array) -> Array:
    def body(_: Array, first: Array) -> Array:
      return function(first, *args[1:]).astype(first.dtype)

    return lax.fori_loop(0, calls, body, args[0])

  spec = P(AXIS)
  sharded_chain = jax.jit(
    jax.shard_map(chain, mesh=mesh, in_specs=(spec,) * len(args), out_specs=spec, check_vma=False),
    donate_argnums=0 if donate else (),
  )
  first, *rest = jax.device_put(args, NamedSharding(mesh, spec))
  answer = jax.block_until_ready(sharded_chain(first, *rest))
  seconds = []
  for _ in range(repeats):
    first = answer if donate else first
    start = time.perf_counter()
    answer = jax.block_until_ready(sharded_chain(first, *rest))
    seconds.append((time.perf_counter() - start) / calls)
  return float(np.median(seconds))


def plan_cases(mesh: jax.sharding.Mesh, scale: int) -> list[Case]:
  """The planner and the routes, for loads of ratio 2."""
  cases = []
  for num_experts, ranks in ((64, 4), (256, 64)):
    load_GE = testing.zipf_loads(0, num_experts, ranks, 8192 // scale, 8, 2.0)
    index_GTK = testing.expert_indices(0, load_GE, 8)
    config = BalanceConfig(replica_slots=2, objective="balance")
    loads = jnp.tile(jnp.asarray(load_GE), (mesh.size, 1))
    routed = plan_quotas(jnp.asarray(load_GE), config)

    def plan(load_GE: Array, config: BalanceConfig = config) -> Array:
      # A zero that the compiler cannot see keeps one call after the other.
      return load_GE + (jnp.max(plan_quotas(load_GE, config).parent) >> 30)

    def routes(
      load_GE: Array,
      index_TK: np.ndarray = index_GTK[0],
      plan: Plan = routed,
      config: BalanceConfig = config,
    ) -> Array:
      shifted_TK = jnp.asarray(index_TK) + (load_GE[0, 0] >> 30)
      answer = route.route_tokens(shifted_TK, load_GE, plan, 0, config)
      return load_GE + (jnp.max(answer.row_TK + answer.dest_TK) >> 30)

    cases.append((f"plan, E{num_experts} G{ranks} S2", (plan, (loads,)), 0.0, ""))
    cases.append((f"route, E{num_experts} G{ranks} T8192 K8", (routes, (loads,)), 0.0, ""))
  return cases


def exchange_cases(mesh: jax.sharding.Mesh, scale: int) -> list[Case]:
  """Dispatch of T4096 K8 D7168 bf16 tokens to rows, balanced over the ranks, and combine."""
  ranks, tokens, top_k, width = mesh.size, 4096 // scale, 8, 7168 // scale
  rng = np.random.default_rng(0)
  num_experts = 64 * ranks
  index = np.argsort(rng.random((ranks * tokens, num_experts)), axis=1)[:, :top_k]
  x = jnp.asarray(rng.normal(size=(ranks * tokens, width)), jnp.bfloat16)
  index = jnp.asarray(index, jnp.int32)
  config = BalanceConfig(replica_slots=0, objective="balance")
  capacity = row_capacity(tokens, top_k, ranks, config)
  capacity += 1024 // scale  # home placement of random choices is not quite even

  def routes_of(index_TK: Array) -> Routes:
    load_GE = lax.all_gather(expert_load(index_TK, num_experts), AXIS)
    empty = jnp.zeros((ranks, 0), jnp.int32)
    plan = Plan(empty, home_quota(load_GE), empty)
    return route.route_tokens(index_TK, load_GE, plan, lax.axis_index(AXIS), config)

  def crossing_of(index_TK: Array) -> block_exchange.BlockCrossing:
    return block_exchange.cross(routes_of(index_TK), 0, capacity, AXIS)

  def first(rows_XD: Array) -> Array:
    """As many rows as tokens, of all rows, which the barrier keeps."""
    return lax.optimization_barrier(rows_XD)[:tokens]

  def there(x_TD: Array, index_TK: Array) -> Array:
    return first(crossing_of(index_TK).dispatch(x_TD))

  def and_back(x_TD: Array, index_TK: Array) -> Array:
    crossing = crossing_of(index_TK)
    rows_CD = crossing.dispatch(x_TD)
    return crossing.combine(rows_CD, jnp.full(capacity, 1 / top_k, jnp.float32))

  def gather_all(x_TD: Array, index_TK: Array) -> Array:
    """Every token to every rank; each picks what it needs."""
    row_AK = crossing_of(index_TK).row_AK
    x_AD = lax.all_gather(x_TD, AXIS, tiled=True)
    source_C = local_rows.feeding(row_AK, capacity)
    return first(x_AD[source_C // top_k % x_AD.shape[0]])

  def one_row_an_assignment(x_TD: Array, index_TK: Array) -> Array:
    """A block of T·K/G rows and a quarter for every rank."""
    block = tokens * top_k * 5 // (4 * ranks)
    rows_AD = jnp.repeat(x_TD, top_k, axis=0)
    send_AD = rows_AD[(jnp.arange(ranks * block) * 7919) % rows_AD.shape[0]]
    back_AD = lax.all_to_all(send_AD, AXIS, 0, 0, tiled=True)
    return first(back_AD[jnp.argsort(index_TK.reshape(-1))])

  def ragged(x_TD: Array, index_TK: Array) -> Array:
    """One row an assignment, in even parts, by ``ragged_all_to_all``."""
    rows_AD = jnp.repeat(x_TD, top_k, axis=0)
    part = rows_AD.shape[0] // ranks
    offsets = jnp.arange(ranks) * part
    sizes = jnp.full(ranks, part)
    landing = jnp.full(ranks, lax.axis_index(AXIS) * part)
    out_AD = jnp.zeros_like(rows_AD)
    out_AD = lax.ragged_all_to_all(rows_AD, out_AD, offsets, sizes, landing, sizes, axis_name=AXIS)
    return first(out_AD)

  moved = tokens * width * 2 * ranks
  cases = [
    ("dispatch (ours)", there, moved),
    ("dispatch and combine (ours)", and_back, 2 * moved),
    ("dispatch by all_gather", gather_all, moved),
    ("dispatch, one row an assignment, all_to_all", one_row_an_assignment, moved),
    ("dispatch, one row an assignment, ragged", ragged, moved),
  ]
  return [(label, (function, (x, index)), amount, "GB/s") for label, function, amount in cases]


def replicate_cases(mesh: jax.sharding.Mesh, scale: int) -> list[Case]:
  """Copies of 37.7 MB experts to two slots a rank, for loads of ratio 2."""
  ranks, slots, home = mesh.size, 2, 16
  width, inner = 4096 // scale, 1536 // scale
  load_GE = testing.zipf_loads(0, home * ranks, ranks, 8192, 8, _ratio(ranks))
  config = BalanceConfig(replica_slots=slots, objective="balance")
  plan = plan_quotas(jnp.asarray(load_GE, jnp.int32), config)
  placement = jnp.asarray(np.asarray(plan.replica_expert))
  parents = jnp.asarray(np.asarray(plan.parent))
  x = jnp.ones((ranks * home, 3 * width, inner), jnp.bfloat16)

  def ring(home_MX: Array) -> Array:
    copies = replicate.replicate(home_MX, placement, parents, axis_name=AXIS)
    return home_MX.at[:slots].set(copies)

  def reduce(home_MX: Array) -> Array:
    return replicate.reduce_replicas(home_MX[:slots], home_MX, placement, parents, axis_name=AXIS)

  def slot_by_slot(home_MX: Array) -> Array:
    """``all_to_all`` of one expert per pair of ranks and slot, wanted or not."""
    rank = lax.axis_index(AXIS)
    for slot in range(slots):
      send_GX = home_MX[placement[:, slot] % home]
      received_GX = lax.all_to_all(send_GX, AXIS, 0, 0, tiled=True)
      copy = received_GX[jnp.clip(placement[rank, slot] // home, 0, ranks - 1)]
      home_MX = home_MX.at[slot].set(copy)
    return home_MX

  def gather_all(home_MX: Array) -> Array:
    all_EX = lax.all_gather(home_MX, AXIS, tiled=True)
    return home_MX.at[:slots].set(all_EX[placement[lax.axis_index(AXIS)] % all_EX.shape[0]])

  copies = int(jnp.max(jnp.sum(plan.replica_expert >= 0, axis=1)))
  moved = float(copies * 3 * width * inner * 2)
  return [
    ("replicate by the ring (ours)", (ring, (x,)), moved, "GB/s"),
    ("reduce by the ring (ours), bf16", (reduce, (x,)), moved, "GB/s"),
    ("replicate by all_to_all, slot by slot", (slot_by_slot, (x,)), moved, "GB/s"),
    ("replicate by all_gather", (gather_all, (x,)), moved, "GB/s"),
  ]


def experts_cases(mesh: jax.sharding.Mesh, scale: int) -> list[Case]:
  """Grouped matmul of 16384 rows over 16 + 2 slots, D7168 F2048 bf16, uneven groups."""
  rows, width, inner, home, slots = 16384 // scale, 7168 // scale, 2048 // scale, 16, 2
  rng = np.random.default_rng(0)
  cuts = np.sort(rng.integers(0, rows + 1, size=home + slots - 1))
  sizes = jnp.asarray(np.diff([0, *cuts, rows]), jnp.int32)
  x = jnp.asarray(rng.normal(size=(rows * mesh.size, width)), jnp.bfloat16)
  weights = jnp.asarray(rng.normal(size=((home + slots) * mesh.size, width, inner)), jnp.bfloat16)

  def forward(matmul: Callable[..., Array], x_CD: Array, weights: Array) -> Array:
    out_CF = matmul(x_CD, weights[:home], weights[home:], sizes)
    return x_CD.at[:, : out_CF.shape[1]].set(out_CF)

  def backward(wgrad: Callable[..., tuple[Array, Array]], x_CD: Array, weights: Array) -> Array:
    del weights
    grads, more = wgrad(x_CD, x_CD[:, :inner], sizes, home)
    return x_CD * (1 + 0 * (grads[0, 0, 0] + more[0, 0, 0])).astype(x_CD.dtype)

  def ragged(x_CD: Array, weights: Array) -> Array:
    out_CF = lax.ragged_dot(x_CD, weights, sizes)
    return x_CD.at[:, : out_CF.shape[1]].set(out_CF)

  def one_dense(x_CD: Array, weights: Array) -> Array:
    return x_CD.at[:, :inner].set(x_CD @ weights[0])

  def with_tiles(function: Callable[..., Array], rows_per_tile: int) -> Callable[..., Array]:
    @functools.wraps(function)
    def run(*args: Array) -> Array:
      names = ("tile_rows", "_matmul", "wgrad")
      before = {name: getattr(tile_matmul, name) for name in names}
      tile_matmul.tile_rows = lambda *_: rows_per_tile
      for name in names[1:]:  # traced anew for each size
        setattr(tile_matmul, name, before[name].__wrapped__)
      try:
        return function(*args)
      finally:
        for name in names:
          setattr(tile_matmul, name, before[name])

    return run

  flops = 2.0 * rows * width * inner
  cases: list[tuple[str, Callable[..., Array]]] = [
    ("forward (ours)", functools.partial(forward, grouped.grouped_matmul)),
    ("weight gradient (ours)", functools.partial(backward, grouped.grouped_matmul_wgrad)),
  ]
  in_a_loop = {  # looked up when called: ``with_tiles`` patches them
    "forward": functools.partial(
      forward, lambda x, own, copies, sizes: tile_matmul.matmul(x, own, copies, sizes, False)
    ),
    "weight gradient": functools.partial(backward, lambda *args: tile_matmul.wgrad(*args)),
  }
  for tile in (256, 512, 1024, 2048):
    for label, function in in_a_loop.items():
      cases.append((f"{label}, tiles of {tile} rows", with_tiles(function, tile // scale)))
  cases += [("forward by ragged_dot", ragged), ("one dense matmul", one_dense)]
  return [(label, (function, (x, weights)), flops, "GFLOP/s") for label, function in cases]


def layer_cases(mesh: jax.sharding.Mesh, scale: int) -> list[Case]:
  """The layer at Qwen3-235B's widths, T4096 K8, E16 a rank, rank-level ratio 2, S = 2."""
  ranks, tokens, top_k = mesh.size, 4096 // scale, 8
  width, inner, num_experts = 4096 // scale, 1536 // scale, 16 * mesh.size
  rng = np.random.default_rng(0)
  load_GE = testing.zipf_loads(0, num_experts, ranks, tokens, top_k, _ratio(ranks))
  index = testing.expert_indices(0, load_GE, top_k).reshape(-1, top_k)
  x = jnp.asarray(rng.normal(size=(ranks * tokens, width)), jnp.bfloat16)
  index = jnp.asarray(index, jnp.int32)

  def normal(*shape: int) -> Array:
    return 0.02 * jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)

  weights = (
    normal(num_experts, width, inner),
    normal(num_experts, width, inner),
    normal(num_experts, inner, width),
  )

  def forward(
    strategy: str, x_TD: Array, index_TK: Array, wi_gate: Array, wi_up: Array, wo: Array
  ) -> Array:
    config = BalanceConfig(replica_slots=2, strategy=strategy, objective="balance")
    gate_TK = jnp.full(index_TK.shape, 1 / top_k, jnp.float32)
    return moe(x_TD, index_TK, gate_TK, ExpertWeights(wi_gate, wi_up, wo), config=config)[0]

  def backward(strategy: str, x_TD: Array, index_TK: Array, *leaves: Array) -> Array:
    def loss(x_TD: Array, leaves: tuple[Array, ...]) -> Array:
      return jnp.sum(forward(strategy, x_TD, index_TK, *leaves).astype(jnp.float32))

    x_grad, grads = jax.grad(loss, argnums=(0, 1))(x_TD, leaves)
    unused = jnp.stack([grad[0, 0, 0] for grad in grads])
    return x_TD + x_grad + 0 * jnp.sum(unused).astype(x_TD.dtype)

  flops = 6.0 * tokens * top_k * width * inner
  args = (x, index, *weights)
  cases = []
  for strategy in ("none", "quota", "ideal"):
    cases.append((f"forward, {strategy}", (functools.partial(forward, strategy), args), flops))
    step = functools.partial(backward, strategy)
    cases.append((f"forward and backward, {strategy}", (step, args), 3 * flops))
  return [(label, run, amount, "GFLOP/s") for label, run, amount in cases]


def _ratio(ranks: int) -> float:
  return min(2.0, 0.9 * ranks) if ranks > 1 else 1.0


BENCHES: dict[str, Callable[[jax.sharding.Mesh, int], list[Case]]] = {
  "plan": plan_cases,
  "exchange": exchange_cases,
  "replicate": replicate_cases,
  "experts": experts_cases,
  "layer": layer_cases,
}

if __name__ == "__main__":
  main()
