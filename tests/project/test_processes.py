"""Programs in one process a device: they work together, print once and fail together."""

import argparse
import json
import time

import jax
import kept_programs
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ultraep_jax.bench.layer import command as layer
from ultraep_jax.tools import processes


def second_fails(args: argparse.Namespace) -> int:
  print(f"{jax.process_index()} of {args.processes}", flush=True)
  if jax.process_index() == 1:
    raise RuntimeError("planted")
  time.sleep(600)
  return 0


def keeps_programs(args: argparse.Namespace) -> int:
  kept_programs.keep_in_every_process()
  return layer.run(args)


@pytest.fixture
def one_device_each(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
  monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


def test_arrays_come_back_as_they_were():
  sharding = NamedSharding(jax.make_mesh((8,), ("expert",)), P("expert"))
  tree = {"a": np.arange(48, dtype=np.float32).reshape(16, 3), "b": [np.arange(8)[::-1].copy()]}
  arrays = processes.put(tree, sharding)
  assert [leaf.sharding for leaf in jax.tree.leaves(arrays)] == [sharding] * 2
  jax.tree.map(np.testing.assert_array_equal, processes.gather(arrays), tree)


def test_one_process_is_this_one():
  parser = argparse.ArgumentParser()
  processes.add_argument(parser)
  args = parser.parse_args([])
  assert processes.run(lambda seen: 7 if seen is args else 0, args) == 7


@pytest.mark.multiprocess
def test_processes_end_when_one_fails(capfd, one_device_each):
  start = time.monotonic()
  assert processes.run(second_fails, argparse.Namespace(processes=2)) == 1
  assert time.monotonic() - start < 60
  out, errors = capfd.readouterr()
  assert "RuntimeError: planted" in errors and "1 of 2" not in out


@pytest.mark.slow
@pytest.mark.multiprocess
def test_bench_of_a_layer_in_two_processes(tmp_path, capfd, one_device_each, monkeypatch):
  """Of loads that only a plan that both agree on makes equal."""
  flags = "--shapes qwen3-235b --scale 128 --experts 8 --top-k 2 --tokens 64 --steps 2 --slots 4"
  flags += " --window 3 --calls 2 --repeats 2 --variants quota --ratios 1.7"
  flags += f" --passes forward --json {tmp_path / 'times.json'}"
  monkeypatch.setattr(layer, "run", keeps_programs)  # here alone: the processes import it anew
  assert layer.main([*flags.split(), "--processes", "2"]) == 0
  results = json.loads((tmp_path / "times.json").read_text())
  assert results["device"] == "2 x cpu"
  (row,) = results["rows"]
  assert row["imbalance_before"] == pytest.approx(1.7, abs=0.03)
  assert row["imbalance_after"] == row["bound"] == 1
  out = capfd.readouterr().out
  lines = [line for line in out.splitlines() if line.lstrip().startswith(("jax", "qwen3"))]
  assert len(lines) == 2, out  # each once
