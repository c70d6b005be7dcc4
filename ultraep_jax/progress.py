"""Progress bars, where there is somebody to see them."""

import sys
from collections.abc import Iterable


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
