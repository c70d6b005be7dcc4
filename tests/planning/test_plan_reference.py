"""The planner on the loads of a reference system, which it must not be above."""

import pathlib

import numpy as np
import pytest
from plans import busiest, check_legal, load_matrix, make_config, replicas

from ultraep_jax.planning.plan import plan_quotas

# 78 loads with the outcome of the system that the planner follows: `cases` describes them,
# `expert_load` holds their loads per expert, one after the other. Plans depend on these alone.
REFERENCE = pathlib.Path(__file__).parents[1] / "data" / "reference_plans.npz"


# A program for several sizes: these have as many experts a rank, the last of them without load.
PADDED = {(8, 32): 256, (8, 128): 256, (64, 256): 512}


def padded(load_E, ranks):
  size = PADDED.get((ranks, len(load_E)), len(load_E))
  load_GM = load_E.reshape(ranks, -1)
  return np.pad(load_GM, ((0, 0), (0, size // ranks - load_GM.shape[1]))).reshape(-1)


@pytest.fixture(scope="module")
def reference(optimized):
  """Cases, their loads, and a function that gives busiest and replicas of all of them."""
  with np.load(REFERENCE) as data:
    cases, flat = data["cases"], data["expert_load"]
  loads = np.split(flat, np.cumsum(cases["num_experts"])[:-1])

  def outcome(**options):
    rows, copies = np.zeros(len(cases), np.int64), np.zeros(len(cases), np.int64)
    for i, case in enumerate(cases):
      ranks, config = int(case["ranks"]), make_config(int(case["replica_slots"]), **options)
      load_E = padded(loads[i], ranks)
      plan = plan_quotas(load_matrix(load_E, ranks), config)
      rows[i], copies[i] = busiest(plan), replicas(plan)
      check_legal(load_E, plan, config)
    return rows, copies

  return cases, np.array([load.sum() for load in loads]), outcome


class TestReference:
  def test_never_above_the_reference(self, reference):
    cases, total, outcome = reference
    rows, _ = outcome()
    after = rows / (total / cases["ranks"])
    print(
      f"\nbalance: mean {after.mean():.5f}, max {after.max():.5f}, "
      f"reference {cases['reference_after'].mean():.5f}, {cases['reference_after'].max():.5f}"
    )
    assert (after <= cases["reference_after"] + 1e-6).all()
    assert after.mean() <= 1.0001
    assert after.max() <= 1.001

  def test_fewer_replicas_at_the_same_target(self, reference):
    cases, total, outcome = reference
    rows, copies = outcome(target=1.01)
    goal = -(-total * 101 // (100 * cases["ranks"]))
    reference_rows = np.rint(cases["reference_after"] * total / cases["ranks"])
    both = (rows <= goal) & (reference_rows <= goal)
    ratio = copies[both].sum() / cases["reference_replicas"][both].sum()
    print(
      f"\ntarget 1.01: reached {(rows <= goal).sum()} (reference "
      f"{(reference_rows <= goal).sum()}) of {len(cases)}, replica ratio {ratio:.4f}"
    )
    assert (rows <= goal)[reference_rows <= goal].all()
    assert ratio <= 0.851

  @pytest.mark.slow
  def test_a_floor_costs_little(self, reference):
    cases, total, outcome = reference
    rows, copies = outcome(min_tokens_per_replica=1024)
    after = rows / (total / cases["ranks"])
    print(
      f"\nmin_tokens 1024: mean {after.mean():.5f}, max {after.max():.5f}, "
      f"above 1.0101 {(after > 1.0101).sum()}, replicas {copies.sum()}"
    )
    assert after.mean() <= 1.0005
    assert after.max() <= 1.002
