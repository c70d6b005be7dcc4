"""``simulate`` and ``paper`` from the command line, and the sweep to thousands of ranks."""

import json
import time

import numpy as np
import pytest
import traces
from command_line import run

from ultraep_jax import cli
from ultraep_jax.commands import paper as paper_command
from ultraep_jax.devices.device import Device
from ultraep_jax.simulate import paper, published, scaling
from ultraep_jax.testing import zipf_loads
from ultraep_jax.tools.arguments import largest_divisor

pytestmark = pytest.mark.usefixtures("optimized")  # planning for thousands of ranks takes a while
TINY = ["--ranks", "8", "--domain", "8", "--tokens", "64", "--steps", "2", "--period", "2"]
TINY += ["--layers", "1", "--imbalance", "1.8", "--noise", "0.05", "--drift", "0"]
ONCE = ["--tokens", "64", "--steps", "1", "--period", "1", "--layers", "1", "--seeds", "1"]
ONCE += ["--strategies", "none"]


def test_simulate_prints_tables_and_sources(capsys):
  command = ["simulate", *TINY, "--seeds", "2", "--strategies", "none", "quota"]
  assert cli.main(command) == 0
  out = capsys.readouterr().out
  assert "Qwen3-235B" in out and "equal" not in out and "ideal" in out and "copy_rate" not in out
  assert cli.main([*command, "--verbose"]) == 0
  out = capsys.readouterr().out
  assert "datasheet" in out and "copy_rate" in out


def test_several_domains_are_several_nodes(capsys):
  found = []
  for more in ([], ["--domain", "4"]):
    command = ["simulate", *TINY, *more, "--seeds", "1", "--strategies", "none", "--json"]
    assert cli.main(command) == 0
    found.append(json.loads(capsys.readouterr().out))
  h200, note = Device.load("h200"), "on several nodes transfers are in plain JAX"
  rates = [data["device"]["facts"]["dispatch_rate"]["value"] for data in found]
  assert rates == [h200["dispatch_rate"], h200.on_nodes()["dispatch_rate"]]
  assert [note in data["notes"] for data in found] == [False, True]


@pytest.mark.parametrize("device, on_kernels", [("a100", False), ("h200", True)])
def test_what_cannot_run_kernels_is_simulated_in_plain_jax(device, on_kernels, capsys):
  seconds = []
  for more in ([], ["--portable"]):
    command = ["simulate", *TINY, "--seeds", "1", "--strategies", "none", "--device", device, *more]
    assert cli.main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    layer = "the layer on kernels" if on_kernels and not more else "the layer in plain JAX"
    assert data["device"]["layer"] == layer
    assert cli.main(command) == 0
    assert f"predicted for {device} (--device), {layer}: 8 ranks" in capsys.readouterr().out
    seconds.append(data["strategies"][0]["layer_seconds"])
  assert (seconds[0] < seconds[1]) if on_kernels else (seconds[0] == seconds[1])


def test_simulate_prints_json_from_recorded_loads(tmp_path, capsys):
  # With fewer tokens reading weights counts, and even loads make every rank read all of its own.
  loads = np.stack([zipf_loads(seed, 128, 8, 2048, 8, 1.8) for seed in range(2)])[:, None]
  np.save(tmp_path / "loads.npy", loads)
  command = [
    "simulate",
    *TINY,
    "--tokens",
    "2048",
    "--loads",
    str(tmp_path / "loads.npy"),
    "--json",
  ]
  out = tmp_path / "result.json"
  assert cli.main([*command, "--strategies", "none", "--out", str(out)]) == 0
  data = json.loads(capsys.readouterr().out)
  assert data == json.loads(out.read_text())
  none, ideal = data["strategies"]
  assert none["imbalance"]["mean"] == pytest.approx(1.8, rel=0.01)
  assert none["share_of_ideal"]["mean"] < ideal["share_of_ideal"]["mean"] == 1
  assert data["device"]["facts"]["copy_rate"]["source"]


