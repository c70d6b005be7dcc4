"""Every command with hostile values of every option: it ends with a status and says why."""

import argparse
import functools
import itertools
import os
import pathlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import traces

import ultraep_jax as uep
from ultraep_jax import cli, implementation
from ultraep_jax.bench.compile import targets
from ultraep_jax.commands import bench, paper, view
from ultraep_jax.tools import processes
from ultraep_jax.tools.errors import CommandError

ROOT = pathlib.Path(__file__).parents[2]
NUMBERS = ("0", "-1", "1000000000000", "nan", "inf", "")
TINY = "--ranks=4 --experts=8 --tokens=64 --top-k=2 --strategy=none"
LOADS = "--tokens=64 --steps=1 --layers=1 --seeds=1 --period=1 --strategies none ideal"
# A command line for each command that is right, cheap and ends soon.
CHEAP = {
  "plan": f"plan {TINY}",
  "simulate": f"simulate --ranks=4 {LOADS}",
  "recommend": "recommend --model=Qwen3-235B --records=1 {trace}",
  "doctor": "doctor --no-check",
  "paper": "paper",
  "view": "view {trace} --html={out}",
  "trace show": "trace show {trace}",
  "trace import": "trace import {trace} {out} --experts=8",
  "demo": "demo --out=/dev/null/none",
  **{f"bench {name}": f"bench {name}" for name in bench.MEASUREMENTS},
  "bench grouped_matmul": "bench grouped_matmul check",
  "bench reduce": "bench reduce check",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
  folder = tmp_path_factory.mktemp("hostile")
  (folder / "binary").write_bytes(bytes(range(256)))
  return {
    "folder": str(folder),
    "binary": str(folder / "binary"),
    "trace": str(traces.write(folder / "trace", steps=1)),
    "out": str(folder / "out.html"),
  }


@pytest.fixture(autouse=True)
def nothing_lasts(monkeypatch):
  """What would serve for ever or simulate for minutes ends at once."""

  def ends(*_, **__):
    raise CommandError("this would run")

  class Server:
    server_port = 0

    def __init__(self, *_):
      ends()

  monkeypatch.setattr(view, "make_server", Server)
  monkeypatch.setattr(paper.paper, "run", ends)
  monkeypatch.setattr(processes.multiprocessing, "get_context", ends)
  monkeypatch.setattr(targets, "environment", ends)


def files(places: dict[str, str]) -> tuple[str, ...]:
  missing = f"{places['folder']}/missing"
  return (missing, places["folder"], places["binary"], "/dev/null", "/dev/full", "/proc/none/x", "")


def run(capsys, words: Sequence[str]) -> tuple[int, str]:
  """The exit status and what stands on standard error."""
  try:
    status = cli.main(words)
  except SystemExit as end:
    status = end.code
    if isinstance(status, str):  # Python prints it and exits with 1
      print(status, file=sys.stderr)
      status = 1
  captured = capsys.readouterr()
  assert isinstance(status, int)
  return status, captured.err


def check(capsys, words: Sequence[str]) -> tuple[int, str]:
  status, said = run(capsys, words)
  assert status in (0, 1, 2) and "Traceback" not in said, (words, status, said)
  if status:
    line = said.splitlines()[-1]
    assert re.match(r"(ultraep|train_tiny_moe)", line), (words, said)
    assert len(line) < 1000 and "Error" not in line.replace("[Errno", ""), (words, said)
  return status, said


def options(name: str, capsys) -> Iterator[argparse.Action]:
  """The options of a command that take a value, and its positional arguments."""
  seen: list[argparse.ArgumentParser] = []
  parse = argparse.ArgumentParser.parse_known_args

  def spy(self, args=None, namespace=None):
    seen.append(self)
    return parse(self, args, namespace)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(argparse.ArgumentParser, "parse_known_args", spy)
    run(capsys, [*name.split(), "--help"])
  for action in seen[-1]._actions:
    if action.nargs != 0 and action.dest not in ("command", "action", "name"):
      yield action


def hostile(action: argparse.Action, places: dict[str, str]) -> tuple[str, ...]:
  if action.choices:
    return ("", "0")
  numeric = isinstance(action.default, int | float) or action.type not in (None, pathlib.Path)
  return NUMBERS if numeric else files(places)


@pytest.mark.parametrize("name", CHEAP)
def test_a_hostile_value_is_refused_in_one_line(name, places, capsys):
  cheap = CHEAP[name].format(**places).split()
  usual = check(capsys, cheap)[1]
  number = 0
  for number, action in enumerate(options(name, capsys), 1):
    values = hostile(action, places)
    passed_on = name.startswith(("bench", "demo"))
    numeric = values is NUMBERS and not passed_on
    if passed_on:  # alike in all of them: one value of each option
      values = values[number % len(values) :][:1]
    for value in values:
      if action.option_strings:
        option = action.option_strings[-1]
        status, said = check(capsys, [*cheap, f"{option}={value}"])
        if status and numeric and said != usual:  # the option is named as typed
          assert status == 2 and option in said.splitlines()[-1], (option, value, said)
      elif action.nargs in ("*", "+", "?", None):
        check(capsys, [*cheap[: -1 if name in ("trace show", "recommend") else None], value])
  assert number or name == "doctor"


def test_every_command_is_tried():
  assert {name.split()[0] for name in CHEAP} == set(cli.COMMANDS)
  assert {f"bench {name}" for name in bench.MEASUREMENTS} <= set(CHEAP)


@pytest.mark.parametrize(
  "pair", [("--ranks", "--tokens"), ("--tokens", "--slots"), ("--slots", "--ranks")]
)
def test_two_hostile_values(pair, capsys):
  for values in itertools.product(NUMBERS[:3], repeat=2):
    given = [f"{option}={value}" for option, value in zip(pair, values, strict=True)]
    check(capsys, [*CHEAP["plan"].split(), *given])
    check(capsys, [*CHEAP["simulate"].split(), *given])


# --- files ------------------------------------------------------------------------------------


def npy(shape: str, descr: str = "'<f8'", data: bytes = b"") -> bytes:
  header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
  return b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header + data


@pytest.mark.parametrize(
  "content",
  [
    npy("(100_000_000_000,)"),  # 745 GiB
    npy("(9223372036854775808,)"),
    npy("(0, 9223372036854775808)"),
    npy("(-1,)", data=bytes(8)),
    npy("(True,)", data=bytes(8)),
    npy(f"({'1,' * 100})", data=bytes(8)),
    npy("(4611686018427387904,)", "'V0'"),
    npy("(1,)", "'|O'", bytes(8)),
    npy("(1,)", "'<U2'", bytes(8)),
    npy("(1,)", "-" * 9000 + "1"),
    npy("(1,)", "['" * 2000 + "]'" * 2000),
    b"\x93NUMPY\x01\0\x0a\0" + bytes(10),
    b"\x93NUMPY",
    b"\x80\x04N.",
    bytes(100),
    b"PK\x03\x04",
  ],
  ids=lambda content: f"{content[9:40]!r}",
)
def test_arrays_that_lie(content, tmp_path, capsys):
  (tmp_path / "a.npy").write_bytes(content)
  with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
    file.writestr("load_GE.npy", content)
  lines = [
    ["plan", str(tmp_path / "a.npy")],
    ["plan", str(tmp_path / "a.npz")],
    [*CHEAP["simulate"].split(), f"--loads={tmp_path / 'a.npy'}"],
  ]
  for line in lines:
    status, said = run(capsys, line)
    assert status == 1 and "expected" in said, said
    check(capsys, line)


def test_an_endless_file_is_not_read(tmp_path, capsys):
  for suffix in ("npy", "npz", "json", "csv"):
    (tmp_path / f"a.{suffix}").symlink_to("/dev/zero")
    status, said = run(capsys, ["plan", str(tmp_path / f"a.{suffix}")])
    assert status == 1 and "expected a file, got a device" in said


@pytest.mark.parametrize("value", ["1" + "0" * 400, "NaN", "true", '"1e-3"', "[]", "1e-300"])
def test_descriptions_with_other_numbers(value, tmp_path, capsys):
  built_in = ROOT / "ultraep_jax/devices/h200.json"
  path = tmp_path / "device.json"
  text = re.sub(r'("copy_rate": {\s*"value": )[^,]+', rf"\g<1>{value}", built_in.read_text())
  assert text != built_in.read_text()
  path.write_text(text)
  line = [*CHEAP["simulate"].split(), f"--device={path}"]
  status, said = run(capsys, line)
  assert status == 1 and "copy_rate: expected a" in said


# --- output -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plan", "simulate", "doctor", "trace show", "view"])
def test_a_full_disk_is_one_line(name, places, capsys, monkeypatch):
  with open("/dev/full", "w") as full:
    monkeypatch.setattr(sys, "stdout", full)
    status = cli.main(CHEAP[name].format(**places).split())
    monkeypatch.undo()
    full.flush()  # as Python does at its end: nothing is left to fail
  said = capsys.readouterr().err
  assert status == 1 and said.count("\n") == 1
  assert "output: expected to write it, got: No space left on device" in said


def test_what_cannot_be_written_is_known_before_work(places, capsys, monkeypatch):
  for name, option in (("simulate", "--out"), ("view", "--html"), ("bench layer", "--json")):
    cheap = CHEAP[name].format(**places).split()
    for path, message in (
      (places["folder"], "expected a file to write, got a folder"),
      ("/proc/none/x", "expected a folder to write in, got none"),
    ):
      status, said = run(capsys, [*cheap, f"{option}={path}"])
      assert status == 1 and message in said
  monkeypatch.setattr(os, "access", lambda *_: False)
  status, said = run(capsys, CHEAP["view"].format(**places).split())
  assert status == 1 and "expected the right to write there" in said


# --- machines ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("name", [name for name in bench.MEASUREMENTS if name != "compile"])
def test_measurements_say_which_devices_they_need(name, count, capsys, monkeypatch):
  found = jax.devices()[:count]
  monkeypatch.setattr(jax, "devices", lambda: found)
  status, said = run(capsys, CHEAP[f"bench {name}"].split())
  assert status == 1 and said.count("\n") == 1
  assert re.search("devices: (expected|the kernels need NVIDIA GPUs)", said), said


def test_more_ranks_than_devices_are_refused(capsys):
  status, said = run(capsys, ["bench", "layer", "--ranks", "9"])
  assert status == 1 and "--ranks: expected at most 8 devices, got 9" in said


@pytest.mark.parametrize("count", ["0", "-1", "65", "1000000000000", "x"])
def test_numbers_of_processes(count, capsys):
  status, said = run(capsys, ["doctor", "--processes", count])
  assert status == 2 and "argument --processes: expected" in said


def test_unknown_options_show_the_usage_of_their_command(capsys):
  for line, usage in (("plan --skew 5", "plan"), ("trace show x --skew 5", "trace show")):
    status, said = run(capsys, line.split())
    assert status == 2 and said.startswith(f"usage: ultraep {usage} [")
    assert f"{usage}: error: unrecognized arguments: --skew" in said


def test_no_devices_are_one_line():
  code = f"""
import sys
from ultraep_jax import cli
for line in ("doctor", "doctor --json", "plan {TINY}", "bench layer"):
  assert cli.main(line.split()) == 1, line
"""
  done = subprocess.run(
    [sys.executable, "-c", code],
    cwd=ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cuda"},
    capture_output=True,
    text=True,
    check=True,
  )
  lines = [line for line in done.stderr.splitlines() if line.startswith("ultraep")]
  assert len(lines) == 4 and "Traceback" not in done.stderr
  assert all("devices: expected some that JAX can start, got: " in line for line in lines)


def test_missing_extras_are_named():
  code = """
import runpy, sys
sys.path.insert(0, "examples")
for missing in ("safetensors", "orbax", "tqdm"):
  sys.modules[missing] = None
  for script in ("serve_tiny_moe", "train_tiny_moe"):
    try:
      runpy.run_path(f"examples/{script}.py", run_name="__main__")
    except SystemExit as end:
      print(end.code)
  del sys.modules[missing]
sys.modules["safetensors"] = None
try:
  import ultraep_jax.models
except ImportError as error:
  print(error)
"""
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
  )
  lines = done.stdout.splitlines()
  assert len(lines) == 7
  assert all("pip install -e '.[examples]'" in line for line in lines[:6])
  assert "safetensors" in lines[6] and "pip install -e '.[models]'" in lines[6]


