"""The requests of an engine, from ``submit`` to their outcome, and the engine's counts."""

import collections
import concurrent.futures
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from ultraep_jax.serve.metrics import Counters, Metrics
from ultraep_jax.serve.packing import Packing
from ultraep_jax.serve.requests import Prefilled, QueueFull, Request, RequestFailed

Future = concurrent.futures.Future[Prefilled]


class RequestQueue:
  """Requests that wait, oldest first, and those that run. Thread-safe.

  A request is in one of the two until it has its outcome. Whoever takes it out gives it one, so
  each has exactly one, and is counted before anybody can see it. A cancelled request is taken out
  at once. Callbacks of futures are called without the lock.
  """

  def __init__(self, limit: int):
    self._limit = limit
    self._changed = threading.Condition()  # guards everything here
    self._waiting = collections.OrderedDict[Future, Request]()
    self._running: dict[Future, Request] = {}
    self._waiting_tokens = 0
    self._closed = self._discards = False
    self._counters = Counters()

  def __len__(self) -> int:
    """How many wait."""
    return len(self._waiting)

  @property
  def closed(self) -> bool:
    return self._closed

  # --- users' threads --------------------------------------------------------------------------

  def submit(self, prompt: np.ndarray) -> Future:
    """Adds a request.

    Raises:
      QueueFull: ``limit`` requests wait.
      RuntimeError: the queue is closed.
    """
    request = Request(prompt, Future(), time.monotonic())
    with self._changed:
      if self._closed:
        raise RuntimeError("engine: expected an open one, got one that was closed")
      if len(self._waiting) >= self._limit:
        self._counters.refused += 1
        raise QueueFull(
          f"queue: expected fewer than {self._limit} requests (queue_limit), got "
          f"{len(self._waiting)} with {self._waiting_tokens} tokens"
        )
      self._counters.submitted += 1
      self._waiting[request.future] = request
      self._waiting_tokens += len(prompt)
      self._changed.notify()
    request.future.add_done_callback(self._drop_cancelled)
    return request.future

  def close(self, *, drain: bool) -> None:
    """Takes no more requests; without ``drain`` it cancels those that wait."""
    with self._changed:
      self._closed = True
      self._discards |= not drain
      cancelled = list(self._waiting) if self._discards else []
      self._changed.notify_all()
    with contextlib.ExitStack() as stack:  # calls all, whatever a callback raises
      for future in reversed(cancelled):
        stack.callback(future.cancel)

  def metrics(self) -> Metrics:
    with self._changed:
      return self._counters.snapshot(len(self._waiting), len(self._running))

  # --- the thread that runs batches ------------------------------------------------------------

  def wait(self) -> bool:
    """Until a request waits, or none will come: then it returns False."""
    with self._changed:
      while not (self._waiting or self._closed):
        self._changed.wait()
      return bool(self._waiting) and not self._discards

  def take(
    self, pack: Callable[[Sequence[Request]], Packing], most: int, *, only_full: bool
  ) -> tuple[list[Request], Packing] | None:
    """The next batch, whose requests run from now on.

    Args:
      pack: says which of the oldest, at least one, are in the batch.
      most: requests to look at.
      only_full: take only a batch that leaves some waiting.

    Returns:
      The requests and their places; None if none wait or the batch is not full.
    """
    with self._changed:
      oldest = list(itertools.islice(self._waiting.values(), most))
      if not oldest or self._discards:
        return None
      packing = pack(oldest)
      taken, _ = packing.split(oldest)
      if only_full and len(taken) == len(self._waiting):
        return None
      self._running |= {request.future: request for request in taken}
      for request in taken:
        self._leave_waiting(request.future)
      return taken, packing

  def finish(self, request: Request, result: Prefilled | RequestFailed) -> None:
    """Gives a request its outcome, unless it has one."""
    with self._changed:
      if not self._take_out(request.future) or not self._claim(request.future):
        return
      self._counters.failed += isinstance(result, RequestFailed)
      self._counters.completed += isinstance(result, Prefilled)
    if isinstance(result, RequestFailed):
      request.future.set_exception(result)
    else:
      request.future.set_result(result)

  def fail_all(self, error: BaseException) -> None:
    """Nobody waits for ever for an engine that is gone."""
    with self._changed:
      self._closed = True
      left = [*self._running.values(), *self._waiting.values()]
      self._changed.notify_all()
    with contextlib.ExitStack() as stack:
      for request in reversed(left):
        failed = RequestFailed(f"the engine ended: {error!r}")
        stack.callback(self.finish, request, failed)

  def count_batch(
    self, tokens: int, slots: int, seconds: float, before_L: np.ndarray, after_L: np.ndarray
  ) -> None:
    with self._changed:
      self._counters.add_batch(tokens, slots, seconds, before_L, after_L)

  # --- with the lock ---------------------------------------------------------------------------

  def _drop_cancelled(self, future: Future) -> None:
    """Called when a future is done: one that was not cancelled is out by then."""
    with self._changed:
      if self._take_out(future):
        self._claim(future)

  def _claim(self, future: Future) -> bool:
    """From here on it cannot be cancelled; False if it was, and those who wait for it wake up."""
    claimed = future.set_running_or_notify_cancel()
    self._counters.cancelled += not claimed
    return claimed

  def _take_out(self, future: Future) -> bool:
    """False if it was out already."""
    return self._leave_waiting(future) or self._running.pop(future, None) is not None

  def _leave_waiting(self, future: Future) -> bool:
    request = self._waiting.pop(future, None)
    if request is None:
      return False
    self._waiting_tokens -= len(request.prompt)
    return True
