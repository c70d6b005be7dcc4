"""Predict imbalance and throughput of strategies for a model, its routing and a machine.

simulate --model DeepSeek-V3 --device gb200 --traffic drifting       generated loads
simulate --trace runs/tiny_moe/trace --device h200                   a recorded run's
simulate --loads recorded.npy --ranks 64                             or [step, layer, G, E]

Rows and copies are the layer's own for the same loads. Times are predicted from constants of the
device; --verbose prints each with its source.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
from typing import Any

import numpy as np

from ultraep_jax.devices.device import Device
from ultraep_jax.files import check_output, read_array, write_text
from ultraep_jax.simulate.balancers import NAMES
from ultraep_jax.simulate.cost import Setting
from ultraep_jax.simulate.models import MODELS, ModelShape
from ultraep_jax.simulate.replay import recorded_shape, replay, tokens_of, trace_setting
from ultraep_jax.simulate.run import Outcome, band, share_of_ideal, simulate
from ultraep_jax.simulate.text import constants, to_json
from ultraep_jax.simulate.traffic import TRAFFIC, Traffic, generate_loads
from ultraep_jax.tables import table
from ultraep_jax.tools.errors import CommandError
from ultraep_jax.tools.progress import progress
from ultraep_jax.trace.reader import Trace, read

_STRATEGIES = ("none", "eplb", "eplb+", "quota", "quota (time)")
_MOST = 100_000  # steps, layers, runs
_MODEL, _DEVICE = "Qwen3-235B", "h200"
_SHAPE = ("imbalance", "drift", "noise", "bursts")
# Options of generated loads alone, and their defaults.
_OF_TRAFFIC: dict[str, Any] = {
  "traffic": "drifting",
  **dict.fromkeys(_SHAPE),
  "steps": 40,
  "layers": 2,
  "seeds": 3,
}
_PARTS = ("plan", "copy", "exchange", "matmul", "reduce", "rest", "move")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the command's options."""
  parser.add_argument(
    "--model", choices=sorted(MODELS), help=f"its widths (the trace's, else {_MODEL})"
  )
  parser.add_argument(
    "--device", default=_DEVICE, help="its description, by name or file (%(default)s)"
  )
  parser.add_argument(
    "--portable",
    action="store_true",
    help="the layer in plain JAX, as always for devices that cannot run the kernels",
  )
  parser.add_argument(
    "--ranks", type=int, help="ranks of an expert group (default: as many as fit a domain)"
  )
  parser.add_argument("--domain", type=int, help="ranks with fast links (default: the device's)")
  parser.add_argument("--tokens", type=int, help="tokens of a rank in a microbatch (8192)")
  parser.add_argument("--slots", type=int, help="replica slots of a rank (2)")
  parser.add_argument("--prefill", action="store_true", help="forward pass alone")
  parser.add_argument("--capacity-factor", type=float, help="rows of a buffer over tokens * K")
  parser.add_argument("--traffic", choices=sorted(TRAFFIC), help="generated loads (%(default)s)")
  for name in _SHAPE:
    parser.add_argument(f"--{name}", type=float, help=f"{name} of the traffic, instead")
  recorded = parser.add_mutually_exclusive_group()
  recorded.add_argument(
    "--trace", metavar="DIR", help="a trace's loads instead, and its ranks, experts, slots, target"
  )
  recorded.add_argument(
    "--loads", type=pathlib.Path, help="recorded loads, .npy [step, layer, G, E], instead"
  )
  parser.add_argument("--strategies", nargs="+", default=_STRATEGIES)
  parser.add_argument("--period", type=int, default=20, help="batches between EPLB's placements")
  parser.add_argument("--target", type=float, help="quota stops at this imbalance (1.01)")
  parser.add_argument("--steps", type=int, help="microbatches after the first period")
  parser.add_argument("--layers", type=int, help="layers that are simulated")
  parser.add_argument("--seeds", type=int, help="independent runs, for the bands")
  parser.set_defaults(**_OF_TRAFFIC)
  parser.add_argument("--verbose", action="store_true", help="print the device's constants too")
  parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
  parser.add_argument("--out", type=pathlib.Path, help="write the JSON to this file too")


