"""Plan a load matrix: which experts to copy where, and what that does to the busiest rank.

  plan examples/loads.csv                [G, E] assignments of each rank to each expert
  plan loads.npy --ranks 8               or [E] assignments to each expert, from all ranks alike
  plan --ranks 64 --experts 256 --ratio 3 --slots 2            or a generated workload
  plan loads.json --objective time --width 4096 --inner 1536   weigh copies against their cost

Files: .npy, .npz (the array load_GE, or the only one), .json (nested lists) and .csv.
"""

import argparse
import json
import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ultraep_jax import advice, strategies, testing
from ultraep_jax.config import BalanceConfig
from ultraep_jax.devices.device import Device
from ultraep_jax.files import read_array, read_json, regular
from ultraep_jax.planning.capacity import row_capacity
from ultraep_jax.planning.cost import cost_on
from ultraep_jax.planning.relay import depth, egress_per_rank, transfer_tree
from ultraep_jax.tables import table
from ultraep_jax.tools.errors import CommandError
from ultraep_jax.types import ExpertWeights, Plan, PlanCost

_EXPERTS = 64
_OF_RATIO = {"zipf": testing.zipf_loads, "flat": testing.flat_loads}
_WORKLOADS = (*_OF_RATIO, "balanced", "all-to-one", *testing.ADVERSARIAL_KINDS)
# Options of generated loads alone, and their defaults.
_GENERATED = {"tokens": 4096, "top_k": 8, "workload": "zipf", "ratio": 2.0, "seed": 0}
_DEVICE = "h200"
_TABLE_ROWS = 72
_MOST_BYTES = 2**30  # of a file of loads


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """The loads, how to plan them and how to print the answer."""
  add = parser.add_argument
  add("loads", nargs="?", type=pathlib.Path, metavar="FILE", help="loads; without: generated")
  add("--ranks", type=int, help="ranks (8, or as in the file)")
  add("--experts", type=int, help=f"experts ({_EXPERTS}, or as in the file)")
  add("--tokens", type=int, help="generated: tokens a rank (%(default)s)")
  add("--top-k", type=int, help="generated: experts a token (%(default)s)")
  add("--workload", choices=_WORKLOADS, help="generated: kind (%(default)s)")
  add(
    "--ratio",
    type=float,
    help=f"generated, by {' and '.join(_OF_RATIO)}: busiest over mean rank (%(default)s)",
  )
  add("--seed", type=int, help="generated: seed (%(default)s)")
  add("--slots", type=int, default=2, help="replica slots a rank (%(default)s)")
  add("--strategy", default="quota", help="balancer (%(default)s)")
  add("--objective", choices=("balance", "time"), default="balance", help="(%(default)s)")
  add("--target", type=float, help="fewest copies that reach this, e.g. 1.01")
  add("--min-tokens", type=int, default=1, help="least assignments of a copy (%(default)s)")
  add("--domain", type=int, help="ranks of a domain of fast links (all)")
  add("--transfer", choices=("auto", "direct", "relay"), default="auto", help="(%(default)s)")
  add("--width", type=int, help="D, hidden width, for the bytes and the cost of a copy")
  add("--inner", type=int, help="F, inner width of an expert, likewise")
  add("--device", help=f"has the costs of --objective time: its name or file ({_DEVICE})")
  add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(%(default)s)")
  add("--json", action="store_true", help="print JSON, with the whole plan")
  parser.set_defaults(**_GENERATED)


