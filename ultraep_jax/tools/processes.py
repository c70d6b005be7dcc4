"""One process for each GPU of this host, as ``jax.distributed`` jobs have, and arrays across them.

``run`` starts a program so; ``put`` and ``gather`` carry arrays between the host and a mesh, in one
process as in several.
"""

import argparse
import contextlib
import multiprocessing
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from ultraep_jax.tools.arguments import positive
from ultraep_jax.tools.errors import CommandError

Program = Callable[[argparse.Namespace], int]
_MOST = 64  # processes: no host has more GPUs


def add_argument(parser: argparse.ArgumentParser) -> None:
  """The option that ``run`` reads."""
  text = "run in N processes of one GPU each (on CPUs: of the virtual devices of one process)"
  parser.add_argument("--processes", type=_count, default=1, metavar="N", help=text)


def _count(text: str) -> int:
  count = positive(text)
  if count > _MOST:
    raise argparse.ArgumentTypeError(f"expected at most {_MOST}, got {count}")
  return count


def run(program: Program, args: argparse.Namespace) -> int:
  """Runs ``program(args)`` here, or in ``args.processes`` processes with a device each.

  All do the same work; the first one alone prints to standard output. As soon as one fails, the
  others are killed: they would wait for it. The caller must not have asked for devices before.

  Args:
    program: a function of a module, which returns an exit status.
    args: its arguments, with ``processes``.

  Returns:
    The exit status, 1 if a process failed.
  """
  if args.processes == 1:
    return program(args)
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    address = f"localhost:{listener.getsockname()[1]}"
  context = multiprocessing.get_context("spawn")  # a fork would share the parent's JAX
  workers = [
    context.Process(target=_work, args=(program, args, address, index), daemon=True)
    for index in range(args.processes)
  ]
  try:
    for worker in workers:
      worker.start()
    running = workers
    while running and not _failed(workers):
      connection.wait([worker.sentinel for worker in running])
      running = [worker for worker in running if worker.is_alive()]
    return int(_failed(workers))
  finally:
    for worker in workers:
      if worker.is_alive():
        worker.kill()  # SIGTERM would wait in JAX's preemption handler


def _failed(workers: Sequence[BaseProcess]) -> bool:
  return any(worker.exitcode for worker in workers)  # 0 is success, None still runs


def _work(program: Program, args: argparse.Namespace, address: str, index: int) -> None:
  threading.Thread(target=_end_with_parent, daemon=True).start()
  try:
    jax.distributed.initialize(address, args.processes, index, local_device_ids=[index])
    with (
      open(os.devnull, "w") as nowhere,
      contextlib.redirect_stdout(nowhere if index else sys.stdout),
    ):
      status = program(args)
  except CommandError as error:
    print(f"process {index}: {error}", file=sys.stderr)
    status = 1
  except BaseException:  # also an exit or Ctrl-C
    traceback.print_exc()
    status = 1
  sys.stdout.flush()
  if status:
    os._exit(status)  # JAX's own exit waits for the other processes, which may wait for this one


def _end_with_parent() -> None:
  parent = multiprocessing.parent_process()
  if parent is not None:
    connection.wait([parent.sentinel])
    os._exit(1)


def put(tree: Any, sharding: jax.sharding.Sharding) -> Any:
  """A pytree of host arrays, the same in every process, as arrays with this sharding."""

  def put_leaf(value: Any) -> jax.Array:
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

  return jax.tree.map(put_leaf, tree)


def gather(tree: Any) -> Any:
  """NumPy copies of a pytree of whole arrays; all processes must ask for them."""
  if jax.process_count() == 1:
    return jax.device_get(tree)
  return multihost_utils.process_allgather(tree, tiled=True)
