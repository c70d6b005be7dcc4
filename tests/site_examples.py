"""Shows the examples of docstrings as code on the documentation site: an extension of griffe."""

import re
from typing import Any

import griffe

# Consecutive lines from one with a prompt to the next empty line.
_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n.*\S.*)*", re.MULTILINE)


class Examples(griffe.Extension):
  """Puts doctests between fences, as Markdown would take ``>>>`` for a quotation."""

  def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
    if obj.docstring is not None:
      obj.docstring.value = _EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(example: re.Match[str]) -> str:
  indent = example[1]
  return f"{indent}```pycon\n{example[0]}\n{indent}```"
