"""Recorded traces in the simulator: what other strategies would have made of a run's loads.

Slots, domains, target and transfer are those of the recorded layers unless they are changed, so
``quota`` ends where layers with ``objective="balance"`` and ``min_tokens_per_replica=1`` did.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import numpy as np

from ultraep_jax.devices.device import Device
from ultraep_jax.simulate.cost import Setting
from ultraep_jax.simulate.models import ModelShape
from ultraep_jax.simulate.run import Outcome, simulate
from ultraep_jax.trace.reader import Trace


def replay(
  trace: Trace,
  setting: Setting,
  strategies: Sequence[str] = ("none", "quota", "ideal"),
  *,
  progress: Callable[[Iterable[np.ndarray]], Iterable[np.ndarray]] = iter,
  **options: Any,
) -> dict[str, Outcome]:
  """Simulates the loads of a trace.

  Args:
    trace: what layers recorded.
    setting: as from ``trace_setting``.
    strategies: names of ``balancers.NAMES``.
    progress: wraps the loop over microbatches, e.g. ``tqdm``.
    **options: of ``simulate``; ``target`` is the trace's if none is given.

  Returns:
    As ``simulate``. An array ``[step, layer]`` of an outcome has the trace's records in their
    order: ``outcome.imbalance.reshape(-1)`` stands beside ``trace.imbalance_after_N``.

  Raises:
    ValueError: the trace does not fit, as in ``trace_loads`` and ``simulate``.
  """
  options = {"target": trace.manifest.config.get("target"), **options}
  return simulate(progress(trace_loads(trace)), setting, strategies, **options)


def trace_loads(trace: Trace) -> np.ndarray:
  """The loads of a trace as the simulator takes them.

  Returns:
    ``[step, layer, G, E]`` int32. A step is one microbatch of one step of the run, and each token
    group of a layer counts as a layer: it has its own replicas, and its own history.

  Raises:
    ValueError: no records, or microbatches that lack some of the layers or groups.
  """
  if not len(trace):
    raise ValueError("trace: expected records, got none")
  batches = dict.fromkeys(zip(trace.step_N.tolist(), trace.microbatch_N.tolist(), strict=True))
  layers = list(zip(trace.layer_N.tolist(), trace.group_N.tolist(), strict=True))
  kinds = list(dict.fromkeys(layers))
  if layers != kinds * len(batches):
    raise ValueError(
      f"trace: expected the same {len(kinds)} layers and groups in each of {len(batches)} "
      f"microbatches, got {len(trace)} records; choose some, as in trace[trace.step_N < 100]"
    )
  return trace.load_NGE.reshape(len(batches), len(kinds), *trace.load_NGE.shape[1:])


def trace_setting(trace: Trace, model: ModelShape, device: Device, **changes: Any) -> Setting:
  """The setting of recorded layers, on a model's widths.

  Args:
    trace: says ranks, experts, slots, domains, transfer and, through ``top_k``, tokens.
    model: says widths; the number of experts is the trace's.
    device: its description.
    **changes: fields of ``Setting``, instead.

  Raises:
    ValueError: the changes do not fit the trace.
  """
  manifest, per_rank = trace.manifest, trace.load_NGE.sum(axis=2, dtype=np.int64)
  fields = {
    "num_ranks": manifest.num_ranks,
    "domain_size": trace.config.domain_of(manifest.num_ranks),
    "tokens": tokens_of(per_rank, model.top_k),
    "replica_slots": manifest.replica_slots,
    "relay": manifest.config.get("transfer") != "direct",
  }
  shape = dataclasses.replace(model, num_experts=manifest.num_experts)
  return Setting(model=shape, device=device, **{**fields, **changes})


def recorded_shape(trace: Trace) -> ModelShape | None:
  """The shape that a trace's metadata has under ``"model"``; ``None`` if it has none.

  It says ``embed_dim``, ``expert_dim`` and ``top_k``, and may say ``name`` and ``moe_layers``.
  What is outside the routed experts (attention, shared experts, vocabulary) is not known: 0.
  """
  said = trace.manifest.metadata.get("model")
  if not isinstance(said, dict):
    return None
  embed_dim, expert_dim, top_k = (said.get(name) for name in ("embed_dim", "expert_dim", "top_k"))
  if not (_is_size(embed_dim) and _is_size(expert_dim) and _is_size(top_k)):
    return None
  layers = said.get("moe_layers")
  return ModelShape(
    name=str(said.get("name", trace.manifest.name)),
    moe_layers=layers if _is_size(layers) else len(trace.layers),
    embed_dim=embed_dim,
    expert_dim=expert_dim,
    num_experts=trace.manifest.num_experts,
    top_k=top_k,
    source="the trace",
  )


def _is_size(value: object) -> TypeGuard[int]:
  return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def tokens_of(per_rank: np.ndarray, top_k: int) -> int:
  """Tokens of a rank whose assignments are so many on average, at least 1."""
  return max(round(float(per_rank.mean()) / top_k), 1) if per_rank.size else 1