def run(args: argparse.Namespace) -> int:
  """Simulates and prints."""
  check_output(args.out)
  try:
    trace = None if args.trace is None else read(args.trace)
    loads = None if args.loads is None else read_array(args.loads)
    if loads is not None and loads.ndim not in (3, 4):
      raise ValueError(f"loads: expected [step, layer, G, E] or without G, got {list(loads.shape)}")
    setting, notes = _setting(args, trace, loads)
    runs = _runs(args, setting, trace, loads)
  except (ValueError, TypeError, OSError) as error:
    raise CommandError(str(error)) from None
  result = [_summary(name, runs) for name in runs[0]]
  notes += _conclusions(result)
  data = to_json({"device": setting.device, "notes": notes, "strategies": result})
  if args.json:
    print(json.dumps(data, indent=1))
  else:
    print(_text(args, setting, result, notes))
  if args.out is not None:
    write_text(args.out, json.dumps(data, indent=1))
  return 0


def _setting(
  args: argparse.Namespace, trace: Trace | None, loads: np.ndarray | None
) -> tuple[Setting, list[str]]:
  """What is simulated, and what of it is assumed."""
  setting, notes = _one_node(args, trace, loads)
  setting, of_nodes = over_nodes(setting)
  unused = [f"--{name}" for name, value in _OF_TRAFFIC.items() if getattr(args, name) != value]
  if unused and (trace is not None or loads is not None):
    of_nodes.append(f"the loads are recorded: {', '.join(unused)} changed nothing")
  return setting, [*notes, *of_nodes]


def over_nodes(setting: Setting) -> tuple[Setting, list[str]]:
  """The setting as it runs where domains are nodes, and what is assumed then."""
  if setting.domain_size == setting.num_ranks:
    return setting, []
  of_nodes = dataclasses.replace(setting, device=setting.device.on_nodes())
  return of_nodes, ["on several nodes transfers are in plain JAX"]


def _one_node(
  args: argparse.Namespace, trace: Trace | None, loads: np.ndarray | None
) -> tuple[Setting, list[str]]:
  """The same, as if all ranks were on a node."""
  device = Device.load(args.device).running(kernels=not args.portable)
  model, notes = MODELS[args.model or _MODEL], []
  given = {
    "num_ranks": args.ranks,
    "domain_size": args.domain,
    "tokens": args.tokens,
    "replica_slots": args.slots,
    "training": not args.prefill,
    "capacity_factor": args.capacity_factor,
  }
  given = {name: value for name, value in given.items() if value is not None}
  if trace is not None:
    shape, notes = model_of(trace, args.model)
    return trace_setting(trace, shape, device, **given), notes
  ranks, domain = args.ranks, int(device["domain_size"])
  if ranks is None:  # the most ranks of a domain that the experts can be dealt out to
    ranks = max(r for r in range(1, domain + 1) if model.num_experts % r == 0)
  sizes = {"num_ranks": ranks, "domain_size": min(domain, ranks), **given}
  if loads is not None and "tokens" not in sizes and loads.dtype.kind in "iu":
    per_rank = loads.sum(axis=-1) / (1 if loads.ndim == 4 else ranks)
    sizes["tokens"] = tokens_of(per_rank, model.top_k)
  return Setting(model=model, device=device, **sizes), notes


def model_of(trace: Trace, name: str | None) -> tuple[ModelShape, list[str]]:
  """The widths that a trace's layers have, or those of the model named; and what is assumed.

  Raises:
    ValueError: neither the trace nor a name says them.
  """
  recorded = recorded_shape(trace)
  if name is None:
    if recorded is None:
      raise ValueError(
        f"--model: expected one of {', '.join(sorted(MODELS))}, as the trace does not say how wide "
        'its layers are; got none. Recorder(metadata={"model": {"embed_dim": …, "expert_dim": …, '
        '"top_k": …}}) records it'
      )
    return recorded, ["the trace says nothing of attention and other layers: they count as 0"]
  model, experts = MODELS[name], trace.manifest.num_experts
  if model.num_experts == experts:
    return model, []
  return model, [f"{name} has {model.num_experts} experts, the trace {experts}: widths are assumed"]


def _conclusions(result: list[dict[str, Any]]) -> list[str]:
  seconds = {row["strategy"]: row["layer_seconds"] for row in result}
  none = seconds.get("none")
  balanced = [seconds[name] for name in ("quota", "quota (time)") if name in seconds]
  if none is None or not balanced or min(balanced) <= none:
    return []
  return [
    f"at these sizes balancing takes {1e3 * (min(balanced) - none):.2f} ms a layer more than it "
    'saves: layers this small are faster with strategy="none"'
  ]


