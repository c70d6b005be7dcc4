"""Traces: what is recorded is what is read."""

import json
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import traces

import ultraep_jax as uep
from ultraep_jax.trace import Recorder, TraceError, read
from ultraep_jax.trace import disk as files
from ultraep_jax.trace.summary import summarise


def stacked(values):
  return jax.tree.map(lambda *leaves: np.stack(leaves), *values)


def test_fields_come_back(tmp_path):
  traces.write(tmp_path, steps=6, layers=2, name="a run")
  trace = read(tmp_path)
  assert len(trace) == 12 and trace.layers == ["layer0", "layer1"] and not trace.problems
  assert trace.manifest.name == "a run" and trace.manifest.measured
  assert trace.manifest.config["replica_slots"] == 2
  assert trace.step_N.tolist() == [s for s in range(6) for _ in range(2)]
  for i in range(12):
    step, layer = divmod(i, 2)
    stats = traces.stats_of(traces.loads(10 * step + layer))
    pairs = {
      "load_NGE": stats.load_GE,
      "planned_NG": stats.load_planned_G,
      "after_NG": stats.load_after_G,
      "before_NG": stats.load_before_G,
      "expert_load_NE": stats.expert_load_E,
      "floor_N": stats.load_floor,
      "replicas_N": stats.replicas,
      "max_fanout_N": stats.max_fanout,
      "replica_bytes_N": stats.replica_bytes,
      "remote_N": stats.remote_assignments,
      "rounds_N": stats.rounds,
      "masked_N": stats.masked,
    }
    for name, expected in pairs.items():
      np.testing.assert_array_equal(getattr(trace, name)[i], expected, err_msg=name)
    assert trace.imbalance_before_N[i] == pytest.approx(2.0, abs=0.02)
    assert trace.imbalance_after_N[i] == stats.load_after_G.max() / stats.load_after_G.mean()


