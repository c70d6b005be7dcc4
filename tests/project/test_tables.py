"""Tables in a terminal."""

import io
import sys

import pytest

from ultraep_jax.tables import table


class Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


@pytest.mark.parametrize("columns", ["20", "40", "300"])
def test_no_number_is_cut(columns, monkeypatch):
  monkeypatch.setenv("COLUMNS", columns)
  monkeypatch.setattr(sys, "stdout", Terminal())
  names = [f"a long name {i}" for i in range(9)]
  found = table([*names, "note"], [[*(1234.5 + i for i in range(9)), "some text " * 9]])
  assert all(name in found for name in names)
  assert all(f"{1234.5 + i:.2f}" in found for i in range(9))
  assert "…" not in found


@pytest.mark.parametrize("columns", ["20", "80"])
def test_no_number_is_cut_where_there_is_no_text(columns, monkeypatch):
  monkeypatch.setenv("COLUMNS", columns)
  monkeypatch.setattr(sys, "stdout", Terminal())
  found = table([f"name {i}" for i in range(12)], [[1234.5 + i for i in range(12)]] * 2)
  assert all(f"{1234.5 + i:.2f}" in found for i in range(12))
  assert "…" not in found and len(found.splitlines()) == 4


def test_without_an_output(monkeypatch):
  monkeypatch.setattr(sys, "stdout", None)
  assert "1.00" in table(["value"], [[1.0]])
