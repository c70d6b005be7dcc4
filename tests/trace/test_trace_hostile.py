"""Damaged and hostile traces: named, left out, and never inflated."""

import io
import json
import os
import pathlib
import shutil
import zipfile

import numpy as np
import pytest
import traces

from ultraep_jax.trace import Recorder, TraceError, format, read
from ultraep_jax.trace import disk as files


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_chunk_is_left_out_and_named(tmp_path, kept):
  traces.write(tmp_path)
  first, second = files.chunks(tmp_path)
  content = second.read_bytes()
  second.write_bytes(content[: int(len(content) * kept)])
  trace = read(tmp_path)
  assert set(trace.step_N) == {0, 1, 2, 3}
  assert len(trace.problems) == 1 and trace.problems[0].startswith(
    f"{second.name}: expected a whole chunk, got a damaged one"
  )
  first.write_bytes(b"")
  with pytest.raises(TraceError, match="expected readable chunks, got none"):
    read(tmp_path)


def test_flipped_bytes_never_read_as_other_loads(tmp_path):
  traces.write(tmp_path, steps=2, layers=1)
  expected = read(tmp_path)
  (chunk, *_) = files.chunks(tmp_path)
  content = chunk.read_bytes()
  rng = np.random.default_rng(0)
  for at in rng.integers(0, len(content), 60):
    damaged = bytearray(content)
    damaged[at] ^= 0x55
    chunk.write_bytes(damaged)
    try:
      trace = read(tmp_path)
    except TraceError:
      continue
    kept = np.isin(expected.step_N, trace.step_N)
    np.testing.assert_array_equal(trace.load_NGE, expected.load_NGE[kept])


def rewritten(folder: pathlib.Path, **changes: object) -> None:
  """Replaces columns of the first chunk; None takes one away."""
  chunk = files.chunks(folder)[0]
  with np.load(chunk) as file:
    columns = {name: file[name] for name in file.files} | changes
  with chunk.open("wb") as file:
    arrays = {name: column for name, column in columns.items() if column is not None}
    np.savez_compressed(file, **arrays)  # pyright: ignore


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"load_NGE": None}, "expected the columns of a trace, got none .*load_NGE"),
    ({"load_NGE": np.zeros((2, 4, 4), int)}, r"load_NGE: expected shape \(2, 4, 8\), got"),
    ({"load_NGE": np.full((2, 4, 8), -1)}, r"load_NGE: expected values in \[0, .* got -1"),
    ({"load_NGE": np.full((2, 4, 8), 2**40)}, r"load_NGE: expected values in \[0, .* got 10995"),
    ({"after_NG": np.full((2, 4), np.nan)}, "after_NG: expected another type than float64"),
    ({"replica_bytes_N": np.full(2, np.nan)}, "replica_bytes_N: expected finite values, got nan"),
    ({"after_NG": np.zeros((2, 4), int)}, "after_NG: expected the sum of load_NGE"),
    ({"planned_NG": np.zeros((2, 4), int)}, "planned_NG: expected the sum of load_NGE"),
    ({"replica_load_NGS": np.full((2, 4, 2), 2**20)}, "replica_load_NGS: expected"),
    ({"replica_parent_NGS": np.full((2, 4, 2), 4)}, r"replica_parent_NGS: .* \[-1, 4\), got 4"),
    ({"layer_N": np.arange(2)}, "layer_N: expected another type than int"),
    ({"layer_N": np.array([print] * 2, object)}, "layer_N: expected another type than object"),
  ],
)
def test_hostile_chunks_are_named(tmp_path, changes, message):
  traces.write(tmp_path, steps=1, layers=2)
  rewritten(tmp_path, **changes)
  with pytest.raises(TraceError, match=message):
    read(tmp_path)


