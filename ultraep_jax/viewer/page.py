"""The page around the data: one HTML file that fetches nothing and runs only its own scripts."""

import base64
import hashlib
import html
import importlib.resources
import json
from collections.abc import Sequence
from typing import Any

from ultraep_jax.trace.reader import Trace
from ultraep_jax.viewer.payload import payload

_POLICY = (
  "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; "
  "img-src data: blob:; script-src {scripts}"
)


def render(traces: Sequence[Trace]) -> str:
  """The page of one run, or of several to compare.

  Args:
    traces: at least one; the first is what the others are compared with.

  Raises:
    ValueError: no trace.
    ImportError: plotly, of the extra ``viewer``, is not installed.
  """
  if not traces:
    raise ValueError("traces: expected at least one, got none")
  if not any(len(trace) for trace in traces):
    names = ", ".join(trace.manifest.name for trace in traces)
    return error_page(
      f"{names}: the trace has no records yet",
      "A recorder writes what it holds after its flush_seconds, and when it is closed.",
    )
  plotly = plotly_script()  # before the data, which takes longer
  data = {"runs": [payload(trace) for trace in traces if len(trace)]}
  return _page(
    title=" and ".join(trace.manifest.name for trace in traces),
    body=_asset("page.html"),
    scripts=[plotly, _asset("charts.js"), _asset("page.js")],
    data=data,
  )


def error_page(message: str, hint: str = "") -> str:
  """A page that says what is wrong."""
  body = f'<main><section role="alert"><h1>No trace to show</h1><p>{html.escape(message)}</p>'
  body += f"<p>{html.escape(hint)}</p></section></main>" if hint else "</section></main>"
  return _page("No trace to show", body, [], None)


def plotly_script() -> str:
  """Plotly's script, from its package.

  Raises:
    ImportError: with the command that installs it.
  """
  try:
    from plotly.offline import get_plotlyjs
  except ImportError as error:
    raise ImportError(
      "the viewer draws with plotly, which is not installed: "
      "in the clone, pip install -e '.[viewer]'"
    ) from error
  return get_plotlyjs()


def _page(title: str, body: str, scripts: Sequence[str], data: dict[str, Any] | None) -> str:
  hashes = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
  policy = _POLICY.format(scripts=" ".join(f"'sha256-{h}'" for h in hashes) or "'none'")
  # No "<" in the data: nothing that a run is called can end the element.
  values = "" if data is None else json.dumps(data).replace("<", "\\u003c")
  parts = [
    '<!doctype html><html lang="en"><head><meta charset="utf-8">',
    f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    f'<title>{html.escape(title)} – expert load</title><link rel="icon" href="data:,">',
    f"<style>{_asset('page.css')}</style></head><body>",
    body,
    f'<script type="application/json" id="data">{values}</script>' if data else "",
    *(f"<script>{script}</script>" for script in scripts),
    "</body></html>\n",
  ]
  return "\n".join(parts)


def _asset(name: str) -> str:
  return importlib.resources.files("ultraep_jax.viewer").joinpath(name).read_text("utf-8")
