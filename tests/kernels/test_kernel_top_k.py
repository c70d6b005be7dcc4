"""The kernel that chooses experts: interpreted against ``lax.top_k``, and lowering for GPUs."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from mosaic_interpret import interpreted

from pallas_kernels.routing.top_k import top_k

# Every kind of float32, by its bits: zeros, least and greatest, infinities, NaN of both signs.
SPECIAL = np.array(
  [
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x3F800000, 0xBF800000, 0x7F7FFFFF),
    *(0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF),
    *(0x7F800001, 0xFF800001, 0xFFFFFFFE),
  ],
  np.uint32,
)


def kinds(rng, rows, columns):
  """Random rows, rows with many ties, special values, any bits, rows all the same."""
  shape = rows, columns
  yield rng.standard_normal(shape).astype(np.float32)
  yield rng.integers(-1, 2, shape).astype(np.float32)
  yield rng.choice(SPECIAL, shape).view(np.float32)
  yield rng.integers(0, 2**32, shape, np.uint32).view(np.float32)
  for bits in (0x00000000, 0xFF800000, 0xFFFFFFFF):
    yield np.full(shape, bits, np.uint32).view(np.float32)


def check(scores_TE, k):
  with interpreted():
    got = jax.block_until_ready(top_k(scores_TE, k))
  want = jax.lax.top_k(scores_TE, k)[1]
  assert got.shape == want.shape and got.dtype == want.dtype
  np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
  "rows, columns, k",
  [
    (8, 128, 8),
    (7, 60, 6),  # a lane in part, a block in part
    (1, 8, 8),  # all of a row shorter than a warp
    (5, 256, 8),
    (2, 1, 1),
    (3, 512, 16),
    (3, 160, 6),
    (2, 1000, 2),
    (2, 33, 32),
  ],
)
def test_equals_lax_top_k(rows, columns, k):
  for scores_TE in kinds(np.random.default_rng(rows), rows, columns):
    check(scores_TE, k)


_BITS = st.one_of(st.sampled_from(SPECIAL.tolist()), st.integers(0, 2**32 - 1))


@hypothesis.given(rows=st.lists(st.lists(_BITS, min_size=40, max_size=40), min_size=5, max_size=5))
def test_equals_lax_top_k_of_any_bits(rows):
  """Of ties, too: examples repeat their elements."""
  check(np.array(rows, np.uint32).view(np.float32), 5)


@pytest.mark.parametrize(
  "rows, columns, k", [(8192, 128, 8), (8192, 256, 8), (1, 1, 1), (4097, 60, 6), (65_536, 32, 2)]
)
def test_lowers_for_gpus(rows, columns, k):
  scores = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
  text = top_k.trace(scores, k=k).lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_lowers_inside_shard_map(check_vma):
  mesh = jax.make_mesh((4,), ("expert",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])

  def chosen(scores_TE):
    index_TK = top_k(scores_TE, 3)
    if check_vma:
      assert jax.typeof(index_TK).manual_axis_type.varying == {"expert"}
    return index_TK

  sharded = jax.shard_map(
    chosen, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=check_vma
  )
  traced = jax.jit(sharded).trace(jax.ShapeDtypeStruct((4 * 10, 16), jnp.float32))
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("custom_call @mosaic_gpu") == 1
  assert "uses_xla_collective_metadata = true" not in text


def test_rejects():
  def call(shape, k, dtype=jnp.float32):
    return jax.eval_shape(lambda x: top_k(x, k), jax.ShapeDtypeStruct(shape, dtype))

  assert call((3, 1024), 32) == jax.ShapeDtypeStruct((3, 32), jnp.int32)
  with pytest.raises(ValueError, match=r"expected shape \[T, E\] with E >= 9, got \(4, 8\)"):
    call((4, 8), 9)
  with pytest.raises(ValueError, match=r"expected shape \[T, E\] with E >= 2, got \(8,\)"):
    call((8,), 2)
  with pytest.raises(TypeError, match="expected float32, got bfloat16"):
    call((4, 8), 2, jnp.bfloat16)
  for shape in ((0, 8), (4, 1025), (2**21, 1024)):
    with pytest.raises(NotImplementedError, match=r"expected rows of 1 to 1024, below 2\^31"):
      call(shape, 2)
  with pytest.raises(NotImplementedError, match="k: expected 1 to 32, got 33"):
    call((4, 64), 33)