def test_recorded_loads_of_other_shapes(tmp_path, capsys):
  full = np.iinfo(np.uint64).max
  for loads in (np.ones((1, 0, 4, 128), int), np.ones((), int), np.full((1, 1, 4, 128), full)):
    np.save(tmp_path / "loads.npy", loads)
    line = ["simulate", "--ranks=4", f"--loads={tmp_path / 'loads.npy'}"]
    status, said = run(capsys, line)
    assert status == 1 and "loads: expected" in said, said


def test_kernels_on_a_cpu_say_what_they_need(caplog):
  """Before they say which sizes they take."""
  shape = jax.ShapeDtypeStruct
  weights = uep.ExpertWeights(*[shape((4, 32, 32), jnp.bfloat16)] * 3)
  tokens = shape((64, 32), jnp.bfloat16), shape((64, 2), jnp.int32), shape((64, 2), jnp.float32)
  config = uep.BalanceConfig(implementation="mosaic_gpu", replica_slots=2)
  implementation._say_once.cache_clear()
  with jax.set_mesh(jax.make_mesh((2,), ("expert",), devices=jax.devices()[:2])):
    layer = functools.partial(uep.sharded_moe, config=config)
    with pytest.raises(NotImplementedError, match=r"the kernels need NVIDIA GPUs"):
      jax.eval_shape(layer, *tokens, weights)
  assert "does not run here: the kernels need NVIDIA GPUs" in caplog.text
