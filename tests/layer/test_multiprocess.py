"""Two processes of four devices give the numbers of one process of eight, and fail together."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import multiprocess_worker
import numpy as np
import pytest
from ports import free_port

pytestmark = pytest.mark.multiprocess
WORKER = pathlib.Path(__file__).parents[1] / "helpers" / "multiprocess_worker.py"


@pytest.fixture
def start():
  """Starts workers, and leaves none behind."""
  with contextlib.ExitStack() as stack:

    def begin(devices: int, *args: object) -> subprocess.Popen:
      worker = stack.enter_context(popen(devices, *args))
      stack.callback(worker.kill)  # SIGTERM would wait in the preemption handler
      return worker

    yield begin


def popen(devices: int, *args: object) -> subprocess.Popen:
  flags = re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])
  env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
  return subprocess.Popen(
    [sys.executable, str(WORKER), *map(str, args)],
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(worker: subprocess.Popen, timeout: float) -> tuple[int, str]:
  try:
    _, errors = worker.communicate(timeout=timeout)
  except subprocess.TimeoutExpired:
    worker.kill()
    _, errors = worker.communicate()
    pytest.fail(f"worker still ran after {timeout} s:\n{errors[-3000:]}")
  return worker.returncode, errors


def test_two_processes_equal_one_and_end_together(start, tmp_path):
  port = free_port()
  multiprocess_worker.run(tmp_path / "one.npz", 1)  # on the eight devices of this process
  pair = [start(4, port, 2, i, tmp_path / f"two{i}.npz", 10**6) for i in range(2)]
  for worker in pair:
    while "step 1" not in (line := worker.stdout.readline()):
      assert line, worker.communicate()[1][-3000:]
  expected = np.load(tmp_path / "one.npz")
  assert len(expected.files) > 10
  for i in range(2):
    got = np.load(tmp_path / f"two{i}.npz")
    for name in expected.files:
      # Across processes gloo sums weight gradients over `data` as one process does: two terms.
      np.testing.assert_array_equal(got[name], expected[name])

  survivor, victim = pair
  victim.send_signal(signal.SIGKILL)
  killed = time.monotonic()
  # Keep reading so that the survivor cannot block on a full pipe.
  code, errors = finish(survivor, 60)
  victim.communicate()
  assert time.monotonic() - killed < 60
  assert code != 0
  lowered = errors.lower()
  assert any(word in lowered for word in ("connection", "gloo", "heartbeat", "task")), errors[
    -3000:
  ]
