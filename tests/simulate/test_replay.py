"""Recorded traces in the simulator: it ends where the layers ended."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import traces
from jax.sharding import AxisType

import ultraep_jax as uep
from ultraep_jax import cli
from ultraep_jax import simulate as sim
from ultraep_jax.trace.reader import read

MODEL, RATES = sim.MODELS["Qwen3-235B"], uep.Device.load("h200")


def record_layers(path, config: uep.BalanceConfig, steps: int = 3) -> uep.trace.Trace:
  """Two layers on four devices that run, their routing skewed and changing."""
  mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
  experts, width, tokens = 16, 8, 256
  key = jax.random.key(0)
  shapes = ((experts, width, 16), (experts, width, 16), (experts, 16, width))
  weights = uep.ExpertWeights(*(jax.random.normal(key, shape) for shape in shapes))
  bias = -0.4 * jnp.arange(experts, dtype=jnp.float32)[None]

  @jax.jit
  def layer(key):
    scores = bias + jax.random.normal(key, (tokens, experts))
    gate, index = jax.lax.top_k(jax.nn.softmax(scores), 2)
    return uep.sharded_moe(jnp.ones((tokens, width)), index, gate, weights, config=config)[1]

  with jax.set_mesh(mesh), uep.trace.Recorder(path, config=config) as recorder:
    for step in range(steps):
      keys = jax.random.split(jax.random.key(step))
      recorder.record(step, {f"layer{i}": layer(keys[i]) for i in range(2)})
  return read(path)


@pytest.mark.parametrize("options", [{}, {"target": 1.2, "domain_size": 2}], ids=str)
def test_quota_ends_where_the_layers_did(options, tmp_path):
  config = uep.BalanceConfig(replica_slots=2, objective="balance", **options)
  trace = record_layers(tmp_path, config)
  assert trace.manifest.measured and trace.imbalance_before_N.min() > 1.5
  setting = sim.trace_setting(trace, MODEL, RATES)
  assert setting.tokens == 16 and setting.domain_size == options.get("domain_size", 4)
  outcomes = sim.replay(trace, setting, ("none", "quota"))
  none, quota = outcomes["none"], outcomes["quota"]
  np.testing.assert_array_equal(none.placed.load.reshape(-1, 4), trace.before_NG)
  np.testing.assert_array_equal(quota.placed.load.reshape(-1, 4), trace.after_NG)
  np.testing.assert_allclose(quota.imbalance.reshape(-1), trace.imbalance_after_N)
  np.testing.assert_array_equal(quota.replicas.reshape(-1), trace.replicas_N)
  np.testing.assert_array_equal(quota.fan_out.reshape(-1), trace.max_fanout_N)
  kept_N = quota.placed.kept.sum(axis=-1).reshape(-1)
  np.testing.assert_array_equal(trace.after_NG.sum(axis=1) - kept_N, trace.remote_N)


def test_microbatches_are_steps_and_groups_are_layers(tmp_path):
  parts = [traces.stats_of(traces.loads(seed)) for seed in range(12)]
  with uep.trace.Recorder(tmp_path, config=traces.CONFIG) as recorder:
    for i in range(6):
      both = jax.tree.map(lambda *leaves: np.stack(leaves), *parts[2 * i : 2 * i + 2])
      step, rest = divmod(i, 4)
      recorder.record(step, {f"layer{rest % 2}": both}, microbatch=rest // 2)
  trace = read(tmp_path)
  loads = sim.trace_loads(trace)
  assert loads.shape == (3, 4, 4, 8)
  np.testing.assert_array_equal(loads[1, 2], parts[6].load_GE)
  with pytest.raises(ValueError, match="trace: expected the same 4 layers and groups in each of 3"):
    sim.trace_loads(trace[:-1])
  with pytest.raises(ValueError, match="trace: expected records, got none"):
    sim.trace_loads(trace[:0])


def test_what_would_have_been(tmp_path):
  """More slots, another target, direct copies: a trace answers what it did not record."""
  trace = read(traces.write(tmp_path))
  setting = sim.trace_setting(trace, MODEL, RATES, replica_slots=0)
  none = sim.replay(trace, setting, ("none", "quota"))
  np.testing.assert_array_equal(none["quota"].imbalance, none["none"].imbalance)
  setting = sim.trace_setting(trace, MODEL, RATES)
  looser = sim.replay(trace, setting, ("quota",), target=1.5)["quota"]
  assert looser.imbalance.max() > trace.imbalance_after_N.max()
  assert looser.replicas.sum() < trace.replicas_N.sum()
  config = {**trace.manifest.config, "transfer": "direct"}
  direct = dataclasses.replace(trace, manifest=dataclasses.replace(trace.manifest, config=config))
  assert setting.relay and not sim.trace_setting(direct, MODEL, RATES).relay


def test_command(tmp_path, capsys):
  trace = read(traces.write(tmp_path / "trace"))
  command = ["simulate", "--trace", str(tmp_path / "trace"), "--model", "Qwen3-235B"]
  command += ["--strategies", "none", "quota"]
  assert cli.main([*command, "--json"]) == 0
  none, quota, _ = json.loads(capsys.readouterr().out)["strategies"]
  assert none["imbalance"]["mean"] == pytest.approx(trace.imbalance_before_N.mean())
  assert quota["imbalance"]["mean"] == pytest.approx(trace.imbalance_after_N.mean())
  assert quota["copies"] == pytest.approx(trace.replicas_N.mean())
  assert cli.main(command) == 0
  out = capsys.readouterr().out
  assert "4 ranks in domains of 4, 16 tokens a rank, 2 slots" in out and "training" in out


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--ranks", "8"], "--ranks: expected 4, as {path} has, got 8"),
    (["--tokens", "7"], "--tokens: expected 16, as {path} has, got 7"),
    (["--domain", "3"], "--domain: expected a divisor of 4"),
    (["--target", "0.5"], "--target: expected a number of at least 1"),
  ],
)
def test_command_explains_what_is_wrong(arguments, message, tmp_path, capsys):
  traces.write(tmp_path, steps=1)
  command = ["simulate", "--trace", str(tmp_path), "--model", "Qwen3-235B", *arguments]
  with pytest.raises(SystemExit, match="2"):
    cli.main(command)
  assert message.format(path=tmp_path) in capsys.readouterr().err


def test_command_without_a_trace(tmp_path, capsys):
  assert cli.main(["simulate", "--trace", str(tmp_path)]) == 1
  assert "expected a trace" in capsys.readouterr().err
  with pytest.raises(SystemExit, match="2"):
    cli.main(["simulate", "--trace", str(tmp_path), "--loads", "a.npy"])


def test_domains_that_a_mesh_settled_are_those_of_the_replay(tmp_path):
  """Recorded on nodes of two: the configuration left the domains to the mesh."""
  config = uep.BalanceConfig(replica_slots=4, objective="balance", node_size=2)
  trace = record_layers(tmp_path, config)
  assert trace.manifest.config["domain_size"] == "auto"
  setting = sim.trace_setting(trace, MODEL, RATES)
  assert setting.domain_size == trace.config.domain_size == 2
  replayed = sim.replay(trace, setting, ("quota",))["quota"]
  np.testing.assert_allclose(replayed.imbalance.ravel(), trace.imbalance_after_N, rtol=0.02)
