"""Layers of random sizes, forms, settings and loads beside dense ones, output and every gradient.

On all GPUs, or on virtual CPU devices where there is none::

    python tests/random_layers.py --seconds 600

On as many devices ``--first NUMBER --layers 1`` makes a layer again. With ``--one-pass`` layers
plan with gradients alone, or without alone, where their buffers allow it.
"""

import argparse
import dataclasses
import math
import random
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
from helpers.layer_problems import (
  BIASES,
  dense,
  layer,
  make_mesh,
  make_problem,
  planning_in_one_pass,
  relative_error,
  value_and_grads,
)

from ultraep_jax import BalanceConfig

# Relative errors that rounding does not explain, of narrow dtypes on rounded inputs.
BOUNDS = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
_LOADS = ("skewed", "skewed", "skewed", "balanced", "all-to-one")
_LAYOUTS = ("apart", "fused", "interleaved", "ungated")


class Sizes(NamedTuple):
  """What layers are drawn from: small ones for CPUs, for GPUs those that kernels run.

  Attributes:
    tokens: of a rank.
    home: experts of a rank.
    widths: of the model and inside experts.
    dtypes: of tokens; weights have the same in most layers.
  """

  tokens: Sequence[int]
  home: Sequence[int]
  widths: Sequence[int]
  dtypes: Sequence[str]


CPU = Sizes(
  (1, 3, 16, 33, 64),
  (1, 2, 3, 5, 7),
  (8, 16, 24, 40),
  ("float32", "float32", "bfloat16", "float16"),
)
GPU = Sizes(
  (1, 5, 33, 64, 257, 1000),
  (1, 3, 8, 17, 40),
  (64, 96, 128, 432, 448, 768, 1040, 1152),
  ("float32", "float16", "bfloat16", "bfloat16", "bfloat16", "bfloat16"),
)


class Layer(NamedTuple):
  """A layer and its tokens, all but the random numbers."""

  groups: int  # of tokens, along the axis "data"
  ranks: int  # of a group
  experts: int
  tokens: int
  top_k: int
  width: int
  inner: int
  layout: str
  biases: tuple[str, ...]
  load: str
  masked: bool
  dtype: str
  weights_dtype: str
  config: BalanceConfig

  @property
  def bound(self) -> float:
    return max(BOUNDS[self.dtype], BOUNDS[self.weights_dtype])


def draw(number: int, most_ranks: int, sizes: Sizes) -> Layer:
  """The layer of this number."""
  rng = random.Random(number)
  groups = rng.choice((1, 1, 2)) if most_ranks > 1 else 1
  ranks, home = rng.randint(1, most_ranks // groups), rng.choice(sizes.home)
  strategy = rng.choice(("quota", "quota", "quota", "exact", "eplb+", "none"))
  config = BalanceConfig(
    # "exact" refuses slots that do not suffice.
    replica_slots="auto" if strategy == "exact" else rng.choice(("auto", 0, 1, home, home + 3)),
    strategy=strategy,
    objective=rng.choice(("time", "balance")),
    target=rng.choice((None, None, 1.0, 1.05, 1.5)),
    min_tokens_per_replica=rng.choice((1, 1, 4, 20)),
    capacity_factor=rng.choice(("auto", "auto", 1.0, 1.1, 2.5)),
    domain_size=rng.choice(("auto", None, *(n for n in range(1, ranks + 1) if ranks % n == 0))),
    transfer=rng.choice(("auto", "direct", "relay")),
    copy_rows=rng.choice((None, 0, 5, 50)),
    batch_invariant=rng.random() < 0.2,
  )
  dtype = rng.choice(sizes.dtypes)
  return Layer(
    groups=groups,
    ranks=ranks,
    experts=ranks * home,
    tokens=groups * ranks * rng.choice(sizes.tokens),
    top_k=rng.randint(1, min(6, ranks * home)),
    width=rng.choice(sizes.widths),
    inner=rng.choice(sizes.widths),
    layout=rng.choice(_LAYOUTS),
    biases=tuple(name for name in BIASES if rng.random() < 0.3),
    load=rng.choice(_LOADS),
    masked=rng.random() < 0.3,
    dtype=dtype,
    weights_dtype=rng.choice((dtype, dtype, "float32")),
    config=config,
  )


def error(number: int, which: Layer) -> float:
  """The largest relative error of the output and of all gradients."""
  arguments = which._asdict()
  mesh = make_mesh(arguments.pop("ranks"), arguments.pop("groups"))
  config = arguments.pop("config")
  problem = make_problem(mesh, seed=number, **arguments)
  y, _, grads = value_and_grads(layer(problem, config), problem)
  return relative_error((y, grads), dense(problem))


def by_time(which: Layer) -> Layer:
  """The same, by the planner that decides whether a layer plans."""
  slots = which.config.replica_slots or "auto"
  config = dataclasses.replace(
    which.config, strategy="quota", objective="time", replica_slots=slots, domain_size="auto"
  )
  return which._replace(config=config)


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
  parser.add_argument("--first", type=int, default=0, help="number of the first layer")
  parser.add_argument("--layers", type=int, default=sys.maxsize, help="begin no more than these")
  parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after these")
  parser.add_argument("--one-pass", action="store_true", help="plan in one pass alone")
  args = parser.parse_args(argv)
  ranks, device = jax.device_count(), jax.devices()[0]
  sizes = GPU if device.platform == "gpu" else CPU
  end, wrong, done = time.monotonic() + args.seconds, 0, 0
  with jax.default_matmul_precision("highest"):  # of float32, which GPUs round
    while done < args.layers and time.monotonic() < end:
      number = args.first + done
      which = draw(number, ranks, sizes)
      if args.one_pass:
        with planning_in_one_pass(training=number % 2 == 0):
          off = error(number, which := by_time(which))
      else:
        off = error(number, which)
      if not off <= which.bound:
        wrong += 1
        print(f"{number}: off by {off:.1e}: {which}", flush=True)
      done += 1
      jax.clear_caches()  # the programs of a hundred layers are too many for a process
  print(f"{done} layers on up to {ranks} x {device.device_kind}, {wrong} off", flush=True)
  return 1 if wrong else 0


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", 8)  # GPUs stay as many as there are
  raise SystemExit(main())
