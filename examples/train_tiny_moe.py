"""Trains a byte-level Mixture-of-Experts language model and balances its experts in every step.

Nothing but the router's task loss shapes the router: no auxiliary loss asks it for even loads.
Each layer counts what its router has chosen, copies the busy experts to other ranks and splits
their tokens, in every forward pass. The text is what every Python carries: the manual's topics
and sources of the standard library.

  python examples/train_tiny_moe.py                     # 8 virtual CPU devices, or all GPUs
  python examples/train_tiny_moe.py --strategy dense    # the same model without expert parallelism
  python examples/train_tiny_moe.py --checkpoint-dir runs/state --resume
"""

import argparse
import contextlib
import functools
import json
import math
import os
import pathlib
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pydoc_data import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from tqdm import tqdm

import ultraep_jax as uep
from ultraep_jax.gating import GatingConfig, gate, load_balance_loss

Array = jax.Array
Params = nnx.State
Scalars = dict[str, Array]

STRATEGIES = ("quota", "none", "ideal", "dense")
CPU_DEVICES = 8
# What decides the numbers of a run, so what a resumed run must repeat.
FIXED_BY_CHECKPOINT = (
  "steps", "batch", "seq", "accumulate", "learning_rate", "balance_loss", "dtype", "seed",
  "layers", "width", "experts",
)  # fmt: skip


# --- data ------------------------------------------------------------------------------------


def documents(num_sources: int = 60) -> list[bytes]:
  """The topics of Python's manual and the first of the standard library's sources."""
  library = pathlib.Path(sysconfig.get_path("stdlib"))
  sources = sorted(library.glob("*.py"))[:num_sources]
  texts = [text.encode() for _, text in sorted(topics.topics.items())]
  return texts + [path.read_bytes() for path in sources]


def load_text() -> tuple[np.ndarray, np.ndarray]:
  """Training and held-out text, ``[bytes]`` uint8 each; every 16th document is held out."""
  texts = documents()
  held_out = b"\n".join(texts[::16])
  kept = b"\n".join(text for i, text in enumerate(texts) if i % 16)
  return np.frombuffer(kept, np.uint8), np.frombuffer(held_out, np.uint8)


def batch_at(text: np.ndarray, seed: int, step: int, batch: int, seq: int) -> np.ndarray:
  """The windows of one step, ``[batch, seq + 1]`` int32: a function of the step, not of history."""
  starts_B1 = np.random.default_rng((seed, step)).integers(0, len(text) - seq, (batch, 1))
  return text[starts_B1 + np.arange(seq + 1)].astype(np.int32)


# --- model -----------------------------------------------------------------------------------


class DenseAux(NamedTuple):
  """What a dense layer has to tell: nothing is distributed."""

  load_balance_loss: Array


class DenseMoE(uep.nnx.MoE):
  """The same parameters and the same function: every expert on every token."""

  def __call__(self, x: Array, mask: Array | None = None) -> tuple[Array, DenseAux]:
    logits = jnp.matmul(
      x.astype(jnp.float32), self.router[...], precision=jax.lax.Precision.HIGHEST
    )
    index, gates, scores = gate(logits, self.gating, mask_T=mask)
    weights = uep.ExpertWeights(self.wi_gate[...], self.wi_up[...], self.wo[...])
    flat = (value.reshape(-1, value.shape[-1]) for value in (x, index, gates))
    y = uep.testing.dense_moe(*flat, weights).astype(x.dtype).reshape(x.shape)
    return y, DenseAux(load_balance_loss(scores, index))


class Attention(nnx.Module):
  """Causal self-attention with rotary positions."""

  def __init__(self, width: int, heads: int, dtype: Any, rngs: nnx.Rngs):
    linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
    self.qkv = linear(width, 3 * width)
    self.out = linear(width, width)
    self.heads = heads

  def __call__(self, x_BTD: Array) -> Array:
    qkv = self.qkv(x_BTD).reshape(*x_BTD.shape[:2], 3 * self.heads, -1)
    query, key, value = jnp.split(qkv, 3, axis=2)
    mixed = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
    return self.out(mixed.reshape(x_BTD.shape))


