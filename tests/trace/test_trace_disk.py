"""The files of traces: several writers, many records, kills, full disks."""

import errno
import os
import pathlib
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import traces

from ultraep_jax.trace import Recorder, TraceError, format, read
from ultraep_jax.trace import disk as files

ROOT = pathlib.Path(__file__).parents[2]


def record(recorder: Recorder, step: int, **sizes: int) -> None:
  recorder.record(step, traces.stats_of(traces.loads(step, **sizes)), axes=())


class Hook:
  """In the place of a function: does something else before the given call of it."""

  def __init__(self, monkeypatch, owner, name, at, action):
    self.function, self.at, self.action, self.calls = getattr(owner, name), at, action, 0
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: self(*args, **kwargs))

  def __call__(self, *args, **kwargs):
    self.calls += 1
    if self.calls == self.at:
      self.action()
    return self.function(*args, **kwargs)


# --- several writers -------------------------------------------------------------------------

STEPS_OF_A_WRITE = [
  (os, "fsync", 1),
  (os, "link", 1),
  (pathlib.Path, "unlink", 1),  # so far the manifest
  (np, "savez_compressed", 1),
  (os, "fsync", 2),
  (os, "link", 2),
  (pathlib.Path, "unlink", 2),
]


@pytest.mark.parametrize(("owner", "name", "at"), STEPS_OF_A_WRITE)
def test_what_two_recorders_write_into_a_new_folder(tmp_path, monkeypatch, owner, name, at):
  """The second writes everything between any two steps of the first."""
  with Recorder(tmp_path, name="one") as one, Recorder(tmp_path, name="other") as other:
    record(one, 0)
    record(other, 1)
    hook = Hook(monkeypatch, owner, name, at, other.flush)
    one.flush()
    assert hook.calls >= at
    record(one, 2)
    record(other, 3)
  trace = read(tmp_path)
  assert trace.step_N.tolist() == [0, 1, 2, 3] and not trace.problems
  assert trace.manifest.name in ("one", "other")
  assert not list(tmp_path.glob("*.partial"))


def test_recorders_that_open_a_folder_at_once(tmp_path):
  barrier, errors = threading.Barrier(4), []

  def write(number):
    try:
      with Recorder(tmp_path) as recorder:
        record(recorder, number)
        barrier.wait(timeout=60)
    except Exception as error:
      errors.append(error)

  threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not errors and read(tmp_path).step_N.tolist() == [0, 1, 2, 3]


def test_a_recorder_of_other_sizes_that_comes_second_says_so(tmp_path):
  with Recorder(tmp_path) as one:
    other = Recorder(tmp_path)
    record(one, 0)
    record(other, 1, experts=16)
    one.flush()
    with pytest.raises(TraceError, match=r"'num_experts': 8.* as in the trace, got .*16"):
      other.close()
  trace = read(tmp_path)
  assert trace.step_N.tolist() == [0] and not trace.problems


def test_file_systems_without_links(tmp_path, monkeypatch):
  def refuse(*_):
    raise OSError(errno.EPERM, "no links")

  monkeypatch.setattr(os, "link", refuse)
  with Recorder(tmp_path) as one, Recorder(tmp_path) as other:
    for step in range(4):
      record((one, other)[step % 2], step)
      (one, other)[step % 2].flush()
  assert read(tmp_path).step_N.tolist() == [0, 1, 2, 3]
  assert not list(tmp_path.glob("*.partial"))


def test_many_records_become_chunks_that_can_be_read(tmp_path, monkeypatch):
  monkeypatch.setattr(format, "CHUNK_BYTES", 3000)
  with Recorder(tmp_path) as recorder:
    for step in range(20):
      record(recorder, step)
  trace = read(tmp_path)
  assert trace.step_N.tolist() == list(range(20)) and not trace.problems
  assert len(files.chunks(tmp_path)) > 2
  for i in range(20):
    np.testing.assert_array_equal(trace.load_NGE[i], traces.loads(i))
  recorder = Recorder(tmp_path)
  with pytest.raises(TraceError, match="record: expected at most 3000 bytes in a chunk, got"):
    recorder.record(21, {"x" * 1000: traces.stats_of(traces.loads(0))}, axes=())
    recorder.close()


# --- kills and full disks --------------------------------------------------------------------


def test_a_run_that_is_killed_keeps_what_was_flushed(tmp_path):
  """Killed before each of the calls that change files; a child for each, forked from one."""
  code = """
import os, pathlib, pickle, signal, sys
import jax, numpy as np
from ultraep_jax.trace import Recorder
jax.process_index = lambda: 0  # starts no backend, whose threads could not be forked
folder, stats = pathlib.Path(sys.argv[1]), pickle.load(sys.stdin.buffer)
deadly = ((os, "fsync"), (os, "link"), (pathlib.Path, "unlink"), (np, "savez_compressed"))
def run(kill_at):
  calls = 0
  def before(function):
    def call(*args, **kwargs):
      nonlocal calls
      calls += 1
      if calls == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
      return function(*args, **kwargs)
    return call
  for owner, name in deadly:
    setattr(owner, name, before(getattr(owner, name)))
  recorder = Recorder(folder / str(kill_at))
  for step in range(2):
    recorder.record(step, stats, axes=())
    recorder.flush()
    (folder / f"{kill_at} flushed").write_text(str(step + 1))
  recorder.close()
for kill_at in range(1, 100):
  child = os.fork()
  if not child:
    run(kill_at)
    os._exit(0)
  if not os.waitpid(child, 0)[1]:
    break
"""
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  stats = pickle.dumps(traces.stats_of(traces.loads(0)))
  command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
  subprocess.run(command, input=stats, env=environment, check=True, timeout=300)
  runs = sorted(int(path.name) for path in tmp_path.iterdir() if path.is_dir())
  assert len(runs) > 8
  for run in runs:
    folder, flushed = tmp_path / str(run), tmp_path / f"{run} flushed"
    kept = int(flushed.read_text()) if flushed.exists() else 0
    if kept:
      trace = read(folder)
      assert trace.step_N.tolist() in (list(range(kept)), list(range(kept + 1))), run
      assert not trace.problems
    with Recorder(folder) as recorder:  # and goes on
      record(recorder, 9)
    trace = read(folder)
    assert trace.step_N.tolist()[:kept] == list(range(kept)) and trace.step_N[-1] == 9
    assert not trace.problems


@pytest.mark.parametrize(("owner", "name", "at"), STEPS_OF_A_WRITE)
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, owner, name, at):
  def fail():
    if name == "savez_compressed":
      (path,) = tmp_path.glob("*.partial")
      path.write_bytes(b"a part")
    if name != "unlink":  # which needs no space
      raise OSError(errno.ENOSPC, "No space left on device")

  with Recorder(tmp_path) as recorder:
    record(recorder, 0)
    hook = Hook(monkeypatch, owner, name, at, fail)
    kept = [0]
    try:
      recorder.flush()
    except TraceError as error:
      assert "No space left on device" in str(error)
      kept = []
    assert hook.calls >= at
    assert not list(tmp_path.glob("*.partial"))
    record(recorder, 1)
  assert read(tmp_path).step_N.tolist() == [*kept, 1]
  assert name in ("link", "unlink") or not kept


def test_chunks_without_a_manifest_are_no_trace_to_go_on_with(tmp_path):
  folder = traces.write(tmp_path / "trace", steps=1)
  (folder / files.MANIFEST).unlink()
  with pytest.raises(TraceError, match=r"trace: expected trace.json beside its chunks, got none"):
    Recorder(folder)
