"""Runs a program in one process for each GPU, of one host or of several.

  python examples/launch.py --processes 8 train.py --steps 100

On each of several hosts, with its number and where host 0 is:

  python examples/launch.py --hosts 4 --host 2 --coordinator node0:29400 --processes 8 train.py

Where Slurm starts a task for each GPU, which says all that:

  srun --ntasks-per-node=8 --gpus-per-node=8 python examples/launch.py train.py

Each process calls `jax.distributed.initialize`, then runs the program, which must not call it
again. Process 0 alone prints to standard output. As soon as a process fails, the others of its host
are killed; those of other hosts miss its heartbeat and end too. The exit status is then 1.
"""

import argparse
import dataclasses
import multiprocessing
import os
import pathlib
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess

import jax


@dataclasses.dataclass(frozen=True)
class Job:
  """What runs where.

  Attributes:
    command: the program, or the module behind ``-m``, and its arguments.
    is_module: it is a module.
    processes: of this host, one for each GPU; 0: this process is one that Slurm started.
    hosts: how many there are.
    host: this one's number, from 0.
    coordinator: ``host:port`` of host 0.
    heartbeat: seconds without a sign of life after which a process counts as dead.
  """

  command: tuple[str, ...]
  is_module: bool
  processes: int
  hosts: int
  host: int
  coordinator: str
  heartbeat: int


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the job's part on this host and returns its exit status."""
  job = parse(argv)
  if not job.processes:
    work(job)
    return 0
  context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
  workers = [context.Process(target=work, args=(job, index)) for index in range(job.processes)]
  try:
    for worker in workers:
      worker.start()
    pids = ", ".join(str(worker.pid) for worker in workers)
    say(f"host {job.host} of {job.hosts} runs a process for each of {job.processes} GPUs: {pids}")
    return watch(job, workers)
  finally:
    for worker in workers:
      if worker.is_alive():
        worker.kill()  # SIGTERM would wait in JAX's preemption handler


def parse(argv: Sequence[str] | None) -> Job:
  """The job that the command line describes; a wrong one ends the program with a message."""
  parser = argparse.ArgumentParser(
    prog="launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--processes", type=int, default=0, help="GPUs of this host (default: as Slurm says)")
  add("--hosts", type=int, default=1, help="hosts of the job (%(default)s)")
  add("--host", type=int, default=0, help="number of this host, from 0 (%(default)s)")
  add("--coordinator", metavar="ADDRESS:PORT", help="of host 0; any port that is free there")
  add("--heartbeat", type=int, default=30, help="seconds, at most 60 (%(default)s)")
  add("-m", action="store_true", dest="is_module", help="the program is a module")
  add("command", nargs=argparse.REMAINDER, metavar="PROGRAM ...", help="and its arguments")
  args = parser.parse_args(argv)
  if not args.command:
    parser.error("PROGRAM: expected one, got none")
  if args.processes < 0:
    parser.error(f"--processes: expected at least 1, got {args.processes}")
  if not args.processes and "SLURM_PROCID" not in os.environ:
    parser.error("--processes: expected the number of GPUs, as Slurm did not start this, got none")
  if args.hosts < 1:
    parser.error(f"--hosts: expected at least 1, got {args.hosts}")
  if not 0 <= args.host < args.hosts:
    parser.error(f"--host: expected 0 to {args.hosts - 1}, got {args.host}")
  if args.hosts > 1 and args.coordinator is None:
    parser.error("--coordinator: expected host 0's ADDRESS:PORT for several hosts, got none")
  if args.coordinator is not None and not is_address(args.coordinator):
    parser.error(f"--coordinator: expected ADDRESS:PORT, got {args.coordinator!r}")
  if not 1 <= args.heartbeat <= 60:
    parser.error(f"--heartbeat: expected 1 to 60 seconds, got {args.heartbeat}")
  values = vars(args) | {
    "command": tuple(args.command),
    "coordinator": args.coordinator or "localhost:29400",
  }
  return Job(**values)


def is_address(text: str) -> bool:
  """Whether it is ``host:port``."""
  host, _, port = text.rpartition(":")
  return bool(host) and port.isdecimal() and len(port) < 6 and 0 < int(port) < 2**16


def watch(job: Job, workers: Sequence[BaseProcess]) -> int:
  """Waits until all workers are done, or one has failed: 1 then, after saying which."""
  running = dict(enumerate(workers))
  while running:
    connection.wait([worker.sentinel for worker in running.values()])
    for index, worker in list(running.items()):
      if worker.is_alive():
        continue
      del running[index]
      if worker.exitcode:
        say(failure(job, index, worker.exitcode))
        return 1
  return 0


def failure(job: Job, index: int, exitcode: int) -> str:
  """What to tell of a worker that failed."""
  if exitcode < 0:
    how = f"was killed by {signal.Signals(-exitcode).name}"
  else:
    how = f"ended with status {exitcode}"
  text = f"process {job.host * job.processes + index} (device {index} of host {job.host}) {how}"
  text += "; the others of this host are ended"
  if job.hosts > 1:
    text += f", those of other hosts end within {job.heartbeat} s"
    text += "; if it lost another process, that one's host says why"
  return text


def work(job: Job, index: int | None = None) -> None:
  """One process: joins the others, then runs the program; does not return if that fails."""
  try:
    if index is None:  # Slurm's variables say the rest
      jax.distributed.initialize(heartbeat_timeout_seconds=job.heartbeat)
    else:
      threading.Thread(target=end_with_parent, daemon=True).start()
      jax.distributed.initialize(
        job.coordinator,
        job.hosts * job.processes,
        job.host * job.processes + index,
        local_device_ids=[index],
        heartbeat_timeout_seconds=job.heartbeat,
      )
    if jax.process_index():
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # also for libraries
    run(job)
    status = 0
  except SystemExit as stop:
    status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    if isinstance(stop.code, str):
      print(stop.code, file=sys.stderr)
  except BaseException:  # also Ctrl-C
    traceback.print_exc()
    status = 1
  sys.stdout.flush()
  sys.stderr.flush()
  if status:
    os._exit(status)  # JAX's own exit waits for the other processes, which may wait for this one


def run(job: Job) -> None:
  """The program as `python PROGRAM ...` runs it, or `python -m PROGRAM ...`."""
  name = job.command[0]
  sys.argv = list(job.command)
  if job.is_module:
    sys.path[0] = os.getcwd()
    runpy.run_module(name, run_name="__main__", alter_sys=True)
  else:
    sys.path[0] = str(pathlib.Path(name).resolve().parent)
    runpy.run_path(name, run_name="__main__")


def end_with_parent() -> None:
  """So that no process outlives a launcher that was killed."""
  parent = multiprocessing.parent_process()
  if parent is not None:
    connection.wait([parent.sentinel])
    os._exit(1)


def say(text: str) -> None:
  """A line that stands out among those of the program."""
  print(f"launch: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
  sys.exit(main())