def rotate(x_BTHC: Array) -> Array:
  """Rotary positions: turns each pair of channels by its position times its frequency."""
  seq, half = x_BTHC.shape[1], x_BTHC.shape[3] // 2
  frequency_C = np.exp(-math.log(10_000) * np.arange(half) / half)
  angle = np.outer(np.arange(seq), frequency_C)[None, :, None, :]
  cos, sin = jnp.asarray(np.cos(angle), x_BTHC.dtype), jnp.asarray(np.sin(angle), x_BTHC.dtype)
  left, right = jnp.split(x_BTHC, 2, axis=-1)
  return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Block(nnx.Module):
  """Attention and a mixture of experts, each on a normalised residual stream."""

  def __init__(self, width: int, dtype: Any, make_moe: Callable[..., uep.nnx.MoE], rngs: nnx.Rngs):
    self.norm_attention = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
    self.attention = Attention(width, heads=width // 16, dtype=dtype, rngs=rngs)
    self.norm_moe = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
    self.moe = make_moe(rngs=rngs)

  def __call__(self, x_BTD: Array) -> tuple[Array, Any]:
    x_BTD += self.attention(self.norm_attention(x_BTD))
    y_BTD, aux = self.moe(self.norm_moe(x_BTD))
    return x_BTD + y_BTD, aux


class LanguageModel(nnx.Module):
  """Bytes to logits of the next byte, with tied embeddings."""

  def __init__(self, args: argparse.Namespace, moe_class: type[uep.nnx.MoE] | None = None):
    """Builds the model that the flags describe, with ``moe_class`` in place of their MoE."""
    rngs, dtype = nnx.Rngs(args.seed), jnp.dtype(args.dtype)
    dense = args.strategy == "dense"
    config = uep.BalanceConfig(
      replica_slots=args.replica_slots,
      strategy="none" if dense else args.strategy,
      objective="balance",
    )
    make_moe = functools.partial(
      moe_class or (DenseMoE if dense else uep.nnx.MoE),
      embed_dim=args.width,
      expert_dim=2 * args.width,
      gating=GatingConfig(num_experts=args.experts, num_experts_per_tok=2),
      config=config,
    )
    init = nnx.initializers.normal(0.02)
    self.embed = nnx.Embed(256, args.width, dtype=dtype, embedding_init=init, rngs=rngs)
    self.blocks = nnx.List(
      Block(args.width, dtype, make_moe, rngs) for _ in range(args.layers)
    )
    self.norm = nnx.RMSNorm(args.width, dtype=dtype, rngs=rngs)

  def __call__(self, bytes_BT: Array) -> tuple[Array, Array, Scalars]:
    """Logits ``[B, T, 256]``, the layers' mean balance loss, and what balancing did in each."""
    x_BTD, balance_losses, scalars = self.embed(bytes_BT), [], {}
    for i, block in enumerate(self.blocks):
      x_BTD, aux = block(x_BTD)
      balance_losses.append(aux.load_balance_loss)
      if isinstance(aux, uep.nnx.MoEAux):
        scalars |= aux.stats.scalars(f"layer{i}/")
    return self.embed.attend(self.norm(x_BTD)), sum(balance_losses) / len(balance_losses), scalars


# --- training --------------------------------------------------------------------------------


class TrainState(NamedTuple):
  """All that a checkpoint holds. Copies of experts are in none of it."""

  params: Params
  opt_state: optax.OptState


class Training(NamedTuple):
  """A model ready to train, on its mesh."""

  state: TrainState
  step: Callable[[TrainState, Array], tuple[TrainState, Scalars]]
  loss: Callable[[Params, Array], tuple[Array, Scalars]]


def make_training(
  args: argparse.Namespace, mesh: jax.sharding.Mesh, moe_class: type[uep.nnx.MoE] | None = None
) -> Training:
  """Initialises the state and compiles nothing yet. The mesh must be in context."""
  optimizer = make_optimizer(args.learning_rate, args.steps)
  graphdef = nnx.graphdef(nnx.eval_shape(lambda: LanguageModel(args, moe_class)))

  def init() -> TrainState:
    params = nnx.state(LanguageModel(args, moe_class), nnx.Param)
    return TrainState(params, optimizer.init(params))

  def loss_fn(params: Params, bytes_BS: Array) -> tuple[Array, Scalars]:
    logits, balance_loss, scalars = nnx.merge(graphdef, params)(bytes_BS[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits.astype(jnp.float32), bytes_BS[:, 1:]
    )
    loss = jnp.mean(losses)
    return loss + args.balance_loss * balance_loss, {"loss": loss, **scalars}

  def step(state: TrainState, bytes_ABS: Array) -> tuple[TrainState, Scalars]:
    """One update from A microbatches; experts are balanced anew in each."""

    def add_microbatch(total: Params, bytes_BS: Array) -> tuple[Params, Scalars]:
      grads, scalars = jax.grad(loss_fn, has_aux=True)(state.params, bytes_BS)
      return jax.tree.map(jnp.add, total, grads), scalars

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    total, scalars_A = jax.lax.scan(add_microbatch, zeros, bytes_ABS)
    grads = jax.tree.map(lambda leaf: leaf / bytes_ABS.shape[0], total)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, opt_state), jax.tree.map(jnp.mean, scalars_A)

  # Experts lie over their mesh axis, all else on every device; a step keeps it so.
  placement = nnx.get_named_sharding(jax.eval_shape(init), mesh)
  return Training(
    state=jax.jit(init, out_shardings=placement)(),
    step=jax.jit(step, donate_argnums=0, out_shardings=(placement, None)),
    loss=jax.jit(loss_fn),
  )


def make_optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
  """AdamW under a clipped norm, with a linear warm-up and a cosine decay over the run."""
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, learning_rate, warmup_steps=max(steps // 10, 1), decay_steps=max(steps, 2)
  )
  return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))


