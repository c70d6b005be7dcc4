"""Measures the training of a whole MoE transformer: balanced, not balanced, and forced equal.

``ultraep bench train`` on every GPU of a host. A model of 3.8 billion parameters
first learns from text for some hundred steps, so that its router is one; then the variants train
in turn on the same batches, with a learning rate of 0, which does all the work of a step and
leaves the parameters the same for all. A selection bias on the router's experts forces further
imbalances. ``none`` has the buffer that its busiest rank needs; nobody drops a token.

Model FLOPs utilisation is ``Sizes.flops_per_token`` times tokens per second, over the peak of
the devices (``--peak``, for H200 989 TFLOP/s bf16 dense).

Memory by hand, a rank of 4, T = 8192 tokens, K = 8, D4096 F1536 E64, 3 layers, in GB: parameters
3.6 (experts) + 0.5, twice as much again for AdamW's moments and once for gradients, 16.6 in all.
Kept for backward per layer: rows ``T K c D`` and two projections ``T K c F`` in bfloat16, 0.94 c
for a buffer of c = 1.0625 (none: the imbalance), and about 0.6 for attention and norms. In flight
while one layer runs: bfloat16 weights 0.6, about five buffers of rows, 2.7 c, float32 gradients
of replicas 0.15. So about 25 with c = 1.0625 and 37 with c = 3, of 141.
"""

import argparse
import json
import math
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ultraep_jax import testing
from ultraep_jax.bench import timing
from ultraep_jax.bench.layer import times as layer_times
from ultraep_jax.bench.machine import devices
from ultraep_jax.bench.train import report, text
from ultraep_jax.bench.train.step import Metrics, Options, Program
from ultraep_jax.bench.train.transformer import AXIS, DTYPE, Attend, Sizes, attend
from ultraep_jax.config import BalanceConfig, Implementation
from ultraep_jax.files import check_output, write_text
from ultraep_jax.tools.arguments import amount, factor, natural, nonnegative, positive, slot_count
from ultraep_jax.tools.errors import described
from ultraep_jax.tools.progress import progress

VARIANTS = ("none", "quota", "ideal")
SLACK = 1.0625
KERNELS = layer_times.KERNELS | {"attention": ("cudnn", "flash")}


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add_arguments(parser)
  args = parser.parse_args(argv)
  check_output(args.json)
  return run(args)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
  parser.add_argument("--ratios", nargs="*", type=factor, default=[1.3, 2.0, 3.0])
  parser.add_argument("--ranks", type=positive, help="default: all devices")
  parser.add_argument("--scale", type=positive, default=1, help="divide widths, to try it on a CPU")
  parser.add_argument("--layers", type=positive, default=Sizes.layers)
  parser.add_argument("--experts", type=positive, help="default: 16 a rank")
  parser.add_argument("--top-k", type=positive, default=Sizes.top_k)
  parser.add_argument("--seq", type=positive, default=Sizes.seq, help="bytes of a sequence")
  parser.add_argument("--batch", type=positive, default=2, help="sequences per rank")
  parser.add_argument("--slots", type=slot_count, default="auto", help="replica slots a rank")
  parser.add_argument("--objective", default="time", choices=["balance", "time"])
  parser.add_argument("--implementation", default="auto", choices=get_args(Implementation))
  parser.add_argument("--attention", default="auto", choices=["auto", "cudnn", "xla"])
  parser.add_argument("--remat", action="store_true")
  parser.add_argument("--warmup", type=natural, default=300, help="steps that train the router")
  parser.add_argument("--learning-rate", type=amount, default=3e-4)
  parser.add_argument("--balance-loss", type=nonnegative, default=1e-3)
  parser.add_argument("--calibrate", type=natural, default=40, help="steps to find a bias")
  parser.add_argument("--steps", type=positive, default=4, help="of one measurement")
  parser.add_argument("--repeats", type=positive, default=5)
  parser.add_argument(
    "--check-loss", type=positive, metavar="N", help="compare N steps' losses instead"
  )
  parser.add_argument("--profile", action="store_true", help="times by kind of kernel")
  parser.add_argument("--peak", type=amount, default=989.0, help="TFLOP/s of one device")
  parser.add_argument("--compile-threads", type=positive, default=3)
  parser.add_argument("--json", type=pathlib.Path, help="write the results to this file too")


