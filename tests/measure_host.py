"""Measures what the results page says of several GPUs of one host, all from one commit.

In the time that there is, step by step, while the host's CPUs compile what later steps run::

    python tests/measure_host.py programs results --ranks 4 --workers 40 --minutes 28

Each step leaves its output and, if its bench writes one, a JSON in the second folder. ``--steps``
names some of them. What another machine has compiled, without GPUs, need only be loaded::

    python tests/measure_host.py programs results --gpu h100 --ranks 4 --workers 2 --make

Steps that are compiled where they run come first. Prefill and training come last, when nothing
compiles any more. A step waits for its programs, but not for ever: then those of layers are
compiled in it, and groups of the matrix that are not there are left out. One that takes too long is
stopped, and the next begins. Those of four GPUs take 25 to 40 minutes. Two have steps of their own,
which take six minutes where another machine has compiled; stress of layers has not run yet.
"""

import argparse
import itertools
import math
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ultraep_jax.bench.compile import targets
from ultraep_jax.bench.layer.problem import LARGE
from ultraep_jax.bench.matrix import cells
from ultraep_jax.bench.matrix import command as matrix

_ELSEWHERE = pathlib.Path(__file__).with_name("compiled_elsewhere.py")
_BESIDE = pathlib.Path(__file__).with_name("matrix_beside.py")
_WITH_JSON = ("layer", "matrix", "prefill", "train")
_NICE = 19  # of who compiles
_PATIENCE = 240  # seconds that a step waits for its programs
_POLL = 0.2  # seconds
_DONE = "done"
_RATIOS = "--ratios 1 1.3 2 3"
_QUICK = "--repeats 5 --no-statistics"
_MATRIX = "matrix --all --loads independent zipf --tokens 8192 --repeats 7 --minutes 5"
_SMALL_OR_MANY = "qwen3-next gpt-oss-120b minimax-m2 qwen3-30b"  # whose copies cost most
_OF_TWO = f"{_MATRIX} --shapes {_SMALL_OR_MANY} qwen3-235b olmoe mixtral-8x7b"
_TWO, _TWO_OR_MORE = (2, 2), (2, math.inf)
_PREFILL = "prefill --calibrate 24 --buckets 4096 8192 --shares 0.8 --seconds 4 --tries 5"


class Step(NamedTuple):
  """A run of a bench.

  Attributes:
    bench: its name and arguments.
    seconds: after which it is stopped.
    made: whether its programs can be compiled before, without the GPUs.
    ranks: how many GPUs it is for, at least and at most.
  """

  bench: str
  seconds: int
  made: bool = False
  ranks: tuple[int, float] = (4, math.inf)  # a busiest rank of three times the mean needs four


STEPS = {
  "replicate": Step("replicate --plans 4", 120),
  "costs": Step("costs --seconds 60", 180, ranks=_TWO),
  "exchange": Step("exchange time", 60, ranks=_TWO_OR_MORE),
  "exchange_fp8": Step("exchange time --dispatch-dtype float8_e4m3fn", 60, ranks=_TWO_OR_MORE),
  "moves": Step(
    "stress --parts replicate reduce_replicas dispatch combine --repetitions 150",
    90,
    ranks=_TWO_OR_MORE,
  ),
  "peers": Step(
    "layer --shapes qwen3-235b --ratios 1.3 3 --variants quota tuned plain --passes forward "
    "--calls 2 --repeats 3 --no-statistics",
    130,
  ),
  "forward": Step(
    f"layer {_RATIOS} --variants none quota quota-time ideal --passes forward {_QUICK}", 120, True
  ),
  "train": Step(
    f"layer {_RATIOS} --variants none quota quota-time ideal --passes train {_QUICK}", 180, True
  ),
  "two_forward": Step(f"{_OF_TWO} --ratios 1 1.6 --passes forward", 240, True, _TWO),
  "two_train": Step(f"{_OF_TWO} --ratios 1 1.6 --passes train", 360, True, _TWO),
  "two_float32": Step(
    f"{_MATRIX} --shapes {_SMALL_OR_MANY} --ratios 1 1.6 --passes train --weights float32",
    240,
    True,
    _TWO,
  ),
  "models": Step(
    "matrix --all --ratios 1.3 2 --loads zipf --tokens 8192 --shapes gpt-oss-120b kimi-k2 "
    "--minutes 2",
    240,
    True,
  ),
  "pairs": Step(
    "layer --shapes qwen3-235b --data 2 --experts 32 --ratios 1.42 "
    "--variants quota-time none ideal --repeats 9 --no-statistics",
    90,
    True,
  ),
  "stress_layer": Step("stress --parts layer --repetitions 1", 180, True, _TWO_OR_MORE),
  "stress_scan": Step("stress --parts scan --repetitions 1", 60, True, _TWO_OR_MORE),
  "stress_train": Step("stress --parts train --repetitions 1", 90, True, _TWO_OR_MORE),
  "pairwise": Step("matrix --minutes 7", 540, True),
  "prefill_3.8": Step(f"{_PREFILL} --skew 3.8", 240),
  "prefill_3": Step(f"{_PREFILL} --skew 3", 240),
  "text": Step("train --warmup 100 --ratios 2 --calibrate 10 --steps 2 --repeats 3", 420),
}


