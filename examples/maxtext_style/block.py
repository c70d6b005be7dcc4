"""A stand-in for MaxText's ``RoutedMoE``, as short as it can be.

Parameters, shapes, layout and the way of the tokens are those of ``src/maxtext/layers/moe.py``:
permute, ragged all-to-all over the axis ``expert``, local permute, grouped matmuls, and back.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from maxtext_style.config import GROUP_AXES, Config, mesh_axes
from maxtext_style.exchange import exchange_rows
from ultraep_jax import LayerStats

Array = jax.Array


class Output(NamedTuple):
  """What a block returns: ``[B, L, D]``, ``[]`` float32, and what balancing did, if it did."""

  y_BLD: Array
  load_balance_loss: Array
  stats: LayerStats | None


class GateLogit(nnx.Module):
  """The router's matrix: ``kernel`` ``[D, E]``."""

  def __init__(self, config: Config, *, rngs: nnx.Rngs):
    shape = config.base_emb_dim, config.num_experts
    self.kernel = _param(rngs, config.weight_dtype, shape, None, None)

  def __call__(self, x_BLD: Array) -> Array:
    return jnp.matmul(x_BLD, self.kernel[...].astype(x_BLD.dtype))


class RoutedMoE(nnx.Module):
  """``gate/kernel`` ``[D, E]``, ``wi_0`` and ``wi_1`` ``[E, D, F]``, ``wo`` ``[E, F, D]``."""

  def __init__(self, config: Config, *, rngs: nnx.Rngs):
    experts, width, inner = config.num_experts, config.base_emb_dim, config.base_moe_mlp_dim
    wi = experts, width, inner
    self.config = config
    self.gate = GateLogit(config, rngs=rngs)
    self.wi_0 = _param(rngs, config.weight_dtype, wi, "exp", "embed_moe", "mlp_moe")
    self.wi_1 = _param(rngs, config.weight_dtype, wi, "exp", "embed_moe", "mlp_moe")
    wo = experts, inner, width
    self.wo = _param(rngs, config.weight_dtype, wo, "exp", "mlp_moe", "embed_moe")

  def __call__(self, x_BLD: Array) -> Output:
    """Applies the block to ``[B, L, D]``, on the mesh in context."""
    logits_BLE = self.gate(x_BLD)
    logit_BLK, index_BLK = lax.top_k(logits_BLE, self.config.num_experts_per_tok)
    gate_BLK = jax.nn.softmax(logit_BLK.astype(jnp.float32), axis=-1)
    run = self.sparse_matmul if self.config.sparse_matmul else self.dense_matmul
    y_BLD, stats = run(x_BLD, index_BLK, gate_BLK, self.wi_0[...], self.wi_1[...], self.wo[...])
    return Output(y_BLD, self.load_balance_loss(logits_BLE, index_BLK), stats)

  def load_balance_loss(self, logits_BLE: Array, index_BLK: Array) -> Array:
    """How often experts are chosen times how likely they are, by sequence."""
    experts = self.config.num_experts
    chosen_BE = jnp.mean(jnp.sum(jax.nn.one_hot(index_BLK, experts), axis=2), axis=1)
    likely_BE = jnp.mean(jax.nn.softmax(logits_BLE.astype(jnp.float32)), axis=1)
    loss = experts * jnp.mean(jnp.sum(chosen_BE * likely_BE, axis=1))
    return self.config.load_balance_loss_weight * loss

  def dense_matmul(
    self,
    x_BLD: Array,
    index_BLK: Array,
    gate_BLK: Array,
    wi_0_EDF: Array,
    wi_1_EDF: Array,
    wo_EFD: Array,
  ) -> tuple[Array, None]:
    """Every expert on every token."""
    dtype = self.config.dtype
    chosen_BLKE = jax.nn.one_hot(index_BLK, self.config.num_experts)
    gate_BLE = jnp.einsum("blk,blke->ble", gate_BLK, chosen_BLKE).astype(dtype)
    hidden_BLEF = jax.nn.silu(jnp.einsum("bld,edf->blef", x_BLD, wi_0_EDF.astype(dtype)))
    hidden_BLEF *= jnp.einsum("bld,edf->blef", x_BLD, wi_1_EDF.astype(dtype))
    return jnp.einsum("blef,efd,ble->bld", hidden_BLEF, wo_EFD.astype(dtype), gate_BLE), None

  def sparse_matmul(
    self,
    x_BLD: Array,
    index_BLK: Array,
    gate_BLK: Array,
    wi_0_EDF: Array,
    wi_1_EDF: Array,
    wo_EFD: Array,
  ) -> tuple[Array, LayerStats | None]:
    """Every token through its own experts. Weights are gathered over ``fsdp`` on the way in."""
    by_token = mesh_axes("activation_batch", "activation_norm_length", None)
    wi, wo = mesh_axes("exp", None, "mlp_moe"), mesh_axes("exp", "mlp_moe", None)

    @functools.partial(
      jax.shard_map,
      in_specs=(by_token, by_token, by_token, wi, wi, wo),
      out_specs=(by_token, P(GROUP_AXES)),
    )
    def on_rank(
      x_BLD: Array, index_BLK: Array, gate_BLK: Array, *weights: Array
    ) -> tuple[Array, LayerStats | None]:
      x_TD, index_TK, gate_TK = (a.reshape(-1, a.shape[-1]) for a in (x_BLD, index_BLK, gate_BLK))
      y_TD, stats = self.route_and_compute(x_TD, index_TK, gate_TK, *weights)
      y_TD = lax.psum(y_TD, "tensor")  # each position has a slice of the experts' inner width
      return y_TD.reshape(x_BLD.shape), jax.tree.map(lambda leaf: leaf[None], stats)

    return on_rank(x_BLD, index_BLK, gate_BLK, wi_0_EDF, wi_1_EDF, wo_EFD)

  def route_and_compute(
    self,
    x_TD: Array,
    index_TK: Array,
    gate_TK: Array,
    wi_0_MDF: Array,
    wi_1_MDF: Array,
    wo_MFD: Array,
  ) -> tuple[Array, LayerStats | None]:
    """One rank's tokens, and its M experts or their slices over ``tensor``."""
    ranks, rank, home = lax.axis_size("expert"), lax.axis_index("expert"), wo_MFD.shape[0]
    expert_A = index_TK.reshape(-1)
    order_A = jnp.argsort(expert_A)
    rows_AD = x_TD[order_A // index_TK.shape[1]]
    load_GE = lax.all_gather(jnp.bincount(expert_A, length=ranks * home), "expert")
    load_GGM = load_GE.reshape(ranks, ranks, home)
    sizes_GG = jnp.sum(load_GGM, axis=-1)

    # A buffer for the worst case: every assignment of every rank.
    rows_CD = exchange_rows(rows_AD, sizes_GG, ranks * rows_AD.shape[0])
    expert_C = _expert_of_rows(load_GGM[:, rank], rows_CD.shape[0])
    local_C = jnp.argsort(expert_C)
    rows_CD = rows_CD[local_C]
    matmul = functools.partial(lax.ragged_dot, group_sizes=jnp.bincount(expert_C, length=home))
    dtype = self.config.dtype
    hidden_CF = jax.nn.silu(matmul(rows_CD, wi_0_MDF.astype(dtype)))
    hidden_CF *= matmul(rows_CD, wi_1_MDF.astype(dtype))
    out_CD = matmul(hidden_CF, wo_MFD.astype(dtype))[jnp.argsort(local_C)]

    back_AD = exchange_rows(out_CD, sizes_GG.T, rows_AD.shape[0])[jnp.argsort(order_A)]
    back_TKD = back_AD.reshape(*index_TK.shape, -1).astype(jnp.float32)
    return jnp.einsum("tkd,tk->td", back_TKD, gate_TK).astype(x_TD.dtype), None


def _expert_of_rows(load_GM: Array, rows: int) -> Array:
  """The home expert of each row that came, by source and then expert; M behind the last."""
  ranks, home = load_GM.shape
  expert_A = jnp.append(jnp.tile(jnp.arange(home), ranks), home)
  size_A = jnp.append(load_GM.reshape(-1), rows - jnp.sum(load_GM))
  return jnp.repeat(expert_A, size_A, total_repeat_length=rows)


def _param(
  rngs: nnx.Rngs, dtype: DTypeLike, shape: tuple[int, ...], *axes: str | None
) -> nnx.Param:
  init = nnx.initializers.lecun_normal(batch_axis=tuple(range(len(shape) - 2)))
  return nnx.Param(init(rngs.params(), shape, dtype), out_sharding=mesh_axes(*axes))
