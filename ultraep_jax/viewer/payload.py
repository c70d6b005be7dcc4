"""What the page needs of a trace, small enough to be part of it."""

import base64
import zlib
from typing import Any

import numpy as np

from ultraep_jax.trace.reader import Trace
from ultraep_jax.trace.summary import in_words, trace_advice
from ultraep_jax.viewer.links import token_links

_BUDGET = 4_000_000  # numbers of all records that the page shows in detail
_MAX_POINTS = 100_000  # records in the distribution


def payload(trace: Trace, budget: int = _BUDGET) -> dict[str, Any]:
  """JSON values of one run.

  The distribution has the imbalance of every record (of evenly chosen ones beyond 100,000). The
  timeline and the details have the records of every k-th step, with the least k that the budget
  allows.

  Args:
    trace: of the run.
    budget: integers that the shown records may have in all.
  """
  shown = trace[_shown(trace, budget)]
  points = trace[:: max(1, -(-len(trace) // _MAX_POINTS))]
  layers = {name: i for i, name in enumerate(trace.layers)}
  links_NGG = np.zeros((len(shown), trace.manifest.num_ranks, trace.manifest.num_ranks))
  for i in range(len(shown)):
    links_NGG[i] = token_links(shown.load_NGE[i], shown.plan(i))
  arrays = {
    "allBefore": points.imbalance_before_N.astype(np.float32),
    "allAfter": points.imbalance_after_N.astype(np.float32),
    "allLayer": _indices(points, layers),
    "step": shown.step_N,
    "layer": _indices(shown, layers),
    "microbatch": shown.microbatch_N,
    "group": shown.group_N,
    "before": shown.before_NG,
    "after": shown.after_NG,
    "planned": shown.planned_NG,
    "floor": shown.floor_N,
    "rounds": shown.rounds_N,
    "expertLoad": shown.expert_load_NE,
    "replicaExpert": shown.replica_expert_NGS,
    "replicaParent": shown.replica_parent_NGS,
    "replicaLoad": shown.replica_load_NGS,
    "copyBytes": shown.replica_bytes_N / np.maximum(shown.replicas_N, 1),
    "links": links_NGG,
  }
  manifest = trace.manifest
  return {
    "name": manifest.name,
    "ranks": manifest.num_ranks,
    "experts": manifest.num_experts,
    "slots": manifest.replica_slots,
    "measured": manifest.measured,
    "tokenBytes": manifest.token_bytes,
    "config": {name: str(value) for name, value in manifest.config.items()},
    "metadata": {name: in_words(value) for name, value in manifest.metadata.items()},
    "layers": list(layers),
    "records": len(trace),
    "shownSteps": len(np.unique(shown.step_N)),
    "steps": len(np.unique(trace.step_N)),
    "problems": list(trace.problems),
    "advice": trace_advice(trace),
    **_pack(arrays),
  }


def _shown(trace: Trace, budget: int) -> np.ndarray:
  """A mask of the records of every k-th step."""
  ranks, experts, slots = (trace.manifest.axes[axis] for axis in "GES")
  each = ranks * ranks + 3 * ranks * (1 + slots) + experts + 8
  steps, step_N = np.unique(trace.step_N, return_inverse=True)
  stride = max(1, -(-len(trace) * each // max(budget, 1)))
  return step_N % min(stride, max(len(steps), 1)) == 0


def _indices(trace: Trace, layers: dict[str, int]) -> np.ndarray:
  return np.array([layers[name] for name in trace.layer_N.tolist()], np.int32)


def _pack(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
  """All arrays as one compressed text, and where each is in it; 4 bytes a value."""
  columns, chunks, start = {}, [], 0
  for name, array in arrays.items():
    kind = "f4" if array.dtype.kind == "f" and name != "links" else "i4"
    raw = np.ascontiguousarray(array, f"<{kind}").tobytes()
    columns[name] = {"type": kind, "shape": list(array.shape), "start": start}
    start += len(raw)
    chunks.append(raw)
  return {
    "columns": columns,
    "data": base64.b64encode(zlib.compress(b"".join(chunks), 6)).decode(),
  }
