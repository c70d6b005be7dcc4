"""Thousands of requests through one engine: what grows, and what is compiled on the way."""

import collections
import concurrent.futures
import contextlib
import pathlib
import resource
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from ultraep_jax.serve import Prefilled, PrefillEngine
from ultraep_jax.tools.progress import progress

_OUTSTANDING = 512
_SAMPLES = 10


class Sample(NamedTuple):
  """The state after some requests.

  Attributes:
    requests: done so far.
    seconds: since the start.
    arrays: live ones.
    array_bytes: of these.
    device_bytes: in use on the first device; None where the backend does not say.
    resident_bytes: of the process.
    compilations: since the start.
  """

  requests: int
  seconds: float
  arrays: int
  array_bytes: int
  device_bytes: int | None
  resident_bytes: int
  compilations: int


def soak(
  engine: PrefillEngine, prompts: Sequence[np.ndarray], requests: int
) -> tuple[list[Sample], int]:
  """Keeps some hundred requests waiting until all are done; results are dropped at once.

  Returns:
    A sample after every tenth of the requests, each when the engine had nothing to do, and how
    many requests failed.
  """
  samples, failed, start = [], 0, time.monotonic()
  waiting = collections.deque[concurrent.futures.Future[Prefilled]]()
  with _compilations() as compiled:
    for i in progress(range(requests), "soak", "request"):
      while len(waiting) >= _OUTSTANDING:
        failed += waiting.popleft().exception() is not None
      waiting.append(engine.submit(prompts[i % len(prompts)]))
      if (i + 1) * _SAMPLES // requests > i * _SAMPLES // requests:
        while waiting:
          failed += waiting.popleft().exception() is not None
        samples.append(_sample(i + 1, time.monotonic() - start, len(compiled)))
  return samples, failed


def describe(samples: Sequence[Sample], failed: int) -> str:
  """What changed after the first samples, in which caches of the runtime fill."""
  first, last = samples[min(2, len(samples) - 1)], samples[-1]
  device = ""
  if first.device_bytes is not None and last.device_bytes is not None:
    device = f", device memory {last.device_bytes - first.device_bytes:+,} bytes"
  return (
    f"{last.requests} requests in {last.seconds:.1f} s, {failed} failed, {last.compilations} "
    f"compilations; from request {first.requests} on: live arrays {last.arrays - first.arrays:+} "
    f"({last.array_bytes - first.array_bytes:+,} bytes){device}, "
    f"process {last.resident_bytes - first.resident_bytes:+,} bytes"
  )


def _sample(requests: int, seconds: float, compilations: int) -> Sample:
  time.sleep(0.1)  # the engine's thread lets go of a batch after it has delivered
  arrays = jax.live_arrays()
  device = jax.local_devices()[0].memory_stats() or {}
  return Sample(
    requests,
    seconds,
    len(arrays),
    sum(array.nbytes for array in arrays),
    device.get("bytes_in_use"),
    _resident_bytes(),
    compilations,
  )


def _resident_bytes() -> int:
  status = pathlib.Path("/proc/self/statm")
  if not status.exists():  # not Linux: the peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  return int(status.read_text().split()[1]) * resource.getpagesize()


@contextlib.contextmanager
def _compilations() -> Iterator[list[str]]:
  """The events of the compiler, as they happen."""
  seen: list[str] = []

  def listen(event: str, duration_secs: float, **_: str | int) -> None:
    if "backend_compile" in event:
      seen.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield seen
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
