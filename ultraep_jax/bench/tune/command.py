"""Finds the fastest layout of each kernel here, and writes it into the device's description.

Run ``ultraep bench tune --write FILE``. Every candidate's results are compared with
those of the kernel as it is before its time counts. Candidates of an operation run in turn, round
by round; the fastest is kept if it gains more than ``--least-gain`` in three of four rounds.
What was found is written after each operation. Matmuls run on one GPU, transfers on all.
"""

import argparse
import dataclasses
import datetime
import itertools
import pathlib
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels.tunings import Tuning
from ultraep_jax.bench import contest
from ultraep_jax.bench.contest import Choice, Contest, Outcome
from ultraep_jax.bench.kernels.matmul_problems import DENSE, HOME, PROBLEMS, REPLICA, Problem
from ultraep_jax.bench.kernels.portable import AXIS
from ultraep_jax.bench.layer.problem import SHAPES, TUNED
from ultraep_jax.bench.machine import devices_for_kernels
from ultraep_jax.bench.tune import description
from ultraep_jax.bench.tune import matmuls as tune_matmuls
from ultraep_jax.bench.tune import transfers as tune_transfers
from ultraep_jax.files import check_output
from ultraep_jax.tables import table
from ultraep_jax.tools.arguments import natural, nonnegative, positive
from ultraep_jax.tools.errors import CommandError

DEFAULT = "default"


