"""The interpreter of kernels: warpgroups of many devices wait for each other; faults are told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P
from layer_problems import make_mesh
from mosaic_interpret import interpreted

RANKS, GROUPS, SIZE = 8, 3, 128


def relay(starts):
  """Warpgroups of all ranks signal each other in turn, from the last of the last rank down.

  The last waits for nobody if the relay ``starts``.
  """

  def body(x_ref, out_ref, signals):
    rank, group = lax.axis_index("expert"), lax.axis_index("group")
    place = rank * GROUPS + group

    @pl.when((place < RANKS * GROUPS - 1) | (not starts))
    def _():
      pl.semaphore_wait(signals.at[group])

    @pl.when(place > 0)
    def _():
      before = place - 1
      pl.semaphore_signal(signals.at[before % GROUPS], device_id={"expert": before // GROUPS})

    @pl.when(group == 0)
    def _():
      out_ref[...] = x_ref[...] + 1

  def on_rank(x):
    call = plgpu.kernel(
      body,
      out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
      scratch_types=[plgpu.SemaphoreType.REGULAR((GROUPS,))],
      num_threads=GROUPS,
      thread_name="group",
    )
    return call(x)

  specs = {"in_specs": P("expert"), "out_specs": P("expert")}
  return jax.jit(jax.shard_map(on_rank, mesh=make_mesh(RANKS), check_vma=False, **specs))


def test_more_warpgroups_wait_than_there_are_devices():
  with interpreted():
    out = relay(starts=True)(jnp.zeros(RANKS * SIZE, jnp.int32))
  np.testing.assert_array_equal(out, np.ones(RANKS * SIZE, np.int32))


def test_a_wait_without_end_is_what_is_told():
  with pytest.raises(jax.errors.JaxRuntimeError, match="waits for ever: 0 of 1"), interpreted(0.5):
    relay(starts=False)(jnp.zeros(RANKS * SIZE, jnp.int32))
