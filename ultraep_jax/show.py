"""Plans and statistics for people: a line of text, and bars for notebooks."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ultraep_jax.types import LayerStats, Plan

# As in the viewer: readable on light and on dark pages.
_BEFORE, _AFTER, _COPY = "#c2570c", "#1467b8", "#2a9d8f"
_MOST_RANKS = 64


def plan_text(plan: Plan) -> str:
  """One line: sizes, copies and the busiest rank; shapes alone while tracing."""
  if not _concrete(plan):
    return _fields(plan)
  expert_GS, quota_EG, _ = (np.asarray(leaf) for leaf in plan)
  num_experts, num_ranks = quota_EG.shape[-2:]
  slots = expert_GS.shape[-1]
  copies = int((expert_GS >= 0).sum())
  return (
    f"Plan({_count(num_ranks, 'rank')}, {_count(num_experts, 'expert')}, {_count(slots, 'slot')}: "
    f"{_count(copies, 'copy')}, busiest / mean rank {_imbalance(quota_EG.sum(axis=-2)):.2f})"
  )


def stats_text(stats: LayerStats) -> str:
  """Likewise, with the load before and the rounds; of the least even layer and token group."""
  if not _concrete(stats):
    return _fields(stats)
  stats = jax.tree.map(np.asarray, stats)  # no computation on devices
  lead, (num_ranks, num_experts) = stats.load_GE.shape[:-2], stats.load_GE.shape[-2:]
  times = int(np.prod(lead, dtype=np.int64))
  of = f"{times} times " if times != 1 else ""
  rounds = int(np.max(stats.rounds))
  before, after = _imbalance(stats.load_before_G), _imbalance(stats.load_after_G)
  return (
    f"LayerStats({of}{_count(num_ranks, 'rank')}, {_count(num_experts, 'expert')}: busiest / mean "
    f"rank {before:.2f} before, {after:.2f} after; {_count(int(np.sum(stats.replicas)), 'copy')}, "
    f"{_count(rounds, 'round')})"
  )


def plan_html(plan: Plan) -> str:
  """Bars of the ranks' loads before and after, with what copies serve."""
  if not _concrete(plan) or plan.quota.ndim != 2:
    return _escape(plan_text(plan))
  expert_GS, quota_EG, _ = (np.asarray(leaf) for leaf in plan)
  num_experts, num_ranks = quota_EG.shape
  before_G = quota_EG.sum(axis=1).reshape(num_ranks, num_experts // num_ranks).sum(axis=1)
  copies = [
    {int(e): int(quota_EG[e, rank]) for e in slots if e >= 0}
    for rank, slots in enumerate(expert_GS)
  ]
  return _bars(plan_text(plan), before_G, quota_EG.sum(axis=0), copies)


def stats_html(stats: LayerStats) -> str:
  """Likewise, of the first layer and token group."""
  if not _concrete(stats):
    return _escape(stats_text(stats))
  lead = stats.load_GE.ndim - 2
  first = jax.tree.map(lambda leaf: np.asarray(leaf)[(0,) * lead], stats)
  copies = [
    {int(e): int(n) for e, n in zip(experts, loads, strict=True) if e >= 0}
    for experts, loads in zip(first.replica_expert_GS, first.replica_load_GS, strict=True)
  ]
  return _bars(stats_text(stats), first.load_before_G, first.load_after_G, copies)


def _bars(
  title: str, before_G: np.ndarray, after_G: np.ndarray, copies: Sequence[dict[int, int]]
) -> str:
  top = max(int(before_G.max()), int(after_G.max()), 1)
  mean = 100 * float(after_G.mean()) / top
  rows = []
  for rank in range(min(len(before_G), _MOST_RANKS)):
    served = sum(copies[rank].values())
    home = max(int(after_G[rank]) - served, 0)
    names = ", ".join(f"{e} ({n})" for e, n in copies[rank].items())
    rows.append(
      f"<tr><td>{rank}</td><td>{_bar(top, (before_G[rank], _BEFORE))}</td>"
      f"<td>{int(before_G[rank])}</td>"
      f"<td>{_bar(top, (home, _AFTER), (served, _COPY))}</td><td>{int(after_G[rank])}</td>"
      f"<td style='text-align:left'>{names}</td></tr>"
    )
  if len(before_G) > _MOST_RANKS:
    more = _count(len(before_G) - _MOST_RANKS, "more rank")
    rows.append(f"<tr><td colspan=6>… {more}</td></tr>")
  return (
    f"<div>{_escape(title)}</div><table style='font-variant-numeric:tabular-nums'>"
    "<tr><th>rank</th><th>before</th><th></th>"
    f"<th>after: <span style='color:{_AFTER}'>home</span> and "
    f"<span style='color:{_COPY}'>copies</span></th><th></th>"
    "<th style='text-align:left'>copies of experts (assignments)</th></tr>"
    f"{''.join(rows)}</table><div>The mean is {mean:.0f} % of a bar's width.</div>"
  )


def _bar(top: int, *parts: tuple[Any, str]) -> str:
  inner = "".join(
    f"<span style='background:{color};width:{100 * float(value) / top:.1f}%;height:12px'></span>"
    for value, color in parts
  )
  return f"<span style='display:flex;width:180px;background:#8883'>{inner}</span>"


def _count(number: int, what: str) -> str:
  """So many of these.

  >>> _count(1, "copy"), _count(2, "copy"), _count(0, "rank")
  ('1 copy', '2 copies', '0 ranks')
  """
  if number == 1:
    return f"1 {what}"
  return f"{number} {what[:-1]}ies" if what.endswith("y") else f"{number} {what}s"


def _concrete(values: Sequence[Any]) -> bool:
  """Whether there are numbers to show: not while tracing, nor of another process."""
  return all(
    hasattr(leaf, "shape")
    and not isinstance(leaf, Tracer | jax.ShapeDtypeStruct)
    and getattr(leaf, "is_fully_addressable", True)
    for leaf in values
  )


def _fields(values: Any) -> str:
  inner = ", ".join(
    f"{name}={getattr(leaf, 'dtype', '')}{list(leaf.shape)}"
    if hasattr(leaf, "shape")
    else f"{name}={leaf!r}"
    for name, leaf in zip(values._fields, values, strict=True)
  )
  return f"{type(values).__name__}({inner})"


def _imbalance(load_G: Any) -> float:
  """Of the least even group."""
  load = np.asarray(load_G, np.float64)
  mean = load.mean(axis=-1)
  return float(np.max(np.where(mean > 0, load.max(axis=-1) / np.maximum(mean, 1e-9), 1.0)))


def _escape(text: str) -> str:
  return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
