"""A small balanced layer against a dense one, on the devices that are here."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ultraep_jax import implementation, testing
from ultraep_jax.config import BalanceConfig
from ultraep_jax.sharded import sharded_moe
from ultraep_jax.tools import processes
from ultraep_jax.types import Array, ExpertWeights

CONFIG = BalanceConfig(replica_slots=2, objective="balance")
# Sizes and a dtype that every kernel takes.
_TOKENS, _TOP_K, _WIDTH = 128, 2, 128
_TOLERANCE = 2e-2  # of bfloat16
_MAX_CPUS = 4
# Compiling for CPUs takes nearly all the time, and the program runs once.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass(frozen=True)
class Check:
  """The outcome of ``self_check``.

  Attributes:
    passed: the layer ran and is within the tolerance of the dense one.
    implementation: what ``implementation="auto"`` picked for it.
    ranks: devices that it ran on.
    error: largest difference over the largest value of the dense result; ``None``, as the next
      two, if the layer did not run.
    imbalance_before: busiest over mean rank that the loads have.
    imbalance_after: that the layer ran with.
    seconds: that the check took, with compilation.
    failure: what went wrong, if anything.
  """

  passed: bool
  implementation: str
  ranks: int
  error: float | None
  imbalance_before: float | None
  imbalance_after: float | None
  seconds: float
  failure: str = ""

  def __str__(self) -> str:
    if self.failure:
      return f"failed after {self.seconds:.1f} s: {self.failure}"
    return (
      f"{'passed' if self.passed else 'FAILED'} in {self.seconds:.1f} s, "
      f'"{self.implementation}" on {self.ranks} device{"s" * (self.ranks != 1)}: imbalance '
      f"{self.imbalance_before:.2f} before, {self.imbalance_after:.2f} after; in bfloat16 at most "
      f"{self.error:.0e} of the largest value from a dense float32 layer (up to {_TOLERANCE:.0e} "
      "is rounding)"
    )


def self_check() -> Check:
  """Balances one small layer with skewed loads on all GPUs, or on a few CPU devices.

  Only forward, with ``implementation="auto"``. All processes of a job must call it.
  """
  started = time.perf_counter()
  devices = jax.devices()
  on_cpu = devices[0].platform == "cpu"
  picked = implementation.summary(implementation.picks())
  few = on_cpu and jax.process_count() == 1
  ranks = min(len(devices), _MAX_CPUS) if few else len(devices)
  try:
    error, before, after = _run(devices[:ranks], _QUICK if on_cpu else None)
  except Exception as problem:  # whatever keeps the layer from running is the answer
    text = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"
    seconds = time.perf_counter() - started
    return Check(False, picked, ranks, None, None, None, seconds, text)
  seconds = time.perf_counter() - started
  return Check(error <= _TOLERANCE, picked, ranks, error, before, after, seconds)


def make_problem(ranks: int) -> tuple[Array, Array, Array, ExpertWeights]:
  """Tokens, choices, gates and weights of the layer that is checked."""
  rng = np.random.default_rng(0)
  experts = 2 * ranks
  ratio = 1.5 if ranks > 1 else 1.0
  load_GE = testing.zipf_loads(0, experts, ranks, _TOKENS, _TOP_K, ratio)
  index = testing.expert_indices(0, load_GE, _TOP_K).reshape(-1, _TOP_K)

  def normal(*shape: int) -> Array:
    return jnp.asarray(rng.normal(size=shape) / _WIDTH**0.5, jnp.bfloat16)

  shape = (experts, _WIDTH, _WIDTH)
  weights = ExpertWeights(normal(*shape), normal(*shape), normal(*shape))
  gate = jnp.asarray(rng.random(index.shape), jnp.float32)
  return normal(len(index), _WIDTH), jnp.asarray(index), gate, weights


def _run(
  devices: Sequence[Any], compiler_options: dict[str, Any] | None
) -> tuple[float, float, float]:
  problem = make_problem(len(devices))
  # jax.make_mesh refuses several nodes.
  mesh = Mesh(devices, ("expert",), axis_types=(AxisType.Auto,))
  layer = jax.jit(functools.partial(sharded_moe, config=CONFIG), compiler_options=compiler_options)
  with jax.set_mesh(mesh):
    arrays = processes.put(problem, NamedSharding(mesh, P("expert")))
    y, stats = processes.gather(layer(*arrays))
  expected = np.asarray(testing.dense_moe(*problem))
  error = float(np.abs(y.astype(np.float32) - expected).max() / np.abs(expected).max())
  before_G, after_G = stats.load_before_G, stats.load_after_G
  return error, float(before_G.max() / before_G.mean()), float(after_G.max() / after_G.mean())
