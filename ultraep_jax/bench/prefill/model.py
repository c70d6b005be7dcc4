"""The models that prefill is measured on, and routers whose loads are made to order."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ultraep_jax import models
from ultraep_jax.bench.prefill.loads import BiasSearch, popularity
from ultraep_jax.config import BalanceConfig
from ultraep_jax.gating import GatingConfig
from ultraep_jax.packed import PackedBatch
from ultraep_jax.serve import EngineConfig
from ultraep_jax.serve.packing import fill, pack
from ultraep_jax.tools.progress import progress
from ultraep_jax.types import Array

NAMED = {
  "qwen3-30b-a3b": models.ModelConfig(
    architecture="qwen3_moe",
    vocab_size=151_936,
    embed_dim=2048,
    is_moe=(True,) * 48,
    attention=models.GroupedQuery(num_heads=32, num_key_heads=4, head_dim=128, qk_norm="head"),
    rotary=models.Rotary(dim=128, theta=1e6),
    dense_dim=6144,
    expert_dim=768,
    gating=GatingConfig(num_experts=128, num_experts_per_tok=8),
  ),
  "tiny": models.ModelConfig(
    architecture="qwen3_moe",
    vocab_size=512,
    embed_dim=32,
    is_moe=(True,) * 2,
    attention=models.GroupedQuery(num_heads=2, num_key_heads=1, head_dim=16, qk_norm="head"),
    rotary=models.Rotary(dim=16, theta=1e4),
    dense_dim=64,
    expert_dim=32,
    gating=GatingConfig(num_experts=16, num_experts_per_tok=2),
  ),
}


def with_bias(config: models.ModelConfig, layers: int | None) -> models.ModelConfig:
  """The model with selection biases in its routers, cut to its first ``layers``."""
  gating = dataclasses.replace(config.gating, use_selection_bias=True)
  config = config if layers is None else config.first(layers)
  return dataclasses.replace(config, gating=gating)


def build(
  config: models.ModelConfig,
  dtype: jnp.dtype,
  block: int,
  attention: models.AttentionImplementation = "auto",
) -> models.MoETransformer:
  """Random weights, each device making its own; needs the mesh in context."""

  @nnx.jit
  def make() -> models.MoETransformer:
    return models.MoETransformer(
      config,
      balance=BalanceConfig(),
      dtype=dtype,
      param_dtype=dtype,
      attention=attention,
      attention_block=block,
      rngs=nnx.Rngs(0),
    )

  return make()


def balanced_by(model: models.MoETransformer, balance: BalanceConfig) -> models.MoETransformer:
  """The same parameters, not copies of them, with layers that balance in another way."""
  other = nnx.merge(*nnx.split(model))
  other.balance = balance
  return other


class Probe:
  """Runs batches and returns what their layers did, whatever the engine that will serve."""

  def __init__(self, model: models.MoETransformer, config: EngineConfig):
    """Takes the mesh in context."""
    self._mesh = jax.sharding.get_mesh()
    self._config = config
    ranks = self._mesh.shape["expert"]
    balance = BalanceConfig(strategy="none", replica_slots=0, capacity_factor=float(ranks))
    self._graphdef, _ = nnx.split(balanced_by(model, balance))
    self._run = jax.jit(self._loads)

  def batches(self, prompts: Sequence[np.ndarray], most: int) -> list[PackedBatch]:
    """The first batches that the engine would make of the prompts, with the largest bucket."""
    config, rows = self._config, self._mesh.size
    largest = dataclasses.replace(config, buckets=config.buckets[-1:])
    made = []
    while prompts and len(made) < most:
      packing = pack([len(prompt) for prompt in prompts], rows, largest)
      taken, prompts = packing.split(prompts)
      made.append(fill(taken, packing, rows, config.max_requests))
    return made

  def loads(self, model: models.MoETransformer, batch: PackedBatch) -> np.ndarray:
    """``[L, N, G, E]`` int32 load matrices of the MoE layers and token groups."""
    _, state = nnx.split(model)
    sharding = NamedSharding(self._mesh, P(self._mesh.axis_names))
    return np.asarray(self._run(state, jax.device_put(batch, sharding)))

  def _loads(self, state: nnx.State, batch: PackedBatch) -> Array:
    stats = nnx.merge(self._graphdef, state)(batch).stats
    assert stats is not None
    return stats.load_GE


def set_skew(
  model: models.MoETransformer,
  probe: Probe,
  batches: Sequence[PackedBatch],
  skew: float,
  steps: int,
  seed: int = 0,
) -> None:
  """Gives the routers selection biases for popular experts; changes the model.

  Every layer has its own popular experts, with which the busiest rank has ``skew`` times the mean
  load over all batches.
  """
  gating = model.config.gating
  ranks = jax.sharding.get_mesh().shape["expert"]
  share_LE = np.stack(
    [
      popularity(seed + i, gating.num_experts, ranks, gating.num_experts_per_tok, skew)
      / gating.num_experts_per_tok
      for i in range(sum(model.config.is_moe))
    ]
  )
  spread = 0.3 / gating.num_experts if gating.scoring == "softmax" else 0.1
  search = BiasSearch(share_LE, spread)
  for i in progress(range(steps), "biases of the routers", "batch"):
    load_LE = probe.loads(model, batches[i % len(batches)]).sum(axis=(1, 2))
    search.update(load_LE)
    set_bias(model, search.bias_LE)


def set_bias(model: models.MoETransformer, bias_LE: np.ndarray) -> None:
  """Replaces the selection biases, one row for each MoE layer in order."""
  first = 0
  for stack in model.stacks:
    bias: nnx.Param[Array] | None = getattr(stack, "selection_bias", None)
    if bias is not None:
      rows = bias_LE[first : first + bias.shape[0]]
      bias[...] = jax.device_put(rows, bias[...].sharding)
      first += len(rows)
  assert first == len(bias_LE), (first, bias_LE.shape)
