"""Predict imbalance and throughput of strategies for a model, its routing and a machine.

simulate --model DeepSeek-V3 --device gb200 --traffic drifting       generated loads
simulate --trace runs/tiny_moe/trace --device h200                   a recorded run's
simulate --loads recorded.npy --ranks 64                             or [step, layer, G, E]
simulate --model 2048x1408x60x4 --ranks 4                            a model of your sizes

Rows and copies are the layer's own for the same loads. Times are predicted from constants of the
device; --verbose prints each with its source.
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

import numpy as np

from ultraep_jax.devices.device import Device
from ultraep_jax.files import check_output, read_array, write_text
from ultraep_jax.simulate.balancers import NAMES
from ultraep_jax.simulate.cost import Setting
from ultraep_jax.simulate.models import MODELS, ModelShape
from ultraep_jax.simulate.replay import recorded_shape, replay, tokens_of, trace_setting
from ultraep_jax.simulate.run import Outcome, simulate
from ultraep_jax.simulate.shapes import NAMES as MODEL_NAMES
from ultraep_jax.simulate.shapes import SIZES, model_named
from ultraep_jax.simulate.text import PARTS, conclusions, constants, summary, to_json
from ultraep_jax.simulate.traffic import TRAFFIC, Traffic, generate_loads, imbalance_range
from ultraep_jax.tables import table
from ultraep_jax.tools.arguments import factor, largest_divisor, natural, nonnegative, positive
from ultraep_jax.tools.errors import UsageError, refused
from ultraep_jax.tools.outputs import check_no_input
from ultraep_jax.tools.progress import progress
from ultraep_jax.trace.reader import Trace, read
from ultraep_jax.workloads import check_sizes, highest_zipf_ratio

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
# The options that what a check names comes from.
_OPTIONS = {
  "num_ranks": ("--ranks",),
  "domain_size": ("--domain",),
  "replica_slots": ("--slots",),
  "capacity_factor": ("--capacity-factor",),
  "sizes": ("--model", "--ranks", "--tokens"),
  **{name: (f"--{name}",) for name in ("device", "tokens", "target", *_SHAPE)},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the command's options."""
  add_model(parser, f"the trace's, else {_MODEL}")
  parser.add_argument(
    "--device", default=_DEVICE, help="its description, by name or file (%(default)s)"
  )
  parser.add_argument(
    "--portable",
    action="store_true",
    help="the layer in plain JAX, as always for devices that cannot run the kernels",
  )
  parser.add_argument(
    "--ranks",
    type=positive,
    help="ranks of an expert group (the loads', or as many as fit a domain)",
  )
  parser.add_argument(
    "--domain", type=positive, help="ranks with fast links (default: the device's)"
  )
  parser.add_argument("--tokens", type=positive, help="tokens of a rank (the loads', or 8192)")
  parser.add_argument("--slots", type=natural, help="replica slots of a rank (2)")
  parser.add_argument("--prefill", action="store_true", help="forward pass alone")
  parser.add_argument("--capacity-factor", type=factor, help="rows of a buffer over tokens * K")
  parser.add_argument("--traffic", choices=sorted(TRAFFIC), help="generated loads (%(default)s)")
  for name in _SHAPE:
    kind = factor if name == "imbalance" else nonnegative
    parser.add_argument(f"--{name}", type=kind, help=f"{name} of the traffic, instead")
  recorded = parser.add_mutually_exclusive_group()
  recorded.add_argument(
    "--trace", metavar="DIR", help="a trace's loads instead, and its ranks, experts, slots, target"
  )
  recorded.add_argument(
    "--loads", type=pathlib.Path, help="recorded loads, .npy [step, layer, G, E], instead"
  )
  parser.add_argument("--strategies", nargs="+", default=_STRATEGIES)
  parser.add_argument(
    "--period", type=positive, default=20, help="batches between EPLB's placements"
  )
  parser.add_argument("--target", type=factor, help="quota stops at this imbalance (1.01)")
  parser.add_argument("--steps", type=positive, help="microbatches after the first period")
  parser.add_argument("--layers", type=positive, help="layers that are simulated")
  parser.add_argument("--seeds", type=positive, help="independent runs, for the bands")
  parser.set_defaults(**_OF_TRAFFIC)
  parser.add_argument("--verbose", action="store_true", help="print the device's constants too")
  parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
  parser.add_argument("--out", type=pathlib.Path, help="write the JSON to this file too")


def add_model(parser: argparse.ArgumentParser, otherwise: str) -> None:
  """Adds ``--model``."""
  parser.add_argument(
    "--model",
    type=_model,
    metavar="NAME",
    help=f"{', '.join(MODEL_NAMES)}, or sizes as {SIZES} ({otherwise})",
  )


