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
