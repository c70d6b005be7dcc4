"""An engine whose programs are NumPy: nothing compiles, so tests can look at all the rest."""

import concurrent.futures
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from ultraep_jax import serve
from ultraep_jax.serve import engine as engines
from ultraep_jax.serve.programs import Outputs

CONFIG = serve.EngineConfig(buckets=(4, 8), alignment=2, max_requests=2, queue_limit=50)
ROWS = 2
NAN_TOKEN = 99  # the logits behind it are not finite
STAGES = ("compile", "pack", "run", "cut", "land")
PER_BATCH = ROWS * CONFIG.max_requests
WAIT = 20  # seconds that only a fault takes


def run_in_thread(engine: serve.PrefillEngine, futures: list[Any]) -> None:
  engine.start()
  concurrent.futures.wait(futures, timeout=WAIT)


def run_by_hand(engine: serve.PrefillEngine, futures: list[Any]) -> None:
  while engine.run_batch():
    pass


DRIVERS = {
  "thread": run_in_thread,
  "run_batch": run_by_hand,
  "close": lambda engine, futures: engine.close(),
}


def assert_all_ended(engine: serve.PrefillEngine, futures: list[Any]) -> None:
  """Those who wait wake up, and each request is in one count."""
  assert not concurrent.futures.wait(futures, timeout=WAIT).not_done
  cancelled = sum(future.cancelled() for future in futures)
  failed = sum(not f.cancelled() and f.exception(timeout=0) is not None for f in futures)
  seen = engine.metrics()
  assert (seen.waiting, seen.running) == (0, 0)
  assert (seen.submitted, seen.cancelled, seen.failed) == (len(futures), cancelled, failed)
  assert seen.completed == len(futures) - cancelled - failed


class HasLoads(NamedTuple):
  """The statistics of a batch, as far as the engine looks."""

  load_before_G: np.ndarray = np.array([[[3, 1]]])
  load_after_G: np.ndarray = np.array([[[2, 2]]])


class HostPrograms:
  """In the place of ``Programs``: the next token of a prompt is its last one."""

  rows = ROWS

  def __init__(self, config: serve.EngineConfig, at: Callable[[str], object]):
    self.config, self.at = config, at
    self.stats: Any = None

  def compile(self) -> None:
    self.at("compile")

  def run(self, batch: Any) -> Outputs:
    self.at("run")
    token_BR = np.take_along_axis(batch.token_BT, np.maximum(batch.last_BR, 0), axis=1)
    outputs: Any = Outputs(token_BR, token_BR != NAN_TOKEN, None, None, self.stats)
    return outputs

  def cut(self, outputs: Any, packing: Any, sizes: Any) -> list[Any]:
    self.at("cut")
    return [(None, None)] * len(sizes)


class Model(nnx.Module):
  vocab_size = 100


def make_engine(
  monkeypatch: Any,
  at: Callable[[str], object] = lambda stage: None,
  config: serve.EngineConfig = CONFIG,
  **options: Any,
) -> serve.PrefillEngine:
  """An engine that calls ``at`` with each of ``STAGES`` before it."""
  mesh = jax.make_mesh((1,), ("expert",), devices=jax.devices()[:1])
  with jax.set_mesh(mesh):
    engine = serve.PrefillEngine(Model(), config, **options)
  engine._programs = HostPrograms(config, at)  # type: ignore[assignment]
  pack, land = engine._pack, engines.land

  def packs(requests: Any) -> Any:
    at("pack")
    return pack(requests)

  def lands(flight: Any) -> Any:
    at("land")
    return land(flight)

  engine._pack = packs  # type: ignore[method-assign]
  monkeypatch.setattr(engines, "land", lands)
  return engine
