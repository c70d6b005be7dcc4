"""Recommend replica slots for a recorded trace: imbalance, and time saved a step.

recommend runs/tiny_moe/trace
recommend runs/trace --device h200 --model Qwen3-235B
recommend runs/trace --model 2048x1408x60x4      D, F, experts and experts a token

Plans the recorded loads again with more and more slots. Imbalance and copies are what the layer
would reach; times are predicted from the device's constants.
"""

import argparse
import dataclasses
import json
from typing import Any

import numpy as np

from ultraep_jax.commands.simulate import add_model, model_of, over_nodes
from ultraep_jax.devices import known
from ultraep_jax.devices.device import Device
from ultraep_jax.planning.exact import slots_that_suffice
from ultraep_jax.simulate.replay import replay, trace_setting
from ultraep_jax.tables import table
from ultraep_jax.tools.arguments import positive
from ultraep_jax.tools.errors import refused
from ultraep_jax.tools.progress import progress
from ultraep_jax.trace.reader import Trace, read

_COPY_BYTES = 2  # of a weight
_NEAR = 0.01  # of the best time: fewer slots are taken then


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """The trace, and what it does not say."""
  add = parser.add_argument
  add("trace", metavar="DIR", help="folder of the trace")
  add("--device", help="its description, by name or file (that of the GPUs here, else h200)")
  add(
    "--portable",
    action="store_true",
    help="the layer in plain JAX, as always for devices that cannot run the kernels",
  )
  add_model(parser, "as the trace says")
  add("--prefill", action="store_true", help="forward pass alone")
  add(
    "--records",
    type=positive,
    default=64,
    help="layers to plan at most, evenly chosen (%(default)s)",
  )
  add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
  """Plans with each number of slots and prints what they bring."""
  try:
    trace = read(args.trace)
    device = Device.load(args.device) if args.device else known.resolve() or Device.load("h200")
    device = device.running(kernels=not args.portable)
    shape, notes = model_of(trace, args.model)
    part = trace[_chosen(trace, args.records)]
    domain = trace.config.domain_of(trace.manifest.num_ranks)
    changes = {"domain_size": domain, "training": not args.prefill}
    setting = trace_setting(part, shape, device, **changes)
    setting, of_nodes = over_nodes(setting)
    notes += of_nodes
    rows = []
    for slots in progress(_slots(trace, domain), what="plan", unit="slots"):
      with_slots = dataclasses.replace(setting, replica_slots=slots)
      rows.append(_row(part, slots, replay(part, with_slots, ("none", "quota (time)", "quota"))))
  except (ValueError, OSError) as error:
    raise refused(error, args, {"device": ("--device",)}) from None
  # Groups of ranks, each with its tokens, work at the same time.
  share = len(np.unique(trace.step_N)) * len(np.unique(trace.group_N)) / max(len(trace), 1)
  for row in rows:
    row["saved_ms_a_step"] = row.pop("saved_ms_a_layer") / share
    gradient_bytes = 0 if args.prefill else _COPY_BYTES
    row["memory_mb"] = row["slots"] * shape.expert_params * 1e-6 * (_COPY_BYTES + gradient_bytes)
  advice = _advice(rows, device.name, trace.manifest.config.get("strategy", "quota"))
  if args.json:
    about = {"device": device.name, "layer": device.layer, "notes": notes}
    print(json.dumps({**about, "slots": rows, "advice": advice}, indent=2))
  else:
    print(_text(trace, len(part), device, rows, [*notes, advice]))
  return 0


def _chosen(trace: Trace, most: int) -> np.ndarray:
  """A mask of the records of evenly chosen steps, of one at least."""
  steps, step_N = np.unique(trace.step_N, return_inverse=True)
  of_step = max(1, -(-len(trace) // max(len(steps), 1)))
  stride = max(1, -(-len(steps) // max(most // of_step, 1)))
  return step_N % stride == 0


def _slots(trace: Trace, domain: int) -> list[int]:
  """0, 1, 2, 4, …, and as many as make every load even."""
  manifest = trace.manifest
  most = slots_that_suffice(manifest.num_experts // manifest.num_ranks * domain, domain)
  powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
  return [0, *powers, most]


def _row(trace: Trace, slots: int, outcomes: dict[str, Any]) -> dict[str, Any]:
  none, timed, quota = (outcomes[name] for name in ("none", "quota (time)", "quota"))
  timed = timed if slots else none  # the program plans nothing then
  return {
    "slots": slots,
    "imbalance_mean": float(quota.imbalance.mean()),
    "imbalance_worst": float(quota.imbalance.max()),
    "copies": float(quota.replicas.mean()),
    "layer_ms": 1e3 * float(timed.seconds.mean()),
    "saved_ms_a_layer": 1e3 * float((none.seconds - timed.seconds).mean()),
  }


def _advice(rows: list[dict[str, Any]], device: str, recorded: str) -> str:
  best = min(row["layer_ms"] for row in rows)
  chosen = next(row for row in rows if row["layer_ms"] <= best * (1 + _NEAR))
  if not chosen["slots"]:
    return f'at these sizes no copies save time on {device}: strategy="none" is the fastest'
  by_quota = "" if recorded == "quota" else 'strategy="quota", '
  return (
    f"{by_quota}replica_slots={chosen['slots']}: imbalance {rows[0]['imbalance_mean']:.2f} → "
    f"{chosen['imbalance_mean']:.2f}, about {chosen['saved_ms_a_step']:.2f} ms saved a step on "
    f"{device}"
  )


def _text(
  trace: Trace, planned: int, device: Device, rows: list[dict[str, Any]], notes: list[str]
) -> str:
  manifest = trace.manifest
  title = (
    f"{manifest.name}: {manifest.num_ranks} ranks, {manifest.num_experts} experts; {planned} of "
    f"{len(trace)} records planned, recorded with {manifest.replica_slots} slots\n"
    f"times predicted for {device.name} (--device), {device.layer}"
  )
  header = ["slots", "imbalance", "worst", "copies", "layer ms", "ms saved a step", "MB a rank"]
  names = (
    "slots",
    "imbalance_mean",
    "imbalance_worst",
    "copies",
    "layer_ms",
    "saved_ms_a_step",
    "memory_mb",
  )
  lines = [title, "", table(header, [[row[name] for name in names] for row in rows]), ""]
  return "\n".join([*lines, *(f"note: {note}" for note in notes[:-1]), f"advice: {notes[-1]}"])
