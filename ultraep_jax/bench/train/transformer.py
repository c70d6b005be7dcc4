"""A decoder of today's form: grouped-query attention and a mixture of experts in every block.

bfloat16 computes, float32 parameters. Experts lie over the mesh axis ``"expert"``, all else is on
every device; sequences are divided over the same axis.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from ultraep_jax.bench.train.text import VOCAB
from ultraep_jax.block import MoEAux
from ultraep_jax.config import BalanceConfig
from ultraep_jax.gating import GatingConfig
from ultraep_jax.moe import REMAT_NAMES
from ultraep_jax.nnx import MoE
from ultraep_jax.types import Array

AXIS = "expert"
DTYPE = jnp.bfloat16
Attend = Literal["cudnn", "xla"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Of a model. The defaults have 3.8 billion parameters, 0.58 billion of them used per token.

  Attributes:
    width: D, of the residual stream.
    inner: F, of one expert.
    layers: blocks.
    experts: E, in each block.
    top_k: K, experts of a token.
    head_dim: channels of a head; ``width`` is a multiple.
    queries_per_key: query heads that share a key and value head.
    seq: bytes of a sequence.
  """

  width: int = 4096
  inner: int = 1536
  layers: int = 3
  experts: int = 64
  top_k: int = 8
  head_dim: int = 128
  queries_per_key: int = 4
  seq: int = 4096

  @property
  def heads(self) -> int:
    return self.width // self.head_dim

  @property
  def key_heads(self) -> int:
    return max(self.heads // self.queries_per_key, 1)

  @property
  def expert_parameters(self) -> int:
    return self.layers * self.experts * 3 * self.width * self.inner

  @property
  def other_parameters(self) -> int:
    """All that is on every device: embeddings, attention, routers and norms."""
    attention = 2 * self.width * (self.heads + self.key_heads) * self.head_dim
    block = attention + self.width * self.experts + 2 * self.width
    return self.layers * block + VOCAB * self.width + self.width

  @property
  def flops_per_token(self) -> int:
    """Model FLOPs of a training step per token, 2 for a multiplication and addition.

    Forward, per block: projections of queries, keys, values and outputs, ``4 D (H + H_kv) C``;
    scores and mixing over the ``(S + 1) / 2`` positions that a causal token sees on average,
    ``2 H C (S + 1)``; the router, ``2 D E``; K experts of three matmuls, ``6 K D F``. Then the
    logits, ``2 D V``. Backward costs twice the forward pass. Not counted: anything computed
    again, norms, softmax, activations, embeddings and the optimizer.
    """
    width, channels = self.width, self.heads * self.head_dim
    projections = 4 * width * (self.heads + self.key_heads) * self.head_dim
    mixing = 2 * channels * (self.seq + 1)
    experts = 2 * width * self.experts + 6 * self.top_k * width * self.inner
    return 3 * (self.layers * (projections + mixing + experts) + 2 * width * VOCAB)


class LanguageModel(nnx.Module):
  """Bytes to logits of the next byte, with tied embeddings."""

  def __init__(self, sizes: Sizes, config: BalanceConfig, attend: Attend, rngs: nnx.Rngs):
    """Creates the parameters; needs the mesh in context.

    Args:
      sizes: of the model.
      config: of every expert layer.
      attend: cuDNN's flash attention, or XLA's own matmuls and softmax.
      rngs: the stream ``params`` is used.
    """
    embed = 0.02 * jax.random.normal(rngs.params(), (VOCAB, sizes.width))
    self.embed = nnx.Param(embed)
    self.blocks = nnx.List(Block(sizes, config, attend, rngs) for _ in range(sizes.layers))
    self.norm = nnx.RMSNorm(sizes.width, rngs=rngs)

  def __call__(
    self, bytes_BS: Array, bias_LE: Array, remat: bool = False
  ) -> tuple[Array, list[MoEAux]]:
    """Logits ``[B, S, 256]`` float32, and what each layer did.

    Args:
      bytes_BS: ``[B, S]`` int32.
      bias_LE: ``[layers, E]`` float32, the routers' selection bias.
      remat: make everything again in backward but what ``REMAT_NAMES`` name.
    """
    embed_VD = self.embed[...].astype(DTYPE)
    # With 256 rows a matmul beats a gather, whose gradient is a scatter.
    x_BSD = _by_sequence(jax.nn.one_hot(bytes_BS, VOCAB, dtype=DTYPE) @ embed_VD)
    all_aux = []
    for block, bias_E in zip(self.blocks, bias_LE, strict=True):
      graphdef, state = nnx.split(block)
      apply = functools.partial(_apply_block, graphdef)
      if remat:
        policy = jax.checkpoint_policies.save_only_these_names(*REMAT_NAMES)
        apply = jax.checkpoint(apply, policy=policy)
      x_BSD, aux = apply(state, x_BSD, bias_E)
      all_aux.append(aux)
    logits_BSV = jnp.einsum(
      "bsd,vd->bsv", _normed(self.norm, x_BSD), embed_VD, preferred_element_type=jnp.float32
    )
    return logits_BSV, all_aux


def _apply_block(
  graphdef: nnx.GraphDef, state: nnx.State, x_BSD: Array, bias_E: Array
) -> tuple[Array, MoEAux]:
  block = nnx.merge(graphdef, state)
  block.moe.selection_bias[...] = bias_E
  return block(x_BSD)


class Block(nnx.Module):
  """Attention, then a mixture of experts, each on the normed residual stream."""

  def __init__(self, sizes: Sizes, config: BalanceConfig, attend: Attend, rngs: nnx.Rngs):
    self.attention_norm = nnx.RMSNorm(sizes.width, rngs=rngs)
    self.attention = Attention(sizes, attend, rngs)
    self.moe_norm = nnx.RMSNorm(sizes.width, rngs=rngs)
    self.moe = MoE(
      embed_dim=sizes.width,
      expert_dim=sizes.inner,
      gating=GatingConfig(
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        scoring="sigmoid",
        use_selection_bias=True,
      ),
      config=config,
      axis_name=AXIS,
      rngs=rngs,
    )

  def __call__(self, x_BSD: Array) -> tuple[Array, MoEAux]:
    x_BSD = _by_sequence(x_BSD + self.attention(_normed(self.attention_norm, x_BSD)))
    y_BSD, aux = self.moe(_normed(self.moe_norm, x_BSD))
    return _by_sequence(x_BSD + y_BSD), aux


class Attention(nnx.Module):
  """Causal self-attention with rotary positions; several query heads share keys and values."""

  def __init__(self, sizes: Sizes, attend: Attend, rngs: nnx.Rngs):
    self.sizes = sizes
    self.attend: Attend = attend
    channels, key_channels = (n * sizes.head_dim for n in (sizes.heads, sizes.key_heads))
    linear = functools.partial(nnx.Linear, use_bias=False, dtype=DTYPE, rngs=rngs)
    self.query = linear(sizes.width, channels)
    self.key_value = linear(sizes.width, 2 * key_channels)
    self.out = linear(channels, sizes.width)

  def __call__(self, x_BSD: Array) -> Array:
    def by_head(x_BSX: Array) -> Array:
      return x_BSX.reshape(*x_BSX.shape[:2], -1, self.sizes.head_dim)

    key, value = jnp.split(by_head(self.key_value(x_BSD)), 2, axis=2)
    mixed = attend(_rotate(by_head(self.query(x_BSD))), _rotate(key), value, self.attend)
    return self.out(mixed.reshape(*x_BSD.shape[:2], -1))


def attend(query_BSHC: Array, key_BSHC: Array, value_BSHC: Array, implementation: Attend) -> Array:
  """Causal attention ``[B, S, H, C]``, each device to its own sequences."""

  def core(query: Array, key: Array, value: Array) -> Array:
    return jax.nn.dot_product_attention(
      query, key, value, is_causal=True, implementation=implementation
    )

  # Manual axes, so that nothing has to know how to partition the kernel.
  by_sequence = P(AXIS)
  return jax.shard_map(core, in_specs=by_sequence, out_specs=by_sequence, check_vma=False)(
    query_BSHC, key_BSHC, value_BSHC
  )


def _normed(norm: nnx.RMSNorm, x_BSD: Array) -> Array:
  """The norm in float32, which backward makes again rather than keep."""
  graphdef, state = nnx.split(norm)

  @jax.checkpoint
  def apply(state: nnx.State, x_BSD: Array) -> Array:
    return nnx.merge(graphdef, state)(x_BSD.astype(jnp.float32)).astype(DTYPE)

  return apply(state, x_BSD)


def _rotate(x_BSHC: Array) -> Array:
  """Rotary positions: turns pairs of channels by their token's position times a frequency."""
  seq, half = x_BSHC.shape[1], x_BSHC.shape[-1] // 2
  frequency_C = jnp.asarray(10_000.0 ** -(np.arange(half) / half), jnp.float32)
  angle = jnp.outer(jnp.arange(seq, dtype=jnp.float32), frequency_C)[None, :, None, :]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  left, right = jnp.split(x_BSHC.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
  return turned.astype(x_BSHC.dtype)


def _by_sequence(x_BSD: Array) -> Array:
  return jax.lax.with_sharding_constraint(x_BSD, P(AXIS))
