"""Shows that the kernels move no wrong byte and never hang, in thousands of random transfers.

Run on every GPU of a host: ``ultraep bench stress``. Every repetition has a plan or
routes and data of its own and is checked on the devices; then the whole layer, layers in a scan
and training steps are compared with the portable ones. Exits with status 1 if anything is wrong. A
hang can only be seen from outside: the last line says which part it is in.
"""

import argparse
import functools
import time
from collections.abc import Sequence
from typing import get_args

import jax

from ultraep_jax import implementation
from ultraep_jax.bench.kernels.portable import AXIS
from ultraep_jax.bench.machine import devices, devices_for_kernels
from ultraep_jax.bench.stress import layer as stress_layer
from ultraep_jax.bench.stress import operations as stress_operations
from ultraep_jax.bench.stress import transfers as stress_transfers
from ultraep_jax.bench.stress.operations import Operations
from ultraep_jax.config import Implementation
from ultraep_jax.tools import processes
from ultraep_jax.tools.arguments import natural, positive

_COMPARISONS = {"layer": stress_layer.layer, "scan": stress_layer.scan, "train": stress_layer.train}
PARTS = (*stress_transfers.CHECKS, *_COMPARISONS)


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
  parser.add_argument("--repetitions", type=positive, default=1000, help="of each kernel")
  parser.add_argument(
    "--scale", type=positive, default=1, help="divide all sizes, to try it on a CPU"
  )
  parser.add_argument("--seed", type=natural, default=0)
  parser.add_argument("--streams", action="store_true", help="put the matmuls on another stream")
  parser.add_argument(
    "--implementation",
    default="auto",
    choices=get_args(Implementation),
    help="of the layer that is compared; portable: in place of all kernels",
  )
  processes.add_argument(parser)
  return processes.run(run, parser.parse_args(argv))


def run(args: argparse.Namespace, operations: Sequence[Operations] | None = None) -> int:
  """Runs the parts and returns the exit status; ``operations``: others than the kernels."""
  portable = args.implementation == "portable"
  found = devices(least=2) if operations or portable else devices_for_kernels(least=2)
  print(f"jax {jax.__version__}, {len(found)} x {found[0].device_kind}", flush=True)
  if operations is None:
    operations = stress_operations.PORTABLE if portable else stress_operations.KERNELS
  wrong: list[str] = []
  for part in args.parts:
    print(f"{part}: begins", flush=True)
    start = time.perf_counter()
    if part in stress_transfers.CHECKS:
      mesh = jax.make_mesh((len(found),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
      problem = stress_transfers.Problem(mesh, args.scale, args.seed, args.streams)
      problems = stress_transfers.stress(part, operations, problem, args.repetitions)
    else:
      picked = args.implementation
      if picked == "auto":
        picked = implementation.summary(implementation.picks())
      print(f"{part}: implementation {picked}", flush=True)
      compare = _COMPARISONS[part]
      problems = compare(found, args.scale, args.seed, args.implementation, _say(part))
    wrong += (f"{part}: {text}" for text in problems)
    end = "WRONG" if problems else "correct"
    print(f"{part}: {end}, {time.perf_counter() - start:.1f} s in all", flush=True)
  for text in wrong:
    print(f"WRONG: {text}", flush=True)
  return 1 if wrong else 0


def _say(part: str) -> stress_layer.Say:
  return functools.partial(print, f"{part}:", flush=True)


if __name__ == "__main__":
  raise SystemExit(main())
