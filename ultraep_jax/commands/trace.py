"""Summarise a load trace, or import one from Megatron-LM.

trace show runs/trace [--json]
trace import router_traces runs/imported --experts 256
"""

import argparse
import functools
import json
from typing import Any

from ultraep_jax.config import BalanceConfig
from ultraep_jax.tables import table
from ultraep_jax.tools.arguments import natural, natural_to, positive
from ultraep_jax.tools.errors import refused
from ultraep_jax.tools.progress import progress
from ultraep_jax.trace.format import TraceError
from ultraep_jax.trace.megatron import MOST_EXPERT_BYTES, import_megatron
from ultraep_jax.trace.reader import Trace, read
from ultraep_jax.trace.summary import PERCENTILES, in_words, summarise

# The options that what a check names comes from.
_OPTIONS = {
  "num_ranks": ("--ranks",),
  "num_experts": ("--experts",),
  "replica_slots": ("--slots",),
  "domain_size": ("--domain",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """``show`` and ``import``."""
  actions = parser.add_subparsers(dest="action", required=True)
  show = actions.add_parser("show", help="print percentiles of the imbalance, by layer")
  show.add_argument("path", metavar="DIR", help="folder of the trace")
  bring = actions.add_parser(
    "import", help="make a trace of router_trace_rank*.jsonl, as Megatron-LM writes them"
  )
  bring.add_argument("source", metavar="FROM", help="folder of the files")
  bring.add_argument("path", metavar="TO", help="folder of the new trace")
  bring.add_argument("--experts", type=positive, required=True, help="experts of a layer")
  bring.add_argument(
    "--ranks", type=positive, help="ranks that share the experts (all files' ranks)"
  )
  bring.add_argument("--slots", type=natural, default=2, help="replica slots a rank (%(default)s)")
  bring.add_argument("--domain", type=positive, help="ranks of a domain of fast links (all)")
  bring.add_argument(
    "--expert-bytes",
    type=natural_to(MOST_EXPERT_BYTES),
    default=0,
    help="bytes of an expert's weights, if known",
  )
  for action in (show, bring):
    action.add_argument("--json", action="store_true", help="print JSON")
    action.set_defaults(parser=action)


def run(args: argparse.Namespace) -> int:
  """Prints the summary of a trace that is there or has just been made."""
  try:
    trace = read(args.path) if args.action == "show" else _import(args)
  except (TraceError, OSError, ValueError) as error:
    raise refused(error, args, _OPTIONS if args.action == "import" else {}) from None
  summary = summarise(trace)
  if args.json:
    about = {"name": trace.manifest.name, "metadata": trace.manifest.metadata}
    print(json.dumps({**about, **summary}, indent=2))
  else:
    print(_text(trace, summary))
  return 0


def _import(args: argparse.Namespace) -> Trace:
  config = BalanceConfig(replica_slots=args.slots, objective="balance", domain_size=args.domain)
  return import_megatron(
    args.source,
    args.path,
    num_experts=args.experts,
    num_ranks=args.ranks,
    config=config,
    expert_bytes=args.expert_bytes,
    progress=functools.partial(progress, what="import"),
  )


def _text(trace: Trace, summary: dict[str, Any]) -> str:
  manifest = trace.manifest
  lines = [
    f"{manifest.name}: {manifest.num_ranks} ranks, {manifest.num_experts} experts, "
    f"{manifest.replica_slots} replica slots a rank"
  ]
  lines += [f"left out: {problem}" for problem in trace.problems]
  lines += [
    f"{name.replace('_', ' ')}: {in_words(value)}" for name, value in manifest.metadata.items()
  ]
  if not len(trace):
    return "\n".join([*lines, "no records"])
  low, high = summary["steps"]
  lines.append(f"{summary['records']} records, steps {low} to {high}")
  if not manifest.measured:
    lines.append("after: as planned on import, not measured")
  head = ["median" if p == 50 else "worst" if p == 100 else f"p{p}" for p in PERCENTILES]
  layers = {"all layers": summary, **summary["layers"]}
  rows = [
    [name if side == "before" else "", side, *row[side].values()]
    for name, row in layers.items()
    for side in ("before", "after")
  ]
  lines.append(table(["busiest / mean rank", "", *head], rows, digits=3))
  lines.append(
    f"per record: {summary['replicas']:.1f} copies ({summary['relayed']:.1f} relayed), "
    f"{summary['replica_megabytes']:.3g} MB, {summary['remote_fraction']:.1%} of the assignments "
    "on another rank than their token's"
  )
  for name in ("more_than_one_round", "invalid_assignments", "off_plan"):
    if summary[name]:
      lines.append(f"{name.replace('_', ' ')}: {summary[name]}")
  lines += [f"advice (from the least even record): {line}" for line in summary["advice"]]
  return "\n".join(lines)
