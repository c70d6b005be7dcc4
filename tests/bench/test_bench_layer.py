"""The bench of a layer: its loads and EPLB's history, bounds, memory, table and figure."""

import argparse
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ultraep_jax import testing
from ultraep_jax.bench.layer import command as layer
from ultraep_jax.bench.layer import peers
from ultraep_jax.bench.layer import plot as layer_plot
from ultraep_jax.bench.layer import times as layer_times
from ultraep_jax.bench.layer.problem import (
  Arrays,
  Problem,
  Shape,
  histories,
  make_loads,
  mesh_of,
)
from ultraep_jax.bench.layer.variants import SLACK, VARIANTS, bound, capacity, config_of, planned
from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning.plan import plan_quotas
from ultraep_jax.strategies import eplb
from ultraep_jax.tools.errors import CommandError
from ultraep_jax.types import ExpertWeights

FLAGS = "--shapes qwen3-235b --scale 128 --ranks 2 --experts 8 --top-k 2 --tokens 64 --steps 2"


def arguments(**changes) -> argparse.Namespace:
  parser = argparse.ArgumentParser()
  layer.add_arguments(parser)
  return argparse.Namespace(**vars(parser.parse_args(FLAGS.split())) | changes)


def imbalance(load_GE):
  rank_G = load_GE.sum(axis=0).reshape(len(load_GE), -1).sum(axis=1)
  return rank_G.max() / rank_G.mean()


def test_measured_loads_do_not_depend_on_the_window_unless_they_drift():
  for kind in ("zipf", "flat"):
    past, now = make_loads(1.6, 8, 2, 2, arguments(loads=kind, window=3))
    _, again = make_loads(1.6, 8, 2, 2, arguments(loads=kind, window=5))
    assert past.shape == (3, 2, 8) and now.shape == (2, 2, 8)
    np.testing.assert_array_equal(now, again)
    assert [round(imbalance(load), 1) for load in [*past, *now]] == [1.6] * 5
    assert len({load.tobytes() for load in [*past, *now]}) == 5
  past, now = make_loads(2.0, 64, 4, 2, arguments(loads="drifting", window=30, tokens=512, steps=4))
  drift = [load.sum(axis=0) for load in [*past, *now]]
  assert np.mean([imbalance(load) for load in [*past, *now]]) == pytest.approx(2.0, abs=0.05)
  change = [np.abs(a - b).sum() / 8192 for a, b in itertools.pairwise(drift)]
  assert 0.01 < np.mean(change) < 0.5  # other seeds of zipf change by more than 1
  assert np.abs(drift[0] - drift[-1]).sum() / 8192 < 0.5


def test_history_is_that_of_the_window_before():
  load_WE = np.array([testing.zipf_loads(s, 8, 4, 32, 2, 1.5).sum(axis=0) for s in range(7)])
  states = histories(load_WE[:3], load_WE[3:], 4, 2)
  config, state = BalanceConfig(replica_slots=2), eplb.init(8, 4, BalanceConfig(replica_slots=2))
  for n, load_E in enumerate(load_WE):
    if n >= 3:
      got = jax.tree.map(lambda leaf, n=n: leaf[n - 3], states)
      jax.tree.map(np.testing.assert_array_equal, got, state)
    state = eplb.update(state, jnp.asarray(load_E), config, period=3)
  replica_NGS = np.asarray(states.replica_expert)
  assert (replica_NGS[0] >= 0).any()
  np.testing.assert_array_equal(replica_NGS[0], replica_NGS[2])  # until three more are seen
  assert (replica_NGS[3] != replica_NGS[0]).any()


