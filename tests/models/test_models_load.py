"""Parameters straight to sharded arrays: the right values, no byte twice, little host memory."""

import contextlib
import os
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import count_reads, write_checkpoint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from two_processes import run_on_two_processes

from ultraep_jax.models import Checkpoint, Source, load_params

LOAD = sys.modules[load_params.__module__]  # the package may have a function of its name

LAYERS, EXPERTS, OUT, IN, BLOCK = 2, 8, 10, 12, (4, 8)
RNG = np.random.default_rng(0)


def some(shape, dtype) -> np.ndarray:
  return RNG.standard_normal(shape, np.float32).astype(dtype)


def expert(layer: int, index: int) -> str:
  return f"layers.{layer}.experts.{index}.weight"


TENSORS = {
  expert(i, e): some((OUT, IN), jnp.bfloat16) for i in range(LAYERS) for e in range(EXPERTS)
}
TENSORS |= {f"layers.{i}.norm.weight": some((IN,), jnp.bfloat16) for i in range(LAYERS)}
QUANTISED = {f"layers.{i}.q.weight": some((16, 24), jnp.float8_e4m3fn) for i in range(LAYERS)}
QUANTISED |= {f"{n}_scale_inv": some((4, 3), np.float32) for n in QUANTISED}
TENSORS |= QUANTISED | {"embed": some((16, 24), np.float32), "step": np.array(7, np.int32)}

SOURCES = {
  ("experts", "wi"): Source(
    [[expert(i, e) for e in range(EXPERTS)] for i in range(LAYERS)], transpose=True
  ),
  ("norm",): Source([f"layers.{i}.norm.weight" for i in range(LAYERS)]),
  ("q",): Source(np.array([f"layers.{i}.q.weight" for i in range(LAYERS)], object), transpose=True),
  ("embed",): Source("embed"),
  ("step",): Source("step"),
}


def q_value(layer: int) -> np.ndarray:
  name = f"layers.{layer}.q.weight"
  factors = np.kron(TENSORS[f"{name}_scale_inv"], np.ones(BLOCK, np.float32))
  return (TENSORS[name].astype(np.float32) * factors).astype(jnp.bfloat16)


VALUES = {
  ("experts", "wi"): np.array(
    [[TENSORS[expert(i, e)].T for e in range(EXPERTS)] for i in range(LAYERS)]
  ).astype(np.float32),
  ("norm",): np.array([TENSORS[f"layers.{i}.norm.weight"] for i in range(LAYERS)]),
  ("q",): np.array([q_value(i).T for i in range(LAYERS)]),
  ("embed",): TENSORS["embed"].astype(jnp.bfloat16),
  ("step",): TENSORS["step"],
}

EXPERT_ONLY = ((8,), ("expert",))
DATA_EXPERT = ((2, 4), ("data", "expert"))
# Mesh; how experts, norm, q and embed are sharded; columns of factors that the shards of q read,
# of three: shards of three columns share blocks of eight.
CASES = {
  "experts": (EXPERT_ONLY, P(None, "expert"), P(), P(None, "expert"), P("expert"), 10),
  "with data": (DATA_EXPERT, P(None, "expert"), P(), P(None, None, "expert"), P("expert"), 3),
  "hidden": (
    DATA_EXPERT,
    P(None, "expert", "data", None),
    P(None, "data"),
    P(None, ("data", "expert"), None),
    P("data", "expert"),
    10,
  ),
  "layers": (DATA_EXPERT, P("data", None, "expert"), P("data"), P("data"), P(), 3),
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> Checkpoint:
  names = list(TENSORS)
  files = [{n: TENSORS[n] for n in names[i::3]} for i in range(3)]
  return Checkpoint(write_checkpoint(tmp_path_factory.mktemp("load"), files, block=BLOCK))


def shapes_on(mesh, specs) -> dict[tuple[str, ...], jax.ShapeDtypeStruct]:
  return {
    path: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, spec))
    for (path, value), spec in zip(VALUES.items(), [*specs, P()], strict=True)
  }