def _traffic(args: argparse.Namespace) -> Traffic:
  given = {name: getattr(args, name) for name in _SHAPE if getattr(args, name) is not None}
  return dataclasses.replace(TRAFFIC[args.traffic], **given)


def _runs(
  args: argparse.Namespace, setting: Setting, trace: Trace | None, loads: np.ndarray | None
) -> list[dict[str, Outcome]]:
  for name in ("seeds", "steps", "layers", "period"):
    value = getattr(args, name)
    if not 1 <= value <= _MOST:
      raise ValueError(f"{name}: expected at least 1 and at most {_MOST}, got {value}")
  strategies = list(dict.fromkeys([*args.strategies, "ideal"]))
  unknown = [name for name in strategies if name not in NAMES]
  if unknown:
    raise ValueError(f"strategies: expected some of {NAMES}, got {unknown}")
  options: dict[str, Any] = {"period": args.period}
  if args.target is not None or trace is None:
    options["target"] = 1.01 if args.target is None else args.target
  bar = functools.partial(progress, what="simulate", unit="step")
  if trace is not None:
    return [replay(trace, setting, strategies, progress=bar, **options)]
  if loads is not None:
    return [simulate(bar(loads), setting, strategies, **options)]
  runs = []
  for seed in range(args.seeds):
    made = generate_loads(
      seed,
      _traffic(args),
      num_experts=setting.model.num_experts,
      num_ranks=setting.num_ranks,
      tokens=setting.tokens,
      top_k=setting.model.top_k,
      steps=args.period + args.steps,
      layers=args.layers,
    )
    outcomes = simulate(bar(made), setting, strategies, **options)
    runs.append({name: outcome.after(args.period) for name, outcome in outcomes.items()})
  return runs


def _summary(name: str, runs: list[dict[str, Outcome]]) -> dict[str, object]:
  outcomes = [run[name] for run in runs]

  def mean(value) -> float:
    return float(np.mean([np.mean(value(outcome)) for outcome in outcomes]))

  parts = {
    part: mean(lambda o, part=part: getattr(o.forward, part) + getattr(o.backward, part))
    for part in _PARTS
  }
  return {
    "strategy": name,
    "imbalance": band([float(outcome.imbalance.mean()) for outcome in outcomes]),
    "imbalance_p99": mean(lambda o: np.quantile(o.imbalance, 0.99)),
    "share_of_ideal": band([share_of_ideal(run[name], run["ideal"]) for run in runs]),
    "layer_seconds": mean(lambda o: o.seconds),
    "parts_seconds": parts,
    "copies": mean(lambda o: o.replicas),
    "fan_out": mean(lambda o: o.fan_out),
    "remote_share": mean(lambda o: o.remote_share()),
  }


def _text(args: argparse.Namespace, setting: Setting, result: list[dict], notes: list[str]) -> str:
  kind = "training" if setting.training else "prefill"
  loads = args.trace or args.loads or f"{args.traffic} traffic"
  model = setting.model
  title = (
    f"{model.name}: {model.num_experts} experts, D {model.embed_dim}, F {model.expert_dim}, "
    f"K {model.top_k}, {kind}; loads: {loads}\n"
    f"predicted for {setting.device.name} (--device), {setting.device.layer}: "
    f"{setting.num_ranks} ranks in domains of {setting.domain_size}, {setting.tokens} tokens a "
    f"rank, {setting.replica_slots} slots"
  )
  header = ["strategy", "imbalance", "99 %", "% of ideal", "layer ms", *_PARTS, "copies"]
  rows = [
    [
      row["strategy"],
      str(row["imbalance"]),
      row["imbalance_p99"],
      100 * row["share_of_ideal"].mean,
      1e3 * row["layer_seconds"],
      *(1e3 * row["parts_seconds"][part] for part in _PARTS),
      row["copies"],
    ]
    for row in result
  ]
  said = [title, table(header, rows), "\n".join(f"note: {note}" for note in notes)]
  said += [constants(setting.device)] * args.verbose
  return "\n\n".join(part for part in said if part)