@pytest.mark.parametrize(
  ("content", "message"),
  [
    ("", "it is damaged or of another program"),
    ("[1, 2]", "it is of another program"),
    ('{"format": "another"}', "it is of another program"),
    ('{"format": "ultraep_jax trace", "version": 2}', "expected version 1, got 2"),
    ('{"format": "ultraep_jax trace", "version": 1}', "name: expected str, got None"),
    ("\ufffd\x00", "it is damaged or of another program"),
  ],
)
def test_foreign_manifests(tmp_path, content, message):
  (tmp_path / files.MANIFEST).write_text(content)
  with pytest.raises(TraceError, match=message):
    read(tmp_path)


@pytest.mark.parametrize(
  ("name", "value", "message"),
  [
    ("num_ranks", "4", "num_ranks: expected int, got '4'"),
    ("num_ranks", True, "num_ranks: expected int, got True"),
    ("num_ranks", 3, "E a positive multiple of G"),
    ("num_ranks", 0, "E a positive multiple of G"),
    ("replica_slots", -1, "expected no negative value"),
  ],
)
def test_wrong_manifests(tmp_path, name, value, message):
  path = traces.write(tmp_path, steps=1) / files.MANIFEST
  path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
  with pytest.raises(TraceError, match=message):
    read(tmp_path)


def test_what_is_there_instead_of_a_trace(tmp_path):
  with pytest.raises(TraceError, match="expected the folder of a trace, got nothing there"):
    read(tmp_path / "none")
  file = tmp_path / "file"
  file.write_text("")
  with pytest.raises(TraceError, match="expected the folder of a trace, got a file"):
    read(file)
  traces.write(tmp_path / "inner", steps=1)
  with pytest.raises(TraceError, match=r"there are traces in .*inner"):
    read(tmp_path)


def nested(depth: int) -> str:
  return '{"x": ' * depth + "0" + "}" * depth


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("num_experts", 10**18),
    ("num_experts", 8 * 10**400),
    ("replica_slots", 10**18),
    ("replica_slots", 10**9),
    ("token_bytes", 2**31),
    ("token_bytes", 10**400),
    ("name", "\ud800"),
    ("metadata", {"x": ["\udfff"]}),
    ("config", {"\ud800": 1}),
    ("version", [[[[1]]]] * 10**5),
    ("num_ranks", "x" * 10**6),
  ],
  ids=lambda value: ascii(value)[:20],
)
@pytest.mark.parametrize("has_records", [True, False])
def test_absurd_manifests(tmp_path, name, value, has_records):
  path = traces.write(tmp_path, steps=1) / files.MANIFEST
  path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
  for chunk in files.chunks(tmp_path) if not has_records else ():
    chunk.unlink()
  for reads in (read, Recorder):
    with pytest.raises(TraceError) as caught:
      reads(tmp_path)
    assert len(str(caught.value)) < 500
    str(caught.value).encode()


@pytest.mark.parametrize("depth", [500, 2000, 10**5])
def test_nested_manifests(tmp_path, depth):
  """Either they can be read and printed, or they are refused."""
  path = traces.write(tmp_path, steps=1) / files.MANIFEST
  sound = path.read_text()
  for text in (
    nested(depth),
    "[" * depth,
    sound.replace('"metadata": {}', f'"metadata": {nested(depth)}'),
    sound.replace('"num_ranks": 4', f'"num_ranks": {nested(depth)}'),
    sound.replace('"version": 1', f'"version": {nested(depth)}'),
  ):
    assert text != sound
    path.write_text(text)
    try:
      json.dumps(read(tmp_path).manifest.metadata)
    except TraceError as error:
      assert len(str(error)) < 500


def replace_by_folder(path):
  path.unlink()
  (path / "inner").mkdir(parents=True)


def replace_by_pipe(path):
  path.unlink()
  os.mkfifo(path)


def replace_by_loop(path):
  path.unlink()
  path.symlink_to(path)


def replace_by_hole(path):
  path.write_bytes(b"")
  os.truncate(path, 1 << 40)


