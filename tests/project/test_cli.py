"""The command line: every command, what it prints, what it refuses and how it ends."""

import argparse
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import jax
import pytest
from command_line import command, run
from fake_devices import gpus
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from programs import EXCHANGE, FORWARD, PLANNING, kernel_names

import ultraep_jax
from ultraep_jax import cli, nodes
from ultraep_jax.bench.kernels import exchange as bench_exchange
from ultraep_jax.bench.kernels import plan as bench_plan
from ultraep_jax.commands import bench, demo
from ultraep_jax.commands import doctor as doctor_command
from ultraep_jax.doctor import description_advice, mesh_advice
from ultraep_jax.sharded import sharded_moe
from ultraep_jax.tools import selfcheck

ROOT = pathlib.Path(__file__).parents[2]


# --- all commands ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in cli.COMMANDS if n not in ("demo", "bench")])
def test_help(name, capsys):
  with pytest.raises(SystemExit) as end:
    cli.main([name, "--help"])
  assert end.value.code == 0
  text = capsys.readouterr().out
  assert text.startswith(f"usage: ultraep {name}")
  module = importlib.import_module(f"ultraep_jax.commands.{name}")
  for line in (module.__doc__ or "").splitlines():
    assert line in text


def test_list_of_commands(capsys):
  with pytest.raises(SystemExit, match="0"):
    cli.main(["--help"])
  listed = re.findall(r"^    (\w+)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
  assert listed == list(cli.COMMANDS)
  readme = (ROOT / "README.md").read_text()
  for name in cli.COMMANDS:
    assert f"ultraep {name}" in readme, name


PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_pages_are_right(page, monkeypatch):
  """They parse; what they name need not be there. Measurements have parsers of their own."""
  text = page.read_text()
  lines = re.findall(r"^(?:\$ )?(?:\w+=\S+ )*ultraep (.+)$", text, re.MULTILINE)
  lines += re.findall(r"`ultraep ([^`]+)`", text)
  for line in lines:
    name, *arguments = shlex.split(line.replace("…", ""), comments=True)
    if name in cli.COMMANDS and name not in ("demo", "bench") and "COMMAND" not in line:
      if arguments:
        assert_parses(name, [a if a != "N" else "2" for a in arguments], monkeypatch)
    else:
      assert name in (*cli.COMMANDS, "COMMAND"), line


@pytest.mark.parametrize("name", ["paper", "plan", "recommend", "simulate", "trace", "view"])
def test_examples_of_the_help_are_right(name, monkeypatch):
  """An example begins with the command and ends before three spaces; brackets mark options."""
  help_text = importlib.import_module(f"ultraep_jax.commands.{name}").__doc__
  examples = re.findall(rf"^ *{name} (.+?)(?:   .*)?$", help_text, re.MULTILINE)
  assert len(examples) > 1
  for example in examples:
    assert_parses(name, shlex.split(re.sub(r"[\[\]]", "", example)), monkeypatch)


def assert_parses(name: str, arguments: list[str], monkeypatch) -> None:
  def fail(_, message: str) -> None:
    pytest.fail(f"{name} {shlex.join(arguments)}: {message}")

  parser = argparse.ArgumentParser()
  importlib.import_module(f"ultraep_jax.commands.{name}").add_arguments(parser)
  monkeypatch.setattr(argparse.ArgumentParser, "error", fail)  # of subcommands, too
  parser.parse_args(arguments)


@pytest.mark.parametrize("wrong", [["fly"], ["doctor", "--steps", "3"], ["plan", "--slots", "x"]])
def test_wrong_command_lines_end_with_2(wrong, capsys):
  with pytest.raises(SystemExit, match="2"):
    cli.main(wrong)
  assert "usage: ultraep" in capsys.readouterr().err


def test_no_command_shows_the_help(capsys):
  with pytest.raises(SystemExit, match="0"):
    cli.main([])
  out = capsys.readouterr().out
  assert out.startswith("usage: ultraep [-h]") and "recommend" in out


def test_version(capsys):
  with pytest.raises(SystemExit, match="0"):
    cli.main(["--version"])
  assert capsys.readouterr().out == f"ultraep_jax {ultraep_jax.__version__}\n"


def test_interrupt_ends_with_130(monkeypatch):
  def interrupted(args):
    raise KeyboardInterrupt

  monkeypatch.setattr(doctor_command, "run", interrupted)
  assert cli.main(["doctor"]) == 130


def test_a_closed_pipe_is_no_error():
  child = subprocess.Popen(
    command("plan", "--json"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
  )
  assert child.stdout is not None and child.stderr is not None
  child.stdout.close()
  assert child.wait(60) == 0 and child.stderr.read() == b""
  child.stderr.close()


# --- demo and bench --------------------------------------------------------------------------


def test_demo_gets_its_arguments(tmp_path, monkeypatch, capsys):
  script = tmp_path / "example.py"
  script.write_text("import sys\nprint(__name__, sys.argv[1:])\n")
  monkeypatch.setattr(demo, "_EXAMPLE", script)
  before = list(sys.argv)
  assert run(capsys, "demo", "--steps", 3, "--help")[:2] == (
    0,
    "__main__ ['--steps', '3', '--help']\n",
  )
  assert sys.argv == before


def test_demo_without_a_checkout_says_what_to_do(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(demo, "_EXAMPLE", tmp_path / "none.py")
  status, _, err = run(capsys, "demo")
  assert status == 1 and "Clone the repository" in err


def test_demo_is_in_the_checkout():
  assert demo._EXAMPLE.is_file()


def test_bench_lists_and_passes_arguments_on(capsys):
  folder = ROOT / "ultraep_jax/bench"
  modules = {
    ".".join(path.relative_to(folder).with_suffix("").parts)
    for path in folder.rglob("*.py")
    if "def main(" in path.read_text()
  }
  assert set(bench.MEASUREMENTS.values()) == modules
  names = list(bench.MEASUREMENTS)
  status, out, _ = run(capsys, "bench")
  rows = [line.split()[0] for line in out.splitlines()[2:] if line.startswith(" ")]
  assert status == 0 and rows == names and "Most need GPUs" in out
  before = list(sys.argv)
  for name in names:
    with pytest.raises(SystemExit, match="0"):
      cli.main(["bench", name, "--help"])
    out = capsys.readouterr().out
    assert out.startswith(f"usage: ultraep bench {name}") and "--" in out
  assert sys.argv == before
  for name in ("speed", "timing"):
    status, _, err = run(capsys, "bench", name)
    assert status == 2 and "expected one of" in err and f"'{name}'" in err


def test_bench_ends_as_the_measurement_does(capsys, monkeypatch):
  monkeypatch.setattr(bench_exchange, "run", lambda args: len(args.shapes))
  assert run(capsys, "bench", "exchange", "check", "--shapes", "1x1x128", "2x1x128")[0] == 2
  monkeypatch.setattr(bench_plan, "main", lambda: None)
  assert run(capsys, "bench", "plan")[0] == 0


# --- doctor ----------------------------------------------------------------------------------


def test_doctor_prints_text_and_json(capsys):
  status, text, _ = run(capsys, "doctor", "--no-check")
  assert status == 0 and "check" not in text
  status, out, _ = run(capsys, "doctor", "--no-check", "--json")
  report = json.loads(out)
  assert report["implementation"] == "portable" and report["nodes"] == [8]
  for operation, (picked, reason) in report["operations"].items():
    assert picked == "portable" and reason == "the kernels need NVIDIA GPUs, this is a cpu"
    assert re.search(rf"^  {operation} +portable +{reason}$", text, re.MULTILINE)
  assert sum(report["devices"].values()) == 8 and report["check"] is None
  assert "as if copies cost nothing" in report["description"] and report["description"] in text
  assert 'jax.make_mesh((8,), ("expert",))' in report["mesh"]


def test_doctor_checks_a_layer(capsys):
  status, text, _ = run(capsys, "doctor")
  expected = r'check: +passed .* "portable" on 4 devices: imbalance 1.50 before, 1.0'
  assert status == 0 and re.search(expected, text)


@pytest.mark.parametrize(
  ("environment", "devices"), [({}, "4 x virtual cpu"), ({"JAX_NUM_CPU_DEVICES": "2"}, "2 x cpu")]
)
def test_doctor_has_something_to_balance_on_a_cpu(environment, devices):
  own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
  done = subprocess.run(
    command("doctor"),
    cwd=ROOT,
    env=own | environment | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    check=True,
  )
  assert f"devices:        {devices} (1 process)" in done.stdout
  assert "imbalance 1.50 before, 1.0" in done.stdout
  assert "bfloat16" in done.stdout and "is rounding" in done.stdout


def test_doctor_says_what_runs_by_kernels(capsys, monkeypatch):
  with gpus():
    status, text, _ = run(capsys, "doctor", "--no-check")
  assert status == 0 and '"auto" is mosaic_gpu\n' in text
  assert len(re.findall("mosaic_gpu  its kernel runs here", text)) == 7
  with gpus("10.0"):
    text = run(capsys, "doctor", "--no-check")[1]
  assert '"auto" is mosaic_gpu\n' in text
  assert len(re.findall("compiles for Blackwell GPUs and has never run", text)) == 7
  monkeypatch.setattr(nodes, "_node", lambda device: (device.id // 2,))
  with gpus():
    text = run(capsys, "doctor", "--no-check")[1]
  assert '4, of 2 devices; domain_size="auto" keeps copies among 2 ranks' in text
  assert '"auto" is mosaic_gpu, portable replicate, exchange\n' in text


@pytest.mark.parametrize(
  ("kind", "said"),
  [("NVIDIA H100 80GB HBM3", '"h100": NVIDIA H100 SXM5'), ("A100", "as the nearest")],
)
def test_doctor_says_whose_description_counts(kind, said):
  device = AbstractDevice(kind, None, "gpu")
  with jax.sharding.use_abstract_mesh(AbstractMesh((4,), ("expert",), abstract_device=device)):
    assert said in description_advice()


@pytest.mark.parametrize("ranks", [2, 8])
def test_self_check_fits_every_kernel(ranks):
  mesh = jax.make_mesh(
    (ranks,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks]
  )
  config = dataclasses.replace(selfcheck.CONFIG, implementation="mosaic_gpu")
  layer = jax.jit(functools.partial(sharded_moe, config=config))
  with jax.set_mesh(mesh):
    traced = layer.trace(*selfcheck.make_problem(ranks))
    assert kernel_names(traced.jaxpr) == FORWARD | EXCHANGE | PLANNING
    if ranks == 2:  # what kernels take of a GPU does not depend on the ranks
      assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_doctor_fails_with_the_check(capsys, monkeypatch):
  failed = selfcheck.Check(False, "portable", 4, 0.5, 2.0, 1.0, 1.0)
  monkeypatch.setattr(doctor_command, "self_check", lambda: failed)
  status, text, _ = run(capsys, "doctor")
  assert status == 1 and "FAILED" in text


def test_self_check_says_what_went_wrong(monkeypatch):
  def broken(*_, **__):
    raise RuntimeError("no such link\nand a long story")

  monkeypatch.setattr("ultraep_jax.tools.selfcheck.sharded_moe", broken)
  check = selfcheck.self_check()
  assert not check.passed and check.failure == "RuntimeError: no such link"
  assert check.error is None


def test_doctor_is_json_and_explains_itself_whatever_happens(capsys, monkeypatch):
  failed = selfcheck.Check(False, "portable", 4, None, None, None, 1.0, "no link")
  monkeypatch.setattr(doctor_command, "self_check", lambda: failed)
  status, text, _ = run(capsys, "doctor", "--json")
  report = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
  assert status == 1 and report["check"]["failure"] == "no link"

  def broken():
    raise RuntimeError("Unable to initialize backend 'cuda'")

  monkeypatch.setattr(doctor_command, "doctor", broken)
  status, _, errors = run(capsys, "doctor")
  assert status == 1 and "devices: expected some that JAX can start, got: Unable" in errors


def test_doctor_says_which_kernels_are_slow_and_why(monkeypatch):
  module = importlib.import_module("ultraep_jax.doctor")  # the package's attribute is the function
  slow = {"matmul": "registers spill"}
  monkeypatch.setattr(module.kernels, "why_slow", lambda operation, _: slow.get(operation))
  assert module._pick("matmul", None)[1].endswith("Slowly: registers spill")
  assert "Slowly" not in module._pick("plan", None)[1]


def test_mesh_advice():
  one = mesh_advice(1, "cpu", 1)
  assert "nothing to balance" in one and "jax_num_cpu_devices" in one
  assert "jax_num_cpu_devices" not in mesh_advice(1, "gpu", 1)
  assert '("expert",))' in mesh_advice(8, "gpu", 8)
  assert "jax.sharding.Mesh(np.reshape(jax.devices(), (4, 8))" in mesh_advice(32, "gpu", 8)
