"""One style for all figures: the viewer's colours, and the words of the README.

Needs Matplotlib, which the extras ``paper`` and ``examples`` have.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

# Not balanced and balanced have the viewer's colours of before and after.
COLORS = {
  "none": "#c2570c",
  "eplb": "#8a6fb0",
  "eplb in slots": "#8a6fb0",
  "lplb": "#a8577e",
  "eplb+": "#7d8794",
  "quota": "#1467b8",
  "quota (time)": "#2a9d8f",
  "quota-time": "#2a9d8f",
  "ideal": "#4b5563",
  "plain": "#b6bcc6",
  "tuned": "#7d8794",
}
LABELS = {
  "none": "not balanced",
  "eplb": "EPLB",
  "eplb in slots": "EPLB in slots",
  "lplb": "LPLB",
  "eplb+": "EPLB+",
  "quota": "balanced",
  "quota (time)": "balanced by time",
  "quota-time": "balanced by time",
  "ideal": "equal loads",
  "plain": "plain JAX",
  "tuned": "tuned JAX",
}
DPI = 130
_GRID, _LINES = "#d9dee6", 1.6


def figure(columns: int, width: float, height: float, rows: int = 1) -> "tuple[Figure, list[Axes]]":
  """A figure with axes side by side, row by row, without any global state.

  Raises:
    ImportError: Matplotlib is not installed.
  """
  try:
    from matplotlib.figure import Figure
  except ImportError as error:
    message = "plots need Matplotlib: in the clone, pip install -e '.[paper]'"
    raise ImportError(message) from error
  made = Figure(figsize=(width, height), layout="constrained")
  axes = [made.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
  for ax in axes:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color=_GRID, linewidth=0.8)
    ax.set_axisbelow(True)
  return made, axes


def style(name: str, **changes: Any) -> dict[str, Any]:
  """Colour, width and label of a strategy's line."""
  return {"color": COLORS[name], "linewidth": _LINES, "label": LABELS[name], **changes}


def legend_above(made: "Figure", ax: "Axes") -> None:
  """One legend for all axes, above them, where it covers nothing."""
  handles, labels = ax.get_legend_handles_labels()
  made.legend(
    handles, labels, loc="outside upper left", ncols=len(labels), frameon=False, fontsize=9
  )
