"""tunix's Qwen3 MoE on balanced experts. Tested with tunix 0.1.7.

  model = tunix.models.qwen3.model.Qwen3(config, rngs=rngs)
  balance(model)

Parameters, their names and shardings and the router are tunix's. Like tunix's own layer this one
works on the mesh of ``with mesh:``, and divides experts as ``shd_config.exp_weight_edf`` says.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.interpreters import pxla
from jax.sharding import PartitionSpec as P
from tunix.models.qwen3 import model as qwen3

import ultraep_jax as uep

Array = jax.Array
STATS = "balance_stats"  # the name of what a layer sows


class BalancedMoELayer(qwen3.MoELayer):
  """Has the variables of ``MoELayer`` and computes the same. Made by ``balance``.

  Attributes:
    balance: how to balance.
    sow_stats: whether ``LayerStats`` become an ``nnx.Intermediate`` named ``STATS``.
  """

  balance: uep.BalanceConfig
  sow_stats: bool

  def __call__(self, x_BLD: Array, use_megablox: bool = True) -> Array:
    mesh = pxla.thread_resources.env.physical_mesh
    ranks, _, inner = (_on(mesh, dim) for dim in self.shd_config.exp_weight_edf)
    batch, length, width = (_on(mesh, dim) for dim in self.shd_config.act_btd)
    divided = x_BLD.shape[0] % _size(mesh, batch) == x_BLD.shape[1] % _size(mesh, length) == 0
    if not ranks or not divided:  # no expert parallelism, or a batch to sample from
      return super().__call__(x_BLD, use_megablox)
    if not set(ranks) <= {*batch, *length} or set(inner) & {*batch, *length}:
      raise NotImplementedError(
        f"shd_config: expected tokens on the experts' axes {ranks} and not on those of their inner "
        f"width, {inner}, got {self.shd_config.act_btd}"
      )
    groups = tuple(axis for axis in batch + length if axis not in ranks)
    scatter = bool(inner) and width == inner

    def on_device(
      x_BLD: Array, index_BLK: Array, gate_BLK: Array, weights: uep.ExpertWeights
    ) -> tuple[Array, uep.LayerStats | None]:
      top_k = index_BLK.shape[-1]
      y_TD, stats = uep.moe(
        x_BLD.reshape(-1, x_BLD.shape[-1]),
        index_BLK.reshape(-1, top_k),
        gate_BLK.reshape(-1, top_k),
        weights,
        config=self.balance,
        axis_name=ranks,
      )
      if scatter:  # each position on the axes `inner` has a term of every output
        y_TD = lax.psum_scatter(y_TD, inner, scatter_dimension=1, tiled=True)
      elif inner:
        y_TD = lax.psum(y_TD, inner)
      stats = jax.tree.map(lambda leaf: leaf[None], stats) if self.sow_stats else None
      return y_TD.reshape(*x_BLD.shape[:2], -1), stats

    scores_BLE = jax.nn.softmax(self.router(x_BLD).astype(jnp.float32), axis=-1)
    gate_BLK, index_BLK = lax.top_k(scores_BLE, self.experts_per_tok)
    gate_BLK = (gate_BLK / jnp.sum(gate_BLK, axis=-1, keepdims=True)).astype(self.dtype)
    weights = uep.ExpertWeights(self.gate_proj[...], self.up_proj[...], self.down_proj[...])
    into, out = P(ranks, None, inner), P(ranks, inner, None)
    by_token = P(batch, length)
    y_BLD, stats = jax.shard_map(
      on_device,
      mesh=mesh,
      in_specs=(by_token, by_token, by_token, uep.ExpertWeights(into, into, out)),  # pyright: ignore[reportArgumentType]
      out_specs=(P(batch, length, inner if scatter else None), P(groups)),
    )(x_BLD.astype(self.dtype), index_BLK, gate_BLK, weights)
    if self.sow_stats:
      self.sow(nnx.Intermediate, STATS, stats)
    return y_BLD


def balance(
  model: nnx.Module, config: uep.BalanceConfig | None = None, *, sow_stats: bool = False
) -> int:
  """Balances every ``MoELayer`` of a model, in place; variables stay as they are.

  Args:
    model: tunix's Qwen3, or something that holds it.
    config: how to balance.
    sow_stats: whether layers sow ``LayerStats``; a loss function then pops them (``pop_stats``).

  Returns:
    how many such layers there are.

  Raises:
    NotImplementedError: a layer is of a kind that cannot be balanced.
    ValueError: there is no such layer.
  """
  layers = [node for _, node in nnx.iter_graph(model) if isinstance(node, qwen3.MoELayer)]
  if not layers:
    raise ValueError(f"model: expected one with a MoELayer, got {type(model).__name__}")
  for layer in layers:
    if type(layer) not in (qwen3.MoELayer, BalancedMoELayer):
      raise NotImplementedError(f"layer: expected a MoELayer, got a {type(layer).__name__}")
  for layer in layers:
    layer.__class__ = BalancedMoELayer
    layer.balance = config or uep.BalanceConfig()
    layer.sow_stats = sow_stats
  return len(layers)


def pop_stats(model: nnx.Module) -> list[uep.LayerStats]:
  """Takes what layers sowed in a call out of the model; a loss function can return it."""
  state = nnx.pop(model, nnx.Intermediate).flat_state()
  return [value for path, leaf in state if path[-1] == STATS for value in leaf.get_value()]


def _on(mesh: Any, dim: str | tuple[str | None, ...] | None) -> tuple[str, ...]:
  """The axes of a dimension that the mesh has more than one position on."""
  names = (dim,) if isinstance(dim, str) else dim or ()
  return tuple(name for name in names if name is not None and mesh.shape.get(name, 1) > 1)


def _size(mesh: Any, axes: tuple[str, ...]) -> int:
  return math.prod(mesh.shape[axis] for axis in axes)
