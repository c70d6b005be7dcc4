"""The matrix of models, batches and loads: its cells, loads, floor and summary, and one run."""

import collections
import itertools
import json

import jax
import numpy as np
import pytest

from ultraep_jax.bench.layer.problem import SHAPES, Shape, shape_of
from ultraep_jax.bench.matrix import command, report
from ultraep_jax.bench.matrix.cells import LOADS, PASSES, RATIOS, TOKENS, Group, choose
from ultraep_jax.bench.matrix.floor import Rates, floor
from ultraep_jax.bench.matrix.loads import (
  choices,
  enough_warmth,
  highest_ratio,
  imbalance,
  load_matrix,
)
from ultraep_jax.bench.matrix.programs import calls_of
from ultraep_jax.planning import capacity
from ultraep_jax.tools.errors import CommandError


@pytest.mark.parametrize("shapes", [list(SHAPES), ["olmoe", "kimi-k2"], ["olmoe"]])
@pytest.mark.parametrize("tokens", [TOKENS, [128]])
def test_every_two_of_shape_tokens_ratio_loads_and_pass_meet(shapes, tokens):
  groups = choose(shapes, tokens, RATIOS, LOADS, PASSES, pairwise=True)
  cells = [(*cell.group, cell.ratio, cell.loads) for cells in groups.values() for cell in cells]
  least = max(2 * len(shapes) * len(tokens), 4 * len(shapes), 4 * len(tokens), 12)
  assert len(set(cells)) == len(cells) <= 1.2 * least
  factors = (shapes, tokens, PASSES, RATIOS, LOADS)
  for i, j in itertools.combinations(range(5), 2):
    assert {(x[i], x[j]) for x in cells} == set(itertools.product(factors[i], factors[j]))


def test_no_value_is_chosen_much_more_often_than_others():
  groups = choose(list(SHAPES), TOKENS, RATIOS, LOADS, PASSES, pairwise=True)
  assert len(groups) == len(SHAPES) * len(TOKENS)
  for values in zip(
    *((g.direction, c.ratio, c.loads) for g in groups for c in groups[g]), strict=True
  ):
    counts = collections.Counter(values).values()
    assert max(counts) <= 1.2 * min(counts)


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_choices_have_the_ratio_and_are_distinct(kind, ratio):
  experts, ranks, tokens, top_k = 16, 4, 256, 2
  index = choices(0, kind, ratio, experts, ranks, tokens, top_k)
  assert index.shape == (ranks * tokens, top_k)
  assert (np.diff(np.sort(index, axis=1), axis=1) > 0).all()
  want = highest_ratio(experts, ranks, top_k) if ratio == "max" else float(ratio)
  slack = 0.15 if kind == "independent" else 0.02
  assert imbalance(index, experts, ranks) == pytest.approx(want, abs=slack)
  assert load_matrix(index, experts, ranks).sum() == index.size
  assert not np.array_equal(index, choices(1, kind, ratio, experts, ranks, tokens, top_k))


@pytest.mark.parametrize(("home", "others", "top_k"), [(8, 24, 4), (2, 6, 4), (4, 2, 5)])
def test_warmth_says_how_many_experts_of_the_busiest_rank_are_chosen(home, others, top_k):
  score_AE = np.random.default_rng(0).normal(size=(100, home + others)).astype(np.float32)
  enough_AM = enough_warmth(score_AE, home, top_k)
  for warmth in (-30.0, -1.0, 0.0, 0.7, 30.0):
    warm_AE = score_AE + warmth * (np.arange(home + others) < home)
    chosen_AK = np.argsort(-warm_AE, axis=1)[:, :top_k]
    counts_A = np.count_nonzero(enough_AM < warmth, axis=1)
    np.testing.assert_array_equal(counts_A, np.count_nonzero(chosen_AK < home, axis=1))


def test_floor_is_that_of_its_parts():
  rates = Rates(flops=1e3, memory=1e3, link=1e2, launch=1.0)
  shape = Shape(width=4, inner=8, top_k=1, experts=2)
  found = floor(shape, 2, 10, "forward", rates)
  assert found.flops == 2 * 10 * 3 * 4 * 8 / 1e3
  assert found.memory == pytest.approx((96 * 2 + 10 * (2 * 4 + 2 * 8) * 2) / 1e3)
  assert found.link == pytest.approx(2 * 10 * 0.5 * 4 * 2 / 1e2)  # half the tokens, there and back
  assert found.seconds == max(found.flops, found.memory) + found.link + found.launches
  assert floor(shape, 1, 10, "forward", rates).link == 0
  assert floor(shape, 2, 10, "train", rates).flops == 3 * found.flops
  twice = [floor(shape, 2, 10, "train", rates, size).memory for size in (2, 4)]
  assert twice[1] - twice[0] == pytest.approx(3 * 96 * 2 / 1e3)  # read twice, gradients written


def row(**changes):
  usual = {"shape": "a", "tokens": 4096, "direction": "forward", "loads": "zipf", "before": 1.6}
  usual |= {"regret": 0.8, "extra_us": -100.0, "of_bound": 0.97, "ideal_over_floor": 1.2}
  return usual | {"best_unbalanced_ms": 2.0, "ratio": "1.6"} | changes


