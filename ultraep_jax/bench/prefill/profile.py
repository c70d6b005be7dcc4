"""Where the time of a full batch goes, by kind of kernel, from a profiler trace."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ultraep_jax.bench import timing
from ultraep_jax.tables import table

_REPEATS = 12
KINDS = {
  "experts": ("gated_matmul", "grouped_matmul"),
  "dispatch": ("dispatch",),
  "combine": ("combine",),
  "attention": ("cudnn",),
  "other matmuls": ("nvjet", "cutlass", "gemm"),
  "choice, loads, plan, routes": ("top_k", "gather", "plan", "route"),
  "collectives": ("nccl",),
  "waiting": ("stream_executor::gpu::MultiGpuBarrier",),
}


def profile(runs: Mapping[str, Callable[[], Any]], layers: int) -> dict[str, dict[str, Any]]:
  """Times one batch of each strategy: the whole batch, in turn with others, and a layer of it.

  Args:
    runs: by strategy, what starts the batch.
    layers: with experts, of a batch.

  Returns:
    By strategy, ``batch_ms``; and on GPUs with the kernels, where layers take one round each,
    ``layer_us``, from one layer's dispatch to the next one's, ``kernels``, how many start in that
    time, ``kinds_us``, what they take, and ``gaps_us``, when none ran. All on the first device, on
    average over layers.
  """
  seconds = timing.in_turn(runs, _REPEATS, 1)
  rows: dict[str, dict[str, Any]] = {}
  for name, run in runs.items():
    rows[name] = {"batch_ms": 1e3 * timing.median(seconds[name])}
    jax.block_until_ready(run())
    devices = [events for events in timing.device_events(run) if events]
    if devices:
      rows[name] |= _layers(devices[0], layers)
  return rows


def _layers(events: Sequence[Any], layers: int) -> dict[str, Any]:
  """What happens between the first dispatch of a batch and the last, a layer."""
  starts = [i for i, event in enumerate(events) if event.name.startswith("dispatch")]
  if len(starts) != layers or layers < 2:
    return {}
  layers -= 1
  inside = events[starts[0] : starts[-1]]
  times: dict[str, float] = {}
  busy, end = 0.0, float(inside[0].start_ns)
  for event in inside:
    times[event.name] = times.get(event.name, 0.0) + event.duration_ns / 1e3 / layers
    stop = event.start_ns + event.duration_ns
    busy += max(0.0, stop - max(end, event.start_ns))
    end = max(end, stop)
  span = float(events[starts[-1]].start_ns - inside[0].start_ns)
  return {
    "layer_us": span / 1e3 / layers,
    "kernels": round(len(inside) / layers),
    "kinds_us": timing.grouped(times, KINDS),
    "gaps_us": (span - busy) / 1e3 / layers,
  }


def profile_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
  """A row for each strategy; kinds of kernels in microseconds a layer."""
  kinds = [*KINDS, "other"]
  body = []
  for name, row in rows.items():
    times = row.get("kinds_us")
    body.append(
      [
        name,
        row["batch_ms"],
        row.get("layer_us"),
        *(times.get(kind, 0.0) if times else None for kind in kinds),
        row.get("gaps_us"),
        row.get("kernels"),
      ]
    )
  return table(["strategy", "batch ms", "layer us", *kinds, "gaps", "kernels"], body)
