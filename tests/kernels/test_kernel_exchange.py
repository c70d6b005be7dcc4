"""The kernels that carry tokens to rows and rows to tokens: interpreted, and lowered for GPUs."""

import dataclasses
import functools

import assignments
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mosaic_interpret import interpreted

from pallas_kernels.transfer.combine import combine, combine_values
from pallas_kernels.transfer.dispatch import dispatch, dispatch_scaled
from pallas_kernels.transfer.tuning import ExchangeTuning

TUNING = ExchangeTuning(blocks=1, workers=2, tile_bytes=512)
ONE_AXIS = ((4, "expert"),)
TWO_AXES = ((2, "data"), (2, "expert"))

CASES = {
  # mesh, tokens, top_k, favourite rank
  "several rows of a rank": (ONE_AXIS, 5, 6, None),
  "more tokens than a step": (((2, "expert"),), 21, 2, None),
  "all to one": (ONE_AXIS, 5, 6, 2),
  "one rank": (((1, "expert"),), 4, 3, None),
  "one rank, more tokens than a step": (((1, "expert"),), 21, 2, None),
  "two axes": (TWO_AXES, 3, 3, None),
}


def groups(axes):
  """Token groups and ranks."""
  sizes = {name: size for size, name in axes}
  return sizes.get("data", 1), sizes["expert"]


@pytest.fixture(params=CASES)
def problem(request):
  axes, tokens, top_k, favourite = CASES[request.param]
  rng = np.random.default_rng(0)
  num_groups, ranks = groups(axes)
  routes = [
    assignments.random_routes(rng, ranks, tokens, top_k, favourite) for _ in range(num_groups)
  ]
  dest, row = (np.stack(part) for part in zip(*routes, strict=True))
  dest[:, :, 0] = -1  # a token without assignments
  return rng, axes, dest, row, ranks * tokens * top_k


@functools.cache
def program(axes, function, num_arguments, **options):
  """Compiled once for cases that are alike."""
  return sharded(axes, functools.partial(function, **options), num_arguments)


def sharded(axes, function, num_arguments, check_vma=True):
  """``function`` on each rank's part of arrays with leading axes group and rank."""
  spec = P(*[name for _, name in axes]) if len(axes) > 1 else P(None, "expert")

  def local(*args):
    return jax.tree.map(lambda out: out[None, None], function(*[arg[0, 0] for arg in args]))

  return jax.jit(
    jax.shard_map(
      local,
      mesh=assignments.mesh(*axes),
      in_specs=(spec,) * num_arguments,
      out_specs=spec,
      check_vma=check_vma,
    )
  )


def received_by_group(dest, row):
  return np.stack([assignments.received(*pair) for pair in zip(dest, row, strict=True)])


def dispatch_here(dest_TK, row_TK, value_TK, *arrays, capacity, tuning=TUNING):
  options = {"capacity": capacity, "axis_name": "expert", "tuning": tuning}
  return dispatch(arrays, dest_TK, row_TK, value_TK, **options)


def scaled_here(
  dest_TK, row_TK, value_TK, value_TD, scale_TB, *, capacity, dtype=jnp.bfloat16, tuning=TUNING
):
  return dispatch_scaled(
    *(value_TD, scale_TB, dest_TK, row_TK, value_TK),
    **{"dtype": dtype, "capacity": capacity, "axis_name": "expert", "tuning": tuning},
  )


def check_told(sent, dest, row, value):
  """Every rank of a group knows the rows and numbers of all."""
  np.testing.assert_array_equal(sent.received_GTK, received_by_group(dest, row))
  every_value = np.broadcast_to(value[:, None], sent.value_GTK.shape)
  np.testing.assert_array_equal(sent.value_GTK, every_value)


def combine_here(rows_CD, gate_GTK, dest_TK, received_GTK, tuning=TUNING):
  return combine(rows_CD, gate_GTK, dest_TK, received_GTK, axis_name="expert", tuning=tuning)


def combine_unweighted_here(rows_CD, dest_TK, received_GTK, tuning):
  return combine_here(rows_CD, None, dest_TK, received_GTK, tuning)


def combine_values_here(rows_CD, value_C, dest_TK, received_GTK, tuning=TUNING):
  arguments = rows_CD, value_C, dest_TK, received_GTK
  return combine_values(*arguments, axis_name="expert", tuning=tuning)


# --- interpreted -----------------------------------------------------------------------------


