"""Look at load traces in the browser, from a local server or as one HTML file.

view runs/trace                        serve the page on 127.0.0.1 and say where
view runs/trace --html trace.html      write the page; it needs nothing else to be shown
view runs/a runs/b --html both.html    compare runs with the first
"""

import argparse
import pathlib
import webbrowser
from collections.abc import Sequence

import numpy as np

from ultraep_jax.files import check_output, write_text
from ultraep_jax.tools.arguments import port
from ultraep_jax.tools.errors import CommandError, UsageError
from ultraep_jax.tools.outputs import check_no_input
from ultraep_jax.trace.format import TraceError
from ultraep_jax.trace.reader import Trace, read
from ultraep_jax.viewer.page import error_page, plotly_script, render
from ultraep_jax.viewer.server import make_server

_HOST = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Traces, and how to show them."""
  parser.add_argument("traces", nargs="+", metavar="DIR", help="folder of a trace; several compare")
  how = parser.add_mutually_exclusive_group()
  how.add_argument("--html", type=pathlib.Path, metavar="FILE", help="write the page to a file")
  how.add_argument(
    "--serve", action="store_true", help="serve the page (the default), read anew at each reload"
  )
  parser.add_argument(
    "--steps", type=_steps, metavar="A:B", help="only steps from A to before B, in more detail"
  )
  parser.add_argument("--host", help=f"address to serve on ({_HOST})")
  parser.add_argument("--port", type=port, help="port to serve on (a free one)")
  parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run(args: argparse.Namespace) -> int:
  """Writes or serves the page."""
  try:
    plotly_script()
  except ImportError as error:
    raise CommandError(str(error)) from None
  if args.html is None:
    return _serve(args, args.host or _HOST, args.port or 0)
  for name in ("host", "port"):
    if (given := getattr(args, name)) is not None:
      raise UsageError(f"--{name}: expected no --html with it, which serves nothing, got {given}")
  try:
    check_output(args.html)
    check_no_input("--html", args.html, args.traces, ".html")
    traces = [_read(path, args.steps) for path in args.traces]
    write_text(args.html, render(traces))
  except (TraceError, OSError) as error:
    raise CommandError(str(error)) from None
  for trace in traces:
    for problem in trace.problems:
      print(f"left out: {problem}")
    print(_line(trace))
  print(f"wrote {args.html} ({args.html.stat().st_size / 1e6:.1f} MB)")
  if args.open:
    webbrowser.open(args.html.resolve().as_uri())
  return 0


def _read(path: str, steps: slice | None) -> Trace:
  """The trace, of these steps alone.

  Raises:
    TraceError: as ``read``, or the trace has steps but none of these.
  """
  trace = read(path, steps=steps)
  if steps is None or len(trace):
    return trace
  there: set[int] = set()

  def note(step_N: np.ndarray) -> np.ndarray:
    there.update(step_N.tolist())
    return np.zeros(step_N.shape, bool)

  read(path, steps=note)
  if there:
    asked = ":".join("" if end is None else str(end) for end in (steps.start, steps.stop))
    raise TraceError(
      f"{path}: expected --steps among its steps, {min(there)} to {max(there)}, got {asked}"
    )
  return trace


def _line(trace: Trace) -> str:
  if not len(trace):
    return f"{trace.manifest.name}: no records"
  before, after = trace.imbalance_before_N, trace.imbalance_after_N
  return (
    f"{trace.manifest.name}: {len(trace)} records, busiest over mean rank {before.mean():.2f} "
    f"before, {after.mean():.2f} after (worst {before.max():.2f} and {after.max():.2f})"
  )


def page_of(paths: Sequence[str], steps: slice | None) -> str:
  """The page of these traces, or one that says why there is none."""
  try:
    return render([_read(path, steps) for path in paths])
  except (TraceError, OSError) as error:
    return error_page(str(error), "Reload this page when it is there.")


def _serve(args: argparse.Namespace, host: str, port: int) -> int:
  try:
    server = make_server(lambda: page_of(args.traces, args.steps), host, port)
  except (OSError, OverflowError) as error:
    reason = getattr(error, "strerror", None) or error
    raise CommandError(f"cannot serve on {host}, port {port}: {reason}") from None
  host = f"[{host}]" if ":" in host else host
  address = f"http://{host}:{server.server_port}/"
  for path in args.traces:
    if not pathlib.Path(path).exists():
      print(f"{path}: nothing there yet", flush=True)
  print(f"serving {', '.join(args.traces)} on {address} (Ctrl-C to stop)", flush=True)
  if args.open:
    webbrowser.open(address)
  with server:
    server.serve_forever()
  return 0


def _steps(text: str) -> slice:
  try:
    low, high = (int(part) if part else None for part in text.split(":"))
  except ValueError:
    raise argparse.ArgumentTypeError(f"expected A:B, got {text!r}") from None
  if low is not None and high is not None and low >= high:
    raise argparse.ArgumentTypeError(f"expected A:B with A below B, got {text!r}")
  return slice(low, high)
