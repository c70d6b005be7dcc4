"""Files that commands write, which are none that they read."""

import pathlib
from collections.abc import Iterable

from ultraep_jax.tools.errors import CommandError
from ultraep_jax.trace.format import MANIFEST


def check_no_input(
  option: str,
  path: pathlib.Path | None,
  inputs: Iterable[str | pathlib.Path | None],
  suffix: str = ".json",
) -> None:
  """Refuses to write over what a command reads.

  Args:
    option: that the path is of.
    path: to write; ``None``: nothing.
    inputs: files, and folders of traces; ``None``: none.
    suffix: of what the command writes, which may be replaced beside a trace's own files.

  Raises:
    CommandError: the path is an input, or a file in one that may be a part of it.
  """
  if path is None or not path.exists():
    return
  at = path.resolve()
  for each in inputs:
    if each is None or not pathlib.Path(each).exists():
      continue
    if path.samefile(each):
      raise CommandError(f"{option}: expected another file than {each}, which is read, got {path}")
    if at.parent.samefile(each) and (at.suffix != suffix or at.name == MANIFEST):
      raise CommandError(f"{option}: expected a file that is no part of a trace, got {path}")
