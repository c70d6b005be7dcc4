"""The prefill engine: a queue, a thread that batches it, and results as futures."""

import collections
import contextlib
import logging
import operator
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from flax import nnx

from ultraep_jax.config import check_type
from ultraep_jax.serve.config import EngineConfig
from ultraep_jax.serve.flights import Flight, land, launch
from ultraep_jax.serve.metrics import Metrics
from ultraep_jax.serve.packing import Packing, pack
from ultraep_jax.serve.programs import Programs
from ultraep_jax.serve.queue import Future, RequestQueue
from ultraep_jax.serve.requests import Request, RequestFailed, check_prompt
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
  and the requests of a batch that raised run again in halves, down to the one that raises. What
  ends the engine itself, such as a ``KeyboardInterrupt``, fails every request without a result.

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
      TypeError: another kind of model or configuration, or ``vocab_size`` is no integer.
    """
    check_type("model", model, nnx.Module)
    check_type("config", config, EngineConfig)
    block = getattr(model, "attention_block", 1)
    if config.alignment % block:
      raise ValueError(
        f"alignment: expected a multiple of the model's attention_block = {block}, "
        f"got {config.alignment}"
      )
    self.config = config
    vocab_size = getattr(model, "vocab_size", None)
    try:
      self._vocab_size = operator.index(vocab_size)  # type: ignore[arg-type]
    except TypeError:
      raise TypeError(f"model.vocab_size: expected an int, got {vocab_size!r:.80}") from None
    self._programs = Programs(model, config)
    self._on_stats = on_stats
    self._queue = RequestQueue(config.queue_limit)
    self._thread: threading.Thread | None = None
    self._turn = threading.Lock()  # held by the one thread that runs programs; guards the rest
    self._runner: int | None = None  # the ident of that thread
    self._flights = collections.deque[Flight]()
    self._batches = 0
    self._last_finish = 0.0

  # --- users' threads --------------------------------------------------------------------------

  def submit(self, tokens: Sequence[int] | np.ndarray) -> Future:
    """Queues a prompt.

    Args:
      tokens: ``[n]`` integers in ``[0, vocab_size)``, at most the largest bucket.

    Returns:
      A future of ``Prefilled``. Its exception is ``RequestFailed``.

    Raises:
      QueueFull: too many requests wait.
      ValueError: the prompt is empty, too long or has a token outside the vocabulary.
      TypeError: the tokens are no integers.
      RuntimeError: the engine is closed.
    """
    return self._queue.submit(check_prompt(tokens, self._vocab_size, self.config.buckets[-1]))

  def metrics(self) -> Metrics:
    """Counters and the last batches."""
    return self._queue.metrics()

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
    if self._thread is not None or self._queue.closed:
      raise RuntimeError("engine: expected one that was neither started nor closed")
    with self._running(start=True):
      self.warm_up()
      thread = threading.Thread(target=self._work, name="ultraep_prefill", daemon=True)
      thread.start()
      self._thread = thread

  def close(self, *, drain: bool = True) -> None:
    """Refuses new requests, ends the thread and waits for it.

    Called by what the engine calls, a callback of a future or ``on_stats``, it does not wait: the
    engine ends once it has run what is left.

    Args:
      drain: run what waits first; else it is cancelled. Batches on the devices always end.
    """
    self._queue.close(drain=drain)
    if self._runner == threading.get_ident():
      return
    with self._running():  # if there is a thread, it has run everything by then
      self._drain()
    if self._thread is not None:
      self._thread.join()

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
      RuntimeError: the thread runs, or a callback of the engine calls.
      Exception: as ``warm_up``; the engine is closed then, and the requests that wait have failed.
    """
    if self._thread is not None:
      raise RuntimeError("run_batch: expected an engine that was not started")
    with self._running():
      self.warm_up()
      taken = self._take(only_full=False)
      if taken is None:
        return 0
      self._land(self._launch(*taken))
      if self._queue.closed:  # by a callback
        self._drain()
      return len(taken[0])

  # --- the thread that runs programs -----------------------------------------------------------

  @contextlib.contextmanager
  def _running(self, *, start: bool = False) -> Iterator[None]:
    """Waits until no other thread runs programs. What is raised inside ends the engine."""
    if self._runner == threading.get_ident():
      raise RuntimeError("engine: expected a call from outside of its callbacks")
    with self._turn:
      if start and self._thread is not None:  # by another thread, meanwhile
        raise RuntimeError("engine: expected one that was not started")
      self._runner = threading.get_ident()
      try:
        yield
      except BaseException as error:
        self._flights.clear()
        self._queue.fail_all(error)
        raise
      finally:
        self._runner = None

  def _work(self) -> None:
    try:
      with self._running():
        while self._step():
          pass
    except BaseException:
      _log.exception("the engine's thread ended")

  def _drain(self) -> None:
    """Runs all that waits in a closed engine that has no thread."""
    if len(self._queue):
      self.warm_up()
    while self._step():
      pass

  def _step(self) -> bool:
    """Launches or lands one batch; returns False when there is nothing left to do."""
    if not (self._flights or self._queue.wait()):
      return False
    taken = self._take(only_full=bool(self._flights)) if len(self._flights) < 2 else None
    if taken is not None:
      self._flights.append(self._launch(*taken))
    elif self._flights:
      self._land(self._flights.popleft())
    return True

  def _take(self, only_full: bool) -> tuple[list[Request], Packing] | None:
    """The next batch, out of the queue; None if there is none or, if asked, it is not full."""
    most = self._programs.rows * self.config.max_requests
    return self._queue.take(self._pack, most, only_full=only_full)

  def _pack(self, requests: Sequence[Request]) -> Packing:
    return pack([len(r.prompt) for r in requests], self._programs.rows, self.config)

  def _launch(self, requests: Sequence[Request], packing: Packing) -> Flight:
    self._batches += 1
    return launch(self._programs, self._batches - 1, requests, packing)

  def _land(self, flight: Flight) -> None:
    """Waits for a batch and delivers its results, or runs it again in halves."""
    try:
      landed = land(flight)
    except Exception as error:
      flight.outputs, flight.kept = None, ()
      self._run_halves(flight.requests, error)
      return
    seconds = landed.finished - max(flight.started, self._last_finish)
    self._last_finish = landed.finished
    self._queue.count_batch(flight.tokens, flight.slots, seconds, landed.before_L, landed.after_L)
    for request, result in zip(flight.requests, landed.results, strict=True):
      self._queue.finish(request, result)
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
      self._queue.finish(requests[0], failed)
      return
    _log.warning("a batch of %d requests runs again in halves: %r", len(requests), error)
    middle = len(requests) // 2
    for part in (requests[:middle], requests[middle:]):
      while part:
        packing = self._pack(part)
        now, part = packing.split(part)
        self._land(self._launch(now, packing))
