"""Measures prefill under load: times to first token as requests arrive, balanced and not.

``ultraep bench prefill`` on every GPU of a host; ``--model tiny`` tries it on a CPU.
Requests arrive by the clock, as a Poisson process, whether the engine keeps up or not, and the
time to a first token counts from the arrival. Prompts are pieces of code, of texts about
mathematics and of prose, from what is installed. All strategies have the same parameters, prompts
and arrivals, in one process; at every rate they are measured in turn.

Models with random weights get a router whose experts' popularity is a Zipf law: selection biases
are searched until the busiest rank has ``--skew`` times the mean load, in each layer with other
experts. The table of loads says what the planner makes of them with ``--slots``, and below what
no plan can come.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import time
import warnings
from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ultraep_jax import models
from ultraep_jax.bench.machine import devices
from ultraep_jax.bench.prefill import model as prefill_model
from ultraep_jax.bench.prefill import profile as prefill_profile
from ultraep_jax.bench.prefill import report, text
from ultraep_jax.bench.prefill import soak as prefill_soak
from ultraep_jax.bench.prefill.arrivals import Point, find_limit, offer, poisson_arrivals
from ultraep_jax.bench.prefill.loads import planned, rank_imbalance, reachable_floor
from ultraep_jax.config import BalanceConfig, Implementation
from ultraep_jax.files import check_output, write_text
from ultraep_jax.planning.fit import num_slots
from ultraep_jax.serve import EngineConfig, PrefillEngine
from ultraep_jax.serve.metrics import imbalance
from ultraep_jax.serve.programs import Programs
from ultraep_jax.tools.arguments import amount, factor, natural, nonnegative, positive, slot_count
from ultraep_jax.types import LayerStats

STRATEGIES = ("none", "quota", "ideal")
_COMPARED = 64  # requests whose first tokens are compared
_PROBED = 4  # batches whose loads are looked at before
_POOL = 4096  # prompts, gone through again where more arrive


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add_arguments(parser)
  args = parser.parse_args(argv)
  if args.lengths != sorted(args.lengths):
    parser.error(f"--lengths: expected the shortest, then the longest, got {args.lengths}")
  check_output(args.json)
  check_output(args.plot)
  return run(args)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  which = parser.add_mutually_exclusive_group()
  which.add_argument("--model", default="qwen3-30b-a3b", choices=list(prefill_model.NAMED))
  which.add_argument("--checkpoint", type=pathlib.Path, metavar="FOLDER", help="and its router")
  parser.add_argument("--layers", type=positive, help="only the first ones, of a --model")
  parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
  parser.add_argument("--ranks", type=positive, help="default: all devices")
  parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
  parser.add_argument("--slots", type=slot_count, default="auto", help="replica slots a rank")
  parser.add_argument(
    "--capacity-factor",
    type=factor,
    help="rows of a buffer over those of equal loads; default: the ranks, so that no loads need a "
    "second round and the programs have no loop for one",
  )
  parser.add_argument("--objective", default="time", choices=["balance", "time"])
  parser.add_argument("--implementation", default="auto", choices=get_args(Implementation))
  parser.add_argument("--batch-invariant", action="store_true")
  parser.add_argument("--skew", type=nonnegative, default=2.0, help="of a --model; 1: as it is")
  parser.add_argument("--calibrate", type=natural, default=40, help="batches to find the biases")
  parser.add_argument("--buckets", nargs="+", type=positive, default=[2048, 4096, 8192])
  parser.add_argument("--alignment", type=positive, default=128, help="also attention's block")
  parser.add_argument("--max-requests", type=positive, default=64, help="of a row")
  parser.add_argument("--lengths", nargs=2, type=positive, default=[128, 4096], help="of prompts")
  parser.add_argument("--no-cache", dest="cache", action="store_false", help="return no caches")
  parser.add_argument("--bound", type=amount, default=500.0, help="on the mean TTFT, in ms")
  parser.add_argument("--rates", nargs="+", type=amount, help="requests/s; default: --shares")
  parser.add_argument(
    "--shares", nargs="+", type=amount, default=[0.3, 0.6, 0.8, 0.95], help="of what is saturated"
  )
  parser.add_argument("--seconds", type=nonnegative, default=10.0, help="of one rate")
  parser.add_argument("--tries", type=natural, default=5, help="more rates to find what is held")
  parser.add_argument("--saturate", type=positive, default=8, help="full batches that come at once")
  parser.add_argument("--requests", type=positive, help="instead: a soak of so many requests")
  parser.add_argument(
    "--profile", action="store_true", help="instead: times of a full batch by kind of kernel"
  )
  parser.add_argument("--seed", type=natural, default=0)
  parser.add_argument("--json", type=pathlib.Path, help="write the results to this file too")
  parser.add_argument("--plot", type=pathlib.Path, help="write a figure to this file")


def run(args: argparse.Namespace) -> int:
  found = devices(args.ranks, full_size=args.checkpoint is None and args.model != "tiny")
  axis_types = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((len(found),), ("expert",), axis_types=axis_types, devices=found)
  with jax.set_mesh(mesh):
    bench = Bench(args)
    if args.profile:
      return bench.profile()
    with contextlib.ExitStack() as stack:
      bench.start(stack)
      return bench.soak() if args.requests else bench.measure_all()


class Collector:
  """The imbalance of the layers of an engine's batches; called in its thread."""

  def __init__(self) -> None:
    self.before: list[np.ndarray] = []
    self.after: list[np.ndarray] = []
    self.rounds = 0

  def __call__(self, number: int, stats: LayerStats) -> None:
    self.before.append(imbalance(np.asarray(stats.load_before_G)))
    self.after.append(imbalance(np.asarray(stats.load_after_G)))
    self.rounds = max(self.rounds, int(np.max(np.asarray(stats.rounds))))


