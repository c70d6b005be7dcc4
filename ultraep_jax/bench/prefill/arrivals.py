"""Offers requests by the clock, whether the engine keeps up or not, and finds what it can hold."""

import collections
import concurrent.futures
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ultraep_jax.serve import Prefilled, QueueFull

_POLL_SECONDS = 0.02


class Engine(Protocol):
  """What takes the requests."""

  def submit(self, tokens: np.ndarray) -> concurrent.futures.Future[Prefilled]: ...


class Served(NamedTuple):
  """One request. Seconds since the first moment of the load."""

  arrival: float
  finished: float
  tokens: int
  batch: int
  batch_slots: int


class Point(NamedTuple):
  """What came of one rate.

  Attributes:
    rate: requests a second that were offered.
    offered: requests that arrived; those left when it was given up did not.
    served: requests with a result.
    failed: requests with an error.
    overloaded: why the engine does not keep up, or None.
    ttft_mean: seconds from arrival to first token, of the served; so are the next.
    ttft_p50: the median.
    ttft_p99: all but one per cent are below.
    requests_per_second: served, over the time from the first arrival to the last result.
    tokens_per_second: the same of their tokens.
    padding_share: of the room in their batches, the part without a token.
  """

  rate: float
  offered: int
  served: int
  failed: int
  overloaded: str | None
  ttft_mean: float
  ttft_p50: float
  ttft_p99: float
  requests_per_second: float
  tokens_per_second: float
  padding_share: float

  def holds(self, bound: float) -> bool:
    """Whether the engine kept up with a mean time to first token of at most ``bound``."""
    return self.overloaded is None and self.failed == 0 and self.ttft_mean <= bound


def poisson_arrivals(seed: int, count: int) -> np.ndarray:
  """Arrival times of a Poisson process of one request a second; divide by the rate."""
  return np.cumsum(np.random.default_rng(seed).exponential(size=count))


def offer(
  engine: Engine,
  prompts: Sequence[np.ndarray],
  arrivals: np.ndarray,
  rate: float,
  give_up: float,
  clock: Callable[[], float] = time.monotonic,
  sleep: Callable[[float], None] = time.sleep,
) -> Point:
  """Submits each prompt when its time has come and waits for the results.

  Time to first token counts from the arrival's time, not from when it was submitted. The load
  ends early, as overload, when a request has waited for ``give_up`` seconds or the queue is full.

  Args:
    engine: that was started, with an empty queue.
    prompts: in order of arrival.
    arrivals: seconds at one request a second.
    rate: requests a second.
    give_up: seconds.
    clock: that the engine's results are of.
    sleep: waits.
  """
  served: list[Served] = []
  waiting = collections.deque[tuple[float, concurrent.futures.Future[Prefilled]]]()
  failed, overloaded, start = 0, None, clock()

  def watch(arrival: float) -> Callable[[concurrent.futures.Future[Prefilled]], None]:
    def done(future: concurrent.futures.Future[Prefilled]) -> None:
      if not future.cancelled() and future.exception() is None:
        r = future.result()  # not kept: it holds a cache
        served.append(Served(arrival, r.finished - start, r.length, r.batch, r.batch_slots))

    return done

  def too_old() -> str | None:
    nonlocal failed
    while waiting and waiting[0][1].done():
      failed += waiting.popleft()[1].exception() is not None
    if waiting and clock() - start - waiting[0][0] > give_up:
      return f"{len(waiting)} requests waited, the oldest for {give_up:.3g} s"
    return None

  offered = 0
  for prompt, arrival in zip(prompts, arrivals / rate, strict=True):
    while overloaded is None and (left := arrival - (clock() - start)) > 0:
      sleep(min(left, _POLL_SECONDS))
      overloaded = too_old()
    overloaded = overloaded or too_old()
    if overloaded is None:
      try:
        future = engine.submit(prompt)
      except QueueFull as error:
        overloaded = str(error)
    if overloaded is not None:
      break
    offered += 1
    future.add_done_callback(watch(arrival))
    waiting.append((arrival, future))
  while overloaded is None and waiting:
    overloaded = too_old()
    if waiting:
      sleep(min(_POLL_SECONDS, give_up))
  for _, future in waiting:
    future.cancel()
  while any(not future.done() for _, future in waiting):
    sleep(_POLL_SECONDS)
  return _point(rate, offered, failed, overloaded, served)