def test_a_program_has_so_many_calls_that_its_start_takes_little():
  """Of the two loads of a cell as many."""
  calls = {
    (name, tokens, direction): calls_of(Group(name, tokens, direction))
    for name in SHAPES
    for tokens in TOKENS
    for direction in PASSES
  }
  assert all(8 <= count <= 40 and count % 2 == 0 for count in calls.values())
  assert calls["qwen3-30b", 8192, "train"] == calls["olmoe", 32, "forward"] == 40
  assert calls["mixtral-8x7b", 16384, "train"] == 8 < calls["qwen3-235b", 8192, "train"] < 40


def test_summary_names_the_worst_cells():
  rows = [row(), row(regret=1.2, shape="bad"), row(tokens=64, extra_us=70.0, shape="small")]
  lines = report.summarise(rows)
  assert "1.200 (bad T4096" in lines[0] and "1.000, goal 1.00" in lines[1]
  assert "70 us" in lines[2] and "0 of 1 above" in lines[2]  # five per cent of 2 ms are 100 us
  assert "1 of 1 above" in report.summarise([row(tokens=64, extra_us=101.0)])[0]
  assert report.summarise([]) == ["no cell was measured"]


def test_a_run_measures_its_cells_and_writes_them(tmp_path, capsys):
  flags = "--shapes mixtral-8x7b --scale 128 --ranks 2 --tokens 8 --passes train"
  flags += " --ratios max --loads flat"
  path = tmp_path / "rows.json"
  assert command.main([*flags.split(), "--repeats", "1", "--json", str(path)]) == 0
  (found,) = json.loads(path.read_text())["rows"]
  # A buffer for the worst case is what so few tokens have in any case: one program, measured once.
  assert set(found["ms"]) == {"balanced", "none", "ideal"}
  assert found["regret"] == pytest.approx(found["ms"]["balanced"] / found["ms"]["none"])
  assert found["before"] > 1.9 and "mixtral" in capsys.readouterr().out


def test_both_buffers_of_not_balancing_are_measured_where_they_differ(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(capacity, "_ALL_BYTES", 0)
  monkeypatch.setattr(capacity, "_KEPT_BYTES", 0)
  flags = "--shapes mixtral-8x7b --scale 128 --ranks 2 --tokens 8 --passes forward --all"
  flags += " --ratios 1.6 --loads flat --repeats 1"
  path = tmp_path / "rows.json"
  assert command.main([*flags.split(), "--json", str(path)]) == 0
  (found,) = json.loads(path.read_text())["rows"]
  assert set(found["ms"]) == {"balanced", "none", "none, worst-case buffer", "ideal"}
  best = min(found["ms"]["none"], found["ms"]["none, worst-case buffer"])
  assert found["regret"] == pytest.approx(found["ms"]["balanced"] / best)
  assert "mixtral" in capsys.readouterr().out


def test_weights_may_be_float32(tmp_path, capsys, monkeypatch):
  seen = []
  compiled = command.compile_group
  monkeypatch.setattr(command, "compile_group", lambda *a: seen.append(a[3][3]) or compiled(*a))
  flags = "--shapes mixtral-8x7b --scale 128 --ranks 2 --tokens 8 --passes train --all --repeats 1"
  flags += " --ratios 1 --loads flat --weights float32"
  assert command.main([*flags.split(), "--json", str(tmp_path / "rows.json")]) == 0
  (found,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
  assert found["weights"] == "float32"
  assert {str(each.dtype) for each in jax.tree.leaves(seen[0])} == {"float32"}
  assert "mixtral" in capsys.readouterr().out


def test_a_shape_may_be_a_users_own(tmp_path, capsys):
  assert shape_of("96x40x12x3") == Shape(width=96, inner=40, top_k=3, experts=12)
  path = tmp_path / "rows.json"
  flags = "--scale 2 --ranks 2 --tokens 8 --passes forward --ratios 1.3 --loads zipf --repeats 1"
  assert command.main([*flags.split(), "--json", str(path), "--shapes", "96x40x12x3"]) == 0
  (found,) = json.loads(path.read_text())["rows"]
  assert found["shape"] == "96x40x12x3" and found["before"] == pytest.approx(1.3, abs=0.03)
  assert command.main([*flags.split(), "--shapes", "96x40x13x3"]) == 1
  assert "expected experts in multiples of 2 ranks, got 13" in capsys.readouterr().out
  for wrong in ("96x40x12", "96x40x2x3", "96x0x12x3", "96x40x12x3x1", "96xax12x3", "mixtral"):
    with pytest.raises(SystemExit):
      command.main(["--shapes", wrong])
    assert f"or DxFxEXPERTSxTOP_K, got '{wrong}'" in capsys.readouterr().err


def test_one_device_measures_equal_loads_only(tmp_path, capsys):
  flags = ["--shapes", "mixtral-8x7b", "--scale", "128", "--ranks", "1", "--all", "--repeats", "1"]
  flags += ["--tokens", "8", "--passes", "forward", "--loads", "zipf", "--ratios"]
  path = tmp_path / "rows.json"
  assert command.main([*flags, "1", "--json", str(path)]) == 0
  (found,) = json.loads(path.read_text())["rows"]
  assert found["before"] == found["after"] == 1 and found["copies"] == 0
  assert found["floor_parts_ms"]["link"] == 0
  with pytest.raises(CommandError, match="expected at least 2 GPUs"):
    command.main([*flags, "1", "1.3"])
  with pytest.raises(SystemExit):
    command.main([*flags, "much"])
  assert "expected a number of at least 1" in capsys.readouterr().err
