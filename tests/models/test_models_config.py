"""Configurations of published models: what is read, and what is refused."""

import dataclasses

import numpy as np
import pytest
from published_configs import DEEPSEEK_V3, GLM_45, PUBLISHED, QWEN3_30B

from ultraep_jax.gating import GatingConfig
from ultraep_jax.models import GroupedQuery, Latent, ModelConfig, Rotary, Yarn
from ultraep_jax.models.names import ignored_patterns, sources
from ultraep_jax.models.params import param_specs
from ultraep_jax.models.rotary import cosines_and_sines, frequencies, rotate


def test_qwen3():
  assert ModelConfig.from_hf(QWEN3_30B) == ModelConfig(
    architecture="qwen3_moe",
    vocab_size=151936,
    embed_dim=2048,
    is_moe=(True,) * 48,
    attention=GroupedQuery(num_heads=32, num_key_heads=4, head_dim=128, qk_norm="head"),
    rotary=Rotary(dim=128, theta=1e6),
    dense_dim=6144,
    expert_dim=768,
    gating=GatingConfig(num_experts=128, num_experts_per_tok=8),
  )


def test_glm():
  assert ModelConfig.from_hf(GLM_45) == ModelConfig(
    architecture="glm4_moe",
    vocab_size=151552,
    embed_dim=5120,
    is_moe=(False,) * 3 + (True,) * 89,
    attention=GroupedQuery(num_heads=96, num_key_heads=8, head_dim=128, qk_norm="head", bias=True),
    rotary=Rotary(dim=64, theta=1e6),
    dense_dim=12288,
    expert_dim=1536,
    num_shared_experts=1,
    gating=GatingConfig(
      num_experts=160,
      num_experts_per_tok=8,
      scoring="sigmoid",
      routed_scaling=2.5,
      use_selection_bias=True,
    ),
    norm_eps=1e-5,
    num_extra_layers=1,
  )


def test_deepseek():
  mscale = 0.1 * np.log(40) + 1
  config = ModelConfig.from_hf(DEEPSEEK_V3)
  attention = config.attention
  assert isinstance(attention, Latent)
  assert attention.scale == pytest.approx(192**-0.5 * mscale**2)
  assert dataclasses.replace(attention, scale=1.0) == Latent(
    num_heads=128,
    query_rank=1536,
    latent_rank=512,
    nope_dim=128,
    rope_dim=64,
    value_dim=128,
    scale=1.0,
  )
  yarn = Yarn(factor=40, original_positions=4096, attention_factor=1.0)
  assert config.rotary == Rotary(dim=64, theta=1e4, interleaved=True, yarn=yarn)
  assert [len(stack) for stack in config.stacks] == [3, 58] and config.runs == ((0,), (1,))
  assert config.gating.num_expert_groups == 8 and config.gating.topk_groups == 4


