"""Packing: places are legal, rows balanced, nobody runs later; the arrays hold the prompts."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultraep_jax.serve import EngineConfig
from ultraep_jax.serve.packing import aligned, fill, pack


@st.composite
def problems(draw):
  alignment = draw(st.sampled_from([1, 4, 16]))
  buckets = draw(st.sets(st.integers(1, 12), min_size=1, max_size=3))
  config = EngineConfig(
    buckets=tuple(alignment * n for n in sorted(buckets)),
    alignment=alignment,
    max_requests=draw(st.integers(1, 6)),
  )
  largest = config.buckets[-1]
  length = st.one_of(st.integers(1, largest), st.integers(1, min(2 * alignment, largest)))
  lengths = draw(st.lists(length, min_size=1, max_size=40))
  return lengths, draw(st.integers(1, 5)), config


def longest_first(sizes, rows, config):
  """The row of each request, each in the row with the fewest tokens; None if they do not fit."""
  used, count, row_of = [0] * rows, [0] * rows, [0] * len(sizes)
  for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
    open_rows = [row for row in range(rows) if count[row] < config.max_requests]
    row = min(open_rows, key=lambda row: used[row], default=None)
    if row is None or used[row] + sizes[i] > config.buckets[-1]:
      return None
    used[row] += sizes[i]
    count[row] += 1
    row_of[i] = row
  return row_of


@given(problems())
def test_packing_is_legal_balanced_and_fills_the_arrays(problem):
  lengths, rows, config = problem
  packing = pack(lengths, rows, config)
  mine, left = packing.split(range(len(lengths)))
  assert mine == list(packing.taken) == sorted({*mine})
  assert sorted(mine + left) == list(range(len(lengths)))
  assert mine[0] == 0 and packing.bucket in config.buckets
  taken = len(mine)
  run = next((n for n, i in enumerate(mine) if i != n), taken)  # first ones; the others overtook
  lengths = [lengths[i] for i in mine]
  sizes = [aligned(n, config.alignment) for n in lengths]
  used = np.zeros(rows, int)
  for i, row in enumerate(packing.row):  # in order: a row's requests follow each other
    assert packing.start[i] == used[row] and packing.start[i] % config.alignment == 0
    if i >= run:  # it overtook, and takes the row where it leaves the least room
      open_rows = [row for row in range(rows) if packing.row[:i].count(row) < config.max_requests]
      fits = [used[row] for row in open_rows if used[row] + sizes[i] <= packing.bucket]
      assert used[row] == max(fits)
    assert packing.slot[i] == packing.row[:i].count(row) < config.max_requests
    used[row] += sizes[i]
  assert packing.bucket == min(b for b in config.buckets if b >= used.max())
  if run == taken <= config.max_requests:  # no row was closed
    assert used.max() - used.min() <= max(sizes)
  room = rows * config.buckets[-1]
  every = [aligned(n, config.alignment) for n in problem[0]]
  placed = (longest_first(every[: n + 1], rows, config) for n in range(len(every)))
  sure = list(itertools.takewhile(lambda rows_of: rows_of is not None, placed))
  assert run >= len(sure)  # all of the first ones that fit
  if taken == len(sure):
    assert list(packing.row) == sure[-1]
  if len(every) <= config.max_requests and sum(every) <= room - rows * max(every):
    assert not left
  if left:  # nothing that is left would still fit
    open_rows = [row for row in range(rows) if packing.row.count(row) < config.max_requests]
    least = min(every[i] for i in left if i < rows * config.max_requests) if open_rows else 0
    assert all(used[row] + least > packing.bucket for row in open_rows)

  rng = np.random.default_rng(taken)
  prompts = [rng.integers(1, 100, n).astype(np.int32) for n in lengths]
  batch = fill(prompts, packing, rows, config.max_requests)
  assert batch.token_BT.shape == (rows, packing.bucket)
  inside = np.asarray(batch.segment_BT) > 0
  assert inside.sum() == sum(lengths)
  assert not np.asarray(batch.token_BT)[~inside].any()
  assert not np.asarray(batch.position_BT)[~inside].any()
  assert (np.asarray(batch.last_BR) >= 0).sum() == taken
  for prompt, row, slot in zip(prompts, packing.row, packing.slot, strict=True):
    place = np.flatnonzero(batch.segment_BT[row] == slot + 1)
    np.testing.assert_array_equal(place, place[0] + np.arange(len(prompt)))
    np.testing.assert_array_equal(batch.token_BT[row, place], prompt)
    np.testing.assert_array_equal(batch.position_BT[row, place], np.arange(len(prompt)))
    assert place[0] % config.alignment == 0 and batch.last_BR[row, slot] == place[-1]


def test_a_row_holds_no_more_requests_than_it_may():
  """The second row has the fewest tokens, and room, but both of its requests."""
  config = EngineConfig(buckets=(8,), alignment=1, max_requests=2)
  assert pack([8, 1, 1, 1], 2, config)[1:3] == ((0, 1, 2), (0, 1, 1))
  config = EngineConfig(buckets=(16,), alignment=1, max_requests=2)
  assert pack([8, 1, 1, 1], 2, config).row == (0, 1, 1, 0)


def test_later_requests_take_what_is_left():
  config = EngineConfig(buckets=(4, 8), alignment=4, max_requests=2)
  assert pack([8, 8, 1], 1, config).taken == (0,)  # no room
  assert pack([4, 8, 1], 1, config).taken == (0,)  # the row would need the larger bucket
  assert pack([4, 4, 1], 1, config).taken == (0, 1)  # no place
  assert len(pack([1] * 9, 2, config).row) == 4
  config = EngineConfig(buckets=(12,), alignment=4, max_requests=3)
  assert pack([5, 8, 1, 1], 1, config).taken == (0, 2)
  assert pack([5, 12, 8, 1, 4], 2, config).taken == (0, 1, 3)
  config = EngineConfig(buckets=(4,), alignment=1)
  assert pack([3, 2, 4, 1], 2, config)[1:3] == ((0, 1, 3), (0, 1, 0))  # where it leaves no room


@given(problems())
def test_those_that_overtake_put_nobody_into_a_later_batch(problem):
  lengths, rows, config = problem

  def batches(overtaking):
    number, waiting = {}, list(range(len(lengths)))
    for batch in range(len(lengths)):
      if not waiting:
        return number
      packing = pack([lengths[i] for i in waiting], rows, config)
      run = tuple(i for n, i in enumerate(packing.taken) if n == i or overtaking)
      taken, waiting = packing._replace(taken=run).split(waiting)
      number |= dict.fromkeys(taken, batch)
    assert not waiting  # each batch has one at least
    return number

  now, alone = batches(True), batches(False)
  assert all(now[i] <= alone[i] for i in range(len(lengths)))


@pytest.mark.parametrize(
  ("values", "error", "message"),
  [
    ({"buckets": (16, 8)}, ValueError, "buckets: expected ascending sizes"),
    ({"buckets": (12,)}, ValueError, "buckets: expected multiples of 8, got 12"),
    ({"buckets": ()}, ValueError, r"buckets: expected at least one size, got \(\)"),
    ({"buckets": (8, True)}, TypeError, "buckets: expected an int, got bool"),
    ({"buckets": [8]}, TypeError, "buckets: expected a tuple of ints"),
    ({"max_requests": 0}, ValueError, "max_requests: expected at least 1, got 0"),
    ({"queue_limit": 1.5}, TypeError, "queue_limit: expected an int, got float"),
    ({"return_cache": 1}, TypeError, "return_cache: expected a bool, got int"),
  ],
)
def test_config_says_what_is_wrong(values, error, message):
  with pytest.raises(error, match=message):
    EngineConfig(**{"buckets": (8, 16), "alignment": 8} | values)


def test_config_takes_numbers_of_numpy():
  config = EngineConfig(buckets=tuple(np.array([8, 16])), alignment=np.int32(8))
  assert config == EngineConfig(buckets=(8, 16), alignment=8)
  assert {type(size) for size in (*config.buckets, config.alignment)} == {int}
