"""Every probe against the scalar twin's, not only the one whose placement a plan takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plans import skewed_loads
from scalar_planner import RULES, most_copies, rank_loads, twin_probe

from ultraep_jax.planning import greedy

RANKS, HOME, SLOTS = 5, 4, 2


def random_loads(seed):
  """Of many skews, of few different numbers, and with hardly any."""
  rng = np.random.default_rng(seed)
  loads = [*skewed_loads(6, RANKS * HOME, 3000, seed, max_skew=3.0)]
  loads += [rng.choice([0, 1, 7, 20], RANKS * HOME, p=[0.4, 0.2, 0.2, 0.2]) for _ in range(6)]
  loads += [rng.integers(0, 9, RANKS * HOME) * (rng.random(RANKS * HOME) < 0.5) for _ in range(12)]
  # Of two ranks with slack none has a slot left, and the others have less than a slot's share.
  loads += [np.pad(np.reshape([1, 13, 2, 8, 0, 1, 0, 13, 5, 8], (5, 2)), ((0, 0), (0, 2))).ravel()]
  return np.stack(loads).astype(np.int32)


@pytest.mark.parametrize(
  "transfer, min_tokens, group", [("direct", 1, 0), ("auto", 1, 0), ("auto", 9, 0), ("auto", 2, 5)]
)
def test_every_probe_ends_as_the_twins(transfer, min_tokens, group):
  load_NE = random_loads(min_tokens)
  domains = len(load_NE)
  load_NRM = load_NE.reshape(domains, RANKS, HOME)
  share_T, counted_T = np.array([0.0, 0.02, 0.1, 0.3, 0.7, 0.1]), np.array([group] * 5 + [0])
  rank_NTR = (load_NRM[:, None] + counted_T[:, None, None] * (load_NRM > 0)[:, None]).sum(axis=3)
  mean_NT, top_NT = -(-rank_NTR.sum(axis=2) // RANKS), rank_NTR.max(axis=2)
  threshold_NT = mean_NT + np.floor(share_T * (top_NT - mean_NT)).astype(int)
  domain_B, place_B, rule_B = (
    index.reshape(-1) for index in np.indices((domains, len(share_T), len(RULES)))
  )
  threshold_B, counted_B = threshold_NT[domain_B, place_B], counted_T[place_B]
  probes = greedy.Probes(
    *(jnp.asarray(x, jnp.int32) for x in (domain_B, threshold_B, rule_B, counted_B))
  )

  @jax.jit
  def run(load_NRM, probes):
    loads = greedy.sort_loads(load_NRM, SLOTS, group)
    outcome = greedy.run(loads, probes, SLOTS, min_tokens, transfer == "direct")
    return outcome, greedy.place(loads, probes, SLOTS, min_tokens)

  outcome, placed = jax.tree.map(np.asarray, run(load_NRM, probes))
  for b, (domain, rule) in enumerate(zip(domain_B, rule_B, strict=True)):
    loads, probe = load_NE[domain].tolist(), (int(threshold_B[b]), int(counted_B[b]))
    held, order = twin_probe(loads, RANKS, SLOTS, min_tokens, *probe, *RULES[rule])
    assert outcome.busiest[b] == rank_loads(loads, held, group).max()
    assert outcome.rows[b] == rank_loads(loads, held).max()
    assert outcome.replicas[b] == len(order)
    assert outcome.copies[b] == most_copies(held, order, HOME, transfer)
    for rank, copies in enumerate(held):
      slots = copies + [(-1, 0)] * (SLOTS - len(copies))
      assert slots == list(zip(*(part[b, rank].tolist() for part in placed), strict=True))
