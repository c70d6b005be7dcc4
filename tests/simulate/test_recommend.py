"""``recommend`` and ``simulate --trace``: widths are the trace's, and what is assumed is said."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
import traces
from command_line import run

from ultraep_jax.config import BalanceConfig
from ultraep_jax.devices.device import Device
from ultraep_jax.simulate.replay import recorded_shape, trace_setting
from ultraep_jax.trace import Recorder, read

WIDE = {"embed_dim": 4096, "expert_dim": 1536, "top_k": 2, "moe_layers": 3, "name": "wide"}


def write(
  path,
  model: object = None,
  steps: int = 4,
  tokens: int = 64,
  layers: int = 1,
  groups: int = 1,
  config: BalanceConfig = traces.CONFIG,
) -> str:
  """A trace of layers whose busiest rank has twice the mean."""
  metadata = {} if model is None else {"model": model}
  with Recorder(path, config=config, metadata=metadata) as recorder:
    for step in range(steps):
      stats = traces.stats_of(traces.loads(step) * tokens)
      stats = jax.tree.map(lambda x: np.stack([x] * groups), stats)
      recorder.record(step, {f"layer{i}": stats for i in range(layers)})
  return str(path)


def test_domains_are_those_of_the_layers(tmp_path):
  trace = read(write(tmp_path / "trace", WIDE))
  assert trace.manifest.config["domain_size"] == "auto"
  for declared, ranks in (("auto", 4), (None, 4), (2, 2)):
    config = {**trace.manifest.config, "domain_size": declared}
    other = dataclasses.replace(trace, manifest=dataclasses.replace(trace.manifest, config=config))
    shape = recorded_shape(other)
    assert shape is not None
    assert trace_setting(other, shape, Device.load("h200")).domain_size == ranks


def test_a_trace_says_how_wide_its_layers_are(tmp_path):
  shape = recorded_shape(read(write(tmp_path / "wide", WIDE)))
  assert shape is not None
  assert (shape.embed_dim, shape.expert_dim, shape.top_k, shape.num_experts) == (4096, 1536, 2, 8)
  assert (shape.moe_layers, shape.name) == (3, "wide")


@pytest.mark.parametrize(
  "model",
  [None, "Qwen3", {}, {"embed_dim": 8}, WIDE | {"top_k": 0}, WIDE | {"expert_dim": True}],
  ids=str,
)
def test_without_widths_a_model_must_be_named(model, tmp_path, capsys):
  folder = write(tmp_path / "trace", model)
  for command in ("simulate", "recommend"):
    status, _, said = run(capsys, command, *(["--trace"] * (command == "simulate")), folder)
    assert status == 2 and "--model: expected one of GLM-4.5-106B, " in said
    assert "or sizes as DxFxEXPERTSxTOP_K, as the trace does not say how wide" in said
    sized = [folder, "--model", "64x32x8x2"]
    status, said, _ = run(capsys, command, *(["--trace"] * (command == "simulate")), *sized)
    assert status == 0
    note = "note: --model 64x32x8x2 says nothing of attention and other layers: they count as 0"
    assert note in said


def test_simulate_takes_widths_from_the_trace(tmp_path, capsys):
  folder = write(tmp_path / "trace", WIDE)
  status, said, _ = run(capsys, "simulate", "--trace", folder, "--strategies", "none", "quota")
  assert status == 0
  assert said.startswith("wide: 8 experts, D 4096, F 1536, K 2, training; loads: ")
  assert "predicted for h200 (--device), the layer on kernels: 4 ranks" in said
  assert "datasheet" not in said and "attention and other layers: they count as 0" in said
  verbose = run(capsys, "simulate", "--trace", folder, "--strategies", "none", "--verbose")[1]
  assert "copy_rate" in verbose and "measured" in verbose


def test_simulate_says_whose_widths_it_assumes(tmp_path, capsys):
  folder = write(tmp_path / "trace", WIDE)
  command = "simulate", "--trace", folder, "--model", "Qwen3-235B", "--strategies", "none", "quota"
  _, said, _ = run(capsys, *command)
  assert "Qwen3-235B has 128 experts, the trace 8: widths are assumed" in said


def test_small_layers_are_said_to_gain_nothing(tmp_path, capsys):
  folder = write(tmp_path / "trace", WIDE | {"embed_dim": 64, "expert_dim": 64}, tokens=1)
  _, said, _ = run(capsys, "simulate", "--trace", folder)
  assert "than it saves" in said and 'strategy="none"' in said
  _, said, _ = run(capsys, "recommend", folder, "--device", "h200")
  assert said.endswith(
    'advice: at these sizes no copies save time on h200: strategy="none" is the fastest\n'
  )


def test_slots_are_recommended_that_make_the_load_even(tmp_path, capsys):
  folder = write(tmp_path / "trace", WIDE, tokens=4096)
  status, out, _ = run(capsys, "recommend", folder, "--device", "h200", "--json")
  answer = json.loads(out)
  assert status == 0 and [row["slots"] for row in answer["slots"]] == [0, 1, 2]
  none, some, most = answer["slots"]
  assert none["imbalance_mean"] == pytest.approx(2.0, rel=0.02) and none["saved_ms_a_step"] == 0
  assert most["imbalance_worst"] == pytest.approx(1.0, abs=1e-3)
  assert most["saved_ms_a_step"] == pytest.approx(none["layer_ms"] - most["layer_ms"])
  assert most["memory_mb"] == pytest.approx(2 * 3 * 4096 * 1536 * 4e-6)
  assert some["memory_mb"] == pytest.approx(most["memory_mb"] / 2)
  assert answer["advice"].startswith("replica_slots=") and "→ 1.00" in answer["advice"]


def test_layers_of_another_strategy_are_told_to_change_it(tmp_path, capsys):
  config = dataclasses.replace(traces.CONFIG, strategy="none")
  folder = write(tmp_path / "trace", WIDE, tokens=4096, config=config)
  _, said, _ = run(capsys, "recommend", folder, "--device", "h200")
  assert 'advice: strategy="quota", replica_slots=' in said


def test_what_cannot_run_kernels_is_weighed_in_plain_jax(tmp_path, capsys):
  folder = write(tmp_path / "trace", WIDE, tokens=4096)
  answer = json.loads(run(capsys, "recommend", folder, "--device", "a100", "--json")[1])
  assert (answer["device"], answer["layer"]) == ("a100", "the layer in plain JAX")
  load_NE = read(folder).load_NGE.sum(axis=1)
  busiest = load_NE.reshape(len(load_NE), 4, -1).sum(axis=-1).max(axis=-1).mean()
  work = 6 * 4096 * 1536 * busiest
  assert 1e-3 * answer["slots"][0]["layer_ms"] > work / 1.1e14 + 2 * work / 9e13  # a100.json
  for name, layer in (("a100", "the layer in plain JAX"), ("h200", "the layer on kernels")):
    out = run(capsys, "recommend", folder, "--device", name)[1]
    assert f"times predicted for {name} (--device), {layer}\n" in out


def test_nodes_and_plain_jax_are_those_of_simulate(tmp_path, capsys):
  """Of two nodes' ranks the layer moves tokens and copies in plain JAX."""
  two = str(tmp_path / "two")
  config = dataclasses.replace(traces.CONFIG, domain_size=2)
  with Recorder(two, config=config, metadata={"model": WIDE}) as recorder:
    for step in range(4):
      recorder.record(step, {"layer0": traces.stats_of(traces.loads(step) * 4096)}, axes=())
  one = write(tmp_path / "one", WIDE, tokens=4096)
  for folder, options in ((two, []), (one, []), (one, ["--portable"]), (two, ["--portable"])):
    options = [*options, "--device", "h200", "--json"]
    said = json.loads(run(capsys, "recommend", folder, *options)[1])
    command = "simulate", "--trace", folder, "--strategies", "none", *options
    expected = json.loads(run(capsys, *command)[1])
    assert 1e-3 * said["slots"][0]["layer_ms"] == pytest.approx(
      expected["strategies"][0]["layer_seconds"]
    )
    assert said["notes"] == expected["notes"]
    assert ("on several nodes transfers are in plain JAX" in said["notes"]) == (folder == two)
    assert ("plain JAX" in said["layer"]) == ("--portable" in options)


