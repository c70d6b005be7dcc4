"""Programs that two processes of four virtual devices run together."""

import contextlib
import os
import subprocess
import sys

from ports import free_port

CONNECT = """
import sys
import jax
port, process, *arguments = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 2, int(process))
"""


def run_on_two_processes(program: str, *arguments: object) -> None:
  """Runs a program that finds its ``arguments`` as strings, and jax ready; both must succeed."""
  port = free_port()
  env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
  with contextlib.ExitStack() as stack:
    workers = []
    for process in range(2):
      command = [sys.executable, "-c", CONNECT + program, port, process, *arguments]
      worker = subprocess.Popen(list(map(str, command)), env=env, stderr=subprocess.PIPE, text=True)
      stack.callback(worker.communicate)
      stack.callback(worker.kill)
      workers.append(worker)
    for worker in workers:
      _, errors = worker.communicate(timeout=200)
      assert worker.returncode == 0, errors[-3000:]
