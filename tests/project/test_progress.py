"""Progress bars: only where somebody sees them."""

import io
import sys
import time

import pytest

from ultraep_jax.tools.progress import byte_progress, progress


class Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


def test_a_bar_for_a_terminal(monkeypatch):
  pytest.importorskip("tqdm")
  monkeypatch.setattr(sys, "stderr", Terminal())
  assert list(progress(range(5), "count", "step")) == [0, 1, 2, 3, 4]
  with byte_progress(3_000_000, "load") as advance:
    time.sleep(0.11)  # tqdm draws ten times a second
    advance(1_500_000)
  assert "load: " in sys.stderr.getvalue() and "1.50M/3.00M" in sys.stderr.getvalue()
  assert "count: " in sys.stderr.getvalue() and "0/5" in sys.stderr.getvalue()


@pytest.mark.parametrize("missing", [False, True])
def test_no_bar_for_a_pipe_or_without_tqdm(missing, monkeypatch):
  monkeypatch.setattr(sys, "stderr", Terminal() if missing else io.StringIO())
  if missing:
    monkeypatch.setitem(sys.modules, "tqdm", None)
  assert list(progress(range(3))) == [0, 1, 2]
  with byte_progress(3) as advance:
    advance(3)
  assert not sys.stderr.getvalue()
