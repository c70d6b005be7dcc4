"""Errors about many tensors at once: what is wrong, how often, and which names are close."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

SHOWN = 5  # of each kind; the others are counted


def closest(name: str, names: Iterable[str]) -> list[str]:
  """Up to three similar names, of those with the same numbers if there are any."""
  names = list(names)
  numbers = re.findall(r"\d+", name)
  same = [other for other in names if re.findall(r"\d+", other) == numbers]
  return difflib.get_close_matches(name, same or names[:2000], 3)  # 0.1 ms for each


def summary(kinds: Mapping[str, Sequence[str]]) -> str:
  """Lines for an error about many things: of each kind the count and the first few."""
  lines = []
  for kind, problems in kinds.items():
    if problems:
      lines.append(f"  {kind} ({len(problems)}):")
      lines += [f"    {problem}" for problem in problems[:SHOWN]]
      if len(problems) > SHOWN:
        lines.append(f"    and {len(problems) - SHOWN} more")
  return "\n".join(lines)
