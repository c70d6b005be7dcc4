"""Rows of a rank's buffer."""

import pytest

import ultraep_jax as uep
from ultraep_jax.planning.capacity import row_capacity

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
    assert got == pytest.approx(factor * rows, abs=16)
  assert row_capacity(rows // 2, 2, 4, auto) == pytest.approx(1.25 * rows, abs=16)  # width unknown
  asked = uep.BalanceConfig(capacity_factor=1.5)
  assert row_capacity(rows // 2, 2, 4, asked, token_bytes) == pytest.approx(1.5 * rows, abs=16)


def test_two_ranks_never_have_more_rows_than_both_bring():
  for kept in (True, False):
    assert row_capacity(30, 2, 2, uep.BalanceConfig(), MIB, kept=kept) == 120
