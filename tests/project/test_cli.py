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
import jax.numpy as jnp
import numpy as np
import pytest
import traces
from command_line import command, run
from fake_devices import gpus
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from programs import FORWARD, PLANNING, kernel_names

import ultraep_jax
from ultraep_jax import cli, nodes, testing
from ultraep_jax.bench.kernels import exchange as bench_exchange
from ultraep_jax.bench.kernels import plan as bench_plan
from ultraep_jax.commands import bench, demo
from ultraep_jax.commands import doctor as doctor_command
from ultraep_jax.config import BalanceConfig
from ultraep_jax.doctor import description_advice, mesh_advice
from ultraep_jax.sharded import sharded_moe
from ultraep_jax.tools import selfcheck
from ultraep_jax.types import Plan

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
  assert status == 0 and rows == names and "All but portable and compile need GPUs" in out
  before = list(sys.argv)
  for name in names:
    with pytest.raises(SystemExit, match="0"):
      cli.main(["bench", name, "--help"])
    out = capsys.readouterr().out
    assert out.startswith(f"usage: ultraep bench {name}") and "--" in out
  assert sys.argv == before
  for name in ("speed", "timing"):
    status, _, err = run(capsys, "bench", name)
    assert status == 1 and "expected one of" in err and f"'{name}'" in err


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
    assert kernel_names(traced.jaxpr) == FORWARD | PLANNING
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


# --- plan ------------------------------------------------------------------------------------


def assert_is_the_plan_of(answer: dict, load_GE: np.ndarray, config: BalanceConfig) -> None:
  ranks = len(load_GE)
  expert_GS = np.full((ranks, config.replica_slots), -1, np.int32)
  parent_GS = expert_GS.copy()
  for copy in answer["replicas"]:
    slot = int((expert_GS[copy["rank"]] >= 0).sum())
    expert_GS[copy["rank"], slot], parent_GS[copy["rank"], slot] = copy["expert"], copy["from"]
    assert copy["assignments"] == answer["quota"][copy["expert"]][copy["rank"]]
  plan = Plan(*map(jnp.asarray, (expert_GS, np.array(answer["quota"], np.int32), parent_GS)))
  testing.assert_legal_plan(plan, jnp.asarray(load_GE), config)
  after = np.array(answer["load_after"])
  assert answer["load_before"] == load_GE.sum(axis=0).reshape(ranks, -1).sum(axis=1).tolist()
  assert answer["imbalance"]["after"] == pytest.approx(after.max() / after.mean())


@pytest.mark.parametrize("kind", [".npy", ".npz", ".json", ".csv"])
def test_plan_reads_files(kind, tmp_path, capsys):
  load_GE = traces.loads(3)
  path = tmp_path / f"loads{kind}"
  if kind == ".npy":
    np.save(path, load_GE)
  elif kind == ".npz":
    np.savez(path, load_GE=load_GE, other=np.zeros(3))
  elif kind == ".json":
    path.write_text(json.dumps(load_GE.tolist()))
  else:
    np.savetxt(path, load_GE, fmt="%d", delimiter=",")
  status, out, _ = run(capsys, "plan", path, "--json")
  assert status == 0
  assert_is_the_plan_of(json.loads(out), load_GE, traces.CONFIG)
  status, text, _ = run(capsys, "plan", path)
  assert status == 0 and "4 ranks, 8 experts, 2 replica slots a rank; 512 assignments" in text


def test_plan_deals_loads_per_expert_to_the_ranks(tmp_path, capsys):
  path = tmp_path / "loads.csv"
  path.write_text("10, 3, 0, 6, 1, 1, 1, 2\n")
  _, out, _ = run(capsys, "plan", path, "--ranks", 4, "--json")
  answer = json.loads(out)
  assert answer["assignments"] == 24 and answer["load_before"] == [13, 6, 2, 3]
  assert answer["imbalance"]["after"] == 1.0


def test_plan_makes_workloads_and_weighs_time(capsys):
  sizes = ("--ranks", 4, "--experts", 8, "--tokens", 512, "--top-k", 2)
  _, out, _ = run(capsys, "plan", *sizes, "--ratio", 2.5, "--json", "--width", 64, "--inner", 128)
  answer = json.loads(out)
  assert answer["imbalance"]["before"] == pytest.approx(2.5, abs=0.01)
  assert answer["copy_bytes"] == 3 * 64 * 128 * 2 and answer["copies"] > 0
  few = ("--objective", "time", "--ratio", 1.2, "--tokens", 128, "--width", 8192, "--inner", 65536)
  _, out, _ = run(capsys, "plan", *sizes, *few, "--json")
  assert json.loads(out)["copies"] == 0  # copies that cost more than they save
  for workload in ("flat", "balanced", "all-to-one", "giant"):
    _, out, _ = run(capsys, "plan", *sizes, "--workload", workload, "--json")
    answer = json.loads(out)
    assert answer["assignments"] == 4 * 512 * 2
    assert answer["imbalance"]["after"] <= answer["imbalance"]["before"]