def test_dispatch_copies_bit_for_bit(problem):
  """Two arrays: rows of several tiles and a part of one, and rows smaller than a tile."""
  rng, axes, dest, row, capacity = problem
  arrays = [
    rng.normal(size=(*dest.shape[:3], 150)).astype(jnp.bfloat16)[..., :144],
    rng.normal(size=(*dest.shape[:3], 4)).astype(np.float32),
  ]
  value = rng.normal(size=dest.shape).astype(np.float32)
  run = program(axes, dispatch_here, 5, capacity=capacity)
  with interpreted():
    sent = jax.tree.map(np.asarray, run(dest, row, value, *arrays))
  check_told(sent, dest, row, value)
  filled = sent.arrays
  for group, source, token, k in np.ndindex(dest.shape):
    rank = dest[group, source, token, k]
    if rank >= 0:
      for rows, array in zip(filled, arrays, strict=True):
        got = rows[group, rank, row[group, source, token, k]]
        np.testing.assert_array_equal(got, array[group, source, token])


def dispatch_over(over_CD, dest_TK, row_TK, x_TD, *, capacity):
  options = {"capacity": capacity, "axis_name": "expert", "tuning": TUNING}
  (rows_CD,), received_GTK, nothing = dispatch([x_TD], dest_TK, row_TK, over=[over_CD], **options)
  assert nothing is None
  return rows_CD, received_GTK


@pytest.mark.parametrize("problem", ["two axes"], indirect=True)
def test_dispatch_leaves_rows_that_no_token_feeds(problem):
  rng, axes, dest, row, capacity = problem
  x = rng.normal(size=(*dest.shape[:3], 16)).astype(np.float32)
  before = rng.normal(size=(*dest.shape[:2], capacity, 16)).astype(np.float32)
  run = program(axes, dispatch_over, 4, capacity=capacity)
  with interpreted():
    rows, received = map(np.asarray, run(before, dest, row, x))
  np.testing.assert_array_equal(received, received_by_group(dest, row))
  expected = before.copy()
  for group, source, token, k in np.ndindex(dest.shape):
    rank = dest[group, source, token, k]
    if rank >= 0:
      expected[group, rank, row[group, source, token, k]] = x[group, source, token]
  np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize(
  "problem",
  ["several rows of a rank", "more tokens than a step", "one rank", "two axes"],
  indirect=True,
)
def test_dispatch_scaled_multiplies_on_arrival(problem):
  """A tile of two blocks and one of a block and a part; scales of every row and block differ."""
  rng, axes, dest, row, capacity = problem
  value = rng.normal(size=(*dest.shape[:3], 400)).astype(jnp.float8_e4m3fn)
  scale = rng.uniform(0.5, 2.0, size=(*dest.shape[:3], 4)).astype(np.float32)
  gate = rng.normal(size=dest.shape).astype(np.float32)
  run = program(axes, scaled_here, 5, capacity=capacity)
  with interpreted():
    sent = jax.tree.map(np.asarray, run(dest, row, gate, value, scale))
  check_told(sent, dest, row, gate)
  (filled,) = sent.arrays
  expected = value.astype(np.float32) * np.repeat(scale, 128, axis=-1)[..., :400]
  expected = expected.astype(jnp.bfloat16)
  for group, source, token, k in np.ndindex(dest.shape):
    rank = dest[group, source, token, k]
    if rank >= 0:
      got = filled[group, rank, row[group, source, token, k]]
      np.testing.assert_array_equal(got, expected[group, source, token])


# Two parts of which the second begins inside the first; one that the threads do not divide.
@pytest.mark.parametrize(
  "problem, weighted, width, tile_bytes",
  [
    *((case, True, 320, 512) for case in CASES),
    ("more tokens than a step", False, 464, 1024),  # the same loops, without a factor
  ],
  indirect=["problem"],
)
def test_combine_sums_the_rows_of_each_token(problem, weighted, width, tile_bytes):
  check_combine(problem, weighted, width, dataclasses.replace(TUNING, tile_bytes=tile_bytes))


@pytest.mark.parametrize("problem", ["one rank"], indirect=True)
def test_combine_of_rows_with_fewer_values_than_threads(problem):
  check_combine(problem, weighted=True, width=64, tuning=TUNING)


@pytest.mark.parametrize("problem", CASES, indirect=True)
def test_combine_values_brings_a_number_of_each_row(problem):
  """The sums are those of ``combine``."""
  rng, axes, dest, row, _ = problem
  rows, received = rows_for(problem, 320)
  value = rng.normal(size=rows.shape[:3]).astype(np.float32)
  value[np.isnan(rows[..., 0].astype(np.float32))] = np.nan  # rows that feed no token
  with interpreted():
    y, back = map(np.asarray, program(axes, combine_values_here, 4)(rows, value, dest, received))
    alone = program(axes, combine_unweighted_here, 3, tuning=TUNING)(rows, dest, received)
  np.testing.assert_array_equal(y, alone)
  expected = np.zeros(dest.shape, np.float32)
  for at in np.ndindex(dest.shape):
    if dest[at] >= 0:
      expected[at] = value[at[0], dest[at], row[at]]
  np.testing.assert_array_equal(back, expected)


