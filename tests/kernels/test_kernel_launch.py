"""What kernels need of a device: shared memory, and as many SMs as they have blocks."""

import dataclasses
import pathlib

import assignments
import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import pallas_kernels
from pallas_kernels import support
from pallas_kernels.launch import launch, shared_bytes
from pallas_kernels.matmul.layout import MatmulTuning
from pallas_kernels.transfer import chunks
from pallas_kernels.transfer.dispatch import dispatch_scaled
from pallas_kernels.transfer.tuning import (
  ExchangeTuning,
  TransferTuning,
  combining,
  dispatching,
)

LIMIT = 227 * 1024


def of_device(**facts):
  """A GPU with these facts."""
  return dataclasses.make_dataclass("Device", ["platform", *facts])("gpu", *facts.values())


# --- shared memory ---------------------------------------------------------------------------


def test_shared_memory_is_what_is_lowered():
  """Buffers begin at multiples of 1024 bytes; views of one memory count once."""
  vector = plgpu.SMEM((300,), jnp.int32)
  assert shared_bytes([vector]) == 2048
  assert shared_bytes([vector, plgpu.SMEM((1024,), jnp.int8), plgpu.Barrier(num_barriers=3)]) == (
    3 * 1024 + 3 * 8
  )
  assert shared_bytes([plgpu.RefUnion((vector, vector), (vector,))]) == 2 * 2048
  assert shared_bytes([plgpu.SemaphoreType.REGULAR((4096, 4096))]) == 0


@pytest.mark.parametrize("words, fits", [(LIMIT // 4, True), (LIMIT // 4 + 1, False)])
def test_a_kernel_that_does_not_fit_is_refused(words, fits):
  def body(source_ref, target_ref, scratch_ref):
    scratch_ref[0] = source_ref[0]
    target_ref[0] = scratch_ref[0]

  def run(x):
    shape = jax.ShapeDtypeStruct((1,), jnp.int32)
    return launch(
      body,
      [x],
      out_type=[shape],
      scratch_types=[plgpu.SMEM((words,), jnp.int32)],
      kernel_name="large",
    )

  traced = jax.ShapeDtypeStruct((1,), jnp.int32)
  if fits:
    jax.jit(run).trace(traced).lower(lowering_platforms=("cuda",))
  else:
    with pytest.raises(NotImplementedError, match=f"large: expected at most {LIMIT} bytes"):
      jax.jit(run).trace(traced)


def test_tokens_in_fp8_with_large_tiles_are_refused():
  """The tiles alone would fit; their products, of twice as many bytes and more, do not."""
  tuning = ExchangeTuning(workers=8, tile_bytes=28 * 1024)
  width = 16 * 1024

  def run(value, scale, *where):
    return dispatch_scaled(
      value, scale, *where, dtype="bfloat16", capacity=16, axis_name="expert", tuning=tuning
    )

  shapes = [((8, width), "float8_e4m3fn"), ((8, width // 128), "float32")]
  shapes += [((8, 2), "int32")] * 2
  arguments = [jax.ShapeDtypeStruct(*each) for each in shapes]
  mesh, everywhere = assignments.mesh((2, "expert")), PartitionSpec()
  mapped = jax.shard_map(run, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
  with pytest.raises(NotImplementedError, match=f"dispatch: expected at most {LIMIT} bytes"):
    jax.jit(mapped).trace(*arguments)


def test_every_kernel_is_launched_by_one_function():
  folder = pathlib.Path(pallas_kernels.__file__).parent
  files = [path.name for path in folder.rglob("*.py") if "plgpu.kernel(" in path.read_text()]
  assert files == ["launch.py"]


# --- blocks ----------------------------------------------------------------------------------


def test_facts_are_those_of_the_device(monkeypatch):
  assert (support.num_sms(), support.shared_bytes()) == (132, LIMIT)  # no GPU to be asked
  device = of_device(core_count=78, shared_memory_per_block_optin=99 * 1024)
  monkeypatch.setattr(jax, "devices", lambda: [device])
  assert (support.num_sms(), support.shared_bytes()) == (78, 99 * 1024)
  abstract = jax.sharding.AbstractDevice(device_kind="H100", num_cores=114, platform="gpu")
  mesh = AbstractMesh((2,), ("expert",), (AxisType.Auto,), abstract_device=abstract)
  with jax.sharding.use_abstract_mesh(mesh):
    assert support.num_sms() == 114


def test_lines_of_many_tokens_stay_small():
  """So that large batches fit into shared memory; there are more steps then."""
  tuning = dispatching(10**6).placed()
  for tokens, columns in ((8192, 16), (10**6, 8), (10**6, 44), (4096, 1000)):
    deal = chunks.Deal.of(tokens, columns, tuning)
    assert deal.line <= max(512, columns + 31)
    assert deal.chunk * deal.chunks >= tokens > deal.chunk * (deal.chunks - deal.num_workers)
  assert chunks.Deal.of(8192, 16, tuning).steps == tuning.steps


@pytest.mark.parametrize("sms", [78, 132])
def test_workers_have_a_token_each(sms, monkeypatch):
  """As far as there are tokens, and up to eight; up to four for tokens in FP8."""
  monkeypatch.setattr(support, "num_sms", lambda: sms)
  counts = 1, 2 * sms, 2 * sms + 1, 4 * sms, 4 * sms + 1, 10**6
  for layout in (dispatching, lambda tokens: combining(tokens, 2)):
    assert [layout(tokens).workers for tokens in counts] == [2, 2, 4, 4, 8, 8]
  assert [dispatching(tokens, scaled=True).workers for tokens in counts] == [2, 2, 4, 4, 4, 4]
  assert [combining(4096, ranks).steps for ranks in (1, 2, 4)] == [2, 4, 2]


@pytest.mark.parametrize("sms", [78, 114, 132])
def test_blocks_are_one_for_each_sm(sms, monkeypatch):
  monkeypatch.setattr(support, "num_sms", lambda: sms)
  for tuning in (TransferTuning(), dispatching(64), combining(64, 2)):
    assert tuning.placed().num_blocks == sms
  assert TransferTuning(blocks=12, workers=3).placed().num_workers == 36
  assert MatmulTuning().placed().clusters == sms
  assert MatmulTuning(cluster=4).placed().clusters == sms // 4
  for tuning in (TransferTuning(blocks=sms + 1), MatmulTuning(blocks=sms + 1)):
    with pytest.raises(ValueError, match=f"blocks: expected at most the {sms} SMs of the device"):
      tuning.placed()
