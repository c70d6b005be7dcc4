"""Folders of safetensors: what is in them, slices of it, and errors that say what is wrong."""

import json
import math
import os
import pathlib
import re

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import count_reads, write_checkpoint, write_raw
from hypothesis import strategies as st

from ultraep_jax.models import checkpoint, fp8, problems

Checkpoint = checkpoint.Checkpoint
FP8 = jnp.float8_e4m3fn


def some(shape, dtype, seed=0) -> np.ndarray:
  return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def same_bits(got: np.ndarray, expected: np.ndarray) -> None:
  assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
  assert got.tobytes() == expected.tobytes()


TENSORS = {
  "scalar": some((), np.float32),
  "vector": some((7,), np.float16),
  "matrix": some((6, 10), jnp.bfloat16),
  "cube": some((3, 4, 5), np.float32),
  "counts": np.arange(12, dtype=np.int64).reshape(3, 4),
  "empty": np.zeros((0, 4), np.float32),
  "mask": np.array([True, False, True]),
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> checkpoint.Checkpoint:
  names = sorted(TENSORS)
  files = [{n: TENSORS[n] for n in names[:3]}, {n: TENSORS[n] for n in names[3:]}]
  return Checkpoint(write_checkpoint(tmp_path_factory.mktemp("ckpt") / "a", files))


def test_names_shapes_and_dtypes_without_reading(opened, monkeypatch):
  reads = count_reads(monkeypatch)
  again = Checkpoint(opened.folder)
  assert {n: (t.shape, t.dtype) for n, t in again.tensors.items()} == {
    n: (t.shape, t.dtype) for n, t in TENSORS.items()
  }
  assert not reads


@hypothesis.given(st.data())
def test_slices_are_those_of_numpy_and_no_other_byte_is_read(opened, data):
  name = data.draw(st.sampled_from(sorted(TENSORS)))
  expected = TENSORS[name]
  index = tuple(
    data.draw(st.slices(n).filter(lambda s: s.step in (1, None))) for n in expected.shape
  )
  index = index[: data.draw(st.integers(0, len(index)))]
  with pytest.MonkeyPatch.context() as monkeypatch:
    reads = count_reads(monkeypatch)
    same_bits(opened.read(name, index), expected[index])
  tensor = opened.tensors[name]
  assert sum(count for _, count in reads) == expected[index].nbytes == opened.nbytes(name, index)
  assert all(tensor.start <= at <= tensor.start + expected.nbytes - count for at, count in reads)


def test_what_lies_together_is_one_read(opened, monkeypatch):
  i = np.index_exp
  for index, runs in (((), 1), (i[1:2, 1:3], 1), (i[1:], 1), (i[:, 1:3], 3), (i[:2, :, 1:3], 8)):
    reads = count_reads(monkeypatch)
    opened.read("cube", index)
    assert len(reads) == runs, index
    monkeypatch.undo()


def test_read_into_converts_and_transposes(opened):
  index = np.s_[1:5, 2:]
  part = TENSORS["matrix"][index]
  for dtype in (jnp.bfloat16, np.float32, np.float16):
    for out in (np.zeros((4, 8), dtype), np.zeros((8, 4), dtype).T, np.zeros((4, 9), dtype)[:, 1:]):
      opened.read_into(out, "matrix", index)
      same_bits(np.ascontiguousarray(out), part.astype(dtype))
  rounded = np.zeros((5, 4, 3), jnp.bfloat16).T
  opened.read_into(rounded, "cube")
  same_bits(np.ascontiguousarray(rounded), TENSORS["cube"].astype(jnp.bfloat16))
  for name in ("scalar", "mask", "counts"):
    out = np.zeros_like(TENSORS[name])
    opened.read_into(out, name)
    same_bits(out, TENSORS[name])


def test_tall_matrices_are_transposed_whole(tmp_path):
  tall = some((checkpoint.ROWS * 2 + 5, 3), np.float32)
  out = np.zeros(tall.shape[::-1], np.float32)
  Checkpoint(write_checkpoint(tmp_path, [{"tall": tall}])).read_into(out.T, "tall")
  same_bits(out, np.ascontiguousarray(tall.T))


def test_wrong_slices(opened):
  with pytest.raises(ValueError, match="at most 2 slices, got 3"):
    opened.read("matrix", np.s_[:, :, :])
  with pytest.raises(ValueError, match="step 1"):
    opened.read("matrix", np.s_[::2, :])
  with pytest.raises(ValueError, match=r"out: expected shape \(6, 10\), got \(10, 6\)"):
    opened.read_into(np.zeros((10, 6), np.float32), "matrix")


# --- block-scaled FP8 --------------------------------------------------------------------------

FP8_SHAPE, FP8_BLOCK = (21, 38), (4, 16)
SCALES = tuple(-(-n // b) for n, b in zip(FP8_SHAPE, FP8_BLOCK, strict=True))


@pytest.fixture(scope="module", params=[np.float32, jnp.bfloat16])
def quantised(request, tmp_path_factory) -> tuple[checkpoint.Checkpoint, np.ndarray]:
  """A checkpoint with every finite FP8 value, and its values by one multiplication each."""
  bits = np.random.default_rng(1).permutation(math.prod(FP8_SHAPE)) % 256
  weight = bits.astype(np.uint8).reshape(FP8_SHAPE).view(FP8)
  scales = np.exp(some(SCALES, np.float32, 2)).astype(request.param)
  tensors = {"a.weight": weight, "a.weight_scale_inv": scales, "b.weight": some((2, 2), np.float32)}
  values = np.empty(FP8_SHAPE, np.float32)
  for i, j in np.ndindex(FP8_SHAPE):
    scale = np.float32(scales[i // FP8_BLOCK[0], j // FP8_BLOCK[1]])
    values[i, j] = np.float32(weight[i, j]) * scale
  folder = write_checkpoint(tmp_path_factory.mktemp("fp8"), [tensors], block=FP8_BLOCK)
  return Checkpoint(folder), values


@hypothesis.given(st.data())
def test_any_slice_of_fp8_is_its_bytes_times_the_factors(quantised, data):
  opened, values = quantised
  rows, columns = (
    slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in FP8_SHAPE
  )
  expected = values[rows, columns]
  with pytest.MonkeyPatch.context() as monkeypatch:
    reads = count_reads(monkeypatch)
    same_bits(opened.read("a.weight", (rows, columns)), np.ascontiguousarray(expected))
  factors = opened.tensors["a.weight_scale_inv"].dtype.itemsize
  for cut, size in zip((rows, columns), FP8_BLOCK, strict=True):
    factors *= len({i // size for i in range(cut.start, cut.stop)})
  count = expected.size + factors
  assert sum(count for _, count in reads) == count == opened.nbytes("a.weight", (rows, columns))


def test_fp8_becomes_other_dtypes_by_rounding_once(quantised):
  opened, values = quantised
  for dtype in (jnp.bfloat16, np.float16, np.float32):
    out = np.zeros((FP8_SHAPE[1], 5), dtype)
    opened.read_into(out.T, "a.weight", np.index_exp[3:8])
    same_bits(out, np.ascontiguousarray(values[3:8].astype(dtype).T))


def test_scale_ranges():
  assert fp8.scale_ranges((range(127, 129), range(0, 128)), (128, 128)) == (range(2), range(1))
  assert fp8.scale_ranges((range(256, 300), range(5, 5)), (128, 128)) == (range(2, 3), range(0))


# --- errors ------------------------------------------------------------------------------------

A, B = {"a.x": some((2, 3), np.float32)}, {"b.x": some((4,), np.float32)}


def test_no_checkpoint(tmp_path):
  with pytest.raises(
    FileNotFoundError, match=r"expected model\.safetensors or model\.safetensors\.index\.json"
  ):
    Checkpoint(tmp_path)


def test_index_names_missing_files(tmp_path):
  index = {f"t{i}": f"gone{i}.safetensors" for i in range(7)} | {"a.x": "model.safetensors"}
  folder = write_checkpoint(tmp_path, [A], index=index)
  with pytest.raises(FileNotFoundError, match=r"(?s)missing files \(8\):\n.*gone0.*gone4.*3 more"):
    Checkpoint(folder)


def test_index_names_tensors_that_files_lack(tmp_path):
  file = "model-00001-of-00001.safetensors"
  folder = write_checkpoint(tmp_path, [A], index={"a.x": file, "a.y": file, "a.z": file})
  with pytest.raises(ValueError, match=r"absent \(2\):\n    a\.y in model-00001-of-00001"):
    Checkpoint(folder)


def test_tensors_that_the_index_does_not_name_are_no_part(tmp_path):
  file = "model-00001-of-00001.safetensors"
  assert set(Checkpoint(write_checkpoint(tmp_path, [A | B], index={"b.x": file})).tensors) == {
    "b.x"
  }


@pytest.mark.parametrize("size", [0, 4, 20, -1])
def test_truncated_files(tmp_path, size):
  folder = write_checkpoint(tmp_path, [A, B])
  paths = sorted(folder.glob("*.safetensors"))
  whole = paths[1].read_bytes()
  paths[1].write_bytes(whole[:size])
  with pytest.raises(ValueError, match=r"damaged files \(1\):") as error:
    Checkpoint(folder)
  assert f"{paths[1]}: expected a whole safetensors file, got {len(whole[:size])} bytes" in str(
    error.value
  )
  paths[1].rename(folder / "model.safetensors")
  with pytest.raises(ValueError, match="expected a whole safetensors file"):
    Checkpoint(folder)


def test_headers_that_contradict_themselves(tmp_path):
  path = tmp_path / "model.safetensors"
  for shape, offsets, size in (([3], [0, 8], 8), ([2], [4, 12], 12), ([2], [0, 8], 9)):
    write_raw(path, {"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}, bytes(size))
    with pytest.raises(ValueError, match="expected a whole safetensors file"):
      Checkpoint(tmp_path)


def test_a_file_cut_after_opening(tmp_path):
  opened = Checkpoint(write_checkpoint(tmp_path, [A]))
  os.truncate(tmp_path / "model.safetensors", opened.tensors["a.x"].start + 10)
  with pytest.raises(OSError, match="expected 14 more bytes"):
    opened.read("a.x")


@pytest.mark.parametrize("file", ["model.safetensors.index.json", "config.json"])
def test_damaged_json(tmp_path, file):
  folder = write_checkpoint(tmp_path, [A, B], block=(4, 4))
  for text, expected in (("{", "expected JSON"), ("[]", "expected a JSON object")):
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match=f"{re.escape(file)}: {expected}"):
      Checkpoint(folder)


def test_an_index_without_places(tmp_path):
  (tmp_path / "model.safetensors.index.json").write_text("{}")
  with pytest.raises(ValueError, match="expected weight_map"):
    Checkpoint(tmp_path)


@pytest.mark.parametrize("block", [128, "128", [128], [0, 128], ["a", 1], [128.0, 128], [1, 2**70]])
def test_wrong_block_sizes(tmp_path, block):
  with pytest.raises(ValueError, match="weight_block_size: expected"):
    Checkpoint(write_checkpoint(tmp_path, [A], block=block))


def test_a_missing_tensor_with_the_closest_names(tmp_path):
  tensors = {f"layers.{i}.{n}": some((1,), np.float32) for i in range(3) for n in ("up", "gate")}
  opened = Checkpoint(write_checkpoint(tmp_path, [tensors]))
  with pytest.raises(ValueError, match=r"layers\.1\.ups: .* \(closest: layers\.1\.up, "):
    opened.read("layers.1.ups")
  assert "closest" not in (opened.problem("zzz") or "")
  assert opened.problem("layers.1.up") is None


def test_closest_names_prefer_the_same_numbers():
  names = [f"layer.{i}.attention.{n}" for i in range(50) for n in ("query", "key")]
  assert problems.closest("layer.31.attn.query", names)[0] == "layer.31.attention.query"
  assert problems.closest("layer.99.attention.query", names)[0].endswith("query")


@pytest.mark.parametrize("format", ["F8_E5M2", "F8_E8M0", "U64"])
def test_unsupported_dtypes(tmp_path, format):
  size = 8 if format == "U64" else 1
  header = {"a": {"dtype": format, "shape": [2], "data_offsets": [0, 2 * size]}}
  write_raw(tmp_path / "model.safetensors", header, bytes(2 * size))
  opened = Checkpoint(tmp_path)  # others may be readable
  assert opened.tensors["a"].dtype is None
  with pytest.raises(ValueError, match=f"a: expected a dtype of BOOL.* got {format}"):
    opened.read("a")


def fp8_problem(folder: pathlib.Path, tensors, block) -> str:
  opened = Checkpoint(write_checkpoint(folder, [tensors], block=block))
  with pytest.raises(ValueError) as error:
    opened.read("w", np.index_exp[:1])
  return str(error.value)


def test_fp8_without_what_it_needs(tmp_path):
  weight, scales = {"w": some((5, 6), FP8)}, "w_scale_inv"
  ones = np.ones((2, 3), np.float32)
  wrong = fp8_problem(tmp_path / "a", weight | {scales: ones}, None)
  assert "weight_block_size in config.json" in wrong
  wrong = fp8_problem(tmp_path / "b", weight, (4, 2))
  assert "w: expected scales w_scale_inv" in wrong
  wrong = fp8_problem(tmp_path / "c", weight | {scales: ones.T.copy()}, (4, 2))
  assert "w_scale_inv: expected F32 or BF16 of shape (2, 3), got F32 (3, 2)" in wrong
  wrong = fp8_problem(tmp_path / "d", weight | {scales: ones.astype(np.int32)}, (4, 2))
  assert "got I32 (2, 3)" in wrong
  wrong = fp8_problem(tmp_path / "e", {"w": some((4,), FP8), scales: ones}, (4, 2))
  assert "expected a matrix" in wrong


def test_a_configuration_without_quantisation(tmp_path):
  folder = write_checkpoint(tmp_path, [A])
  for config in ({}, {"quantization_config": None}, {"quantization_config": {"bits": 4}}):
    (folder / "config.json").write_text(json.dumps(config))
    assert Checkpoint(folder).block is None


# --- MXFP4 ------------------------------------------------------------------------------------


FOUR_BITS = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory):
  """A folder with one such tensor, and its values by definition: [experts, in, out]."""
  rng = np.random.default_rng(0)
  blocks = rng.integers(0, 256, (3, 5, 2, 16), np.uint8)
  scales = rng.integers(100, 140, (3, 5, 2), np.uint8)
  scales[0, 0] = [0, 254]  # the least and the largest
  values = np.zeros((3, 5, 2, 32))
  for place in np.ndindex(values.shape):
    byte = int(blocks[*place[:3], place[3] // 2])
    value = FOUR_BITS[byte >> 4 if place[3] % 2 else byte & 15]
    values[place] = value * 2.0 ** (int(scales[place[:3]]) - 127)
  tensors = {"w_blocks": blocks, "w_scales": scales, "w_bias": np.ones((3, 5), np.float32)}
  folder = write_checkpoint(tmp_path_factory.mktemp("mxfp4") / "a", [tensors])
  return folder, values.reshape(3, 5, 64).swapaxes(1, 2)


@hypothesis.given(st.data())
def test_any_slice_of_mxfp4_is_its_values(four_bits, data):
  folder, values = four_bits
  opened = Checkpoint(folder)
  assert set(opened.names) == set(opened.tensors) == {"w", "w_bias"}
  index = tuple(
    slice(*sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2))))
    for n in values.shape[: data.draw(st.integers(0, 3))]
  )
  with np.errstate(over="ignore"):  # 6 * 2 ** 127
    expected = values[index].astype(np.float32)
  same_bits(opened.read("w", index), expected)
  out = np.zeros(expected.shape, jnp.bfloat16)
  opened.read_into(out, "w", index)
  with np.errstate(over="ignore"):
    same_bits(out, expected.astype(jnp.bfloat16))
  one = opened.nbytes("w", (slice(1), slice(33, 34)))
  assert opened.nbytes("w") == 3 * 5 * 2 * 17 and one == 5 * 17


def test_weights_that_are_quantised_otherwise(tmp_path):
  """One clear error each, that names the tensor and what is there in its place."""
  four = {"a_blocks": np.zeros((1, 2, 3, 8), np.uint8), "a_scales": np.zeros((1, 2, 3), np.uint8)}
  packed = {"b.weight_packed": np.zeros((2, 2), np.int32), "c.qweight": np.zeros(2, np.int32)}
  opened = Checkpoint(write_checkpoint(tmp_path, [four | packed]))
  for name, instead in (
    ("a", "a_blocks"),
    ("b.weight", "b.weight_packed"),
    ("c.weight", "c.qweight"),
  ):
    expected = f"{name}: expected its values, got {instead}: weights quantised in another way"
    assert opened.problem(name) == expected
    with pytest.raises(ValueError, match=re.escape(expected)):
      opened.read(name)
