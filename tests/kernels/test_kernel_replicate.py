"""The replication kernel: lowering for GPUs, and runs on virtual devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P
from mosaic_interpret import interpreted
from placements import PLANS
from programs import count_reaching, equations

from pallas_kernels.launch import shared_bytes
from pallas_kernels.transfer import replicate as transfer
from pallas_kernels.transfer import tiles
from pallas_kernels.transfer.replicate import replicate
from pallas_kernels.transfer.replicate_work import Fields
from pallas_kernels.transfer.tuning import SHARED_BYTES, TransferTuning

RANKS, HOME = 4, 2


def mesh(*sizes_and_names):
  sizes, names = zip(*sizes_and_names or [(RANKS, "expert")], strict=True)
  axis_types = (jax.sharding.AxisType.Auto,) * len(sizes)
  return jax.make_mesh(sizes, names, axis_types, devices=jax.devices()[: int(np.prod(sizes))])


def sharded(mesh, tuning=None, check_vma=True, home_rows_G=None):
  function = functools.partial(
    replicate, axis_name="expert", tuning=tuning, home_rows_G=home_rows_G
  )
  specs = (P("expert"), P(), P())
  return jax.jit(
    jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("expert"), check_vma=check_vma)
  )


def plan(name):
  return tuple(jnp.array(part, jnp.int32) for part in PLANS[name])


def experts(*shapes_and_dtypes):
  rng = np.random.default_rng(0)
  return [
    jnp.asarray(rng.normal(size=(RANKS * HOME, *shape)), dtype)
    for shape, dtype in shapes_and_dtypes
  ]


def assert_copied(copies, arrays, replica_expert_GS):
  expert_R = np.asarray(replica_expert_GS).reshape(-1)
  for copy, array in zip(copies, arrays, strict=True):
    assert copy.dtype == array.dtype and copy.shape == (expert_R.size, *array.shape[1:])
    bits = f"u{array.dtype.itemsize}"
    got, expected = np.asarray(copy).view(bits), np.asarray(array).view(bits)
    np.testing.assert_array_equal(got[expert_R >= 0], expected[expert_R[expert_R >= 0]])


# --- interpreted -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_copies_bit_for_bit(name):
  """Rows that end in a part of a tile, rows smaller than a tile, and two dtypes."""
  arrays = experts(((3, 56), jnp.float32), ((8,), jnp.bfloat16))
  with interpreted():
    copies = sharded(mesh(), TransferTuning(blocks=2, workers=2, tile_bytes=256))(
      arrays, *plan(name)
    )
  assert_copied(copies, arrays, PLANS[name][0])


@pytest.mark.parametrize("name", ["crossed", "opposite"])
def test_copies_in_turns(name):
  """Experts have several turns, against the order of slots."""
  arrays = experts(((3, 56), jnp.float32), ((8,), jnp.bfloat16))
  home_rows_G = jnp.array([90, 0, 30, 60], jnp.int32)
  tuning = TransferTuning(blocks=2, workers=2, tile_bytes=256)
  with interpreted():
    run = sharded(mesh(), tuning, home_rows_G=home_rows_G)
    copies = jax.block_until_ready(run(arrays, *plan(name)))
  assert_copied(copies, arrays, PLANS[name][0])


@pytest.mark.parametrize("home_rows", [None, [90, 0, 30, 60]])
@pytest.mark.parametrize("name", PLANS)
def test_copies_in_runs_of_tiles(name, home_rows, monkeypatch):
  """Runs of three tiles, of two and of one; each worker has several of them."""
  arrays = experts(((11, 64), jnp.float32), ((4, 64), jnp.bfloat16))
  monkeypatch.setattr(transfer, "_MOST_RUN", 3)
  monkeypatch.setattr(transfer, "_LEAST_RUNS", 1)
  home_rows_G = home_rows and jnp.array(home_rows, jnp.int32)
  tuning = TransferTuning(blocks=2, workers=1, tile_bytes=512)
  cuts = tiles.cut("arrays", arrays, tuning, run=3)
  assert sum(each.count for each in cuts) == 13 and sum(each.runs for each in cuts) == 5
  with interpreted():
    run = sharded(mesh(), tuning, home_rows_G=home_rows_G)
    copies = jax.block_until_ready(run(arrays, *plan(name)))
  assert_copied(copies, arrays, PLANS[name][0])


@pytest.mark.parametrize(
  ("workers", "ranks", "length"), [(9, 4, 2), (10, 4, 1), (1, 4, 4), (1, 2, 1)]
)
def test_large_experts_that_ranks_may_forward_go_in_runs(workers, ranks, length, monkeypatch):
  """180 tiles: each worker has ten runs or more, or its tiles go one by one."""
  cuts, real = [], tiles.cut
  monkeypatch.setattr(tiles, "cut", lambda *a, **k: cuts.append(real(*a, **k)) or cuts[-1])
  tuning = TransferTuning(blocks=workers, workers=1, tile_bytes=128)

  def copied(array, *plan):
    return transfer.replication([array], *plan, axis_name="expert", tuning=tuning).launch()

  run = jax.shard_map(
    copied, mesh=mesh((ranks, "expert")), in_specs=(P("expert"), P(), P()), out_specs=P("expert")
  )
  array = jax.ShapeDtypeStruct((ranks * HOME, 180, 32), jnp.float32)
  slots = jax.ShapeDtypeStruct((ranks, 2), jnp.int32)
  jax.eval_shape(run, array, slots, slots)
  assert {each.run for each in cuts[-1]} == {length}


@pytest.mark.parametrize(("shared", "buffers"), [(8192, 2), (3000, 1)])
@pytest.mark.parametrize("name", PLANS)
def test_copies_through_as_many_buffers_as_there_is_room_for(name, shared, buffers, monkeypatch):
  """Rows of 1024 bytes, which no tile divides."""
  arrays = experts(((6, 512), jnp.bfloat16))
  monkeypatch.setattr(transfer, "SHARED_BYTES", shared)
  tuning, made = TransferTuning(blocks=1, workers=1, tile_bytes=256), []

  def copied(arrays, *plan):
    moves = transfer.replication(arrays, *plan, axis_name="expert", tuning=tuning, flat=False)
    made.append(moves.buffers[1].shape[0])
    return moves.launch()

  specs = (P("expert"), P(), P())
  run = jax.shard_map(copied, mesh=mesh(), in_specs=specs, out_specs=P("expert"))
  with interpreted():
    copies = jax.block_until_ready(jax.jit(run)(arrays, *plan(name)))
  assert made == [buffers]
  assert_copied(copies, arrays, PLANS[name][0])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "float16", "uint32"])
def test_copies_any_dtype(dtype):
  arrays = experts(((2, 64), dtype))
  with interpreted():
    copies = sharded(mesh(), TransferTuning(blocks=1, workers=2, tile_bytes=128))(
      arrays, *plan("chain")
    )
  assert_copied(copies, arrays, PLANS["chain"][0])


def test_copies_along_one_axis_of_two():
  """Both groups of ranks replicate the same experts, each for itself."""
  arrays = experts(((64,), jnp.float32))
  with interpreted():
    devices = mesh((2, "data"), (RANKS, "expert"))
    copies = sharded(devices, TransferTuning(blocks=1, workers=1, tile_bytes=128), check_vma=False)(
      arrays, *plan("chain")
    )
    assert_copied(copies, arrays, PLANS["chain"][0])
    for shard in copies[0].addressable_shards:
      expert_S = np.array(PLANS["chain"][0]).reshape(-1)[shard.index[0]]
      expected = np.asarray(arrays[0])[expert_S[expert_S >= 0]]
      np.testing.assert_array_equal(np.asarray(shard.data)[expert_S >= 0], expected)


# --- lowering --------------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
  "shapes_and_dtypes",
  [
    [((4096, 1536), "bfloat16"), ((4096, 1536), "bfloat16"), ((1536, 4096), "bfloat16")],
    [((64, 32), "float8_e4m3fn"), ((64,), "float32"), ((16,), "int8"), ((8,), "float16")],
  ],
)
def test_lowers_for_gpus(shapes_and_dtypes, check_vma):
  arrays = [jax.ShapeDtypeStruct((RANKS * HOME, *s), d) for s, d in shapes_and_dtypes]
  for devices in (mesh(), mesh((2, "data"), (RANKS, "expert"))):
    traced = sharded(devices, check_vma=check_vma).trace(arrays, *plan("empty"))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert count_reaching(text) == 1  # one kernel for all arrays


def test_output_varies_over_the_axis():
  """An output typed as the same on all ranks would multiply gradients by their number."""

  def varying(arrays, *plan):
    (copy,) = replicate(arrays, *plan, axis_name="expert")
    assert jax.typeof(copy).manual_axis_type.varying == {"expert"}
    return copy

  arrays = [jax.ShapeDtypeStruct((HOME, 8), jnp.float32)]
  specs = (P(), P(), P())  # home experts that are the same on all ranks
  jax.jit(jax.shard_map(varying, mesh=mesh(), in_specs=specs, out_specs=P("expert"))).trace(
    arrays, *plan("star")
  )


def test_no_slots_and_no_arrays_need_no_kernel():
  empty = jnp.zeros((RANKS, 0), jnp.int32)
  (copies,) = sharded(mesh())(experts(((8,), jnp.float32)), empty, empty)
  assert copies.shape == (0, 8)
  assert sharded(mesh())([], *plan("star")) == []


def test_a_tile_is_one_group_of_copies():
  """Which no interpreter knows of: what waits for groups would else wait for nothing."""
  traced = jax.jit(sharded(mesh())).trace(experts(((3, 56), jnp.float32)), *plan("chain"))
  eqns = equations(traced.jaxpr.jaxpr)
  found = [eqn for eqn in eqns if eqn.primitive.name in ("copy_smem_to_gmem", "commit_group")]
  assert [eqn.primitive.name for eqn in found] == ["copy_smem_to_gmem", "commit_group"]
  assert not found[0].params["commit_group"]


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("arrays", "error", "message"),
  [
    ([((3,), "float32")], NotImplementedError, "multiple of 16 bytes, got 12 bytes"),
    ([((), "float32")], NotImplementedError, "multiple of 16 bytes, got 4 bytes"),
    ([((0, 8), "float32")], NotImplementedError, "multiple of 16 bytes, got 0 bytes"),
    ([((64,), "bool")], NotImplementedError, "arrays: expected a dtype of"),
  ],
)
def test_rejects_arrays(arrays, error, message):
  arrays = [jax.ShapeDtypeStruct((RANKS * HOME, *shape), dtype) for shape, dtype in arrays]
  with pytest.raises(error, match=message):
    sharded(mesh()).trace(arrays, *plan("star"))


def test_rejects_plans():
  arrays = experts(((8,), jnp.float32))
  replica_GS, parent_GS = plan("star")
  with pytest.raises(ValueError, match=r"parent_GS: expected shape \[4, S\], got \(4, 1\)"):
    sharded(mesh())(arrays, replica_GS, parent_GS[:, :1])
  with pytest.raises(ValueError, match=r"replica_expert_GS: expected shape \[4, S\], got \(3, 2\)"):
    sharded(mesh())(arrays, replica_GS[:3], parent_GS[:3])
  with pytest.raises(TypeError, match="parent_GS: expected int32, got float32"):
    sharded(mesh())(arrays, replica_GS, parent_GS.astype(jnp.float32))
  for rows, error, message in (
    (jnp.zeros(3, jnp.int32), ValueError, r"home_rows_G: expected shape \(4,\), got \(3,\)"),
    (jnp.zeros(4), TypeError, "home_rows_G: expected int32, got float32"),
  ):
    with pytest.raises(error, match=message):
      sharded(mesh(), home_rows_G=rows)(arrays, replica_GS, parent_GS)
  uneven = [arrays[0], jnp.zeros((RANKS, 8))]
  with pytest.raises(ValueError, match=r"arrays: expected one leading size M >= 1, got \[1, 2\]"):
    sharded(mesh())(uneven, replica_GS, parent_GS)


def test_rejects_automatic_axes():
  function = functools.partial(replicate, axis_name="expert")
  devices = mesh((2, "data"), (RANKS, "expert"))
  specs = {"in_specs": (P("expert"), P(), P()), "out_specs": P("expert")}
  with pytest.raises(NotImplementedError, match="got \\['data'\\] left out"):
    jax.jit(jax.shard_map(function, mesh=devices, axis_names={"expert"}, **specs)).trace(
      experts(((8,), jnp.float32)), *plan("star")
    )


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"blocks": 0}, "blocks: expected at least 1, got 0"),
    ({"tile_bytes": 100}, "tile_bytes: expected a multiple of 128, got 100"),
    ({"workers": 8}, "expected at most 229376, got 262144"),
    ({"workers": 9, "tile_bytes": 128}, "workers: expected at most 8, got 9"),
  ],
)
def test_rejects_tunings(arguments, message):
  with pytest.raises(ValueError, match=message):
    TransferTuning(**{"tile_bytes": 32768, **arguments})


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("ranks, most", [(2, 256), (4, 128), (8, 66), (32, 62)])
def test_each_worker_has_two_tiles_beside_its_list(ranks, most, flat):
  """Else it loads nothing while it sends."""
  tuning = TransferTuning(blocks=12, workers=3, tile_bytes=32 * 1024)
  array = jax.ShapeDtypeStruct((HOME, 1024, 512), jnp.bfloat16)
  for slots in range(1, most + 1):
    found = transfer.bounded_tiles(tuning, ranks, slots)
    list_ref = plgpu.SMEM((found.workers, Fields.length(slots, ranks * slots)), jnp.int32)
    cut = tiles.cut("arrays", [array], found, flat=flat)
    assert shared_bytes([list_ref, *tiles.buffers(cut, found, 2)]) <= SHARED_BYTES
    assert found.tile_bytes == tuning.tile_bytes or ranks * slots > 448


@pytest.mark.parametrize("slots, tile_bytes", [(64, 32 * 1024), (256, 32384)])
def test_kernels_bound_the_tiles_of_any_tuning(slots, tile_bytes):
  """A table's too, which knows nothing of slots."""
  found = []

  def copies(*args):
    tuning = TransferTuning(blocks=12, workers=3, tile_bytes=32 * 1024)
    found.append(transfer.replication(*args, axis_name="expert", tuning=tuning))
    return found[0].launch()

  in_specs = (P("expert"), P(), P())
  traced = jax.shard_map(
    copies, mesh=mesh((2, "expert")), in_specs=in_specs, out_specs=P("expert"), check_vma=False
  )
  plan_GS = jax.ShapeDtypeStruct((2, slots), jnp.int32)
  arrays = [jax.ShapeDtypeStruct((2 * HOME, 1024, 512), jnp.bfloat16)]
  jax.jit(traced).trace(arrays, plan_GS, plan_GS)
  assert found[0].tuning.tile_bytes == tile_bytes
