"""A trace as a table and in a few numbers."""

import dataclasses
import json

import numpy as np
import pytest
import traces

from ultraep_jax.config import BalanceConfig
from ultraep_jax.trace import Recorder, read
from ultraep_jax.trace import format as form
from ultraep_jax.trace.summary import summarise, trace_advice


def test_table_and_summary(tmp_path):
  """Each number of each record by itself; no two are the same over all records."""
  pandas = pytest.importorskip("pandas", exc_type=ImportError)
  rng, trace = np.random.default_rng(0), read(traces.write(tmp_path, steps=1))[[0, 1] * 8]
  n, ranks, slots = len(trace), 4, 2
  load_NGE = rng.integers(0, 99, (n, ranks, 8))
  filled = rng.random((n, ranks, slots)) < rng.random((n, 1, 1))
  trace = dataclasses.replace(
    trace,
    problems=("a problem",),
    step_N=np.arange(5, 5 + n),
    microbatch_N=rng.integers(0, 9, n),
    group_N=rng.integers(0, 9, n),
    load_NGE=load_NGE,
    after_NG=np.array([rng.multinomial(load.sum(), [0.1, 0.2, 0.3, 0.4]) for load in load_NGE]),
    floor_N=rng.integers(0, 999, n),
    replica_expert_NGS=np.where(filled, rng.integers(0, 8, filled.shape), -1),
    replica_parent_NGS=np.where(filled, rng.integers(0, ranks, filled.shape), -1),
    replica_bytes_N=rng.random(n) * 1e9,
    remote_N=rng.integers(0, 99, n),
    rounds_N=rng.integers(1, 4, n),
    masked_N=rng.integers(0, 99, n),
    invalid_N=rng.integers(0, 99, n),
  )
  rows = []
  for i in range(n):
    one = {name: getattr(trace, name)[i] for name in form.COLUMNS}
    before = [int(one["load_NGE"][:, 2 * rank : 2 * rank + 2].sum()) for rank in range(ranks)]
    after, total = one["after_NG"].tolist(), int(one["after_NG"].sum())
    places = zip(one["replica_expert_NGS"].ravel(), one["replica_parent_NGS"].ravel(), strict=True)
    copies = [(int(expert), int(sender)) for expert, sender in places if expert >= 0]
    senders = [sender for _, sender in copies]
    rows.append(
      {
        "step": one["step_N"],
        "layer": one["layer_N"],
        "microbatch": one["microbatch_N"],
        "group": one["group_N"],
        "imbalance_before": max(before) / (total / ranks),
        "imbalance_after": max(after) / (total / ranks),
        "imbalance_floor": one["floor_N"] / (total / ranks),
        "busiest_before": before.index(max(before)),
        "busiest_after": after.index(max(after)),
        "replicas": len(copies),
        "relayed": sum(sender != expert // 2 for expert, sender in copies),
        "max_fanout": max(map(senders.count, senders), default=0),
        "replica_megabytes": one["replica_bytes_N"] / 1e6,
        "remote_fraction": one["remote_N"] / total,
        "rounds": one["rounds_N"],
        "masked_assignments": one["masked_N"],
        "invalid_assignments": one["invalid_N"],
      }
    )
  table, expected = trace.to_pandas(), pandas.DataFrame(rows)
  pandas.testing.assert_frame_equal(table, expected, check_dtype=False)
  assert len({tuple(column) for _, column in table.items()}) == table.shape[1]

  def spread(column, chosen=slice(None)):
    return {
      str(p): pytest.approx(np.percentile(expected[column][chosen], p))
      for p in (5, 50, 90, 95, 99, 100)
    }

  summary = summarise(trace)
  assert summary == {
    "records": n,
    "steps": [5, 5 + n - 1],
    "before": spread("imbalance_before"),
    "after": spread("imbalance_after"),
    "floor": spread("imbalance_floor"),
    "layers": {
      layer: {
        "before": spread("imbalance_before", expected.layer == layer),
        "after": spread("imbalance_after", expected.layer == layer),
      }
      for layer in ("layer0", "layer1")
    },
    "replicas": pytest.approx(expected.replicas.mean()),
    "relayed": pytest.approx(expected.relayed.mean()),
    "max_fanout": expected.max_fanout.max(),
    "replica_megabytes": pytest.approx(expected.replica_megabytes.mean()),
    "remote_fraction": pytest.approx(trace.remote_N.sum() / trace.after_NG.sum()),
    "more_than_one_round": (expected.rounds > 1).sum(),
    "invalid_assignments": expected.invalid_assignments.sum(),
    "off_plan": n,
    "problems": ["a problem"],
    "advice": trace_advice(trace),
  }
  assert list(summary["layers"]) == ["layer0", "layer1"]
  json.dumps(summary)
  assert summarise(trace[:0]) == {"records": 0, "steps": [], "problems": ["a problem"]}


def test_summary_notices_a_layer_that_left_its_plan(tmp_path):
  stats = traces.stats_of(traces.loads(0))
  moved = stats.load_after_G + np.array([1, -1, 0, 0], np.int32)
  with Recorder(tmp_path) as recorder:
    recorder.record(0, stats._replace(load_after_G=moved), axes=())
  assert summarise(read(tmp_path))["off_plan"] == 1


def test_advice_is_of_the_strategy_that_was_recorded(tmp_path):
  """It has no slots; those of the configuration are quota's."""
  stats = traces.stats_of(traces.loads(0), BalanceConfig(replica_slots=0, objective="balance"))
  config = BalanceConfig(strategy="none", replica_slots=2)
  with Recorder(tmp_path, config=config) as recorder:
    recorder.record(0, stats, axes=())
  trace = read(tmp_path)
  assert trace.manifest.replica_slots == 0
  (line,) = trace_advice(trace)
  assert line.startswith("strategy: ") and line.endswith("with 2 slots by quota")