def test_simulate_says_which_options_recorded_loads_leave_unused(tmp_path, capsys):
  command = "simulate", "--trace", write(tmp_path / "trace", WIDE), "--strategies", "none", "--json"
  for given, named in (([], ""), (["--imbalance", "3", "--steps", "2"], "--imbalance, --steps")):
    notes = " ".join(json.loads(run(capsys, *command, *given)[1])["notes"])
    assert (
      f"the loads are recorded: {named} changed nothing" in notes if named else "--" not in notes
    )


def test_what_is_saved_is_told_for_all_layers_of_a_step(tmp_path, capsys):
  """The same loads in three layers, and in two groups, which work at the same time."""

  def rows(layers, *options, groups=1):
    path = tmp_path / f"trace{layers}{groups}"
    folder = write(path, WIDE, tokens=4096, layers=layers, groups=groups)
    out = run(capsys, "recommend", folder, "--device", "h200", "--json", *options)[1]
    return json.loads(out)["slots"]

  one, three = rows(1), rows(3)
  for alone, all_layers in zip(one, three, strict=True):
    assert all_layers["layer_ms"] == pytest.approx(alone["layer_ms"])
    assert all_layers["saved_ms_a_step"] == pytest.approx(3 * alone["saved_ms_a_step"])
  assert one[-1]["saved_ms_a_step"] > 0
  for alone, of_two in zip(three, rows(3, groups=2), strict=True):
    assert of_two == pytest.approx(alone)
  forward = rows(1, "--prefill")[-1]
  assert forward["memory_mb"] == pytest.approx(one[-1]["memory_mb"] / 2)  # no gradients
  assert forward["layer_ms"] < one[-1]["layer_ms"]


@pytest.mark.parametrize("steps, layers, most", [(10, 1, 4), (10, 3, 10), (10, 3, 64), (3, 5, 2)])
def test_records_are_chosen_evenly(steps, layers, most, tmp_path, capsys):
  folder = write(tmp_path / "trace", WIDE, steps=steps, layers=layers)
  command = "recommend", folder, "--device", "h200", "--records", str(most), "--prefill"
  out = run(capsys, *command)[1]
  planned, total = map(int, re.search(r"(\d+) of (\d+) records planned", out).groups())
  assert total == steps * layers and planned % layers == 0
  assert min(most, total) - 2 * layers < planned <= max(most, layers)
