"""Products of some rows of a stage: interpreted, and the same on a GPU."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_rows import exact, lower, shape
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_interpret import interpreted

from pallas_kernels.matmul import pipeline
from pallas_kernels.matmul.layout import DEPTH
from pallas_kernels.matmul.some_rows import ROWS, add_product

HEIGHT, WIDTH = 128, 192


@functools.partial(jax.jit, static_argnames="clears")
def products(lhs_KM, rhs_KN, bounds_2B, clears=None):
  """Of all pairs of bounds, each added to the sums of those before.

  Args:
    clears: writes the right operand before, None or whether that is committed.
  """
  count = bounds_2B.shape[1]

  def body(lhs_gmem, rhs_gmem, bounds, out, lhs, rhs, loaded):
    for source, target in ((lhs_gmem, lhs), (rhs_gmem, rhs)):
      plgpu.copy_gmem_to_smem(source, target, loaded)
    plgpu.barrier_wait(loaded)
    if clears is not None:
      rhs[...] = jnp.zeros(rhs.shape, rhs.dtype)
    if clears:
      plgpu.commit_smem()

    def add(i, sums):
      sums = add_product(sums, lhs, rhs, bounds[0, i], bounds[1, i])
      plgpu.wgmma_wait(0)
      out[i] = sums
      return sums

    def add_all(acc):
      zero = plgpu.wgmma_accumulator_load(acc, wait_n=None)
      jax.lax.fori_loop(0, count, add, zero)

    pl.run_scoped(add_all, plgpu.WGMMAAccumulatorRef((HEIGHT, WIDTH)))

  return plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((count, HEIGHT, WIDTH), jnp.float32),
    scratch_types=[
      pipeline.smem(DEPTH, HEIGHT),
      pipeline.smem(DEPTH, WIDTH),
      plgpu.Barrier(num_arrivals=2),
    ],
  )(lhs_KM, rhs_KN, bounds_2B)


def check():
  """All first rows that ``add_product`` takes, and many last ones."""
  rng = np.random.default_rng(0)
  pairs = [(b, e) for b in (-64, 0, *range(1, ROWS)) for e in (1, 15, 16, 17, 40, 48, 63, 64, 99)]
  bounds = np.array([(b, e) for b, e in pairs if b < e], np.int32).T
  lhs, rhs = exact(rng, DEPTH, HEIGHT), exact(rng, DEPTH, WIDTH)
  got = np.asarray(products(lhs, rhs, jnp.asarray(bounds)))
  lhs, rhs = (np.asarray(x, np.float32) for x in (lhs, rhs))
  spans = [slice(max(b, 0), e) for b, e in bounds.T]
  each = np.stack([lhs[span].T @ rhs[span] for span in spans])
  np.testing.assert_array_equal(got, np.cumsum(each, axis=0))


def test_products_interpreted():
  with interpreted():
    check()


def test_lowers():
  bounds = shape(2, 5, dtype=jnp.int32)
  assert "custom_call @mosaic_gpu" in lower(
    products, shape(DEPTH, HEIGHT), shape(DEPTH, WIDTH), bounds
  )


@pytest.mark.gpu
def test_products():
  check()


@pytest.mark.parametrize(("end", "reaches"), [(20, False), (50, True)])
def test_rows_that_are_read(end, reaches):
  """A stage may hold anything behind a multiple of 16 rows."""
  ones = jnp.ones((DEPTH, HEIGHT), jnp.bfloat16), jnp.ones((DEPTH, WIDTH), jnp.bfloat16)
  with interpreted():
    got = products(ones[0], ones[1].at[40:].set(jnp.nan), jnp.array([[3], [end]], jnp.int32))
  assert bool(jnp.isnan(got).all()) == reaches
  assert reaches or (np.asarray(got) == end - 3).all()


@pytest.mark.parametrize("commits", [True, False])
def test_what_is_written_must_be_committed_before(commits):
  ones = jnp.ones((DEPTH, HEIGHT), jnp.bfloat16), jnp.ones((DEPTH, WIDTH), jnp.bfloat16)
  expected = contextlib.nullcontext() if commits else pytest.raises(Exception, match="RACE")
  with expected, interpreted():
    got = products(*ones, jnp.array([[0], [64]], jnp.int32), clears=commits)
    assert (np.asarray(got) == 0).all()