def run(args: argparse.Namespace) -> int:
  """Plans and prints."""
  try:
    _check_used(args)
    load_GE = _generated(args) if args.loads is None else _from_file(args)
    config = BalanceConfig(
      replica_slots=args.slots,
      strategy=args.strategy,
      objective=args.objective,
      target=args.target,
      min_tokens_per_replica=args.min_tokens,
      domain_size=args.domain,
      transfer=args.transfer,
    )
    if args.slots > load_GE.shape[1]:
      raise ValueError(f"--slots: expected at most {load_GE.shape[1]} experts, got {args.slots}")
    strategy = strategies.resolve(config.strategy)
    if strategy.reassign is not None:
      raise ValueError(
        f"strategy: {args.strategy!r} replaces the router's choice and plans nothing"
      )
    config.domain_of(len(load_GE))  # which not every strategy asks for
    weights = _expert(args)
    device = Device.load(args.device or _DEVICE) if config.objective == "time" else None
    cost = _cost(args, load_GE, device, weights, config)
    plan = strategy.plan(jnp.asarray(load_GE), config, cost)
    if device is not None and device.portable is None:  # plain JAX ignores the trees of copies
      parent_GS = transfer_tree(
        plan.replica_expert, num_experts=load_GE.shape[1], transfer="direct"
      )
      plan = plan._replace(parent=parent_GS)
  except (ValueError, TypeError, OSError) as error:
    raise CommandError(str(error)) from None
  copy_bytes = 0 if weights is None else weights.expert_size * jnp.dtype(args.dtype).itemsize
  answer = _answer(load_GE, plan, config, copy_bytes)
  if device is not None:
    answer["costs"] = f"{device.name}, {device.layer}"
  if args.loads is None:
    answer["generated"] = _generated_by(args)
  print(json.dumps(answer, indent=2) if args.json else _text(answer))
  return 0


def _check_used(args: argparse.Namespace) -> None:
  """Refuses options that would change nothing.

  Raises:
    ValueError: there are some.
  """
  given = [name for name, value in _GENERATED.items() if getattr(args, name) != value]
  if args.loads is not None and given:
    option = given[0].replace("_", "-")
    raise ValueError(f"--{option}: expected no FILE with it, which has its loads, got {args.loads}")
  if args.device is not None and args.objective != "time":
    raise ValueError(
      f"--device: expected --objective time with it, which weighs costs, got {args.objective}"
    )


def _generated(args: argparse.Namespace) -> np.ndarray:
  ranks = 8 if args.ranks is None else args.ranks
  experts = _EXPERTS if args.experts is None else args.experts
  sizes = (experts, ranks, args.tokens, args.top_k)
  if args.workload in _OF_RATIO:
    return _OF_RATIO[args.workload](args.seed, *sizes, args.ratio)
  if args.workload == "balanced":
    return testing.balanced_loads(args.seed, *sizes)
  if args.workload == "all-to-one":
    return testing.all_to_one_loads(*sizes)
  return testing.adversarial_loads(args.seed, *sizes, kind=args.workload)


def _generated_by(args: argparse.Namespace) -> str:
  """The workload, and those options that it depends on beside the sizes."""
  ratio = f", --ratio {args.ratio:g}" if args.workload in _OF_RATIO else ""
  seed = f", --seed {args.seed}" if args.workload != "all-to-one" else ""
  return f"{args.workload}{ratio}{seed}"


def _from_file(args: argparse.Namespace) -> np.ndarray:
  """A load matrix ``[G, E]`` int32.

  Raises:
    OSError: the file cannot be read.
    ValueError: it holds no loads, or of other numbers of ranks or experts than are given.
  """
  path, num_ranks, num_experts = args.loads, args.ranks, args.experts
  load = _read(path)
  shape = list(load.shape)
  if not load.size:
    raise ValueError(
      f"{path}: expected loads of at least one rank and one expert, got shape {shape}"
    )
  if load.dtype.kind not in "iuf" or not np.isfinite(load).all() or (load != np.floor(load)).any():
    raise ValueError(f"{path}: expected whole numbers, got {load.dtype} with others")
  least, most = float(load.min()), float(load.max())  # float16 could not be compared with 2**31
  if least < 0 or most >= 2**31:
    raise ValueError(f"{path}: expected loads in [0, 2**31), got {least:g} to {most:g}")
  load = load.astype(np.int64)
  if load.ndim == 1:
    if num_ranks is None or num_ranks < 1:
      raise ValueError(
        f"{path}: expected --ranks, to deal one row of loads to ranks, got {num_ranks or 'none'}"
      )
    if num_ranks > load.size:
      raise ValueError(f"{path}: --ranks: expected at most {load.size} experts, got {num_ranks}")
    # From every rank alike, the remainders dealt out in turn.
    deal = (np.arange(num_ranks)[:, None] + np.arange(load.size)) % num_ranks
    load = load // num_ranks + (deal < load % num_ranks)
  ranks = "G" if num_ranks is None else num_ranks
  experts = "E" if num_experts is None else num_experts
  if load.ndim != 2 or ranks not in ("G", len(load)) or experts not in ("E", load.shape[1]):
    wanted = f"[{ranks}, {experts}] or [{experts}]"
    raise ValueError(f"{path}: expected shape {wanted}, got {shape}")
  return load.astype(np.int32)


