"""What the first half of a layer, its mixer, is made of: frozen sizes."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedQuery:
  """Attention whose query heads share key heads, with keys and values of ``head_dim`` channels.

  Attributes:
    num_heads: H, of queries.
    num_key_heads: N, a divisor of H.
    head_dim: C.
    qk_norm: queries and keys are normed before they are rotated, each ``"head"`` for itself or
      ``"all"`` heads together; ``None``: not.
    bias: the projections to queries, keys and values have one.
    out_bias: the projection back has one.
    window: a query sees so many tokens, itself the last of them; ``None``: its whole request.
    gated: what is mixed counts as often as a sigmoid of the token says, channel by channel; the
      projection to queries makes both, head by head.
    sinks: every head has one more score, a parameter, whose share of the attention is lost.
  """

  num_heads: int
  num_key_heads: int
  head_dim: int
  qk_norm: Literal["head", "all"] | None = None
  bias: bool = False
  out_bias: bool = False
  window: int | None = None
  gated: bool = False
  sinks: bool = False

  @property
  def scale(self) -> float:
    """Factor on the scores."""
    return self.head_dim**-0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
  """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values from one latent.

  Attributes:
    num_heads: H.
    query_rank: width of the queries' latent; None: queries straight from the hidden state.
    latent_rank: width of the latent of keys and values.
    nope_dim: channels of a query or key without position.
    rope_dim: those with; all heads' keys share them.
    value_dim: channels of a value.
    bias: the projections down to latents and the projection back have one.
    scale: factor on the scores.
    latent_norm_eps: of the norms of both latents.
  """

  num_heads: int
  query_rank: int | None
  latent_rank: int
  nope_dim: int
  rope_dim: int
  value_dim: int
  bias: bool = False
  scale: float
  latent_norm_eps: float = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDelta:
  """Linear attention by the gated delta rule: a state of one size, however long the request.

  Attributes:
    num_heads: H, of values, each with a state.
    num_key_heads: N, of queries and keys, a divisor of H.
    key_dim: C, channels of a query or key.
    value_dim: V, channels of a value.
    conv_width: tokens that the convolution of queries, keys and values sees.
  """

  num_heads: int
  num_key_heads: int
  key_dim: int
  value_dim: int
  conv_width: int

  @property
  def conv_dim(self) -> int:
    """Channels of the convolution: queries, keys and values of all heads."""
    return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim


Mixer = GroupedQuery | Latent | GatedDelta