@pytest.mark.parametrize(
  "replace", [replace_by_folder, replace_by_pipe, replace_by_loop, replace_by_hole]
)
def test_what_is_there_instead_of_a_file(tmp_path, replace):
  traces.write(tmp_path)
  _, second = files.chunks(tmp_path)
  replace(second)
  trace = read(tmp_path)
  assert set(trace.step_N) == {0, 1, 2, 3} and second.name in trace.problems[0]
  replace(tmp_path / files.MANIFEST)
  for reads in (read, Recorder):
    with pytest.raises(TraceError, match=r"trace\.json: expected a"):
      reads(tmp_path)


def structured(column):
  return np.zeros(column.shape, [("x", int)])


MUTATIONS = {
  "scalar": lambda column: column.reshape(-1)[0],
  "one axis more": lambda column: column[..., None],
  "one axis less": lambda column: column.reshape(-1),
  "longer": lambda column: np.concatenate([column, column]),
  "empty": lambda column: column[:0],
  "missing": lambda column: None,
  "objects": lambda column: column.astype(object),
  "bytes": lambda column: column.astype("S9"),
  "booleans": lambda column: column.astype(bool),
  "complex": lambda column: np.ones(column.shape, complex),
  "dates": lambda column: np.zeros(column.shape, "M8[s]"),
  "fields": structured,
  "large": lambda column: np.full(column.shape, 2**63, np.uint64),
  "infinite": lambda column: np.full(column.shape, np.inf),
  "enormous": lambda column: np.full(column.shape, 1e300),
  "text": lambda column: np.full(column.shape, "\ud800"),
  "no text": lambda column: np.full(column.shape, 0x110000, np.uint32).view("U1"),
}


@pytest.fixture(scope="module")
def two_chunks(tmp_path_factory):
  """A trace of step 0 and 1 in its first chunk, and of step 2 in its second one."""
  return traces.write(tmp_path_factory.mktemp("sound"), steps=3, layers=1)


@pytest.mark.parametrize("name", format.COLUMNS)
def test_a_chunk_with_any_other_column_is_left_out_and_named(tmp_path, two_chunks, name):
  shutil.copytree(two_chunks, tmp_path, dirs_exist_ok=True)
  first, _ = files.chunks(tmp_path)
  sound = first.read_bytes()
  for what, mutate in MUTATIONS.items():
    with np.load(io.BytesIO(sound)) as file:
      before = file[name]
    column = mutate(before)
    if column is not None and column.dtype == before.dtype and column.shape == before.shape:
      continue  # no other
    rewritten(tmp_path, **{name: column})
    trace = read(tmp_path)
    assert trace.step_N.tolist() == [2], what
    (problem,) = trace.problems
    assert problem.startswith(f"{first.name}: "), what
    assert name in problem or (name == "step_N" and "expected shape" in problem), what
    first.write_bytes(sound)
  assert not read(tmp_path).problems


def test_other_forms_of_the_same_numbers_are_read(tmp_path):
  """Of other byte orders and layouts, as other programs may write them."""
  expected = read(traces.write(tmp_path, steps=1))
  with np.load(files.chunks(tmp_path)[0]) as file:
    columns = {name: file[name] for name in file.files}
  for form in (
    lambda column: column.astype(column.dtype.newbyteorder(">")),
    np.asfortranarray,
    lambda column: column if column.dtype.kind in "Uf" else column.astype(np.uint64) * 1,
  ):
    some = {
      name: form(column)
      for name, column in columns.items()
      if column.dtype.kind in "Uf" or column.min() >= 0
    }
    rewritten(tmp_path, **some)
    trace = read(tmp_path)
    for name in format.COLUMNS:
      np.testing.assert_array_equal(getattr(trace, name), getattr(expected, name))
      assert getattr(trace, name).dtype == getattr(expected, name).dtype or name == "layer_N"


