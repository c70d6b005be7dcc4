"""MaxText's layers, models and trainer in the smallest sizes, on virtual CPU devices."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import balanced_maxtext
import jax
import jax.numpy as jnp
import maxtext.configs
import numpy as np
import train_balanced
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from maxtext.configs import pyconfig
from maxtext.layers import moe
from maxtext.layers.initializers import nd_dense_init
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, model_creation_utils

BASE = str(pathlib.Path(maxtext.configs.__path__[0]) / "base.yml")
SIZES = {
  "model_name": "default",
  "decoder_block": "mixtral",
  "override_model_config": True,
  "dtype": "float32",
  "num_experts": 16,
  "num_experts_per_tok": 2,
  "base_emb_dim": 32,
  "base_moe_mlp_dim": 64,
  "base_mlp_dim": 64,
  "base_num_decoder_layers": 2,
  "base_num_query_heads": 2,
  "base_num_kv_heads": 2,
  "head_dim": 16,
  "vocab_size": 64,
  "max_target_length": 16,
  "per_device_batch_size": 1,
  "attention": "dot_product",
}
RUN = {
  "run_name": "test",
  "hardware": "cpu",
  "skip_jax_distributed_system": True,
  "dataset_type": "synthetic",
  "enable_checkpointing": False,
  "enable_goodput_recording": False,
  "monitor_goodput": False,
  "enable_tensorboard": False,
  "learning_rate": 0.01,
}


def configure(**options: Any) -> Any:
  """A configuration of a tiny model; ``options`` come first."""
  return pyconfig.initialize(["", BASE], **(SIZES | RUN | options))


class Layer:
  """A ``RoutedMoE`` on the mesh of its configuration."""

  def __init__(self, config: Any, devices: Any = None):
    self.config = config
    self.mesh = maxtext_utils.get_mesh_from_config(config, devices)

    def make() -> moe.RoutedMoE:
      return moe.RoutedMoE(
        config=config,
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        mesh=self.mesh,
        kernel_init=nd_dense_init(1.0, "fan_in", "truncated_normal"),
        kernel_axes=("embed_router", None),
        intermediate_dim=config.moe_mlp_dim,
        dtype=config.dtype,
        weight_dtype=config.weight_dtype,
        rngs=nnx.Rngs(0),
      )

    with jax.set_mesh(self.mesh), logical_axis_rules(config.logical_axis_rules):
      self.moe = nnx.jit(make)()

  def parameters(self) -> Any:
    kinds = nnx.Any(nnx.Param, moe.MoEBiasVar)
    return jax.device_get(nnx.to_pure_dict(nnx.state(self.moe, kinds)))

  def set_parameters(self, values: Any) -> None:
    state = nnx.state(self.moe, nnx.Any(nnx.Param, moe.MoEBiasVar))
    placed = jax.tree.map(
      lambda value, old: jax.device_put(value, old.sharding), values, nnx.to_pure_dict(state)
    )
    nnx.replace_by_pure_dict(state, placed)
    nnx.update(self.moe, state)

  def outputs_and_gradients(self, x_BLD: Any, **arguments: Any) -> dict[str, np.ndarray]:
    """What the layer returns, and the gradients of parameters and input of some loss, by name."""

    @nnx.jit
    def run(layer: moe.RoutedMoE, x_BLD: jax.Array) -> Any:
      def loss(layer: moe.RoutedMoE, x_BLD: jax.Array) -> Any:
        y_BLD, balance_loss, update_E = layer(x_BLD, **arguments)
        total = jnp.sum(jnp.sin(3 * y_BLD.astype(jnp.float32)))
        if balance_loss is not None:
          total = total + balance_loss
        return total, {"y": y_BLD, "balance_loss": balance_loss, "update": update_E}

      wrt = (nnx.DiffState(0, nnx.Param), 1)
      (grads, grad_BLD), out = nnx.grad(loss, argnums=wrt, has_aux=True)(layer, x_BLD)
      return out | {"grad": nnx.to_pure_dict(grads), "grad_x": grad_BLD}

    with jax.set_mesh(self.mesh), logical_axis_rules(self.config.logical_axis_rules):
      x_BLD = jax.device_put(x_BLD, NamedSharding(self.mesh, P()))
      out = jax.device_get(run(self.moe, x_BLD))
    return by_path(out)

  def scalars(self) -> dict[str, float]:
    """Of what the layer sowed since this was asked last."""
    values = balanced_maxtext.scalars(nnx.to_pure_dict(nnx.pop(self.moe, nnx.Intermediate)))
    return {name: float(value) for name, value in values.items()}


def skewed_tokens(shape: tuple[int, ...]) -> np.ndarray:
  """Tokens that have something in common, so that the router has favourites."""
  rng = np.random.default_rng(0)
  return (rng.normal(size=shape) + 2 * rng.normal(size=(1, 1, shape[-1]))).astype(np.float32)


def by_path(tree: Any) -> dict[str, np.ndarray]:
  return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def differences(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
  """Norms of differences over norms."""
  assert got.keys() == expected.keys()

  def relative(a: np.ndarray, b: np.ndarray) -> float:
    a, b = (np.asarray(value, np.float64) for value in (a, b))
    assert a.shape == b.shape
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))

  return {name: relative(got[name], expected[name]) for name in expected}


def model_gradients(config: Any, prepare: Callable[[Any], Any]) -> dict[str, np.ndarray]:
  """The loss of a whole model on one batch and the gradient of every parameter, by name."""
  mesh = maxtext_utils.get_mesh_from_config(config)
  make, _ = model_creation_utils.create_nnx_abstract_model(config, mesh)
  with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
    model = nnx.jit(make)()
    prepare(model)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    rng = np.random.default_rng(1)
    shape = config.global_batch_size_to_train_on, config.max_target_length
    tokens = rng.integers(config.vocab_size, size=shape).astype(np.int32)
    position = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    ones = np.ones(shape, np.int32)
    data = {
      "inputs": tokens,
      "inputs_position": position,
      "inputs_segmentation": ones,
      "targets": np.roll(tokens, -1, axis=1),
      "targets_position": position,
      "targets_segmentation": ones,
    }

    @jax.jit
    def run(params: Any, rest: Any, data: Any) -> Any:
      def loss(params: Any) -> Any:
        value, _ = train.loss_fn(
          nnx.merge(graphdef, params, rest, copy=True), config, dict(data), None, None
        )
        return value

      value, grads = jax.value_and_grad(loss)(params)
      return {"loss": value, "grad": nnx.to_pure_dict(grads)}

    return by_path(jax.device_get(run(params, rest, data)))


def train_steps(folder: pathlib.Path, balanced: bool, **options: Any) -> list[dict[str, float]]:
  """Runs MaxText's trainer in this process and returns the metrics of each step."""
  metrics = folder / f"metrics_{len(list(folder.iterdir()))}.json"
  given = SIZES | RUN | {"base_output_directory": str(folder), "metrics_file": str(metrics)}
  arguments = [f"{name}={value}" for name, value in (given | options).items()]
  setup, record = train.train_utils.setup_train_loop, train.record_activation_metrics
  try:
    if balanced:
      train_balanced.main(["train", BASE, *arguments])
    else:
      train.main(["train", BASE, *arguments])
  finally:
    train.train_utils.setup_train_loop, train.record_activation_metrics = setup, record
  return [json.loads(line) for line in metrics.read_text().splitlines()]
