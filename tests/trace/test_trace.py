"""Recording and reading traces: contents, order, wrong calls, cost."""

import concurrent.futures
import dataclasses
import functools
import json
import os
import threading
import time
import types
import weakref

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
  """Each number of each record by itself; no two are the same over all records."""
  pandas = pytest.importorskip("pandas", exc_type=ImportError)
  rng, trace = np.random.default_rng(0), read(traces.write(tmp_path, steps=8))
  n, ranks, slots = len(trace), 4, 2
  load_NGE = rng.integers(0, 99, (n, ranks, 8))
  filled = rng.random((n, ranks, slots)) < rng.random((n, 1, 1))
  trace = dataclasses.replace(
    trace,
    problems=("a problem",),
    step_N=np.arange(5, 5 + n),
    microbatch_N=rng.integers(0, 9, n),
    group_N=rng.integers(0, 9, n),
    load_NGE=load_NGE,
    after_NG=np.array([rng.multinomial(load.sum(), [0.1, 0.2, 0.3, 0.4]) for load in load_NGE]),
    floor_N=rng.integers(0, 999, n),
    replica_expert_NGS=np.where(filled, rng.integers(0, 8, filled.shape), -1),
    replica_parent_NGS=np.where(filled, rng.integers(0, ranks, filled.shape), -1),
    replica_bytes_N=rng.random(n) * 1e9,
    remote_N=rng.integers(0, 99, n),
    rounds_N=rng.integers(1, 4, n),
    masked_N=rng.integers(0, 99, n),
    invalid_N=rng.integers(0, 99, n),
  )
  rows = []
  for i in range(n):
    one = {name: getattr(trace, name)[i] for name in files.form.COLUMNS}
    before = [int(one["load_NGE"][:, 2 * rank : 2 * rank + 2].sum()) for rank in range(ranks)]
    after, total = one["after_NG"].tolist(), int(one["after_NG"].sum())
    places = zip(one["replica_expert_NGS"].ravel(), one["replica_parent_NGS"].ravel(), strict=True)
    copies = [(int(expert), int(sender)) for expert, sender in places if expert >= 0]
    senders = [sender for _, sender in copies]
    rows.append(
      {
        "step": one["step_N"],
        "layer": one["layer_N"],
        "microbatch": one["microbatch_N"],
        "group": one["group_N"],
        "imbalance_before": max(before) / (total / ranks),
        "imbalance_after": max(after) / (total / ranks),
        "imbalance_floor": one["floor_N"] / (total / ranks),
        "busiest_before": before.index(max(before)),
        "busiest_after": after.index(max(after)),
        "replicas": len(copies),
        "relayed": sum(sender != expert // 2 for expert, sender in copies),
        "max_fanout": max(map(senders.count, senders), default=0),
        "replica_megabytes": one["replica_bytes_N"] / 1e6,
        "remote_fraction": one["remote_N"] / total,
        "rounds": one["rounds_N"],
        "masked_assignments": one["masked_N"],
        "invalid_assignments": one["invalid_N"],
      }
    )
  table, expected = trace.to_pandas(), pandas.DataFrame(rows)
  pandas.testing.assert_frame_equal(table, expected, check_dtype=False)
  assert len({tuple(column) for _, column in table.items()}) == table.shape[1]

  def spread(column, chosen=slice(None)):
    return {
      str(p): pytest.approx(np.percentile(expected[column][chosen], p))
      for p in (5, 50, 90, 95, 99, 100)
    }

  summary = summarise(trace)
  assert summary == {
    "records": n,
    "steps": [5, 5 + n - 1],
    "before": spread("imbalance_before"),
    "after": spread("imbalance_after"),
    "floor": spread("imbalance_floor"),
    "layers": {
      layer: {
        "before": spread("imbalance_before", expected.layer == layer),
        "after": spread("imbalance_after", expected.layer == layer),
      }
      for layer in ("layer0", "layer1")
    },
    "replicas": pytest.approx(expected.replicas.mean()),
    "relayed": pytest.approx(expected.relayed.mean()),
    "max_fanout": expected.max_fanout.max(),
    "replica_megabytes": pytest.approx(expected.replica_megabytes.mean()),
    "remote_fraction": pytest.approx(trace.remote_N.sum() / trace.after_NG.sum()),
    "more_than_one_round": (expected.rounds > 1).sum(),
    "invalid_assignments": expected.invalid_assignments.sum(),
    "off_plan": n,
    "problems": ["a problem"],
  }
  assert list(summary["layers"]) == ["layer0", "layer1"]
  json.dumps(summary)
  assert summarise(trace[:0]) == {"records": 0, "steps": [], "problems": ["a problem"]}


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


def test_a_call_that_is_refused_keeps_nothing(tmp_path):
  stats = traces.stats_of(traces.loads(0))
  with Recorder(tmp_path) as recorder:
    for step, layers, microbatch, error, message in (
      (0, {"a": stats, "b": 3}, 0, TypeError, "expected LayerStats by layer, got int"),
      (0, {"a": stats, "b\0": stats}, 0, ValueError, "names of layers without a zero"),
      (0, {"a": stats, "\ud800": stats}, 0, ValueError, "names of layers that are text"),
      (0, {"a": stats}, -1, ValueError, r"microbatch: expected a value in \[0, "),
      (2**63, {"a": stats}, 0, ValueError, "step: expected a value in"),
      (1.5, {"a": stats}, 0, TypeError, "cannot be interpreted as an integer"),
    ):
      with pytest.raises(error, match=message):
        recorder.record(step, layers, microbatch=microbatch, axes=())
    with pytest.raises(ValueError, match=r"expert_load_E: expected the leading axes \(1,\)"):
      recorder.record(0, stats._replace(load_GE=stats.load_GE[None]), axes=("group",))
    recorder.record(np.int64(7), {"c": stats}, microbatch=jnp.int32(2), axes=())
  trace = read(tmp_path)
  assert (trace.step_N, trace.layers, trace.microbatch_N) == ([7], ["c"], [2])


def test_a_closed_recorder_says_so(tmp_path, monkeypatch):
  """In every process, also in those that write nothing."""
  stats = traces.stats_of(traces.loads(0))
  for process in (0, 1):
    monkeypatch.setattr(jax, "process_index", lambda process=process: process)
    recorder = Recorder(tmp_path, every=2)
    recorder.record(0, stats, axes=())
    recorder.close()
    recorder.close()
    for call in (
      lambda recorder=recorder: recorder.record(0, stats, axes=()),
      lambda recorder=recorder: recorder.record(1, stats, axes=()),
      recorder.flush,
    ):
      with pytest.raises(RuntimeError, match="recorder: expected an open one, got one that was"):
        call()
  assert read(tmp_path).step_N.tolist() == [0]


@pytest.mark.parametrize(
  "metadata",
  [
    {"a": "\ud800"},
    {(1, 2): 3},
    {"a": 10**5000},
    functools.reduce(lambda x, _: {"x": x}, [0] * 9999),
  ],
)
def test_metadata_that_nobody_could_read_is_refused_at_once(tmp_path, metadata):
  with pytest.raises(ValueError, match="metadata: expected what JSON can say, got: "):
    Recorder(tmp_path, metadata=metadata)


def test_what_is_recorded_can_be_read(tmp_path):
  """Names from elsewhere, and metadata of every kind."""
  folder = tmp_path / os.fsdecode(b"run \xff")
  config = uep.BalanceConfig(strategy=lambda load_GE, config, cost: None)
  metadata = types.MappingProxyType({"path": tmp_path, "\u00e9": [None, {"x": 1e400}]})
  stats = traces.stats_of(traces.loads(0))
  names = ["", "a\nb", "\u00e9\U0001f600", " ", "<b>"]
  with Recorder(folder, config=config, metadata=metadata) as recorder:
    recorder.record(-(2**63), dict.fromkeys(names, stats), axes=())
    recorder.record(2**63 - 1, stats, axes=(), microbatch=2**31 - 1)
  trace = read(folder)
  assert trace.layers == ["0", *names[1:]] and trace.manifest.name == "run ?"
  assert trace.manifest.metadata["path"] == str(tmp_path)
  json.dumps(summarise(trace))


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


# --- cost ------------------------------------------------------------------------------------


class Late:
  """The slowest thread there can be: it works only when somebody waits for it."""

  def submit(self, function, *arguments):
    return types.SimpleNamespace(result=functools.partial(function, *arguments))

  def shutdown(self):
    pass


def test_memory_is_bounded(tmp_path, monkeypatch):
  """However slow the disk is: what is collected, and what is written meanwhile."""
  one = traces.stats_of(traces.loads(0))
  monkeypatch.setattr(concurrent.futures, "ThreadPoolExecutor", lambda *_: Late())
  with Recorder(
    tmp_path, flush_seconds=1e9, flush_bytes=3 * sum(x.nbytes for x in one)
  ) as recorder:
    held = []
    for step in range(30):
      stats = jax.tree.map(np.copy, one)
      held.append(weakref.ref(stats.load_GE))
      recorder.record(step, stats, axes=())
      del stats
      assert sum(ref() is not None for ref in held) <= 6
  trace = read(tmp_path)
  assert trace.step_N.tolist() == list(range(30)) and len(files.chunks(tmp_path)) == 10


def test_the_error_of_every_write_is_raised(tmp_path, monkeypatch):
  stats, writes = traces.stats_of(traces.loads(0)), iter([True, False, True, False, False])
  write = files.write_chunks

  def full_at_times(*arguments):
    if next(writes):
      raise OSError("no space left")
    return write(*arguments)

  monkeypatch.setattr(files, "write_chunks", full_at_times)
  recorder, failed = Recorder(tmp_path, flush_seconds=1e9, flush_bytes=1), []
  for step in range(5):
    try:
      recorder.record(step, stats, axes=())
    except TraceError as error:
      failed.append((step, str(error)))
  recorder.close()
  (first, message), (second, _) = failed
  assert "expected to write, got: no space left" in message
  # What a write lost is lost; what met its error is written by the next.
  assert read(tmp_path).step_N.tolist() == [1, 2, 4] and (first, second) == (1, 4)


def test_recording_waits_for_no_write(tmp_path, monkeypatch):
  """The loop goes on while a write hangs, and what is written is fetched by the other thread."""
  begun, released, fetching = threading.Event(), threading.Event(), set()
  write, fetch, now = files.write_chunks, jax.device_get, [0.0]

  def write_late(*arguments):
    begun.set()
    assert released.wait(timeout=60)
    return write(*arguments)

  def fetched(stats):
    fetching.add(threading.current_thread().name)
    return fetch(stats)

  monkeypatch.setattr(files, "write_chunks", write_late)
  monkeypatch.setattr(jax, "device_get", fetched)
  monkeypatch.setattr(time, "monotonic", lambda: now[0])
  stats = {f"layer{i}": traces.stats_of(traces.loads(i)) for i in range(2)}
  with Recorder(tmp_path, flush_seconds=10) as recorder:
    now[0] = 10.0
    recorder.record(0, stats, axes=())
    assert begun.wait(timeout=60)
    for step in range(1, 100):
      now[0] += 0.1
      recorder.record(step, stats, axes=())
    assert not list(tmp_path.glob("*.npz"))
    released.set()
  assert len(read(tmp_path)) == 200
  assert all(name.startswith("ultraep_trace") for name in fetching)


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