@pytest.mark.parametrize("of_all", [False, True])
def test_recorded_loads_say_how_many_tokens_a_rank_has(of_all, tmp_path, capsys):
  loads = np.stack([zipf_loads(seed, 128, 8, 64, 8, 1.8) for seed in range(2)])[:, None]
  np.save(tmp_path / "loads.npy", loads.sum(axis=2) if of_all else loads)
  command = ["simulate", "--ranks", "8", "--loads", str(tmp_path / "loads.npy"), "--json"]
  command += ["--strategies", "none", "--period", "1"]
  results = [run(capsys, *command, *tokens)[1] for tokens in ([], ["--tokens", "64"])]
  assert json.loads(results[0])["strategies"] and results[0] == results[1]
  status, _, err = run(capsys, *command, "--tokens", "1024")
  assert status == 2
  assert f"--tokens: expected 64, as {tmp_path / 'loads.npy'} has, got 1024" in err


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["--ranks", "7"], "--ranks: expected a divisor of 128 experts, got 7"),
    (["--ranks", "-1"], "--ranks: expected an integer from 1 to 2147483647, got '-1'"),
    (["--capacity-factor", "0"], "--capacity-factor: expected a number of at least 1"),
    (["--domain", "3"], "--domain: expected a divisor of 8"),
    (["--tokens", "1000000000"], "--tokens: expected ranks * tokens * top_k"),
    (["--slots", "-1"], "--slots: expected an integer from 0"),
    (["--slots", "100000"], "--slots: expected at most 65536"),
    (["--drift", "11"], "--drift: expected a number in [0, 10], got 11"),
    (["--noise", "nan"], "--noise: expected a number of at least 0"),
    (["--bursts", "2"], "--bursts: expected a number in [0, 1], got 2"),
    (["--seeds", "0"], "--seeds: expected an integer from 1"),
    (["--steps", "100001"], "--steps: expected at most 100000, got 100001"),
    (["--strategies", "best"], "--strategies: expected some of"),
    (["--device", "/nowhere"], "--device: expected one of"),
    (["--imbalance", "100"], "--imbalance: expected a number in"),
    (["--target", "0.5"], "--target: expected a number of at least 1"),
    (["--model", "magic"], "--model: expected one of GLM-4.5-106B, "),
    (["--model", "2048x768x128"], "or sizes as DxFxEXPERTSxTOP_K, e.g. 2048x1408x60x4, got '2048"),
  ],
)
def test_simulate_explains_what_is_wrong(arguments, message, capsys):
  status, _, err = run(capsys, "simulate", *TINY, *arguments)
  assert status == 2 and err.startswith("usage: ultraep simulate")
  assert message in err.splitlines()[-1]


def test_simulate_says_which_file_is_not_there(capsys):
  status, _, err = run(capsys, "simulate", *TINY, "--loads", "/nowhere")
  assert status == 1 and "/nowhere: expected a file, got nothing" in err


@pytest.mark.parametrize(
  ("shape", "given", "message"),
  [
    ((1, 1, 4, 64), [], "--model: expected a model of 64 experts, as {path} has, got Qwen3-235B"),
    ((1, 1, 4, 128), ["--ranks", "8"], "--ranks: expected 4, as {path} has, got 8"),
  ],
)
def test_recorded_loads_say_their_ranks_and_experts(shape, given, message, tmp_path, capsys):
  path = tmp_path / "loads.npy"
  np.save(path, np.full(shape, 16))
  command = ("simulate", "--strategies", "none", "--loads", path)
  status, _, err = run(capsys, *command, *given)
  assert status == 2 and message.format(path=path) in err
  status, out, err = run(capsys, *command, "--model", f"64x32x{shape[-1]}x2")
  assert status == 0, err
  assert ": 4 ranks in domains of 4, " in out and "assumed" not in out


def test_ranks_that_no_loads_say_are_said_to_be_assumed(tmp_path, capsys):
  np.save(tmp_path / "loads.npy", np.full((1, 1, 128), 16))
  command = ("simulate", "--strategies", "none", "--loads", tmp_path / "loads.npy")
  note = "the loads do not say of how many ranks they are: 8 assumed (--ranks)"
  assert note in run(capsys, *command)[1]
  status, out, _ = run(capsys, *command, "--ranks", 4)
  assert status == 0 and note not in out and ": 4 ranks in domains of 4, " in out


@pytest.mark.parametrize(
  ("ranks", "traffic", "reached"), [(1, "drifting", "1"), (2, "phases", "1.6"), (4, "steady", "")]
)
def test_few_ranks_have_the_imbalance_that_they_can_reach(ranks, traffic, reached, capsys):
  command = ("simulate", *ONCE, "--ranks", ranks, "--traffic", traffic)
  status, out, err = run(capsys, *command)
  assert status == 0, err
  note = f"note: imbalance {reached} (--imbalance): these ranks and experts cannot reach the "
  assert note in out if reached else "--imbalance" not in out


