"""A model of the prefill protocol for tests: a window of earlier tokens, then balanced experts."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import ultraep_jax as uep
from ultraep_jax.packed import PackedBatch, PrefillResult

VOCAB, WIDTH, INNER, EXPERTS, WINDOW = 40, 8, 6, 8, 4
NAN_TOKEN = VOCAB - 1  # its embedding is NaN: a request with it has no finite logits


class Tiny(nnx.Module):
  """Adds a weighted sum of the request's last tokens, then the experts' output, if it has any."""

  def __init__(self, balance: uep.BalanceConfig | None = None, top_k: int = 3):
    rngs = nnx.Rngs(0)
    self.vocab_size = VOCAB
    embed = jax.random.normal(rngs.params(), (VOCAB, WIDTH)).at[NAN_TOKEN].set(jnp.nan)
    self.embed = nnx.Param(embed, out_sharding=(None, None))
    self.window = nnx.Param(jax.random.normal(rngs.params(), (WINDOW,)), out_sharding=(None,))
    self.layers = nnx.List([])
    if balance is not None:
      gating = uep.GatingConfig(num_experts=EXPERTS, num_experts_per_tok=top_k)
      moe = uep.nnx.MoE(embed_dim=WIDTH, expert_dim=INNER, gating=gating, config=balance, rngs=rngs)
      self.layers.append(moe)

  def __call__(self, batch: PackedBatch) -> PrefillResult:
    mesh = jax.sharding.get_abstract_mesh()
    by_row = P(tuple(axis for axis in ("data", "expert") if axis in mesh.shape), None, None)
    explicit = jax.sharding.AxisType.Explicit in mesh.axis_types
    embed_VD = self.embed[...]
    x = embed_VD.at[batch.token_BT].get(out_sharding=by_row if explicit else None)
    kept, x = x, x + self._mixed(x, batch.position_BT)
    stats = None
    for moe in self.layers:
      y, aux = moe(x, mask=batch.segment_BT > 0)
      x, stats = x + y, jax.tree.map(lambda leaf: leaf[None], aux.stats)
    last_BRD = jnp.take_along_axis(x, jnp.maximum(batch.last_BR, 0)[..., None], axis=1)
    logits_BRV = jnp.einsum("brd,vd->brv", last_BRD, jnp.nan_to_num(embed_VD))
    return PrefillResult(logits_BRV, {"embedded": kept[None]}, stats)

  def _mixed(self, x: jax.Array, position_BT: jax.Array) -> jax.Array:
    mixed = jnp.zeros_like(x)
    for back in range(WINDOW):  # offsets, not indices: the same wherever the request lies
      before = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, : x.shape[1]]
      inside = (position_BT >= back)[..., None]
      mixed += self.window[...][back] * jnp.where(inside, before, jnp.zeros((), x.dtype))
    return mixed


def dense_logits(model: Tiny, prompt: np.ndarray) -> np.ndarray:
  """``[V]`` of a model without experts, by NumPy."""
  embed = np.asarray(model.embed[...])
  last = embed[prompt[::-1][:WINDOW]]
  mixed = np.einsum("wd,w->d", last, np.asarray(model.window[...])[: len(last)])
  return (last[0] + mixed) @ np.nan_to_num(embed).T