def main() -> int:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
  parser.add_argument("programs", type=pathlib.Path, help="folder of compiled programs")
  parser.add_argument("results", type=pathlib.Path, help="folder of what was measured")
  parser.add_argument("--gpu", choices=list(targets.CHIPS), help="by default, that of this host")
  parser.add_argument("--ranks", type=int, required=True)
  parser.add_argument("--steps", nargs="+", choices=list(STEPS), help="default: all for so many")
  parser.add_argument("--workers", type=int, default=0, help="processes that compile")
  parser.add_argument("--minutes", type=float, default=28.0, help="of all steps")
  parser.add_argument("--make", action="store_true", help="compile, and measure nothing")
  args = parser.parse_args()
  if not (fit := steps_for(args.ranks)):
    parser.error(f"--ranks: expected at least 2, got {args.ranks}")
  if others := [name for name in args.steps or () if name not in fit]:
    parser.error(f"--steps: expected some of {' '.join(fit)} on {args.ranks} GPUs, got {others}")
  args.steps = args.steps or fit
  if args.make:
    if not args.workers:
      parser.error("--make: expected --workers that compile, got none")
    if args.gpu is None:
      parser.error("--make: expected --gpu, as this host need not have one, got none")
  elif args.gpu not in (None, found := gpu_here()):
    parser.error(f"--gpu: expected that of this host, {found}, got {args.gpu}")
  else:
    args.gpu = found
  args.results.mkdir(parents=True, exist_ok=True)
  end = time.monotonic() + 60 * args.minutes
  makers = Makers(args)
  try:
    if args.make:
      makers.wait(args.steps, float("inf"))
      print("not compiled: " + (", ".join(makers.failed) or "nothing"), flush=True)
      return 1 if makers.failed else 0
    return measure(args, makers, end)
  finally:
    makers.stop()


def steps_for(ranks: int) -> list[str]:
  """Those that so many GPUs can run, and the results page tells of so many."""
  return [name for name, step in STEPS.items() if step.ranks[0] <= ranks <= step.ranks[1]]


def gpu_here() -> str:
  """The name of this host's GPUs, asked in another process, as this one holds none of them."""
  name = "from ultraep_jax.devices import known; print(known.find(known.here().device_kind).name)"
  asked = subprocess.run([sys.executable, "-c", name], capture_output=True, text=True, check=False)
  if asked.returncode:
    raise SystemExit(f"expected GPUs with a description, got\n{asked.stderr}")
  return asked.stdout.strip()


def measure(args: argparse.Namespace, makers: "Makers", end: float) -> int:
  """Runs the steps in order until the time is up; says which did not end well."""
  start, wrong = time.monotonic(), []
  for name in args.steps:
    makers.wait([name], min(end, time.monotonic() + _PATIENCE))
    left = end - time.monotonic()
    said = run(name, STEPS[name], args, left, makers) if left > 0 else "no time"
    seconds = time.monotonic() - start
    print(f"{seconds:6.0f} s  {name}: {said}, {makers.left()} to compile", flush=True)
    wrong += [] if said == _DONE else [f"{name} ({said})"]
  print("not measured, or not all: " + (", ".join(wrong) or "nothing"), flush=True)
  print("not compiled: " + (", ".join(makers.failed) or "nothing"), flush=True)
  return 1 if wrong else 0