@pytest.mark.parametrize(
  ("options", "low", "wanted"),
  [
    ("--model 64x32x64x2 --ranks 64 --domain 8", 2.02, "2 of drifting"),
    ("--model mixtral-8x7b --traffic bursty --seeds 3", 1.52, "1.5 of bursty"),
    ("--model 64x32x8x1 --ranks 8 --noise 10 --steps 40", 2.02, "2 of drifting"),
  ],
)
def test_ranks_of_few_experts_are_as_even_as_they_can_be(options, low, wanted, capsys):
  status, out, err = run(capsys, "simulate", *ONCE, *options.split(), "--json")
  assert status == 0, err
  data = json.loads(out)
  (note,) = (note for note in data["notes"] if "--imbalance" in note)
  assert note.endswith(f": these sizes, drift and noise are not as even as the {wanted} traffic")
  said = [float(part) for part in note.split()[1:4] if part[0].isdigit()]
  found = data["strategies"][0]["imbalance"]["mean"]
  assert said[0] >= low and said[0] - 0.3 <= found <= said[-1] + 0.3


def test_an_imbalance_that_is_asked_for_is_refused_if_ranks_cannot_have_it(capsys):
  command = ("simulate", *ONCE, "--model", "64x32x64x2", "--ranks", 64, "--imbalance", 1.5)
  status, _, err = run(capsys, *command)
  assert status == 2 and "--imbalance: expected a number in [2." in err


EVEN = "--traffic steady --imbalance 1 --strategies none quota --tokens"
SMALL = "--traffic steady --strategies none quota --ranks 8 --tokens 16"


@pytest.mark.parametrize(
  ("options", "cause"),
  [
    (f"{EVEN} 65536", "as the loads are nearly even, busiest over mean rank 1.0"),
    (f"{EVEN} 64 --ranks 1", "as one rank has nothing to balance"),
    (f"{SMALL} --slots 0", "as nothing is copied without replica slots"),
    (f"{SMALL} --domain 1", "as nothing is copied in domains of one rank"),
    (SMALL, "layers this small are faster with"),
  ],
)
def test_says_why_balancing_takes_longer_than_it_saves(options, cause, capsys):
  status, out, err = run(capsys, "simulate", *ONCE, *options.split())
  assert status == 0, err
  (note,) = (line for line in out.splitlines() if "more than it saves" in line)
  assert cause in note and note.count("faster") == 1 and 'strategy="none"' in note


def test_says_that_copies_do_not_leave_domains(capsys, tmp_path):
  load_GE = np.ones((4, 8), np.int32) * np.repeat([3, 1], 4).astype(np.int32)
  np.save(tmp_path / "loads.npy", load_GE[None, None])
  command = ("simulate", "--model", "64x32x8x2", "--loads", tmp_path / "loads.npy", "--domain", 2)
  status, out, err = run(capsys, *command, "--strategies", "none", "quota")
  assert status == 0, err
  assert "as copies do not leave the domains, which differ: " in out


def test_simulate_writes_over_nothing_that_it_reads(tmp_path, capsys):
  trace, loads = traces.write(tmp_path / "trace"), tmp_path / "loads.npy"
  np.save(loads, zipf_loads(0, 128, 8, 64, 8, 1.8)[None, None])
  device, link = tmp_path / "mine.json", tmp_path / "link.json"
  device.write_text('{"format": 1, "like": "h200"}')
  link.symlink_to(trace / "trace.json")
  of_trace = ("--trace", trace, "--model", "Qwen3-235B")
  cases = (
    (("--loads", loads), loads, f"another file than {loads}, which is read, got {loads}"),
    (("--loads", loads, "--device", device), device, f"another file than {device}, which is"),
    (of_trace, trace / "trace.json", "a file that is no part of a trace, got "),
    (of_trace, link, "a file that is no part of a trace, got "),
    (of_trace, min(trace.glob("chunk-*")), "a file that is no part of a trace, got "),
  )
  for read, out, message in cases:
    before = out.read_bytes()
    status, _, err = run(capsys, "simulate", "--strategies", "none", *read, "--out", out)
    assert status == 1 and f"--out: expected {message}" in err
    assert out.read_bytes() == before
  for _ in range(2):  # beside the trace's own files
    command = ("simulate", "--strategies", "none", *of_trace, "--out", trace / "result.json")
    assert run(capsys, *command)[0] == 0


def test_the_largest_divisor_of_a_number_is_at_most_the_number():
  assert largest_divisor(45, 8) == 5 and largest_divisor(12, 10**20) == 12


def test_domains_divide_the_ranks(capsys):
  """Of a machine with eight ranks in one, twelve have six in each."""
  status, out, err = run(capsys, "simulate", *ONCE, "--model", "64x32x24x2", "--ranks", 12)
  assert status == 0, err
  assert "12 ranks in domains of 6" in out


