"""The trees of the planner kernel, interpreted, for any placement, planned or not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_interpret import interpreted
from thread_races import watched

from pallas_kernels.planner import members as plan_members
from pallas_kernels.planner import quota as kernels
from pallas_kernels.planner import tree
from pallas_kernels.planner.tables import Problem
from pallas_kernels.warp.scatter import barrier, fill
from pallas_kernels.warp.warps import THREADS, chunks, lookup, ones, store
from ultraep_jax.planning import relay

RANKS, EXPERTS = 8, 16


@functools.partial(jax.jit, static_argnames=("experts", "relays"))
def trees(replica_expert_GS, experts=EXPERTS, relays=True):
  """The trees by the device code alone, in a kernel of one block."""
  ranks, slots = replica_expert_GS.shape
  problem = Problem(ranks, experts, ranks, slots, 1, False, False, None, ())
  items = ranks * slots

  def body(expert_ref, parent_ref, *refs):
    vectors = plan_members.Vectors(*refs)
    for start, i in chunks(items):
      inside, expert = i < items, lookup(expert_ref, jnp.minimum(i, items - 1))
      vectors.expert[start : start + THREADS] = jnp.where(inside, expert, -1)
    fill(vectors.used, THREADS, slots)
    barrier()
    used = vectors.used[0] if problem.finds_used else slots
    (tree.relayed if relays else tree.direct)(vectors, used, problem)
    for _, i in chunks(items):
      store(parent_ref, i, lookup(vectors.parent, i), ones(i < items))

  kernel = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((items,), jnp.int32),
    scratch_types=kernels._shared(plan_members.Vectors.sizes(problem)),
    compiler_params=kernels._PARAMS,
  )
  return kernel(replica_expert_GS.reshape(-1)).reshape(ranks, slots)


def placements(count, slots, seed, ranks=RANKS, experts=EXPERTS):
  """Random legal placements of a few hot experts."""
  rng = np.random.default_rng(seed)
  home = experts // ranks
  for _ in range(count):
    hot_E = rng.random(experts) ** rng.integers(1, 12)
    replica_GS = np.full((ranks, slots), -1, np.int32)
    for rank in range(ranks):
      others = np.flatnonzero(np.arange(experts) // home != rank)
      held = rng.choice(others, slots, replace=False, p=hot_E[others] / hot_E[others].sum())
      replica_GS[rank] = np.where(rng.random(slots) < 0.9, held, -1)
    yield jnp.asarray(replica_GS)


@jax.jit
def left_over(replica_expert_GS):
  """Copies without a sender at the first cap, before and after the augmenting paths."""
  members = relay._members(replica_expert_GS, EXPERTS)
  flow = relay._homes_send(members, relay._lower_bound(members))
  flow = relay._holders_send(members, flow)
  placed = relay._place_leftovers(members, flow)
  return jnp.sum(flow.need_E), jnp.sum(placed.need_E)


def kind(replica_expert_GS):
  before, after = map(int, left_over(replica_expert_GS))
  return "stuck" if after else "left" if before else "placed"


@functools.cache
def placements_by_kind(slots, seed):
  """The first three of each kind."""
  found = {"placed": [], "left": [], "stuck": []}
  for replica_expert_GS in placements(400, slots, seed):
    found[kind(replica_expert_GS)].append(replica_expert_GS)
  return {name: chosen[:3] for name, chosen in found.items()}


# "stuck" needs a higher cap than the lower bound, "left" augmenting paths at it.
@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["placed", "left", "stuck"])
def test_equals_the_portable_trees(wanted):
  tried = 0
  for slots, seed in ((2, 0), (3, 1)):
    chosen = placements_by_kind(slots, seed)[wanted]
    tried += len(chosen)
    for replica_expert_GS in chosen:
      with interpreted():
        got = jax.block_until_ready(trees(replica_expert_GS))
      want = relay.transfer_tree(replica_expert_GS, num_experts=EXPERTS)
      np.testing.assert_array_equal(got, want)
  assert tried


@pytest.mark.slow
@pytest.mark.parametrize("ranks, experts, slots", [(64, 256, 2), (12, 36, 3), (8, 64, 40)])
def test_equals_the_portable_trees_of_many_ranks(ranks, experts, slots):
  """Several warps, several pieces of slots, and several paths one after the other."""
  chosen = list(placements(16 if slots < 9 else 3, slots, 5, ranks, experts))
  with interpreted():
    got = [jax.block_until_ready(trees(replica_GS, experts)) for replica_GS in chosen]
  portable = jax.jit(functools.partial(relay.transfer_tree, num_experts=experts))
  want = [portable(replica_GS) for replica_GS in chosen]
  np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_threads_wait_for_each_other():
  with interpreted(), watched():
    # A function of its own, so that it is traced here.
    watched_trees = jax.jit(lambda replica_expert_GS: trees.__wrapped__(replica_expert_GS, 36))
    for replica_expert_GS in placements(4, 3, 3, 12, 36):
      jax.block_until_ready(watched_trees(replica_expert_GS))


def test_direct_trees():
  (replica_expert_GS,) = placements(1, 2, 3)
  with interpreted():
    got = jax.block_until_ready(trees(replica_expert_GS, relays=False))
  want = relay.transfer_tree(replica_expert_GS, num_experts=EXPERTS, transfer="direct")
  np.testing.assert_array_equal(got, want)
