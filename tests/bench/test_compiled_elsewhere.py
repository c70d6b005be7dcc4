"""Programs that were compiled elsewhere are found by what they are for, and loaded."""

import contextlib

import compiled_elsewhere
import jax
import jax.numpy as jnp
import pytest
from compiled_elsewhere import Folder
from jax.sharding import PartitionSpec as P

from ultraep_jax.bench.layer import times
from ultraep_jax.bench.matrix import programs

SHARED = "--scale 32 --ratios 1 --passes forward --shapes olmoe --repeats 1"
ARGUMENTS = {
  "layer": f"{SHARED} --ranks 4 --data 2 --variants none --tokens 16 --no-statistics",
  "matrix": f"{SHARED} --ranks 2 --all --tokens 32 --loads zipf",
  "stress": "--scale 64 --parts scan --implementation portable",
}
RANKS = {"layer": 4, "matrix": 2, "stress": jax.device_count()}


def lowered():
  mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
  double = jax.shard_map(
    lambda x: jax.lax.psum(2 * x, "expert"), mesh=mesh, in_specs=P("expert"), out_specs=P()
  )
  return jax.jit(double).lower(jnp.arange(8.0))


def refuse(*_, **__):
  raise AssertionError("traced or compiled")


def test_a_saved_program_is_loaded_and_neither_traced_nor_compiled(tmp_path):
  made = Folder(tmp_path / "new", makes=True)
  made.program(made.file("one"), lowered).compile()
  (path,) = made.path.iterdir()
  assert path == Folder(made.path, makes=False).file("one")
  # Not run: XLA:CPU of jax 0.12.0.1 does not find its functions in a loaded program.
  loaded = Folder(made.path, makes=False).program(path, refuse).compile()
  assert loaded.out_tree == lowered().out_tree and len(loaded.output_shardings.device_set) == 4
  made.program(path, refuse).compile()  # there already


def test_a_program_that_is_not_there_is_compiled_and_forgotten(tmp_path, capsys):
  folder = Folder(tmp_path, makes=False)
  compiled = folder.program(folder.file("one"), lowered).compile()
  assert compiled(jnp.arange(8.0)).sum() == 56 and not list(tmp_path.iterdir())
  assert "compiled" in capsys.readouterr().out


def test_programs_of_other_code_are_not_found(tmp_path, monkeypatch):
  folder, before = Folder(tmp_path, makes=True), compiled_elsewhere.code()
  path = folder.file("one")
  monkeypatch.setattr(jax, "__version__", "0.0.0")
  compiled_elsewhere.code.cache_clear()
  assert compiled_elsewhere.code() != before and folder.file("one") != path
  compiled_elsewhere.code.cache_clear()


@pytest.mark.parametrize("bench", list(ARGUMENTS))
def test_what_is_made_without_devices_is_what_a_bench_runs(bench, tmp_path, monkeypatch):
  """Real arrays give the same names."""
  arguments = ARGUMENTS[bench].split()
  folder = Folder(tmp_path, makes=True)
  with (
    compiled_elsewhere.using(folder),
    compiled_elsewhere.pretending(jax.devices()[: RANKS[bench]]),
  ):
    compiled_elsewhere.make(bench, arguments)
  made = {path.name for path in tmp_path.iterdir()}
  assert made

  loaded, loading = [], compiled_elsewhere.loaded

  def note(parts):
    loaded.append(loading(parts))
    raise RuntimeError("not run")

  monkeypatch.setattr(compiled_elsewhere, "loaded", note)
  tracing = [(times.timing, "chain"), (programs, "_lowered"), (jax.stages.Lowered, "compile")]
  for owner, name in tracing:
    monkeypatch.setattr(owner, name, refuse)
  folder = Folder(tmp_path, makes=False)
  with compiled_elsewhere.using(folder), contextlib.suppress(RuntimeError):
    compiled_elsewhere.BENCHES[bench].main(arguments)
  assert loaded