def test_newer_form_of_positions_is_the_same():
  for hf in PUBLISHED:
    old = dict(hf)
    rope = dict(old.pop("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", "default")
    rope["rope_theta"] = old.pop("rope_theta")
    if "partial_rotary_factor" in old:
      rope["partial_rotary_factor"] = old.pop("partial_rotary_factor")
    assert ModelConfig.from_hf(old | {"rope_parameters": rope}) == ModelConfig.from_hf(hf)


def test_stretched_positions_of_any_architecture():
  rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
  rotary = ModelConfig.from_hf(QWEN3_30B | {"rope_scaling": rope}).rotary
  assert rotary.yarn == Yarn(
    factor=4, original_positions=32768, attention_factor=0.1 * np.log(4.0) + 1
  )
  given = ModelConfig.from_hf(QWEN3_30B | {"rope_scaling": rope | {"attention_factor": 1.5}})
  assert given.rotary.yarn is not None and given.rotary.yarn.attention_factor == 1.5
  beside = QWEN3_30B | {"rope_scaling": rope, "original_max_position_embeddings": 8192}
  outside = ModelConfig.from_hf(beside).rotary.yarn
  assert outside is not None and outside.original_positions == 8192
  silent = {"rope_type": "yarn", "original_max_position_embeddings": 10240}
  derived = ModelConfig.from_hf(QWEN3_30B | {"rope_scaling": silent}).rotary.yarn
  assert derived is not None and derived.factor == 4


def test_which_layers_are_mixtures():
  hf = QWEN3_30B | {"num_hidden_layers": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
  config = ModelConfig.from_hf(hf)
  assert [i for i, is_moe in enumerate(config.is_moe) if is_moe] == [1, 5, 7]
  assert config.stacks == ((0,), (1,), (2, 3, 4), (5,), (6,), (7,))
  assert config.runs == tuple((i,) for i in range(6))
  alternate = ModelConfig.from_hf(QWEN3_30B | {"decoder_sparse_step": 2})
  assert alternate.stacks == (tuple(range(0, 48, 2)), tuple(range(1, 48, 2)))
  assert alternate.runs == ((0, 1),)


YARN = DEEPSEEK_V3["rope_scaling"]


@pytest.mark.parametrize(
  ("hf", "changes", "message"),
  [
    (QWEN3_30B, {"model_type": "qwen4_moe"}, "one of .*olmoe.*nearest: qwen3_moe.*got 'qwen4_moe'"),
    (QWEN3_30B, {"model_type": 3}, "model_type: expected one of .*got 3"),
    (QWEN3_30B, {"hidden_act": "gelu"}, "hidden_act: expected one of .*got 'gelu'"),
    (QWEN3_30B, {"use_sliding_window": True}, "use_sliding_window: .*got True"),
    (QWEN3_30B, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: expected"),
    (QWEN3_30B, {"hidden_size": None}, "hidden_size: expected an integer .*got nothing"),
    (QWEN3_30B, {"hidden_size": 2048.0}, "hidden_size: expected an integer .*got 2048.0"),
    (QWEN3_30B, {"num_hidden_layers": 0}, "num_hidden_layers: expected .* from 1 to 4096, got 0"),
    (QWEN3_30B, {"num_key_value_heads": 5}, "num_key_value_heads: expected a divisor of 32, got 5"),
    (QWEN3_30B, {"norm_topk_prob": 1}, "norm_topk_prob: expected true or false, got 1"),
    (QWEN3_30B, {"rms_norm_eps": "1e-6"}, "rms_norm_eps: expected a number above 0"),
    (QWEN3_30B, {"mlp_only_layers": 3}, "mlp_only_layers: expected a list of integers, got 3"),
    (QWEN3_30B, {"rope_scaling": {"type": "linear"}}, "rope_type: .*got 'linear'"),
    (QWEN3_30B, {"rope_scaling": {"mrope_section": [8]}}, r"rope_parameters: .*'mrope_section'"),
    (QWEN3_30B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1, got 0.5"),
    (QWEN3_30B, {"num_experts_per_tok": 129}, "num_experts_per_tok: expected at most 128, got 129"),
    (QWEN3_30B, {"quantization_config": {"quant_method": "awq"}}, "quant_method: .*got 'awq'"),
    (GLM_45, {"partial_rotary_factor": 1.5}, "partial_rotary_factor: expected at most 1"),
    (GLM_45, {"partial_rotary_factor": 0.26}, "partial_rotary_factor: expected an even number"),
    (GLM_45, {"rope_parameters": {"rope_theta": 1}, "rope_scaling": {"type": "default"}}, "beside"),
    (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func: .*got 'softmax'"),
    (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method: .*got 'greedy'"),
    (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq: .*got 2"),
    (DEEPSEEK_V3, {"num_key_value_heads": 8}, "num_key_value_heads: .*got 8"),
    (DEEPSEEK_V3, {"n_group": 7}, "num_expert_groups: expected a divisor of 256, got 7"),
    (
      DEEPSEEK_V3,
      {"rope_scaling": YARN | {"short_factor": [1]}},
      "rope_parameters: .*short_factor",
    ),
    (DEEPSEEK_V3, {"rope_scaling": YARN | {"factor": -1}}, "factor: expected a number above 0"),
  ],
)
def test_what_is_not_supported_is_refused(hf, changes, message):
  with pytest.raises(ValueError, match=message):
    ModelConfig.from_hf(hf | changes)


def test_fp8_without_blocks_is_refused():
  for change in ({"weight_block_size": None}, {"weight_block_size": [128]}, {"fmt": "e5m2"}):
    quantization = DEEPSEEK_V3["quantization_config"] | change
    with pytest.raises(ValueError, match=next(iter(change))):
      ModelConfig.from_hf(DEEPSEEK_V3 | {"quantization_config": quantization})


@pytest.mark.parametrize("hf", PUBLISHED, ids=lambda hf: hf["model_type"])
def test_every_parameter_has_names(hf):
  config = ModelConfig.from_hf(hf)
  specs, found = param_specs(config), sources(config)
  assert list(found) == list(specs)
  names: list[str] = []
  for path, spec in specs.items():
    array = found[path].array()
    assert array.shape == spec.shape[: array.ndim]
    names += list(array.flat)
  assert len(set(names)) == len(names)
  # Those of a known tensor of each kind.
  last = len(config.is_moe) - 1
  expert = f"model.layers.{last}.mlp.experts.{config.gating.num_experts - 1}.down_proj.weight"
  assert {"model.embed_tokens.weight", "lm_head.weight", expert} <= set(names)
  extra = f"model.layers.{len(config.is_moe)}.*"
  assert (extra in ignored_patterns(config)) == (hf["model_type"] != "qwen3_moe")


def test_rotation_is_that_of_complex_numbers():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 5, 3, 12)).astype(np.float32)
  position = rng.integers(0, 1000, (2, 5)).astype(np.int32)
  for interleaved in (False, True):
    rotary = Rotary(dim=8, theta=100.0, interleaved=interleaved)
    y = np.asarray(rotate(x, cosines_and_sines(rotary, position), rotary))
    part = x[..., :8].astype(np.float64)
    real, imag = (
      (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :4], part[..., 4:])
    )
    angle = position[..., None] * 100.0 ** (-np.arange(4) / 4)
    turned = (real + 1j * imag) * np.exp(1j * angle)[:, :, None]
    expected = np.concatenate([turned.real, turned.imag, x[..., 8:]], axis=-1)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=2e-4)


def test_stretching_keeps_fast_pairs_and_divides_slow_ones():
  plain = Rotary(dim=64, theta=1e4)
  yarn = Yarn(factor=40, original_positions=4096, attention_factor=1.25)
  stretched = dataclasses.replace(plain, yarn=yarn)
  turns = 4096 * frequencies(plain) / (2 * np.pi)  # in the trained length
  ratio = frequencies(plain) / frequencies(stretched)
  np.testing.assert_allclose(ratio[turns > 40], 1, rtol=1e-6)
  np.testing.assert_allclose(ratio[turns < 0.8], 40, rtol=1e-6)
  between = ratio[(turns < 30) & (turns > 1.2)]
  assert len(between) > 8 and (np.diff(between) > 0).all() and 1 < between[0] < between[-1] < 40
  cos, sin = cosines_and_sines(stretched, np.arange(4, dtype=np.int32)[None])
  np.testing.assert_allclose(np.hypot(cos, sin), 1.25, rtol=1e-6)


@pytest.mark.parametrize(
  ("text", "expected"), [("{", "expected JSON"), ("[]", "expected a JSON object")]
)
def test_a_folder_whose_configuration_is_damaged(tmp_path, text, expected):
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(ValueError, match=rf"config\.json: {expected}"):
    ModelConfig.from_folder(tmp_path)
