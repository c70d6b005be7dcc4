"""One batch, from the host to the devices and back."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ultraep_jax.serve.metrics import imbalance
from ultraep_jax.serve.packing import Packing, fill
from ultraep_jax.serve.programs import Outputs, Programs
from ultraep_jax.serve.requests import Prefilled, Request, RequestFailed
from ultraep_jax.types import LayerStats


@dataclasses.dataclass
class Flight:
  """A batch on the devices, or the error that kept it from getting there.

  Attributes:
    number: of the batch, from 0.
    requests: its requests.
    packing: where they lie.
    slots: rows times bucket.
    started: when it was given to the devices.
    outputs: of its program, without cache and state.
    kept: cache and state of each request; None without.
    error: what was raised instead.
  """

  number: int
  requests: Sequence[Request]
  packing: Packing
  slots: int
  started: float
  outputs: Outputs | None = None
  kept: Sequence[tuple[Any, Any]] = ()
  error: Exception | None = None

  @property
  def tokens(self) -> int:
    return sum(len(request.prompt) for request in self.requests)


class Landed(NamedTuple):
  """What a batch brought.

  Attributes:
    results: of each request.
    finished: when they were on the host.
    before_L: busiest over mean rank of each MoE layer as the router chose.
    after_L: the same as computed.
    stats: of the layers, on the devices.
  """

  results: list[Prefilled | RequestFailed]
  finished: float
  before_L: np.ndarray
  after_L: np.ndarray
  stats: LayerStats | None


def launch(
  programs: Programs, number: int, requests: Sequence[Request], packing: Packing
) -> Flight:
  """Gives a batch to the devices, which go on while the host does something else."""
  slots = programs.rows * packing.bucket
  flight = Flight(number, requests, packing, slots, time.monotonic())
  try:
    prompts = [request.prompt for request in requests]
    batch = fill(prompts, packing, programs.rows, programs.config.max_requests)
    outputs = programs.run(batch)
    # At once, not when the tokens are there: another batch may be on the devices by then.
    if programs.config.return_cache:
      flight.kept = programs.cut(outputs, packing, [len(p) for p in prompts])
    else:
      flight.kept = [(None, None)] * len(requests)
    flight.outputs = outputs._replace(cache=None, state=None)
  except Exception as error:
    flight.error = error
  return flight


def land(flight: Flight) -> Landed:
  """Waits for a batch.

  Raises:
    Exception: whatever kept it from being computed.
  """
  if flight.error is not None:
    raise flight.error
  outputs = flight.outputs
  assert outputs is not None
  stats = outputs.stats
  loads = None if stats is None else (stats.load_before_G, stats.load_after_G)
  token_BR, finite_BR, logits_BRV, loads = jax.device_get(
    (outputs.token_BR, outputs.finite_BR, outputs.logits_BRV, loads)
  )
  finished = time.monotonic()
  results: list[Prefilled | RequestFailed] = []
  places = zip(flight.requests, flight.packing.row, flight.packing.slot, strict=True)
  for (request, row, slot), (cache, state) in zip(places, flight.kept, strict=True):
    if not finite_BR[row, slot]:
      error = RequestFailed(
        f"logits: expected finite ones, got NaN or infinity for a prompt of "
        f"{len(request.prompt)} tokens in batch {flight.number}"
      )
      results.append(error)
      continue
    result = Prefilled(
      token=int(token_BR[row, slot]),
      logits_V=None if logits_BRV is None else logits_BRV[row, slot].copy(),
      cache=cache,
      state=state,
      length=len(request.prompt),
      queued=request.queued,
      started=flight.started,
      finished=finished,
      batch=flight.number,
      batch_requests=len(flight.requests),
      batch_tokens=flight.tokens,
      batch_slots=flight.slots,
    )
    results.append(result)
  none_L = np.zeros(0)
  before_L, after_L = (none_L, none_L) if loads is None else map(imbalance, loads)
  return Landed(results, finished, before_L, after_L, stats)
