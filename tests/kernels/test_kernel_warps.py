"""What threads and warps do in kernels: interpreted against NumPy, and signs when lowered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_interpret import interpreted

from pallas_kernels.planner import quota
from pallas_kernels.routing import rows, top_k
from pallas_kernels.warp import warps
from pallas_kernels.warp.opaque import opaque

REDUCTIONS = {
  "warp_max": np.max,
  "warp_min": np.min,
  "warp_sum": functools.partial(np.sum, dtype=np.int32),
}


def kernel(body, num_outputs, size=warps.THREADS):
  return plgpu.kernel(
    body,
    out_type=[jax.ShapeDtypeStruct((size,), jnp.int32)] * num_outputs,
    scratch_types=[plgpu.SMEM((warps.THREADS,), jnp.int32)],
    compiler_params=quota._PARAMS,
  )


def random_table(size, seed=0):
  return np.random.default_rng(seed).integers(-(2**31), 2**31, size).astype(np.int32)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name):
  reduce, x = getattr(warps, name), random_table(warps.THREADS)

  def body(x_ref, warp_ref, all_ref, scratch_ref):
    x = x_ref[...]
    warp_ref[...] = reduce(x)
    all_ref[...] = warps.over_all(reduce, [x, -1 - x, x], scratch_ref)

  with interpreted():
    by_warp, of_all = map(np.asarray, kernel(body, 2)(x))
  expected = REDUCTIONS[name](x.reshape(4, 32), axis=1)
  np.testing.assert_array_equal(by_warp, np.repeat(expected, 32))
  total = REDUCTIONS[name](np.stack([x, -1 - x, x]))
  np.testing.assert_array_equal(of_all, np.full(warps.THREADS, total))


def test_lookup_and_store():
  table = random_table(1000)
  index = np.random.default_rng(1).integers(0, 1000, warps.THREADS).astype(np.int32)

  def body(table_ref, index_ref, found_ref, stored_ref, scratch_ref):
    del scratch_ref
    index, thread = index_ref[...], warps.thread_index()
    found_ref[...] = warps.lookup(table_ref, index)
    stored_ref[...] = thread * 0
    warps.store(stored_ref, 127 - thread, thread, warps.ones(thread < 100))

  with interpreted():
    found, stored = map(np.asarray, kernel(body, 2)(table, index))
  np.testing.assert_array_equal(found, table[index])
  np.testing.assert_array_equal(stored, np.where(np.arange(128) > 27, 127 - np.arange(128), 0))


def test_a_loop_ends_when_no_warp_goes_on():
  def body(limit_ref, steps_ref, scratch_ref):
    del scratch_ref
    limit = limit_ref[...]

    def step(steps):
      return steps + warps.ones(steps < limit)

    steps_ref[...] = jax.lax.while_loop(
      lambda steps: warps.any_of_warp(warps.ones(steps < limit)), step, limit * 0
    )

  limit = np.repeat(np.array([3, 0, 7, 1], np.int32), 32)
  with interpreted():
    (steps,) = kernel(body, 1)(limit)
  np.testing.assert_array_equal(steps, limit)


@pytest.fixture
def compared(monkeypatch):
  """The signs with which int32 are compared while kernels are lowered."""
  signs = []
  for name in ("_compare", "max", "min"):
    original = getattr(mgpu.FragmentedArray, name)

    def record(self, *args, original=original, **kwargs):
      if str(self.mlir_dtype) == "i32":
        signs.append(self.is_signed)
      return original(self, *args, **kwargs)

    monkeypatch.setattr(mgpu.FragmentedArray, name, record)
  return signs


def test_where_keeps_the_sign_that_the_lowering_loses(compared):
  def body(x_ref, y_ref, scratch_ref):
    del scratch_ref
    x = x_ref[...]
    y_ref[...] = warps.ones(warps.where(x > 5, -1, x) < 0) + warps.ones(
      warps.where(x > 5, -1, 0) < 0
    )

  array = jax.ShapeDtypeStruct((warps.THREADS,), jnp.int32)
  jax.jit(kernel(body, 1)).trace(array).lower(lowering_platforms=("cuda",))
  assert compared == [True] * 4


@pytest.mark.parametrize("by_time, num_slots", [(False, 2), (True, 4)])
def test_the_planner_compares_signed_numbers_only(compared, by_time, num_slots):
  def plan(load_GE, cost):
    return quota.plan_quota(
      load_GE,
      domain_size=4,
      num_slots=num_slots,
      min_tokens=1,
      transfer="auto",
      by_time=by_time,
      target=1.1,
      cost=cost,
      steps=(32768, 500),
    )

  shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8, 32), (4,))]
  jax.jit(plan).trace(*shapes).lower(lowering_platforms=("cuda",))
  assert compared and all(compared)


def test_the_routing_compares_signed_numbers_only(compared):
  sizes = [(64, 2), (8, 32), (8, 2), (32, 8), ()]
  shapes = [jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes]
  route = jax.jit(lambda *args: rows.route_rows(*args))
  route.trace(*shapes).lower(lowering_platforms=("cuda",))
  assert compared and all(compared)


def test_the_choice_compares_signed_numbers_only(compared):
  scores = jax.ShapeDtypeStruct((7, 200), jnp.float32)
  top_k.top_k.trace(scores, k=3).lower(lowering_platforms=("cuda",))
  assert compared and all(compared)


def test_what_is_opaque_is_the_same():
  x = random_table(warps.THREADS)

  def body(x_ref, out_ref, scratch_ref):
    del scratch_ref
    out_ref[...] = x_ref[...] + opaque(jnp.int32(7)) - opaque(jnp.int32(-5))

  with interpreted():
    np.testing.assert_array_equal(kernel(body, 1)(x)[0], x + np.int32(12))
