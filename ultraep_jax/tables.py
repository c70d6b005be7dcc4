"""Tables for a terminal."""

import io
import shutil
import sys
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

_WRAPPED = 24  # least width of a last column of text
_AROUND = 3  # spaces of a column, and what divides it from the next
_WIDE = 200  # columns where nobody sees them wrap: a file or a pipe


def table(header: Sequence[str], rows: Sequence[Sequence[object]], digits: int = 2) -> str:
  """Columns that line up: numbers to the right, ``None`` as a dash, a long last column wrapped.

  Args:
    header: a name for each column.
    rows: a value for each column.
    digits: of floats, behind the point.

  >>> print(table(["what", "value"], [["one", 1.0], ["two", None]]))
   what   value
  ──────────────
   one     1.00
   two        –
  """
  shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=True)
  cells = [[_cell(value, digits) for value in row] for row in rows]
  needed = 0  # so that no number is cut
  for index, name in enumerate(header):
    numeric = any(isinstance(row[index], int | float) for row in rows)
    last = index == len(header) - 1 and not numeric
    shown.add_column(name, justify="right" if numeric else "left", no_wrap=not last)
    needed += _AROUND + (
      _WRAPPED if last else max(map(len, [name, *(row[index] for row in cells)]))
    )
  for row in cells:
    shown.add_row(*row)
  seen = sys.stdout is not None and sys.stdout.isatty()
  width = max(shutil.get_terminal_size().columns, needed) if seen else _WIDE
  out = io.StringIO()
  Console(file=out, width=max(width, 60), highlight=False, markup=False, color_system=None).print(
    shown
  )
  return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def table_of_records(
  columns: Mapping[str, str],
  records: Sequence[Mapping[str, object]],
  *,
  parts: Mapping[str, Sequence[Mapping[str, object]]] | None = None,
  digits: int = 3,
) -> str:
  """A row for each record.

  Args:
    columns: for each column, the field that it shows. Every record has it.
    records: of one kind.
    parts: for units, behind the name of a part in its column, the parts of each record; a column
      for each part that some record has.
    digits: as in ``table``.

  >>> print(table_of_records({"what": "name"}, [{"name": "one"}], parts={" us": [{"copy": 2.0}]}))
   what   copy us
  ────────────────
   one      2.000
  """
  header, rows = [*columns], [[record[field] for field in columns.values()] for record in records]
  for unit, values in (parts or {}).items():
    names = dict.fromkeys(name for each in values for name in each)
    header += [f"{name}{unit}" for name in names]
    for row, each in zip(rows, values, strict=True):
      row += [each.get(name) for name in names]
  return table(header, rows, digits)


def _cell(value: object, digits: int) -> str:
  if value is None:
    return "–"
  return f"{value:.{digits}f}" if isinstance(value, float) else str(value)
