"""An engine from its start to its end: which threads may call what, and when."""

import concurrent.futures
import gc
import logging
import threading
import weakref

import pytest
from host_programs import (
  DRIVERS,
  PER_BATCH,
  WAIT,
  HasLoads,
  assert_all_ended,
  make_engine,
)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("caller", ["future", "on_stats"])
def test_close_in_a_callback(monkeypatch, caplog, caller, drain, driver):
  def close(*_):
    engine.close(drain=drain)
    with pytest.raises(RuntimeError, match="closed"):
      engine.submit([1])

  options = {"on_stats": close} if caller == "on_stats" else {}
  engine = make_engine(monkeypatch, **options)
  engine._programs.stats = HasLoads()
  futures = [engine.submit([1, 2, i]) for i in range(3 * PER_BATCH)]
  if caller == "future":
    for future in futures:
      future.add_done_callback(close)
  with caplog.at_level(logging.ERROR):
    if driver == "run_batch":
      assert engine.run_batch() == PER_BATCH  # and then the others, as nobody else will
    else:
      DRIVERS[driver](engine, futures)
    assert not concurrent.futures.wait(futures, timeout=WAIT).not_done
    engine.close(drain=drain)
  assert not caplog.records
  assert_all_ended(engine, futures)
  assert engine._thread is None or not engine._thread.is_alive()
  if drain:
    assert [future.result().token for future in futures] == list(range(len(futures)))
  else:
    assert futures[0].result().token == 0 and futures[-1].cancelled()


def test_an_engine_is_not_run_from_its_callbacks(monkeypatch):
  errors = []

  def call(future):
    for function in (engine.run_batch, engine.start):
      try:
        function()
      except RuntimeError as error:
        errors.append(str(error))

  engine = make_engine(monkeypatch)
  futures = [engine.submit([i]) for i in range(2 * PER_BATCH)]
  futures[0].add_done_callback(call)
  assert engine.run_batch() == PER_BATCH
  assert errors == ["engine: expected a call from outside of its callbacks"] * 2
  assert engine.run_batch() == PER_BATCH  # still alive
  assert_all_ended(engine, futures)


@pytest.mark.parametrize("event", ["result", "error", "cancel", "close", "refuse all"])
def test_callbacks_are_called_without_the_lock(monkeypatch, event):
  """One that waits for another thread, which asks the engine, does not hang."""

  def at(stage):
    if stage == "run" and event == "error":
      raise ValueError
    if stage == "pack" and event == "refuse all":
      raise KeyboardInterrupt

  engine, seen = make_engine(monkeypatch, at), []

  def ask(future):
    asking = threading.Thread(target=lambda: seen.append(engine.metrics()), daemon=True)
    asking.start()
    asking.join(timeout=WAIT)

  future = engine.submit([1])
  future.add_done_callback(ask)
  if event == "cancel":
    future.cancel()
  elif event == "close":
    engine.close(drain=False)
  elif event == "refuse all":
    with pytest.raises(KeyboardInterrupt):
      engine.run_batch()
  else:
    engine.run_batch()
  (metrics,) = seen  # and the request is counted by then
  assert (metrics.completed, metrics.failed, metrics.cancelled, metrics.running) == {
    "result": (1, 0, 0, 0),
    "error": (0, 1, 0, 0),
    "refuse all": (0, 1, 0, 0),
  }.get(event, (0, 0, 1, 0))


# --- life -------------------------------------------------------------------------------------


def test_closed_and_started_twice(monkeypatch):
  engine = make_engine(monkeypatch)
  future = engine.submit([7])
  engine.start()
  for call in (engine.start, engine.run_batch):
    with pytest.raises(RuntimeError, match="expected"):
      call()
  assert future.result(timeout=WAIT).token == 7
  engine.close()
  engine.close(drain=False)
  with pytest.raises(RuntimeError, match="neither started nor closed"):
    engine.start()
  with pytest.raises(RuntimeError, match="closed"):
    engine.submit([1])

  engine = make_engine(monkeypatch)
  waits = engine.submit([8])
  engine.close()
  assert waits.result(timeout=0).token == 8 and engine.run_batch() == 0
  with pytest.raises(RuntimeError, match="neither started nor closed"):
    engine.start()


class AskedLock:
  """A lock that says when a second thread asks for it."""

  def __init__(self):
    self.lock, self.asked = threading.Lock(), threading.Event()

  def __enter__(self):
    if not self.lock.acquire(blocking=False):
      self.asked.set()
      self.lock.acquire()

  def __exit__(self, *_):
    self.lock.release()


@pytest.mark.parametrize("other", ["run_batch", "close", "start"])
def test_only_one_thread_runs_programs(monkeypatch, other):
  """Two that start them in different orders on several GPUs would wait for each other for ever."""
  threads, started = [], []

  def at(stage):
    threads.append(threading.get_ident())
    if stage == "run" and not started:
      started.append(threading.Thread(target=getattr(engine, other)))
      started[0].start()
      assert engine._turn.asked.wait(timeout=WAIT)
      assert set(threads) == {threading.get_ident()}

  engine = make_engine(monkeypatch, at)
  engine._turn = AskedLock()
  futures = [engine.submit([i]) for i in range(3 * PER_BATCH)]
  assert engine.run_batch() == PER_BATCH
  assert not concurrent.futures.wait(futures[: 2 * PER_BATCH], timeout=WAIT).not_done
  engine.close()
  started[0].join(timeout=WAIT)
  assert_all_ended(engine, futures)


def test_one_thread_is_started(monkeypatch):
  """By the first of two calls, while the second one waits for it."""
  errors, others = [], []

  def start():
    with pytest.raises(RuntimeError, match="expected one that was not started") as caught:
      engine.start()
    errors.append(caught.value)

  def at(stage):
    if stage == "compile" and not others:
      others.append(threading.Thread(target=start))
      others[0].start()
      assert engine._turn.asked.wait(timeout=WAIT)

  engine = make_engine(monkeypatch, at)
  engine._turn = AskedLock()
  engine.start()
  future, thread = engine.submit([5]), engine._thread
  assert future.result(timeout=WAIT).token == 5
  engine.close()
  others[0].join(timeout=WAIT)
  assert len(errors) == 1 and engine._thread is thread and not thread.is_alive()


def test_a_future_keeps_no_engine_alive(monkeypatch):
  """Which would hold the parameters of its model."""
  engine = make_engine(monkeypatch)
  futures = [engine.submit([i]) for i in range(PER_BATCH + 1)]
  futures[-1].cancel()
  engine.run_batch()
  model = weakref.ref(engine._programs)
  del engine
  monkeypatch.undo()
  gc.collect()
  assert model() is None and futures[0].result().token == 0