def run(name: str, step: Step, args: argparse.Namespace, left: float, makers: "Makers") -> str:
  """How a step ended; others compile meanwhile."""
  bench, *rest = shlex.split(step.bench)
  if bench in _WITH_JSON:
    rest += ["--json", str(args.results / f"{name}.json")]
  way = ["-m", "ultraep_jax", "bench", bench, *rest]
  if step.made and bench == "matrix":
    host = ["--gpu", args.gpu, "--ranks", str(args.ranks), "--workers", "0"]
    way = [str(_BESIDE), str(args.programs), *host, "--", *rest]
  elif step.made:
    way = [str(_ELSEWHERE), "run", str(args.programs), bench, *rest]
  start, limit = time.monotonic(), min(left, step.seconds)
  with (args.results / f"{name}.log").open("w") as log:
    process = subprocess.Popen([sys.executable, *way], stdout=log, stderr=log)
  while (status := process.poll()) is None:
    if time.monotonic() - start > limit:
      process.kill()
      process.wait()
      return f"stopped after {limit:.0f} s"
    makers.start()
    time.sleep(_POLL)
  return f"failed ({status})" if status else _DONE


Part = tuple[str, ...]  # the arguments of a bench


class Makers:
  """Processes that compile the programs of steps, each of one shape and pass, in order."""

  def __init__(self, args: argparse.Namespace):
    self.args = args
    self.steps = dict[Part, set[str]]()  # that need what the part makes
    for name in args.steps:
      for part in parts(STEPS[name]) if STEPS[name].made else ():
        self.steps.setdefault(part, set()).add(name)
    self.queue = list(self.steps) if args.workers else []
    self.running = dict[Part, subprocess.Popen[bytes]]()
    self.failed: list[str] = []

  def wait(self, steps: Sequence[str], end: float) -> None:
    """Until these steps' programs are there, or nobody makes them, or the time is up."""
    self.start()
    while any(self.steps[part] & set(steps) for part in (*self.queue, *self.running)):
      if time.monotonic() > end:
        return
      time.sleep(_POLL)
      self.start()

  def start(self) -> None:
    """The next processes, in place of those that have ended."""
    for part, process in list(self.running.items()):
      if (status := process.poll()) is not None:
        del self.running[part]
        self.failed += [" ".join(part)] if status else []
    while self.queue and len(self.running) < self.args.workers:
      part = self.queue.pop(0)
      self.running[part] = self._make(part)

  def left(self) -> int:
    return len(self.queue) + len(self.running)

  def stop(self) -> None:
    for process in self.running.values():
      process.terminate()

  def _make(self, part: Part) -> "subprocess.Popen[bytes]":
    way = ["make", "--here", str(self.args.programs), "--gpu", self.args.gpu]
    topology = ["--topology", f"1x1x{self.args.ranks}"]
    command = ["nice", "-n", str(_NICE), sys.executable, str(_ELSEWHERE), *way, *topology, *part]
    with (self.args.results / "make.log").open("a") as log:
      return subprocess.Popen(command, env=targets.environment(), stdout=log, stderr=log)


def parts(step: Step) -> Iterator[Part]:
  """The arguments of benches that have a part of a step's programs each."""
  bench, *rest = shlex.split(step.bench)
  if bench == "matrix":
    options = argparse.ArgumentParser()
    matrix.add_arguments(options)
    found = options.parse_args(rest)
    groups = cells.choose(
      found.shapes, found.tokens, found.ratios, found.loads, found.passes, pairwise=not found.all
    )
    for group in groups:
      sizes = ["--shapes", group.shape, "--tokens", str(group.tokens), "--passes", group.direction]
      weights = ["--weights", found.weights]
      yield "matrix", "--all", "--ratios", "1", "--loads", "zipf", *weights, *sizes
  elif bench == "layer":
    options = argparse.ArgumentParser()
    options.add_argument("--shapes", nargs="+", default=list(LARGE))
    options.add_argument("--passes", nargs="+", default=list(cells.PASSES))
    found, others = options.parse_known_args(rest)
    for shape, direction in itertools.product(found.shapes, found.passes):
      yield "layer", *others, "--shapes", shape, "--passes", direction
  else:
    yield bench, *rest


if __name__ == "__main__":
  raise SystemExit(main())
