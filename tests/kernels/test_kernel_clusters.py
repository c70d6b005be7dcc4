"""What lanes, warpgroups and blocks tell each other: interpreted against NumPy."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_interpret import interpreted
from thread_races import watched

from pallas_kernels.warp import clusters, lanes, scatter, warps
from pallas_kernels.warp.branches import when

THREADS = warps.THREADS


def kernel(body, num_outputs, size=THREADS, peers=1, groups=1):
  return plgpu.kernel(
    body,
    out_type=[jax.ShapeDtypeStruct((size,), jnp.int32)] * num_outputs,
    grid=(2,),
    grid_names=("cluster",),
    cluster=(peers,),
    cluster_names=("peer",),
    num_threads=groups,
    thread_name="group",
    scratch_types=[plgpu.SMEM((THREADS,), jnp.int32)],
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane, skip_device_barrier=True
    ),
  )


def random(most, seed=0):
  return np.random.default_rng(seed).integers(-most, most, THREADS).astype(np.int32)


def test_lanes():
  def body(x_ref, before_ref, all_ref, sum_ref, bits_ref, scratch_ref):
    del scratch_ref
    thread = warps.thread_index()
    x, one = warps.lookup(x_ref, thread), thread * 0 + 1
    before, equal = lanes.equal_in_warp(x)
    results = before, equal, lanes.earlier_in_warp(x), lanes.count_bits(x)
    for ref, value in zip((before_ref, all_ref, sum_ref, bits_ref), results, strict=True):
      warps.store(ref, thread, value, one)

  x = random(5)
  with interpreted():
    before, equal, sums, bits = map(np.asarray, kernel(body, 4)(x))
  for i in range(THREADS):
    warp, lane = x[i // 32 * 32 :][:32], i % 32
    assert before[i] == (warp[:lane] == x[i]).sum() and equal[i] == (warp == x[i]).sum()
    assert sums[i] == warp[:lane].sum() and bits[i] == (int(x[i]) & 0xFFFFFFFF).bit_count()


def test_sums_of_a_block():
  """Two warpgroups add to the same elements; a third of the threads does not."""

  def body(x_ref, ones_ref, sums_ref, scratch_ref):
    group, thread = jax.lax.axis_index("group"), warps.thread_index()
    zero, one = thread * 0, thread * 0 + 1
    x = warps.lookup(x_ref, thread)
    index = jnp.abs(x)
    for amount, ref in ((1, ones_ref), (x + group, sums_ref)):
      scatter.put_at(scratch_ref, thread, zero, one)
      clusters.wait_for_block()
      scatter.add_at(scratch_ref, index, amount, warps.ones(jax.lax.rem(thread, zero + 3) > 0))
      clusters.wait_for_block()
      warps.store(ref, thread, warps.lookup(scratch_ref, thread), one)
      clusters.wait_for_block()

  x = random(20)
  with interpreted():
    ones, sums = map(np.asarray, kernel(body, 2, groups=2)(x))
  chosen = np.arange(THREADS) % 3 > 0
  for e in range(THREADS):
    same = chosen & (np.abs(x) == e)
    assert ones[e] == 2 * same.sum() and sums[e] == (2 * x[same] + 1).sum()


@pytest.mark.parametrize("peers", [2, 4])
def test_peers(peers):
  """Every block gives the next one its number, as far as the mask goes."""

  def body(out_ref, scratch_ref):
    peer, thread = jax.lax.axis_index("peer"), warps.thread_index()
    cluster, one = jax.lax.axis_index("cluster"), thread * 0 + 1
    scatter.put_at(scratch_ref, thread, thread * 0 - 1, one)
    clusters.arrive_at_cluster()
    clusters.wait_for_cluster()
    target = jax.lax.rem(peer + 1, jnp.int32(peers))
    value = thread * 0 + peer + 10 * cluster
    clusters.put_at_peer(scratch_ref, target, 127 - thread, value, warps.ones(thread < 100))
    clusters.arrive_at_cluster()
    clusters.wait_for_cluster()
    place = (cluster * peers + peer) * THREADS + thread
    warps.store(out_ref, place, warps.lookup(scratch_ref, thread), one)

  with interpreted():
    (out,) = map(np.asarray, kernel(body, 1, size=2 * peers * THREADS, peers=peers)())
  out = out.reshape(2, peers, THREADS)
  given = (np.arange(peers) - 1) % peers + 10 * np.arange(2)[:, None]
  np.testing.assert_array_equal(out[:, :, 28:], np.broadcast_to(given[..., None], (2, peers, 100)))
  assert (out[:, :, :28] == -1).all()


@pytest.mark.parametrize("joined", [True, False])
def test_the_watch_finds_a_missing_barrier_of_the_cluster(joined):
  def body(out_ref, scratch_ref):
    thread = warps.thread_index()
    one = thread * 0 + 1
    clusters.put_at_peer(scratch_ref, 0, thread, thread, one)
    if joined:
      clusters.arrive_at_cluster()
    clusters.wait_for_block()  # does not do
    if joined:
      clusters.wait_for_cluster()
    warps.store(out_ref, thread, warps.lookup(scratch_ref, thread), one)

  run = jax.jit(lambda: kernel(body, 1)())
  race = pytest.raises(AssertionError, match="'store', 'read'")
  with contextlib.nullcontext() if joined else race, interpreted(), watched():
    jax.block_until_ready(run())


def test_lowers_for_gpus():
  """With what makes sums of ones fast, and hardware barriers."""

  def body(x_ref, out_ref, scratch_ref):
    thread = warps.thread_index()
    one = thread * 0 + 1
    scatter.add_at(scratch_ref, warps.lookup(x_ref, thread), 1, one)

    @when(jax.lax.axis_index("group") == 0)
    def _():
      clusters.put_at_peer(scratch_ref, 1, thread, thread, one)

    clusters.arrive_at_cluster()
    clusters.wait_for_cluster()
    warps.store(out_ref, thread, warps.lookup(scratch_ref, thread), one)

  traced = jax.jit(kernel(body, 1, peers=2, groups=2)).trace(jnp.zeros(THREADS, jnp.int32))
  traced.lower(lowering_platforms=("cuda",))


def test_a_fault_of_a_warpgroup_ends_the_wait_of_others():
  def fail(group):
    raise ValueError(f"a fault of {group}")

  def body(out_ref, ready):
    group = jax.lax.axis_index("group")
    when(group == 0)(lambda: plgpu.barrier_wait(ready))

    @when(group == 1)
    def _():
      out_ref[...] = jax.pure_callback(fail, jax.ShapeDtypeStruct((THREADS,), jnp.int32), group)
      plgpu.barrier_arrive(ready)

  call = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((THREADS,), jnp.int32),
    num_threads=2,
    thread_name="group",
    scratch_types=[plgpu.Barrier()],
  )
  with pytest.raises(jax.errors.JaxRuntimeError), interpreted():
    call()