def rows_for(problem, width):
  """Rows of small integers, NaN where they feed no token, and who receives what."""
  rng, _, dest, row, capacity = problem
  num_groups, ranks = dest.shape[:2]
  rows = rng.integers(-8, 9, size=(num_groups, ranks, capacity, width)).astype(jnp.bfloat16)
  received = received_by_group(dest, row)
  for group, rank in np.ndindex(num_groups, ranks):
    used = received[group, rank][received[group, rank] >= 0]
    rows[group, rank, np.setdiff1d(np.arange(capacity), used)] = np.nan
  return rows, received


def check_combine(problem, weighted, width, tuning):
  rng, axes, dest, row, _ = problem
  rows, received = rows_for(problem, width)
  gate = rng.integers(1, 5, size=dest.shape).astype(np.float32) / 4
  every_gate = np.broadcast_to(gate[:, None], received.shape)

  if weighted:
    run = program(axes, combine_here, 4, tuning=tuning)
    arguments = (rows, every_gate, dest, received)
  else:
    run = program(axes, combine_unweighted_here, 3, tuning=tuning)
    arguments = (rows, dest, received)
  with interpreted():
    y = np.asarray(run(*arguments))
  expected = np.zeros((*dest.shape[:3], width), np.float32)
  for group, source, token, k in np.ndindex(dest.shape):
    rank = dest[group, source, token, k]
    if rank >= 0:
      weight = gate[group, source, token, k] if weighted else 1.0
      expected[group, source, token] += weight * rows[
        group, rank, row[group, source, token, k]
      ].astype(np.float32)
  np.testing.assert_array_equal(y, expected.astype(jnp.bfloat16))  # sums of quarters are exact