@dataclasses.dataclass(frozen=True)
class Subject:
  """An operation at a shape.

  Attributes:
    operation: as descriptions call it.
    widths: by which descriptions know it.
    tunings: the kernel's own first, then candidates, by a label.
    contest: of these tunings.
    ratio: of the rate to a dense matmul's, from seconds of both; ``None``: it is no matmul.
  """

  operation: str
  widths: tuple[int, ...]
  tunings: Mapping[str, Tuning]
  contest: Contest
  ratio: Callable[[float, float], float] | None = None


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the program."""
  parser = argparse.ArgumentParser(description=__doc__)
  add_arguments(parser)
  args = parser.parse_args(argv)
  devices_for_kernels()
  check_output(args.write)
  run(args)
  return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add(
    "--shapes",
    nargs="+",
    type=_shape,
    default=list(map(_shape, TUNED)),
    metavar="SHAPE",
    help=f"of {', '.join(SHAPES)}, DxF, or DxFxHOMExROWS, which stand for --home and --rows",
  )
  operations = [*PROBLEMS, *tune_transfers.OPERATIONS]
  add(
    "--operations",
    nargs="+",
    choices=operations,
    help="default: all, on one GPU matmuls",
  )
  add("--rows", type=positive, default=32768, help="of a matmul")
  add("--home", type=positive, default=HOME, help="slots of home experts, of a matmul")
  add("--replica", type=natural, default=REPLICA, help="slots of copies")
  add("--write", type=pathlib.Path, help="the JSON file to make, or to put results into")
  add("--seconds", type=nonnegative, default=180.0, help="after which nothing is begun")
  add("--least-gain", type=nonnegative, default=0.01, help="that a candidate must have")
  add("--more", action="store_true", help="try more candidates")
  add("--candidates", nargs="+", help="of matmuls, to try of these alone")
  add("--rounds", type=positive, default=5, help="turns of each candidate")
  add("--calls", type=positive, default=5, help="in each turn")
  add("--compile-workers", type=positive, default=16, help="threads")
  add("--scale", type=positive, default=1, help="divide all sizes, to try it on a CPU")


def run(args: argparse.Namespace) -> None:
  start = time.monotonic()
  kind = jax.devices()[0].device_kind
  path: pathlib.Path | None = args.write
  here = f"{jax.device_count()} x {kind}, jax {jax.__version__}"
  data = None if path is None else description.load(path, kind, here)
  print(here, flush=True)
  pace = contest.Pace(args.compile_workers, args.calls, args.rounds, start + args.seconds)
  everything = subjects(args)
  measured = {"jax": jax.__version__, "date": str(datetime.date.today()), "command": _command()}
  outcomes = contest.hold([subject.contest for subject in everything], pace)
  for subject, (_, outcome) in zip(everything, outcomes, strict=True):
    choice = contest.choose(outcome.seconds, DEFAULT, args.least_gain) if outcome.seconds else None
    _report(subject, outcome, choice)
    if path and data and choice and is_complete(outcome):
      data = description.with_tunings(data, [entry_of(subject, outcome, choice, measured)])
      description.save(path, data)
  print(f"{time.monotonic() - start:.0f} s", flush=True)


def subjects(args: argparse.Namespace) -> list[Subject]:
  """Operations first by what a layer runs, each at all shapes, so that time ends with the rest.

  By default all, but on one device no transfers.
  """
  transfers = tune_transfers.OPERATIONS if jax.device_count() > 1 else ()
  shapes: Sequence[Shape] = args.shapes
  named = itertools.product(args.operations or [*transfers, *PROBLEMS], shapes)
  found: dict[Any, Subject] = {}
  for operation, shape in named:
    subject = (_matmul if operation in PROBLEMS else _transfer)(operation, shape, args)
    # Models may have some alike.
    found.setdefault((subject.operation, subject.widths, shape.home, shape.rows), subject)
  return list(found.values())


class Shape(NamedTuple):
  """Of a layer, and how many slots and rows its matmuls are timed with if it says so."""

  model: str
  home: int | None = None
  rows: int | None = None


def _shape(text: str) -> Shape:
  sizes = text.split("x")
  if text in SHAPES or len(sizes) == 2:
    return Shape(text)
  wide, inner, home, rows = sizes
  return Shape(f"{wide}x{inner}", int(home), int(rows))


def _problem(name: str, shape: Shape, args: argparse.Namespace) -> Problem:
  slots = {"home": shape.home or args.home, "replica": args.replica}
  return Problem.of(name, shape.model, shape.rows or args.rows, args.scale, **slots)


def _matmul(name: str, shape: Shape, args: argparse.Namespace) -> Subject:
  problem = _problem(name, shape, args)
  found = tune_matmuls.candidates(problem, args.more)
  tried = {label: found[label] for label in found if label in (args.candidates or found)}
  tunings = {DEFAULT: problem.default, **tried}
  competing = tune_matmuls.contest(problem, tunings)
  return Subject(problem.operation, problem.widths, tunings, competing, problem.ratio)


def _transfer(operation: str, shape: Shape, args: argparse.Namespace) -> Subject:
  axis_types = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=axis_types)
  if mesh.size < 2:
    raise CommandError(f"{operation}: expected several devices, got {mesh.size}")
  problem = _problem("sum beside", shape, args)
  tunings = {
    DEFAULT: tune_transfers.default(operation, mesh.size, problem.rows),
    **tune_transfers.candidates(operation, mesh.size, problem.rows),
  }
  competing = tune_transfers.contest(operation, problem, tunings, mesh)
  return Subject(operation, tune_transfers.widths(operation, problem), tunings, competing)


def is_complete(outcome: Outcome) -> bool:
  """Whether no candidate was left out for want of time: else the fastest may be unknown."""
  return contest.NO_TIME not in outcome.failures.values()


def entry_of(
  subject: Subject, outcome: Outcome, choice: Choice, measured: Mapping[str, Any]
) -> dict[str, Any]:
  """The description's entry."""
  tuning = None if choice.name == DEFAULT else subject.tunings[choice.name]
  times = {
    "us": round(statistics.median(outcome.seconds[choice.name]) * 1e6, 1),
    "gain": round(choice.gain, 4),
  }
  found = {"title": subject.contest.title, **times, **measured}
  return description.entry(subject.operation, subject.widths, tuning, found)


def _report(subject: Subject, outcome: Outcome, choice: Choice | None) -> None:
  """A row for each candidate; the chosen one has a star."""
  medians = {name: statistics.median(times) for name, times in outcome.seconds.items()}
  dense = statistics.median(outcome.others.get(DENSE, [float("nan")]))
  rows = []
  for name, seconds in medians.items():
    ratio = None if subject.ratio is None else subject.ratio(seconds, dense)
    star = " *" if choice is not None and choice.name == name else ""
    gain = f"{medians[DEFAULT] / seconds - 1:+.1%}{star}"
    rows.append([subject.contest.title, name, 1e6 * seconds, ratio, gain])
  rows += [[subject.contest.title, name, None, None, why] for name, why in outcome.failures.items()]
  print(table(["", "layout", "us", "of dense", "gain"], rows, digits=3), flush=True)


def _command() -> str:
  """How this was called, without the name of a file, which is of one machine."""
  words = [sys.argv[0].removesuffix("tune.py"), *sys.argv[1:]]
  if "--write" in words:
    at = words.index("--write")
    words[at:] = words[at + 2 :]
  return f"{words[0]} {shlex.join(words[1:])}"


if __name__ == "__main__":
  raise SystemExit(main())
