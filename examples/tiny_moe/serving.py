"""The trained model as the prefill engine wants it: packed prompts in, logits and caches out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tiny_moe.model import HEAD_DIM, Array, Attention, LanguageModel, rotate, turns_of
from tiny_moe.settings import Settings
from ultraep_jax.models.attention import attend
from ultraep_jax.models.rows import by_rows, row_axes
from ultraep_jax.packed import PackedBatch, PrefillResult


class PackedLanguageModel(LanguageModel):
  """``LanguageModel``, its parameters and its results, on packed prompts.

  Rows of the batch are divided over all axes of the mesh in context.
  """

  vocab_size = 256

  def __init__(self, settings: Settings, alignment: int):
    """Prompts start at multiples of ``alignment`` in their rows."""
    super().__init__(settings)
    self.alignment = alignment

  def __call__(self, batch: PackedBatch) -> PrefillResult:  # type: ignore[override]
    mask_BT = batch.segment_BT > 0
    length = batch.token_BT.shape[1]
    turns = jnp.asarray(turns_of(np.arange(length)[None]), jnp.float32)[:, 0]
    turns = turns[:, batch.position_BT]
    x_BTD, caches, stats = self.embed(batch.token_BT), [], []
    for block in self.blocks:
      mixed_BTD, cache = self._mix(block.attention, block.attention_norm(x_BTD), batch, turns)
      x_BTD += mixed_BTD
      y_BTD, aux = block.moe(block.moe_norm(x_BTD), mask_BT)
      x_BTD += y_BTD
      caches.append(cache)
      stats.append(aux.stats)
    last_BR1 = jnp.maximum(batch.last_BR, 0)[..., None]
    last_BRD = jnp.take_along_axis(self.norm(x_BTD), last_BR1, axis=1)
    logits_BRV = self.embed.attend(last_BRD).astype(jnp.float32)
    stack = functools.partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
    return PrefillResult(logits_BRV, stack(*caches), stack(*stats))

  def _mix(
    self, attention: Attention, x_BTD: Array, batch: PackedBatch, turns: Array
  ) -> tuple[Array, dict[str, Array]]:
    query, key, value = attention.project(x_BTD)
    query, key = rotate(query, turns), rotate(key, turns)
    rows = P(row_axes())
    mixed = by_rows(
      functools.partial(attend, scale=HEAD_DIM**-0.5, block=self.alignment),
      query,
      key,
      value,
      batch.segment_BT,
      specs=(rows,) * 4,
      out_specs=rows,
    )
    return attention.out(mixed.reshape(x_BTD.shape)), {"key": key, "value": value}
