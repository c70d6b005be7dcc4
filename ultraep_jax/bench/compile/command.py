"""Compiles every kernel and the layer for GPUs that are not here, and says what came of it.

Needs XLA's CUDA compiler, ``pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc
nvidia-cuda-crt nvidia-nvvm``, and no GPU. What compiles may still be wrong: nothing is run. The
registers, spills and shared memory of each kernel are those of the compiler's report. Exits with 1
if the compiler aborted, if anything was refused but a matmul for Blackwell (JAX's asks a GPU at
hand for its SMs), if a matmul by itself spills registers, or a layer's more than it does today.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import pallas_kernels as kernels
from ultraep_jax.bench.compile import programs, report, targets
from ultraep_jax.tables import table

# Bytes of a thread of a layer's matmul, as tuned and beside a transfer: what they spill today
# (docs/lab/kernels.md, Registers and spills).
MOST_SPILLED = 20


class Result(NamedTuple):
  """What came of a program.

  Attributes:
    program: its name.
    refused: why it did not compile, else ``None``.
    aborted: whether that ended the compiler.
    memory: temporary bytes that it takes on a device.
    kernels: in it.
  """

  program: str
  refused: str | None
  aborted: bool = False
  memory: int | None = None
  kernels: Sequence[report.Kernel] = ()


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description="Compiles for GPUs that are not here.")
  names = tuple(targets.CHIPS)
  parser.add_argument("--gpus", nargs="+", choices=names, default=names, help="default: all")
  parser.add_argument("--programs", nargs="+", choices=programs.NAMES, default=programs.NAMES)
  parser.add_argument(
    "--topology", default="1x1x2", help='slices x processes x GPUs of each; "1x2x1": 2 processes'
  )
  args = parser.parse_args(argv)
  wrong = False
  for gpu in args.gpus:
    results = compile_all(gpu, args.topology, args.programs)
    print(f"{gpu}, compute capability {'.'.join(map(str, targets.CHIPS[gpu].capability))}")
    print(show(results), flush=True)
    faults = [fault for result in results for fault in find_faults(gpu, result)]
    print("".join(f"{gpu}: {fault}\n" for fault in faults))
    wrong = wrong or bool(faults)
  return int(wrong)


def compile_all(gpu: str, topology: str, names: Sequence[str]) -> list[Result]:
  """Compiles programs in other processes: the next one goes on where the compiler aborts."""
  results: list[Result] = []
  while len(results) < len(names):
    results += _compile(gpu, topology, names[len(results) :])
  return results


def _compile(gpu: str, topology: str, names: Sequence[str]) -> list[Result]:
  """Up to the first that ends the process."""
  with tempfile.TemporaryDirectory() as folder:
    environment = targets.environment() | {"MOSAIC_GPU_DUMP_PTXAS": "1"}
    command = [sys.executable, "-m", "ultraep_jax.bench.compile.child", gpu, topology, folder]
    done = subprocess.run(
      [*command, *names], env=environment, capture_output=True, text=True, check=False
    )
    return read_results(done.stdout, done.stderr, done.returncode, pathlib.Path(folder))


def read_results(out: str, err: str, status: int, folder: pathlib.Path) -> list[Result]:
  """What a child said, and what it was trying when it ended.

  Raises:
    RuntimeError: it ended with an error before it tried anything, or between two.
  """
  results, trying = [], None
  for line in out.splitlines():
    said = json.loads(line)
    trying = said.get("tries")
    if trying is None:
      found = report.read(folder / said["name"].replace(" ", "_"))
      results.append(Result(said["name"], said["refused"], False, said["memory"], found))
  if trying is not None:
    results.append(Result(trying, _last_words(err, status), aborted=True))
  elif status:
    raise RuntimeError(f"compile: the compiling process ended with {status}:\n{err[-4000:]}")
  return results


def _last_words(err: str, status: int) -> str:
  """The line in which a compiler says why it aborts."""
  lines = [line for line in err.splitlines() if "ERROR" in line or "Error" in line]
  return (lines or [f"ended with {status}"])[-1].strip()


def show(results: Sequence[Result]) -> str:
  """A line for each kernel of each program, or for the program if it has none."""
  header = ["program", "kernel", "registers", "spilled B", "shared B", "memory MB", "outcome"]
  rows: list[Sequence[object]] = []
  for result in results:
    outcome = result.refused or "compiles"
    memory = None if result.memory is None else result.memory / 1e6
    if not result.kernels:
      rows.append([result.program, None, None, None, None, memory, outcome])
    for index, kernel in enumerate(result.kernels):
      first = (result.program, memory, outcome) if index == 0 else ("", None, "")
      numbers = (kernel.registers, kernel.spilled, kernel.shared)
      rows.append([first[0], kernel.name, *numbers, *first[1:]])
  return table(header, rows, digits=0)


def find_faults(gpu: str, result: Result) -> list[str]:
  """What must not be."""
  if result.aborted:
    return [f"{result.program} aborts the compiler: {result.refused}"]
  hopper = targets.CHIPS[gpu].capability[0] == kernels.HOPPER  # all matmuls are written for it
  if result.refused and (hopper or not result.program.startswith("matmul")):
    return [f"{result.program} is refused: {result.refused}"]
  most = 0 if result.program.startswith("matmul") else MOST_SPILLED
  return [
    f"{result.program}: {kernel.name} spills {kernel.spilled} bytes"
    for kernel in result.kernels
    if kernel.spilled > most and "matmul" in kernel.name
  ]


if __name__ == "__main__":
  sys.exit(main())
