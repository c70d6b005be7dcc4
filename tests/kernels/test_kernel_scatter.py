"""Updates at an index per thread, interpreted, and the watch over barriers that threads need."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_interpret import interpreted
from thread_races import watched

from pallas_kernels.planner import quota
from pallas_kernels.warp import scatter, warps

SIZE = 2 * warps.THREADS


def kernel(body, num_outputs):
  return plgpu.kernel(
    body,
    out_type=[jax.ShapeDtypeStruct((SIZE,), jnp.int32)] * num_outputs,
    scratch_types=[plgpu.SMEM((SIZE,), jnp.int32)] * num_outputs,
    compiler_params=quota._PARAMS,
  )


def copy_out(from_refs, to_refs):
  for source, target in zip(from_refs, to_refs, strict=True):
    for _, i in warps.chunks(SIZE):
      warps.store(target, i, warps.lookup(source, i), warps.ones(i >= 0))


UPDATES = {
  scatter.put_at: None,
  scatter.add_at: np.add,
  scatter.min_at: np.minimum,
  scatter.max_at: np.maximum,
}


def test_updates():
  rng = np.random.default_rng(0)
  index = rng.integers(0, 40, warps.THREADS).astype(np.int32)
  value = rng.integers(-50, 50, warps.THREADS).astype(np.int32)
  chosen = rng.random(warps.THREADS) < 0.7

  def body(index_ref, value_ref, chosen_ref, *refs):
    index, value, chosen = (ref[...] for ref in (index_ref, value_ref, chosen_ref))
    outs, vectors = refs[: len(UPDATES)], refs[len(UPDATES) :]
    for vector in vectors:
      scatter.fill(vector, SIZE, 7)
    scatter.barrier()
    for update_at, vector in zip(UPDATES, vectors, strict=True):
      # Those that meet where values are put have the same one.
      update_at(vector, index, index if update_at is scatter.put_at else value, chosen == 1)
    scatter.barrier()
    copy_out(vectors, outs)

  with interpreted():
    results = kernel(body, len(UPDATES))(index, value, chosen.astype(np.int32))
  for update, got in zip(UPDATES.values(), results, strict=True):
    want = np.full(SIZE, 7, np.int32)
    if update is None:
      want[index[chosen]] = index[chosen]
    else:
      update.at(want, index[chosen], value[chosen])
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("thread", [0, 77, None])
def test_any_of_all(thread):
  def body(mask_ref, out_ref, vector_ref):
    scatter.fill(vector_ref, SIZE, 0)
    found = scatter.any_of_all(mask_ref[...] > 0)
    scatter.put_at(vector_ref, warps.thread_index(), warps.thread_index() * 0 + warps.ones(found))
    scatter.barrier()
    copy_out([vector_ref], [out_ref])

  mask = np.zeros(warps.THREADS, np.int32)
  mask[slice(0) if thread is None else thread] = 1
  with interpreted():
    (found,) = kernel(body, 1)(mask)
  np.testing.assert_array_equal(found[: warps.THREADS], np.full(warps.THREADS, thread is not None))


@pytest.mark.parametrize("joined", [True, False])
def test_the_watch_finds_a_missing_barrier(joined):
  def body(out_ref, vector_ref):
    thread = warps.thread_index()
    scatter.put_at(vector_ref, thread, thread)
    if joined:
      scatter.barrier()
    warps.store(out_ref, thread, warps.lookup(vector_ref, 127 - thread), thread * 0 + 1)

  run = jax.jit(lambda: kernel(body, 1)())
  if joined:
    with interpreted(), watched():
      jax.block_until_ready(run())
  else:
    with pytest.raises(AssertionError, match="'store', 'read'"), interpreted(), watched():
      jax.block_until_ready(run())


def test_updates_lower_to_predicated_code_for_gpus(monkeypatch):
  emitted = []
  inline = scatter.utils.inline_ptx
  monkeypatch.setattr(
    scatter.utils, "inline_ptx", lambda ptx, *a, **k: emitted.append(ptx) or inline(ptx, *a, **k)
  )

  def body(out_ref, vector_ref):
    thread = warps.thread_index()
    for update_at in UPDATES:
      update_at(vector_ref, thread, 1, thread < 5)
    copy_out([vector_ref], [out_ref])

  jax.jit(lambda: kernel(body, 1)()).trace().lower(lowering_platforms=("cuda",))
  kinds = "add.u32", "min.s32", "max.s32"
  names = ["st.shared.s32", *(f"red.relaxed.cta.shared.{kind}" for kind in kinds)]
  assert [ptx for ptx in emitted if "bar." not in ptx] == [f"{name} [$0], $1;" for name in names]
