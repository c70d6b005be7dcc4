"""Recording and reading traces: contents, order, crashes, damage, hostile files."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import traces

import ultraep_jax as uep
from ultraep_jax.trace import Recorder, TraceError, read
from ultraep_jax.trace import format as files
from ultraep_jax.trace.summary import summarise

ROOT = pathlib.Path(__file__).parents[2]


def stacked(values):
  return jax.tree.map(lambda *leaves: np.stack(leaves), *values)


# --- what is recorded is what is read --------------------------------------------------------


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
    recorder.record(0, {"dense": first, "mtp": second}, axes=("layer",))
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
  with pytest.raises(ValueError, match="without a stride"):
    read(tmp_path, steps=slice(0, 4, 2))
  with pytest.raises(TypeError, match="slice, a mask"):
    trace[0]


def test_table_and_summary(tmp_path):
  pandas = pytest.importorskip("pandas", exc_type=ImportError)
  trace = read(traces.write(tmp_path))
  table = trace.to_pandas()
  assert isinstance(table, pandas.DataFrame) and len(table) == 12
  assert table.groupby("layer")["imbalance_before"].max().between(1.9, 2.1).all()
  summary = summarise(trace)
  assert summary["before"]["100"] == pytest.approx(table.imbalance_before.max())
  assert summary["after"]["50"] == pytest.approx(table.imbalance_after.median())
  assert summary["off_plan"] == 0 and summary["replicas"] == table.replicas.mean()
  json.dumps(summary)


def test_summary_notices_a_layer_that_left_its_plan(tmp_path):
  stats = traces.stats_of(traces.loads(0))
  moved = stats.load_after_G + np.array([1, -1, 0, 0], np.int32)
  with Recorder(tmp_path) as recorder:
    recorder.record(0, stats._replace(load_after_G=moved), axes=())
  assert summarise(read(tmp_path))["off_plan"] == 1


def test_every_and_several_chunks(tmp_path):
  stats = traces.stats_of(traces.loads(0))
  with Recorder(tmp_path, every=3, flush_seconds=0) as recorder:
    for step in range(8):
      recorder.record(step, stats, axes=())
  assert len(files.chunks(tmp_path)) == 3
  assert read(tmp_path).step_N.tolist() == [0, 3, 6]


def test_memory_is_bounded(tmp_path):
  stats = traces.stats_of(traces.loads(0))
  with Recorder(tmp_path, flush_seconds=1e9, flush_bytes=1) as recorder:
    recorder.record(0, stats, axes=())
    recorder.record(1, stats, axes=())
  assert len(files.chunks(tmp_path)) == 2


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


# --- wrong calls -----------------------------------------------------------------------------


def test_wrong_arguments(tmp_path):
  stats = traces.stats_of(traces.loads(0))
  with pytest.raises(ValueError, match="every: expected at least 1, got 0"):
    Recorder(tmp_path, every=0)
  with pytest.raises(ValueError, match="flush_seconds: expected at least 0, got -1"):
    Recorder(tmp_path, flush_seconds=-1)
  with Recorder(tmp_path) as recorder:
    with pytest.raises(ValueError, match=r"axes: expected the 0 leading axes .* got \('group',\)"):
      recorder.record(0, stats)
    with pytest.raises(ValueError, match="axes: expected distinct names"):
      recorder.record(0, stats, axes=("step",))
    with pytest.raises(TypeError, match="expected LayerStats by layer, got int"):
      recorder.record(0, {"layer0": 3})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"load_GE": np.full((4, 8), -1, np.int32)}, r"load_NGE: expected values in \[0, .* got -1"),
    ({"replica_bytes": np.float32("nan")}, "replica_bytes_N: expected finite values, got nan"),
    ({"replica_expert_GS": np.full((4, 2), 8, np.int32)}, r"replica_expert_NGS: .* got 8"),
    ({"load_after_G": np.ones(4, np.float32)}, "after_NG: expected another type than float32"),
    ({"load_after_G": np.ones(3, np.int32)}, r"after_NG: expected shape \(1, 4\), got \(1, 3\)"),
  ],
)
def test_bad_values_are_refused_when_written(tmp_path, change, message):
  recorder = Recorder(tmp_path)
  recorder.record(0, traces.stats_of(traces.loads(0))._replace(**change), axes=())
  with pytest.raises(TraceError, match=message):
    recorder.flush()
  recorder.close()
  assert not files.chunks(tmp_path)


def test_layers_of_other_shapes_are_refused(tmp_path):
  small, large = (traces.stats_of(traces.loads(0, experts=e)) for e in (8, 16))
  recorder = Recorder(tmp_path / "a")
  recorder.record(0, {"x": small, "y": large}, axes=())
  with pytest.raises(TraceError, match=r"stats: expected layers of one \[G, E, S\]"):
    recorder.close()
  with Recorder(tmp_path / "b") as recorder:
    recorder.record(0, small, axes=())
  recorder = Recorder(tmp_path / "b")
  recorder.record(1, large, axes=())
  with pytest.raises(TraceError, match=r"'num_experts': 8.* as in the trace, got .*16"):
    recorder.close()
  assert len(read(tmp_path / "b")) == 1


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


# --- crashes and damage ----------------------------------------------------------------------


def test_a_killed_run_loses_at_most_the_last_flush(tmp_path):
  """The process is killed in the midst of recording and writing, some thirty times a second."""
  code = """
