"""Times on devices: calls chained inside one jit, variants in turn, and kernels from a trace.

And their memory, as compiled.
"""

import collections
import contextlib
import itertools
import pathlib
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ultraep_jax.types import Array

_WARM_UP = 3  # turns; not seconds, since the processes of one program must agree on them


def chain(function: Callable[..., Any], calls: int) -> Callable[..., Array]:
  """A function that calls ``function(i, *args)`` for i from 0 to ``calls`` - 1, one by one.

  The results of a call are computed whole and thrown away; the next call waits for them.
  """

  def chained(*args: Any) -> Array:
    def body(i: Array, before: Array) -> Array:
      held, _ = lax.optimization_barrier((args, before))
      results = lax.optimization_barrier(function(i, *held))
      return sum(
        (jnp.ravel(leaf)[0].astype(jnp.float32) for leaf in jax.tree.leaves(results)), before * 0
      )

    firsts = [jnp.ravel(leaf)[0] for leaf in jax.tree.leaves(args) if _is_float(leaf)]
    start = sum((first.astype(jnp.float32) * 0 for first in firsts), jnp.float32(0))
    return lax.fori_loop(0, calls, body, start)

  return chained


def _is_float(leaf: Array) -> bool:
  return jnp.issubdtype(leaf.dtype, jnp.floating)


def in_turn(
  runs: Mapping[str, Callable[[], Any]], repeats: int, calls: int = 1
) -> dict[str, list[float]]:
  """Seconds per call of each run, ``repeats`` times in turn, so that drift meets all alike.

  All run three times before: once to compile, and because a GPU that was idle runs large matmuls
  up to a fifth slower for about half a second, until its clock has settled. Every other time the
  order is the reverse, so that none always follows the same one, which may have left GPUs cool or
  hot.
  """
  for run in [*runs.values()] * _WARM_UP:
    jax.block_until_ready(run())
  seconds: dict[str, list[float]] = {name: [] for name in runs}
  for repeat in range(repeats):
    for name, run in list(runs.items())[:: -1 if repeat % 2 else 1]:
      start = time.perf_counter()
      jax.block_until_ready(run())
      seconds[name].append((time.perf_counter() - start) / calls)
  return seconds


def device_events(run: Callable[[], Any], calls: int = 1) -> list[list[Any]]:
  """What ran on each GPU during ``calls`` calls of ``run``, by start, from a profiler trace.

  Events have a ``name``, ``start_ns`` and ``duration_ns``.
  """
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      for _ in range(calls):
        jax.block_until_ready(run())
    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(path))
  devices = []
  for plane in profile.planes:
    if plane.name.startswith("/device:GPU"):
      lines = [line.events for line in plane.lines if line.name.startswith("Stream")]
      devices.append(sorted(itertools.chain(*lines), key=lambda event: event.start_ns))
  return devices


def spans(events: Sequence[Any], calls: int) -> list[float]:
  """Nanoseconds from the first start to the last end of each of ``calls`` equal calls' events."""
  parts = [part for part in np.array_split(np.array(events, object), calls) if len(part)]
  return [part[-1].start_ns + part[-1].duration_ns - part[0].start_ns for part in parts]


def kernel_times(run: Callable[[], Any], calls: int = 1) -> dict[str, float]:
  """Microseconds per call and device that each kernel takes, from a profiler trace of one run.

  Kernels that differ by a number at the end of their name only are added up.
  """
  jax.block_until_ready(run())
  devices = [events for events in device_events(run) if events]  # other processes' have none
  total: dict[str, float] = collections.defaultdict(float)
  for event in itertools.chain(*devices):
    total[_base_name(event.name)] += event.duration_ns / 1e3
  scale = calls * max(len(devices), 1)
  return {name: value / scale for name, value in sorted(total.items(), key=lambda item: -item[1])}


def _base_name(kernel: str) -> str:
  return kernel.rstrip("0123456789").rstrip("_.") or kernel


def grouped(times: Mapping[str, float], groups: Mapping[str, Sequence[str]]) -> dict[str, float]:
  """Kernel times added up by the first group with a prefix of the kernel's name, else ``other``."""
  total: dict[str, float] = collections.defaultdict(float)
  for kernel, value in times.items():
    name = next(
      (g for g, prefixes in groups.items() if kernel.startswith(tuple(prefixes))), "other"
    )
    total[name] += value
  return dict(total)


def median(seconds: Sequence[float]) -> float:
  return float(np.median(seconds))


def gigabytes(memory: Any) -> float:
  """What a compiled program takes of a device: arguments, other results, temporary memory."""
  names = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
  total = sum(getattr(memory, name, 0) for name in names)
  return (total - getattr(memory, "alias_size_in_bytes", 0)) / 1e9


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Without the warning of strategy "ideal" that its results are wrong."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    yield