def test_check_compares_balanced_variants(capsys, monkeypatch):
  args = arguments(variants=["none", "quota", "nodes", "portable"])
  mesh = jax.make_mesh((2,), ("expert",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
  (problem,) = layer.make_problems(mesh, [1.5], args).values()
  layer_times.check(mesh, "a shape", 1.5, problem, args)
  lines = capsys.readouterr().out.splitlines()
  assert [line.split(":")[0] for line in lines] == ["a shape 1.5 quota", "a shape 1.5 nodes"]

  def wrong_as_nodes(variant, *others):
    apply = layer_of(variant, *others)
    return lambda *xs: (apply(*xs)[0] * (1.02 if variant == "nodes" else 1), None)

  layer_of = layer_times.layer
  monkeypatch.setattr(layer_times, "layer", wrong_as_nodes)
  args.variants = ["nodes"]
  with pytest.raises(AssertionError, match="nodes"):
    layer_times.check(mesh, "a shape", 1.5, problem, args)


def test_meshes_beside_one_another_need_two_devices_each():
  for data, text in (("3", "a divisor of 4 devices, got 3"), ("4", "two devices a mesh")):
    with pytest.raises(CommandError, match=f"--data: expected .*{text}"):
      layer.main(f"{FLAGS} --ranks 4 --data {data} --ratios 1.3".split())


def test_meshes_beside_one_another_have_loads_of_their_own():
  args = arguments(data=2, ranks=4, variants=["quota"], steps=3)
  mesh = mesh_of(jax.devices()[:4], 2)
  assert dict(mesh.shape) == {"data": 2, "expert": 2}
  assert dict(mesh_of(mesh.devices).shape) == {"expert": 4}
  (problem,) = layer.make_problems(mesh, [1.5], args).values()
  assert problem.load_NGE.shape == (6, 2, 8) and problem.tokens == 64
  assert problem.arrays.x.shape[0] == 4 * 64 and problem.arrays.weights.wo.shape[0] == 8
  assert len({load.tobytes() for load in problem.load_NGE}) == 6
  chosen = np.asarray(problem.index).reshape(6, 2, -1)  # steps, then meshes; ranks of each
  for load_GE, index_G in zip(problem.load_NGE, chosen, strict=True):
    np.testing.assert_array_equal([np.bincount(index, minlength=8) for index in index_G], load_GE)
  row = layer_times.after(mesh, problem, "quota", args)
  assert row["imbalance_before"] == pytest.approx(1.5, abs=0.03) and row["imbalance_after"] == 1.0
  layer_times.check(mesh, "a shape", 1.5, problem, args)


def test_bound_holds_and_is_reached_on_flat_loads():
  flat_GE = testing.flat_loads(0, 64, 4, 256, 4, 2.0)
  assert bound(flat_GE, 2) == 1.25  # 10 of 16 experts stay, with a sixteenth of twice the mean each
  assert bound(flat_GE, 0) == 2.0 and bound(flat_GE, 16) == 1.0
  load_GE = np.zeros((2, 8), np.int32)
  load_GE[:, :4] = [9, 3, 5, 1]
  # Rank 0 has 36, and one slot on rank 1 takes 18 at the most.
  assert bound(load_GE, 1) == 18 / 18 and bound(load_GE + 1, 1) == 26 / 26
  load_GE[:, :4] = [4, 5, 5, 4]
  assert bound(load_GE, 1) == 26 / 18
  for kind in testing.ADVERSARIAL_KINDS:
    load_GE = testing.adversarial_loads(1, 32, 8, 64, 2, kind=kind)
    plan = plan_quotas(jnp.asarray(load_GE), BalanceConfig(replica_slots=1, objective="balance"))
    reached = int(plan.quota.sum(axis=0).max()) / (load_GE.sum() / 8)
    assert bound(load_GE, 1) <= reached


@pytest.mark.slow
def test_bounds_table(tmp_path, capsys):
  path = tmp_path / "bounds.json"
  assert layer.main(f"{FLAGS} --experts 16 --bounds --ratios 1.75 --json {path}".split()) == 0
  rows = json.loads(path.read_text())["bounds"]
  # With 2 slots 6 of the hot rank's 8 experts stay, each with 28 of its 224; the mean is 128.
  expected = [(2, 168 / 128), (4, 1.0), (8, 1.0)]
  assert [(row["slots"], row["bound"]) for row in rows] == expected
  assert all(row["reached"] == row["bound"] for row in rows)
  assert len(re.findall(r"1\.3125 +1\.3125", capsys.readouterr().out)) == 1


def test_buffers_are_made_to_measure_where_nothing_bounds_the_load():
  mesh = jax.make_mesh((2,), ("expert",), devices=jax.devices()[:2])
  args = arguments(window=3)
  problem = Problem.make(mesh, Arrays.make(mesh, Shape(32, 16, 2, 8), args), 1.7, args)
  factors = {v: capacity(v, problem, args) for v in VARIANTS[:5]}
  assert factors["quota"] == factors["quota-time"] == factors["ideal"] == "auto"
  assert factors["none"] == problem.busiest == pytest.approx(1.7, abs=0.03)
  expected, replica_NGS = [], np.asarray(problem.history.replica_expert)
  for load_GE, replica_GS in zip(problem.load_NGE, replica_NGS, strict=True):
    hosts = [
      {expert // 4, *np.nonzero((replica_GS == expert).any(axis=1))[0]} for expert in range(8)
    ]
    share_E = load_GE.sum(axis=0) / [len(host) for host in hosts]
    rank_G = [sum(share_E[e] for e in range(8) if g in hosts[e]) for g in range(2)]
    expected.append(max(rank_G) / 128)
  assert planned("eplb", problem, args) == pytest.approx(max(expected), abs=8 / 128)
  assert factors["eplb"] == max(SLACK, planned("eplb", problem, args))
  assert config_of("quota-time", args, "auto").objective == "time" != args.objective


def test_the_layer_of_other_machines():
  alone, plain, here = (config_of(v, arguments(), "auto") for v in ("nodes", "portable", "quota"))
  assert (alone.node_size, alone.domain_of(8), alone.implementation) == (1, 8, "auto")
  assert (plain.implementation, plain.node_size) == ("portable", here.node_size)
  assert {config.strategy for config in (alone, plain, here)} == {"quota"}


def test_figure_has_the_times_over_ideal():
  times = {"ideal": 1.0, "none": 2.0, "quota": 1.25}
  rows = [
    {"shape": s, "pass": p, "ratio": r, "variant": v, "of_ideal": 1 / (t * r)}
    for p in ("forward", "train")
    for s in ("a", "b")
    for r in (2.0, 1.0)
    for v, t in times.items()
  ]
  figure = layer_plot.draw(rows)
  titles = [ax.get_title(loc="left") for ax in figure.axes]
  assert titles == ["a, forward", "b, forward", "a, train", "b, train"]
  for ax in figure.axes:
    bars = {c.get_label(): [bar.get_height() for bar in c] for c in ax.containers}
    assert bars == {"not balanced": [4.0, 2.0], "balanced": [2.5, 1.25]}
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "2"]
  with pytest.raises(ValueError, match="rows: expected times"):
    layer_plot.draw([row | {"of_ideal": None} for row in rows])


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (
      "--plot times.png --variants none quota",
      "--plot: expected ideal and others among --variants",
    ),
    (
      "--check --variants none ideal portable",
      "--check: expected a balanced one among --variants",
    ),
    ("--data 2 --variants none eplb", "--data: expected no eplb among --variants"),
  ],
)
def test_variants_that_do_not_suffice_are_refused_before_measuring(flags, message, capsys):
  with pytest.raises(SystemExit, match="2"):
    layer.main(f"{FLAGS} {flags}".split())
  assert message in capsys.readouterr().err


