"""Programs that were compiled elsewhere are found by what they are for, and loaded."""

import contextlib
import pathlib

import compiled_elsewhere
import jax
import jax.numpy as jnp
import pytest
from compiled_elsewhere import Folder
from jax.sharding import PartitionSpec as P

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


@pytest.mark.parametrize("change", ["source", "jax", "jaxlib"])
def test_programs_of_other_code_are_not_found(change, tmp_path, monkeypatch):
  source = tmp_path / "package" / "one.py"
  source.parent.mkdir()
  source.write_text("a = 1")
  monkeypatch.setattr(compiled_elsewhere.ultraep_jax, "__path__", [str(source.parent)])
  compiled_elsewhere.code.cache_clear()
  before = compiled_elsewhere.code()
  if change == "source":
    source.write_text("a = 2")
  else:
    owner = {"jax": jax, "jaxlib": compiled_elsewhere.jaxlib}[change]
    monkeypatch.setattr(owner, "__version__", "0.0.0")
  compiled_elsewhere.code.cache_clear()
  assert compiled_elsewhere.code() != before
  compiled_elsewhere.code.cache_clear()


def test_devices_are_told_apart_by_description_number_and_nodes():
  described = jax.devices()[:4]
  assert compiled_elsewhere.place(described) == "4xcpuon1"
  fakes = [FakeDevice(number // 2) for number in range(4)]
  assert compiled_elsewhere.place(fakes) == "4xh100on2"
  assert compiled_elsewhere.place(fakes[:2]) == "2xh100on1"


class FakeDevice:
  device_kind, platform, local_hardware_id, coords = "NVIDIA H100 80GB HBM3", "gpu", 0, None
  process_index = 0

  def __init__(self, slice_index):
    self.slice_index = slice_index


def names_of(bench, arguments, monkeypatch, pretending):
  """Of the files that a bench asks for; it neither traces nor compiles."""
  names, file = set(), Folder.file

  def note(*arguments):
    path = file(*arguments)
    names.add(path.name)
    return path

  with monkeypatch.context() as patches, contextlib.ExitStack() as stack:
    patches.setattr(Folder, "file", note)
    for owner, name in (
      (compiled_elsewhere.matrix, "compile_group"),
      (compiled_elsewhere.Program, "compile"),
      (compiled_elsewhere, "load_group"),
    ):
      patches.setattr(owner, name, refuse)
    stack.enter_context(contextlib.suppress(AssertionError))
    stack.enter_context(compiled_elsewhere.using(Folder(pathlib.Path("unused"), makes=False)))
    if pretending:
      stack.enter_context(compiled_elsewhere.pretending(jax.devices()[: RANKS[bench]]))
    compiled_elsewhere.BENCHES[bench].main(arguments)
  return names


@pytest.mark.parametrize("bench", list(ARGUMENTS))
def test_what_is_made_without_devices_is_what_a_bench_runs(bench, tmp_path, monkeypatch):
  """Real arrays give the same names, other implementations and sizes give others."""
  arguments = ARGUMENTS[bench].split()
  devices = jax.devices()[: RANKS[bench]]
  folder = Folder(tmp_path, makes=True)
  with compiled_elsewhere.using(folder) as failed, compiled_elsewhere.pretending(devices):
    compiled_elsewhere.make(bench, arguments)
  made = {path.name for path in tmp_path.iterdir()}
  monkeypatch.chdir(tmp_path)
  assert made and not failed
  assert names_of(bench, arguments, monkeypatch, pretending=False) == made
  for option, value in (("--implementation", "mosaic_gpu"), ("--scale", "16")):
    changed = names_of(bench, [*arguments, option, value], monkeypatch, pretending=True)
    assert len(changed) == len(made) and not changed & made


def test_what_fails_is_told_of(tmp_path, monkeypatch):
  arguments = ARGUMENTS["layer"].split()
  monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
  folder, devices = Folder(tmp_path, makes=True), jax.devices()[: RANKS["layer"]]
  with compiled_elsewhere.using(folder) as failed, compiled_elsewhere.pretending(devices):
    compiled_elsewhere.make("layer", arguments)
  (path,) = tmp_path.iterdir()
  assert [path.name] == [f"{name}.failed" for name in failed] and "traced" in path.read_text()
