"""Tokens reach every row they feed and come back once: in blocks, by steps, or all to all ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assignments import mesh, random_routes
from jax.sharding import PartitionSpec as P
from mosaic_interpret import interpreted

from pallas_kernels import ExchangeTuning, Tunings
from ultraep_jax.transport import block_exchange, gather_exchange
from ultraep_jax.transport.local_rows import Placing
from ultraep_jax.types import Routes

WIDTH = 3


CASES = [
  # ranks, tokens, top_k, favourite: with one favourite, lists outgrow their blocks
  (1, 6, 2, None),
  (2, 8, 1, None),
  (4, 12, 8, None),
  (4, 12, 2, None),
  (8, 16, 1, None),
  (8, 16, 1, 5),
  (8, 16, 2, 0),
]


@pytest.fixture(params=[block_exchange, gather_exchange], ids=lambda module: module.__name__[-15:])
def cross(request):
  return request.param.cross


def run(
  ranks,
  capacity,
  function,
  dest,
  row,
  *args,
  cross=block_exchange.cross,
  index=0,
  **options,
):
  spec = P("expert")

  def local(dest_TK, row_TK, *args):
    routes = Routes(dest_TK, row_TK, jnp.zeros(1, jnp.int32))
    return function(cross(routes, index, capacity, "expert", **options), *args)

  sharded = jax.shard_map(
    local, mesh=mesh((ranks, "expert")), in_specs=(spec,) * (2 + len(args)), out_specs=spec
  )
  flat = [jnp.asarray(a.reshape(-1, *a.shape[2:])) for a in (dest, row, *args)]
  return np.asarray(jax.jit(sharded)(*flat))


@pytest.fixture(params=CASES, ids=str)
def problem(request):
  ranks, tokens, top_k, favourite = request.param
  rng = np.random.default_rng(tokens + ranks)
  dest, row = random_routes(rng, ranks, tokens, top_k, favourite)
  capacity = int(max((dest == rank).sum() for rank in range(ranks))) + 2
  return rng, dest, row, capacity


def feeding(dest, row, ranks, capacity):
  """(source rank, token, choice) of each row of each rank, −1 where none."""
  source = np.full((ranks, capacity, 3), -1)
  for index in np.ndindex(*dest.shape):
    if dest[index] >= 0 and row[index] < capacity:
      source[dest[index], row[index]] = index
  return source


def dispatch(crossing, *args, **options):
  return crossing.dispatch(*args, **options)


def spread(crossing, value):
  return crossing.spread(value)


def combine(crossing, rows, gate):
  return crossing.combine(rows, gate)


def collect(crossing, value):
  return crossing.collect(value)


def test_dispatch_and_spread(problem, cross):
  rng, dest, row, capacity = problem
  ranks, tokens, _ = dest.shape
  x = rng.normal(size=(ranks, tokens, WIDTH)).astype(np.float32)
  gate = rng.normal(size=dest.shape).astype(np.float32)
  rows = run(ranks, capacity, dispatch, dest, row, x, cross=cross)
  rows = rows.reshape(ranks, capacity, WIDTH)
  gates = run(ranks, capacity, spread, dest, row, gate, cross=cross).reshape(ranks, capacity)
  for rank, at in np.ndindex(ranks, capacity):
    source, token, choice = feeding(dest, row, ranks, capacity)[rank, at]
    fed = source >= 0
    np.testing.assert_array_equal(rows[rank, at], x[source, token] if fed else 0)
    assert gates[rank, at] == (gate[source, token, choice] if fed else 0)


def test_combine_and_collect(problem, cross):
  rng, dest, row, capacity = problem
  ranks, tokens, _ = dest.shape
  rows = rng.integers(-9, 9, size=(ranks, capacity, WIDTH)).astype(np.float32)
  gate = rng.integers(-3, 3, size=(ranks, capacity)).astype(np.float32)
  used = feeding(dest, row, ranks, capacity)[..., 0] >= 0
  rows[~used], gate[~used] = np.nan, np.nan  # unused rows may hold anything
  y = run(ranks, capacity, combine, dest, row, rows, gate, cross=cross)
  y = y.reshape(ranks, tokens, WIDTH)
  value = run(ranks, capacity, collect, dest, row, gate, cross=cross).reshape(dest.shape)
  expected_y = np.zeros_like(y)
  expected_value = np.zeros(dest.shape, np.float32)
  for index in np.ndindex(*dest.shape):
    if dest[index] >= 0:
      at = dest[index], row[index]
      expected_y[index[:2]] += gate[at] * rows[at]
      expected_value[index] = gate[at]
  np.testing.assert_array_equal(y, expected_y)  # small integers: exact in any order
  np.testing.assert_array_equal(value, expected_value)


def test_a_round_takes_its_rows_only(cross):
  rng = np.random.default_rng(0)
  dest, row = random_routes(rng, 4, 12, 2)
  x = rng.normal(size=(4, 12, WIDTH)).astype(np.float32)
  most = int(row.max()) + 1
  whole = run(4, most, dispatch, dest, row, x, cross=cross).reshape(4, most, WIDTH)
  capacity = -(-most // 3)
  parts = [
    run(4, capacity, dispatch, dest, row, x, cross=cross, index=i).reshape(4, capacity, WIDTH)
    for i in range(3)
  ]
  np.testing.assert_array_equal(np.concatenate(parts, axis=1)[:, :most], whole)


def test_one_favourite_needs_several_steps_and_balance_one():
  def steps(dest, row):
    return run(8, 64, lambda crossing: jnp.broadcast_to(crossing.steps, (1,)), dest, row)

  rng = np.random.default_rng(0)
  assert steps(*random_routes(rng, 8, 16, 1, favourite=5)).min() > 1
  even = np.broadcast_to((np.arange(16) % 8)[None, :, None], (8, 16, 1)).astype(np.int32)
  assert steps(even, np.zeros_like(even)).tolist() == [1] * 8


def test_a_token_crosses_once_per_rank():
  """All of a token's K assignments on one rank fill one place in the block for that rank."""
  dest = np.full((2, 4, 4), 1, np.int32)
  row = np.stack([np.arange(16).reshape(4, 4), 16 + np.arange(16).reshape(4, 4)]).astype(np.int32)

  def leaders(crossing):
    return jnp.sum(crossing.leads_TK, axis=1, dtype=jnp.int32)

  assert run(2, 32, leaders, dest, row).tolist() == [1] * 8