def token_batches(
  text: np.ndarray, args: argparse.Namespace, mesh: jax.sharding.Mesh, first_step: int
) -> Iterator[tuple[int, Array]]:
  """Each step's number and microbatches ``[A, B, seq + 1]``, spread over all devices."""
  sharding = NamedSharding(mesh, P(None, mesh.axis_names))
  for step in range(first_step, args.steps):
    bytes_NS = batch_at(text, args.seed, step, args.batch, args.seq)
    yield step, jax.device_put(bytes_NS.reshape(args.accumulate, -1, args.seq + 1), sharding)


def held_out_loss(
  training: Training, state: TrainState, text: np.ndarray, args: argparse.Namespace, count: int = 8
) -> float:
  """Mean loss over fixed windows of the held-out text."""
  batches = [batch_at(text, 0, i, args.batch // args.accumulate, args.seq) for i in range(count)]
  return float(np.mean([training.loss(state.params, batch)[1]["loss"] for batch in batches]))


# --- checkpoints -----------------------------------------------------------------------------


def open_checkpoints(args: argparse.Namespace) -> ocp.CheckpointManager:
  options = ocp.CheckpointManagerOptions(save_interval_steps=args.checkpoint_every, max_to_keep=2)
  return ocp.CheckpointManager(args.checkpoint_dir.absolute(), options=options)


def save(manager: ocp.CheckpointManager, steps_done: int, state: TrainState, args) -> None:
  """Saves if the manager's interval or the end of the run asks for it."""
  flags = {name: getattr(args, name) for name in FIXED_BY_CHECKPOINT}
  parts = {"state": ocp.args.StandardSave(state), "flags": ocp.args.JsonSave(flags)}
  manager.save(steps_done, args=ocp.args.Composite(**parts), force=steps_done == args.steps)


def restore(
  manager: ocp.CheckpointManager, state: TrainState, args: argparse.Namespace
) -> tuple[TrainState, int]:
  """The newest state, placed like ``state``, and the steps it has behind it.

  Raises:
    ValueError: there is no checkpoint, or it belongs to a run with other flags.
  """
  steps_done = manager.latest_step()
  if steps_done is None:
    raise ValueError(f"--resume: expected a checkpoint in {manager.directory}, got none")
  flags = manager.restore(steps_done, args=ocp.args.Composite(flags=ocp.args.JsonRestore()))["flags"]
  for name in FIXED_BY_CHECKPOINT:
    if getattr(args, name) != flags[name]:
      flag = "--" + name.replace("_", "-")
      raise ValueError(
        f"{flag}: expected {flags[name]} as in the checkpoint, got {getattr(args, name)}"
      )
  target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
  parts = ocp.args.Composite(state=ocp.args.StandardRestore(target))
  return manager.restore(steps_done, args=parts)["state"], steps_done


# --- records ---------------------------------------------------------------------------------


def open_metrics(path: pathlib.Path, first_step: int) -> tuple[list[dict[str, float]], Any]:
  """The records before ``first_step`` that the file already has, and the file to append to."""
  lines = path.read_text().splitlines() if first_step and path.exists() else []
  history = [record for record in map(json.loads, lines) if record["step"] < first_step]
  file = path.open("w", buffering=1)
  file.writelines(json.dumps(record) + "\n" for record in history)
  return history, file


def record_of(step: int, seconds: float, scalars: Scalars) -> dict[str, float]:
  """One line of the metrics: the scalars of every layer, and the imbalance over layers."""
  record: dict[str, float] = {"step": step, "seconds": seconds}
  record |= {name: float(value) for name, value in jax.device_get(scalars).items()}
  for name in ("imbalance_before", "imbalance_after"):
    layers = [value for key, value in record.items() if key.endswith("/" + name)]
    if layers:
      record[name] = float(np.mean(layers))
  return record


def plot(history: list[dict[str, float]], path: pathlib.Path) -> None:
  """Loss and imbalance over the steps, as a PNG."""
  figure = Figure(figsize=(10, 4), layout="constrained")
  left, right = figure.subplots(1, 2)
  steps = [record["step"] for record in history]
  left.plot(steps, [record["loss"] for record in history])
  left.set(xlabel="step", ylabel="loss, nats per byte")
  for name in ("imbalance_before", "imbalance_after"):
    if name in history[0]:
      right.plot(steps, [record[name] for record in history], label=name.replace("_", " "))
      right.legend()
  right.set(xlabel="step", ylabel="busiest rank / mean rank")
  figure.savefig(path, dpi=120)


def summarise(history: list[dict[str, float]], val_loss: float, new_steps: int) -> dict[str, float]:
  """The numbers of the table at the end; the first step compiles and is not timed."""

  def mean(name: str, records: list[dict[str, float]]) -> float:
    return float(np.mean([record[name] for record in records]))

  timed = history[len(history) - new_steps + 1 :]
  results = {"train_loss": mean("loss", history[-10:]), "val_loss": val_loss}
  for name in ("imbalance_before", "imbalance_after"):
    if name in history[0]:
      results[name] = mean(name, history)
  if timed:
    results["steps_per_second"] = 1 / mean("seconds", timed)
  return results


# --- command line ----------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
  """The flags, checked; a bad one ends the program with a message."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--strategy", choices=STRATEGIES, default="quota", help="dense: every expert, one device")
  add("--ranks", type=int, help="devices that share the experts (default: all)")
  add("--data", type=int, default=1, help="groups of such ranks")
  add("--replica-slots", type=int, default=2, help="expert copies that a rank can hold")
  add("--steps", type=int, default=200)
  add("--batch", type=int, default=16, help="sequences per step")
  add("--seq", type=int, default=64, help="bytes per sequence")
  add("--accumulate", type=int, default=1, help="microbatches that a step is cut into")
  add("--learning-rate", type=float, default=3e-3)
  add("--balance-loss", type=float, default=1e-3, help="weight of the router's auxiliary loss")
  add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation")
  add("--seed", type=int, default=0)
  add("--layers", type=int, default=2)
  add("--width", type=int, default=64)
  add("--experts", type=int, default=16)
  add("--out", type=pathlib.Path, default=pathlib.Path("runs/tiny_moe"), metavar="DIR")
  add("--checkpoint-dir", type=pathlib.Path, metavar="DIR")
  add("--checkpoint-every", type=int, default=100, metavar="STEPS")
  add("--resume", action="store_true", help="go on from the newest checkpoint")
  args = parser.parse_args(argv)
  if args.ranks is None and args.data > 0:
    args.ranks = 1 if args.strategy == "dense" else max(jax.device_count() // args.data, 1)
  try:
    check(args)
  except ValueError as error:
    parser.error(str(error))
  return args


def check(args: argparse.Namespace) -> None:
  """Raises:
  ValueError: a flag is out of range or does not fit another.
  """
  for name in ("data", "ranks", "steps", "batch", "seq", "accumulate", "layers", "experts"):
    if getattr(args, name) < 1:
      raise ValueError(f"--{name}: expected at least 1, got {getattr(args, name)}")
  devices = args.data * args.ranks
  multiples = (
    ("experts", args.experts, args.ranks, "--ranks"),
    ("batch", args.batch, devices * args.accumulate, "--ranks x --data x --accumulate"),
    ("width", args.width, 32, "two heads of 16 channels"),
  )
  for name, value, divisor, what in multiples:
    if value < 1 or value % divisor:
      raise ValueError(f"--{name}: expected a multiple of {divisor} ({what}), got {value}")
  if args.experts < 2:
    raise ValueError(f"--experts: expected at least 2, got {args.experts}")
  if args.replica_slots < 0:
    raise ValueError(f"--replica-slots: expected at least 0, got {args.replica_slots}")
  if args.checkpoint_every < 1:
    raise ValueError(f"--checkpoint-every: expected at least 1, got {args.checkpoint_every}")
  if devices > jax.device_count():
    raise ValueError(
      f"--ranks x --data: expected at most {jax.device_count()} devices, got {devices}"
    )
  if args.strategy == "dense" and devices > 1:
    raise ValueError(f"--ranks: expected 1 with --strategy dense, got {args.ranks}")
  if args.resume and args.checkpoint_dir is None:
    raise ValueError("--resume: expected --checkpoint-dir, got none")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Trains as the flags say, writes metrics, figure and checkpoints.

  Returns:
    The numbers of the summary, ``history`` (one record a step) and the paths of the files.
  """
  args = parse(argv)
  args.out.mkdir(parents=True, exist_ok=True)
  devices = jax.devices()[: args.data * args.ranks]
  axes = {"data": args.data, "expert": args.ranks} if args.data > 1 else {"expert": args.ranks}
  kinds = (AxisType.Auto,) * len(axes)
  mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)
  print(f"{args.strategy} on {devices[0].platform}, mesh {axes}, {args.steps} steps", flush=True)
  with contextlib.ExitStack() as stack:
    stack.enter_context(jax.set_mesh(mesh))
    checkpoints = args.checkpoint_dir and stack.enter_context(open_checkpoints(args))
    results = run(args, mesh, checkpoints)
  print("\n".join(f"{name:>18}  {results[name]:.4f}" for name in results if name != "history"))
  return results


def run(
  args: argparse.Namespace, mesh: jax.sharding.Mesh, checkpoints: ocp.CheckpointManager | None
) -> dict[str, Any]:
  """The loop over the steps, and the reports after it."""
  text, held_out = load_text()
  training = make_training(args, mesh)
  state, first_step = training.state, 0
  if args.resume:
    state, first_step = restore(checkpoints, state, args)
  history, file = open_metrics(args.out / "metrics.jsonl", first_step)
  with file, tqdm(total=args.steps, initial=first_step, disable=None) as bar:
    started = time.perf_counter()
    for step, bytes_ABS in token_batches(text, args, mesh, first_step):
      state, scalars = training.step(state, bytes_ABS)
      now = time.perf_counter()
      record = record_of(step, now - started, scalars)
      started = now
      history.append(record)
      file.write(json.dumps(record) + "\n")
      if checkpoints:
        save(checkpoints, step + 1, state, args)
      bar.update()
      bar.set_postfix_str(describe(record))
  val_loss = held_out_loss(training, state, held_out, args)
  plot(history, args.out / "training.png")
  return {**summarise(history, val_loss, args.steps - first_step), "history": history}


def describe(record: dict[str, float]) -> str:
  text = f"loss {record['loss']:.3f}"
  if "imbalance_before" in record:
    text += f", imbalance {record['imbalance_before']:.2f} → {record['imbalance_after']:.2f}"
  return text


if __name__ == "__main__":
  if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)  # of no effect on other backends
  main()
