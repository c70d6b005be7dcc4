"""First tiles in one product, and a loop over what is beyond, against a plain matmul."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_problems import (
  dense,
  make_mesh,
  make_problem,
  new_layer,
  output,
  pile_up,
  relative_error,
  value_and_grads,
)
from slots import HOME, REPLICA, SIZES, C, D, F, normal, poison, reference

import ultraep_jax as uep
from ultraep_jax.compute import first_tiles, grouped, tile_matmul, tiles
from ultraep_jax.compute.tiles import Tiles

pytestmark = pytest.mark.usefixtures("optimized")


@pytest.fixture(params=[(8, 3), (8, 1), (128, 16)])
def least(request, monkeypatch):
  """Rows of a tile at least: so few that slots have more, and as many as on GPUs.

  And tiles of a turn: several, one, and more than there are.
  """
  least, several = request.param
  monkeypatch.setattr(first_tiles, "_LEAST", least)
  monkeypatch.setattr(tiles, "_MOST_TILES", several)
  monkeypatch.setattr(tiles, "_MOST_TIMES_ROWS", min(several, 4))
  jax.clear_caches()
  yield least
  jax.clear_caches()


@pytest.mark.parametrize("capacity", [5, 40, 41, 300])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("slots", [REPLICA, 0])
def test_products_with_and_without_biases(transpose, capacity, slots, least):
  rng = np.random.default_rng(0)
  weights, biases = normal(rng, HOME + slots, D, F), normal(rng, HOME + slots, F)
  operand = jnp.swapaxes(weights, 1, 2) if transpose else weights
  for sizes in np.array(SIZES)[:, : HOME + slots] * capacity // C:
    rows = poison(normal(rng, capacity, D), sizes)
    arguments = rows, operand[:HOME], operand[HOME:], jnp.asarray(sizes, jnp.int32), transpose
    want = reference(rows, weights, sizes)
    got = tile_matmul.matmul(*arguments, together=True)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    want[: sum(sizes)] += np.repeat(np.asarray(biases), sizes, axis=0)
    bias = biases[:HOME], biases[HOME:]
    got = tile_matmul.matmul(*arguments, bias, together=True)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("into", [False, True])
def test_gradients_of_weights(into, least):
  rng = np.random.default_rng(0)
  for sizes in np.array(SIZES):
    rows, grad = poison(normal(rng, 41, D), sizes), poison(normal(rng, 41, F), sizes)
    before = normal(rng, HOME, D, F) if into else None
    arguments = rows, grad, jnp.asarray(sizes, jnp.int32), HOME, before
    want = tile_matmul.wgrad(*arguments)
    got = tile_matmul.wgrad(*arguments, together=True)
    for left, right in zip(got, want, strict=True):
      assert np.isfinite(left).all()
      np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


def test_a_tile_has_what_a_slot_has_of_the_buffer_within_limits():
  assert first_tiles.tile_rows(capacity=81920, num_home=128) == 640
  assert first_tiles.tile_rows(capacity=1001, num_home=7) == 144
  assert first_tiles.tile_rows(capacity=512, num_home=64) == 128
  assert first_tiles.tile_rows(capacity=60, num_home=64) == 60
  assert first_tiles.tile_rows(capacity=81920, num_home=4) == 1024


def test_few_rows_do_not_read_the_weights_of_all_experts(monkeypatch):
  """One token of eight of Qwen3-235B's 128 experts; with OLMoE's 64 small ones it pays."""
  monkeypatch.setattr(grouped, "_by_host", lambda: True)

  def multiplies_all(rows, home, width, inner):
    shapes = (rows, width), (home, width, inner), (2, width, inner)
    operands = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    sizes = jax.ShapeDtypeStruct((home + 2,), jnp.int32)
    return f"bf16[{home},{rows},{width}]" in str(
      jax.make_jaxpr(lambda *args: grouped.grouped_matmul(*args))(*operands, sizes)
    )

  assert not multiplies_all(8, 128, 4096, 1536) and multiplies_all(8, 64, 2048, 1024)
  assert multiplies_all(128, 128, 4096, 1536)
  assert not multiplies_all(2, 8, 4096, 14336) and multiplies_all(8, 8, 4096, 14336)


def test_the_loop_has_no_turn_for_slots_that_fit_a_tile():
  rows = first_tiles.tile_rows(1024, 4)
  tiles = Tiles.of(1024, jnp.array([128, 0, 129, 300, 5], jnp.int32), rows, 4, rows)
  assert tiles.rows == 256
  assert tiles.end_P.tolist() == [0, 0, 0, 1, 2]  # the rest of 300, and a replica's 5


def test_what_a_turn_does():
  assert [tiles.tiles_of_turn(rows, 2048 * 768) for rows in (128, 1024, 4096)] == [16, 12, 3]
  assert tiles.tiles_of_turn(1024, 4096 * 14336) == 1
  assert [tiles.rows_of_turn(rows, 2048 * 768) for rows in (128, 1024, 4096)] == [512, 3072, 4096]


def on_a_gpu(problem, config, monkeypatch):
  """The layer as it is without kernels where hosts launch turns of loops."""
  monkeypatch.setattr(grouped, "_by_host", lambda: True)
  return new_layer.__wrapped__(problem.mesh, config, True)


@pytest.mark.parametrize("strategy", ["quota", pile_up])
@pytest.mark.parametrize("capacity_factor", [1.0, 4.0])
def test_the_layer_on_a_gpu_without_kernels_equals_dense(
  strategy, capacity_factor, monkeypatch, least
):
  problem = make_problem(make_mesh(4), top_k=2, load="skewed")
  config = uep.BalanceConfig(
    strategy=strategy, replica_slots=1, objective="balance", capacity_factor=capacity_factor
  )
  y, stats, grads = value_and_grads(on_a_gpu(problem, config, monkeypatch), problem)
  assert (int(jnp.max(stats.rounds)) > 1) == (capacity_factor == 1)
  assert jnp.sum(stats.replica_expert_GS >= 0) > 0
  want_y, want_grads = dense(problem)
  assert relative_error(y, want_y) < 1e-5
  assert relative_error(grads, want_grads) < 1e-5


def test_a_batch_invariant_layer_has_no_first_tiles(monkeypatch, least):
  monkeypatch.setattr(first_tiles, "matmul", None)
  problem = make_problem(make_mesh(2), top_k=2)
  config = uep.BalanceConfig(replica_slots=1, batch_invariant=True)
  output(on_a_gpu(problem, config, monkeypatch), problem)
  config = dataclasses.replace(config, batch_invariant=False)
  with pytest.raises(TypeError, match="not callable"):
    output(on_a_gpu(problem, config, monkeypatch), problem)
