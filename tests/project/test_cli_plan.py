"""``plan`` from the command line: files and generated loads, what it prints and what it refuses."""

import json
import re
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import traces
from command_line import run

from ultraep_jax import testing
from ultraep_jax.commands import plan
from ultraep_jax.config import BalanceConfig
from ultraep_jax.types import Plan


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


def test_plan_reads_files_as_other_programs_write_them(tmp_path, capsys):
  """With a byte order mark, an upper-case suffix, and numbers of 16 bits; no warning is printed."""
  load_GE = np.minimum(traces.loads(3), 100)
  text = "\n".join(",".join(map(str, row)) for row in load_GE)
  (tmp_path / "loads.CSV").write_bytes(b"\xef\xbb\xbf" + text.encode())
  np.save(tmp_path / "half.npy", load_GE.astype(np.float16))
  for name in ("loads.CSV", "half.npy"):
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      status, out, _ = run(capsys, "plan", tmp_path / name, "--json")
    assert status == 0
    assert_is_the_plan_of(json.loads(out), load_GE, traces.CONFIG)


def test_plan_shows_no_load_as_even(tmp_path, capsys):
  np.save(tmp_path / "zeros.npy", np.zeros((4, 8), int))
  _, text, _ = run(capsys, "plan", tmp_path / "zeros.npy")
  assert "1.000 before, 1.000 after (the domains allow 1.000)" in text
  assert "even: the busiest rank has 1.00 times the mean" in text


@pytest.mark.parametrize(
  ("shape", "arguments", "message"),
  [
    ((4, 8), ["--experts", "5"], "--experts: expected 8, as {path} has, got 5"),
    ((4, 8), ["--ranks", "2"], "--ranks: expected 4, as {path} has, got 2"),
    ((8,), ["--ranks", "4", "--experts", "16"], "--experts: expected 8, as {path} has, got 16"),
    ((8,), ["--ranks", "3"], "--ranks: expected a divisor of 8 experts, got 3"),
    ((8,), [], "--ranks: expected the ranks to deal the row of loads in {path} to, got none"),
    ((4, 8), ["--ranks", "4", "--experts", "8"], ""),
    ((8,), ["--ranks", "4", "--experts", "8"], ""),
  ],
)
def test_plan_compares_a_file_with_the_numbers_given(shape, arguments, message, tmp_path, capsys):
  path = tmp_path / "loads.npy"
  np.save(path, np.ones(shape, int))
  status, _, err = run(capsys, "plan", path, *arguments)
  assert status == (2 if message else 0) and message.format(path=path) in err


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


@pytest.mark.parametrize("workload", plan._WORKLOADS)
def test_plan_says_what_generated_the_loads(workload, capsys):
  """An option is named where other values of it make other loads, and nowhere else."""
  sizes = ("--ranks", 4, "--experts", 8, "--tokens", 127, "--top-k", 1, "--slots", 0)

  of_ratio, of_seed = workload in plan._OF_RATIO, workload != plan._FIXED

  def answer(ratio, seed, *options):
    made = ["--workload", workload]
    made += ["--ratio", ratio] * of_ratio + ["--seed", seed] * of_seed
    return run(capsys, "plan", *sizes, *made, *options)[1]

  def planned(ratio, seed):
    result = json.loads(answer(ratio, seed, "--json"))
    return result.pop("generated"), result

  said, before = planned(1.5, 3)
  assert f"generated loads: {said} (give a FILE" in answer(1.5, 3)
  assert said.split(", ")[0] == workload
  assert of_ratio == (planned(1.9, 3)[1] != before) == ("--ratio 1.5" in said)
  assert of_seed == (planned(1.5, 4)[1] != before) == ("--seed 3" in said)
  for used, option in ((of_ratio, "--ratio"), (of_seed, "--seed")):
    status, _, err = run(capsys, "plan", *sizes, "--workload", workload, option, 1)
    assert status == 0 if used else status == 2
    assert used or re.search(rf"{option}: expected .* with it, got {workload}$", err.strip())


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


