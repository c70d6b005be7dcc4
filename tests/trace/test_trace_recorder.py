"""The recorder: wrong calls, cost, several processes."""

import concurrent.futures
import functools
import threading
import time
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import traces

from ultraep_jax.trace import Recorder, TraceError, read
from ultraep_jax.trace import disk as files

# --- wrong calls -----------------------------------------------------------------------------


def test_wrong_arguments(tmp_path):
  stats = traces.stats_of(traces.loads(0))
  with pytest.raises(ValueError, match="every: expected at least 1, got 0"):
    Recorder(tmp_path, every=0)
  with pytest.raises(ValueError, match="flush_seconds: expected at least 0, got -1"):
    Recorder(tmp_path, flush_seconds=-1)
  with pytest.raises(TypeError, match="config: expected a BalanceConfig, got int"):
    Recorder(tmp_path, config=3)  # pyright: ignore[reportArgumentType]
  with pytest.raises(TypeError, match="metadata: expected a Mapping, got int"):
    Recorder(tmp_path, metadata=3)  # pyright: ignore[reportArgumentType]
  with Recorder(tmp_path) as recorder:
    with pytest.raises(TypeError, match="axes: expected a str or a tuple of them, got 3"):
      recorder.record(0, stats, axes=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"axes: expected distinct names .* got \('step',\)"):
      recorder.record(0, stats, axes="step")
    with pytest.raises(ValueError, match=r"axes: expected the 0 leading axes .* got \('group',\)"):
      recorder.record(0, stats)
    with pytest.raises(ValueError, match="axes: expected distinct names"):
      recorder.record(0, stats, axes=("step",))
    with pytest.raises(TypeError, match="expected LayerStats by layer, got int"):
      recorder.record(0, {"layer0": 3})  # pyright: ignore[reportArgumentType]
    for none in (None, np.zeros(3), (stats, 0.5)):
      with pytest.raises(TypeError, match="stats: expected LayerStats by layer, got"):
        recorder.record(0, none)  # pyright: ignore[reportArgumentType]


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
      (-1, {"a": stats}, 0, ValueError, r"step: expected a value in \[0, 9223.*, got -1"),
      (1.5, {"a": stats}, 0, TypeError, "step: expected an integer, got float"),
      (1, {"a": stats}, None, TypeError, "microbatch: expected an integer, got NoneType"),
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
    {"a": object()},
    {"a": [test_wrong_arguments]},
    functools.reduce(lambda x, _: {"x": x}, [0] * 9999),
  ],
)
def test_metadata_that_nobody_could_read_is_refused_at_once(tmp_path, metadata):
  with pytest.raises(ValueError, match="metadata: expected what JSON can say, got: "):
    Recorder(tmp_path, metadata=metadata)


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


def test_a_run_that_needs_more_slots_or_rounds_is_told_once(tmp_path, caplog):
  stats = traces.stats_of(traces.loads(0))._replace(rounds=np.int32(2))
  with caplog.at_level("WARNING", logger="ultraep_jax"), Recorder(tmp_path) as recorder:
    for step in range(3):
      recorder.record(step, stats, axes=())
      recorder.flush()
  (message,) = [record.getMessage() for record in caplog.records]
  assert "1 of 1 layers ran more than one round" in message and str(tmp_path) in message
