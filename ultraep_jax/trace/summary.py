"""A trace in a few numbers."""

from typing import Any

import numpy as np

from ultraep_jax import advice
from ultraep_jax.trace.reader import Trace

PERCENTILES = (5, 50, 90, 95, 99, 100)


def summarise(trace: Trace) -> dict[str, Any]:
  """Percentiles of the imbalance before and after, over all records and for each layer.

  Returns:
    JSON values: ``records``, ``steps``, ``before``, ``after`` and ``floor`` (percentile to
    busiest over mean rank; 100 is the worst), ``layers`` (name to the same two), means per
    record of copies, bytes and remote share, counts of what should be 0, and ``advice``.
  """
  if not len(trace):
    return {"records": 0, "steps": [], "problems": list(trace.problems)}
  before_N, after_N = trace.imbalance_before_N, trace.imbalance_after_N
  assignments = max(int(trace.after_NG.sum(dtype=np.int64)), 1)
  return {
    "records": len(trace),
    "steps": [int(trace.step_N.min()), int(trace.step_N.max())],
    "before": percentiles(before_N),
    "after": percentiles(after_N),
    "floor": percentiles(trace.imbalance_floor_N),
    "layers": {
      layer: {
        "before": percentiles(before_N[trace.layer_N == layer]),
        "after": percentiles(after_N[trace.layer_N == layer]),
      }
      for layer in trace.layers
    },
    "replicas": float(trace.replicas_N.mean()),
    "relayed": float(trace.relayed_N.mean()),
    "max_fanout": int(trace.max_fanout_N.max()),
    "replica_megabytes": float(trace.replica_bytes_N.mean() / 1e6),
    "remote_fraction": float(trace.remote_N.sum(dtype=np.int64) / assignments),
    "more_than_one_round": int((trace.rounds_N > 1).sum()),
    "invalid_assignments": int(trace.invalid_N.sum(dtype=np.int64)),
    # A layer does what its plan says; anything else would be a fault.
    "off_plan": int((trace.planned_NG != trace.after_NG).any(axis=1).sum()),
    "problems": list(trace.problems),
    "advice": trace_advice(trace),
  }


def trace_advice(trace: Trace) -> list[str]:
  """What keeps the least even record uneven, and what would help."""
  if not len(trace):
    return []
  worst = int(np.argmax(trace.imbalance_after_N))
  return advice.of_load(
    trace.load_NGE[worst],
    trace.after_NG[worst],
    trace.config,
    slots=trace.manifest.replica_slots,
    rounds=int(trace.rounds_N.max()),
  )


def in_words(value: Any) -> str:
  """A value of the metadata, as people read it."""
  if isinstance(value, dict):
    return ", ".join(f"{name} {in_words(part)}" for name, part in value.items())
  return str(value)


def percentiles(values: np.ndarray) -> dict[str, float]:
  """Of some records' imbalance."""
  return {str(p): float(np.percentile(values, p)) for p in PERCENTILES}
