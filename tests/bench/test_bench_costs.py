"""What ``bench costs`` makes of times, planted ones, and that what it times lowers for GPUs."""

import argparse
import re

import jax
import numpy as np
import pytest
from programs import kernels

import pallas_kernels
from ultraep_jax.bench import contest, timing
from ultraep_jax.bench.contest import Outcome
from ultraep_jax.bench.kernels import beside
from ultraep_jax.bench.kernels.matmul_problems import Problem
from ultraep_jax.bench.tune import costs
from ultraep_jax.config import BalanceConfig
from ultraep_jax.devices.device import Device
from ultraep_jax.planning import cost, plan
from ultraep_jax.tools.errors import CommandError

H200 = Device.load("h200")


def mesh_of(ranks):
  auto = (jax.sharding.AxisType.Auto,)
  return jax.make_mesh((ranks,), ("expert",), axis_types=auto, devices=jax.devices()[:ranks])


def test_rates_are_those_that_the_planner_would_take_the_seconds_from():
  """Seconds as the cost model has them, spread over the parts, give its rates back."""
  problem = Problem.of("gated only", "qwen3-235b", 32768)
  widths, seconds = (4096, 1536), {}
  padded = 128 * np.ceil(problem.sizes / 128).sum()
  assert padded > problem.sizes.sum()
  for direction, parts in (("forward", costs.FORWARD), ("backward", costs.BACKWARD)):
    total = padded * cost.row_seconds(H200, *widths, direction)
    total += np.count_nonzero(problem.sizes) * cost.reading_seconds(H200, *widths, direction)
    seconds |= {name: total / sum(parts.values()) for name in parts}
  found = costs.rates(H200, problem, seconds)
  assert found.widths == widths
  assert found.forward == pytest.approx(H200.matmul_rate(*widths))
  assert found.backward == pytest.approx(H200.matmul_rate(*widths, backward=True))


def test_facts_from_seconds():
  assert costs.launch_facts({"8": 30e-6, "72": 190e-6}) == {"launch_seconds": pytest.approx(2.5e-6)}
  size = 2 * 3 * 4096 * 1536
  copied = costs.copy_facts({"1": 50e-6 + size / 350e9, "4": 50e-6 + 4 * size / 350e9})
  assert copied == {"copy_rate": pytest.approx(350e9)}
  times = {"copies known": 2685e-6, "copies before": 2941e-6, "beside, copying": 2746e-6}
  assert costs.beside_facts(times) == {"copy_exposed_forward": pytest.approx(61 / 256)}
  times = {
    "none": 3e-4,
    "none, with gradients": 9e-4,
    "quota": 4e-4,
    "quota, with gradients": 95e-5,
  }
  assert costs.balance_facts(times) == {
    "balance_seconds": pytest.approx(1e-4),
    "balance_training_seconds": pytest.approx(5e-5),
  }
  hidden = times | {"quota": 2.9e-4}  # by noise
  assert set(costs.balance_facts(hidden)) == {"balance_training_seconds"}