def test_partial_sums_are_float32_and_travel_in_the_rows_dtype(cross):
  dest = np.zeros((2, 1, 3), np.int32)
  row = np.arange(6).reshape(2, 1, 3).astype(np.int32)
  # 256 + 1 is not a bfloat16, 256 + 1 + 1 is: only a float32 sum keeps the small terms.
  rows = np.tile(np.array([256, 1, 1] * 2, np.float32)[:, None], (1, WIDTH))
  rows = np.stack([rows, rows])
  gate = np.ones((2, 6), np.float32)

  def bf16(crossing, rows, gate):
    return crossing.combine(rows.astype(jnp.bfloat16), gate).astype(jnp.float32)

  assert run(2, 6, bf16, dest, row, rows, gate, cross=cross).tolist() == [[258.0] * WIDTH] * 2


@pytest.mark.parametrize("dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("problem", [(2, 8, 1, None), (8, 16, 1, 5)], indirect=True, ids=str)
def test_a_kernel_writes_the_same_rows(problem, dtype, cross, monkeypatch):
  """In one step, and where further ones follow that gather."""
  rng, dest, row, capacity = problem
  ranks, tokens, _ = dest.shape
  x = rng.normal(size=(ranks, tokens, 128)).astype(np.float32)
  few = ExchangeTuning(blocks=1, workers=1, tile_bytes=512)
  monkeypatch.setattr(Tunings, "find", lambda *_: few)
  function = functools.partial(dispatch, dtype=dtype)
  with interpreted():
    rows = run(
      ranks, capacity, function, dest, row, x, cross=cross, placing=Placing(("mosaic_gpu",))
    )
  expected = run(ranks, capacity, function, dest, row, x, cross=cross)
  fed = feeding(dest, row, ranks, capacity)[..., 0].reshape(-1) >= 0
  np.testing.assert_array_equal(rows[fed], expected[fed])
