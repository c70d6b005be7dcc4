"""Matmuls of two checkouts beside each other: the other's code runs, and its bits are compared."""

import pathlib
import shutil
import sys
from types import SimpleNamespace

import beside_commit
import jax.numpy as jnp
import pytest
from grouped_rows import IN_TURNS, interpreted

from ultraep_jax.bench.kernels import matmul_problems

ROOT = pathlib.Path(__file__).parents[2]
SHAPE = "128x64x4x256"


@pytest.fixture
def other(tmp_path):
  for package in beside_commit.PACKAGES:
    shutil.copytree(ROOT / package, tmp_path / package)
  return tmp_path


def replace(path, old, new):
  text = path.read_text()
  assert text.count(old) == 1
  path.write_text(text.replace(old, new))


def test_what_is_imported_already_stays(other):
  replace(
    other / "ultraep_jax/bench/kernels/matmul_problems.py",
    "HOME, REPLICA = 16,",
    "HOME, REPLICA = 15,",
  )
  before = dict(sys.modules)
  checkout = beside_commit.imported(other)
  assert checkout.problems.HOME == 15
  kept = {name: module for name, module in sys.modules.items() if name in before}
  assert kept == before
  assert matmul_problems.HOME == 16


def test_a_folder_without_packages(tmp_path):
  with pytest.raises(SystemExit, match="expected the folders pallas_kernels and ultraep_jax"):
    beside_commit.imported(tmp_path)


@pytest.mark.parametrize("alike", [True, False])
def test_bits_are_compared(other, alike):
  if not alike:  # half of each group's rows
    path = other / "pallas_kernels/matmul/wgrad.py"
    replace(path, "before_P + group_size_P\n", "before_P + group_size_P // 2\n")
  small = SimpleNamespace(find=lambda *_: IN_TURNS)
  modules = {"other": beside_commit.imported(other).problems, "this": matmul_problems}
  checkouts = {name: beside_commit.Checkout(each, small) for name, each in modules.items()}
  with interpreted():
    [programs] = beside_commit.compiled(checkouts, [(SHAPE, "wgrad up")], workers=2)
    sizes = jnp.array([100, 50, 0, 60], jnp.int32)
    operands = beside_commit.operands_of(beside_commit.problem_of("wgrad up", SHAPE))
    seconds, same = beside_commit.measured(programs, [*operands, sizes], rounds=1, calls=1)
  assert len(seconds) == 2 and min(seconds) > 0
  assert same == alike


@pytest.mark.parametrize("groups", beside_commit.GROUPS)
def test_sizes_are_of_all_slots(groups):
  sizes = beside_commit.sizes_of("128x64x6x256", groups)
  assert sizes.shape == (6,) and 252 <= sizes.sum() <= 256
  assert (sizes.std() == 0) == (groups == "equal")


def test_a_row_for_each_matmul_and_kind_of_groups(other, monkeypatch, capsys):
  monkeypatch.setattr(beside_commit, "compiled", lambda _, cases, **__: [{}] * len(cases))
  monkeypatch.setattr(beside_commit, "measured", lambda *_: ([2e-3, 1e-3], True))
  kinds = "--problems gated sum --groups equal wide --shapes"
  beside_commit.main([str(other), *kinds.split(), SHAPE])
  lines = [line.split() for line in capsys.readouterr().out.splitlines() if SHAPE in line]
  times = ["2000.00", "1000.00", "0.50", "same"]
  assert lines == [[SHAPE, n, g, *times] for n in ("gated", "sum") for g in ("equal", "wide")]


def test_each_is_called_once_for_a_profiler(other, monkeypatch, capsys):
  called = []
  programs = {name: lambda *_, name=name: called.append(name) for name in ("other", "this")}
  monkeypatch.setattr(beside_commit, "compiled", lambda _, cases, **__: [programs] * len(cases))
  kinds = "--once --problems gated --groups equal wide --shapes"
  beside_commit.main([str(other), *kinds.split(), SHAPE])
  expected = [f"{SHAPE} gated {g} {w}" for g in ("equal", "wide") for w in ("other", "this")]
  assert capsys.readouterr().out.splitlines() == expected
  assert called == ["other", "this"] * 2
