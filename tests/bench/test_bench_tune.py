"""What ``bench tune`` chooses and writes, from times that are planted; contests on the CPU."""

import argparse
import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from grouped_rows import interpreted

from pallas_kernels import support
from pallas_kernels.matmul.layout import MatmulTuning
from pallas_kernels.transfer.tuning import TransferTuning
from pallas_kernels.tunings import Entry, Tunings
from ultraep_jax.bench import contest, timing
from ultraep_jax.bench.contest import NO_TIME, Contest, Outcome, Pace, choose
from ultraep_jax.bench.kernels import by_copies, grouped_matmul, matmul_problems
from ultraep_jax.bench.tune import command as tune
from ultraep_jax.bench.tune import description
from ultraep_jax.bench.tune import matmuls as tune_matmuls
from ultraep_jax.bench.tune import transfers as tune_transfers
from ultraep_jax.devices import known
from ultraep_jax.devices.device import Device

KIND = jax.devices("cpu")[0].device_kind


@pytest.fixture
def interpreting(monkeypatch):
  """Kernels interpreted, which takes long: programs run to be compared, and once to be timed."""
  monkeypatch.setattr(timing, "_WARM_UP", 0)
  with interpreted():
    yield


# --- contests --------------------------------------------------------------------------------


def square(count=1):
  return lambda first, rest: (first + 1, count * rest[0] @ rest[0])


def broken(first, rest):
  raise NotImplementedError("not here")


def problem(**programs):
  def make():
    return jnp.zeros(3), (jax.random.normal(jax.random.key(0), (64, 64)),)

  programs = {"default": square(), **programs}
  return Contest("square", make, programs, "default", others={"other": square(2)})


@pytest.mark.parametrize("workers", [1, 3])
def test_only_what_is_right_is_timed(workers):
  contests = [problem(wrong=square(1.1), same=square(), broken=broken)] * 2
  found = list(contest.hold(contests, Pace(workers=workers, calls=2, rounds=3)))
  assert [each for each, _ in found] == contests
  for _, outcome in found:
    assert {name: len(times) for name, times in outcome.seconds.items()} == {
      "default": 3,
      "same": 3,
    }
    assert outcome.failures == {
      "wrong": "differs by 1.0e-01",
      "broken": "NotImplementedError: not here",
    }
    assert list(outcome.others) == ["other"]


def test_nan_is_never_right():
  nothing = problem(nan=lambda first, rest: (first + 1, rest[0] * jnp.nan))
  ((_, outcome),) = contest.hold([nothing], Pace(workers=1, calls=1, rounds=1))
  assert outcome.failures == {"nan": "differs by inf"}


def test_nothing_is_begun_when_the_time_is_over():
  found = list(contest.hold([problem()] * 3, Pace(end=0.0)))
  assert [outcome.failures for _, outcome in found] == [{"default": NO_TIME}] * 3


@pytest.mark.parametrize(
  ("seconds", "expected", "gain"),
  [
    ({"default": [1.0] * 5}, "default", 0.0),
    ({"default": [1.0] * 5, "a": [0.995] * 5}, "default", 0.0),  # below the least gain
    ({"default": [1.0] * 5, "a": [0.8] * 5, "b": [0.5] * 5}, "b", 1.0),
    # All are slower in some rounds: what counts is the round's ratio.
    ({"default": [1.0, 1.1, 1.3, 1.2], "a": [0.9, 1.0, 1.2, 1.1]}, "a", 0.0955),
    # Noise: better in the median, worse in too many rounds.
    ({"default": [1.0] * 5, "a": [0.9, 0.9, 0.9, 1.2, 1.2]}, "default", 0.0),
    ({"default": [1.0] * 5, "a": [1.2] * 5}, "default", 0.0),
  ],
)
def test_the_fastest_is_chosen_if_there_is_no_doubt(seconds, expected, gain):
  choice = choose(seconds, "default", 0.01)
  assert choice.name == expected and choice.gain == pytest.approx(gain, abs=1e-3)


# --- the program -----------------------------------------------------------------------------


def arguments(*words):
  parser = argparse.ArgumentParser()
  tune.add_arguments(parser)
  return parser.parse_args([*words, "--scale", "32"])


def planted(times):
  """Outcomes with these seconds, label by label; ``None``: no time was left for the label."""

  def hold(contests, pace):
    for each in contests:
      given = {label: times.get(label, 1.0) for label in each.programs}
      seconds = {label: [value] * pace.rounds for label, value in given.items() if value}
      failures = {label: NO_TIME for label, value in given.items() if not value}
      yield each, Outcome(seconds, failures, {"dense": [0.5] * pace.rounds})

  return hold