def _model(text: str) -> ModelShape:
  try:
    return model_named(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
  """Simulates and prints."""
  check_output(args.out)
  described = args.device if args.device not in Device.names() else None
  check_no_input("--out", args.out, (args.trace, args.loads, described))
  _check_options(args)
  try:
    trace = None if args.trace is None else read(args.trace)
    loads = None if args.loads is None else read_array(args.loads)
    if loads is not None and loads.ndim not in (3, 4):
      raise ValueError(f"loads: expected [step, layer, G, E] or without G, got {list(loads.shape)}")
    setting, notes = _setting(args, trace, loads)
    if trace is not None or loads is not None:
      runs = [_recorded(args, setting, trace, loads)]
    else:
      traffics, of_traffic = _traffic(args, setting)
      notes += of_traffic
      runs = _generated(args, setting, traffics)
  except (ValueError, TypeError, OSError) as error:
    raise refused(error, args, _OPTIONS) from None
  result = [summary(name, runs) for name in runs[0]]
  notes += conclusions(result, setting)
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
  model = args.model or MODELS[_MODEL]
  given = {
    "num_ranks": _ranks(args, trace, loads),
    "domain_size": args.domain,
    "tokens": args.tokens if trace is None and loads is None else None,
    "replica_slots": args.slots,
    "training": not args.prefill,
    "capacity_factor": args.capacity_factor,
  }
  given = {name: value for name, value in given.items() if value is not None}
  if trace is not None:
    shape, notes = model_of(trace, args.model)
    setting = trace_setting(trace, shape, device, **given)
    _check_tokens(args, setting.tokens)
    return setting, notes
  notes, of_device = unknown_parts(model), int(device["domain_size"])
  if loads is not None and (experts := loads.shape[-1]) not in (0, model.num_experts):
    raise UsageError(
      f"--model: expected a model of {experts} experts, as {args.loads} has, got {model.name} of "
      f"{model.num_experts}; DxFx{experts}xTOP_K takes any sizes"
    )
  ranks = given.get("num_ranks")
  if ranks is None:  # the most ranks of a domain that the experts can be dealt out to
    ranks = largest_divisor(model.num_experts, of_device)
    if loads is not None:
      notes.append(f"the loads do not say of how many ranks they are: {ranks} assumed (--ranks)")
  sizes = {"num_ranks": ranks, "domain_size": largest_divisor(ranks, of_device), **given}
  if loads is not None and loads.dtype.kind in "iu":
    per_rank = loads.sum(axis=-1) / (1 if loads.ndim == 4 else ranks)
    sizes["tokens"] = tokens_of(per_rank, model.top_k)
    _check_tokens(args, sizes["tokens"])
  return Setting(model=model, device=device, **sizes), notes


def _ranks(args: argparse.Namespace, trace: Trace | None, loads: np.ndarray | None) -> int | None:
  """Those of what is recorded, if it says them, or those given."""
  if trace is not None:
    recorded = trace.manifest.num_ranks
  else:
    recorded = loads.shape[2] if loads is not None and loads.ndim == 4 else None
  if None not in (recorded, args.ranks) and recorded != args.ranks:
    path = args.trace or args.loads
    raise UsageError(f"--ranks: expected {recorded}, as {path} has, got {args.ranks}")
  return recorded or args.ranks


def _check_tokens(args: argparse.Namespace, recorded: int) -> None:
  """Refuses others than recorded loads have: times would be of loads that are not there."""
  if args.tokens not in (None, recorded):
    path = args.trace or args.loads
    raise UsageError(f"--tokens: expected {recorded}, as {path} has, got {args.tokens}")


def model_of(trace: Trace, named: ModelShape | None) -> tuple[ModelShape, list[str]]:
  """The widths that a trace's layers have, or those of the model named; and what is assumed.

  Raises:
    UsageError: neither the trace nor a name says them.
  """
  model = named or recorded_shape(trace)
  if model is None:
    raise UsageError(
      f"--model: expected one of {', '.join(MODEL_NAMES)}, or sizes as {SIZES}, as the trace does "
      'not say how wide its layers are; got none. Recorder(metadata={"model": {"embed_dim": …, '
      '"expert_dim": …, "top_k": …}}) records it'
    )
  notes, experts = unknown_parts(model), trace.manifest.num_experts
  if model.num_experts != experts:
    notes.append(
      f"{model.name} has {model.num_experts} experts, the trace {experts}: widths are assumed"
    )
  return model, notes


def unknown_parts(model: ModelShape) -> list[str]:
  """The note on what counts as 0, if anything does."""
  if not model.experts_alone:
    return []
  who = "the trace" if model.source == "the trace" else f"--model {model.name}"
  return [f"{who} says nothing of attention and other layers: they count as 0"]


def _traffic(args: argparse.Namespace, setting: Setting) -> tuple[list[Traffic], list[str]]:
  """The loads to generate for each seed, and a note if ranks cannot be as uneven as by default."""
  given = {name: getattr(args, name) for name in _SHAPE if getattr(args, name) is not None}
  traffic, model = dataclasses.replace(TRAFFIC[args.traffic], **given), setting.model
  wanted = traffic.imbalance
  if args.imbalance is not None or wanted is None:
    return [traffic] * args.seeds, []
  check_sizes(model.num_experts, setting.num_ranks, setting.tokens, model.top_k)
  sizes = {"num_experts": model.num_experts, "num_ranks": setting.num_ranks, "top_k": model.top_k}
  steps = {"steps": args.period + args.steps, "layers": args.layers}
  ranges = [imbalance_range(seed, traffic, **sizes, **steps) for seed in range(args.seeds)]
  # What changes from step to step evens loads a little.
  highest = round(1 + 0.9 * (highest_zipf_ratio(**sizes) - 1), 2)
  lowest = max(least for least, _ in ranges)
  nearest = wanted if lowest <= wanted + 0.02 else math.ceil(100 * lowest) / 100
  nearest = min(nearest, highest)
  found = [max(min(max(nearest, least - 0.01), most), 1.0) for least, most in ranges]
  traffics = [dataclasses.replace(traffic, imbalance=each) for each in found]
  reached = " to ".join(dict.fromkeys(f"{round(each, 2):g}" for each in (min(found), max(found))))
  if reached == f"{wanted:g}":
    return traffics, []
  why = (
    f"these ranks and experts cannot reach the {wanted:g} of {args.traffic} traffic"
    if min(found) < wanted
    else f"these sizes, drift and noise are not as even as the {wanted:g} of {args.traffic} traffic"
  )
  return traffics, [f"imbalance {reached} (--imbalance): {why}"]


def _check_options(args: argparse.Namespace) -> None:
  """Refuses what ``argparse`` does not.

  Raises:
    UsageError: there is something.
  """
  for name in ("seeds", "steps", "layers", "period"):
    if getattr(args, name) > _MOST:
      raise UsageError(f"--{name}: expected at most {_MOST}, got {getattr(args, name)}")
  unknown = [name for name in args.strategies if name not in NAMES]
  if unknown:
    raise UsageError(f"--strategies: expected some of {', '.join(NAMES)}, got {unknown[0]!r}")


def _strategies(args: argparse.Namespace) -> list[str]:
  return list(dict.fromkeys([*args.strategies, "ideal"]))


_bar = functools.partial(progress, what="simulate", unit="step")


def _recorded(
  args: argparse.Namespace, setting: Setting, trace: Trace | None, loads: np.ndarray | None
) -> dict[str, Outcome]:
  if trace is not None:
    of_trace = {} if args.target is None else {"target": args.target}
    options = {"period": args.period, **of_trace}
    return replay(trace, setting, _strategies(args), progress=_bar, **options)
  assert loads is not None
  target = 1.01 if args.target is None else args.target
  return simulate(_bar(loads), setting, _strategies(args), target=target, period=args.period)


def _generated(
  args: argparse.Namespace, setting: Setting, traffics: list[Traffic]
) -> list[dict[str, Outcome]]:
  target, runs = 1.01 if args.target is None else args.target, []
  for seed, traffic in enumerate(traffics):
    made = generate_loads(
      seed,
      traffic,
      num_experts=setting.model.num_experts,
      num_ranks=setting.num_ranks,
      tokens=setting.tokens,
      top_k=setting.model.top_k,
      steps=args.period + args.steps,
      layers=args.layers,
    )
    outcomes = simulate(_bar(made), setting, _strategies(args), target=target, period=args.period)
    runs.append({name: outcome.after(args.period) for name, outcome in outcomes.items()})
  return runs


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
  header = ["strategy", "imbalance", "99 %", "% of ideal", "layer ms", *PARTS, "copies"]
  rows = [
    [
      row["strategy"],
      str(row["imbalance"]),
      row["imbalance_p99"],
      100 * row["share_of_ideal"].mean,
      1e3 * row["layer_seconds"],
      *(1e3 * row["parts_seconds"][part] for part in PARTS),
      row["copies"],
    ]
    for row in result
  ]
  said = [title, table(header, rows), "\n".join(f"note: {note}" for note in notes)]
  said += [constants(setting.device)] * args.verbose
  return "\n\n".join(part for part in said if part)
