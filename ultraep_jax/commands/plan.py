"""Plan a load matrix: which experts to copy where, and what that does to the busiest rank.

  plan examples/loads.csv                [G, E] assignments of each rank to each expert
  plan loads.npy --ranks 8               or [E] assignments to each expert, from all ranks alike
  plan --ranks 64 --experts 256 --ratio 3 --slots 2            or a generated workload
  plan loads.json --objective time --width 4096 --inner 1536   weigh copies against their cost

Files: .npy, .npz (the array load_GE, or the only one), .json (nested lists) and .csv.
"""

import argparse
import json
import math
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
from ultraep_jax.tools.arguments import factor, largest_divisor, natural, positive
from ultraep_jax.tools.errors import UsageError, refused
from ultraep_jax.types import ExpertWeights, Plan, PlanCost
from ultraep_jax.workloads import check_sizes, highest_flat_ratio, highest_zipf_ratio

_OF_RATIO = {"zipf": testing.zipf_loads, "flat": testing.flat_loads}
_HIGHEST = {"zipf": highest_zipf_ratio, "flat": highest_flat_ratio}
_WORKLOAD, _FIXED = "zipf", "all-to-one"
_WORKLOADS = (*_OF_RATIO, "balanced", _FIXED, *testing.ADVERSARIAL_KINDS)
# Options of generated loads alone.
_GENERATED = ("tokens", "top_k", "workload", "ratio", "seed")
# Defaults, or less of them where sizes that are given allow no more.
_RANKS, _EXPERTS, _TOKENS, _TOP_K, _RATIO, _SLOTS = 8, 64, 4096, 8, 2.0, 2
_DEVICE = "h200"
# The options that what a check names comes from.
_OPTIONS = {
  "replica_slots": ("--slots",),
  "domain_size": ("--domain",),
  "min_tokens_per_replica": ("--min-tokens",),
  "num_experts": ("--experts",),
  "sizes": ("--ranks", "--experts", "--tokens", "--top-k"),
  "top_k": ("--top-k",),
  **{name: (f"--{name}",) for name in ("strategy", "device", "target", "ratio", "tokens")},
}
_TABLE_ROWS = 72
_MOST_BYTES = 2**30  # of a file of loads


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """The loads, how to plan them and how to print the answer."""
  add = parser.add_argument
  add("loads", nargs="?", type=pathlib.Path, metavar="FILE", help="loads; without: generated")
  add("--ranks", type=positive, help=f"ranks ({_RANKS}, or as in the file)")
  add("--experts", type=positive, help=f"experts ({_EXPERTS}, or as in the file)")
  add("--tokens", type=positive, help=f"generated: tokens a rank ({_TOKENS})")
  add("--top-k", type=positive, help=f"generated: experts a token ({_TOP_K})")
  add("--workload", choices=_WORKLOADS, help=f"generated: kind ({_WORKLOAD})")
  add(
    "--ratio",
    type=factor,
    help=f"generated, by {' and '.join(_OF_RATIO)}: busiest over mean rank ({_RATIO:g}, or as much "
    "as the ranks allow)",
  )
  add("--seed", type=natural, help="generated: seed (0)")
  add("--slots", type=natural, help=f"replica slots a rank ({_SLOTS}; 0 of one rank)")
  add("--strategy", default="quota", help="balancer (%(default)s)")
  add("--objective", choices=("balance", "time"), default="balance", help="(%(default)s)")
  add("--target", type=factor, help="fewest copies that reach this, e.g. 1.01")
  add("--min-tokens", type=positive, default=1, help="least assignments of a copy (%(default)s)")
  add("--domain", type=positive, help="ranks of a domain of fast links (all)")
  add("--transfer", choices=("auto", "direct", "relay"), default="auto", help="(%(default)s)")
  add("--width", type=positive, help="D, hidden width, for the bytes and the cost of a copy")
  add("--inner", type=positive, help="F, inner width of an expert, likewise")
  add("--device", help=f"has the costs of --objective time: its name or file ({_DEVICE})")
  add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(%(default)s)")
  add("--json", action="store_true", help="print JSON, with the whole plan")


def run(args: argparse.Namespace) -> int:
  """Plans and prints."""
  try:
    _check_used(args)
    made = None
    if args.loads is None:
      load_GE, made = _generated(args)
    else:
      load_GE = _from_file(args)
    num_ranks, num_experts = load_GE.shape
    slots = (min(_SLOTS, num_experts) if num_ranks > 1 else 0) if args.slots is None else args.slots
    config = BalanceConfig(
      replica_slots=slots,
      strategy=args.strategy,
      objective=args.objective,
      target=args.target,
      min_tokens_per_replica=args.min_tokens,
      domain_size=args.domain,
      transfer=args.transfer,
    )
    if slots > num_experts:
      raise UsageError(f"--slots: expected at most {num_experts} experts, got {slots}")
    strategy = strategies.resolve(config.strategy)
    if strategy.reassign is not None:
      raise ValueError(
        f"strategy: {args.strategy!r} replaces the router's choice and plans nothing"
      )
    config.domain_of(num_ranks)  # which not every strategy asks for
    weights = _expert(args)
    device = Device.load(args.device or _DEVICE) if config.objective == "time" else None
    cost = _cost(args, load_GE, device, weights, config)
    plan = strategy.plan(jnp.asarray(load_GE), config, cost)
    if device is not None and device.portable is None:  # plain JAX ignores the trees of copies
      parent_GS = transfer_tree(plan.replica_expert, num_experts=num_experts, transfer="direct")
      plan = plan._replace(parent=parent_GS)
  except (ValueError, TypeError, OSError) as error:
    raise refused(error, args, _OPTIONS) from None
  copy_bytes = 0 if weights is None else weights.expert_size * jnp.dtype(args.dtype).itemsize
  answer = _answer(load_GE, plan, config, copy_bytes)
  if device is not None:
    answer["costs"] = f"{device.name}, {device.layer}"
  if made is not None:
    answer["generated"] = made
  print(json.dumps(answer, indent=2) if args.json else _text(answer))
  return 0