def test_plan_weighs_copies_in_plain_jax_where_kernels_cannot_run(capsys):
  """A fifth of 23200 rows is less than a copy takes among 4 ranks, and more than among 2."""
  sizes = ("--ranks", 4, "--experts", 8, "--tokens", 11600, "--top-k", 2, "--ratio", 1.2)
  weighed = (*sizes, "--objective", "time", "--width", 2048, "--inner", 768, "--device")
  for device, layer in (("h200", "the layer on kernels"), ("a100", "the layer in plain JAX")):
    answer = json.loads(run(capsys, "plan", *weighed, device, "--json")[1])
    assert answer["costs"] == f"{device}, {layer}"
    assert (answer["copies"] == 0) == (device == "a100")
    text = run(capsys, "plan", *weighed, device)[1]
    assert f"costs                of {device}, {layer} (--device)\n" in text
  assert "costs" not in json.loads(run(capsys, "plan", *sizes, "--json")[1])


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.csv", "1,2\n3", "expected loads in csv"),
    ("a.csv", "1,nan\n3,4", "expected whole numbers"),
    ("a.csv", "1,-2\n3,4", r"expected loads in \[0, 2\*\*31\), got -2 to 4"),
    ("a.csv", "1.5,2\n3,4", "expected whole numbers"),
    ("a.csv", "1e12,2\n3,4", r"expected loads in \[0, 2\*\*31\)"),
    ("a.csv", "1,2,3\n3,4,5", r"expected shape \[G, E\], E a positive multiple of G"),
    ("a.csv", "1,2,3,4", "expected --ranks, to deal one row of loads to ranks, got none"),
    ("a.csv", "<script>", "expected loads in csv"),
    ("a.json", "[[1, 2], [3]]", "expected loads in json"),
    ("a.json", '{"load": 3}', "expected whole numbers, got object"),
    ("a.json", "[[[1]]]", r"expected shape \[G, E\] or \[E\], got \[1, 1, 1\]"),
    ("a.json", "[[1, 2]", r"a\.json: expected JSON"),
    ("a.json", "[" * 100_000, r"a\.json: expected JSON, got values nested too deeply"),
    ("a.json", "[1, NaN]", "expected whole numbers"),
    ("a.npy", "", r"a\.npy: expected a whole \.npy file"),
    ("a.npy", "[" * 100_000, r"a\.npy: expected a whole \.npy file"),
    ("a.csv", "", "expected loads in csv, got an empty file"),
    ("a.csv", "[" * 100_000, "expected loads in csv"),
    ("a.npz", "PK", "expected loads in npz"),
    ("a.txt", "1", "expected .npy, .npz, .json, .csv, got .txt"),
    ("none.npy", None, "none.npy: expected a file, got nothing"),
    (".", None, "expected .npy, .npz, .json, .csv"),
  ],
)
def test_plan_refuses_hostile_files(name, content, message, tmp_path, capsys):
  if content is not None:
    (tmp_path / name).write_text(content)
  status, out, err = run(capsys, "plan", tmp_path / name)
  assert status == 1 and not out and "Traceback" not in err
  assert re.search(message, err), err


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--slots", "-1"], "replica_slots: expected at least 0, got -1"),
    (["--ranks", "7"], "num_experts: expected a multiple of 7 ranks, got 64"),
    (["--ranks", "0"], "num_experts: expected a multiple of 0 ranks"),
    (["--tokens", "10000000000"], "ranks * tokens * top_k and ranks * experts below 2**31"),
    (["--experts", "1000000000000"], "ranks * tokens * top_k and ranks * experts below 2**31"),
    (["--slots", "1000000000000"], "replica_slots: expected at most 65536"),
    (["--slots", "65"], "--slots: expected at most 64 experts, got 65"),
    (["--seed", "-1"], "seed: expected at least 0, got -1"),
    (["--ratio", "nan"], "ratio: expected a number"),
    (["--domain", "3"], "domain_size: expected a divisor of 8 ranks, got 3"),
    (["--strategy", "magic"], "strategy: expected one of"),
    (["--strategy", "ideal"], "replaces the router's choice and plans nothing"),
    (["--objective", "time"], "expected --width and --inner"),
    (["--width", "64"], "--width, --inner: expected both or none"),
    (["--width", "64", "--inner", "0"], "expected at least 1"),
  ],
)
def test_plan_refuses_wrong_numbers(arguments, message, capsys):
  status, _, err = run(capsys, "plan", *arguments)
  assert status == 1 and message in err
