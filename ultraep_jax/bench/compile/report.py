"""What ``ptxas`` says of each kernel."""

import pathlib
import re
from typing import NamedTuple


class Kernel(NamedTuple):
  """One kernel of a program.

  Attributes:
    name: of the kernel.
    architecture: that it was assembled for, as ``sm_90a``.
    registers: of a thread.
    spilled: bytes that a thread stores because it has not enough.
    shared: bytes of a block; ``None`` if the compiler does not say.
  """

  name: str
  architecture: str
  registers: int
  spilled: int
  shared: int | None


def read(folder: pathlib.Path) -> list[Kernel]:
  """The kernels whose reports are in a folder, by name."""
  return [_read(path) for path in sorted(folder.glob("*.ptxas"))]


def _read(path: pathlib.Path) -> Kernel:
  text = path.read_text()
  return Kernel(
    name=re.sub(r"_\d+$", "", path.stem),
    architecture=_find(r"for '(\w+)'", text, path),
    registers=int(_find(r"Used (\d+) registers", text, path)),
    spilled=int(_find(r"(\d+) bytes spill stores", text, path)),
    shared=_shared(path),
  )


def _shared(path: pathlib.Path) -> int | None:
  # A kernel that was lowered for an earlier program has it there, under a name of its own; some
  # have none.
  for resources in path.parents[1].glob(f"*/{path.stem}.resources.txt"):
    if found := re.search(r"smem_scratch_bytes=(\d+)", resources.read_text()):
      return int(found[1])
  return None


def _find(pattern: str, text: str, path: pathlib.Path) -> str:
  found = re.search(pattern, text)
  if found is None:
    raise ValueError(f"{path}: expected a report of ptxas with {pattern!r}, got {text!r}")
  return found[1]
