"""Many ranks, or several hosts: the whole layer, forward and every gradient, against a dense one.

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
  first, second = run_pair(32, "64:auto")
  for result in (first, second):
    assert result["error"] < 1e-6 and result["replicas"] > 8
    assert result["imbalance_before"] == pytest.approx(4.0, abs=0.01)
    assert result["imbalance_after"] == pytest.approx(result["imbalance_floor"], abs=0.005)
    assert result["imbalance_after"] < 1.01


def test_two_hosts(tmp_path):
  """Copies stay on a host, and tokens cross between them once a node."""
  for result in run_pair(4, "8:auto", prefix=other_host(tmp_path)):
    assert result["error"] < 1e-6 and result["replicas"] > 0
    assert result["imbalance_after"] < result["imbalance_before"]
    assert result["imbalance_floor"] > 1.2  # a host has more than its share


def run_pair(devices: int, case: str, prefix: tuple[str, ...] = ()) -> list[dict[str, float]]:
  """What two processes of so many devices print, each with the error of its own part."""
  port = free_port()
  pair = [start(devices, port, 2, i, case, prefix=prefix * i) for i in range(2)]
  first, second = map(results, pair)
  assert first | {"error": 0} == second | {"error": 0}
  return [first, second]
