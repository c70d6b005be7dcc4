"""The training step, on a mesh, with gradient accumulation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ultraep_jax as uep
from tiny_moe.data import batch_at
from tiny_moe.model import LanguageModel, Scalars, Stats
from tiny_moe.settings import Settings

Array = jax.Array
Params = Any  # nnx.State


class TrainState(NamedTuple):
  """All that training changes and a checkpoint holds. Copies of experts are in none of it."""

  params: Params
  opt_state: optax.OptState


class Training(NamedTuple):
  """A model ready to train.

  Attributes:
    state: the initial state, placed on the mesh.
    step: ``(state, bytes_ABS) -> (state, scalars, stats)``; takes the memory of the old state.
      The statistics have leading axes of microbatches and token groups.
    loss: ``(params, bytes_BS) -> (loss with the router's, scalars)``.
  """

  state: TrainState
  step: Callable[[TrainState, Array], tuple[TrainState, Scalars, Stats]]
  loss: Callable[[Params, Array], tuple[Array, Scalars]]


def make_mesh(settings: Settings) -> jax.sharding.Mesh:
  """The first devices, with mesh axes ``("expert",)`` or ``("data", "expert")``."""
  axes = {"data": settings.data} if settings.data > 1 else {}
  axes["expert"] = settings.ranks
  return jax.make_mesh(
    tuple(axes.values()),
    tuple(axes),
    axis_types=(AxisType.Auto,) * len(axes),
    devices=jax.devices()[: settings.devices],
  )


def make_training(settings: Settings, moe_class: type[uep.nnx.MoE] | None = None) -> Training:
  """Initialises a model on the mesh in context.

  Args:
    settings: of the run.
    moe_class: see ``LanguageModel``.
  """
  optimizer = make_optimizer(settings)
  graphdef = nnx.graphdef(nnx.eval_shape(lambda: LanguageModel(settings, moe_class)))

  def init() -> TrainState:
    params = nnx.state(LanguageModel(settings, moe_class), nnx.Param)
    return TrainState(params, optimizer.init(params))

  def loss_fn(params: Params, bytes_BS: Array) -> tuple[Array, tuple[Scalars, Stats]]:
    model = nnx.merge(graphdef, params)
    logits_BTV, balance_loss, stats = model(bytes_BS[:, :-1])
    loss_BT = optax.softmax_cross_entropy_with_integer_labels(
      logits_BTV.astype(jnp.float32), bytes_BS[:, 1:]
    )
    scalars = {"loss": jnp.mean(loss_BT)}
    for layer, layer_stats in stats.items():
      scalars |= layer_stats.scalars(layer + "/")
    return scalars["loss"] + settings.balance_loss * balance_loss, (scalars, stats)

  def step(state: TrainState, bytes_ABS: Array) -> tuple[TrainState, Scalars, Stats]:
    """One update from A microbatches; experts are balanced anew in each."""

    def add_microbatch(total: Params, bytes_BS: Array) -> tuple[Params, tuple[Scalars, Stats]]:
      grads, told = jax.grad(loss_fn, has_aux=True)(state.params, bytes_BS)
      return jax.tree.map(jnp.add, total, grads), told

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    total, (scalars_A, stats) = jax.lax.scan(add_microbatch, zeros, bytes_ABS)
    grads = jax.tree.map(lambda leaf: leaf / bytes_ABS.shape[0], total)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, opt_state), jax.tree.map(jnp.mean, scalars_A), stats

  def loss(params: Params, bytes_BS: Array) -> tuple[Array, Scalars]:
    value, (scalars, _) = loss_fn(params, bytes_BS)
    return value, scalars

  # Experts lie over their mesh axis, all else on every device, and a step keeps it so.
  placement = nnx.get_named_sharding(jax.eval_shape(init), jax.sharding.get_mesh())
  return Training(
    state=jax.jit(init, out_shardings=placement)(),
    step=jax.jit(step, donate_argnums=0, out_shardings=(placement, None, None)),
    loss=jax.jit(loss),
  )


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
  """AdamW on clipped gradients, with a linear warm-up and a cosine decay over the run."""
  schedule = optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=settings.learning_rate,
    warmup_steps=max(settings.steps // 10, 1),
    decay_steps=max(settings.steps, 2),
  )
  return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))


def microbatches(text: np.ndarray, settings: Settings, step: int) -> Array:
  """The data of one step, ``[A, B, seq + 1]``, with B spread over all devices of the mesh."""
  bytes_NS = batch_at(text, settings.seed, step, settings.batch, settings.seq)
  mesh = jax.sharding.get_mesh()
  return jax.device_put(
    bytes_NS.reshape(settings.accumulate, -1, settings.seq + 1),
    NamedSharding(mesh, P(None, mesh.axis_names)),
  )


def held_out_loss(
  training: Training, params: Params, text: np.ndarray, settings: Settings, batches: int = 8
) -> float:
  """The mean loss over fixed windows of the held-out text."""
  losses = []
  for i in range(batches):
    for bytes_BS in microbatches(text, settings, i):
      losses.append(training.loss(params, bytes_BS)[1]["loss"])
  return float(np.mean(jax.device_get(losses)))
