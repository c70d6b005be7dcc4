"""Progress bars, where there is somebody to see them."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator


def progress[T](values: Iterable[T], what: str = "", unit: str = "it") -> Iterable[T]:
  """The values, with a bar on standard error if that is a terminal and tqdm is installed.

  Args:
    values: to go through once.
    what: is being done, before the bar.
    unit: of the values.
  """
  if not sys.stderr.isatty():
    return values
  try:
    from tqdm import tqdm
  except ImportError:
    return values
  return tqdm(values, desc=what or None, unit=unit, leave=False)


@contextlib.contextmanager
def byte_progress(total: int, what: str = "") -> Iterator[Callable[[int], object]]:
  """A bar that counts bytes, where `progress` would show one.

  Args:
    total: bytes until done.
    what: is being done, before the bar.

  Yields:
    A function to call with the bytes done since its last call, from one thread.
  """
  tqdm = None
  if sys.stderr.isatty():
    with contextlib.suppress(ImportError):
      from tqdm import tqdm
  if tqdm is None:
    yield lambda count: None
    return
  with tqdm(total=total, desc=what or None, unit="B", unit_scale=True, leave=False) as bar:
    yield bar.update
