"""The routing kernel: interpreted against the portable routing, and lowering for GPUs."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from mosaic_interpret import interpreted
from programs import count_reaching
from thread_races import watched

from pallas_kernels.routing.block import Shared, Sizes
from pallas_kernels.routing.rows import RoutingTuning, _sizes, route_rows
from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning import route
from ultraep_jax.types import Plan

CONFIG = BalanceConfig(objective="balance")


def routing(ranks, experts, tokens, top_k, slots, seed=0):
  """Choices of all ranks, some out of range, their load matrix and any legal plan for it."""
  rng = np.random.default_rng(seed)
  popular = rng.random(experts) ** 6 + 1e-6
  scores = rng.random((ranks, tokens, experts)) ** (1 / popular)
  index_GTK = np.argsort(-scores, axis=-1)[..., :top_k].astype(np.int32)
  index_GTK[:, ::7, 0] = -1
  index_GTK[:, 3::11, -1] = experts + 3
  flat = index_GTK.reshape(ranks, -1)
  load_GE = np.stack([np.bincount(f[(f >= 0) & (f < experts)], minlength=experts) for f in flat])
  home_E = np.arange(experts) // (experts // ranks)
  hosts_EG = home_E[:, None] == np.arange(ranks)
  replica_GS = np.full((ranks, slots), -1)
  for rank, slot in np.ndindex(ranks, slots):
    free = np.flatnonzero(~hosts_EG[:, rank])
    if len(free) and rng.random() < 0.8:
      expert = rng.choice(free, p=popular[free] / popular[free].sum())
      replica_GS[rank, slot], hosts_EG[expert, rank] = expert, True
  weight_EG = hosts_EG * rng.random((experts, ranks)) ** 3
  share_EG = weight_EG / weight_EG.sum(axis=1, keepdims=True)
  quota_EG = rng.multinomial(load_GE.sum(axis=0), share_EG)
  arrays = [jnp.asarray(x, jnp.int32) for x in (index_GTK, load_GE, replica_GS, quota_EG)]
  return *arrays[:2], Plan(*arrays[2:], arrays[2])


# Few warpgroups, as interpretation is slow.
@pytest.mark.parametrize(
  "ranks, experts, tokens, top_k, slots, tuning",
  [
    # A cluster in part, and one before it
    (4, 16, 150, 2, 2, RoutingTuning(groups=1, peers=2, prefetch=1)),
    # More pieces and clusters than wanted, prefetched in several steps, experts beyond a warp
    pytest.param(
      *(3, 48, 150, 8, 2, RoutingTuning(groups=1, peers=2, clusters=1, most_pieces=2, prefetch=1)),
      marks=pytest.mark.slow,
    ),
    # Experts beyond a warpgroup, the last warp of them in part
    pytest.param(3, 150, 200, 6, 1, RoutingTuning(groups=2, peers=2), marks=pytest.mark.slow),
    # Several words of hosts, several items a thread
    pytest.param(
      40, 80, 33, 4, 3, RoutingTuning(groups=1, peers=2, prefetch=2), marks=pytest.mark.slow
    ),
    pytest.param(
      1, 4, 40, 2, 1, RoutingTuning(groups=1, peers=1, prefetch=2), marks=pytest.mark.slow
    ),
    # Rows of more warps' items than a warp adds up at a time
    pytest.param(2, 700, 200, 4, 250, RoutingTuning(groups=4, peers=1), marks=pytest.mark.slow),
    # A single assignment, which is masked
    pytest.param(
      2, 16, 1, 1, 2, RoutingTuning(groups=1, peers=2, prefetch=2), marks=pytest.mark.slow
    ),
  ],
)
def test_equals_the_portable_routing(ranks, experts, tokens, top_k, slots, tuning):
  index_GTK, load_GE, plan = routing(ranks, experts, tokens, top_k, slots)
  assert ranks == 1 or (plan.replica_expert >= 0).any()
  kernel = jax.jit(functools.partial(route._route_on_gpu, tuning=tuning))
  portable = jax.jit(route._route)
  for rank in sorted({0, ranks // 2, ranks - 1}):
    args = index_GTK[rank], load_GE, plan, jnp.int32(rank)
    with interpreted():
      got = jax.block_until_ready(kernel(*args))
    for name, left, right in zip(got._fields, got, portable(*args), strict=True):
      assert left.shape == right.shape and left.dtype == right.dtype
      np.testing.assert_array_equal(left, right, err_msg=name)


def shapes(ranks, experts, tokens, top_k, slots):
  sizes = [(tokens, top_k), (ranks, experts), (ranks, slots), (experts, ranks), ()]
  return [jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes]


@pytest.mark.parametrize(
  "ranks, experts, tokens, slots",
  [
    (64, 256, 8192, 2),
    (4, 64, 8192, 16),
    (2, 16, 1, 1),
    (64, 512, 65_536, 2),
    (8, 1024, 65_536, 2),
  ],
)
def test_lowers_for_gpus(ranks, experts, tokens, slots):
  traced = route_rows.trace(*shapes(ranks, experts, tokens, 8, slots))
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
  "assignments, pieces, clusters", [(1, 1, 1), (49_152, 1, 12), (49_153, 2, 7), (10**6, 4, 62)]
)
def test_every_assignment_has_a_thread(assignments, pieces, clusters):
  sizes = Sizes(4, 64, 2, assignments, RoutingTuning())
  assert (sizes.pieces, sizes.clusters) == (pieces, clusters)
  assert (clusters - 1) * pieces * 4096 < assignments <= clusters * pieces * 4096


@hypothesis.given(experts=st.integers(1, 2500), ranks=st.integers(1, 64), slots=st.integers(1, 40))
@hypothesis.example(experts=148, ranks=8, slots=16)
def test_fits_into_shared_memory(experts, ranks, slots):
  """Each vector begins at a multiple of 1 KB; a block has 227 KB."""
  try:
    sizes = _sizes(Sizes(ranks, experts * ranks, slots, 65_536, RoutingTuning()))
  except NotImplementedError:
    return
  assert sum(-(-4 * n // 1024) for n in Shared.lengths(sizes)) <= 227


def test_no_barrier_is_missing():
  """What one thread writes and others read is apart by a barrier, in blocks of one warpgroup."""
  index_GTK, load_GE, plan = routing(4, 128, 100, 2, 8)
  tuning = RoutingTuning(groups=1, peers=1, prefetch=1)
  with interpreted(), watched():
    args = index_GTK[1], load_GE, plan, jnp.int32(1)
    kernel = jax.jit(functools.partial(route._route_on_gpu, tuning=tuning))
    jax.block_until_ready(kernel(*args))


@pytest.mark.parametrize("check_vma", [True, False])
def test_lowers_inside_shard_map(check_vma):
  mesh = jax.make_mesh((4,), ("expert",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])

  def routes(index_TK, load_GE, replica_expert_GS, quota_EG):
    plan = Plan(replica_expert_GS, quota_EG, replica_expert_GS)
    routed = route._route_on_gpu(index_TK, load_GE, plan, jax.lax.axis_index("expert"))
    if check_vma:
      for leaf in routed:
        assert jax.typeof(leaf).manual_axis_type.varying == {"expert"}
    return jax.tree.map(lambda leaf: leaf[None], routed)

  sharded = jax.shard_map(
    routes,
    mesh=mesh,
    in_specs=(P("expert"), P(), P(), P()),
    out_specs=P("expert"),
    check_vma=check_vma,
  )
  traced = jax.jit(sharded).trace(*shapes(4, 16, 4 * 128, 2, 2)[:4])
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert not count_reaching(text)


def call(**changes):
  names = ("expert_index_TK", "load_GE", "replica_expert_GS", "quota_EG", "rank")
  args = dict(zip(names, shapes(4, 16, 32, 2, 2), strict=True)) | changes
  return jax.eval_shape(route_rows, **args)


def test_rejects():
  array = jax.ShapeDtypeStruct
  with pytest.raises(ValueError, match="peers: expected at most 8, got 16"):
    RoutingTuning(peers=16)
  with pytest.raises(ValueError, match="clusters: expected at least 1, got 0"):
    RoutingTuning(clusters=0)
  with pytest.raises(ValueError, match=r"load_GE: expected shape \(4, 16\), got \(16, 4\)"):
    call(load_GE=array((16, 4), jnp.int32))
  with pytest.raises(ValueError, match=r"replica_expert_GS: expected shape \[4, S\], got \(2, 4\)"):
    call(replica_expert_GS=array((2, 4), jnp.int32))
  with pytest.raises(TypeError, match="expert_index_TK: expected int32, got int16"):
    call(expert_index_TK=array((32, 2), jnp.int16))
  with pytest.raises(NotImplementedError, match="expected assignments and slots"):
    call(replica_expert_GS=array((4, 0), jnp.int32))
  with pytest.raises(NotImplementedError, match="expected fewer experts and slots, got 4096"):
    call(load_GE=array((4, 4096), jnp.int32), quota_EG=array((4096, 4), jnp.int32))
