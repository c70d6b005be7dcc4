"""Repeat the UltraEP paper's evaluation in the simulator, its figures beside ours.

paper --quick                   one seed and few steps, to try it
paper --out figures             everything, with figures and paper.json
"""

import argparse
import functools
import json
import pathlib
import sys
import time

from ultraep_jax.files import check_output, make_folder, write_text
from ultraep_jax.simulate import paper, plots, published, scaling, validation
from ultraep_jax.simulate.paper import QUICK, Effort, Report
from ultraep_jax.simulate.text import constants, difference, percent, to_json
from ultraep_jax.tables import table
from ultraep_jax.tools.arguments import positive
from ultraep_jax.tools.errors import CommandError
from ultraep_jax.tools.progress import progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the command's options."""
  parser.add_argument("--quick", action="store_true", help="one seed and few steps, to try it")
  parser.add_argument("--seeds", type=positive, default=Effort().seeds, help="independent runs")
  parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
  parser.add_argument("--out", type=pathlib.Path, help="folder for figures and paper.json")


def run(args: argparse.Namespace) -> int:
  """Simulates and prints."""
  if args.out is not None:
    make_folder(args.out)
    check_output(args.out / "paper.json")
  start = time.perf_counter()
  effort = QUICK if args.quick else Effort(seeds=args.seeds)
  report = paper.run(effort, progress=functools.partial(progress, what="paper", unit="case"))
  points = _scaling(args.quick)
  checks = validation.points()
  bubbles = paper.bubble_range(report.device)
  result = {
    "report": report,
    "scaling": points,
    "validation": checks,
    "bubble_range": bubbles,
    "seconds": time.perf_counter() - start,
  }
  if args.json:
    print(json.dumps(to_json(result), indent=1))
  else:
    print("\n\n".join(_tables(report, points, checks, bubbles)))
  if args.out is not None:
    write_text(args.out / "paper.json", json.dumps(to_json(result), indent=1))
    try:
      written = plots.save(report, points, args.out)
    except ImportError as error:
      raise CommandError(f"out: {error}") from None
    print("written: " + ", ".join(map(str, written)), file=sys.stderr)
  return 0


def _scaling(quick: bool) -> list[scaling.Point]:
  sweep = functools.partial(
    scaling.sweep, progress=functools.partial(progress, what="scaling", unit="size")
  )
  if quick:
    return sweep((8, 64, 256), microbatches=5)
  points = sweep()
  racks = (72, 288, 1296, 2520)
  points += sweep(racks, domain_size=72)
  wide = (64, 256, 1280, 2560)
  return points + sweep(wide, kind="wide", strategies=("none", "quota"))


def _tables(
  report: Report,
  points: list[scaling.Point],
  checks: list[validation.Point],
  bubbles: dict[str, tuple[float, float]],
) -> list[str]:
  texts = [constants(report.device)]
  rows = [
    [
      row.case,
      row.strategy,
      str(row.imbalance),
      row.published_imbalance,
      difference(row.imbalance.mean, row.published_imbalance),
      percent(row.share.mean),
      percent(row.published_share),
      difference(100 * row.share.mean, percent(row.published_share)),
    ]
    for row in report.rows
  ]
  header = ["case", "strategy", "imbalance", "published", "diff", "% of ideal", "published", "diff"]
  title = "Imbalance after, and throughput over that of even loads (bands: 95 % over seeds)"
  texts.append(f"{title}\n{table(header, rows)}")
  texts.append(
    "Share of quota in %, if nothing or all of a step outside MoE layers grows with them\n"
    + table(["case", "nothing", "all"], [[k, 100 * a, 100 * b] for k, (a, b) in bubbles.items()])
  )
  texts.append(
    "Quota on single loads (bound: no plan with these slots can end lower)\n"
    + table(["loads", "before", "after", "bound", "copies"], [list(row) for row in report.balance])
  )
  texts.append(_planner_table(report))
  header = ["before", "EPLB+ S1", "quota S1", "published S1", "direct ms", "relay ms", "published"]
  rows = [
    [
      row.before,
      row.eplb_plus,
      row.quota,
      " / ".join(map(str, published.ONE_SLOT.get(row.before, ("–",)))),
      1e3 * row.direct,
      1e3 * row.relay,
      f"{1e3 * row.published[0]:.2f} / {1e3 * row.published[1]:.2f}",
    ]
    for row in report.skews
  ]
  title = "By skew, E128 G64: imbalance with one slot, and time to send copies with two"
  texts.append(f"{title}\n{table(header, rows)}")
  header = ["ranks", "domain", "kind", "strategy", "% of ideal", "imbalance", "floor", "sim. s"]
  rows = [
    [p.ranks, p.domain_size, p.kind, p.strategy, 100 * p.share, p.imbalance, p.floor, p.seconds]
    for p in points
  ]
  title = "Scaling: one MoE layer, four experts a rank, 50 microbatches a step"
  texts.append(f"{title}\n{table(header, rows)}")
  header = ["measurement", "measured ms", "predicted ms", "error %", "", "source"]
  rows = [
    [
      c.what,
      1e3 * c.measured,
      1e3 * c.predicted,
      f"{100 * c.error:+.1f}",
      "fitted" if c.fitted else "",
      c.source,
    ]
    for c in checks
  ]
  title = "The cost model beside measurements (fitted: the constants are from this number)"
  return [*texts, f"{title}\n{table(header, rows)}"]


def _planner_table(report: Report) -> str:
  header = ["planner", "S", "imbalance", "copies", "fan-out", "direct", "% remote", "by chance"]
  rows: list[list[object]] = [
    [
      row.strategy,
      row.slots,
      row.imbalance,
      row.replicas,
      row.fan_out,
      row.direct,
      100 * row.remote,
      100 * row.remote_by_chance,
    ]
    for row in report.planners
  ]
  for i, name in enumerate(("EPLB+", "UltraEP")):
    after, copies, out, remote = (published.ABLATION[key][i] for key in published.ABLATION)
    chance = 100 * published.REMOTE_WITHOUT_LOCALITY if name == "UltraEP" else None
    rows.append([f"{name}, published", None, after, copies, None, out, 100 * remote, chance])
  title = "Planners and slots, E128 G64, mean over imbalances 1.5 to 8"
  return f"{title}\n{table(header, rows)}"