def run(args: argparse.Namespace) -> int:
  found = devices(args.ranks, least=2 if args.ratios else 1, full_size=args.scale == 1)
  axis_types = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((len(found),), (AXIS,), axis_types=axis_types, devices=found)
  with jax.set_mesh(mesh):
    bench = Bench(args)
    if args.check_loss:
      return bench.check_loss(args.check_loss)
    return bench.measure_all()


class Bench:
  """One run of the program, in order: compile, train the router, force loads, measure."""

  def __init__(self, args: argparse.Namespace):
    self.args, self.start = args, time.perf_counter()
    self.ranks = jax.sharding.get_mesh().size
    width = Sizes.width // args.scale
    self.sizes = Sizes(
      width=width,
      inner=Sizes.inner // args.scale,
      layers=args.layers,
      experts=args.experts or 16 * self.ranks,
      top_k=args.top_k,
      head_dim=min(Sizes.head_dim, max(width // 4, 2)),
      seq=args.seq,
    )
    self.tokens = self.ranks * args.batch * args.seq
    attention = self._attention()
    options = Options(
      self.sizes,
      attention,
      # XLA's attention keeps its probabilities: 20 GB per layer at the default sizes.
      remat=args.remat or (attention == "xla" and jax.default_backend() == "gpu"),
      balance_loss=args.balance_loss,
    )
    self.program = Program(options, self.ranks * args.batch, args.compile_threads)
    self.text = text.load_text()
    self.no_bias_LE = np.zeros((self.sizes.layers, self.sizes.experts), np.float32)
    self.results: dict[str, Any] = {
      "device": f"{self.ranks} x {jax.devices()[0].device_kind}",
      "jax": jax.__version__,
      "sizes": vars(self.sizes),
      "parameters": self.sizes.expert_parameters + self.sizes.other_parameters,
      "tokens_per_step": self.tokens,
      "flops_per_token": self.sizes.flops_per_token,
      "attention": options.attend,
      "remat": options.remat,
      "rows": [],
    }
    self.say(
      f"jax {jax.__version__}, {self.results['device']}, {self.results['parameters'] / 1e9:.2f} "
      f"billion parameters, {self.tokens} tokens and "
      f"{self.tokens * self.sizes.flops_per_token / 1e12:.1f} TFLOP a step, "
      f"attention by {options.attend}"
    )

  # --- the two programs ------------------------------------------------------------------------

  def measure_all(self) -> int:
    balanced = [self.config(v) for v in self.args.variants if v != "none"]
    self.compile(balanced)
    trainer = self.config("quota")
    if not self.program.has(trainer):
      trainer = self.config("none")  # takes several rounds where its buffer is too small
      self.compile([trainer])
    if not self.program.has(trainer):
      return 1
    self.program.reset()
    losses = self.losses(trainer, self.args.warmup, "train the router")
    self.results["warmup_losses"] = losses
    if losses:
      self.say(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte in {len(losses)} steps")

    batches = [self.batch(-1 - i) for i in range(self.args.steps)]
    cases: dict[str, np.ndarray] = {"text": self.no_bias_LE}
    for ratio in self.args.ratios:
      cases[f"{ratio:g}"] = self.bias_for(trainer, ratio, batches)
    busiest = {
      name: max(float(np.max(m.before_L)) for m in self.run_on(trainer, batches, bias))
      for name, bias in cases.items()
    }
    none = {name: self.config("none", value) for name, value in busiest.items()}
    if "none" in self.args.variants:
      self.compile(none.values())
    for name, bias in cases.items():
      configs = {v: none[name] if v == "none" else self.config(v) for v in self.args.variants}
      ready = {v: config for v, config in configs.items() if self.program.has(config)}
      try:
        self.measure(name, ready, bias, batches)
      except Exception as error:
        self.say(f"{name}: {described(error)}")
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.program.state)):
          self.say("the state was lost with that step")
          return 1
    return 0

  def check_loss(self, steps: int) -> int:
    """Trains three times from the same parameters on the same data, and compares losses.

    The yardstick is ``none`` with the sequences of every batch in another order: the same
    mathematics, summed in another order.
    """
    none, quota = self.config("none", float(self.ranks)), self.config("quota")
    if self.compile([none, quota]):
      return 1
    curves = {}
    for name, config, backwards in (
      ("none", none, False),
      ("reordered", none, True),
      ("quota", quota, False),
    ):
      self.program.reset()
      curves[name] = self.losses(config, steps, name, backwards)
      self.say(f"{name}: loss {curves[name][0]:.4f} -> {curves[name][-1]:.4f}")
    self.results["losses"] = curves
    differences = {}
    for name in ("reordered", "quota"):
      difference = np.abs(np.subtract(curves[name], curves["none"]))
      differences[name] = {"largest": float(difference.max()), "mean": float(difference.mean())}
    self.results["loss_difference"] = differences
    noise, ours = differences["reordered"], differences["quota"]
    for name in ("largest", "mean"):
      self.say(
        f"{name} |loss - loss of none| over {steps} steps: quota {ours[name]:.2e}, none in another "
        f"order {noise[name]:.2e}, ratio {ours[name] / max(noise[name], 1e-12):.2f}"
      )
    self.save()
    return 0

  # --- their parts -----------------------------------------------------------------------------

  def config(self, variant: str, busiest: float = 1.0) -> BalanceConfig:
    """A variant's; ``busiest`` over mean rank sizes the buffer of ``none``, in steps of 1/16."""
    measured = min(max(math.ceil(16 * busiest * 1.02) / 16, SLACK), float(self.ranks))
    return BalanceConfig(
      replica_slots=self.args.slots,
      strategy=variant,
      objective=self.args.objective,
      implementation=self.args.implementation,
      capacity_factor=measured if variant == "none" else "auto",
    )

  def compile(self, configs: Iterable[BalanceConfig]) -> bool:
    """Says what was compiled and what failed; returns whether anything did."""
    configs = list(configs)
    failed = self.program.compile(configs)
    for config in dict.fromkeys(configs):
      name = f"{config.strategy} with a buffer of {config.capacity_factor} T K rows"
      if config in failed:
        error = failed[config]
        self.say(f"{name}: {described(error, most=500)}")
      else:
        seconds, size = self.program.compile_seconds[config], self.program.gigabytes[config]
        self.say(f"{name}: compiled in {seconds:.0f} s, {size:.1f} GB a device")
    return bool(failed)

  def batch(self, step: int, backwards: bool = False) -> jax.Array:
    """Steps from 0 on train, those below measure."""
    batch = text.batch_at(self.text, step % (1 << 32), self.program.batch, self.sizes.seq)
    return self.program.batch_of(batch[::-1] if backwards else batch)

  def losses(
    self, config: BalanceConfig, steps: int, what: str, backwards: bool = False
  ) -> list[float]:
    """Trains, the learning rate rising over the first tenth of the steps."""
    waiting, losses = [], []
    for step in progress(range(steps), what):
      rate = self.args.learning_rate * min(1.0, (step + 1) / max(steps / 10, 1))
      waiting += self.program.run(config, [self.batch(step, backwards)], self.no_bias_LE, rate)
      if len(waiting) > 4:  # seldom enough that devices always have work
        losses += [float(m.loss) for m in waiting[:-1]]
        del waiting[:-1]
    return losses + [float(m.loss) for m in waiting]

  def run_on(
    self, config: BalanceConfig, batches: Sequence[jax.Array], bias_LE: np.ndarray
  ) -> list[Metrics]:
    """Steps that leave the parameters as they are, and what they did, on the host."""
    return jax.device_get(self.program.run(config, batches, bias_LE))

  def bias_for(
    self, config: BalanceConfig, ratio: float, batches: Sequence[jax.Array]
  ) -> np.ndarray:
    """A selection bias ``[L, E]`` with which the experts' loads are about those of a Zipf law.

    Each expert's bias moves up while it has less than its share and down while it has more, in
    steps that grow while the sign stays and halve when it turns.
    """
    sizes = self.sizes
    target_LE = np.stack(
      [
        testing.zipf_loads(
          seed, sizes.experts, self.ranks, self.tokens // self.ranks, sizes.top_k, ratio
        ).sum(axis=0)
        for seed in range(sizes.layers)
      ]
    )
    bias_LE, move_LE, before_LE = self.no_bias_LE, np.full_like(self.no_bias_LE, 0.02), 0.0
    for i in progress(range(self.args.calibrate), f"bias for {ratio:g}"):
      (metrics,) = self.run_on(config, [batches[i % len(batches)]], bias_LE)
      sign_LE = np.sign(target_LE - metrics.load_LE)
      move_LE = np.clip(np.where(sign_LE * before_LE < 0, move_LE / 2, move_LE * 1.2), 1e-5, 0.2)
      bias_LE, before_LE = bias_LE + sign_LE * move_LE, sign_LE
    return bias_LE.astype(np.float32)

  def measure(
    self,
    name: str,
    configs: Mapping[str, BalanceConfig],
    bias_LE: np.ndarray,
    batches: Sequence[jax.Array],
  ) -> None:
    """Adds a row per variant to the results."""

    def runs(config: BalanceConfig) -> Any:
      return lambda: self.program.run(config, batches, bias_LE)

    calls = {variant: runs(config) for variant, config in configs.items()}
    seconds = timing.in_turn(calls, self.args.repeats, len(batches))
    median = {variant: timing.median(values) for variant, values in seconds.items()}
    for variant, config in configs.items():
      did = self.run_on(config, batches, bias_LE)
      rate = self.tokens / median[variant]
      row: dict[str, Any] = {
        "loads": name,
        "variant": variant,
        "ms": median[variant] * 1e3,
        "all_ms": [1e3 * s for s in seconds[variant]],
        "tokens_per_second": rate,
        "mfu": rate * self.sizes.flops_per_token / (self.ranks * self.args.peak * 1e12),
        "of_ideal": median["ideal"] / median[variant] if "ideal" in median else None,
        "over_none": median["none"] / median[variant] if "none" in median else None,
        "imbalance_before": float(np.mean([m.before_L for m in did])),
        "imbalance_after": float(np.mean([m.after_L for m in did])),
        "worst_before": float(np.max([m.before_L for m in did])),
        "worst_after": float(np.max([m.after_L for m in did])),
        "replicas": float(np.mean([m.replicas_L for m in did])),
        "rounds": float(np.max([m.rounds_L for m in did])),
        "capacity_factor": config.capacity_factor,
        "gigabytes": self.program.gigabytes[config],
        "process_peak_gigabytes": process_peak(),
        "compile_s": self.program.compile_seconds[config],
      }
      if self.args.profile:
        row["kernels_us"] = timing.kernel_times(calls[variant], len(batches))
        row["kinds_us"] = timing.grouped(row["kernels_us"], KERNELS)
      self.results["rows"].append(row)
      self.save()
    print(report.times_table(self.results["rows"][-len(configs) :]), flush=True)

  def say(self, line: str) -> None:
    """With the seconds since the start."""
    print(f"{time.perf_counter() - self.start:6.1f} s  {line}", flush=True)

  def save(self) -> None:
    if self.args.json:
      write_text(self.args.json, json.dumps(self.results, indent=1))

  def _attention(self) -> Attend:
    """cuDNN's flash attention where it compiles."""
    if self.args.attention != "auto":
      return self.args.attention
    if jax.default_backend() != "gpu":
      return "xla"
    sizes, placed = self.sizes, NamedSharding(jax.sharding.get_mesh(), P(AXIS))

    def shape(heads: int) -> jax.ShapeDtypeStruct:
      axes = (self.ranks, sizes.seq, heads, sizes.head_dim)
      return jax.ShapeDtypeStruct(axes, DTYPE, sharding=placed)

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
      return jnp.sum(attend(query, key, value, "cudnn").astype(jnp.float32))

    try:
      key = shape(sizes.key_heads)
      jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape(sizes.heads), key, key).compile()
    except Exception as error:
      self.say(f"no cuDNN attention, XLA's instead: {str(error)[:200]}")
      return "xla"
    return "cudnn"


def process_peak() -> float | None:
  """The most that the first device has held since the start, by whatever variant."""
  stats = jax.devices()[0].memory_stats() or {}
  return stats["peak_bytes_in_use"] / 1e9 if "peak_bytes_in_use" in stats else None


if __name__ == "__main__":
  raise SystemExit(main())
