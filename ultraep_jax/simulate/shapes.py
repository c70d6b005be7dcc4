"""Expert layers by the names of their models or by their sizes, for benches and the simulator."""

from typing import NamedTuple

from ultraep_jax.simulate.models import MODELS, ModelShape

_MOST = 2**31 - 1


class Shape(NamedTuple):
  """Sizes of an expert layer: hidden width, inner width, experts chosen per token, experts."""

  width: int
  inner: int
  top_k: int
  experts: int

  def narrowed(self, scale: int) -> "Shape":
    """The same with widths divided, to try things on a CPU."""
    return self._replace(width=self.width // scale, inner=self.inner // scale)


SHAPES = {
  "qwen3-235b": Shape(4096, 1536, 8, 128),
  "glm4.5-106b": Shape(4096, 1408, 8, 128),
  "deepseek-v3": Shape(7168, 2048, 8, 256),
  "qwen3-30b": Shape(2048, 768, 8, 128),
  "gpt-oss-120b": Shape(2880, 2880, 4, 128),
  "mixtral-8x7b": Shape(4096, 14336, 2, 8),
  "olmoe": Shape(2048, 1024, 8, 64),
  "qwen3-next": Shape(2048, 512, 10, 512),
  "kimi-k2": Shape(7168, 2048, 8, 384),
  "minimax-m2": Shape(3072, 1536, 8, 256),
  "phi3.5-moe": Shape(4096, 6400, 2, 16),
  "deepseek-v2-lite": Shape(2048, 1408, 6, 64),
}
SIZES = "DxFxEXPERTSxTOP_K"  # how an error or a help names the form


def shape_of(name: str) -> Shape:
  """One of ``SHAPES``, or sizes as D x F x experts x experts a token.

  Raises:
    ValueError: it is neither.

  >>> shape_of("2048x1408x60x4")
  Shape(width=2048, inner=1408, top_k=4, experts=60)
  """
  shape = SHAPES.get(name) or _of_sizes(name)
  if shape is None:
    raise ValueError(f"expected one of {', '.join(SHAPES)}, or {SIZES}, got {name!r}")
  return shape


def _of_sizes(text: str) -> Shape | None:
  # Python converts no more than 4300 digits.
  sizes = [int(size) if size.isdecimal() and len(size) < 11 else 0 for size in text.split("x")]
  if len(sizes) != 4 or min(sizes) < 1 or max(sizes) > _MOST or sizes[3] > sizes[2]:
    return None
  width, inner, experts, top_k = sizes
  return Shape(width, inner, top_k, experts)


def _key(name: str) -> str:
  return name.lower().replace("-", "")


# Of the models in both, MODELS knows more.
_BY_KEY = {_key(name): shape for name, shape in SHAPES.items()}
_MODELS_BY_KEY = {_key(name): model for name, model in MODELS.items()}
NAMES = (*MODELS, *(name for name in SHAPES if _key(name) not in _MODELS_BY_KEY))


def model_named(name: str) -> ModelShape:
  """One of ``NAMES``, or a model of a layer's sizes in the form of ``shape_of``.

  Upper case and hyphens do not count. ``MODELS`` has all of a model; of others no more is known
  than the routed experts of one layer (``ModelShape.experts_alone``).

  Raises:
    ValueError: it is neither.

  >>> model_named("deepseek-v3").moe_layers
  58
  >>> model_named("2048x1408x60x4").expert_dim
  1408
  """
  if model := _MODELS_BY_KEY.get(_key(name)):
    return model
  shape = _BY_KEY.get(_key(name)) or _of_sizes(name)
  if shape is None:
    raise ValueError(
      f"expected one of {', '.join(NAMES)}, or sizes as {SIZES}, e.g. 2048x1408x60x4, "
      f"got {name[:80]!r}"
    )
  return ModelShape(
    name=name,
    moe_layers=1,
    embed_dim=shape.width,
    expert_dim=shape.inner,
    num_experts=shape.experts,
    top_k=shape.top_k,
    source="its name, one layer's routed experts alone",
  )
