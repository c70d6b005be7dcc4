"""Every request has one outcome and is counted once, whatever ends it, its batch or the engine."""

import concurrent.futures
import itertools
import sys
import threading

import numpy as np
import pytest
from host_programs import (
  CONFIG,
  DRIVERS,
  PER_BATCH,
  STAGES,
  WAIT,
  HasLoads,
  assert_all_ended,
  make_engine,
)

from ultraep_jax import serve


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


def test_cancelled_at_the_instant_of_its_result(monkeypatch):
  """Between the cancelling and what it calls, the engine has the result."""
  engine = make_engine(monkeypatch)
  future = engine.submit([1])
  taken = engine._take(only_full=False)
  (request,) = taken[0]
  callbacks = future._invoke_callbacks

  def first_the_result():
    engine._queue.finish(request, serve.RequestFailed("too late"))
    callbacks()

  future._invoke_callbacks = first_the_result
  assert future.cancel()
  assert_all_ended(engine, [future])
  assert future.cancelled()


def test_no_batch_is_made_of_requests_that_are_being_cancelled(monkeypatch):
  engine, seen = make_engine(monkeypatch), []
  first, second = engine.submit([1]), engine.submit([2])
  first.add_done_callback(
    lambda _: seen.append((second.cancelled(), engine._take(only_full=False), engine._queue.wait()))
  )
  engine.close(drain=False)
  assert seen == [(False, None, False)]
  assert_all_ended(engine, [first, second])


def test_a_full_queue_says_what_waits(monkeypatch):
  engine = make_engine(monkeypatch)
  futures = [engine.submit([1] * 3) for _ in range(CONFIG.queue_limit)]
  futures[9].cancel()
  assert engine.run_batch() == PER_BATCH
  futures += [engine.submit([1]) for _ in range(PER_BATCH + 1)]
  with pytest.raises(serve.QueueFull, match=r"fewer than 50 .* got 50 with 140 tokens"):
    engine.submit([1])
  engine.close()
  assert_all_ended(engine, futures)


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