def _read(path: pathlib.Path) -> np.ndarray:
  readers = {".npy": read_array, ".npz": _read_npz, ".json": _read_lists, ".csv": _read_csv}
  suffix = path.suffix.lower()
  if suffix not in readers:
    raise ValueError(f"{path}: expected {', '.join(readers)}, got {path.suffix or 'no suffix'}")
  if regular(path).stat().st_size > _MOST_BYTES:
    raise ValueError(f"{path}: expected a file of loads, got one of more than 1 GiB")
  return readers[suffix](path)


def _read_npz(path: pathlib.Path) -> np.ndarray:
  try:
    with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
      names = ["load_GE"] if "load_GE" in file.files else file.files
      if len(names) != 1:
        raise ValueError(f"the array load_GE or a single one, got {names}")
      if any(member.file_size > _MOST_BYTES for member in file.zip.infolist()):
        raise ValueError("an array of more than 1 GiB")
      found = file[names[0]]
      if not isinstance(found, np.ndarray):  # a member that is no .npy file
        raise ValueError(f"no array in {names[0]}")
      return found
  except OSError:
    raise
  except Exception as error:  # zip files and the headers in them fail in many ways
    raise ValueError(f"{path}: expected loads in npz, got {error!s:.200}") from error


def _read_lists(path: pathlib.Path) -> np.ndarray:
  value = read_json(path)
  try:
    return np.array(value)
  except (ValueError, OverflowError) as error:
    raise ValueError(f"{path}: expected loads in json, got {error!s:.200}") from error


def _read_csv(path: pathlib.Path) -> np.ndarray:
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("error", UserWarning)
      # Some programs begin a file with a byte order mark.
      return np.loadtxt(path, delimiter=",", ndmin=1, encoding="utf-8-sig")
  except UserWarning:
    raise ValueError(f"{path}: expected loads in csv, got an empty file") from None
  except ValueError as error:
    raise ValueError(f"{path}: expected loads in csv: {error!s:.200}") from error


def _expert(args: argparse.Namespace) -> ExpertWeights | None:
  """The shapes of an expert's weights."""
  if (args.width is None) != (args.inner is None):
    raise ValueError("--width, --inner: expected both or none")
  if args.width is None:
    return None
  if min(args.width, args.inner) < 1:
    raise ValueError("--width, --inner: expected at least 1")
  up, down = (1, args.width, args.inner), (1, args.inner, args.width)
  shapes: Any = [jax.ShapeDtypeStruct(shape, args.dtype) for shape in (up, up, down)]
  return ExpertWeights(*shapes)


def _cost(
  args: argparse.Namespace,
  load_GE: np.ndarray,
  device: Device | None,
  weights: ExpertWeights | None,
  config: BalanceConfig,
) -> PlanCost | None:
  if device is None:
    return None
  if weights is None:
    raise ValueError("--objective time: expected --width and --inner, which say what copies cost")
  num_ranks = len(load_GE)
  capacity = max(row_capacity(int(load_GE.sum(axis=1).max()), 1, num_ranks, config), 1)
  domain = config.domain_of(num_ranks)
  return cost_on(device, jnp.dtype(args.dtype), weights, capacity, domain=domain).plan