import sys
import traces
from ultraep_jax.trace import Recorder
stats = {i: traces.stats_of(traces.loads(i)) for i in range(4)}
recorder = Recorder(sys.argv[1], flush_seconds=0.03)
print("ready", flush=True)
for step in range(10**9):
  recorder.record(step, stats[step % 4], axes=())
  if step % 500 == 499:
    recorder.flush()
    print(step, flush=True)
"""
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
  command = [sys.executable, "-c", code, str(tmp_path)]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    flushed = [int(child.stdout.readline()) for _ in range(2)][-1]
    time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
  (tmp_path / "chunk-99999999.partial").write_bytes(b"as a kill in the midst of writing leaves")
  trace = read(tmp_path)
  assert not trace.problems
  assert trace.step_N.tolist() == list(range(len(trace))) and len(trace) > flushed
  with Recorder(tmp_path) as recorder:  # and goes on
    recorder.record(len(trace), traces.stats_of(traces.loads(0)), axes=())
  assert len(read(tmp_path)) == len(trace) + 1


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_chunk_is_left_out_and_named(tmp_path, kept):
  traces.write(tmp_path)
  first, second = files.chunks(tmp_path)
  content = second.read_bytes()
  second.write_bytes(content[: int(len(content) * kept)])
  trace = read(tmp_path)
  assert set(trace.step_N) == {0, 1, 2, 3}
  assert len(trace.problems) == 1 and trace.problems[0].startswith(
    f"{second.name}: expected a whole chunk, got a damaged one"
  )
  first.write_bytes(b"")
  with pytest.raises(TraceError, match="expected readable chunks, got none"):
    read(tmp_path)


def test_flipped_bytes_never_read_as_other_loads(tmp_path):
  traces.write(tmp_path, steps=2, layers=1)
  expected = read(tmp_path)
  (chunk, *_) = files.chunks(tmp_path)
  content = chunk.read_bytes()
  rng = np.random.default_rng(0)
  for at in rng.integers(0, len(content), 60):
    damaged = bytearray(content)
    damaged[at] ^= 0x55
    chunk.write_bytes(damaged)
    try:
      trace = read(tmp_path)
    except TraceError:
      continue
    kept = np.isin(expected.step_N, trace.step_N)
    np.testing.assert_array_equal(trace.load_NGE, expected.load_NGE[kept])


def rewritten(folder: pathlib.Path, **changes: object) -> None:
  """Replaces columns of the first chunk; None takes one away."""
  chunk = files.chunks(folder)[0]
  with np.load(chunk) as file:
    columns = {name: file[name] for name in file.files} | changes
  with chunk.open("wb") as file:
    arrays = {name: column for name, column in columns.items() if column is not None}
    np.savez_compressed(file, allow_pickle=True, **arrays)  # pyright: ignore


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"load_NGE": None}, "expected the columns of a trace, got none .*load_NGE"),
    ({"load_NGE": np.zeros((2, 4, 4), int)}, r"load_NGE: expected shape \(2, 4, 8\), got"),
    ({"load_NGE": np.full((2, 4, 8), -1)}, r"load_NGE: expected values in \[0, .* got -1"),
    ({"load_NGE": np.full((2, 4, 8), 2**40)}, r"load_NGE: expected values in \[0, .* got 10995"),
    ({"after_NG": np.full((2, 4), np.nan)}, "after_NG: expected another type than float64"),
    ({"replica_bytes_N": np.full(2, np.nan)}, "replica_bytes_N: expected finite values, got nan"),
    ({"after_NG": np.zeros((2, 4), int)}, "after_NG: expected the sum of load_NGE"),
    ({"planned_NG": np.zeros((2, 4), int)}, "planned_NG: expected the sum of load_NGE"),
    ({"replica_load_NGS": np.full((2, 4, 2), 2**20)}, "replica_load_NGS: expected"),
    ({"replica_parent_NGS": np.full((2, 4, 2), 4)}, r"replica_parent_NGS: .* \[-1, 4\), got 4"),
    ({"layer_N": np.arange(2)}, "layer_N: expected another type than int"),
    ({"layer_N": np.array([print] * 2, object)}, "got a damaged one: .*allow_pickle"),
  ],
)
def test_hostile_chunks_are_named(tmp_path, changes, message):
  traces.write(tmp_path, steps=1, layers=2)
  rewritten(tmp_path, **changes)
  with pytest.raises(TraceError, match=message):
    read(tmp_path)


@pytest.mark.parametrize(
  ("content", "message"),
  [
    ("", "it is damaged or of another program"),
    ("[1, 2]", "it is of another program"),
    ('{"format": "another"}', "it is of another program"),
    ('{"format": "ultraep_jax trace", "version": 2}', "expected version 1, got 2"),
    ('{"format": "ultraep_jax trace", "version": 1}', "name: expected str, got None"),
    ("\ufffd\x00", "it is damaged or of another program"),
  ],
)
def test_foreign_manifests(tmp_path, content, message):
  (tmp_path / files.MANIFEST).write_text(content)
  with pytest.raises(TraceError, match=message):
    read(tmp_path)


@pytest.mark.parametrize(
  ("name", "value", "message"),
  [
    ("num_ranks", "4", "num_ranks: expected int, got '4'"),
    ("num_ranks", True, "num_ranks: expected int, got True"),
    ("num_ranks", 3, "E a positive multiple of G"),
    ("num_ranks", 0, "E a positive multiple of G"),
    ("replica_slots", -1, "expected no negative value"),
  ],
)
def test_wrong_manifests(tmp_path, name, value, message):
  path = traces.write(tmp_path, steps=1) / files.MANIFEST
  path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
  with pytest.raises(TraceError, match=message):
    read(tmp_path)


def test_what_is_there_instead_of_a_trace(tmp_path):
  with pytest.raises(TraceError, match="expected the folder of a trace, got nothing there"):
    read(tmp_path / "none")
  file = tmp_path / "file"
  file.write_text("")
  with pytest.raises(TraceError, match="expected the folder of a trace, got a file"):
    read(file)
  traces.write(tmp_path / "inner", steps=1)
  with pytest.raises(TraceError, match=r"there are traces in .*inner"):
    read(tmp_path)


# --- cost ------------------------------------------------------------------------------------


def test_recording_hardly_delays_the_loop(tmp_path):
  """Generous, because machines differ: a step of the example takes 80 ms."""
  device = jax.device_put({f"layer{i}": traces.stats_of(traces.loads(i)) for i in range(2)})
  with Recorder(tmp_path, flush_seconds=1e9) as recorder:
    seconds = []
    for step in range(200):
      started = time.perf_counter()
      recorder.record(step, device, axes=())
      seconds.append(time.perf_counter() - started)
  assert np.median(seconds) < 0.8e-3
  assert len(read(tmp_path)) == 400


# --- several processes -----------------------------------------------------------------------


def test_other_processes_write_nothing(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  with Recorder(tmp_path / "trace") as recorder:
    recorder.record(0, traces.stats_of(traces.loads(0)), axes=())
    recorder.flush()
  assert not (tmp_path / "trace").exists()


def test_statistics_of_other_processes_are_refused(tmp_path):
  class Elsewhere(np.ndarray):
    is_fully_addressable = False
    is_fully_replicated = False

  stats = traces.stats_of(traces.loads(0))
  stats = stats._replace(load_GE=stats.load_GE.view(Elsewhere))
  with (
    Recorder(tmp_path) as recorder,
    pytest.raises(ValueError, match="gather them with jax"),
  ):
    recorder.record(0, stats, axes=())