def test_many_copies_are_of_other_ranks_and_sent_by_their_homes():
  rows_GP, expert_GGS, parent_GGS = costs.many_copies(3, 240)
  assert rows_GP.sum(axis=1).tolist() == [240] * 3
  for expert_GS, parent_GS in zip(expert_GGS, parent_GGS, strict=True):
    assert (expert_GS // beside.HOME == parent_GS).all()
    assert (parent_GS != np.arange(3)[:, None]).all()
    assert all(len(set(expert_S)) == costs.MANY for expert_S in expert_GS.tolist())


def test_what_is_measured_is_written(tmp_path, monkeypatch, capsys):
  def hold(contests, pace):
    for each in contests:
      yield each, Outcome({"kernel": [1e-3] * 3} if "qwen3-235b" in each.title else {}, {})

  times = {"8": 30e-6, "72": 190e-6, "none": 1e-4, "none, with gradients": 15e-5}

  def in_turn(runs, repeats, calls):
    return {name: [times.get(name, 2e-4)] for name in runs}

  monkeypatch.setattr(costs, "devices_for_kernels", lambda: None)
  monkeypatch.setattr(pallas_kernels, "has_instructions", lambda device: True)  # not even a CPU's
  monkeypatch.setattr(contest, "hold", hold)
  monkeypatch.setattr(timing, "in_turn", in_turn)
  runs = dict.fromkeys(("none", "quota", "none, with gradients", "quota, with gradients"))
  monkeypatch.setattr(costs, "balance_runs", lambda *_: runs)
  monkeypatch.setattr(costs, "copy_runs", lambda *_: {})
  monkeypatch.setattr(costs, "copy_facts", lambda _: {"copy_rate": 2e11})
  monkeypatch.setattr(costs, "beside_runs", lambda *_: {})
  monkeypatch.setattr(costs, "beside_facts", lambda _: {"copy_exposed_forward": 0.3})
  path = tmp_path / "mine.json"
  assert costs.main(["--shapes", "qwen3-235b", "qwen3-30b", "--write", str(path)]) == 0
  found = Device.load(path)
  assert (found["copy_rate"], found["copy_exposed_forward"]) == (2e11, 0.3)
  assert found["launch_seconds"] == pytest.approx(2.5e-6)
  assert found["balance_seconds"] == pytest.approx(1e-4)
  assert found["balance_training_seconds"] == pytest.approx(5e-5)
  assert [each.widths for each in found.matmuls] == [(4096, 1536)]  # the others had no time
  assert found.facts["copy_rate"].kind == found.matmuls[0].kind == "measured"
  assert "bench costs" in found.facts["copy_rate"].source
  assert found["reduce_rate"] == H200["reduce_rate"] and found.tunings == H200.tunings
  assert "qwen3-30b" in capsys.readouterr().err


def test_without_kernels_there_is_nothing_to_measure():
  with pytest.raises(CommandError, match="devices: the kernels need"):
    costs.main([])


def program(run):
  return str(jax.make_jaxpr(run.func)(*run.args))


def test_launches_and_layers_run(monkeypatch):
  monkeypatch.setattr(costs, "_TOKENS", 64)
  monkeypatch.setattr(costs, "LAYER", argparse.Namespace(width=128, inner=64, top_k=8))
  few, many = map(program, costs.launch_runs(1).values())
  assert many.count("optimization_barrier") == few.count("optimization_barrier") + 64
  layers = costs.balance_runs(mesh_of(2), 1)
  for name, run in layers.items():
    assert bool(re.search(r"name=_plan\s", program(run))) == name.startswith("quota")
    assert np.isfinite(float(run()))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_layer_that_balances_copies_nothing(ranks):
  """What it takes more is then what balancing takes whatever it copies."""
  found = plan.plan_quotas(costs.balance_load(ranks), BalanceConfig(objective="balance"))
  assert found.replica_expert.size and (found.replica_expert < 0).all()


@pytest.mark.parametrize("make", [costs.copy_runs, costs.beside_runs], ids=["copies", "beside"])
def test_copies_lower_for_gpus(make, monkeypatch):
  shape = argparse.Namespace(width=256, inner=128, top_k=8)
  monkeypatch.setattr(costs, "EXPERT", shape)
  monkeypatch.setattr(costs, "_EXPERT_SIZE", 3 * shape.width * shape.inner)
  monkeypatch.setattr(beside, "TOKENS", 256)
  counts = {"copies before": 2}
  programs = {name: run.func.trace(*run.args) for name, run in make(mesh_of(2), 1).items()}
  for name, traced in programs.items():
    assert len(kernels(traced.jaxpr)) == counts.get(name, 1), name
  name, traced = programs.popitem()  # the others have tunings that are lowered elsewhere
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("custom_call @mosaic_gpu") == counts.get(name, 1)