# --- lowering --------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "axes, check_vma, tokens, top_k, width, dtype",
  [
    (ONE_AXIS, True, 4096, 8, 7168, "bfloat16"),
    (ONE_AXIS, False, 1, 1, 64, "float32"),
    (TWO_AXES, True, 1, 1, 64, "float32"),
    (TWO_AXES, False, 8192, 8, 2880, "bfloat16"),
  ],
)
def test_lowers_for_gpus(axes, check_vma, tokens, top_k, width, dtype):
  lead = groups(axes)
  capacity = tokens * top_k

  def shape(*sizes, dtype="int32"):
    return jax.ShapeDtypeStruct((*lead, *sizes), dtype)

  tk, gtk = shape(tokens, top_k), shape(lead[1], tokens, top_k)
  gate = shape(tokens, top_k, dtype="float32")
  gates = shape(lead[1], tokens, top_k, dtype="float32")
  there = functools.partial(dispatch_here, capacity=capacity, tuning=None)
  scaled = functools.partial(scaled_here, capacity=capacity, dtype=dtype, tuning=None)
  back = functools.partial(combine_here, tuning=None)
  values_back = functools.partial(combine_values_here, tuning=None)
  for function, arguments in (
    (there, (tk, tk, gate, shape(tokens, width, dtype=dtype), shape(tokens, 64, dtype="float32"))),
    (
      scaled,
      (
        *(tk, tk, gate, shape(tokens, width, dtype="float8_e4m3fn")),
        shape(tokens, -(-width // 512) * 4, dtype="float32"),
      ),
    ),
    (back, (shape(capacity, width, dtype=dtype), gates, tk, gtk)),
    (
      values_back,
      (shape(capacity, width, dtype=dtype), shape(capacity, dtype="float32"), tk, gtk),
    ),
  ):
    traced = sharded(axes, function, len(arguments), check_vma).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


# --- errors ----------------------------------------------------------------------------------


def zeros(*shape, dtype=jnp.int32):
  return jnp.zeros((1, 4, *shape), dtype)


@pytest.mark.parametrize(
  "kind, message, changed",
  [
    (ValueError, "dest_TK: expected int32", {"dest": zeros(3, 2, dtype=jnp.int16)}),
    (ValueError, "row_TK: expected int32", {"row": zeros(3, 1)}),
    (ValueError, r"value_TK: expected float32 \(3, 2\)", {"value": zeros(3, 2)}),
    (ValueError, "arrays: expected a leading size", {"x": zeros(4, 128, dtype=jnp.bfloat16)}),
    (NotImplementedError, "multiple of 16 bytes", {"x": zeros(3, 4, dtype=jnp.bfloat16)}),
    (NotImplementedError, "expected a dtype", {"x": zeros(3, 128, dtype=jnp.bool_)}),
  ],
)
def test_dispatch_says_what_is_wrong(kind, message, changed):
  good = {
    "dest": zeros(3, 2),
    "row": zeros(3, 2),
    "value": zeros(3, 2, dtype=jnp.float32),
    "x": zeros(3, 128, dtype=jnp.bfloat16),
  }
  with pytest.raises(kind, match=message):
    sharded(ONE_AXIS, functools.partial(dispatch_here, capacity=8), 4)(*(good | changed).values())


@pytest.mark.parametrize(
  "kind, message, changed",
  [
    (NotImplementedError, "a multiple of 16", {"x": zeros(3, 136, dtype=jnp.float8_e4m3fn)}),
    (NotImplementedError, "expected float8_e4m3fn", {"x": zeros(3, 128, dtype=jnp.int8)}),
    (ValueError, r"\[T, 8\], one for each 128", {"x": zeros(3, 640, dtype=jnp.float8_e4m3fn)}),
    (ValueError, r"\[T, 4\], one for each 128", {"scale": zeros(3, 8, dtype=jnp.float32)}),
    (ValueError, "scale_TB: expected float32", {"scale": zeros(3, 4)}),
    (ValueError, "arrays: expected a leading size", {"scale": zeros(4, 4, dtype=jnp.float32)}),
    (
      NotImplementedError,
      "a row that fits",
      {
        "x": zeros(3, 16_384, dtype=jnp.float8_e4m3fn),
        "scale": zeros(3, 128, dtype=jnp.float32),
      },
    ),
  ],
)
def test_dispatch_scaled_says_what_is_wrong(kind, message, changed):
  good = {
    "dest": zeros(3, 2),
    "row": zeros(3, 2),
    "value": zeros(3, 2, dtype=jnp.float32),
    "x": zeros(3, 128, dtype=jnp.float8_e4m3fn),
    "scale": zeros(3, 4, dtype=jnp.float32),
  }
  with pytest.raises(kind, match=message):
    sharded(ONE_AXIS, functools.partial(scaled_here, capacity=8), 5)(*(good | changed).values())


@pytest.mark.parametrize(
  "kind, message, changed",
  [
    (ValueError, "rows_CD: expected", {"rows": zeros(8, dtype=jnp.float32)}),
    (ValueError, "gate_GTK: expected float32", {"gate": zeros(4, 3, 2)}),
    (ValueError, r"received_GTK: expected int32 \(4, 3, 2\)", {"received": zeros(3, 3, 2)}),
    (
      NotImplementedError,
      "D: expected a positive multiple",
      {"rows": zeros(8, 136, dtype=jnp.float32)},
    ),
    (NotImplementedError, "rows_CD: expected", {"rows": zeros(8, 128, dtype=jnp.int8)}),
  ],
)
def test_combine_says_what_is_wrong(kind, message, changed):
  good = {
    "rows": zeros(8, 128, dtype=jnp.bfloat16),
    "gate": zeros(4, 3, 2, dtype=jnp.float32),
    "dest": zeros(3, 2),
    "received": zeros(4, 3, 2),
  }
  with pytest.raises(kind, match=message):
    sharded(ONE_AXIS, combine_here, 4)(*(good | changed).values())


@pytest.mark.parametrize("value", [zeros(8), zeros(7, dtype=jnp.float32)])
def test_combine_values_says_what_is_wrong(value):
  arguments = zeros(8, 128, dtype=jnp.bfloat16), value, zeros(3, 2), zeros(4, 3, 2)
  with pytest.raises(ValueError, match=r"value_C: expected float32 \(8,\)"):
    sharded(ONE_AXIS, combine_values_here, 4)(*arguments)


def test_combine_needs_tiles_of_a_value_a_thread():
  small = functools.partial(
    combine_here, tuning=ExchangeTuning(blocks=1, workers=1, tile_bytes=128)
  )
  arguments = (
    zeros(8, 128, dtype=jnp.bfloat16),
    zeros(4, 3, 2, dtype=jnp.float32),
    zeros(3, 2),
    zeros(4, 3, 2),
  )
  with pytest.raises(ValueError, match="tile_bytes: expected at least 256 for bfloat16, got 128"):
    sharded(ONE_AXIS, small, 4)(*arguments)
