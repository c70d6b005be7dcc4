"""The matrix whose programs other processes compile: what they write, and who waits for it."""

import functools
import pickle

import compiled_elsewhere
import jax
import matrix_beside
import pytest
from compiled_elsewhere import Folder

from ultraep_jax.bench.matrix import command, programs
from ultraep_jax.bench.matrix.cells import Cell, Group
from ultraep_jax.types import ExpertWeights

ARGUMENTS = "--scale 64 --all --ratios 1 1.3 --loads zipf --passes forward --tokens 32"
GROUPS = [Group("olmoe", 32, "forward"), Group("qwen3-30b", 32, "forward")]
# So few tokens have one buffer without balancing, which is measured once.
VARIANTS = {*programs.variants(2, "auto")} - {programs.UNBALANCED[1]}


def make(folder, worker):
  json = str(folder / "rows.json")
  with (
    compiled_elsewhere.using(Folder(folder, makes=True)) as failed,
    compiled_elsewhere.pretending(jax.devices()[:2]),
    matrix_beside.sharing(worker, workers=2),
  ):
    command.main([*ARGUMENTS.split(), "--shapes", "olmoe", "qwen3-30b", "--json", json])
  return failed


def path_of(folder, group):
  return Folder(folder, makes=False).group(group, jax.devices()[:2], "auto", 2048 // 64, "bfloat16")


def arriving_of(folder, cells, compiling):
  return matrix_beside.Arriving(cells, functools.partial(path_of, folder), compiling)


def test_a_worker_writes_all_programs_of_its_groups_and_nothing_else(tmp_path):
  make(tmp_path, 1)
  (path,) = tmp_path.iterdir()
  assert path == path_of(tmp_path, GROUPS[1])
  expected = {*VARIANTS, programs._SCALARS}
  assert set(pickle.loads(path.read_bytes())) == expected


def test_a_group_that_cannot_be_compiled_is_told_of(tmp_path, monkeypatch, capsys):
  def refuse(*_):
    raise RuntimeError("too large")

  monkeypatch.setattr(programs, "_lowered", refuse)
  assert make(tmp_path, 0) == [path_of(tmp_path, GROUPS[0]).name]
  cells = {group: [Cell(group, "1", "zipf")] for group in GROUPS}
  path_of(tmp_path, GROUPS[1]).write_bytes(b"")
  arriving = arriving_of(tmp_path, cells, lambda: True)
  assert list(arriving.items()) == [(GROUPS[1], cells[GROUPS[1]])]
  assert "too large" in capsys.readouterr().out


def test_groups_come_as_their_programs_do(tmp_path, monkeypatch):
  cells = {group: [Cell(group, "1", "zipf")] for group in GROUPS}
  path_of(tmp_path, GROUPS[1]).write_bytes(b"")

  def later(_):
    path_of(tmp_path, GROUPS[0]).write_bytes(b"")

  monkeypatch.setattr(matrix_beside.time, "sleep", later)
  arriving = arriving_of(tmp_path, cells, lambda: True)
  assert [group for group, _ in arriving.items()] == GROUPS[::-1] and len(arriving) == 2


def test_groups_are_not_waited_for_once_all_processes_have_ended(tmp_path, capsys):
  cells = {group: [Cell(group, "1", "zipf")] for group in GROUPS}
  path_of(tmp_path, GROUPS[1]).write_bytes(b"")
  arriving = arriving_of(tmp_path, cells, lambda: False)
  assert [group for group, _ in arriving.items()] == GROUPS[1:]
  assert "olmoe" in capsys.readouterr().out


def test_programs_of_the_folder_are_run_and_none_is_compiled(tmp_path, monkeypatch):
  make(tmp_path, 0)
  loaded = []

  def load(*saved, execution_devices):
    loaded.append(saved)
    assert list(execution_devices) == jax.devices()[:2]
    return lambda *_: jax.numpy.float32(1)

  def refuse(*_, **__):
    pytest.fail("compiled")

  monkeypatch.setattr(compiled_elsewhere.serialize_executable, "deserialize_and_load", load)
  monkeypatch.setattr(programs, "_lowered", refuse)
  mesh = jax.sharding.Mesh(jax.devices()[:2], ("expert",))
  arguments = ARGUMENTS.split()
  x, wo = jax.numpy.zeros((64, 2048 // 64)), jax.numpy.zeros(1, jax.numpy.bfloat16)
  with matrix_beside.finding(Folder(tmp_path, makes=False), arguments, 2, lambda: True):
    found = command.compile_group(
      mesh, GROUPS[0], "auto", (x, None, None, ExpertWeights(None, None, wo))
    )
    choice = ["olmoe"], [32], ["1"], ["zipf"], ["forward"]
    assert [group for group, _ in command.choose(*choice, pairwise=False).items()] == GROUPS[:1]
  assert set(found.variants) == VARIANTS and found.calls == 40
  assert len(loaded) == len(found.variants) + 1
