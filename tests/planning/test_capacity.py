"""Rows of a rank's buffer."""

import numpy as np
import pytest

import ultraep_jax as uep
from ultraep_jax.planning.capacity import least_room, row_capacity

MIB = 1 << 20


@pytest.mark.parametrize(("tokens", "rows"), [(8, 16), (16, 24), (128, 136), (1, 8)])
def test_capacity_is_a_multiple_of_eight(tokens, rows):
  assert row_capacity(tokens, 1, 4, uep.BalanceConfig(capacity_factor=1.0625)) == rows


@pytest.mark.parametrize("factor", [1e308, 10**400])
def test_no_factor_gives_more_rows_than_there_are_assignments(factor):
  assert row_capacity(10, 2, 4, uep.BalanceConfig(capacity_factor=factor)) == 80


@pytest.mark.parametrize(
  ("mebibytes", "kept", "transient"),
  [
    (16, 4, 4),  # the tokens of all four ranks: 64 MiB
    (17, 2, 2),
    (64, 2, 2),
    (256, 2, 2),
    (320, 1.6, 2),
    (409.6, 1.25, 2),
    (1024, 1.25, 2),
    (1280, 1.25, 1.6),
    (2048, 1.25, 1.25),
  ],
)
def test_smaller_batches_have_more_room(mebibytes, kept, transient):
  """Rows over the mean, of a rank whose tokens take so many MiB."""
  rows, token_bytes = round(mebibytes * 1024), 1024
  auto = uep.BalanceConfig()
  for keeps, factor in ((True, kept), (False, transient)):
    got = row_capacity(rows // 2, 2, 4, auto, token_bytes, kept=keeps)
    assert got == pytest.approx(factor * rows, abs=64) and not got % 64
  assert row_capacity(rows // 2, 2, 4, auto) == pytest.approx(1.25 * rows, abs=64)  # width unknown
  asked = uep.BalanceConfig(capacity_factor=1.5)
  assert row_capacity(rows // 2, 2, 4, asked, token_bytes) == pytest.approx(1.5 * rows, abs=64)


def test_two_ranks_never_have_more_rows_than_both_bring():
  for kept in (True, False):
    assert row_capacity(30, 2, 2, uep.BalanceConfig(), MIB, kept=kept) == 120


@pytest.mark.parametrize(
  "assignments, num_home, copy_rows",
  [
    (8192, 32, 2800),
    (65536, 32, 2800),
    (16384, 64, 3700),
    (524288, 4, 2000),
    (100, 3, 7),
    (1, 1, 1),
  ],
)
def test_no_load_is_worse_off_for_copies_that_make_it_fit(assignments, num_home, copy_rows):
  """And not with a tenth less room, if there may be copies at all."""
  rows = np.arange(1, assignments + 1)

  def loses(room):
    copies = num_home * (rows - room) / rows + 1
    return np.any((rows > room) & (copy_rows * copies > rows + 1e-6))

  room = least_room(assignments, num_home, copy_rows)
  assert 0 <= room <= assignments
  assert not loses(room)
  assert loses(0.9 * room)


def test_more_room_is_given_only_where_it_is_not_asked_for():
  auto, asked = uep.BalanceConfig(), uep.BalanceConfig(capacity_factor=1.5)
  options = {"token_bytes": MIB // 2, "least": 1600}
  assert [row_capacity(512, 2, 2, config, **options) for config in (auto, asked)] == [1600, 1536]
  assert row_capacity(50, 2, 2, auto, token_bytes=MIB, least=5000) == 200  # all that there are
  more = row_capacity(2048, 2, 4, auto, token_bytes=MIB // 4, least=10**9)
  assert more == max(4096, 2 * 2048, 1.25 * 4096)  # a GiB, but never less than without


@pytest.mark.parametrize(("least", "rows"), [(14336, 16384), (14272, 14272)])
def test_a_buffer_for_nearly_all_rows_holds_all(least, rows):
  """From seven eighths on, so that no plan makes copies for the few that are missing."""
  auto = uep.BalanceConfig()
  assert row_capacity(512, 8, 4, auto, 14336, least=least) == rows
