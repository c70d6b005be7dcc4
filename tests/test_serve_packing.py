"""Packing: places are legal, rows balanced, nobody is overtaken; the arrays hold the prompts."""

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
  lengths = draw(st.lists(st.integers(1, config.buckets[-1]), min_size=1, max_size=40))
  return lengths, draw(st.integers(1, 5)), config


@given(problems())
def test_packing_is_legal_balanced_and_fills_the_arrays(problem):
  lengths, rows, config = problem
  packing = pack(lengths, rows, config)
  taken = len(packing.row)
  assert 1 <= taken <= len(lengths) and packing.bucket in config.buckets
  sizes = [aligned(n, config.alignment) for n in lengths]
  used = np.zeros(rows, int)
  for i, row in enumerate(packing.row):  # in order: a row's requests follow each other
    assert packing.start[i] == used[row] and packing.start[i] % config.alignment == 0
    assert packing.slot[i] == packing.row[:i].count(row) < config.max_requests
    used[row] += sizes[i]
  assert packing.bucket == min(b for b in config.buckets if b >= used.max())
  if taken <= config.max_requests:  # no row was closed
    assert used.max() - used.min() <= max(sizes[:taken])
  room = rows * config.buckets[-1]
  if len(lengths) <= config.max_requests and sum(sizes) <= room - rows * max(sizes):
    assert taken == len(lengths)

  rng = np.random.default_rng(taken)
  prompts = [rng.integers(1, 100, n).astype(np.int32) for n in lengths[:taken]]
  batch = fill(prompts, packing, rows, config.max_requests)
  assert batch.token_BT.shape == (rows, packing.bucket)
  inside = np.asarray(batch.segment_BT) > 0
  assert inside.sum() == sum(lengths[:taken])
  assert not np.asarray(batch.token_BT)[~inside].any()
  assert not np.asarray(batch.position_BT)[~inside].any()
  assert (np.asarray(batch.last_BR) >= 0).sum() == taken
  for prompt, row, slot in zip(prompts, packing.row, packing.slot, strict=True):
    mine = np.flatnonzero(batch.segment_BT[row] == slot + 1)
    np.testing.assert_array_equal(mine, mine[0] + np.arange(len(prompt)))
    np.testing.assert_array_equal(batch.token_BT[row, mine], prompt)
    np.testing.assert_array_equal(batch.position_BT[row, mine], np.arange(len(prompt)))
    assert mine[0] % config.alignment == 0 and batch.last_BR[row, slot] == mine[-1]


def test_a_batch_has_no_room_for_the_longest_waiting_twice():
  """What does not fit ends the batch, though shorter requests behind it would fit."""
  config = EngineConfig(buckets=(8,), alignment=4, max_requests=2)
  assert pack([8, 8, 1], 1, config).row == (0,)
  assert pack([4, 8, 1], 1, config).row == (0,)
  assert pack([4, 4, 1], 1, config).row == (0, 0)
  assert len(pack([1] * 9, 2, config).row) == 4


@pytest.mark.parametrize(
  ("values", "error", "message"),
  [
    ({"buckets": (16, 8)}, ValueError, "buckets: expected ascending sizes"),
    ({"buckets": (12,)}, ValueError, "buckets: expected multiples of 8, got 12"),
    ({"buckets": ()}, TypeError, "buckets: expected a tuple of ints"),
    ({"buckets": [8]}, TypeError, "buckets: expected a tuple of ints"),
    ({"max_requests": 0}, ValueError, "max_requests: expected at least 1, got 0"),
    ({"queue_limit": 1.5}, TypeError, "queue_limit: expected an int, got float"),
    ({"return_cache": 1}, TypeError, "return_cache: expected a bool, got int"),
  ],
)
def test_config_says_what_is_wrong(values, error, message):
  with pytest.raises(error, match=message):
    EngineConfig(**{"buckets": (8, 16), "alignment": 8} | values)