@pytest.mark.slow
def test_table_of_all_contenders(tmp_path, capsys):
  files = f"--json {tmp_path / 'times.json'} --plot {tmp_path / 'times.png'}"
  variants = "--variants none quota quota-time eplb ideal --passes forward --ratios 1.7"
  flags = f"{FLAGS} --slots 4 --window 3 --calls 2 --repeats 2 --loads drifting"
  assert layer.main(f"{flags} {variants} {files}".split()) == 0
  assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
  rows = {row["variant"]: row for row in json.loads((tmp_path / "times.json").read_text())["rows"]}
  assert list(rows) == ["none", "quota", "quota-time", "eplb", "ideal"]
  assert all(row["ms"] > 0 and row["of_ideal"] > 0 for row in rows.values())
  assert rows["quota"]["imbalance_after"] == rows["quota"]["bound"] == 1
  for name in ("quota-time", "eplb"):
    assert rows[name]["imbalance_before"] == rows["quota"]["imbalance_before"] > 1.5
    assert 1 <= rows[name]["imbalance_after"] < rows[name]["imbalance_before"]
    assert rows[name]["rounds"] == 1
  assert rows["eplb"]["imbalance_after"] > 1 and rows["eplb"]["replicas"] > 0
  assert len(capsys.readouterr().out.splitlines()) == 1 + 2 + 5


