"""The bench of a whole model: its FLOPs, its step, its table, and that it lowers for GPUs."""

import json

import jax
import numpy as np
import pytest
from programs import EXCHANGE, LAYER, PLANNING, exchanges_rows, kernel_names

import ultraep_jax as uep
from ultraep_jax.bench.train import command as train
from ultraep_jax.bench.train import step as train_step
from ultraep_jax.bench.train import text
from ultraep_jax.bench.train.transformer import AXIS, Sizes

SMALL = Sizes(width=64, inner=24, layers=1, experts=16, top_k=2, head_dim=16, seq=32)
FLAGS = "--ranks 4 --scale 64 --layers 1 --experts 16 --top-k 2 --seq 64 --learning-rate 3e-3"


@pytest.fixture(autouse=True)
def standard_promotion():
  """jax.nn.dot_product_attention in bfloat16 needs it."""
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.fixture
def mesh():
  axis_types = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((4,), (AXIS,), axis_types=axis_types, devices=jax.devices()[:4])
  with jax.set_mesh(mesh):
    yield mesh


def test_flops_by_hand():
  sizes = Sizes(
    width=8, inner=4, layers=2, experts=4, top_k=2, head_dim=2, queries_per_key=2, seq=3
  )
  # Multiplications and additions of a token: 8 x 8 queries, 8 x 4 keys, 8 x 4 values, 8 x 8
  # outputs; 4 heads of 2 channels over 2 positions, twice; 8 x 4 router; 2 experts of 3 8 x 4.
  block = 2 * (64 + 32 + 32 + 64) + 2 * (16 + 16) + 2 * 32 + 2 * (2 * 96)
  assert block == 896
  assert sizes.flops_per_token == 3 * (2 * block + 2 * 8 * 256) == 17664


@pytest.mark.parametrize("sizes", [SMALL, Sizes()], ids=["small", "default"])
def test_counts_are_those_of_the_model(mesh, sizes):
  """Parameters, and FLOPs as 6 per parameter that a token meets and the mixing of attention."""
  params = train_step.shapes(train_step.Options(sizes, "xla")).params
  total = active = 0.0
  for path, leaf in jax.tree.leaves_with_path(params):
    name = jax.tree_util.keystr(path)
    total += leaf.size
    if "wi_" in name or "wo" in name:
      active += leaf.size * sizes.top_k / sizes.experts
    elif "norm" not in name:
      active += leaf.size
  assert total == sizes.expert_parameters + sizes.other_parameters
  mixing = sizes.layers * 4 * sizes.width * (sizes.seq + 1) / 2
  assert sizes.flops_per_token == 6 * active + 3 * mixing