@pytest.mark.parametrize("case", CASES)
def test_values_shardings_and_bytes(opened, case, monkeypatch):
  (sizes, axes), *specs, columns = CASES[case]
  shapes = shapes_on(jax.make_mesh(sizes, axes), specs)
  monkeypatch.setattr(LOAD, "PIECE_BYTES", 100)  # several pieces of a tensor
  reads = count_reads(monkeypatch)
  arrays = load_params(opened, SOURCES, shapes)
  assert list(arrays) == list(VALUES)
  for path, value in VALUES.items():
    assert arrays[path].sharding == shapes[path].sharding
    assert arrays[path].dtype == value.dtype
    np.testing.assert_array_equal(np.asarray(arrays[path]), value, err_msg=str(path))
  # Every byte once, on however many devices it is.
  weights = sum(t.nbytes for n, t in TENSORS.items() if not n.endswith("_scale_inv"))
  factors = LAYERS * columns * 4 * 4
  assert sum(count for _, count in reads) == weights + factors


def test_one_shard_in_host_memory_at_a_time(tmp_path, monkeypatch):
  shape = (512, 256)
  folder = write_checkpoint(tmp_path, [{f"e{e}": some(shape, jnp.bfloat16) for e in range(16)}])
  sharding = NamedSharding(jax.make_mesh((8,), ("expert",)), P("expert"))
  target = {"w": jax.ShapeDtypeStruct((16, *shape[::-1]), jnp.float32, sharding=sharding)}
  source = {"w": Source([f"e{e}" for e in range(16)], transpose=True)}
  opened = Checkpoint(folder)
  monkeypatch.setattr(LOAD, "PIECE_BYTES", 2**14)
  # As a CPU device may keep the host's memory, whose own it is.
  kept = {d: jax.device_put(np.zeros((2, *shape[::-1]), np.float32), d) for d in jax.devices()}
  monkeypatch.setattr(jax, "device_put", lambda _, place: kept[next(iter(place.device_set))])
  shard = 2 * 4 * shape[0] * shape[1]
  tracemalloc.start()
  load_params(opened, source, target, threads=2)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert shard <= peak < 1.5 * shard


def test_progress_counts_every_byte(opened, monkeypatch):
  seen: list[int] = []

  @contextlib.contextmanager
  def bar(total, what):
    seen.append(-total)
    yield seen.append

  monkeypatch.setattr(LOAD, "byte_progress", bar)
  (sizes, axes), *specs, _ = CASES["hidden"]
  load_params(opened, SOURCES, shapes_on(jax.make_mesh(sizes, axes), specs))
  assert sum(seen) == 0 and len(seen) > len(TENSORS)


def test_every_kind_of_error_at_once_and_before_reading(tmp_path, monkeypatch):
  one = np.ones((2, 3), np.float32)
  tensors = dict.fromkeys(("renamed.w", "extra.w", "wide.w", "int.w", "rope.inv_freq"), one)
  tensors |= {"fp8.w": some((2, 3), jnp.float8_e4m3fn)}
  opened = Checkpoint(write_checkpoint(tmp_path, [tensors], block=(2, 2)))
  sharding = NamedSharding(jax.make_mesh((8,), ("expert",)), P())

  def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

  names = {"a": "renamd.w", "b": "wide.w", "c": "int.w", "d": "fp8.w", "e": ["wide.w", "wide.w"]}
  shapes: dict[str, jax.ShapeDtypeStruct] = {
    "a": shape(2, 3),
    "b": shape(2, 3),
    "c": shape(2, 3, dtype=jnp.int32),
    "d": shape(2, 3),
    "e": shape(3, 2, 3),
    "f": shape(2, 3),
  }
  sources = {path: Source(name, transpose=path == "b") for path, name in names.items()}
  sources["g"] = Source("wide.w")
  reads = count_reads(monkeypatch)
  with pytest.raises(ValueError) as error:
    load_params(opened, sources, shapes, ignored=["*.inv_freq"])
  assert str(error.value).splitlines()[1:] == [
    "  parameters without a source (1):",
    "    f",
    "  sources without a parameter (1):",
    "    g",
    "  missing tensors (1):",
    "    renamd.w: not in the checkpoint (closest: renamed.w)",
    "  unreadable tensors (1):",
    "    fp8.w: expected scales fp8.w_scale_inv for FP8, got none",
    "  tensors of another shape (2):",
    "    wide.w for b: expected (3, 2), got (2, 3)",
    "    e: expected names of shape (3,), got (2,)",
    "  tensors of another dtype (1):",
    "    int.w for c: expected one that becomes int32, got float32",
    "  unexpected tensors (2):",
    "    extra.w",
    "    renamed.w",
  ]
  with pytest.raises(ValueError, match="without a sharding"):
    load_params(opened, {"b": Source("wide.w")}, {"b": jax.ShapeDtypeStruct((2, 3), jnp.float32)})
  assert not reads


