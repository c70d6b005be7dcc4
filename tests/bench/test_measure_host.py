"""The figures of a host: what is run in which order, and what is compiled before."""

import argparse
import shlex
import types

import measure_host
import pytest
from measure_host import STEPS, Makers, Step

from ultraep_jax import cli
from ultraep_jax.bench.matrix import cells
from ultraep_jax.bench.prefill import command as prefill
from ultraep_jax.bench.train import command as train
from ultraep_jax.bench.tune import costs
from ultraep_jax.tools import processes


def arguments(tmp_path, *steps, **changes):
  usual = {"programs": tmp_path, "results": tmp_path, "gpu": "h100", "ranks": 4, "workers": 0}
  return argparse.Namespace(**usual | {"steps": steps} | changes)


@pytest.mark.parametrize("name", STEPS)
def test_a_bench_takes_the_arguments_of_a_step_and_of_its_parts(name, monkeypatch):
  monkeypatch.setattr(processes, "run", lambda *_: 0)
  monkeypatch.setattr(costs, "devices_for_kernels", lambda: None)
  for command in (prefill, train, costs):
    monkeypatch.setattr(command, "run", lambda _: 0)
  assert cli.main(["bench", *shlex.split(STEPS[name].bench)]) == 0
  if STEPS[name].made:
    for part in measure_host.parts(STEPS[name]):
      assert cli.main(["bench", *part]) == 0


def test_parts_are_of_one_shape_and_pass_and_leave_none_out():
  options = {"pairwise": True}
  groups = cells.choose(
    ["olmoe", "kimi-k2"], [32, 2048], cells.RATIOS, cells.LOADS, cells.PASSES, **options
  )
  found = {
    cells.Group(part[-5], int(part[-3]), part[-1])
    for part in measure_host.parts(Step("matrix --shapes olmoe kimi-k2 --tokens 32 2048", 1, True))
  }
  assert found == set(groups)
  parts = list(measure_host.parts(Step("layer --shapes olmoe kimi-k2 --data 2", 1, True)))
  assert [part[:3] for part in parts] == [("layer", "--data", "2")] * 4
  assert [part[-3] for part in parts] == ["olmoe", "olmoe", "kimi-k2", "kimi-k2"]


def test_a_step_waits_for_its_own_programs_and_so_many_are_compiled_at_a_time(
  tmp_path, monkeypatch
):
  started, clock = [], types.SimpleNamespace(now=0.0)

  class Process:
    def __init__(self, part):
      started.append(part)
      self.end, self.last = clock.now + 10, len(started) == 5

    def poll(self):
      return int(self.last) if clock.now >= self.end else None

  def sleep(_):
    clock.now += 1
    assert sum(process.poll() is None for process in makers.running.values()) <= 2

  monkeypatch.setattr(
    measure_host, "time", types.SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep)
  )
  monkeypatch.setattr(Makers, "_make", lambda _, part: Process(part))
  makers = Makers(arguments(tmp_path, "forward", "pairs", "text", workers=2))
  assert makers.left() == 5
  makers.wait(["text"], 100)
  assert clock.now == 0 and len(started) == 2
  makers.wait(["forward"], 100)
  assert round(clock.now) == 20 and started[:3] == list(measure_host.parts(STEPS["forward"]))
  makers.wait(["pairs"], 25)  # the time is up
  assert clock.now == 26 and makers.left() == 1
  clock.now = 30
  makers.start()
  assert makers.failed == [" ".join(started[-1])]


def test_steps_share_parts():
  """gpt-oss-120b and Kimi-K2 at 8192 tokens, forward."""
  makers = Makers(arguments(None, "models", "pairwise", workers=1))
  groups = {step: set(measure_host.parts(STEPS[step])) for step in ("models", "pairwise")}
  assert groups["models"] & groups["pairwise"]
  assert makers.left() == len(groups["models"] | groups["pairwise"])


def test_steps_that_fail_or_take_too_long_are_told_of(tmp_path, monkeypatch, capsys):
  steps = {"good": Step("matrix --help", 100), "bad": Step("matrix --nonsense", 100)}
  steps["long"] = Step("matrix --help", 0)
  monkeypatch.setattr(measure_host, "STEPS", steps)
  args, started = arguments(tmp_path, *steps), []
  makers = Makers(args)
  monkeypatch.setattr(makers, "start", lambda: started.append(1))
  assert measure_host.measure(args, makers, measure_host.time.monotonic() + 1000) == 1
  said = capsys.readouterr().out
  assert "good: done" in said and "bad: failed (2)" in said and "long: stopped after 0 s" in said
  assert "all: bad (failed (2)), long (stopped" in said
  assert "usage" in (tmp_path / "good.log").read_text()
  assert len(started) > len(steps) + 1  # while steps run, too
  assert measure_host.measure(args, makers, measure_host.time.monotonic()) == 1
  assert "good (no time), bad (no time), long (no time)" in capsys.readouterr().out


def test_programs_are_compiled_for_the_gpus_of_the_host(tmp_path, monkeypatch, capsys):
  measured = []
  monkeypatch.setattr(measure_host, "gpu_here", lambda: "h200")
  monkeypatch.setattr(measure_host, "measure", lambda args, *_: measured.append(args.gpu))
  usual = ["measure_host.py", str(tmp_path), str(tmp_path), "--ranks", "4"]
  monkeypatch.setattr("sys.argv", usual)
  measure_host.main()
  monkeypatch.setattr("sys.argv", [*usual, "--gpu", "h200"])
  measure_host.main()
  assert measured == ["h200", "h200"]
  for wrong, said in (
    (["--gpu", "h100"], "expected that of this host, h200, got h100"),
    (["--make", "--workers", "1"], "--make: expected --gpu"),
    (["--steps", "two_train"], "on 4 GPUs, got ['two_train']"),
    (["--ranks", "1"], "--ranks: expected at least 2, got 1"),
  ):
    monkeypatch.setattr("sys.argv", [*usual, *wrong])
    with pytest.raises(SystemExit):
      measure_host.main()
    assert said in capsys.readouterr().err


def test_a_host_without_gpus_is_told_of():
  with pytest.raises(SystemExit, match="expected GPUs with a description, got"):
    measure_host.gpu_here()


def test_two_gpus_have_steps_of_their_own():
  two, four = map(measure_host.steps_for, (2, 4))
  assert two == [name for name in STEPS if name in two] and "two_train" in two
  assert {"train", "pairwise", "models"} <= set(four) - set(two)
  assert {"exchange", "moves", "stress_layer"} <= set(two) & set(four)
  assert set(two) | set(four) == set(STEPS)