def _answer(
  load_GE: np.ndarray, plan: Plan, config: BalanceConfig, copy_bytes: int
) -> dict[str, Any]:
  """What there is to say, as JSON values."""
  expert_GS, quota_EG, parent_GS = (np.asarray(leaf) for leaf in plan)
  num_ranks, num_experts = load_GE.shape
  per_rank = num_experts // num_ranks
  before_G, after_G = load_GE.sum(axis=0).reshape(num_ranks, per_rank).sum(axis=1), quota_EG.sum(0)
  home_EG = np.arange(num_experts)[:, None] // per_rank == np.arange(num_ranks)
  mean = before_G.mean()
  domain = config.domain_of(num_ranks)
  floor = -(-int(before_G.reshape(-1, domain).sum(axis=1).max()) // domain)
  total = max(int(load_GE.sum()), 1)
  rank, slot = np.nonzero(expert_GS >= 0)
  expert, parent = expert_GS[rank, slot], parent_GS[rank, slot]
  slots = expert_GS.shape[1]
  return {
    "advice": advice.of_load(load_GE, after_G, config, slots=slots),
    "ranks": num_ranks,
    "experts": num_experts,
    "assignments": int(load_GE.sum()),
    "replica_slots": slots,
    "imbalance": {
      "before": _over(before_G.max(), mean),
      "after": _over(after_G.max(), mean),
      "floor": _over(floor, mean),
    },
    "copies": len(expert),
    "relayed": int((parent != expert // per_rank).sum()),
    "busiest_sender": int(egress_per_rank(plan.parent).max()),
    "depth": int(depth(plan.replica_expert, plan.parent, num_experts)),
    "copy_bytes": copy_bytes,
    "remote_fraction": {
      "before": float((load_GE.T * ~home_EG).sum() / total),
      "after": float((load_GE.T - np.minimum(load_GE.T, quota_EG)).sum() / total),
    },
    "load_before": before_G.tolist(),
    "load_after": after_G.tolist(),
    "replicas": [
      {"expert": int(e), "rank": int(r), "from": int(p), "assignments": int(quota_EG[e, r])}
      for e, r, p in zip(expert, rank, parent, strict=True)
    ],
    "quota": quota_EG.tolist(),
  }


def _over(busiest: int, mean: float) -> float:
  """Busiest over mean rank; 1 if there are no loads."""
  return float(busiest / mean) if mean else 1.0


def _text(answer: dict[str, Any]) -> str:
  imbalance, remote, ranks = answer["imbalance"], answer["remote_fraction"], answer["ranks"]
  size = f", {answer['copy_bytes'] / 1e6:.3g} MB each" if answer["copy_bytes"] else ""
  mean = answer["assignments"] / ranks
  made = answer.get("generated")
  lines = [
    *([f"generated loads: {made} (give a FILE for yours)"] if made else []),
    f"{ranks} ranks, {answer['experts']} experts, {answer['replica_slots']} replica slots a rank; "
    f"{answer['assignments']} assignments, {mean:.1f} a rank",
    f"busiest / mean rank  {imbalance['before']:.3f} before, {imbalance['after']:.3f} after "
    f"(the domains allow {imbalance['floor']:.3f})",
    *([f"costs                of {answer['costs']} (--device)"] if "costs" in answer else []),
    f"copies               {answer['copies']}{size}; {answer['relayed']} relayed, at most "
    f"{answer['busiest_sender']} sent by a rank, {answer['depth']} links deep",
    f"remote assignments   {remote['before']:.1%} before, {remote['after']:.1%} after",
    *(f"advice               {line}" for line in answer["advice"]),
    "",
  ]
  held: dict[int, list[str]] = {}
  for copy in answer["replicas"]:
    text = f"{copy['expert']} ({copy['assignments']}) from {copy['from']}"
    held.setdefault(copy["rank"], []).append(text)
  rows = [
    [rank, answer["load_before"][rank], answer["load_after"][rank], ", ".join(held.get(rank, []))]
    for rank in range(min(ranks, _TABLE_ROWS))
  ]
  lines.append(table(["rank", "before", "after", "copies: expert (assignments)"], rows))
  if ranks > _TABLE_ROWS:
    lines.append(f"... {ranks - _TABLE_ROWS} more ranks; --json has all")
  return "\n".join(lines)
