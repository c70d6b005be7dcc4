"""A byte-level transformer whose every block has a mixture of experts."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import ultraep_jax as uep
from tiny_moe.settings import Settings
from ultraep_jax.gating import GatingConfig, gate, load_balance_loss

Array = jax.Array
Scalars = dict[str, Array]
Stats = dict[str, uep.LayerStats]  # by layer; none from a dense model
HEAD_DIM = 16


class LanguageModel(nnx.Module):
  """Bytes to logits of the next byte, with tied embeddings."""

  def __init__(self, settings: Settings, moe_class: type[uep.nnx.MoE] | None = None):
    """Builds the model that the settings describe.

    Args:
      settings: of the run.
      moe_class: in place of the layer that ``settings.strategy`` asks for.
    """
    dense = settings.strategy == "dense"
    make_moe = functools.partial(
      moe_class or (DenseMoE if dense else uep.nnx.MoE),
      embed_dim=settings.width,
      expert_dim=2 * settings.width,
      gating=GatingConfig(num_experts=settings.experts, num_experts_per_tok=2),
      config=uep.BalanceConfig(
        strategy="none" if dense else settings.strategy,
        replica_slots=settings.replica_slots,
        objective="balance",
      ),
    )
    rngs, dtype, width = nnx.Rngs(settings.seed), jnp.dtype(settings.dtype), settings.width
    init = nnx.initializers.normal(0.02)
    self.embed = nnx.Embed(256, width, dtype=dtype, embedding_init=init, rngs=rngs)
    self.blocks = nnx.List(Block(width, dtype, make_moe, rngs) for _ in range(settings.layers))
    self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)

  def __call__(self, bytes_BT: Array) -> tuple[Array, Array, Stats]:
    """Logits ``[B, T, 256]``, the layers' mean balance loss, and what balancing did in each."""
    x_BTD, balance_losses, stats = self.embed(bytes_BT), [], {}
    for i, block in enumerate(self.blocks):
      x_BTD, aux = block(x_BTD)
      balance_losses.append(aux.load_balance_loss)
      if isinstance(aux, uep.nnx.MoEAux):
        stats[f"layer{i}"] = aux.stats
    logits_BTV = self.embed.attend(self.norm(x_BTD))
    return logits_BTV, jnp.mean(jnp.stack(balance_losses)), stats


class Block(nnx.Module):
  """Attention, then a mixture of experts, on a residual stream."""

  def __init__(
    self, width: int, dtype: jnp.dtype, make_moe: Callable[..., uep.nnx.MoE], rngs: nnx.Rngs
  ):
    self.attention_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
    self.attention = Attention(width, dtype, rngs)
    self.moe_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
    self.moe = make_moe(rngs=rngs)

  def __call__(self, x_BTD: Array) -> tuple[Array, Any]:
    x_BTD += self.attention(self.attention_norm(x_BTD))
    y_BTD, aux = self.moe(self.moe_norm(x_BTD))
    return x_BTD + y_BTD, aux


class Attention(nnx.Module):
  """Causal self-attention with rotary positions."""

  def __init__(self, width: int, dtype: jnp.dtype, rngs: nnx.Rngs):
    self.qkv = nnx.Linear(width, 3 * width, use_bias=False, dtype=dtype, rngs=rngs)
    self.out = nnx.Linear(width, width, use_bias=False, dtype=dtype, rngs=rngs)

  def __call__(self, x_BTD: Array) -> Array:
    query, key, value = self.project(x_BTD)
    turns = turns_of(np.arange(x_BTD.shape[1])[None])
    query, key = rotate(query, turns), rotate(key, turns)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return self.out(mixed.reshape(x_BTD.shape))

  def project(self, x_BTD: Array) -> list[Array]:
    """Queries, keys and values by head, ``[B, T, H, C]`` each, without positions."""
    qkv = self.qkv(x_BTD).reshape(*x_BTD.shape[:2], -1, HEAD_DIM)
    return jnp.split(qkv, 3, axis=2)


def turns_of(position_BT: np.ndarray) -> np.ndarray:
  """Cosines and sines of positions, ``[2, B, T, 1, C / 2]``."""
  half = HEAD_DIM // 2
  frequency_C = np.exp(-math.log(10_000) * np.arange(half) / half)
  angle = position_BT[:, :, None, None] * frequency_C
  return np.stack([np.cos(angle), np.sin(angle)])


def rotate(x_BTHC: Array, turns: Array | np.ndarray) -> Array:
  """Rotary positions: turns pairs of channels by their token's position times a frequency."""
  cos, sin = jnp.asarray(turns, x_BTHC.dtype)
  left, right = jnp.split(x_BTHC, 2, axis=-1)
  return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class DenseAux(NamedTuple):
  """What a layer has to tell that distributes nothing."""

  load_balance_loss: Array


class DenseMoE(uep.nnx.MoE):
  """The same parameters and the same function, with every expert run on every token."""

  router: nnx.Param
  wi_gate: nnx.Param
  wi_up: nnx.Param
  wo: nnx.Param

  def __call__(self, x: Array, mask: Array | None = None) -> tuple[Array, DenseAux]:
    router, x32 = self.router[...], x.astype(jnp.float32)
    logits = jnp.matmul(x32, router, precision=jax.lax.Precision.HIGHEST)
    index, gates, scores = gate(logits, self.gating, mask_T=mask)
    weights = uep.ExpertWeights(self.wi_gate[...], self.wi_up[...], self.wo[...])
    x_TD, index_TK, gate_TK = (a.reshape(-1, a.shape[-1]) for a in (x, index, gates))
    y_TD = uep.testing.dense_moe(x_TD, index_TK, gate_TK, weights)
    return y_TD.astype(x.dtype).reshape(x.shape), DenseAux(load_balance_loss(scores, index))