def test_plan_has_homes_send_all_copies_in_plain_jax(capsys):
  """A hot expert of rank 5 goes to three ranks: by relays on kernels, and not without."""
  weighed = ("--objective", "time", "--width", 4096, "--inner", 1536)

  def answer(device):
    return json.loads(run(capsys, "plan", *weighed, "--device", device, "--json")[1])

  kernels, plain = answer("h200"), answer("a100")
  assert kernels["relayed"] > 0 and kernels["busiest_sender"] == 1 and kernels["depth"] > 1
  homes = [copy["expert"] // 8 for copy in plain["replicas"]]
  assert [copy["from"] for copy in plain["replicas"]] == homes
  assert plain["busiest_sender"] == max(map(homes.count, homes)) > 1
  assert plain["relayed"] == 0 and plain["depth"] == 1


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.csv", "1,2\n3", "expected loads in csv"),
    ("a.csv", "1,nan\n3,4", "expected whole numbers, got nan"),
    ("a.csv", "1,-2\n3,4", r"expected loads in \[0, 2\*\*31\), got -2 to 4"),
    ("a.csv", "1,2\n3.5,4", "expected whole numbers, got 3.5"),
    ("a.csv", "1e12,2\n3,4", r"expected loads in \[0, 2\*\*31\)"),
    ("a.csv", "1,2,3\n3,4,5", r"expected shape \[G, E\], E a positive multiple of G"),
    ("a.csv", "<script>", "expected loads in csv"),
    ("a.json", "[[1, 2], [3]]", "expected loads in json"),
    ("a.json", '{"a": 1}', r"expected whole numbers, got \{'a': 1\}"),
    ("a.json", "[[1, null]]", "expected whole numbers, got None"),
    ("a.json", "[[1, 1e400]]", "expected whole numbers, got inf"),
    ("a.json", f"[[1, {2**70}]]", f"expected whole numbers, got {2**70}"),
    ("a.json", "[[[1]]]", r"expected shape \[G, E\] or \[E\], got \[1, 1, 1\]"),
    ("a.json", "[[], []]", r"at least one rank and one expert, got shape \[2, 0\]"),
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
  "given", ["--tokens 5", "--top-k 1", "--workload flat", "--ratio 3", "--seed 0"]
)
def test_plan_refuses_options_of_generated_loads_beside_a_file(given, tmp_path, capsys):
  np.save(tmp_path / "loads.npy", traces.loads(3))
  status, out, err = run(capsys, "plan", tmp_path / "loads.npy", *given.split())
  assert status == 2 and not out
  assert f"{given.split()[0]}: expected no FILE with it, which has its loads, got " in err


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0,), (0, 0), (2, 0, 3)], ids=str)
def test_plan_refuses_files_without_loads(shape, tmp_path, capsys):
  np.save(tmp_path / "loads.npy", np.zeros(shape, int))
  for ranks in ([], ["--ranks", 2]):
    status, out, err = run(capsys, "plan", tmp_path / "loads.npy", *ranks)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert f"expected loads of at least one rank and one expert, got shape {list(shape)}" in err


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--slots", "-1"], "--slots: expected an integer from 0 to 2147483647, got '-1'"),
    (["--ranks", "0"], "--ranks: expected an integer from 1 to 2147483647, got '0'"),
    (["--ranks", "7", "--experts", "64"], "--experts: expected a multiple of 7 ranks, got 64"),
    (["--ranks", "2147483647"], "--ranks: expected ranks * tokens * top_k and ranks * experts"),
    (["--tokens", "10000000000"], "--tokens: expected an integer from 1 to 2147483647"),
    (["--tokens", "1000000000"], "--tokens: expected ranks * tokens * top_k and ranks * experts"),
    (["--experts", "2000000000", "--top-k", "1"], "--experts, --top-k: expected ranks * tokens"),
    (["--top-k", "65"], "--top-k: expected a number in [1, 64], got 65"),
    (["--slots", "100000"], "--slots: expected at most 65536"),
    (["--slots", "65"], "--slots: expected at most 64 experts, got 65"),
    (["--seed", "-1"], "--seed: expected an integer from 0"),
    (["--ratio", "nan"], "--ratio: expected a number of at least 1"),
    (["--ratio", "60"], "--ratio: expected a number in [1, "),
    (["--target", "inf"], "--target: expected a number of at least 1"),
    (["--min-tokens", "0"], "--min-tokens: expected an integer from 1"),
    (["--domain", "3"], "--domain: expected a divisor of 8 ranks, got 3"),
    (["--domain", "0"], "--domain: expected an integer from 1"),
    (["--strategy", "magic"], "--strategy: expected one of"),
    (["--strategy", "ideal"], "replaces the router's choice and plans nothing"),
    (["--device", "h200"], "--device: expected --objective time with it"),
    (["--objective", "time"], "expected --width and --inner"),
    (["--width", "64"], "--width, --inner: expected both or none"),
    (["--width", "64", "--inner", "0"], "--inner: expected an integer from 1"),
    (["--objective", "time", "--device", "/none"], "--device: expected one of"),
  ],
)
def test_plan_refuses_wrong_numbers(arguments, message, capsys):
  if "/none" in arguments:
    arguments = [*arguments, "--width", "64", "--inner", "64"]
  status, _, err = run(capsys, "plan", *arguments)
  assert status == 2 and err.startswith("usage: ultraep plan")
  assert message in err.splitlines()[-1]


@pytest.mark.parametrize(
  ("given", "sizes", "slots", "made"),
  [
    ([], (8, 64), 2, "zipf, --ratio 2, --seed 0"),
    (["--ranks", 1], (1, 64), 0, "zipf, --ratio 1, --seed 0"),
    (["--ranks", 2], (2, 64), 2, "zipf, --ratio 1.66, --seed 0"),
    (["--ranks", 1, "--workload", "flat"], (1, 64), 0, "flat, --ratio 1, --seed 0"),
    (["--ranks", 7], (7, 70), 2, "zipf, --ratio 2, --seed 0"),
    (["--ranks", 128], (128, 128), 2, "zipf, --ratio 2, --seed 0"),
    (["--experts", 12], (6, 12), 2, "zipf, --ratio 1.5, --seed 0"),
    (["--experts", 1], (1, 1), 0, "zipf, --ratio 1, --seed 0"),
  ],
)
def test_plan_has_defaults_that_fit_what_is_given(given, sizes, slots, made, capsys):
  status, out, err = run(capsys, "plan", *given, "--json")
  assert status == 0, err
  answer = json.loads(out)
  assert (answer["ranks"], answer["experts"]) == sizes
  assert (answer["replica_slots"], answer["generated"]) == (slots, made)


def test_plan_takes_a_file_of_one_rank(tmp_path, capsys):
  np.save(tmp_path / "loads.npy", np.array([[3, 1]]))
  status, out, err = run(capsys, "plan", tmp_path / "loads.npy", "--json")
  assert status == 0, err
  assert json.loads(out)["copies"] == 0
