"""The prefill engine: a queue, a thread that batches it, and results as futures."""

import collections
import concurrent.futures
import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from flax import nnx

from ultraep_jax.serve.config import EngineConfig
from ultraep_jax.serve.flights import Flight, land, launch
from ultraep_jax.serve.metrics import Counters, Metrics
from ultraep_jax.serve.packing import Packing, pack
from ultraep_jax.serve.programs import Programs
from ultraep_jax.serve.requests import (
  Prefilled,
  QueueFull,
  Request,
  RequestFailed,
  check_prompt,
)
from ultraep_jax.types import LayerStats

OnStats = Callable[[int, LayerStats], None]
_log = logging.getLogger(__name__)


class PrefillEngine:
  """Runs prompts through a model, batch by batch, and hands out first tokens and caches.

  ``submit`` may be called from any thread. Requests are packed by tokens into the rows of a
  batch, oldest first, and later ones into what is left; one thread runs the batches::

    with jax.set_mesh(mesh):
      engine = serve.PrefillEngine(model, serve.EngineConfig())
    with engine:  # compiles, starts the thread; drains and ends it
      future = engine.submit([17, 4, 256])
      print(future.result().token)

  ``future.cancel()`` before the request's batch starts keeps it from running; later it drops the
  result. A request that fails takes no other with it: non-finite logits fail the request alone,
  and the requests of a batch that raised run again in halves, down to the one that raises.

  The next batch starts before the running one has ended only if it is full, so that requests
  which arrive meanwhile are not held back by it.
  """

  def __init__(self, model: nnx.Module, config: EngineConfig, *, on_stats: OnStats | None = None):
    """Takes the model's parameters as they are, and the mesh in context.

    Args:
      model: called with a ``packed.PackedBatch``, returns a ``packed.PrefillResult``; has an
        attribute ``vocab_size`` and, if requests must start at multiples of it,
        ``attention_block``.
      config: of the batches and the queue.
      on_stats: called in the engine's thread with the number of each batch and the statistics of
        its layers, axes ``("layer", "group")``, on the devices; e.g. for
        ``trace.Recorder.record``. What it raises is logged.

    Raises:
      ValueError: the mesh is missing or does not fit, or ``attention_block`` does not divide the
        alignment; see ``docs/prefill.md``.
    """
    block = getattr(model, "attention_block", 1)
    if config.alignment % block:
      raise ValueError(
        f"alignment: expected a multiple of the model's attention_block = {block}, "
        f"got {config.alignment}"
      )
    self.config = config
    self._vocab_size = int(model.vocab_size)  # type: ignore[attr-defined]
    self._programs = Programs(model, config)
    self._on_stats = on_stats
    self._queue = collections.deque[Request]()
    self._changed = threading.Condition()  # guards the queue, the counters and the two flags
    self._counters = Counters()
    self._closed = False
    self._thread: threading.Thread | None = None
    self._flights = collections.deque[Flight]()  # of the thread alone
    self._batches = 0
    self._last_finish = 0.0

  # --- users' threads --------------------------------------------------------------------------

  def submit(self, tokens: Sequence[int] | np.ndarray) -> concurrent.futures.Future[Prefilled]:
    """Queues a prompt.

    Args:
      tokens: ``[n]`` integers in ``[0, vocab_size)``, at most the largest bucket.

    Returns:
      A future of ``Prefilled``. Its exception is ``RequestFailed``, or what the batch raised.

    Raises:
      QueueFull: too many requests wait.
      ValueError: the prompt is empty, too long or has a token outside the vocabulary.
      TypeError: the tokens are no integers.
      RuntimeError: the engine is closed.
    """
    prompt = check_prompt(tokens, self._vocab_size, self.config.buckets[-1])
    request = Request(prompt, concurrent.futures.Future(), time.monotonic())
    with self._changed:
      if self._closed:
        raise RuntimeError("engine: expected an open one, got one that was closed")
      if len(self._queue) >= self.config.queue_limit:
        self._drop_cancelled()
      if len(self._queue) >= self.config.queue_limit:
        self._counters.refused += 1
        waiting = sum(len(request.prompt) for request in self._queue)
        raise QueueFull(
          f"queue: expected fewer than {self.config.queue_limit} requests (queue_limit), got "
          f"{len(self._queue)} with {waiting} tokens"
        )
      self._counters.submitted += 1
      self._queue.append(request)
      self._changed.notify()
    return request.future

  def metrics(self) -> Metrics:
    """Counters and the last batches."""
    with self._changed:
      self._drop_cancelled()
      return self._counters.snapshot(len(self._queue))

  # --- life ------------------------------------------------------------------------------------

  def warm_up(self) -> None:
    """Compiles and runs every program once. Nothing compiles after it.

    Raises:
      Exception: what the model raises at trace time, or the compiler.
    """
    self._programs.compile()

  def start(self) -> None:
    """Warms up, if that is to be done, and starts the thread.

    Raises:
      RuntimeError: it runs, or the engine is closed.
      Exception: as ``warm_up``; the engine is closed then, and the requests that wait have failed.
    """
    if self._thread is not None or self._closed:
      raise RuntimeError("engine: expected one that was neither started nor closed")
    try:
      self.warm_up()
    except BaseException as error:
      self._abandon(error)
      raise
    self._thread = threading.Thread(target=self._work, name="ultraep_prefill", daemon=True)
    self._thread.start()

  def close(self, *, drain: bool = True) -> None:
    """Refuses new requests, ends the thread and waits for it.

    Args:
      drain: run what waits first; else it is cancelled. Batches on the devices always end.
    """
    with self._changed:
      self._closed = True
      if not drain:
        for request in self._queue:
          request.future.cancel()
        self._drop_cancelled()
      self._changed.notify()
    if self._thread is not None:
      self._thread.join()
    try:
      while self._queue:  # an engine that was never started
        self._run_next()
    except BaseException as error:
      self._abandon(error)
      raise

  def __enter__(self) -> Self:
    self.start()
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self.close(drain=error is None)

  def run_batch(self) -> int:
    """Runs one batch of waiting requests here and now, without the thread.

    Returns:
      How many requests it had; 0: none wait.

    Raises:
      RuntimeError: the thread runs.
    """
    if self._thread is not None:
      raise RuntimeError("run_batch: expected an engine that was not started")
    return self._run_next()

  # --- the engine's thread ---------------------------------------------------------------------

  def _work(self) -> None:
    try:
      while self._step():
        pass
    except BaseException as error:
      _log.exception("the engine's thread ended")
      self._abandon(error)

  def _step(self) -> bool:
    """Launches or lands one batch; returns False when there is nothing left to do."""
    with self._changed:
      while not (self._queue or self._flights or self._closed):
        self._changed.wait()
      if not (self._queue or self._flights):
        return False
      taken = self._take(only_full=bool(self._flights)) if len(self._flights) < 2 else None
    if taken is not None:
      self._flights.append(self._launch(*taken))
    elif self._flights:
      self._land(self._flights[0])
      self._flights.popleft()
    return True

  def _run_next(self) -> int:
    self.warm_up()
    with self._changed:
      taken = self._take(only_full=False)
    if taken is None:
      return 0
    self._land(self._launch(*taken))
    return len(taken[0])

  def _take(self, only_full: bool) -> tuple[Sequence[Request], Packing] | None:
    """The next batch, out of the queue; None if there is none or, if asked, it is not full."""
    self._drop_cancelled()
    if not self._queue:
      return None
    packing = self._pack(self._queue)
    taken, left = packing.split(self._queue)
    if only_full and not left:
      return None
    self._queue = collections.deque(left)
    return taken, packing

  def _pack(self, requests: Sequence[Request]) -> Packing:
    return pack([len(r.prompt) for r in requests], self._programs.rows, self.config)

  def _drop_cancelled(self) -> None:
    kept = [request for request in self._queue if not request.cancelled()]
    self._counters.cancelled += len(self._queue) - len(kept)
    self._queue = collections.deque(kept)

  def _launch(self, requests: Sequence[Request], packing: Packing) -> Flight:
    self._batches += 1
    return launch(self._programs, self._batches - 1, requests, packing)

  def _land(self, flight: Flight) -> None:
    """Waits for a batch and delivers its results, or runs it again in halves."""
    try:
      landed = land(flight)
    except Exception as error:
      flight.outputs, flight.caches = None, ()
      self._run_halves(flight.requests, error)
      return
    with self._changed:
      seconds = landed.finished - max(flight.started, self._last_finish)
      self._last_finish = landed.finished
      self._counters.add_batch(
        flight.tokens, flight.slots, seconds, landed.before_L, landed.after_L
      )
    self._finish(flight.requests, landed.results)
    if self._on_stats is not None and landed.stats is not None:
      try:
        self._on_stats(flight.number, landed.stats)
      except Exception:
        _log.exception("on_stats raised")

  def _run_halves(self, requests: Sequence[Request], error: Exception) -> None:
    """After a batch that raised: at most two more batches per request, and log2 deep."""
    traceback.clear_frames(error.__traceback__)  # they would hold arrays for as long as the error
    if len(requests) == 1:
      failed = RequestFailed(f"prompt of {len(requests[0].prompt)} tokens: {error!r}")
      failed.__cause__ = error
      self._finish(requests, [failed])
      return
    _log.warning("a batch of %d requests runs again in halves: %r", len(requests), error)
    middle = len(requests) // 2
    for part in (requests[:middle], requests[middle:]):
      while part:
        packing = self._pack(part)
        now, part = packing.split(part)
        self._land(self._launch(now, packing))

  def _finish(
    self, requests: Sequence[Request], results: Sequence[Prefilled | RequestFailed]
  ) -> None:
    for request, result in zip(requests, results, strict=True):
      delivered = request.finish(result)
      with self._changed:
        self._counters.cancelled += not delivered
        self._counters.failed += delivered and isinstance(result, Exception)
        self._counters.completed += delivered and not isinstance(result, Exception)

  def _abandon(self, error: BaseException) -> None:
    """Nobody waits for ever for an engine that is gone."""
    with self._changed:
      self._closed = True
      left = [r for flight in self._flights for r in flight.requests] + list(self._queue)
      self._queue.clear()
    for request in left:
      if not request.future.done():
        request.finish(RequestFailed(f"the engine ended: {error!r}"))
