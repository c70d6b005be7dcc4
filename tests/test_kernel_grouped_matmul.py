"""The grouped matmul kernels: what they lower to, their tables, and their results interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import grouped_matmul as kernels

CAPACITY, SLOTS = 1024, 6


def shape(*sizes, dtype=jnp.bfloat16):
  return jax.ShapeDtypeStruct(sizes, dtype)


def lower(f, *args):
  return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


# Widths of several models, widths of one tile, one home slot, no replica, odd capacities.
SHAPES = [
  (32768, 7168, 2048, 16, 2),
  (4096, 4096, 1408, 16, 0),
  (8200, 1536, 4096, 1, 2),
  (264, 128, 128, 3, 1),
]


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("c", "k", "n", "m", "s"), [*SHAPES, (259, 64, 128, 2, 1)])
def test_matmul_lowers(c, k, n, m, s, transpose):
  weights = (n, k) if transpose else (k, n)
  f = functools.partial(kernels.grouped_matmul, transpose_rhs=transpose)
  sizes = shape(m + s, dtype=jnp.int32)
  text = lower(f, shape(c, k), shape(m, *weights), shape(s, *weights), sizes)
  assert text.count("custom_call @mosaic_gpu") == 1
  assert "concatenate" not in "".join(line for line in text.splitlines() if "bf16" in line)


@pytest.mark.parametrize(("c", "k", "n", "m", "s"), SHAPES)
def test_wgrad_lowers(c, k, n, m, s):
  f = functools.partial(kernels.grouped_matmul_wgrad, num_home=m)
  text = lower(f, shape(c, k), shape(c, n), shape(m + s, dtype=jnp.int32))
  assert text.count("custom_call @mosaic_gpu") == 1
  home, replica = jax.eval_shape(f, shape(c, k), shape(c, n), shape(m + s, dtype=jnp.int32))
  assert home.shape == (m, k, n)
  assert replica.shape == (s, k, n)
  assert home.dtype == replica.dtype == jnp.float32


def sizes_that_fit(capacity=CAPACITY, slots=SLOTS):
  """Cuts of a random used count; small groups and borders near multiples of tiles are common."""
  near = st.builds(lambda a, b: a * 64 + b, st.integers(0, capacity // 64), st.integers(-9, 9))
  cut = st.one_of(st.integers(0, capacity), near.map(lambda x: min(max(x, 0), capacity)))
  return st.lists(cut, min_size=slots, max_size=slots).map(
    lambda cuts: np.diff(np.sort(np.array(cuts)), prepend=0)
  )


row_tiles = jax.jit(kernels._row_tiles, static_argnums=(0, 2))
row_steps = jax.jit(kernels._row_steps, static_argnums=0)


@pytest.mark.parametrize("tile", [128, 256])
@given(sizes=sizes_that_fit())
@example(sizes=np.zeros(SLOTS, np.int64))
@example(sizes=np.array([0, 0, CAPACITY, 0, 0, 0]))
@example(sizes=np.array([171, 171, 171, 171, 170, 170]))
def test_tiles_store_every_used_row_of_their_group(tile, sizes):
  slot, first, stored, count = np.asarray(row_tiles(CAPACITY, jnp.array(sizes, jnp.int32), tile))
  end = np.cumsum(sizes)
  slots_of_row = [set() for _ in range(CAPACITY)]
  for t in range(count[0]):
    assert end[slot[t]] - sizes[slot[t]] <= first[t]
    assert first[t] + stored[t] <= end[slot[t]]
    # Stored in part only if the group has no more.
    assert stored[t] in (tile // 2, tile, sizes[slot[t]])
    for row in range(first[t], first[t] + stored[t]):
      slots_of_row[row].add(slot[t])
  assert slots_of_row[: end[-1]] == [{s} for s in np.repeat(np.arange(SLOTS), sizes)]
  assert not any(slots_of_row[end[-1] :])
  assert count[0] == sum(-(-size // tile) for size in sizes)
  half = stored[: count[0]] <= tile // 2
  assert half.sum() == sum(0 < size % tile <= tile // 2 for size in sizes)
  assert list(half) == sorted(half)


@given(sizes_that_fit())
@example(np.zeros(SLOTS, np.int64))
@example(np.array([3, 2, 1, 1, 0, 64]))
@example(np.array([0, 0, CAPACITY, 0, 0, 0]))
def test_steps_contract_every_row_of_their_group_once(sizes):
  table, row, mine = row_steps(CAPACITY, jnp.array(sizes, jnp.int32))
  table, row, mine = np.asarray(table), np.asarray(row), np.asarray(mine)
  end = np.cumsum(sizes)
  assert sorted(table[0]) == list(range(SLOTS))
  assert list(sizes[table[0]]) == sorted(sizes, reverse=True)
  for slot, aligned, border_steps, steps in table.T:
    in_place = aligned + np.arange(64 * (steps - border_steps))
    if len(in_place):
      assert aligned % 8 == 0
    assert not mine[slot, 64 * border_steps :].any()
    got = np.concatenate([row[slot][mine[slot]], in_place])
    assert sorted(got) == list(range(end[slot] - sizes[slot], end[slot]))
    assert 64 * steps < sizes[slot] + 64


@pytest.mark.parametrize("band", [1, 8, 16])
@pytest.mark.parametrize(("num_rows", "num_cols"), [(1, 1), (7, 56), (3, 11), (20, 32), (5, 17)])
def test_position_is_a_bijection(num_rows, num_cols, band):
  tiles = jnp.arange(num_rows * num_cols, dtype=jnp.int32)
  positions = jax.vmap(lambda t: kernels._position(t, jnp.int32(num_rows), num_cols, band))(tiles)
  rows, cols = (np.asarray(x) for x in positions)
  got = set(zip(rows.tolist(), cols.tolist(), strict=True))
  assert got == {(r, c) for r in range(num_rows) for c in range(num_cols)}
  # The tiles worked on together stay within a band.
  assert len(set(cols[: num_rows * min(band, num_cols) // 2].tolist())) <= band


@pytest.fixture
def interpreted(monkeypatch):
  """Interprets the kernels on few blocks.

  The interpreter knows neither tiling nor swizzles, and gives the views of a union memories of
  their own: a union's first view stands for all.
  """
  kernel = kernels._kernel

  def with_one_view(body, *, scratch_types, **kwargs):
    unions = [isinstance(scratch, plgpu.RefUnion) for scratch in scratch_types]
    types = [s.refs[0] if u else s for s, u in zip(scratch_types, unions, strict=True)]

    def with_views(*refs):
      first = len(refs) - len(unions) - 2  # the two kinds of barriers are last
      views = {first + i for i, union in enumerate(unions) if union}
      body(*((ref, ref) if i in views else ref for i, ref in enumerate(refs)))

    return kernel(with_views, scratch_types=types, **kwargs)

  monkeypatch.setattr(kernels, "_kernel", with_one_view)
  monkeypatch.setattr(kernels, "_BLOCKS", 2)
  with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
    yield


SIZES = [
  [150, 70, 0, 300],
  [1, 63, 129, 64],
  [0, 0, 640, 0],
  [0, 0, 0, 0],
]


def operands(rng, sizes, width, capacity=640):
  x = jnp.asarray(rng.normal(size=(capacity, width)), jnp.bfloat16)
  return x.at[sum(sizes) :].set(jnp.nan)


def spans(sizes):
  end = np.cumsum(sizes)
  return [slice(e - size, e) for e, size in zip(end, sizes, strict=True)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
  ("transpose", "num_home", "cols"), [(False, 2, 256), (True, 4, 256), (False, 3, 384)]
)
def test_matmul_interpreted(interpreted, sizes, transpose, num_home, cols):
  rng = np.random.default_rng(0)
  rows = operands(rng, sizes, 128)
  weights = jnp.asarray(rng.normal(size=(4, 128, cols)), jnp.bfloat16)
  operand = weights.mT if transpose else weights
  out = jax.jit(kernels.grouped_matmul, static_argnames="transpose_rhs")(
    rows, operand[:num_home], operand[num_home:], jnp.array(sizes), transpose_rhs=transpose
  )
  assert out.shape == (640, cols)
  assert out.dtype == jnp.bfloat16
  for span, weight in zip(spans(sizes), np.asarray(weights, np.float32), strict=True):
    expected = np.asarray(rows, np.float32)[span] @ weight
    np.testing.assert_allclose(np.asarray(out, np.float32)[span], expected, rtol=0.01, atol=0.05)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
  ("num_home", "depth", "cols"), [(2, 128, 256), (4, 256, 128), (3, 128, 128)]
)
def test_wgrad_interpreted(interpreted, sizes, num_home, depth, cols):
  rng = np.random.default_rng(0)
  rows, grad = operands(rng, sizes, depth), operands(rng, sizes, cols)
  home, replica = jax.jit(kernels.grouped_matmul_wgrad, static_argnums=3)(
    rows, grad, jnp.array(sizes), num_home
  )
  assert home.shape == (num_home, depth, cols)
  assert replica.shape == (4 - num_home, depth, cols)
  for got, span in zip(jnp.concatenate([home, replica]), spans(sizes), strict=True):
    expected = np.asarray(rows, np.float32)[span].T @ np.asarray(grad, np.float32)[span]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)


def zeros(*sizes, dtype=jnp.bfloat16):
  return jnp.zeros(sizes, dtype)


@pytest.mark.parametrize(
  ("rows", "home", "replica", "sizes", "error", "match"),
  [
    ((256, 64), (2, 64, 128), (1, 64, 256), 3, ValueError, "replica_SKN: expected shape"),
    ((256, 64), (2, 128, 128), (1, 64, 128), 3, ValueError, "home_MKN: expected shape"),
    ((256, 64), (2, 64, 128), (1, 64, 128), 2, ValueError, "group_size_P: expected shape"),
    ((256, 96), (2, 96, 128), (1, 96, 128), 3, NotImplementedError, "K: expected a multiple of 64"),
    ((256, 64), (2, 64, 64), (1, 64, 64), 3, NotImplementedError, "N: expected a multiple of 128"),
    ((248, 64), (2, 64, 128), (1, 64, 128), 3, NotImplementedError, "C: expected at least 256"),
  ],
)
def test_matmul_refuses(rows, home, replica, sizes, error, match):
  with pytest.raises(error, match=match):
    kernels.grouped_matmul(
      zeros(*rows), zeros(*home), zeros(*replica), zeros(sizes, dtype=jnp.int32)
    )


def test_dtypes_other_than_bfloat16_are_refused():
  sizes = zeros(3, dtype=jnp.int32)
  f32 = zeros(256, 128, dtype=jnp.float32)
  with pytest.raises(NotImplementedError, match="home_MKN: expected bfloat16, got float32"):
    weights = zeros(2, 128, 128, dtype=jnp.float32)
    kernels.grouped_matmul(zeros(256, 128), weights, zeros(1, 128, 128), sizes)
  with pytest.raises(NotImplementedError, match="grad_CN: expected bfloat16, got float32"):
    kernels.grouped_matmul_wgrad(zeros(256, 128), f32, sizes, 2)


@pytest.mark.parametrize(
  ("rows", "grad", "num_home", "error", "match"),
  [
    ((256, 128), (248, 128), 2, ValueError, "grad_CN: expected shape"),
    ((256, 128), (256, 128), 4, ValueError, "num_home: expected 1 to 3"),
    ((256, 64), (256, 128), 2, NotImplementedError, "K: expected a multiple of 128"),
    ((256, 128), (256, 64), 2, NotImplementedError, "N: expected a multiple of 128"),
    ((260, 128), (260, 128), 2, NotImplementedError, "C: expected a multiple of 8"),
    ((248, 128), (248, 128), 2, NotImplementedError, "C: expected at least 256"),
  ],
)
def test_wgrad_refuses(rows, grad, num_home, error, match):
  with pytest.raises(error, match=match):
    kernels.grouped_matmul_wgrad(zeros(*rows), zeros(*grad), zeros(3, dtype=jnp.int32), num_home)
