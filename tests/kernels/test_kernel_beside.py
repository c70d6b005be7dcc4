"""Transfers in the first blocks of a matmul's kernel: both do what they do alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assignments import mesh
from grouped_rows import exact, interpreted, products
from jax.experimental.mosaic import gpu as mgpu
from jax.sharding import PartitionSpec as P
from programs import count_reaching

from pallas_kernels import support
from pallas_kernels.matmul import layout
from pallas_kernels.matmul.gated import Projections, gated_beside
from pallas_kernels.matmul.grouped import (
  matmul_beside,
  sum_beside,
)
from pallas_kernels.matmul.wgrad import grouped_matmul_wgrad, wgrad_beside
from pallas_kernels.transfer.reduce_replicas import reduction
from pallas_kernels.transfer.replicate import replication
from pallas_kernels.transfer.tuning import TransferTuning
from ultraep_jax.transport.replicate import COPYING, reducing_tuning

RANKS, HOME, SLOTS = 2, 1, 1
REPLICA = jnp.array([[-1], [0]], jnp.int32)
PARENT = jnp.array([[-1], [0]], jnp.int32)


def wgrad_and_copies(tuning, plan, rows, grad, sizes, weights):
  copying = replication([weights], *plan, axis_name="expert", tuning=tuning)
  return wgrad_beside(copying, rows, grad, sizes, weights.shape[0])


def reglu(gate, up):
  return jax.nn.relu(gate) * up


def gated_by_copies(tuning, plan, rows, gate, up, sizes, matmul=None, rows_first=None):
  copying = replication(
    [gate, up], *plan, axis_name="expert", tuning=tuning, home_rows_G=rows_first, flat=False
  )
  return gated_beside(
    copying,
    rows,
    Projections((gate, up)),
    sizes,
    reglu,
    keep_hidden=False,
    tuning=matmul,
  )


def matmul_by_copies(
  tuning, plan, rows, weights, sizes, matmul=None, rows_first=None, transposed=False
):
  copying = replication(
    [weights], *plan, axis_name="expert", tuning=tuning, home_rows_G=rows_first, flat=False
  )
  options = {"tuning": matmul, "transpose_rhs": transposed}
  return matmul_beside(copying, rows, weights, sizes, **options)


def sum_and_reduction(tuning, plan, rows, grads, homes, replicas, sizes):
  reducing = reduction([grads[1]], [grads[0]], *plan, axis_name="expert", tuning=tuning)
  return sum_beside(reducing, rows, homes, replicas, sizes, transpose_rhs=True)


def on_ranks(function, tuning, plan, ranks=RANKS, check_vma=True):
  return jax.jit(
    jax.shard_map(
      lambda *args: function(tuning, plan, *args),
      mesh=mesh((ranks, "expert")),
      in_specs=P("expert"),
      out_specs=P("expert"),
      check_vma=check_vma,
    )
  )


@pytest.fixture
def few_blocks(monkeypatch):
  monkeypatch.setattr(support, "num_sms", lambda: 1)


@pytest.mark.slow
def test_copies_arrive_beside_the_weight_gradient(few_blocks):
  rng = np.random.default_rng(0)
  rows, grad = exact(rng, RANKS * 256, 128), exact(rng, RANKS * 256, 128)
  weights = exact(rng, RANKS * HOME, 96)
  sizes = jnp.array([100, 60, 0, 200], jnp.int32)
  tuning = TransferTuning(blocks=1, workers=3, tile_bytes=128)
  with interpreted(races=True):
    got = on_ranks(wgrad_and_copies, tuning, (REPLICA, PARENT))(rows, grad, sizes, weights)
    (home, replica), (copies,) = jax.block_until_ready(got)
  np.testing.assert_array_equal(copies[1], weights[0])
  for rank in range(RANKS):
    part = slice(256 * rank, 256 * rank + 256)
    with interpreted():
      alone = grouped_matmul_wgrad(rows[part], grad[part], sizes[2 * rank : 2 * rank + 2], HOME)
      alone = jax.block_until_ready(alone)
    np.testing.assert_array_equal(home[rank], alone[0][0])
    np.testing.assert_array_equal(replica[rank], alone[1][0])


# Rank 1 forwards an expert of rank 0, sends one of its own and has two copies; rank 2 has two.
COPIES = jnp.array([[3, -1], [0, 5], [0, 2]], jnp.int32)
SENDERS = jnp.array([[1, -1], [0, 2], [1, 1]], jnp.int32)
ROWS_OF_THREE = jnp.array([[60, 100, 64, 0], [0, 64, 128, 64], [0, 0, 192, 64]], jnp.int32)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("matmul", "even"),
  [("gated", True), ("gated", False), ("plain", True), ("plain", False), ("transposed", True)],
)
def test_rows_of_replicas_wait_for_their_copies(matmul, even, few_blocks):
  rng = np.random.default_rng(0)
  ranks, home, slots = 3, 2, 2
  rows = exact(rng, ranks * 256, 64)
  shape = (128, 64) if matmul == "transposed" else (64, 128)
  weights = [exact(rng, ranks * home, *shape) for _ in range(2 if matmul == "gated" else 1)]
  tuning = TransferTuning(blocks=1, workers=3, tile_bytes=1024)
  options = {"matmul": layout.MatmulTuning(even=even), "rows_first": jnp.array([9, 0, 3])}
  by_matmul = functools.partial(matmul_by_copies, transposed=matmul == "transposed")
  function = gated_by_copies if matmul == "gated" else by_matmul
  with interpreted(races=True):
    run = on_ranks(functools.partial(function, **options), tuning, (COPIES, SENDERS), ranks)
    out, copies = jax.block_until_ready(run(rows, *weights, ROWS_OF_THREE.reshape(-1)))
  out = out.inner_CN if matmul == "gated" else out
  filled_N = np.asarray(COPIES).reshape(-1) >= 0
  for copy, array in zip(copies, weights, strict=True):
    assert copy.shape == (ranks * slots, *array.shape[1:])
    np.testing.assert_array_equal(copy[filled_N], array[COPIES.reshape(-1)[filled_N]])
  for rank in range(ranks):
    part, mine = slice(256 * rank, 256 * rank + 256), slice(home * rank, home * rank + home)
    used = int(ROWS_OF_THREE[rank].sum())
    replicas = [array[jnp.maximum(COPIES[rank], 0)] for array in weights]
    every = [
      np.concatenate([array[mine], more]) for array, more in zip(weights, replicas, strict=True)
    ]
    every = [array.mT if matmul == "transposed" else array for array in every]
    expected = [products(rows[part], array, ROWS_OF_THREE[rank]) for array in every]
    if matmul == "gated":
      gate, up = (jnp.asarray(each, jnp.float32) for each in expected)
      expected = [reglu(gate, up).astype(jnp.bfloat16)]
    np.testing.assert_array_equal(np.asarray(out[part])[:used], expected[0])


NO_COPY = jnp.full_like(REPLICA, -1)


@pytest.mark.slow
@pytest.mark.parametrize(
  "plan", [(REPLICA, PARENT), (NO_COPY, NO_COPY)], ids=["claimed", "in turn"]
)
def test_every_tile_is_computed_by_one_of_several_blocks(plan, monkeypatch):
  """Blocks have more tiles than their queue has room for."""
  monkeypatch.setattr(support, "num_sms", lambda: 2)
  rng = np.random.default_rng(0)
  rows, weights = exact(rng, RANKS * 256, 64), exact(rng, RANKS * HOME, 64, 512)
  sizes = jnp.array([[256, 0], [128, 128]] if plan[0][1] >= 0 else [[256, 0], [256, 0]], jnp.int32)
  tuning = TransferTuning(blocks=1, workers=3, tile_bytes=1024)
  matmul = layout.MatmulTuning("in_turns", rows=64, cols=64, even=False)
  with interpreted(races=True):
    run = on_ranks(functools.partial(matmul_by_copies, matmul=matmul), tuning, plan)
    out, _ = jax.block_until_ready(run(rows, weights, sizes.reshape(-1)))
  for rank in range(RANKS):
    part = slice(256 * rank, 256 * rank + 256)
    expected = products(rows[part], np.stack([weights[rank], weights[0]]), sizes[rank])
    np.testing.assert_array_equal(out[part], expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_go_home_beside_the_last_matmul(dtype, few_blocks):
  rng = np.random.default_rng(0)
  rows = [exact(rng, RANKS * 256, 64) for _ in range(2)]
  homes = [exact(rng, RANKS * HOME, 128, 64) for _ in range(2)]
  replicas = [exact(rng, RANKS * SLOTS, 128, 64) for _ in range(2)]
  tile, length = (128, 96) if dtype == jnp.float32 else (4096, 5120)
  grads = [jnp.asarray(rng.integers(-999, 999, (RANKS, length)), dtype) for _ in range(2)]
  sizes = jnp.array([128, 64, 0, 192], jnp.int32)  # no row is stored twice
  tuning = TransferTuning(blocks=1, workers=3, tile_bytes=tile)
  with interpreted(races=True):
    run = on_ranks(sum_and_reduction, tuning, (REPLICA, PARENT))
    out, (sums,) = jax.block_until_ready(run(rows, grads, homes, replicas, sizes))
  expected = grads[0].at[0].add(grads[1][1])  # rounded once
  assert sums.dtype == dtype
  np.testing.assert_array_equal(np.asarray(sums, np.float32), np.asarray(expected, np.float32))
  for rank in range(RANKS):
    part, mine = slice(256 * rank, 256 * rank + 256), slice(rank, rank + 1)
    sizes_P = sizes[2 * rank : 2 * rank + 2]
    pairs = zip(homes, replicas, strict=True)
    weights = [np.concatenate([home[mine], replica[mine]]).mT for home, replica in pairs]
    wide = [np.concatenate([x[part] for x in rows], axis=1), np.concatenate(weights, axis=1)]
    np.testing.assert_array_equal(out[part][: sum(sizes_P)], products(*wide, sizes_P))


# Of few rows tiles are not even.
@pytest.mark.parametrize(
  ("slots", "check_vma", "capacity"), [(2, False, 1024), (16, True, 69632), (128, False, 69632)]
)
def test_lowers_for_gpus(slots, check_vma, capacity, monkeypatch):
  """At the layer's sizes and tunings; the reduction works in place.

  Work lists grow with the slots, and must fit beside what the matmuls keep in shared memory. No
  compiler may see which stage is a tile's first.
  """
  inlined, inline = [], mgpu.utils.inline_ptx

  def recorded(code, *args, **options):
    inlined.append(code)
    return inline(code, *args, **options)

  monkeypatch.setattr(mgpu.utils, "inline_ptx", recorded)
  width, inner, home, ranks = 4096, 1536, 16, 4

  def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((ranks * sizes[0], *sizes[1:]), dtype)

  plan = (jnp.full((ranks, slots), -1, jnp.int32),) * 2

  def lower(function, tuning, *args):
    inlined.clear()
    traced = on_ranks(function, tuning, plan, ranks, check_vma).trace(*args)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mov.b32 $0, $1;" in inlined
    return text

  sizes, up = shape(home + slots, dtype=jnp.int32), shape(home, width, inner)
  reducing = reducing_tuning(ranks, slots)
  rows = shape(capacity, width)
  wgrad = lower(wgrad_and_copies, COPYING, shape(capacity, inner), rows, sizes, up)
  total = lower(
    sum_and_reduction,
    reducing,
    [shape(capacity, inner)] * 2,
    [shape(n, width, inner) for n in (home, slots)],
    [up] * 2,
    [shape(slots, width, inner)] * 2,
    sizes,
  )
  gated = lower(gated_by_copies, COPYING, rows, up, up, sizes)
  down = lower(matmul_by_copies, COPYING, shape(capacity, inner), shape(home, inner, width), sizes)
  for text in (wgrad, total, gated, down):
    assert count_reaching(text) == 1
  assert "output_operand_aliases = [#stablehlo.output_operand_alias<" in total


@pytest.mark.parametrize("cols", [32768, 18432])
def test_copies_of_very_wide_experts_lower_for_gpus(cols):
  """A worker has one buffer or two for rows of up to 64 KB."""
  ranks, slots, home, depth = 4, 2, 2, 512
  plan = (jnp.full((ranks, slots), -1, jnp.int32),) * 2
  rows = jax.ShapeDtypeStruct((ranks * 1024, depth), jnp.bfloat16)
  weights = jax.ShapeDtypeStruct((ranks * home, depth, cols), jnp.bfloat16)
  sizes = jax.ShapeDtypeStruct((ranks * (home + slots),), jnp.int32)
  traced = on_ranks(matmul_by_copies, COPYING, plan, ranks, check_vma=False).trace(
    rows, weights, sizes
  )
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert count_reaching(text) == 1


def test_workers_must_be_the_warpgroups_of_the_matmul():
  plan = (REPLICA, PARENT)
  with pytest.raises(ValueError, match="beside: expected 3 workers"):
    on_ranks(wgrad_and_copies, TransferTuning(1, 2, 128), plan)(
      jnp.zeros((512, 128), jnp.bfloat16),
      jnp.zeros((512, 128), jnp.bfloat16),
      jnp.zeros(4, jnp.int32),
      jnp.zeros((2, 96), jnp.bfloat16),
    )