def test_plans_come_back_whole(tmp_path):
  trace = read(traces.write(tmp_path))
  for i in range(len(trace)):
    plan = uep.Plan(*map(jnp.asarray, trace.plan(i)))
    uep.testing.assert_legal_plan(plan, trace.load_NGE[i], traces.CONFIG)
    expected = uep.plan_quotas(jnp.asarray(trace.load_NGE[i]), traces.CONFIG)
    np.testing.assert_array_equal(plan.quota, expected.quota)
    home_E = plan.quota[np.arange(8), np.arange(8) // 2]
    np.testing.assert_array_equal(trace.home_load_NE[i], home_E)


def test_leading_axes_become_records(tmp_path):
  """A scan over layers or microbatches, and token groups."""
  parts = [[traces.stats_of(traces.loads(10 * a + b)) for b in range(2)] for a in range(3)]
  many = stacked([stacked(part) for part in parts])
  with Recorder(tmp_path) as recorder:
    recorder.record(7, {"x": many}, axes=("microbatch", "group"))
    recorder.record(8, many, axes=("layer", "group"))
  trace = read(tmp_path)
  assert trace.microbatch_N.tolist()[:6] == [0, 0, 1, 1, 2, 2]
  assert trace.group_N.tolist()[:6] == [0, 1] * 3
  assert trace.layer_N.tolist() == ["x"] * 6 + ["0", "0", "1", "1", "2", "2"]
  for i in range(12):
    np.testing.assert_array_equal(trace.load_NGE[i], traces.loads(10 * (i % 6 // 2) + i % 2))


def test_layers_of_named_stacks_keep_both_names(tmp_path):
  first, second = (
    stacked([traces.stats_of(traces.loads(s + i)) for i in range(2)]) for s in (0, 9)
  )
  with Recorder(tmp_path) as recorder:
    recorder.record(0, {"dense": first}, axes="layer")  # of one axis, its name will do
    recorder.record(0, {"mtp": second}, axes=["layer"])
  trace = read(tmp_path)
  assert trace.layer_N.tolist() == ["dense 0", "dense 1", "mtp 0", "mtp 1"]
  np.testing.assert_array_equal(trace.load_NGE[3], traces.loads(10))


def test_two_recorders_of_one_folder_keep_both_records(tmp_path):
  with Recorder(tmp_path) as one, Recorder(tmp_path) as other:
    one.record(0, traces.stats_of(traces.loads(0)), axes=())
    other.record(1, traces.stats_of(traces.loads(1)), axes=())
    other.flush()
    one.flush()
    other.record(2, traces.stats_of(traces.loads(2)), axes=())
  trace = read(tmp_path)
  assert sorted(trace.step_N.tolist()) == [0, 1, 2] and not trace.problems
  assert not list(tmp_path.glob("*.partial"))


def test_a_layer_of_the_library_is_recorded(tmp_path):
  """Statistics straight from ``sharded_moe``, with the loads that it measured."""
  weights = uep.ExpertWeights(*[jnp.ones((8, 4, 4)) for _ in range(3)])
  load_GE = traces.loads(0)
  index = uep.testing.expert_indices(0, load_GE, 2).reshape(-1, 2)
  mesh = jax.make_mesh((4,), ("expert",), devices=jax.devices()[:4])
  with jax.set_mesh(mesh), Recorder(tmp_path, config=traces.CONFIG) as recorder:
    x, gate = jnp.ones((len(index), 4)), jnp.ones(index.shape)
    _, stats = uep.sharded_moe(x, jnp.asarray(index), gate, weights, config=traces.CONFIG)
    recorder.record(0, stats)
  trace = read(tmp_path)
  expected = traces.stats_of(load_GE)
  for name in ("load_GE", "load_planned_G", "load_after_G", "remote_assignments"):
    np.testing.assert_array_equal(getattr(stats, name)[0], getattr(expected, name), err_msg=name)
  np.testing.assert_array_equal(trace.load_NGE[0], load_GE)
  np.testing.assert_array_equal(trace.after_NG, trace.planned_NG)
  np.testing.assert_array_equal(trace.replica_load_NGS[0], expected.replica_load_GS)
  assert trace.replica_bytes_N[0] == expected.replicas * 3 * 16 * 4


def test_parts_of_a_trace(tmp_path):
  trace = read(traces.write(tmp_path))
  part = read(tmp_path, steps=slice(2, 4))
  assert part.step_N.tolist() == [2, 2, 3, 3]
  np.testing.assert_array_equal(part.load_NGE, trace[trace.step_N // 2 == 1].load_NGE)
  odd = read(tmp_path, steps=lambda step_N: step_N % 2 == 1)
  assert set(odd.step_N) == {1, 3, 5}
  with pytest.raises(TypeError, match="slice, a mask"):
    trace[0]


def test_every_and_several_chunks(tmp_path):
  stats = traces.stats_of(traces.loads(0))
  with Recorder(tmp_path, every=3, flush_seconds=0) as recorder:
    for step in range(8):
      recorder.record(step, stats, axes=())
  assert len(files.chunks(tmp_path)) == 3
  assert read(tmp_path).step_N.tolist() == [0, 3, 6]


def test_a_resumed_run_replaces_what_it_repeats(tmp_path):
  with Recorder(tmp_path) as recorder:
    for step in range(4):
      recorder.record(step, traces.stats_of(traces.loads(step)), axes=())
  before = {path.name: path.read_bytes() for path in files.chunks(tmp_path)}
  with Recorder(tmp_path, name="ignored: the trace has a name") as recorder:
    for step in range(2, 6):
      recorder.record(step, traces.stats_of(traces.loads(100 + step)), axes=())
  trace = read(tmp_path)
  assert trace.step_N.tolist() == [0, 1, 2, 3, 4, 5]
  for step, seed in enumerate([0, 1, 102, 103, 104, 105]):
    np.testing.assert_array_equal(trace.load_NGE[step], traces.loads(seed))
  for name, content in before.items():  # written once
    assert (tmp_path / name).read_bytes() == content


def test_nothing_recorded_is_an_empty_folder(tmp_path):
  with Recorder(tmp_path / "new"):
    pass
  assert not list((tmp_path / "new").iterdir())
  with pytest.raises(TraceError, match="a recorder writes it with its first records"):
    read(tmp_path / "new")


def test_what_is_recorded_can_be_read(tmp_path):
  """Names from elsewhere, and metadata of every kind."""
  folder = tmp_path / os.fsdecode(b"run \xff")
  config = uep.BalanceConfig(strategy=lambda load_GE, config, cost: None)
  metadata = types.MappingProxyType({"path": tmp_path, "\u00e9": [None, {"x": 1e400}]})
  stats = traces.stats_of(traces.loads(0))
  names = ["", "a\nb", "\u00e9\U0001f600", " ", "<b>"]
  with Recorder(folder, config=config, metadata=metadata) as recorder:
    recorder.record(0, dict.fromkeys(names, stats), axes=())
    recorder.record(2**63 - 1, stats, axes=(), microbatch=2**31 - 1)
  trace = read(folder)
  assert trace.layers == ["0", *names[1:]] and trace.manifest.name == "run ?"
  assert trace.manifest.metadata == {"path": str(tmp_path), "\u00e9": [None, {"x": "Infinity"}]}
  json.dumps(summarise(trace))


def test_the_manifest_is_json_whatever_the_metadata(tmp_path):
  """Which has no NaN. Other programs read it too, numbers as numbers."""
  metadata = {
    "loss": float("nan"),
    "bounds": [-np.inf, np.float32(np.inf)],
    "width": np.int64(64),
    "rate": jnp.float32(0.5),
    "model": types.MappingProxyType({"top_k": np.uint8(2)}),
    "dtype": jnp.dtype("bfloat16"),
  }
  with Recorder(tmp_path, metadata=metadata) as recorder:
    recorder.record(0, traces.stats_of(traces.loads(0)), axes=())

  def refuse(constant):
    raise AssertionError(constant)

  values = json.loads((tmp_path / files.MANIFEST).read_text(), parse_constant=refuse)
  assert values["metadata"] == {
    "loss": "NaN",
    "bounds": ["-Infinity", "Infinity"],
    "width": 64,
    "rate": 0.5,
    "model": {"top_k": 2},
    "dtype": "bfloat16",
  }


@pytest.mark.parametrize(
  ("steps", "error", "message"),
  [
    (3, TypeError, "steps: expected a slice or a function, got int"),
    (slice("a", None), TypeError, "steps: expected numbers in the slice, got str"),
    (slice(None, [2]), TypeError, "steps: expected numbers in the slice, got list"),
    (slice(0, 4, 2), ValueError, "steps: expected a slice without a stride"),
  ],
)
def test_wrong_steps(tmp_path, steps, error, message):
  with pytest.raises(error, match=message):
    read(tmp_path, steps=steps)


def test_a_path_that_cannot_be_a_folder(tmp_path):
  file = tmp_path / "file"
  file.write_text("")
  with pytest.raises(NotADirectoryError, match="file: expected a folder to write in, got a file"):
    Recorder(file)
  with pytest.raises(
    NotADirectoryError, match=r"trace: expected a folder .*, got a file at .*file"
  ):
    Recorder(file / "trace")


def test_a_folder_without_rights(tmp_path):
  """As an ordinary user; root may do anything."""
  folder = traces.write(tmp_path / "trace", steps=2)
  for path in (tmp_path, *tmp_path.parents[:2]):
    path.chmod(path.stat().st_mode | 0o055)
  folder.chmod(0o500)
  (folder / files.MANIFEST).chmod(0)
  user = os.geteuid()
  if user == 0:
    os.seteuid(65534)
  try:
    with pytest.raises(TraceError, match="expected a readable file, got: Permission denied"):
      read(folder)
    with pytest.raises((TraceError, PermissionError), match="Permission denied"):
      Recorder(folder)
  finally:
    os.seteuid(user)
    folder.chmod(0o700)
    (folder / files.MANIFEST).chmod(0o600)