@pytest.mark.slow
def test_memory_table(tmp_path, capsys):
  path = tmp_path / "memory.json"
  flags = f"{FLAGS} --ranks 4 --experts 16 --memory --json {path}"
  assert layer.main(flags.split()) == 0
  rows = json.loads(path.read_text())["memory"]
  assert len(rows) == 8 == len(capsys.readouterr().out.splitlines()) - 1 - 2
  for direction in ("forward", "train"):
    whole, rounds, quota, ideal = (row for row in rows if row["pass"] == direction)
    assert [row["variant"] for row in (whole, rounds, quota, ideal)] == (
      ["none", "none", "quota", "ideal"]
    )
    assert whole["ratio"] == pytest.approx(3.0, abs=0.05)
    assert whole["buffer_rows"] == pytest.approx(3 * 128, abs=16)
    assert (rounds["buffer_rows"], quota["buffer_rows"]) == (136, 4 * 128)  # a small batch: all
    assert [row["rounds"] for row in (whole, rounds, quota, ideal)] == [1, 3, 1, 1]
    assert len({row["arguments_gb"] for row in (whole, rounds, quota, ideal)}) == 1
    assert whole["temp_gb"] > rounds["temp_gb"]
    assert quota["temp_gb"] >= ideal["temp_gb"]
    for row in (whole, rounds, quota, ideal):
      parts = row["arguments_gb"] + row["results_gb"] + row["temp_gb"]
      assert parts == pytest.approx(row["peak_gb"])


def all_rows_to_all(operand, output, start_G, size_G, landing_G, received_G, *, axis_name):
  """``ragged_all_to_all`` of devices that have none."""
  del received_G
  rank, row_N = lax.axis_index(axis_name), jnp.arange(output.shape[0])
  every = [lax.all_gather(x, axis_name) for x in (operand, start_G, size_G, landing_G)]
  for rows, start, size, landing in zip(*every, strict=True):
    place_N = row_N - landing[rank]
    coming = rows[jnp.clip(place_N + start[rank], 0, rows.shape[0] - 1)]
    output = jnp.where(((place_N >= 0) & (place_N < size[rank]))[:, None], coming, output)
  return output


@pytest.mark.parametrize("name", peers.LAYERS)
def test_peers_are_the_dense_layer(name, monkeypatch):
  """But for jax's kernel for Hopper, which a CPU has not."""
  monkeypatch.setattr(lax, "ragged_all_to_all", all_rows_to_all)
  monkeypatch.setattr(peers, "_hopper_matmul", lax.ragged_dot)
  load_GE = testing.zipf_loads(0, 16, 4, 32, 4, 1.8)
  index = jnp.asarray(testing.expert_indices(0, load_GE, 4).reshape(-1, 4))
  rng = np.random.default_rng(0)

  def normal(*sizes):
    return jnp.asarray(rng.normal(size=sizes) / sizes[-2] ** 0.5, jnp.float32)

  weights = ExpertWeights(normal(16, 16, 24), normal(16, 16, 24), normal(16, 24, 16))
  x, gate = normal(128, 16), normal(128, 4)
  buffers = peers.Buffers.of(load_GE[None])

  def outputs_and_gradients(layer, *args):
    y, pull = jax.vjp(layer, *args)
    return y, pull(y)

  def local(x, index, gate, weights):
    layer = peers.LAYERS[name]
    return outputs_and_gradients(
      lambda x, gate, w: layer(x, index, gate, w, buffers, "expert"), x, gate, weights
    )

  kinds = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((4,), ("expert",), kinds, devices=jax.devices()[:4])
  by_rank = P("expert")
  run = jax.shard_map(local, mesh=mesh, in_specs=(by_rank,) * 4, out_specs=by_rank, check_vma=False)
  got = jax.jit(run)(x, index, gate, weights)
  wanted = outputs_and_gradients(
    lambda x, gate, w: testing.dense_moe(x, index, gate, w), x, gate, weights
  )
  for one, other in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
    assert float(jnp.linalg.norm(one - other) / jnp.linalg.norm(other)) < 1e-5