def _point(
  rate: float, offered: int, failed: int, overloaded: str | None, served: Sequence[Served]
) -> Point:
  if not served:
    nan = math.nan
    return Point(rate, offered, 0, failed, overloaded or "none", nan, nan, nan, 0.0, 0.0, nan)
  served = sorted(served)
  ttft = np.array([one.finished - one.arrival for one in served])
  seconds = max(one.finished for one in served) - served[0].arrival
  tokens = sum(one.tokens for one in served)
  room = sum({one.batch: one.batch_slots for one in served}.values())
  return Point(
    rate=rate,
    offered=offered,
    served=len(served),
    failed=failed,
    overloaded=overloaded or growth(ttft, served[-1].arrival - served[0].arrival),
    ttft_mean=float(ttft.mean()),
    ttft_p50=float(np.quantile(ttft, 0.5)),
    ttft_p99=float(np.quantile(ttft, 0.99)),
    requests_per_second=len(served) / seconds,
    tokens_per_second=tokens / seconds,
    padding_share=1 - tokens / room,
  )


def growth(ttft: np.ndarray, seconds: float) -> str | None:
  """Says so if times to first token grow as those of a queue do that is never worked off.

  They rise from quarter to quarter, and over the last three by more than a twentieth of the time
  that goes by: as where requests arrive five per cent faster than they are served. How long the
  first ones take does not count, or a short load would be held far beyond what can be served.

  Args:
    ttft: seconds, in order of arrival.
    seconds: from the first arrival to the last; 0, all at once, is no growth.
  """
  if len(ttft) < 32 or not seconds:
    return None
  first, second, third, last = (part.mean() for part in np.array_split(ttft, 4))
  apart = seconds / 2  # the middles of the second quarter and the last
  if first < second < third < last and last - second > apart / 20:
    return f"times to first token rose from {second:.3g} s to {last:.3g} s"
  return None


class Limit(NamedTuple):
  """The rate that holds a bound on the mean time to first token, in requests a second.

  Attributes:
    held: the highest rate that was measured to hold it; 0: none.
    exceeded: the lowest rate above it that was measured not to; infinite: none.
    estimate: between the two, by the means if the engine kept up at both.
  """

  held: float
  exceeded: float
  estimate: float


def find_limit(
  measure: Callable[[float], Point], known: Sequence[Point], bound: float, tries: int
) -> Limit:
  """Bisects rates, from what is known, until the bound is met within three per cent.

  Args:
    measure: one rate.
    known: what was measured before, at least one point.
    bound: on the mean time to first token, in seconds.
    tries: the most rates to measure.
  """
  points = {point.rate: point for point in known}

  def limits() -> tuple[float, float]:
    # What exceeds counts first: a rate above one that fails holds by luck alone.
    exceeded = min((r for r, p in points.items() if not p.holds(bound)), default=math.inf)
    held = max((r for r, p in points.items() if p.holds(bound) and r < exceeded), default=0.0)
    return held, exceeded

  for _ in range(tries):
    held, exceeded = limits()
    if held and exceeded / held <= 1.03:
      break
    if math.isinf(exceeded):
      rate = 1.25 * held
    else:
      rate = exceeded / 2 if not held else math.sqrt(held * exceeded)
    points[rate] = measure(rate)
  held, exceeded = limits()
  estimate = held
  if held and not math.isinf(exceeded) and points[exceeded].overloaded is None:
    below, above = points[held].ttft_mean, points[exceeded].ttft_mean
    estimate += (exceeded - held) * (bound - below) / max(above - below, 1e-12)
  return Limit(held, exceeded, min(estimate, exceeded))
