"""Layers and models by name and by sizes."""

import pytest

from ultraep_jax.simulate.models import MODELS
from ultraep_jax.simulate.shapes import NAMES, SHAPES, Shape, model_named, shape_of


@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_is_that_of_the_model_of_its_name(name):
  model = model_named(name)
  sizes = Shape(model.embed_dim, model.expert_dim, model.top_k, model.num_experts)
  assert sizes == SHAPES[name] == shape_of(name)
  assert model.experts_alone == (model.name not in MODELS)


# Billions of weights, as published. Multi-token prediction and small parts are not counted.
PUBLISHED = {
  "GLM-4.5-106B": 106,
  "GLM-4.7": 355,
  "Qwen3-235B": 235,
  "DeepSeek-V3": 671,
  "Kimi-K2": 1026,
  "Qwen3-30B": 30.5,
  "gpt-oss-120b": 116.8,
  "Mixtral-8x7B": 46.7,
  "OLMoE": 6.92,
  "MiniMax-M2": 229,
  "Phi3.5-MoE": 41.9,
  "DeepSeek-V2-Lite": 15.7,
  "MoE-288B": 288,
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_model_has_as_many_weights_as_published(model):
  width = model.embed_dim
  routed = model.num_experts * (model.expert_params + width)
  moe = routed + model.attention_params + 3 * width * model.shared_dim
  dense = model.attention_params + 3 * width * model.dense_dim
  total = model.moe_layers * moe + model.dense_layers * dense + 2 * width * model.vocabulary
  assert total / 1e9 == pytest.approx(PUBLISHED[model.name], rel=0.012)


def test_upper_case_and_hyphens_do_not_count():
  assert model_named("glm4.5-106b") is model_named("GLM-4.5-106B") is MODELS["GLM-4.5-106B"]
  assert model_named("Qwen3-30B").expert_dim == 768
  assert [model_named(name).name for name in NAMES] == list(NAMES)


def test_sizes_are_a_model_of_one_layer():
  model = model_named("2048x1408x60x4")
  assert (model.moe_layers, model.experts_alone) == (1, True)
  assert (model.embed_dim, model.expert_dim, model.num_experts, model.top_k) == (2048, 1408, 60, 4)
  assert model.rest_flops(4096) == 2 * 2048 * 60  # the router alone


@pytest.mark.parametrize(
  "text",
  [
    "",
    "x",
    "8x8x4",
    "8x8x4x0",
    "8x8x4x5",
    "8x-8x4x2",
    "8x8x4x2x1",
    f"8x8x{'9' * 5000}x2",
    "8x8x3e9x1",
  ],
)
def test_other_sizes_are_refused(text):
  with pytest.raises(ValueError, match=r"expected one of GLM-4.5-106B, .* or sizes as DxFxEXPERTS"):
    model_named(text)
  with pytest.raises(ValueError, match=r"expected one of qwen3-235b, .* or DxFxEXPERTSxTOP_K"):
    shape_of(text)
