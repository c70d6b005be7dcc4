"""Every request has one outcome and is counted once, whatever ends it, its batch or the engine."""

import concurrent.futures
import gc
import itertools
import logging
import sys
import threading
import weakref

import numpy as np
import pytest
from host_programs import CONFIG, ROWS, STAGES, HasLoads, make_engine

from ultraep_jax import serve

PER_BATCH = ROWS * CONFIG.max_requests
WAIT = 20  # seconds that only a fault takes


def run_in_thread(engine, futures):
  engine.start()
  concurrent.futures.wait(futures, timeout=WAIT)


def run_by_hand(engine, futures):
  while engine.run_batch():
    pass


DRIVERS = {
  "thread": run_in_thread,
  "run_batch": run_by_hand,
  "close": lambda engine, futures: engine.close(),
}


def assert_all_ended(engine, futures):
  """Those who wait wake up, and each request is in one count."""
  assert not concurrent.futures.wait(futures, timeout=WAIT).not_done
  seen = engine.metrics()
  assert (seen.waiting, seen.running) == (0, 0)
  cancelled = [future for future in futures if future.cancelled()]
  failed = [f for f in futures if not f.cancelled() and f.exception(timeout=0)]
  assert (seen.submitted, seen.cancelled, seen.failed) == (
    len(futures),
    len(cancelled),
    len(failed),
  )
  assert seen.completed == len(futures) - len(cancelled) - len(failed)


class Raiser:
  """Raises the second time that a stage comes, and cancels a request of that batch first."""

  def __init__(self, stage, error):
    self.stage, self.error, self.times, self.victim = stage, error, 0, None

  def __call__(self, stage):
    self.times += stage == self.stage
    if stage == self.stage and (self.times == 2 or stage == "compile"):
      if self.victim is not None:
        self.victim.cancel()
      raise self.error


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), SystemExit(3)])
@pytest.mark.parametrize("stage", [*STAGES, "on_stats", "callback"])
def test_what_ends_the_engine_ends_every_request(monkeypatch, stage, error, driver):
  raiser = Raiser(stage, error)
  options = {"on_stats": lambda number, stats: raiser("on_stats")} if stage == "on_stats" else {}
  engine = make_engine(monkeypatch, raiser, **options)
  if stage == "on_stats":
    engine._programs.stats = HasLoads()
  futures = [engine.submit([1, 2, i]) for i in range(3 * PER_BATCH)]
  for future in futures:
    future.add_done_callback(lambda future: raiser("callback"))
  raiser.victim = futures[PER_BATCH + 1]
  try:
    DRIVERS[driver](engine, futures)
  except type(error) as raised:
    assert raised is error and (driver != "thread" or stage == "compile")
  assert_all_ended(engine, futures)
  failed = [f for f in futures if not f.cancelled() and f.exception(timeout=0)]
  assert failed and all("the engine ended: " in str(f.exception()) for f in failed)
  with pytest.raises(RuntimeError, match="closed"):
    engine.submit([1])
  engine.close()
  assert not engine._flights


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("stage", ["run", "cut", "land"])
def test_what_a_batch_raises_ends_nothing_else(monkeypatch, stage, driver):
  raiser = Raiser(stage, ZeroDivisionError("once"))
  engine = make_engine(monkeypatch, raiser)
  futures = [engine.submit([1, 2, i]) for i in range(3 * PER_BATCH)]
  raiser.victim = futures[PER_BATCH + 1]
  DRIVERS[driver](engine, futures)
  assert_all_ended(engine, futures)
  for i, future in enumerate(futures):
    assert future.cancelled() if future is raiser.victim else future.result().token == i
  engine.close()


@pytest.mark.parametrize("cancels", ["waiting", "running"])
@pytest.mark.parametrize("ends", ["batch", "close", "cancel", "error"])
def test_a_cancelled_request_wakes_those_who_wait(monkeypatch, cancels, ends):
  def at(stage):
    if stage == "run" and cancels == "running":
      victim.cancel()
    if stage == "run" and ends == "error":
      raise SystemExit

  engine = make_engine(monkeypatch, at)
  victim, other = engine.submit([1]), engine.submit([2])
  if cancels == "waiting":
    victim.cancel()
    assert not concurrent.futures.wait([victim], timeout=WAIT).not_done  # at once
  if ends == "error":
    with pytest.raises(SystemExit):
      engine.run_batch()
  elif ends == "batch":
    engine.run_batch()
  else:
    engine.close(drain=ends == "close")
  if ends == "cancel" and cancels == "running":
    assert victim.cancelled() and other.cancelled()  # neither ran
  assert_all_ended(engine, [victim, other])


# --- calls from callbacks ----------------------------------------------------------------------


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


def test_requests_of_many_threads_that_cancel(monkeypatch):
  engine = make_engine(monkeypatch)
  numbers, ready = itertools.count(), threading.Barrier(4)

  def use(seed):
    rng, mine = np.random.default_rng(seed), []
    ready.wait(timeout=WAIT)
    while len(mine) < 100:
      try:
        mine.append(engine.submit([next(numbers) % 100]))
      except serve.QueueFull:
        concurrent.futures.wait(mine, timeout=WAIT)
      if rng.random() < 0.3 and mine:
        mine[rng.integers(len(mine))].cancel()
    return mine

  with engine, concurrent.futures.ThreadPoolExecutor(4) as pool:
    futures = [future for mine in pool.map(use, range(4)) for future in mine]
  assert_all_ended(engine, futures)


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


# --- cost -------------------------------------------------------------------------------------


def calls_of(function):
  """How many functions, in Python or not, are called meanwhile by this thread."""
  count = 0

  def profile(frame, event, argument):
    nonlocal count
    count += event in ("call", "c_call")

  sys.setprofile(profile)
  try:
    function()
  finally:
    sys.setprofile(None)
  return count


def test_no_call_looks_at_the_whole_queue(monkeypatch):
  """They hold a lock that the engine's thread needs for the next batch."""

  def costs(limit):
    config = serve.EngineConfig(buckets=(4, 8), alignment=2, max_requests=2, queue_limit=limit)
    engine = make_engine(monkeypatch, config=config)
    futures, message = [engine.submit([1, 1]) for _ in range(limit)], []

    def refused():
      try:
        engine.submit([1])
      except serve.QueueFull as error:
        message.append(str(error))

    cancel = futures[limit // 2].cancel
    calls = refused, engine.metrics, cancel, lambda: engine.submit([1]), engine.run_batch
    counts = [calls_of(call) for call in calls]
    assert message[0].endswith(f"got {limit} with {2 * limit} tokens")
    return counts

  for few, many in zip(costs(10), costs(1000), strict=True):
    assert abs(many - few) < 20
