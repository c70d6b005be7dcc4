"""The table of what each tile of rows computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assignments import mesh
from grouped_rows import sizes_that_fit
from hypothesis import example, given
from jax.sharding import PartitionSpec as P

from pallas_kernels import (
  MatmulTuning,
  TransferTuning,
  grouped_matmul,
  grouped_matmul_sum,
  matmul_beside,
  replication,
)
from pallas_kernels.matmul import row_tiles as module
from pallas_kernels.matmul import rows

CAPACITY, SLOTS = 1024, 6
UNEQUAL = [
  np.zeros(SLOTS, np.int64),
  np.array([0, 0, CAPACITY, 0, 0, 0]),
  np.array([171, 171, 171, 171, 170, 170]),
  np.array([1, 64, 65, 129, 193, 255]),
]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def row_tiles(sizes, tile, num_home, short_last):
  return module.row_tiles(CAPACITY, sizes, tile, num_home, short_last)


def every_row_is_stored(table, num_home, sizes):
  """By a tile of its own group alone, which none leaves; and tiles of home slots are counted."""
  slot, first, stored, count, home = np.asarray(table)
  end = np.cumsum(sizes)
  slots_of_row = [set() for _ in range(CAPACITY)]
  for t in range(count[0]):
    assert end[slot[t]] - sizes[slot[t]] <= first[t]
    assert first[t] + stored[t] <= end[slot[t]]
    for row in range(first[t], first[t] + stored[t]):
      slots_of_row[row].add(slot[t])
  assert slots_of_row[: end[-1]] == [{s} for s in np.repeat(np.arange(SLOTS), sizes).tolist()]
  assert not any(slots_of_row[end[-1] :])
  assert (count == count[0]).all()
  assert (home == np.sum(slot[: count[0]] < num_home)).all()
  return slot[: count[0]], stored[: count[0]]


@pytest.mark.parametrize(
  ("tile", "num_home", "short_last"),
  [(128, SLOTS, True), (256, SLOTS, False), (128, 4, False), (128, 2, True)],
)
@given(sizes=sizes_that_fit(CAPACITY, SLOTS))
@example(sizes=UNEQUAL[0])
@example(sizes=UNEQUAL[1])
@example(sizes=UNEQUAL[2])
@example(sizes=UNEQUAL[3])
def test_tiles_store_every_used_row_of_their_group(tile, num_home, short_last, sizes):
  table = row_tiles(jnp.array(sizes, jnp.int32), tile, num_home, short_last)
  slot, stored = every_row_is_stored(table, num_home, sizes)
  for s, num_rows in zip(slot, stored, strict=True):
    # A part of 64 rows is stored in part only if the group has no more.
    assert num_rows % 64 == 0 or num_rows == sizes[s]
  # No tile too many, and none longer than it must be; the short ones last of all or of a slot.
  assert slot.size == sum(-(-size // tile) for size in sizes)
  computed = -(-stored // 64) * 64
  assert computed.sum() == sum(-(-size // 64) * 64 for size in sizes)
  short = (computed < tile).tolist()
  order = short if short_last else list(zip(slot.tolist(), short, strict=True))
  assert order == sorted(order)  # by slots, those of home slots come first


@pytest.mark.parametrize(
  ("capacity", "slots", "weights", "last"),
  [
    (65536, 16, 7168 * 2048, True),  # groups of 4096 rows, of large weights
    (65536, 16, 2048 * 768, False),  # of small ones
    (65536, 128, 7168 * 2048, True),  # of 512 rows
    (65536, 256, 7168 * 2048, False),  # of 256
    (65536, 128, 2 * 4096 * 1536, True),  # of a gated projection or a sum
    (65536, 128, 4096 * 1536, False),
    (32768, 128, 2880 * 2880, False),
    (81920, 512, 2 * 2048 * 512, False),
  ],
)
def test_short_tiles_come_last_where_weights_are_large_and_groups_not_small(
  capacity, slots, weights, last
):
  assert module.short_comes_last(capacity, slots, 2 * weights) == last


@pytest.mark.parametrize("products", [1, 2])
def test_a_matmul_counts_all_weights_of_its_slots(products, monkeypatch):
  asked = []
  monkeypatch.setattr(rows, "short_comes_last", lambda *sizes: asked.append(sizes) or False)
  lhs, weights, sizes = (
    jax.ShapeDtypeStruct(shape, dtype)
    for shape, dtype in (((320, 64), "bfloat16"), ((2, 64, 192), "bfloat16"), ((2,), "int32"))
  )
  no_weights = jax.ShapeDtypeStruct((0, *weights.shape[1:]), weights.dtype)
  operands = [[x] * products for x in (lhs, weights, no_weights)]
  kernel = functools.partial(grouped_matmul_sum, tuning=MatmulTuning(blocks=2, even=False))
  jax.eval_shape(kernel, *operands, sizes)
  assert asked == [(320, 2, 2 * products * 64 * 192)]


def test_short_tiles_do_not_come_last_where_replicas_arrive(monkeypatch):
  """Whole tiles of replica slots would come before short ones of home slots, and wait."""
  made = []

  def table(*arguments):
    made.append(arguments[2:])
    return module.row_tiles(*arguments)

  monkeypatch.setattr(rows, "row_tiles", table)
  tuning = MatmulTuning(blocks=2, even=False, short_last=True)

  def run(lhs, weights, sizes, plan):
    copying = replication(
      [weights], plan, plan, axis_name="expert", tuning=TransferTuning(1, 3, 1024), flat=False
    )
    return (
      matmul_beside(copying, lhs, weights, sizes, tuning=tuning)[0],
      grouped_matmul(lhs, weights, weights[:1], sizes, tuning=tuning),
    )

  operands = (
    jax.ShapeDtypeStruct(shape, dtype)
    for shape, dtype in (
      ((320, 64), "bfloat16"),
      ((2, 64, 192), "bfloat16"),
      ((3,), "int32"),
      ((1, 1), "int32"),
    )
  )
  on_one = jax.shard_map(run, mesh=mesh((1, "expert")), in_specs=P(), out_specs=P("expert"))
  jax.eval_shape(on_one, *operands)
  assert made == [(128, 2, False), (128, 2, True)]