def test_what_is_found_is_written_and_merged(tmp_path, monkeypatch, capsys):
  path = tmp_path / "table.json"
  words = ["--shapes", "qwen3-235b", "deepseek-v3", "--write", str(path), "--operations"]
  monkeypatch.setattr("sys.argv", ["ultraep bench tune", *words, "gated"])
  monkeypatch.setattr(contest, "hold", planted({"deferred": 0.8, "in turns": 0.9}))
  tune.run(arguments(*words, "gated", "wgrad up"))
  table = json.loads(path.read_text())
  assert table["kinds"] == [KIND] and table["like"] == "h200"
  found = {(e["operation"], *e["widths"]): e for e in table["tunings"]}
  assert list(found) == [
    ("gated", 128, 64),
    ("gated", 256, 64),
    ("wgrad", 128, 64),
    ("wgrad", 256, 64),
  ]
  measured = found["gated", 128, 64]["measured"]
  assert measured["command"] == (
    "ultraep bench tune --shapes qwen3-235b deepseek-v3 --operations gated"
  )
  assert measured["gain"] == 0.25 and measured["us"] == 8e5
  tunings = Device.load(path).tunings
  assert tunings.find("gated", 128, 64) == MatmulTuning("deferred", even=False)
  assert tunings.find("wgrad", 128, 64) == MatmulTuning("in_turns", stages=6)
  lines = capsys.readouterr().out.splitlines()
  assert [line.endswith("+25.0% *") for line in lines if " deferred  " in line] == [True, True]
  assert any(" 0.438 " in line for line in lines)  # of 256 rows, 224 are used

  # Once more: what is better now replaces what was, what is not measured to the end does not.
  monkeypatch.setattr(contest, "hold", planted({"deferred": None, "in turns": 2.0}))
  tune.run(arguments(*words, "gated", "wgrad up"))
  tunings = Device.load(path).tunings
  assert tunings.find("gated", 128, 64) == MatmulTuning("deferred", even=False)
  assert tunings.find("wgrad", 128, 64) is None
  assert len(json.loads(path.read_text())["tunings"]) == 4


def test_a_description_of_another_device_is_left_alone(tmp_path):
  path = tmp_path / "mine.json"
  description.save(path, {"format": 1, "like": "h200", "kinds": ["NVIDIA H200"]})
  with pytest.raises(ValueError, match=f"expected a description of {KIND}, got one of"):
    tune.run(arguments("--write", str(path)))


@pytest.mark.parametrize("name", Device.names())
def test_descriptions_of_the_package_are_as_they_are_written(name, tmp_path):
  """So that a run that changes a number changes its lines alone."""
  text = (pathlib.Path(known.__file__).parent / f"{name}.json").read_text()
  description.save(tmp_path / "again.json", json.loads(text))
  assert (tmp_path / "again.json").read_text() == text


@pytest.mark.parametrize("name", ["forward up", "dgrad down", "wgrad up"])
def test_all_programs_of_a_problem_compute_the_same(name):
  """Peers, on the CPU, where the kernels do not run."""
  small = matmul_problems.Problem.of(name, "deepseek-v3", 256, scale=64)
  peers = small.parts().peers
  pace = Pace(workers=1, calls=1, rounds=1)
  ((_, outcome),) = contest.hold([small.contest(peers)], pace)
  assert set(outcome.seconds) == set(peers) and not outcome.failures
  assert list(outcome.others) == ["dense"]


@pytest.mark.parametrize(
  ("name", "kept"), [("gated gpt-oss", 1), ("gated only gpt-oss", 0), ("gated beside", 2)]
)
def test_a_gated_problem_lowers_for_gpus(name, kept):
  problem = matmul_problems.Problem.of(name, "gpt-oss-120b", 512)
  competing = problem.contest({"kernel": problem.parts().kernel})
  shapes = jax.eval_shape(competing.make)
  program = jax.jit(competing.programs["kernel"])
  lowered = program.trace(*shapes).lower(lowering_platforms=("cuda",))
  assert "custom_call @mosaic_gpu" in lowered.as_text()
  inner, *hidden = jax.tree.leaves(lowered.out_info)
  assert inner.shape == (512, 2880) and len(hidden) == kept
  jax.eval_shape(competing.others["dense"], *shapes)


