"""What an engine counts: every number of its metrics and of its results."""

import dataclasses
import time

import numpy as np
import pytest
from host_programs import CONFIG, NAN_TOKEN, HasLoads, make_engine

from ultraep_jax import serve
from ultraep_jax.serve.metrics import imbalance


class Timed:
  """An engine in whose batches only landing takes time."""

  def __init__(self, monkeypatch, limit=50):
    self.now, self.landing = 0.0, []
    monkeypatch.setattr(time, "monotonic", lambda: self.now)
    config = dataclasses.replace(CONFIG, queue_limit=limit)
    self.engine = make_engine(monkeypatch, self._at, config)

  def _at(self, stage):
    if stage == "land":
      self.now = self.landing.pop(0)

  def step(self, now, before=None, after=None):
    """Goes on; what is launched has these loads of ranks, by layer and group."""
    self.now = now
    self.engine._programs.stats = HasLoads(np.array(before), np.array(after)) if before else None
    assert self.engine._step()


def test_what_metrics_mean(monkeypatch):
  """Every number is one of its own, so that none can stand for another."""
  timed = Timed(monkeypatch, limit=11)
  engine, timed.now = timed.engine, 3.0
  first = [engine.submit([1] * 3) for _ in range(4)]
  timed.now = 5.0
  good, bad, one, other = (engine.submit(p) for p in ([1] * 4, [1, NAN_TOKEN], [1], [1]))
  last = engine.submit([1] * 3)
  early = [engine.submit([1]) for _ in range(2)]
  for _ in range(3):
    with pytest.raises(serve.QueueFull):
      engine.submit([1])
  for future in early:
    future.cancel()
  seen = engine.metrics()
  assert seen._fields[:7] == (
    *("submitted", "refused", "completed", "failed", "cancelled", "waiting", "running"),
  )
  assert seen[:7] == (11, 3, 0, 0, 2, 9, 0)
  assert (seen.batches, seen.tokens, seen.padding_share, seen.busy_seconds) == (0, 0, 0, 0)
  assert seen.recent_seconds.shape == (0,)
  assert seen.imbalance_before.shape == seen.imbalance_after.shape == (0, 0)

  timed.landing = [31.0, 38.0, 75.0]
  timed.step(10.0, [[[3, 1], [2, 2]], [[7, 1], [4, 4]]], [[[2, 2], [9, 7]], [[5, 3], [4, 4]]])
  timed.step(17.0, [[[4, 0], [0, 0]], [[5, 3], [8, 0]]], [[[5, 11], [0, 0]], [[1, 1], [2, 2]]])
  one.cancel()  # amid its batch
  seen = engine.metrics()
  assert seen[:7] == (11, 3, 0, 0, 3, 1, 7) and seen.batches == seen.tokens == 0
  timed.step(20.0)  # lands the first
  seen = engine.metrics()
  assert seen[:7] == (11, 3, 4, 0, 3, 1, 3) and seen.busy_seconds == 31 - 10
  timed.step(33.0)
  seen = engine.metrics()
  assert seen[:7] == (11, 3, 6, 1, 3, 1, 0)
  assert seen.busy_seconds == (31 - 10) + (38 - 31)  # once where both were there
  timed.step(60.0, [[[1, 1], [1, 1]], [[3, 1], [1, 1]]], [[[1, 1], [1, 1]], [[1, 1], [1, 1]]])
  timed.step(61.0)
  seen = engine.metrics()
  assert seen[:7] == (11, 3, 7, 1, 3, 0, 0)
  assert seen.batches == 3 and seen.tokens == 12 + 8 + 3
  assert seen.padding_share == 1 - 23 / (2 * 8 + 2 * 8 + 2 * 4)
  assert seen.recent_seconds.tolist() == [31 - 10, 38 - 31, 75 - 60]
  assert seen.busy_seconds == 43
  assert seen.imbalance_before.tolist() == [[1.5, 1.75], [2, 2], [1, 1.5]]
  assert seen.imbalance_after.tolist() == [[1.125, 1.25], [1.375, 1], [1, 1]]

  assert isinstance(bad.exception(), serve.RequestFailed)
  for future, (length, queued, started, finished, batch, requests, tokens, slots) in (
    *((future, (3, 3, 10, 31, 0, 4, 12, 16)) for future in first),
    (good, (4, 5, 17, 38, 1, 4, 8, 16)),
    (other, (1, 5, 17, 38, 1, 4, 8, 16)),
    (last, (3, 5, 60, 75, 2, 1, 3, 8)),
  ):
    result = future.result()
    assert (result.length, result.queued, result.started, result.finished) == (
      *(length, queued, started, finished),
    )
    assert (result.batch, result.batch_requests) == (batch, requests)
    assert (result.batch_tokens, result.batch_slots) == (tokens, slots)


def test_layers_without_tokens_count_as_even():
  rng = np.random.default_rng(0)
  load_LNG = rng.integers(0, 9, (20, 3, 4)) * rng.integers(0, 2, (20, 3, 1))
  for load_NG, got in zip(load_LNG, imbalance(load_LNG), strict=True):
    busy = [load_G.max() / load_G.mean() for load_G in load_NG if load_G.any()]
    assert got == pytest.approx(max(busy, default=1))
  assert not load_LNG.any(axis=(1, 2)).all()


def test_a_batch_that_runs_again_is_counted_as_it_ran(monkeypatch):
  timed = Timed(monkeypatch)
  futures = [timed.engine.submit([1] * 3) for _ in range(4)]
  run, sizes = timed.engine._programs.run, []

  def raise_once(batch):
    sizes.append(int((batch.last_BR >= 0).sum()))
    if len(sizes) == 1:
      raise ValueError("once")
    return run(batch)

  monkeypatch.setattr(timed.engine._programs, "run", raise_once)
  timed.landing = [2.0, 5.0, 11.0]
  assert timed.engine.run_batch() == 4
  seen = timed.engine.metrics()
  assert sizes == [4, 2, 2] and (seen.batches, seen.tokens) == (2, 12)
  assert seen.padding_share == 1 - 12 / 16 and seen.recent_seconds.tolist() == [3, 6]
  assert [future.result().batch for future in futures] == [1, 1, 2, 2]
  assert [future.result().queued for future in futures] == [0] * 4


def test_the_last_64_batches_are_kept(monkeypatch):
  timed = Timed(monkeypatch)
  timed.landing = np.cumsum(np.arange(70.0)).tolist()
  for _ in range(70):
    timed.engine.submit([1])
    timed.engine.run_batch()
  seen = timed.engine.metrics()
  assert seen.recent_seconds.tolist() == list(range(70))[-64:]
  assert seen.busy_seconds == sum(range(70)) and seen.imbalance_after.shape == (64, 0)