def test_experts_are_divided_and_the_rest_is_not(mesh):
  state = train_step.shapes(train_step.Options(SMALL, "xla"))
  for tree in (state.params, state.moments):
    for path, leaf in jax.tree.leaves_with_path(tree):
      name = jax.tree_util.keystr(path)
      divided = "wi_" in name or "wo" in name
      assert leaf.sharding.shard_shape(leaf.shape) == (
        (leaf.shape[0] // 4, *leaf.shape[1:]) if divided else leaf.shape
      ), name


def test_text_is_windows_of_the_same_bytes():
  bytes_N = text.load_text()
  assert bytes_N.dtype == np.uint8 and 1_000_000 < bytes_N.size <= text.MAX_BYTES
  first, again, other = (text.batch_at(bytes_N, step, 3, 16) for step in (5, 5, 6))
  np.testing.assert_array_equal(first, again)
  assert first.shape == (3, 17) and (first != other).any()
  assert all(row.astype(np.uint8).tobytes() in bytes_N.tobytes() for row in first)


@pytest.mark.slow
def test_step_learns_and_at_rate_zero_changes_no_parameter(mesh):
  program = train_step.Program(train_step.Options(SMALL, "xla", remat=True), batch=8)
  config = uep.BalanceConfig(objective="balance")
  assert not program.compile([config]) and program.has(config)
  program.reset()
  source = text.load_text()
  batches = [program.batch_of(text.batch_at(source, i, 8, SMALL.seq)) for i in range(24)]
  no_bias = np.zeros((1, 16))
  done = program.run(config, batches, no_bias, 1e-2)
  assert float(done[0].loss) == pytest.approx(np.log(256), abs=0.3)
  assert float(done[-1].loss) < 4.0

  before = jax.device_get(program.state)
  (first,) = program.run(config, batches[:1], no_bias)
  (again,) = program.run(config, batches[:1], no_bias)
  assert float(first.loss) == float(again.loss)
  jax.tree.map(np.testing.assert_array_equal, before.params, jax.device_get(program.state.params))
  assert (np.asarray(jax.tree.leaves(program.state.moments)[1]) != 0).any()

  bias = no_bias.copy()
  bias[0, 4:6] = 10.0  # every token then takes both, and they are on one rank
  (forced,) = program.run(config, batches[:1], bias)
  assert float(forced.before_L[0]) == 4.0 and float(forced.after_L[0]) < 1.01
  np.testing.assert_array_equal(np.flatnonzero(forced.load_LE[0]), [4, 5])


@pytest.mark.slow
def test_table(tmp_path, capsys):
  path = tmp_path / "train.json"
  flags = f"{FLAGS} --warmup 12 --ratios 2 --calibrate 20 --steps 2 --repeats 1 --json {path}"
  exact = "--objective balance --slots 4"  # as many as home experts: any load
  assert train.main(f"{flags} {exact}".split()) == 0
  results = json.loads(path.read_text())
  rows = {(row["loads"], row["variant"]): row for row in results["rows"]}
  assert len(rows) == 6 and len(capsys.readouterr().out.splitlines()) >= 10
  assert results["warmup_losses"][-1] < 4.5 < 5 < results["warmup_losses"][0]
  for loads in ("text", "2"):
    none, quota, ideal = (rows[loads, v] for v in ("none", "quota", "ideal"))
    assert none["imbalance_after"] == none["imbalance_before"] > 1.1
    assert quota["imbalance_before"] == pytest.approx(none["imbalance_before"], rel=0.02)
    assert quota["worst_after"] < 1.005 and ideal["worst_after"] < 1.01
    assert quota["replicas"] > 0 == none["replicas"]
    for row in (none, quota, ideal):
      assert row["rounds"] == 1
      assert row["tokens_per_second"] == pytest.approx(512 / row["ms"] * 1e3)
      flops = row["tokens_per_second"] * results["flops_per_token"]
      assert row["mfu"] == pytest.approx(flops / (4 * 989e12))
  assert rows["2", "none"]["imbalance_before"] == pytest.approx(2, rel=0.05)
  assert rows["2", "none"]["capacity_factor"] >= rows["2", "none"]["worst_before"]


@pytest.mark.slow
def test_losses_part_as_rounding_does(tmp_path):
  path = tmp_path / "loss.json"
  assert train.main(f"{FLAGS} --check-loss 16 --json {path}".split()) == 0
  results = json.loads(path.read_text())
  noise, ours = (results["loss_difference"][name] for name in ("reordered", "quota"))
  assert 0 < ours["mean"] < 5 * noise["mean"] < 0.1
  assert all(curve[-1] < 4 and len(curve) == 16 for curve in results["losses"].values())


@pytest.mark.slow
def test_lowers_for_gpus(mesh):
  """The whole step, at full width, with the exchange, the copies and the experts in kernels.

  One layer of each; what quota adds to the kernels of the others is more than they have alone.
  Few tokens, for which matmuls have the tiles that are lowered soonest, and one round.
  """
  options = train_step.Options(Sizes(layers=1, seq=32), "xla")
  programs = {}
  for strategy, factor in (("none", 3.0), ("ideal", 1.0625), ("quota", 1.0625)):
    config = uep.BalanceConfig(
      strategy=strategy, capacity_factor=factor, implementation="mosaic_gpu"
    )
    traced = programs[strategy] = train_step.traced_step(options, config, batch=4)
    planning = PLANNING if strategy == "quota" else set()
    assert kernel_names(traced.jaxpr) == LAYER | EXCHANGE | planning | {"top_k"}
    assert not exchanges_rows(traced.jaxpr)
  text = programs["quota"].lower(lowering_platforms=("cuda",)).as_text()
  assert "all_to_all" not in text and "collective_permute" not in text
