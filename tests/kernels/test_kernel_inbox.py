"""The inbox of a reduction is at most 1 GiB, whatever the ranks and slots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from layer_problems import make_mesh
from mosaic_interpret import interpreted
from placements import PLANS

import pallas_kernels as kernels
from pallas_kernels.transfer import inbox
from pallas_kernels.transfer.tiles import Transfer
from pallas_kernels.transfer.tuning import GRADIENT_UNIT, TransferTuning
from ultraep_jax.transport import replicate
from ultraep_jax.transport.replicate import REDUCING

GIB = 1 << 30
ALONE = TransferTuning(blocks=132)


def inbox_bytes(tuning, ranks, slots):
  return 2 * (ranks - 1) * slots * tuning.num_workers * tuning.tile_bytes


@given(st.sampled_from([ALONE, REDUCING]), st.integers(2, 512), st.integers(0, 512))
def test_the_bound_holds(tuning, ranks, slots):
  found = inbox.bounded_inbox(tuning, ranks, slots)
  if ranks == 2 or inbox_bytes(tuning, ranks, slots) <= GIB:
    assert found == tuning
    return
  assert inbox_bytes(found, ranks, slots) <= GIB or found.num_blocks == 1
  assert found.num_blocks <= tuning.num_blocks and found.workers == tuning.workers
  assert found.tile_bytes <= tuning.tile_bytes and found.tile_bytes % (4 * GRADIENT_UNIT) == 0
  if found.num_blocks < 8:
    assert found.tile_bytes == 4 * GRADIENT_UNIT  # tiles are smaller first
  if found.tile_bytes < tuning.tile_bytes:
    assert found.num_blocks <= 8  # and blocks fewer before that
  assert inbox_bytes(found, ranks, slots) > GIB // 3  # and no smaller than need be


def on_ranks(function, ranks, slots, dtype):
  """Traces it for gradients of one expert a slot, and a plan of so many slots."""
  plan_GS = jax.ShapeDtypeStruct((ranks, slots), jnp.int32)
  replica, home = (
    jax.ShapeDtypeStruct((ranks * count, 1 << 20), dtype) for count in (slots, max(slots, 2))
  )
  jax.jit(
    jax.shard_map(
      function,
      mesh=make_mesh(ranks),
      in_specs=(P("expert"), P("expert"), P(), P()),
      out_specs=P("expert"),
      check_vma=False,
    )
  ).trace(replica, home, plan_GS, plan_GS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("ranks", "slots"), [(2, 96), (4, 28), (4, 96), (8, 240)])
def test_kernels_have_it(ranks, slots, dtype, monkeypatch):
  """Alone: called directly, and where a layer reduces without a tuning. Beside a matmul."""
  launched = []

  def launch(self):
    launched.append(self)
    return self.finish([None, *self.updated])

  monkeypatch.setattr(Transfer, "launch", launch)

  def directly(replica, home, *plan):
    return kernels.reduce_replicas([replica], [home], *plan, axis_name="expert")

  def in_a_layer(replica, home, *plan):
    return replicate.reduce_replicas(
      replica, home, *plan, axis_name="expert", implementations=("mosaic_gpu",)
    )

  def beside(replica, home, *plan):
    replicas = replicate.Replicas(
      *(home, *plan, None, "expert", None, ("mosaic_gpu",), kernels.UNTUNED),
      rank=jnp.int32(0),  # not used
    )
    return replicas.reducing([replica], [home]).launch()

  monkeypatch.setattr(replicate, "first_that_can", lambda _, candidates: candidates["mosaic_gpu"]())
  for function in (directly, in_a_layer, beside):
    on_ranks(function, ranks, slots, dtype)
  assert len(launched) == 3
  for each in launched:
    (shape,) = each.out_type
    assert shape.dtype == dtype and shape.size * shape.dtype.itemsize <= GIB
    assert (shape.shape[0] == each.tuning.num_workers) == (ranks > 2)
  if ranks == 2:
    assert {each.tuning.num_workers for each in launched} == {264, 36}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["crossed", "chain", "star"])
def test_sums_are_exact_with_the_smallest_layout(name, dtype, monkeypatch):
  ranks, home, slots = 4, 2, 2
  small = TransferTuning(blocks=1, tile_bytes=4096)  # interpreted, blocks run one after another
  monkeypatch.setattr(inbox, "_MOST_BYTES", inbox_bytes(small, ranks, slots))
  assert inbox.bounded_inbox(ALONE, ranks, slots) == small
  rng = np.random.default_rng(0)
  replicas, homes = (
    jnp.asarray(rng.integers(-31, 31, (ranks * count, 9, 1024)), dtype) for count in (slots, home)
  )
  specs = P("expert"), P("expert"), P(), P()
  function = functools.partial(kernels.reduce_replicas, axis_name="expert")
  run = jax.shard_map(function, mesh=make_mesh(ranks), in_specs=specs, out_specs=P("expert"))
  with interpreted():
    (sums,) = jax.jit(run)([replicas], [homes], *(jnp.array(x, jnp.int32) for x in PLANS[name]))
  wanted = np.array(homes, np.float32)
  expert_R = np.array(PLANS[name][0]).reshape(-1)
  filled = expert_R >= 0
  np.add.at(wanted, expert_R[filled], np.asarray(replicas, np.float32)[filled])
  np.testing.assert_array_equal(np.asarray(sums, np.float32), wanted)
