"""The trees of the planner kernel, interpreted, for any placement, planned or not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_interpret import interpreted

from pallas_kernels import plan_quota as kernels
from pallas_kernels import plan_tree
from pallas_kernels.plan_tables import Problem
from pallas_kernels.warps import THREADS, chunks, lookup, ones, store
from ultraep_jax import relay

RANKS, EXPERTS = 8, 16


@functools.partial(jax.jit, static_argnames="relays")
def trees(replica_expert_GS, relays=True):
  """The trees by the device code alone, in a kernel of one block."""
  ranks, slots = replica_expert_GS.shape
  problem = Problem(ranks, EXPERTS, ranks, slots, 1, False, False, None, ())
  items = ranks * slots

  def body(expert_ref, parent_ref, *refs):
    vectors = plan_tree.Vectors(*refs)
    for start, i in chunks(items):
      inside, expert = i < items, lookup(expert_ref, jnp.minimum(i, items - 1))
      vectors.expert[start : start + THREADS] = jnp.where(inside, expert, -1)
    (plan_tree.relayed if relays else plan_tree.direct)(vectors, problem)
    for _, i in chunks(items):
      store(parent_ref, i, lookup(vectors.parent, i), ones(i < items))

  kernel = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((items,), jnp.int32),
    scratch_types=kernels._shared(plan_tree.Vectors.sizes(problem)),
    compiler_params=kernels._PARAMS,
  )
  return kernel(replica_expert_GS.reshape(-1)).reshape(ranks, slots)


def placements(count, slots, seed):
  """Random legal placements of a few hot experts."""
  rng = np.random.default_rng(seed)
  home = EXPERTS // RANKS
  for _ in range(count):
    hot_E = rng.random(EXPERTS) ** rng.integers(1, 12)
    replica_GS = np.full((RANKS, slots), -1, np.int32)
    for rank in range(RANKS):
      others = np.flatnonzero(np.arange(EXPERTS) // home != rank)
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


# "stuck" needs a higher cap than the lower bound, "left" augmenting paths at it.
@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["placed", "left", "stuck"])
def test_equals_the_portable_trees(wanted):
  tried = 0
  for slots, seed in ((2, 0), (3, 1)):
    chosen = [p for p in placements(400, slots, seed) if kind(p) == wanted][:3]
    tried += len(chosen)
    for replica_expert_GS in chosen:
      with interpreted():
        got = jax.block_until_ready(trees(replica_expert_GS))
      want = relay.transfer_tree(replica_expert_GS, num_experts=EXPERTS)
      np.testing.assert_array_equal(got, want)
  assert tried


def test_direct_trees():
  (replica_expert_GS,) = placements(1, 2, 3)
  with interpreted():
    got = jax.block_until_ready(trees(replica_expert_GS, relays=False))
  want = relay.transfer_tree(replica_expert_GS, num_experts=EXPERTS, transfer="direct")
  np.testing.assert_array_equal(got, want)
