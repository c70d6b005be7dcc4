"""The table of what runs on which cluster is what "auto" picks on such devices."""

import pathlib

import jax
import pytest
from fake_devices import Device, gpus

from pallas_kernels import support
from ultraep_jax import implementation

PAGE = pathlib.Path(__file__).parents[2] / "docs/your_cluster.md"
ROWS = {
  "choice of experts, plan, routing": ("choose", "plan", "route"),
  "matmuls": ("matmul",),
  "writing tokens that came to their rows": ("place",),
  "copies of weights": ("replicate",),
  "exchange of tokens": ("exchange",),
}


def processes(count: int, of_a_node: int, compute_capability: str) -> list[Device]:
  return [
    Device(compute_capability=compute_capability, id=i, process_index=i, slice_index=i // of_a_node)
    for i in range(count)
  ]


MACHINES = {
  "4 nodes of 8 H100": processes(32, 8, "9.0"),
  "one such node": processes(8, 8, "9.0"),
  "one NVL72": processes(72, 72, "10.0"),
  "2 A100": [Device(compute_capability="8.0", id=i) for i in range(2)],
}


def table() -> dict[str, dict[str, str]]:
  """The page's first table, by machine and row."""
  lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
  header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[:7])
  return {
    machine: {row[0]: row[column] for row in rows}
    for column, machine in enumerate(header)
    if column
  }


@pytest.mark.parametrize("machine", MACHINES)
def test_table(machine, monkeypatch):
  devices = MACHINES[machine]
  monkeypatch.setattr(jax, "devices", lambda: devices)
  monkeypatch.setattr(support, "nccl_version", lambda: (2, 29, 0))
  with gpus(devices[0].compute_capability):
    reasons = implementation.picks()
  found = {
    row: "kernels" if all(reasons[name] is None for name in names) else "plain JAX"
    for row, names in ROWS.items()
  }
  assert table()[machine] == found


def test_every_machine_is_in_it():
  assert list(table()) == list(MACHINES)
  assert sorted(sum(ROWS.values(), ())) == sorted(implementation.OPERATIONS)
