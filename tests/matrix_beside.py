"""Runs ``ultraep bench matrix`` while other processes of the host compile its programs.

To compile a group takes a minute or more, to measure it a few seconds::

    python tests/matrix_beside.py programs --gpu h100 --ranks 4 --workers 26 -- --json rows.json

Groups are measured in the order in which their programs are there. They are in the folder then: a
second run of the same commit goes on where this one ended, and measures only what is asked for.
``compiled_elsewhere`` has the same files.
What is behind ``--`` is for the bench. Needs what ``ultraep bench compile`` needs, on the GPUs.
Seen on four H100 with jax 0.11.2: 73 groups were compiled in 490 s by 26 processes on 64 cores.
"""

import argparse
import contextlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from compiled_elsewhere import Folder, failure, pretending, using

from ultraep_jax.bench.compile import targets
from ultraep_jax.bench.layer.problem import shape_of
from ultraep_jax.bench.matrix import cells, command


def main() -> int:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--gpu", required=True, choices=list(targets.CHIPS))
  parser.add_argument("--ranks", type=int, required=True)
  parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 8) // 3, 1))
  parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
  args, bench = parser.parse_known_args()
  bench = [word for word in bench if word != "--"]
  if args.worker is not None:
    devices = targets.devices(args.gpu, f"1x1x{args.ranks}")
    folder = Folder(args.folder, makes=True)
    with using(folder), pretending(devices), sharing(args.worker, args.workers):
      return command.main(bench)
  folder = Folder(args.folder, makes=False)
  environment = targets.environment()
  command_line = [sys.executable, __file__, *sys.argv[1:]]
  place = command_line.index("--") if "--" in command_line else len(command_line)
  workers = []
  for worker in range(args.workers):
    line = [*command_line[:place], "--worker", str(worker), *command_line[place:]]
    with (args.folder / f"worker_{worker}.log").open("w") as log:
      workers.append(subprocess.Popen(line, env=environment, stdout=log, stderr=log))
  try:
    with finding(folder, bench, args.ranks, lambda: any(each.poll() is None for each in workers)):
      return command.main([*bench, "--ranks", str(args.ranks)])
  finally:
    for process in workers:
      process.terminate()


@contextlib.contextmanager
def sharing(worker: int, workers: int) -> Iterator[None]:
  """The bench has every so manieth group."""

  def share(*arguments: Any, **options: Any) -> dict[cells.Group, list[cells.Cell]]:
    groups = cells.choose(*arguments, **options)
    return dict(list(groups.items())[worker::workers])

  with (
    mock.patch.object(command, "choose", share),
    mock.patch.object(command, "choices", no_choices),  # only shapes count
    mock.patch.object(command, "write_text", lambda *_: None),
  ):
    yield


def no_choices(_: int, __: str, ___: str, ____: int, ranks: int, tokens: int, top_k: int) -> Any:
  return np.zeros((ranks * tokens, top_k), np.int32)


@contextlib.contextmanager
def finding(
  folder: Folder, bench: Sequence[str], ranks: int, compiling: Callable[[], bool]
) -> Iterator[None]:
  """The bench with such arguments loads programs from the folder, and takes groups as they come."""
  options = argparse.ArgumentParser()
  command.add_arguments(options)
  args = options.parse_args(bench)

  def path_of(group: cells.Group) -> pathlib.Path:
    width = shape_of(group.shape).narrowed(args.scale).width
    places = jax.devices()[:ranks]
    return folder.group(group, places, args.implementation, width, args.weights)

  def choose(*arguments: Any, **options: Any) -> "Arriving":
    return Arriving(cells.choose(*arguments, **options), path_of, compiling)

  with using(folder), mock.patch.object(command, "choose", choose):
    yield


class Arriving(dict[cells.Group, Sequence[cells.Cell]]):
  """Groups in the order in which their programs are there, while others are compiled."""

  def __init__(
    self,
    groups: dict[cells.Group, list[cells.Cell]],
    path_of: Callable[[cells.Group], pathlib.Path],
    compiling: Callable[[], bool],
  ):
    super().__init__(groups)
    self.path_of, self.compiling = path_of, compiling

  def items(self) -> Any:
    left = dict(super().items())
    while left:
      last = not self.compiling()
      for group in list(left):
        path = self.path_of(group)
        if path.exists():
          yield group, left.pop(group)
        elif failure(path).exists():
          print(f"{group}: {failure(path).read_text()[:200]}", flush=True)
          del left[group]
      if last and left:
        print(f"nothing compiles any more; see worker_*.log beside programs: {list(left)}")
        return
      time.sleep(0.2)


if __name__ == "__main__":
  raise SystemExit(main())
