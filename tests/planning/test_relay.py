"""Transfer trees: legal for every placement, and optimal where brute force can tell."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultraep_jax.planning import relay

SHAPES = [(1, 2, 2), (5, 1, 2), (8, 4, 3)]
SMALL = [(3, 3, 2), (4, 2, 2), (5, 1, 2), (4, 1, 3), (5, 2, 1)]


def placement(
  seed: int, shape: tuple[int, int, int], fill: float = 1.0, hot: int | None = None
) -> np.ndarray:
  """A random legal ``[G, S]`` placement of ``hot`` experts (default: all)."""
  num_ranks, num_home, num_slots = shape
  rng = np.random.default_rng(seed)
  num_experts = num_ranks * num_home
  pool = rng.permutation(num_experts)[:hot]
  slots = np.full((num_ranks, num_slots), -1, np.int32)
  for rank, slot_S in enumerate(slots):
    remote = rng.permutation(pool[pool // num_home != rank])[:num_slots]
    used = rng.permutation(num_slots)[: remote.size]
    slot_S[used] = np.where(rng.random(remote.size) < fill, remote, -1)
  return slots


@st.composite
def placements(draw: st.DrawFn, shapes: list[tuple[int, int, int]]) -> tuple[np.ndarray, int]:
  shape = draw(st.sampled_from(shapes))
  hot = draw(st.one_of(st.none(), st.integers(1, 4)))
  fill = draw(st.sampled_from([0.3, 0.8, 1.0]))
  return placement(draw(st.integers(0, 2**31)), shape, fill, hot), shape[0] * shape[1]


@functools.cache
def compiled(num_experts: int, transfer: str):
  return jax.jit(functools.partial(relay.transfer_tree, num_experts=num_experts, transfer=transfer))


def solve(slots: np.ndarray, num_experts: int, transfer: str = "auto") -> np.ndarray:
  return np.asarray(compiled(num_experts, transfer)(slots))


@functools.cache
def compiled_depth(num_experts: int):
  return jax.jit(functools.partial(relay.depth, num_experts=num_experts))


def walked_depth(slots: np.ndarray, parent: np.ndarray, num_experts: int) -> int:
  """Walks every copy back to its home, in plain Python; fails on an illegal tree."""
  num_ranks = slots.shape[0]
  deepest = 0
  for (rank, slot), expert in np.ndenumerate(slots):
    if expert < 0:
      assert parent[rank, slot] == -1
      continue
    at, at_slot, links = rank, slot, 0
    while at != expert // (num_experts // num_ranks):
      links += 1
      assert links < num_ranks, f"a cycle through rank {rank} for expert {expert}"
      assert 0 <= parent[at, at_slot] < num_ranks
      at = int(parent[at, at_slot])
      at_slot = list(slots[at]).index(expert) if expert in slots[at] else -1
    deepest = max(deepest, links)
  return deepest


def egress(parent: np.ndarray) -> np.ndarray:
  return np.bincount(parent[parent >= 0], minlength=parent.shape[0])


@functools.cache
def all_trees(copies: int) -> dict[tuple[int, ...], int]:
  """Numbers of children (root first) over all trees, with the least depth that has them."""
  best: dict[tuple[int, ...], int] = {}
  for parents in itertools.product(range(copies + 1), repeat=copies):
    links = []
    for node in range(1, copies + 1):
      count = 0
      while node and count <= copies:
        node, count = parents[node - 1], count + 1
      links.append(count)
    if max(links) <= copies:
      children = tuple(parents.count(node) for node in range(copies + 1))
      best[children] = min(best.get(children, copies), max(links))
  return best


def brute_force(slots: np.ndarray, num_experts: int) -> tuple[int, int]:
  """The least (busiest egress, depth) over all trees of all experts."""
  num_ranks = slots.shape[0]
  reached = {(0,) * num_ranks: 0}
  for expert in np.unique(slots[slots >= 0]):
    home = expert // (num_experts // num_ranks)
    members = [home, *np.nonzero((slots == expert).any(axis=1))[0]]
    longer: dict[tuple[int, ...], int] = {}
    for sent, deepest in reached.items():
      for children, depth in all_trees(len(members) - 1).items():
        total = list(sent)
        for rank, count in zip(members, children, strict=True):
          total[rank] += count
        key, value = tuple(total), max(deepest, depth)
        longer[key] = min(longer.get(key, value), value)
    reached = longer
  return min((max(sent), deepest) for sent, deepest in reached.items())


@hypothesis.given(placements(SHAPES))
def test_trees_are_legal_and_never_busier_than_direct(case):
  slots, num_experts = case
  parent = solve(slots, num_experts)
  assert parent.shape == slots.shape and parent.dtype == np.int32
  direct = solve(slots, num_experts, "direct")
  num_home = num_experts // slots.shape[0]
  np.testing.assert_array_equal(direct, np.where(slots < 0, -1, slots // num_home))
  assert egress(parent).max() <= egress(direct).max()
  if egress(parent).max() == egress(direct).max():
    np.testing.assert_array_equal(parent, direct)
  deepest = walked_depth(slots, parent, num_experts)
  assert compiled_depth(num_experts)(slots, parent) == deepest
  measured = jax.jit(relay.egress_per_rank)(parent)
  assert measured.dtype == jnp.int32
  np.testing.assert_array_equal(measured, egress(parent))


@hypothesis.given(placements(SMALL))
def test_busiest_egress_equals_brute_force(case):
  slots, num_experts = case
  parent = solve(slots, num_experts)
  busiest, shallowest = brute_force(slots, num_experts)
  assert egress(parent).max() == busiest
  assert walked_depth(slots, parent, num_experts) <= shallowest + 1


def test_depth_is_mostly_the_least_at_the_least_egress():
  excess = 0
  for seed in range(40):
    slots = placement(seed, (5, 1, 2), hot=3)
    _, shallowest = brute_force(slots, 5)
    excess += walked_depth(slots, solve(slots, 5), 5) - shallowest
  assert excess <= 10  # a quarter of a level on average, with three experts on all ranks


def flow_bound(slots: np.ndarray, num_experts: int, cap: int) -> bool:
  """Whether each copy finds a sender under ``cap``: unit augmentation, in plain Python."""
  num_ranks = slots.shape[0]
  num_home = num_experts // num_ranks
  replicated = np.unique(slots[slots >= 0])
  free = cap - np.bincount(replicated // num_home, minlength=num_ranks)
  if free.min() < 0:
    return False
  members = {e: {int(e) // num_home, *np.nonzero((slots == e).any(axis=1))[0]} for e in replicated}
  jobs = [e for e in replicated for _ in range(len(members[e]) - 2)]
  serving: list[list[int]] = [[] for _ in range(num_ranks)]

  def place(job: int, seen: set[int]) -> bool:
    for rank in members[jobs[job]] - seen:
      seen.add(rank)
      if len(serving[rank]) < free[rank]:
        serving[rank].append(job)
        return True
      for other in list(serving[rank]):
        if place(other, seen):
          serving[rank].remove(other)
          serving[rank].append(job)
          return True
    return False

  return all(place(job, set()) for job in range(len(jobs)))


@pytest.mark.parametrize("hot", [2, 5, 12, 16])
@pytest.mark.parametrize("shape", [(16, 1, 2), (16, 2, 3)])
def test_busiest_egress_is_the_least_at_sixteen_ranks(shape, hot):
  num_experts = shape[0] * shape[1]
  for seed in range(6):
    slots = placement(seed, shape, hot=hot)
    busiest = int(egress(solve(slots, num_experts)).max())
    assert flow_bound(slots, num_experts, busiest)
    assert not flow_bound(slots, num_experts, busiest - 1)


def test_greedy_alone_would_leave_copies_over():
  """The augmenting paths are needed: without them, these cases would miss the least egress."""

  @jax.jit
  def left_over(slots_GS, cap):
    members = relay._members(slots_GS, 16)
    return jnp.sum(relay._holders_send(members, relay._homes_send(members, cap)).need_E)

  cases = [placement(seed, (16, 1, 2), hot=6) for seed in range(8)]
  busiest = [egress(solve(slots, 16)).max().astype(np.int32) for slots in cases]
  assert any(left_over(slots, cap) > 0 for slots, cap in zip(cases, busiest, strict=True))


def test_one_hot_expert_on_all_ranks_is_a_chain():
  slots = np.zeros((64, 1), np.int32)
  slots[0] = -1
  parent = solve(slots, 256)
  np.testing.assert_array_equal(parent[:, 0], np.arange(64) - 1)
  assert compiled_depth(256)(slots, parent) == 63


def test_two_hot_experts_on_all_ranks_are_shallow_trees():
  slots = np.tile(np.array([[0, 5]], np.int32), (64, 1))
  slots[0, 0] = slots[1, 1] = -1
  parent = solve(slots, 256)
  assert egress(parent).max() == 2
  assert walked_depth(slots, parent, 256) == 6


def test_empty_placement():
  slots = np.full((4, 2), -1, np.int32)
  parent = solve(slots, 8)
  np.testing.assert_array_equal(parent, slots)
  assert relay.depth(jnp.asarray(slots), jnp.asarray(parent), 8) == 0
  np.testing.assert_array_equal(relay.egress_per_rank(jnp.asarray(parent)), np.zeros(4))
  no_slots = jnp.zeros((4, 0), jnp.int32)
  assert relay.transfer_tree(no_slots, num_experts=8).shape == (4, 0)
  assert relay.depth(no_slots, no_slots, 8) == 0


def test_jit_vmap_and_eager_agree():
  stack = jnp.asarray(np.stack([placement(seed, (8, 2, 2), hot=4) for seed in range(6)]))
  plan = functools.partial(relay.transfer_tree, num_experts=16)
  batched = jax.jit(jax.vmap(plan))(stack)
  for slots, parent in zip(stack, batched, strict=True):
    np.testing.assert_array_equal(parent, solve(np.asarray(slots), 16))
  np.testing.assert_array_equal(batched[0], plan(stack[0]))
  deepest = jax.jit(jax.vmap(functools.partial(relay.depth, num_experts=16)))(stack, batched)
  for slots, parent, links in zip(stack, batched, deepest, strict=True):
    assert links == walked_depth(np.asarray(slots), np.asarray(parent), 16)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_on_varying_data(check_vma):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
  stack = np.stack([placement(seed, (8, 2, 2), hot=4) for seed in range(4)])

  def body(slots_1GS):
    return relay.transfer_tree(slots_1GS[0], num_experts=16)[None]

  spec = jax.sharding.PartitionSpec("data")
  mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
  expected = np.stack([solve(slots, 16) for slots in stack])
  np.testing.assert_array_equal(jax.jit(mapped)(stack), expected)


def test_bad_arguments():
  slots = jnp.zeros((4, 2), jnp.int32)
  with pytest.raises(
    ValueError, match="transfer: expected 'auto', 'direct' or 'relay', got 'fast'"
  ):
    relay.transfer_tree(slots, num_experts=8, transfer="fast")
  with pytest.raises(ValueError, match="num_experts: expected a multiple of 4 ranks, got 6"):
    relay.transfer_tree(slots, num_experts=6)
  with pytest.raises(ValueError, match="replica_expert_GS: expected shape"):
    relay.transfer_tree(slots[0], num_experts=8)
  with pytest.raises(TypeError, match="replica_expert_GS: expected int32"):
    relay.transfer_tree(slots.astype(jnp.float32), num_experts=8)
  with pytest.raises(ValueError, match="parent_GS: expected shape"):
    relay.depth(slots, slots[:2], 8)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 7, 9])
def test_depth_of_a_chain_through_all_ranks(num_ranks):
  """The deepest tree that there is, in whatever order it visits the ranks."""
  order = np.random.default_rng(num_ranks).permutation(num_ranks).astype(np.int32)
  expert_GS = np.full((num_ranks, 2), -1, np.int32)
  parent_GS = expert_GS.copy()
  depth = compiled_depth(num_ranks)
  for links, (giver, taker) in enumerate(itertools.pairwise(order), 1):
    expert_GS[taker, links % 2], parent_GS[taker, links % 2] = order[0], giver
    assert depth(jnp.asarray(expert_GS), jnp.asarray(parent_GS)) == links
