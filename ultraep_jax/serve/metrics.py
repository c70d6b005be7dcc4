"""What an operator wants to know of an engine: counters, and the last batches."""

import collections
from typing import NamedTuple

import numpy as np

_RECENT = 64


class Metrics(NamedTuple):
  """A snapshot. Counts are since the engine was made.

  Attributes:
    submitted: requests that were accepted.
    refused: requests that met a full queue.
    completed: requests with a result.
    failed: requests with an error.
    cancelled: requests that were cancelled before they had a result.
    waiting: requests in the queue now.
    running: requests in batches now. Every submitted request is in one of the last five counts.
    batches: batches that ran.
    tokens: tokens of their requests.
    padding_share: share of the tokens that the batches had room for, but no request filled.
    busy_seconds: time with a batch on the devices.
    recent_seconds: of the last batches (64), oldest first, each without the time that it waited
      for the one before.
    imbalance_before: ``[batches, layers]`` of the last batches, busiest over mean rank as the
      router chose, the worst token group; no columns without MoE layers.
    imbalance_after: the same as computed.
  """

  submitted: int
  refused: int
  completed: int
  failed: int
  cancelled: int
  waiting: int
  running: int
  batches: int
  tokens: int
  padding_share: float
  busy_seconds: float
  recent_seconds: np.ndarray
  imbalance_before: np.ndarray
  imbalance_after: np.ndarray


class Counters:
  """The engine's own counts. Not thread-safe: the queue's lock guards it."""

  def __init__(self) -> None:
    self.submitted = self.refused = self.completed = self.failed = self.cancelled = 0
    self.batches = self.tokens = self.slots = 0
    self.busy_seconds = 0.0
    self._seconds = collections.deque[float](maxlen=_RECENT)
    self._before = collections.deque[np.ndarray](maxlen=_RECENT)
    self._after = collections.deque[np.ndarray](maxlen=_RECENT)

  def add_batch(
    self, tokens: int, slots: int, seconds: float, before_L: np.ndarray, after_L: np.ndarray
  ) -> None:
    self.batches += 1
    self.tokens += tokens
    self.slots += slots
    self.busy_seconds += seconds
    self._seconds.append(seconds)
    self._before.append(before_L)
    self._after.append(after_L)

  def snapshot(self, waiting: int, running: int) -> Metrics:
    return Metrics(
      submitted=self.submitted,
      refused=self.refused,
      completed=self.completed,
      failed=self.failed,
      cancelled=self.cancelled,
      waiting=waiting,
      running=running,
      batches=self.batches,
      tokens=self.tokens,
      padding_share=1 - self.tokens / self.slots if self.slots else 0.0,
      busy_seconds=self.busy_seconds,
      recent_seconds=np.array(self._seconds),
      imbalance_before=np.stack(self._before) if self._before else np.zeros((0, 0)),
      imbalance_after=np.stack(self._after) if self._after else np.zeros((0, 0)),
    )


def imbalance(load_LNG: np.ndarray) -> np.ndarray:
  """Busiest over mean rank of each layer ``[L]``, the worst of its token groups; 1 if idle.

  >>> imbalance(np.array([[[3, 1], [0, 0]]])).tolist()
  [1.5]
  """
  over_LN = load_LNG.max(axis=-1) / np.maximum(load_LNG.mean(axis=-1), 1e-9)
  return over_LN.max(axis=-1, initial=1.0)
