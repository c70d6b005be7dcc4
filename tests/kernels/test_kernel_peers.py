"""Kernels that reach other GPUs, along a mesh axis that has no others."""

import functools

import assignments
import jax
import pytest
from jax.experimental.mosaic.gpu import core as mosaic_gpu
from jax.sharding import PartitionSpec as P
from programs import count_reaching

from pallas_kernels.transfer.combine import combine, combine_values
from pallas_kernels.transfer.dispatch import dispatch, dispatch_scaled
from pallas_kernels.transfer.reduce_replicas import reduce_replicas
from pallas_kernels.transfer.replicate import replicate

TOKENS, TOP_K, WIDTH, CAPACITY = 64, 2, 256, 128
ASSIGNED = [((TOKENS, TOP_K), "int32"), ((1, TOKENS, TOP_K), "int32")]  # on one rank


@pytest.fixture(params=[False, True], ids=["without NVSHMEM", "with NVSHMEM"])
def one_gpu(request, monkeypatch):
  """A host with one GPU, where NVSHMEM is installed and switched on, or not."""
  monkeypatch.setattr(mosaic_gpu, "is_single_process_multi_device_topology", lambda: False)
  monkeypatch.setattr(mosaic_gpu, "is_nvshmem_available", lambda: request.param)


def alone(name):
  """A kernel on arrays of one rank, and their shapes and dtypes."""
  dest, received = ASSIGNED
  gate = (dest[0], "float32")
  placed, rows = [((1, 3), "int32")] * 2, (TOKENS, WIDTH)
  along = functools.partial
  return {
    "dispatch": (
      lambda x, *where: along(dispatch, capacity=CAPACITY, axis_name="expert")([x], *where),
      [(rows, "bfloat16"), dest, dest, gate],
    ),
    "dispatch_scaled": (
      along(dispatch_scaled, dtype="bfloat16", capacity=CAPACITY, axis_name="expert"),
      [(rows, "float8_e4m3fn"), ((TOKENS, 4), "float32"), dest, dest, gate],
    ),
    "combine": (
      along(combine, axis_name="expert"),
      [((CAPACITY, WIDTH), "bfloat16"), (received[0], "float32"), dest, received],
    ),
    "combine_values": (
      along(combine_values, axis_name="expert"),
      [((CAPACITY, WIDTH), "bfloat16"), ((CAPACITY,), "float32"), dest, received],
    ),
    "replicate": (
      lambda home, *plan: along(replicate, axis_name="expert")([home], *plan),
      [((2, 64), "float32"), *placed],
    ),
    "reduce_replicas": (
      lambda copy, home, *plan: along(reduce_replicas, axis_name="expert")([copy], [home], *plan),
      [((3, 64), "float32"), ((2, 64), "float32"), *placed],
    ),
  }[name]


@pytest.mark.parametrize("sizes", [((1, "expert"),), ((2, "data"), (1, "expert"))])
@pytest.mark.parametrize(
  "name",
  ["dispatch", "dispatch_scaled", "combine", "combine_values", "replicate", "reduce_replicas"],
)
def test_a_rank_without_peers_asks_for_none(name, sizes, one_gpu):
  function, arguments = alone(name)
  mesh = assignments.mesh(*sizes)
  run = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
  shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arguments]
  text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("custom_call @mosaic_gpu") == (name != "reduce_replicas")
  assert "nvshmem" not in text
  assert not count_reaching(text)


def test_ranks_with_peers_reach_them():
  """Else the test above would pass with a kernel that keeps everything."""
  function, arguments = alone("combine")
  two = ((2, *shape[1:]) if len(shape) == 3 else shape for shape, _ in arguments)
  shapes = [jax.ShapeDtypeStruct(s, d) for s, (_, d) in zip(two, arguments, strict=True)]
  mesh = assignments.mesh((2, "expert"))
  run = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
  text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
  assert count_reaching(text)