class Bench:
  """One run of the program, in order: model, loads, engines, saturation, rates, limits."""

  def __init__(self, args: argparse.Namespace):
    self.args, self.began = args, time.perf_counter()
    self.ranks = jax.sharding.get_mesh().size
    self.config = EngineConfig(
      buckets=tuple(args.buckets),
      alignment=args.alignment,
      max_requests=args.max_requests,
      queue_limit=1 << 20,
      return_cache=args.cache,
    )
    self.bound = args.bound / 1e3
    self.model = self._model()
    longest = min(args.lengths[1], self.config.buckets[-1])
    prompts = text.make_prompts(
      args.seed, _POOL, min(args.lengths[0], longest), longest, self.model.vocab_size
    )
    self.prompts = [prompt.tokens for prompt in prompts]
    mean = float(np.mean([len(tokens) for tokens in self.prompts]))
    self.say(f"prompts of {mean:.0f} tokens on average, of {', '.join(text.DOMAINS)}")
    self.results: dict[str, Any] = {
      "device": f"{self.ranks} x {jax.devices()[0].device_kind}",
      "jax": jax.__version__,
      "arguments": {k: str(v) if isinstance(v, pathlib.Path) else v for k, v in vars(args).items()},
      "prompt_tokens_mean": mean,
      "bound_s": self.bound,
      "strategies": {},
      "saturated": {},
      "points": [],
      "limits": {},
    }
    self._report_loads()
    self.collectors = {name: Collector() for name in args.strategies}
    self.engines = {name: self._engine(name) for name in args.strategies}

  # --- before ----------------------------------------------------------------------------------

  def start(self, stack: contextlib.ExitStack) -> None:
    """Compiles and starts the engines, which end with the stack."""
    for name, engine in self.engines.items():
      begin = time.perf_counter()
      with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "ideal" says that its results are wrong
        stack.enter_context(engine)
      seconds = time.perf_counter() - begin
      self.results["strategies"][name] = {"compile_s": seconds}
      self.say(f"{name}: {len(self.config.buckets)} buckets ready in {seconds:.0f} s")

  def _model(self) -> models.MoETransformer:
    args, dtype, block = self.args, jnp.dtype(self.args.dtype), self.config.alignment
    attention = "portable" if args.batch_invariant else "auto"  # cuDNN promises no such thing
    if args.checkpoint is None:
      config = prefill_model.with_bias(prefill_model.NAMED[args.model], args.layers)
      model = prefill_model.build(config, dtype, block, attention)
    else:
      model = models.load(
        args.checkpoint,
        balance=BalanceConfig(),
        dtype=dtype,
        attention=attention,
        attention_block=block,
      )
    jax.block_until_ready(nnx.state(model))
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    self.say(
      f"jax {jax.__version__}, {self.ranks} x {jax.devices()[0].device_kind}, "
      f"{args.checkpoint or args.model} with {len(model.config.is_moe)} layers, "
      f"{size / 1e9:.3g} billion parameters in {args.dtype}"
    )
    return model

  def _report_loads(self) -> None:
    """Skews the router, and tells what a planner makes of the loads of some batches."""
    args = self.args
    probe = prefill_model.Probe(self.model, self.config)
    batches = probe.batches(self.prompts, _PROBED)
    if args.checkpoint is None and args.skew != 1:
      prefill_model.set_skew(self.model, probe, batches, args.skew, args.calibrate, args.seed)
    # One token group, since the mesh has one axis.
    loads = np.stack([probe.loads(self.model, batch)[:, 0] for batch in batches])
    slots = num_slots(BalanceConfig(replica_slots=args.slots), loads.shape[-1], self.ranks)
    rows = [
      {
        "home": float(np.mean([rank_imbalance(m.sum(axis=0), self.ranks) for m in layer_N])),
        "planned": float(np.mean([planned(m, args.slots) for m in layer_N])),
        "floor": float(
          np.mean([reachable_floor(m.sum(axis=0), self.ranks, slots) for m in layer_N])
        ),
      }
      for layer_N in loads.swapaxes(0, 1)
    ]
    self.results["loads"] = rows
    self.say(f"busiest over mean rank, {len(batches)} full batches")
    print(report.loads_table(rows, slots, each=len(rows) <= 8), flush=True)

  def _engine(self, name: str) -> PrefillEngine:
    return PrefillEngine(
      prefill_model.balanced_by(self.model, self._balance(name)),
      self.config,
      on_stats=self.collectors[name],
    )

  def _balance(self, name: str) -> BalanceConfig:
    args = self.args
    slots = args.slots if name == "quota" else 0
    return BalanceConfig(
      replica_slots=slots,
      strategy=name,
      objective=args.objective,
      implementation=args.implementation,
      capacity_factor=float(args.capacity_factor or self.ranks),
      batch_invariant=args.batch_invariant,
    )

  # --- the measurement -------------------------------------------------------------------------

  def measure_all(self) -> int:
    args = self.args
    room = self.ranks * self.config.buckets[-1]
    count = math.ceil(args.saturate * room / self.results["prompt_tokens_mean"])
    for name in args.strategies:
      point = self._offer(name, math.inf, count)
      self.results["saturated"][name] = point._asdict()
      self.say(
        f"{name}: {point.tokens_per_second:.0f} tokens/s, {point.requests_per_second:.3g} "
        f"requests/s with {count} requests at once, padding {point.padding_share:.1%}"
      )
    if not self._agree():
      return 1
    most = max(row["requests_per_second"] for row in self.results["saturated"].values())
    for i, rate in enumerate(args.rates or [most * share for share in args.shares]):
      turn = i % len(args.strategies)
      for name in args.strategies[turn:] + args.strategies[:turn]:
        self._measure(name, rate)
    for name in args.strategies:
      self._limit(name)
    self._finish()
    return 0

  def _agree(self) -> bool:
    """Whether engines that compute the same give most requests the same first token.

    Not all: where experts run decides how sums round, and random weights make close calls.
    """
    names = [name for name in self.args.strategies if name != "ideal"]
    if len(names) < 2:
      return True
    asked = self.prompts[:_COMPARED]
    tokens = []
    for name in names:
      futures = [self.engines[name].submit(prompt) for prompt in asked]
      tokens.append([future.result().token for future in futures])
    same = float(np.mean([len(set(each)) == 1 for each in zip(*tokens, strict=True)]))
    self.results["same_first_tokens"] = same
    self.say(f"{', '.join(names)}: {same:.1%} of {len(asked)} first tokens are the same")
    return same > 0.5

  def soak(self) -> int:
    """Every strategy's engine in turn."""
    status = 0
    for name, engine in self.engines.items():
      samples, failed = prefill_soak.soak(engine, self.prompts, self.args.requests)
      self.say(f"{name}: {prefill_soak.describe(samples, failed)}")
      row = {"samples": [sample._asdict() for sample in samples], "failed": failed}
      self.results["strategies"][name] |= row
      status |= failed > 0 or samples[-1].compilations > 0
    self._save()
    return int(status)

  def profile(self) -> int:
    """One full batch, without the engines."""
    config = dataclasses.replace(self.config, buckets=self.config.buckets[-1:])
    (batch,) = prefill_model.Probe(self.model, config).batches(self.prompts, most=1)
    runs = {}
    for name in self.args.strategies:
      model = prefill_model.balanced_by(self.model, self._balance(name))
      programs = Programs(model, config)
      with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        programs.compile()
      runs[name] = functools.partial(programs.run, batch)
    self.results["profile"] = prefill_profile.profile(runs, sum(self.model.config.is_moe))
    self.say(f"a batch of {config.buckets[0]} tokens a rank; us a layer on the first GPU")
    print(prefill_profile.profile_table(self.results["profile"]), flush=True)
    self._save()
    return 0

  def _measure(self, name: str, rate: float) -> Point:
    """Offers one rate and adds what came of it to the results."""
    collector = self.collectors[name]
    seen = len(collector.before)
    count = max(round(rate * self.args.seconds), 32)
    point = self._offer(name, rate, count)
    row = {"strategy": name, "order": len(self.results["points"])} | point._asdict()
    for key, values in (("before", collector.before), ("after", collector.after)):
      row[f"imbalance_{key}"] = float(np.mean(values[seen:])) if values[seen:] else math.nan
    self.results["points"].append(row)
    note = "" if point.overloaded is None else f"; overloaded: {point.overloaded}"
    self.say(
      f"{name} at {rate:.3g} requests/s: TTFT mean {1e3 * point.ttft_mean:.1f} ms, p50 "
      f"{1e3 * point.ttft_p50:.1f}, p99 {1e3 * point.ttft_p99:.1f}, imbalance "
      f"{row['imbalance_before']:.2f} -> {row['imbalance_after']:.3f}{note}"
    )
    self._save()
    return point

  def _offer(self, name: str, rate: float, count: int) -> Point:
    """The same prompts and arrivals for every strategy; an infinite rate: all at once."""
    prompts = [self.prompts[i % len(self.prompts)] for i in range(count)]
    arrivals = poisson_arrivals(self.args.seed, count)
    give_up = math.inf if math.isinf(rate) else 8 * self.bound
    return offer(self.engines[name], prompts, arrivals, rate, give_up)

  def _limit(self, name: str) -> None:
    known = [
      Point(**{key: row[key] for key in Point._fields})
      for row in self.results["points"]
      if row["strategy"] == name
    ]
    limit = find_limit(lambda rate: self._measure(name, rate), known, self.bound, self.args.tries)
    self.results["limits"][name] = limit._asdict()

  # --- after -----------------------------------------------------------------------------------

  def _finish(self) -> None:
    for name, collector in self.collectors.items():
      before, after = np.array(collector.before), np.array(collector.after)
      self.results["strategies"][name] |= {
        "batches": len(before),
        "imbalance_before_L": before.mean(axis=0).tolist(),
        "imbalance_after_L": after.mean(axis=0).tolist(),
        "worst_before": float(before.max()),
        "worst_after": float(after.max()),
        "rounds": collector.rounds,
      }
    print(f"\nIn the order of measurement:\n{report.points_table(self.results['points'])}")
    print(f"\nWith a mean time to first token of at most {self.args.bound:g} ms:")
    print(report.summary_table(self.results), flush=True)
    self._save()
    if self.args.plot:
      report.plot(self.results, self.args.plot)

  def say(self, line: str) -> None:
    """With the seconds since the start."""
    print(f"{time.perf_counter() - self.began:6.1f} s  {line}", flush=True)

  def _save(self) -> None:
    if self.args.json:
      write_text(self.args.json, json.dumps(_finite(self.results), indent=1))


def _finite(value: Any) -> Any:
  """None for what JSON has no word for, NaN and infinity."""
  if isinstance(value, dict):
    return {key: _finite(part) for key, part in value.items()}
  if isinstance(value, list):
    return [_finite(part) for part in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
  raise SystemExit(main())