def _check_used(args: argparse.Namespace) -> None:
  """Refuses options that would change nothing.

  Raises:
    UsageError: there are some.
  """
  given = [name for name in _GENERATED if getattr(args, name) is not None]
  if args.loads is not None and given:
    option = given[0].replace("_", "-")
    raise UsageError(f"--{option}: expected no FILE with it, which has its loads, got {args.loads}")
  kind = args.workload or _WORKLOAD
  if args.ratio is not None and kind not in _OF_RATIO:
    expected = " or ".join(_OF_RATIO)
    raise UsageError(f"--ratio: expected --workload {expected} with it, got {kind}")
  if args.seed is not None and kind == _FIXED:
    raise UsageError(f"--seed: expected a --workload with random loads with it, got {kind}")
  if args.device is not None and args.objective != "time":
    raise UsageError(
      f"--device: expected --objective time with it, which weighs costs, got {args.objective}"
    )


def _generated(args: argparse.Namespace) -> tuple[np.ndarray, str]:
  """Loads; and their workload with those options that it depends on beside the sizes."""
  sizes = _sizes(args)
  check_sizes(*sizes)
  kind, seed = args.workload or _WORKLOAD, args.seed or 0
  made = f"{kind}, --seed {seed}"
  if kind in _OF_RATIO:
    experts, ranks, _, top_k = sizes
    # Rounded down, as it is printed: with it the same loads can be made again.
    most = max(math.floor(100 * _HIGHEST[kind](experts, ranks, top_k)) / 100, 1.0)
    ratio = min(_RATIO, most) if args.ratio is None else args.ratio
    return _OF_RATIO[kind](seed, *sizes, ratio), f"{kind}, --ratio {ratio:g}, --seed {seed}"
  if kind == "balanced":
    return testing.balanced_loads(seed, *sizes), made
  if kind == _FIXED:
    return testing.all_to_one_loads(*sizes), kind
  return testing.adversarial_loads(seed, *sizes, kind=kind), made


def _sizes(args: argparse.Namespace) -> tuple[int, int, int, int]:
  """Experts, ranks, tokens and experts a token; those that are not given fit those that are."""
  ranks, experts = args.ranks, args.experts
  if ranks is None:
    ranks = largest_divisor(experts or _EXPERTS, _RANKS)
  if experts is None:
    experts = -(-_EXPERTS // ranks) * ranks
  top_k = min(_TOP_K, experts) if args.top_k is None else args.top_k
  return experts, ranks, _TOKENS if args.tokens is None else args.tokens, top_k


def _from_file(args: argparse.Namespace) -> np.ndarray:
  """A load matrix ``[G, E]`` int32.

  Raises:
    OSError: the file cannot be read.
    ValueError: it holds no loads.
    UsageError: of other numbers of ranks or experts than are given.
  """
  path, num_ranks, num_experts = args.loads, args.ranks, args.experts
  load = _read(path)
  shape = list(load.shape)
  if not load.size:
    raise ValueError(
      f"{path}: expected loads of at least one rank and one expert, got shape {shape}"
    )
  if wrong := _not_whole(load):
    raise ValueError(f"{path}: expected whole numbers, got {wrong[0]!r:.80}")
  least, most = float(load.min()), float(load.max())  # float16 could not be compared with 2**31
  if least < 0 or most >= 2**31:
    raise ValueError(f"{path}: expected loads in [0, 2**31), got {least:g} to {most:g}")
  load = load.astype(np.int64)
  if load.ndim == 1:
    if num_ranks is None:
      raise UsageError(
        f"--ranks: expected the ranks to deal the row of loads in {path} to, got none"
      )
    if load.size % num_ranks:
      raise UsageError(f"--ranks: expected a divisor of {load.size} experts, got {num_ranks}")
    # From every rank alike, the remainders dealt out in turn.
    deal = (np.arange(num_ranks)[:, None] + np.arange(load.size)) % num_ranks
    load = load // num_ranks + (deal < load % num_ranks)
  if load.ndim != 2:
    raise ValueError(f"{path}: expected shape [G, E] or [E], got {shape}")
  for name, given, found in zip(
    ("ranks", "experts"), (num_ranks, num_experts), load.shape, strict=True
  ):
    if given not in (None, found):
      raise UsageError(f"--{name}: expected {found}, as {path} has, got {given}")
  return load.astype(np.int32)


def _not_whole(load: np.ndarray) -> list[Any]:
  """The first value that is no whole number, or none."""
  if load.dtype.kind in "iuf":
    return load[~np.isfinite(load) | (load != np.floor(load))][:1].tolist()
  values = load.reshape(-1).tolist()  # integers alone are some that no dtype holds
  return [v for v in values if type(v) is not int][:1] or [max(values)]


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
    raise UsageError("--width, --inner: expected both or none")
  if args.width is None:
    return None
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
    raise UsageError("--objective time: expected --width and --inner, which say what copies cost")
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