def test_many_problems_are_counted(tmp_path):
  tensors = {f"layer.{i}.old": np.ones(2, np.float32) for i in range(5000)}
  opened = Checkpoint(write_checkpoint(tmp_path, [tensors]))
  sharding = NamedSharding(jax.make_mesh((8,), ("expert",)), P())
  shapes = {"w": jax.ShapeDtypeStruct((5000, 2), jnp.float32, sharding=sharding)}
  source = Source([f"layer.{i}.new" for i in range(5000)])
  with pytest.raises(ValueError) as error:
    load_params(opened, {"w": source}, shapes)
  lines = str(error.value).splitlines()
  assert lines[1:3] == [
    "  missing tensors (5000):",
    "    layer.0.new: not in the checkpoint (closest: layer.0.old)",
  ]
  assert "    and 4995 more" in lines and len(lines) < 20


def test_names_are_regular(opened):
  with pytest.raises(ValueError, match="names: expected strings in a regular array"):
    Source([["a", "b"], ["c"]]).array()


def test_a_file_cut_while_loading(tmp_path):
  tensors = {f"t{i}": some((64, 64), np.float32) for i in range(4)}
  opened = Checkpoint(write_checkpoint(tmp_path, [tensors]))
  os.truncate(tmp_path / "model.safetensors", 30_000)
  sharding = NamedSharding(jax.make_mesh((8,), ("expert",)), P(None, "expert"))
  shapes = {"w": jax.ShapeDtypeStruct((4, 64, 64), jnp.float32, sharding=sharding)}
  with pytest.raises(OSError, match=r"model\.safetensors: expected"):
    load_params(opened, {"w": Source(sorted(tensors))}, shapes)


LOAD_HALF = """
import os
import numpy as np
(folder,) = arguments
from safetensors.numpy import load_file
from ultraep_jax.models import Checkpoint, Source, load_params
total, preadv = [], os.preadv
os.preadv = lambda *args: (total.append(preadv(*args)), total[-1])[1]
mesh = jax.make_mesh((8,), ("expert",))
P = jax.sharding.PartitionSpec
def shape(value, *spec):
  return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=jax.NamedSharding(mesh, P(*spec)))
tensors = load_file(folder + "/model.safetensors")
w, norm = np.array([tensors[f"e{e}"].T for e in range(8)]), tensors["norm"]
sources = {"w": Source([f"e{e}" for e in range(8)], True), "norm": Source("norm")}
shapes = {"w": shape(w, "expert"), "norm": shape(norm)}
arrays = load_params(Checkpoint(folder), sources, shapes)
for name, value in (("w", w), ("norm", norm)):
  assert len(arrays[name].addressable_shards) == 4
  for shard in arrays[name].addressable_shards:
    np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])
assert arrays["w"].shape == w.shape and not arrays["w"].is_fully_addressable
assert sum(total) == w.nbytes // 2 + norm.nbytes, sum(total)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_each_process_reads_its_own_part(tmp_path):
  tensors = {f"e{e}": some((6, 8), jnp.bfloat16) for e in range(8)}
  write_checkpoint(tmp_path, [tensors | {"norm": some((8,), np.float32)}])
  run_on_two_processes(LOAD_HALF, tmp_path)
