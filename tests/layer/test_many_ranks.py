"""EP 64 and 72: the whole layer, forward and every gradient, against a dense one.

In processes of their own, which have as many virtual devices.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from other_host import other_host
from ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
WORKER = pathlib.Path(__file__).parents[1] / "helpers" / "many_ranks_worker.py"


def start(devices: int, *arguments: object, prefix: tuple[str, ...] = ()) -> subprocess.Popen:
  flags = re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])
  return subprocess.Popen(
    [*prefix, sys.executable, str(WORKER), *map(str, arguments)],
    env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def results(worker: subprocess.Popen) -> dict[str, float]:
  try:
    out, errors = worker.communicate(timeout=550)
  finally:
    worker.kill()
  assert worker.returncode == 0, errors[-3000:]
  # Gloo prints there, too.
  (result,) = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
  return result


def test_72_ranks_with_domains_of_8():
  nodes = results(start(72, 0, 1, 0, "72:8"))
  assert nodes["error"] < 1e-6 and nodes["replicas"] > 8
  assert nodes["imbalance_before"] == pytest.approx(4.0, abs=0.01)
  assert nodes["imbalance_after"] == pytest.approx(nodes["imbalance_floor"], abs=0.005)
  assert nodes["imbalance_floor"] > 1.2  # a domain of 8 has more than its share


def test_64_ranks_of_two_processes():
  """With domains as JAX tells them: one, of a host."""
  port = free_port()
  pair = [start(32, port, 2, process, "64:auto") for process in range(2)]
  first, second = map(results, pair)
  assert first == second
  assert first["error"] < 1e-6 and first["replicas"] > 8
  assert first["imbalance_before"] == pytest.approx(4.0, abs=0.01)
  assert first["imbalance_after"] == pytest.approx(first["imbalance_floor"], abs=0.005)
  assert first["imbalance_after"] < 1.01


def test_two_hosts(tmp_path):
  """Copies stay on a host, and tokens cross between them once a node."""
  port, prefix = free_port(), other_host(tmp_path)
  pair = [start(4, port, 2, i, "8:auto", prefix=prefix * i) for i in range(2)]
  first, second = map(results, pair)
  assert first == second
  assert first["error"] < 1e-6 and first["replicas"] > 0
  assert first["imbalance_after"] < first["imbalance_before"]
  assert first["imbalance_floor"] > 1.2  # a host has more than its share
