"""The kernel that writes tokens to their rows on one GPU: interpreted, and lowered for GPUs."""

import functools

import assignments
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mosaic_interpret import interpreted
from programs import count_reaching

from pallas_kernels.transfer.place import place, place_scaled
from pallas_kernels.transfer.tuning import ExchangeTuning

RANKS = 2
TUNING = ExchangeTuning(blocks=2, workers=1, tile_bytes=512)


def on_ranks(function, count):
  """On several GPUs, each by itself."""
  mesh = assignments.mesh((RANKS, "expert"))
  spec = P("expert")
  return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(spec,) * count, out_specs=spec))


@pytest.fixture(params=[(1, 1, 4), (7, 3, 40)], ids=str)
def problem(request):
  """Rows of tokens, some feeding none, and rows that no token feeds."""
  tokens, top_k, capacity = request.param
  rng = np.random.default_rng(0)
  ranks = [rng.permutation(capacity)[: tokens * top_k].reshape(tokens, top_k) for _ in range(RANKS)]
  row = np.stack(ranks).astype(np.int32)
  row[:, 1::2, 0] = row[:, 2::4] = -1
  return rng, row, capacity


def check(row, filled, expected):
  for rank, token, k in np.ndindex(row.shape):
    if row[rank, token, k] >= 0:
      np.testing.assert_array_equal(filled[rank, row[rank, token, k]], expected[rank, token])


def test_places_bit_for_bit(problem):
  rng, row, capacity = problem
  arrays = [
    rng.normal(size=(*row.shape[:2], 144)).astype(jnp.bfloat16),
    rng.normal(size=(*row.shape[:2], 4)).astype(np.float32),
  ]
  whole = [array.reshape(-1, array.shape[-1]) for array in arrays]
  function = functools.partial(place, capacity=capacity, tuning=TUNING)
  with interpreted():
    run = on_ranks(lambda row_TK, *arrays: function(arrays, row_TK), 3)
    filled = [np.asarray(x) for x in run(row.reshape(-1, row.shape[2]), *whole)]
  for rows, array in zip(filled, arrays, strict=True):
    check(row, rows.reshape(RANKS, capacity, -1), array)


def test_scaled_tokens_are_multiplied(problem):
  rng, row, capacity = problem
  value = rng.normal(size=(*row.shape[:2], 400)).astype(jnp.float8_e4m3fn)
  scale = rng.uniform(0.5, 2.0, size=(*row.shape[:2], 4)).astype(np.float32)
  function = functools.partial(place_scaled, dtype=jnp.bfloat16, capacity=capacity, tuning=TUNING)
  with interpreted():
    whole = [array.reshape(-1, array.shape[-1]) for array in (value, scale, row)]
    filled = np.asarray(on_ranks(function, 3)(*whole)).reshape(RANKS, capacity, -1)
  expected = value.astype(np.float32) * np.repeat(scale, 128, axis=-1)[..., :400]
  check(row, filled, expected.astype(jnp.bfloat16))


@pytest.mark.parametrize("scaled", [False, True])
def test_writes_over_the_rows_of_others(problem, scaled):
  """Rows that no token feeds stay as they were, NaN included."""
  rng, row, capacity = problem
  dtype = jnp.float8_e4m3fn if scaled else jnp.bfloat16
  value = rng.normal(size=(*row.shape[:2], 144)).astype(dtype)
  scale = np.full((*row.shape[:2], 4), 2, np.float32)
  before = rng.choice([1.5, np.nan, -0.0], size=(RANKS, capacity, 144)).astype(jnp.bfloat16)

  def function(over_CD, value_TD, scale_TB, row_TK):
    options = {"capacity": capacity, "tuning": TUNING}
    if scaled:
      return place_scaled(value_TD, scale_TB, row_TK, dtype=jnp.bfloat16, over=over_CD, **options)
    return place([value_TD], row_TK, over=[over_CD], **options)[0]

  with interpreted():
    whole = [array.reshape(-1, array.shape[-1]) for array in (before, value, scale, row)]
    filled = np.asarray(on_ranks(function, 4)(*whole)).reshape(before.shape)
  expected = before.copy()
  for rank, token, k in np.ndindex(row.shape):
    if row[rank, token, k] >= 0:
      product = value[rank, token].astype(np.float32) * (2 if scaled else 1)
      expected[rank, row[rank, token, k]] = product.astype(jnp.bfloat16)
  np.testing.assert_array_equal(filled.view(np.uint16), expected.view(np.uint16))


def test_under_vmap_rows_are_written_over_one_by_one(problem):
  rng, row, capacity = problem
  tokens = rng.normal(size=(row.shape[0] * row.shape[1], 2, 16)).astype(np.float32)
  before = rng.normal(size=(RANKS * capacity, 2, 16)).astype(np.float32)

  def function(over_CXD, x_TXD, row_TK):
    def one(over_CD, x_TD):
      return place([x_TD], row_TK, over=[over_CD], capacity=capacity, tuning=TUNING)[0]

    return jax.vmap(one, 1, 1)(over_CXD, x_TXD)

  with interpreted():
    filled = on_ranks(function, 3)(before, tokens, row.reshape(-1, row.shape[2]))
  expected = before.reshape(RANKS, capacity, 2, 16).copy()
  for rank, token, k in np.ndindex(row.shape):
    if row[rank, token, k] >= 0:
      expected[rank, row[rank, token, k]] = tokens.reshape(RANKS, -1, 2, 16)[rank, token]
  np.testing.assert_array_equal(np.asarray(filled).reshape(expected.shape), expected)


def test_no_tokens_leave_the_rows():
  over = jnp.arange(32.0).reshape(2, 16)
  (rows,) = place([jnp.zeros((0, 16))], jnp.zeros((0, 2), jnp.int32), capacity=2, over=[over])
  np.testing.assert_array_equal(rows, over)


def test_refuses_other_rows():
  tokens, row_TK = jnp.zeros((4, 16)), jnp.zeros((4, 1), jnp.int32)
  for over in ([jnp.zeros((7, 16))], [jnp.zeros((8, 16), jnp.bfloat16)], [jnp.zeros((8, 16))] * 2):
    with pytest.raises(ValueError, match=r"over: expected float32 \(8, 16\), got"):
      place([tokens], row_TK, capacity=8, over=over, tuning=TUNING)


@pytest.mark.parametrize(("tokens", "top_k", "width"), [(16384, 8, 4096), (1, 1, 48)])
def test_lowers_without_peers(tokens, top_k, width):
  """On GPUs that need not reach each other's memory, in one program."""

  def shape(*sizes, dtype="int32"):
    return jax.ShapeDtypeStruct((RANKS * sizes[0], *sizes[1:]), dtype)

  function = functools.partial(place, capacity=tokens * top_k)
  run = on_ranks(lambda x, row_TK: function([x], row_TK), 2)
  traced = run.trace(shape(tokens, width, dtype="bfloat16"), shape(tokens, top_k))
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("custom_call @mosaic_gpu") == 1
  assert not count_reaching(text)
