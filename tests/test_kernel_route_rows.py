"""The routing kernels: interpreted against the portable routing, and lowering for GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mosaic_interpret import interpreted

from pallas_kernels.route_rows import route_rows
from ultraep_jax import route
from ultraep_jax.config import BalanceConfig
from ultraep_jax.plan import plan_quotas
from ultraep_jax.types import Plan

CONFIG = BalanceConfig(objective="balance")


def routing(ranks, experts, tokens, top_k, config=CONFIG, seed=0):
  """Choices of all ranks, some out of range, their load matrix and a plan."""
  rng = np.random.default_rng(seed)
  popular = rng.random(experts) ** 6 + 1e-6
  scores = rng.random((ranks, tokens, experts)) ** (1 / popular)
  index_GTK = np.argsort(-scores, axis=-1)[..., :top_k].astype(np.int32)
  index_GTK[:, ::7, 0] = -1
  index_GTK[:, 3::11, -1] = experts + 3
  flat = index_GTK.reshape(ranks, -1)
  load_GE = np.stack([np.bincount(f[(f >= 0) & (f < experts)], minlength=experts) for f in flat])
  load_GE = jnp.asarray(load_GE, jnp.int32)
  return jnp.asarray(index_GTK), load_GE, plan_quotas(load_GE, config)


@pytest.mark.parametrize(
  "ranks, experts, tokens, top_k, slots",
  [
    (4, 16, 150, 2, 2),  # a chunk in part
    pytest.param(3, 150, 200, 6, 1, marks=pytest.mark.slow),  # experts beyond one piece
    pytest.param(40, 80, 33, 4, 3, marks=pytest.mark.slow),  # several blocks of pairs
    pytest.param(1, 4, 40, 2, 1, marks=pytest.mark.slow),
  ],
)
def test_equals_the_portable_routing(ranks, experts, tokens, top_k, slots):
  config = BalanceConfig(objective="balance", replica_slots=slots, capacity_factor=1.0)
  index_GTK, load_GE, plan = routing(ranks, experts, tokens, top_k, config)
  kernel = jax.jit(route._route_on_gpu, static_argnums=4)
  for rank in sorted({0, ranks // 2, ranks - 1}):
    with interpreted():
      got = jax.block_until_ready(kernel(index_GTK[rank], load_GE, plan, jnp.int32(rank), config))
    want = route.route_tokens(index_GTK[rank], load_GE, plan, rank, config)
    for name, left, right in zip(want._fields, got, want, strict=True):
      assert left.shape == right.shape and left.dtype == right.dtype
      np.testing.assert_array_equal(left, right, err_msg=name)


def shapes(ranks, experts, tokens, top_k, slots):
  sizes = [(tokens, top_k), (ranks, experts), (ranks, slots), (experts, ranks), ()]
  return [jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes]


@pytest.mark.parametrize("ranks, experts, slots", [(64, 256, 2), (4, 64, 16), (64, 512, 2)])
def test_lowers_for_gpus(ranks, experts, slots):
  def routes(*args):
    return route_rows(*args, capacity=70_000)

  traced = jax.jit(routes).trace(*shapes(ranks, experts, 8192, 8, slots))
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize("check_vma", [True, False])
def test_lowers_inside_shard_map(check_vma):
  mesh = jax.make_mesh((4,), ("expert",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])

  def routes(index_TK, load_GE, replica_expert_GS, quota_EG):
    plan = Plan(replica_expert_GS, quota_EG, replica_expert_GS)
    routed = route._route_on_gpu(index_TK, load_GE, plan, jax.lax.axis_index("expert"), CONFIG)
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
  assert "uses_xla_collective_metadata = true" not in text


def call(**changes):
  names = ("expert_index_TK", "load_GE", "replica_expert_GS", "quota_EG", "rank")
  args = dict(zip(names, shapes(4, 16, 32, 2, 2), strict=True)) | changes
  return jax.eval_shape(lambda **kwargs: route_rows(**kwargs, capacity=64), **args)


def test_rejects():
  array = jax.ShapeDtypeStruct
  with pytest.raises(ValueError, match=r"load_GE: expected shape \(4, 16\), got \(16, 4\)"):
    call(load_GE=array((16, 4), jnp.int32))
  with pytest.raises(ValueError, match=r"replica_expert_GS: expected shape \[4, S\], got \(2, 4\)"):
    call(replica_expert_GS=array((2, 4), jnp.int32))
  with pytest.raises(TypeError, match="expert_index_TK: expected int32, got int16"):
    call(expert_index_TK=array((32, 2), jnp.int16))
  with pytest.raises(NotImplementedError, match="expected assignments and slots"):
    call(replica_expert_GS=array((4, 0), jnp.int32))
