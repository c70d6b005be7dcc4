"""Prefill of the trained tiny model: prompts of held-out text through the engine, balanced or not.

  python examples/train_tiny_moe.py --checkpoint-dir runs/state
  python examples/serve_tiny_moe.py --checkpoint-dir runs/state

The router is the one that training made. For each strategy it prints how uneven the ranks' loads
were, as chosen and as computed, and how often the likeliest next byte was the right one, which no
strategy may change.
"""

import argparse
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from tiny_moe.checkpoints import load_params
from tiny_moe.data import load_text
from tiny_moe.serving import PackedLanguageModel
from tiny_moe.settings import Settings, SettingsError
from tiny_moe.training import make_mesh
from tqdm import tqdm

from ultraep_jax import serve

CPU_DEVICES = 8
STRATEGIES = ("none", "quota")


class Served(NamedTuple):
  """What serving all prompts once did.

  Attributes:
    tokens_N: the likeliest byte after each prompt.
    right: share of prompts that it is the right byte for.
    batches: run.
    before_L: busiest over mean rank in each layer as the router chose, mean over batches.
    after_L: the same as computed.
  """

  tokens_N: np.ndarray
  right: float
  batches: int
  before_L: np.ndarray
  after_L: np.ndarray


def main(argv: Sequence[str] | None = None) -> dict[str, Served]:
  """Serves the same prompts with every strategy; a bad flag ends the program with a message."""
  parser = argparse.ArgumentParser(
    prog="serve_tiny_moe", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  add = parser.add_argument
  add("--checkpoint-dir", type=pathlib.Path, required=True, help="of train_tiny_moe.py")
  add("--requests", type=int, default=256, help="prompts (default: 256)")
  add("--lengths", type=int, nargs=2, default=(8, 128), help="bytes of a prompt (default: 8 128)")
  add("--buckets", type=int, nargs="+", default=(256, 512), help="bytes of a row")
  add("--alignment", type=int, default=16, help="where prompts start in a row")
  add("--replica-slots", type=int, default=2, help="expert copies that a rank can hold")
  args = parser.parse_args(argv)
  (shortest, longest), most = args.lengths, max(args.buckets)
  if not 1 <= shortest <= longest <= most:
    parser.error(f"--lengths: expected two rising ones in [1, {most}], got {shortest} {longest}")
  results = {}
  try:
    for strategy in STRATEGIES:
      ranks = jax.device_count()
      settings = Settings(
        strategy=strategy, ranks=ranks, replica_slots=args.replica_slots, batch=ranks
      )
      with jax.set_mesh(make_mesh(settings)):
        params, settings = load_params(args.checkpoint_dir, settings)
        model = PackedLanguageModel(settings, args.alignment)
        nnx.update(model, params)
        results[strategy] = serve_prompts(model, args)
      print(describe(strategy, results[strategy]))
  except (SettingsError, ValueError) as error:
    parser.error(str(error))
  return results


def serve_prompts(model: PackedLanguageModel, args: argparse.Namespace) -> Served:
  _, held_out = load_text()
  prompts, answers = make_prompts(held_out, args.requests, *args.lengths)
  config = serve.EngineConfig(
    buckets=tuple(args.buckets), alignment=args.alignment, queue_limit=args.requests
  )
  with serve.PrefillEngine(model, config) as engine:
    futures = [engine.submit(prompt) for prompt in prompts]
    done = [future.result() for future in tqdm(futures, unit="prompt", leave=False)]
    seen = engine.metrics()
  tokens_N = np.array([result.token for result in done])
  return Served(
    tokens_N,
    float(np.mean(tokens_N == answers)),
    seen.batches,
    seen.imbalance_before.mean(axis=0),
    seen.imbalance_after.mean(axis=0),
  )


def make_prompts(
  text: np.ndarray, count: int, shortest: int, longest: int
) -> tuple[list[np.ndarray], np.ndarray]:
  """Pieces of text, and the byte that follows each; the same in every run."""
  rng = np.random.default_rng(0)
  lengths = rng.integers(shortest, longest + 1, count)
  starts = rng.integers(0, len(text) - longest, count)
  prompts = [text[a : a + n].astype(np.int32) for a, n in zip(starts, lengths, strict=True)]
  return prompts, text[starts + lengths]


def describe(strategy: str, served: Served) -> str:
  layers = ", ".join(
    f"{before:.2f} -> {after:.3f}"
    for before, after in zip(served.before_L, served.after_L, strict=True)
  )
  return (
    f"{strategy:>6}: {served.batches} batches, imbalance by layer {layers}, "
    f"next byte right {served.right:.1%}"
  )


if __name__ == "__main__":
  if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    # Possible until JAX first looks for devices; without effect where it finds accelerators.
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
  main()