@pytest.mark.parametrize(
  "name", [name for name, operation in matmul_problems.PROBLEMS.items() if "beside" in operation]
)
def test_a_problem_beside_a_transfer_lowers(name):
  problem = matmul_problems.Problem.of(name, "glm4.5-106b", 1024)  # few: no even tiles
  tunings = tune_matmuls.candidates(problem, more=True)
  assert tunings and all(each.cluster == 1 for each in tunings.values())
  # Where replicas arrive, rows of home slots come first, whatever is asked for.
  assert not (problem.replicas_arrive and {"short last", "by slot"} & set(tunings))
  for tuning in list(tunings.values())[:2]:
    competing = tune_matmuls.contest(problem, {"tuned": tuning})
    program = jax.jit(competing.programs["tuned"])
    shapes = jax.eval_shape(competing.make)
    text = program.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward down beside", "gated beside", "gated only beside"])
def test_what_is_multiplied_by_copies_is_the_same(name, monkeypatch, interpreting):
  """Interpreted. That rows wait for their copies is tested in ``test_kernel_beside``."""
  monkeypatch.setattr(by_copies, "COPYING", TransferTuning(1, 3, 1024))
  monkeypatch.setattr(support, "num_sms", lambda: 1)  # of the peer, too
  problem = matmul_problems.Problem(name, "small", 256, 128, 64, home=3, replica=2)
  parts = problem.parts()
  kernels = {"kernel": functools.partial(parts.kernel, tuning=MatmulTuning(blocks=1))}
  competing = problem.contest({**kernels, **parts.peers})
  competing = dataclasses.replace(competing, most_error=0.0)
  ((_, outcome),) = contest.hold([competing], Pace(workers=1, calls=1, rounds=1))
  assert set(outcome.seconds) == {"kernel", "whole"} and not outcome.failures


def test_matmuls_are_timed_as_the_table_says(monkeypatch, capsys):
  def hold(contests, pace):
    for each in contests:
      yield each, Outcome({name: [1e-3] for name in each.programs}, {}, {"dense": [1e-3]})

  seen = {}

  def competing(problem, kernels):
    seen[problem.name] = kernels["kernel"].keywords["tuning"]
    return Contest(problem.title, lambda: ((), ()), kernels, "kernel")

  table = Tunings((Entry(operation="forward", widths=(), tuning=MatmulTuning("deferred")),))
  device = dataclasses.replace(Device.load("h200"), tunings=table)
  monkeypatch.setattr(known, "find", lambda kind: device)
  monkeypatch.setattr(contest, "hold", hold)
  monkeypatch.setattr(matmul_problems.Problem, "contest", competing)
  names = ["forward up", "sum beside"]
  problems = [matmul_problems.Problem.of(name, "qwen3-235b", 256, scale=32) for name in names]
  grouped_matmul.time_problems(problems, False, Pace())
  assert seen == {"forward up": MatmulTuning("deferred"), "sum beside": MatmulTuning()}
  assert capsys.readouterr().out.count(" 1000 ") == 2


# --- transfers -------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", tune_transfers.OPERATIONS)
def test_transfers_lower_for_gpus(operation):
  """And the other candidates' tunings may stand in a table; full size, on two devices."""
  mesh = jax.make_mesh((2,), ("expert",), devices=jax.devices()[:2])
  problem = matmul_problems.Problem.of("sum beside", "glm4.5-106b", 32768)
  candidates = tune_transfers.candidates(operation, 2, 65536)
  widths = tune_transfers.widths(operation, problem)
  for tuning in candidates.values():
    description.entry(operation, widths, tuning, {})
  label, tuning = next(iter(candidates.items()))
  competing = tune_transfers.contest(operation, problem, {label: tuning}, mesh)
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=competing.sharding),
    jax.eval_shape(competing.make),
  )
  program = jax.jit(competing.programs[label], donate_argnums=0)
  lowered = program.trace(*shapes).lower(lowering_platforms=("cuda",))
  assert lowered.as_text().count("custom_call @mosaic_gpu") == 1
  jax.eval_shape(competing.used, lowered.out_info, shapes[1])


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["replicate", "reduce", "dispatch", "combine"])
def test_transfers_of_any_tuning_give_the_same(operation, interpreting):
  """Interpreted, also where unused rows and empty slots hold what was there."""
  mesh = jax.make_mesh((2,), ("expert",), devices=jax.devices()[:2])
  problem = matmul_problems.Problem.of("sum beside", "qwen3-235b", 256, scale=64)
  small = dataclasses.replace(tune_transfers.default(operation, 2, 256), blocks=1, workers=1)
  tunings = {"default": small, "small": dataclasses.replace(small, tile_bytes=4096)}
  competing = tune_transfers.contest(operation, problem, tunings, mesh)
  ((_, outcome),) = contest.hold([competing], Pace(workers=1, calls=1, rounds=1))
  assert list(outcome.seconds) == ["default", "small"] and not outcome.failures
