"""The kernel that brings a vector of every rank to all: interpreted, and lowered for GPUs."""

import assignments
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from mosaic_interpret import interpreted
from programs import count_reaching

from pallas_kernels.transfer.gather import gather

ONE_AXIS = ((4, "expert"),)
TWO_AXES = ((2, "data"), (2, "expert"))


def gathered(sizes, axis_name, operation=gather):
  """``operation`` on each rank's vector of ``[..., N]``, where the type says who has which."""
  axes = [name for _, name in sizes]
  along = (axis_name,) if isinstance(axis_name, str) else axis_name
  rest = [axis for axis in axes if axis not in along]

  def local(value):
    result_GN, rank = operation(value.reshape(-1), axis_name=axis_name)
    return result_GN.reshape(*[1] * len(rest), *result_GN.shape), rank.reshape([1] * len(axes))

  # With check_vma, a result that varied along the axis would be refused.
  return jax.jit(
    jax.shard_map(
      local,
      mesh=assignments.mesh(*sizes),
      in_specs=P(*axes),
      out_specs=(P(*rest), P(*axes)),
      check_vma=True,
    )
  )


@pytest.mark.parametrize(
  "sizes, axis_name, length",
  [
    (ONE_AXIS, "expert", 5),
    (ONE_AXIS, "expert", 128),
    (TWO_AXES, "expert", 33),
    (TWO_AXES, ("data", "expert"), 64),
    (((1, "expert"),), "expert", 5),
  ],
)
def test_is_an_all_gather(sizes, axis_name, length):
  def by_collective(value, axis_name):
    return lax.all_gather(value, axis_name, to="invarying"), lax.axis_index(axis_name)

  lead = [size for size, _ in sizes]
  value = np.random.default_rng(0).integers(-99, 99, size=(*lead, length)).astype(np.int32)
  with interpreted():
    got = jax.tree.map(np.asarray, gathered(sizes, axis_name)(value))
  want = gathered(sizes, axis_name, by_collective)(value)
  for each, expected in zip(got, want, strict=True):
    np.testing.assert_array_equal(each, expected)


@pytest.mark.parametrize("sizes, length", [(ONE_AXIS, 512), (ONE_AXIS, 1), (TWO_AXES, 128)])
def test_lowers_for_gpus_as_one_kernel(sizes, length):
  shape = jax.ShapeDtypeStruct((*[size for size, _ in sizes], length), jnp.int32)
  lowered = gathered(sizes, "expert").trace(shape).lower(lowering_platforms=("cuda",))
  assert count_reaching(lowered.as_text()) == 1


@pytest.mark.parametrize("sizes, length", [(((1, "expert"),), 8), (ONE_AXIS, 0)])
def test_needs_no_kernel_for_one_rank_or_nothing(sizes, length):
  shape = jax.ShapeDtypeStruct((*[size for size, _ in sizes], length), jnp.int32)
  text = gathered(sizes, "expert").trace(shape).lower(lowering_platforms=("cuda",)).as_text()
  assert "mosaic_gpu" not in text


@pytest.mark.parametrize(
  "kind, message, shape, dtype",
  [
    (ValueError, r"value_N: expected a vector, got shape \(2, 3\)", (2, 3), "int32"),
    (TypeError, "value_N: expected int32, got float32", (3,), "float32"),
    (NotImplementedError, "gather: expected at most", (64 * 1024,), "int32"),
  ],
)
def test_says_what_is_wrong(kind, message, shape, dtype):
  def local(value):
    return gather(value, axis_name="expert")

  mesh = assignments.mesh(*ONE_AXIS)
  run = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
  with pytest.raises(kind, match=message):
    jax.jit(run).trace(jax.ShapeDtypeStruct(shape, dtype))