def test_damage_anywhere_is_named(tmp_path):
  """Of the zip file's directory, of the headers in it and of the columns."""
  traces.write(tmp_path, steps=1)
  manifest, (chunk,) = files.read_manifest(tmp_path), files.chunks(tmp_path)
  sound, expected = chunk.read_bytes(), files.read_chunk(chunk, manifest)
  rng, refused = np.random.default_rng(0), 0
  starts = [sound.index(b"PK\1\2"), len(sound) - 22, 0]  # directory, its end, first entry
  places = [start + i for start in starts for i in range(22)]
  for at in [*places, *rng.integers(0, len(sound), 60)]:
    damaged = bytearray(sound)
    damaged[at] ^= int(rng.integers(1, 256))
    chunk.write_bytes(damaged)
    try:
      columns = files.read_chunk(chunk, manifest)
    except TraceError as error:
      assert str(error).startswith(chunk.name)
      refused += 1
    else:
      for name, column in columns.items():
        np.testing.assert_array_equal(column, expected[name])
  assert refused > 60


# --- bombs -----------------------------------------------------------------------------------


@pytest.fixture
def inflated(monkeypatch):
  """The bytes that come out of zip files."""
  sizes, inflate = [], zipfile.ZipExtFile._read1

  def counted(self, size):
    data = inflate(self, size)
    sizes.append(len(data))
    return data

  monkeypatch.setattr(zipfile.ZipExtFile, "_read1", counted)
  return sizes


def with_entry(path: pathlib.Path, name: str, content: bytes, method: int = zipfile.ZIP_DEFLATED):
  """Replaces an entry of a zip file."""
  with zipfile.ZipFile(path) as archive:
    entries = {info.filename: archive.read(info) for info in archive.infolist()}
  with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
    for each, old in entries.items():
      archive.writestr(each, content if each == name else old, method if each == name else None)


def npy(array: np.ndarray, header: str | None = None, version: bytes = b"\1\0") -> bytes:
  """An array's bytes, perhaps with another header."""
  file = io.BytesIO()
  np.save(file, array)
  if header is None:
    return file.getvalue()
  size = len(header).to_bytes(2 if version == b"\1\0" else 4, "little")
  return b"\x93NUMPY" + version + size + header.encode("latin1") + array.tobytes()


LOADS = "{'descr': '|u1', 'fortran_order': False, 'shape': (2, 4, 8), }"
MUCH = np.zeros(1 << 21, np.uint8)
BOMBS = {
  "another shape": npy(MUCH),
  "more than its shape": npy(MUCH, LOADS),
  "many records": npy(MUCH.reshape(-1, 4, 8)),
  "a long header": npy(MUCH[:0], LOADS + " " * (1 << 21), b"\2\0"),
  "objects": npy(MUCH, LOADS.replace("|u1", "|O")),
  "deep header": npy(MUCH[:0], "(" * 60000),
  "a negative shape": npy(MUCH, LOADS.replace("2", "-2")),
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_nothing_is_inflated_that_cannot_be_a_column(tmp_path, inflated, bomb, method):
  traces.write(tmp_path, steps=1, layers=2)
  (chunk,) = files.chunks(tmp_path)
  with_entry(chunk, "load_NGE.npy", BOMBS[bomb], method)
  inflated.clear()
  with pytest.raises(TraceError, match=chunk.name):
    read(tmp_path)
  assert sum(inflated) < 1 << 17


def test_a_chunk_that_is_one_bomb(tmp_path, inflated, monkeypatch):
  """Sound in every way but its size, as zeros are that a thousandth of their bytes can promise."""
  monkeypatch.setattr(format, "CHUNK_BYTES", 1 << 20)
  traces.write(tmp_path, steps=1, layers=1)
  (chunk,) = files.chunks(tmp_path)
  sound = read(tmp_path)
  with np.load(chunk) as file:
    many = {name: np.repeat(file[name][:1], 1 << 14, axis=0) for name in file.files}
  many["step_N"] = np.arange(1 << 14)
  rewritten(tmp_path, **many)
  inflated.clear()
  with pytest.raises(TraceError, match="expected at most 1048576 bytes in a chunk, got"):
    read(tmp_path)
  assert sum(inflated) < 1 << 17
  long = {**many, "layer_N": np.full(2, "x" * (1 << 18))}
  rewritten(tmp_path, **{name: column[:2] for name, column in long.items()})
  with pytest.raises(TraceError, match="expected at most 1048576 bytes in a chunk, got"):
    read(tmp_path)
  assert len(sound) == 1
