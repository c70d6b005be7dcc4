"""Requests packed into rows, and what a model makes of them: the protocol of prefill.

A model is an ``nnx.Module`` with ``__call__(batch: PackedBatch) -> PrefillResult`` and an
attribute ``vocab_size: int``. If it takes tokens in blocks, it also has ``attention_block: int``;
requests must start at multiples of it. A request's result must not depend on what else is in the
batch.
"""

from typing import Any, NamedTuple

from ultraep_jax.types import Array, LayerStats


class PackedBatch(NamedTuple):
  """Requests packed into rows; the mesh's token axes divide the B rows.

  A request's tokens are contiguous and in order; between requests there may be padding.

  Attributes:
    token_BT: ``[B, T]`` int32, 0 in padding.
    position_BT: ``[B, T]`` int32, place of the token in its own request; 0 in padding.
    segment_BT: ``[B, T]`` int32, which request of the row a token belongs to, counted from 1 in
      row order; 0: padding.
    last_BR: ``[B, R]`` int32, index in the row of request r's last token (r counted from 0 =
      segment r + 1); −1: no such request.
  """

  token_BT: Array
  position_BT: Array
  segment_BT: Array
  last_BR: Array


class PrefillResult(NamedTuple):
  """What a model makes of a batch.

  Attributes:
    logits_BRV: ``[B, R, V]`` float32 of the next token after each request (anything where
      last < 0).
    cache: pytree of arrays ``[layers, B, T, ...]``; what decoding needs of every token.
    stats: ``LayerStats`` with leading axes ``[moe layers, token groups]``; None if the model has
      no MoE layer.
    expert_index_LBTK: ``[moe layers, B, T, K]`` int32, the experts that each token chose, −1 in
      padding; None if the model does not tell, or has no MoE layer.
    state: pytree of arrays ``[layers, B, R, ...]``; what decoding needs of every request, behind
      its last token; None if the model has none.
  """

  logits_BRV: Array
  cache: Any
  stats: LayerStats | None
  expert_index_LBTK: Array | None = None
  state: Any = None
