"""Shapes of MoE models, as far as the time of a layer depends on them."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
  """A decoder with MoE layers; what is 0 by default is not known, or not there.

  Attributes:
    name: for tables.
    moe_layers: layers with routed experts.
    embed_dim: D.
    expert_dim: F of a routed expert; experts are gated, three matrices.
    num_experts: E.
    top_k: K.
    attention_params: weights of one attention block, each multiplied once for a token.
    context_dim: heads times (query-key plus value width): multiply-adds of one token's attention
      to one other token.
    shared_dim: inner width of the shared experts together.
    dense_layers: layers without routed experts.
    dense_dim: their inner width.
    vocabulary: rows of the output projection.
    source: where the shape is from.
  """

  name: str
  moe_layers: int
  embed_dim: int
  expert_dim: int
  num_experts: int
  top_k: int
  attention_params: int = 0
  context_dim: int = 0
  shared_dim: int = 0
  dense_layers: int = 0
  dense_dim: int = 0
  vocabulary: int = 0
  source: str

  @property
  def experts_alone(self) -> bool:
    """Nothing is known outside the routed experts: attention and other layers count as 0."""
    return not self.attention_params

  @property
  def expert_params(self) -> int:
    """Weights of one routed expert."""
    return 3 * self.embed_dim * self.expert_dim

  @property
  def row_flops(self) -> int:
    """Forward FLOPs of one assignment."""
    return 2 * self.expert_params

  def rest_flops(self, context: int) -> float:
    """Forward FLOPs of a MoE layer's token outside the routed experts.

    Args:
      context: tokens of a sequence; half of them are attended to on average.
    """
    shared = 3 * self.embed_dim * self.shared_dim
    router = self.embed_dim * self.num_experts
    return 2 * (self.attention_params + shared + router + self.context_dim * context / 2)

  def token_flops(self, context: int) -> float:
    """Forward FLOPs of one token through the whole model."""
    moe = self.rest_flops(context) + self.top_k * self.row_flops
    attention = self.attention_params + self.context_dim * context / 2
    dense = 2 * (attention + 3 * self.embed_dim * self.dense_dim)
    head = 2 * self.embed_dim * self.vocabulary
    return self.moe_layers * moe + self.dense_layers * dense + head


def _grouped_attention(embed_dim: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
  return {
    "attention_params": embed_dim * head_dim * (2 * heads + 2 * kv_heads),
    "context_dim": heads * 2 * head_dim,
  }


def _latent_attention(embed_dim: int, heads: int, query_rank: int = 0) -> dict[str, int]:
  """DeepSeek's multi-head latent attention, keys and values of rank 512, heads of 128 + 64 and 128.

  Args:
    embed_dim: D.
    heads: of queries.
    query_rank: of these; 0: they are projected at once.
  """
  inner = heads * 192
  query = (embed_dim + inner) * query_rank if query_rank else embed_dim * inner
  key_value = embed_dim * (512 + 64) + 512 * heads * 256
  output = heads * 128 * embed_dim
  return {
    "attention_params": query + key_value + output,
    "context_dim": heads * (192 + 128),
  }


MODELS = {
  model.name: model
  for model in (
    ModelShape(
      name="GLM-4.5-106B",
      moe_layers=45,
      embed_dim=4096,
      expert_dim=1408,
      num_experts=128,
      top_k=8,
      **_grouped_attention(4096, 96, 8, 128),
      shared_dim=1408,
      dense_layers=1,
      dense_dim=10944,
      vocabulary=151552,
      source="published config of GLM-4.5-Air",
    ),
    ModelShape(
      name="GLM-4.7",
      moe_layers=89,
      embed_dim=5120,
      expert_dim=1536,
      num_experts=160,
      top_k=8,
      **_grouped_attention(5120, 96, 8, 128),
      shared_dim=1536,
      dense_layers=3,
      dense_dim=12288,
      vocabulary=151552,
      source="published config of GLM-4.5 (355B), the same architecture",
    ),
    ModelShape(
      name="Qwen3-235B",
      moe_layers=94,
      embed_dim=4096,
      expert_dim=1536,
      num_experts=128,
      top_k=8,
      **_grouped_attention(4096, 64, 4, 128),
      shared_dim=0,
      dense_layers=0,
      dense_dim=0,
      vocabulary=151936,
      source="published config of Qwen3-235B-A22B",
    ),
    ModelShape(
      name="DeepSeek-V3",
      moe_layers=58,
      embed_dim=7168,
      expert_dim=2048,
      num_experts=256,
      top_k=8,
      **_latent_attention(7168, 128, 1536),
      shared_dim=2048,
      dense_layers=3,
      dense_dim=18432,
      vocabulary=129280,
      source="published config of DeepSeek-V3",
    ),
    ModelShape(
      name="Kimi-K2",
      moe_layers=60,
      embed_dim=7168,
      expert_dim=2048,
      num_experts=384,
      top_k=8,
      **_latent_attention(7168, 64, 1536),
      shared_dim=2048,
      dense_layers=1,
      dense_dim=18432,
      vocabulary=163840,
      source="published config of Kimi-K2",
    ),
    ModelShape(
      name="Qwen3-30B",
      moe_layers=48,
      embed_dim=2048,
      expert_dim=768,
      num_experts=128,
      top_k=8,
      **_grouped_attention(2048, 32, 4, 128),
      shared_dim=0,
      dense_layers=0,
      dense_dim=0,
      vocabulary=151936,
      source="published config of Qwen3-30B-A3B",
    ),
    ModelShape(
      name="gpt-oss-120b",
      moe_layers=36,
      embed_dim=2880,
      expert_dim=2880,
      num_experts=128,
      top_k=4,
      **_grouped_attention(2880, 64, 8, 64) | {"context_dim": 64 * 64},
      shared_dim=0,
      dense_layers=0,
      dense_dim=0,
      vocabulary=201088,
      source="published config of gpt-oss-120b; half of its layers see 128 tokens, counted as none",
    ),
    ModelShape(
      name="Mixtral-8x7B",
      moe_layers=32,
      embed_dim=4096,
      expert_dim=14336,
      num_experts=8,
      top_k=2,
      **_grouped_attention(4096, 32, 8, 128),
      shared_dim=0,
      dense_layers=0,
      dense_dim=0,
      vocabulary=32000,
      source="published config of Mixtral-8x7B",
    ),
    ModelShape(
      name="OLMoE",
      moe_layers=16,
      embed_dim=2048,
      expert_dim=1024,
      num_experts=64,
      top_k=8,
      **_grouped_attention(2048, 16, 16, 128),
      shared_dim=0,
      dense_layers=0,
      dense_dim=0,
      vocabulary=50304,
      source="published config of OLMoE-1B-7B",
    ),
    ModelShape(
      name="MiniMax-M2",
      moe_layers=62,
      embed_dim=3072,
      expert_dim=1536,
      num_experts=256,
      top_k=8,
      **_grouped_attention(3072, 48, 8, 128),
      shared_dim=0,
      dense_layers=0,
      dense_dim=0,
      vocabulary=200064,
      source="published config of MiniMax-M2",
    ),
    ModelShape(
      name="Phi3.5-MoE",
      moe_layers=32,
      embed_dim=4096,
      expert_dim=6400,
      num_experts=16,
      top_k=2,
      **_grouped_attention(4096, 32, 8, 128),
      shared_dim=0,
      dense_layers=0,
      dense_dim=0,
      vocabulary=32064,
      source="published config of Phi-3.5-MoE",
    ),
    ModelShape(
      name="DeepSeek-V2-Lite",
      moe_layers=26,
      embed_dim=2048,
      expert_dim=1408,
      num_experts=64,
      top_k=6,
      **_latent_attention(2048, 16),
      shared_dim=2816,
      dense_layers=1,
      dense_dim=10944,
      vocabulary=102400,
      source="published config of DeepSeek-V2-Lite",
    ),
    ModelShape(
      name="MoE-288B",
      moe_layers=58,
      embed_dim=6144,
      expert_dim=2048,
      num_experts=128,
      top_k=8,
      **_grouped_attention(6144, 64, 8, 128),
      shared_dim=0,
      dense_layers=1,
      dense_dim=16384,
      vocabulary=151936,
      source="made up to have 288 billion weights; the paper's 288B model is not public",
    ),
  )
}
