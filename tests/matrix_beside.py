"""Runs ``ultraep bench matrix`` while other processes of the host compile its programs.

To compile a group takes a minute or more, to measure it a few seconds::

    python tests/matrix_beside.py programs --gpu h100 --ranks 4 --workers 26 -- --json rows.json

Groups are measured in the order in which their programs are there. They are in the folder then: a
second run of the same commit goes on where this one ended, and measures only what is asked for.
What is behind ``--`` is for the bench. Needs what ``ultraep bench compile`` needs, on the GPUs.
Seen on four H100 with jax 0.11.2: 73 groups were compiled in 490 s by 26 processes on 64 cores.
"""

import argparse
import contextlib
import os
import pathlib
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any
from unittest import mock

import compiled_elsewhere
import jax
import numpy as np
from jax.experimental import serialize_executable

from ultraep_jax.bench.compile import targets
from ultraep_jax.bench.matrix import cells, command, programs

_FAILED = "failed"


def main() -> int:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--gpu", required=True, choices=list(targets.CHIPS))
  parser.add_argument("--ranks", type=int, required=True)
  parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 8) // 3, 1))
  parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
  args, bench = parser.parse_known_args()
  bench = [word for word in bench if word != "--"]
  args.folder.mkdir(parents=True, exist_ok=True)
  if args.worker is not None:
    devices = targets.devices(args.gpu, f"1x1x{args.ranks}")
    with compiled_elsewhere.pretending(devices), making(args.folder, args.worker, args.workers):
      return command.main(bench)
  environment = {**targets.environment(), "CUDA_VISIBLE_DEVICES": ""}
  command_line = [sys.executable, __file__, *sys.argv[1:]]
  place = command_line.index("--") if "--" in command_line else len(command_line)
  workers = []
  for worker in range(args.workers):
    line = [*command_line[:place], "--worker", str(worker), *command_line[place:]]
    with (args.folder / f"worker_{worker}.log").open("w") as log:
      workers.append(subprocess.Popen(line, env=environment, stdout=log, stderr=log))
  try:
    with finding(args.folder, lambda: any(process.poll() is None for process in workers)):
      return command.main([*bench, "--ranks", str(args.ranks)])
  finally:
    for process in workers:
      process.terminate()


@contextlib.contextmanager
def making(folder: pathlib.Path, worker: int, workers: int) -> Iterator[None]:
  """The bench compiles every so manieth group, and measures none."""

  def compile_group(mesh: Any, group: cells.Group, *arguments: Any) -> None:
    if not (folder / name_of(group)).exists():
      jax.clear_caches()
      try:
        made = programs.compile_group(mesh, group, *arguments)
      except Exception as error:
        write(folder / f"{name_of(group)}.{_FAILED}", repr(error).encode())
        raise
      named = {**made.variants, programs._SCALARS: made.scalars}
      whole = {name: serialize_executable.serialize(each) for name, each in named.items()}
      write(folder / name_of(group), pickle.dumps(whole))
    raise compiled_elsewhere.Made("compiled")

  def share(*arguments: Any, **options: Any) -> dict[cells.Group, list[cells.Cell]]:
    groups = cells.choose(*arguments, **options)
    return dict(list(groups.items())[worker::workers])

  with contextlib.ExitStack() as stack:
    for name, value in [
      ("choose", share),
      ("compile_group", compile_group),
      ("choices", no_choices),  # only shapes count
      ("write_text", lambda *_: None),
    ]:
      stack.enter_context(mock.patch.object(command, name, value))
    yield


def no_choices(_: int, __: str, ___: str, ____: int, ranks: int, tokens: int, top_k: int) -> Any:
  return np.zeros((ranks * tokens, top_k), np.int32)


@contextlib.contextmanager
def finding(folder: pathlib.Path, compiling: Callable[[], bool]) -> Iterator[None]:
  """The bench loads programs from the folder, and takes the groups as they come."""

  def compile_group(mesh: Any, group: cells.Group, *_: Any) -> programs.Programs:
    whole = pickle.loads((folder / name_of(group)).read_bytes())
    devices = list(mesh.devices.flat)

    def load(saved: Any) -> Any:
      return serialize_executable.deserialize_and_load(*saved, execution_devices=devices)

    with futures.ThreadPoolExecutor() as pool:
      loaded = dict(zip(whole, pool.map(load, whole.values()), strict=True))
    scalars = loaded.pop(programs._SCALARS)
    return programs.Programs(loaded, scalars, programs._calls(group))

  def choose(*arguments: Any, **options: Any) -> "Arriving":
    return Arriving(cells.choose(*arguments, **options), folder, compiling)

  with (
    mock.patch.object(command, "choose", choose),
    mock.patch.object(command, "compile_group", compile_group),
  ):
    yield


class Arriving(dict[cells.Group, Sequence[cells.Cell]]):
  """Groups in the order in which their programs are there, while others are compiled."""

  def __init__(
    self,
    groups: dict[cells.Group, list[cells.Cell]],
    folder: pathlib.Path,
    compiling: Callable[[], bool],
  ):
    super().__init__(groups)
    self.folder, self.compiling = folder, compiling

  def items(self) -> Any:
    left = dict(super().items())
    while left:
      last = not self.compiling()
      for group in list(left):
        failed = self.folder / f"{name_of(group)}.{_FAILED}"
        if failed.exists():
          print(f"{group}: {failed.read_text()[:200]}", flush=True)
          del left[group]
        elif (self.folder / name_of(group)).exists():
          yield group, left.pop(group)
      if last and left:
        print(f"nothing compiles any more; see {self.folder}/worker_*.log: {list(left)}")
        return
      time.sleep(0.2)


def name_of(group: cells.Group) -> str:
  return "_".join(map(str, group))


def write(path: pathlib.Path, data: bytes) -> None:
  """Whole, or not at all."""
  part = path.parent / f"{path.name}.part"
  part.write_bytes(data)
  part.rename(path)


if __name__ == "__main__":
  raise SystemExit(main())