@pytest.mark.parametrize("name", ["qwen3-next", "64x32x16x4"])
def test_simulate_takes_models_of_which_a_layer_alone_is_known(name, capsys):
  status, out, err = run(capsys, "simulate", *ONCE, "--ranks", 2, "--model", name)
  assert status == 0, err
  assert out.startswith(f"{name}: ")
  assert f"note: --model {name} says nothing of attention and other layers: they count as 0" in out


def test_simulate_refuses_other_files(tmp_path, capsys):
  for name, data in (("text.npy", b"no numpy"), ("empty.npy", b"")):
    (tmp_path / name).write_bytes(data)
    assert cli.main(["simulate", *TINY, "--loads", str(tmp_path / name)]) == 1
    assert "expected a whole .npy file" in capsys.readouterr().err
  np.savez(tmp_path / "many.npz", a=np.zeros(3))
  assert cli.main(["simulate", *TINY, "--loads", str(tmp_path / "many.npz")]) == 1
  assert "expected a whole .npy file, got something else" in capsys.readouterr().err
  np.save(tmp_path / "floats.npy", np.full((1, 1, 8, 128), np.nan))
  assert cli.main(["simulate", *TINY, "--loads", str(tmp_path / "floats.npy")]) == 1
  assert "integers of at least 0" in capsys.readouterr().err


@pytest.mark.slow
def test_paper_repeats_the_evaluation(tmp_path, monkeypatch, capsys):
  """What the evaluation has to show, with half the steps of ``--quick``."""
  few = paper.QUICK._replace(steps=20)
  for module in (paper, paper_command):
    monkeypatch.setattr(module, "QUICK", few)
  assert cli.main(["paper", "--quick", "--out", str(tmp_path)]) == 0
  out = capsys.readouterr().out
  assert "published" in out and "the paper" in out and "assumed" in out
  assert {path.name for path in tmp_path.iterdir()} >= {"paper.json", "paper.png", "planner.png"}
  report = json.loads((tmp_path / "paper.json").read_text())["report"]
  rows = {(row["case"], row["strategy"]): row for row in report["rows"]}
  for case in published.CASES:
    none, quota = rows[case.name, "none"], rows[case.name, "quota"]
    assert none["imbalance"]["mean"] == pytest.approx(case.imbalance["none"], rel=0.15)
    assert 1.0 <= quota["imbalance"]["mean"] <= 1.04
    assert quota["share"]["mean"] > rows[case.name, "eplb"]["share"]["mean"]
    if case.training:
      assert abs(quota["share"]["mean"] - case.published_share("quota")) <= 0.03
    for name in ("eplb", "lplb"):
      assert 1.0 <= rows[case.name, name]["imbalance"]["mean"] <= 3.0
  for row in report["balance"]:
    assert row["bound"] - 1e-9 <= row["after"] <= max(1.04, row["bound"] + 0.01)


@pytest.mark.slow
def test_sweep_to_2560_ranks_is_quick():
  start = time.perf_counter()
  points = scaling.sweep((64, 2560), microbatches=6, strategies=("none", "quota"))
  assert time.perf_counter() - start < 38
  by_name = {(p.ranks, p.strategy): p for p in points}
  for ranks in (64, 2560):
    none, quota = by_name[ranks, "none"], by_name[ranks, "quota"]
    assert none.share < quota.share < 1 and quota.imbalance <= 1.011


def test_paper_says_where_it_cannot_write(tmp_path, capsys):
  (tmp_path / "file").write_text("")
  for path in (tmp_path / "file", tmp_path / "file" / "figures"):
    status, out, err = run(capsys, "paper", "--quick", "--out", path)
    assert (status, out) == (1, "")
    assert f"{path}: expected a folder to write in, got a file" in err


def test_sweep_in_domains_has_their_floor():
  (point,) = scaling.sweep((16,), domain_size=8, kind="wide", microbatches=2, strategies=("quota",))
  assert 1 < point.floor <= point.imbalance <= point.floor * 1.05
  with pytest.raises(ValueError, match="ranks: expected multiples of 8, got 12"):
    scaling.sweep((12,), domain_size=8)
  with pytest.raises(ValueError, match="kind: expected one of"):
    scaling.sweep((8,), kind="deep")


def test_published_shares():
  case = published.CASES[0]
  assert case.published_share("quota") == pytest.approx(0.964, abs=1e-3)
  assert case.published_share("exact") is None
  setting = paper.case_setting(case, Device.load("nvl64"))
  assert setting.num_ranks == 64 and setting.training
