"""Configurations of published models: what is read, and what is refused."""

import dataclasses

import numpy as np
import pytest
from published_configs import (
  DEEPSEEK_V3,
  DOTS1,
  ERNIE_21B,
  GLM_45,
  GPT_OSS_120B,
  KIMI_K2,
  MINIMAX_M2,
  MIXTRAL_8X7B,
  OLMOE_1B_7B,
  PUBLISHED,
  QWEN2_57B,
  QWEN3_30B,
  QWEN3_NEXT_80B,
)

from ultraep_jax.activations import clamped_swiglu
from ultraep_jax.gating import GatingConfig
from ultraep_jax.models import GatedDelta, GroupedQuery, Latent, ModelConfig, Rotary, Yarn, families
from ultraep_jax.models.names import ignored_patterns, sources
from ultraep_jax.models.params import param_specs
from ultraep_jax.models.pattern import cycles
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


def test_kimi():
  config = ModelConfig.from_hf(KIMI_K2)
  assert config.architecture == "kimi_k2" and isinstance(config.attention, Latent)
  assert config.gating.num_experts == 384 and config.gating.num_expert_groups == 1
  assert config.num_extra_layers == 0 and [len(stack) for stack in config.stacks] == [1, 60]


def test_mixtral_and_olmoe():
  mixtral, olmoe = map(ModelConfig.from_hf, (MIXTRAL_8X7B, OLMOE_1B_7B))
  assert mixtral == ModelConfig(
    architecture="mixtral",
    vocab_size=32000,
    embed_dim=4096,
    is_moe=(True,) * 32,
    attention=GroupedQuery(num_heads=32, num_key_heads=8, head_dim=128),
    rotary=Rotary(dim=128, theta=1e6),
    expert_dim=14336,
    gating=GatingConfig(num_experts=8, num_experts_per_tok=2),
    norm_eps=1e-5,
  )
  windowed = ModelConfig.from_hf(MIXTRAL_8X7B | {"sliding_window": 4096}).attention
  assert isinstance(windowed, GroupedQuery) and windowed.window == 4096
  assert isinstance(olmoe.attention, GroupedQuery) and olmoe.attention.qk_norm == "all"
  assert olmoe.expert_dim == 1024 and not olmoe.gating.normalize_topk


def test_qwen2_and_qwen3_next():
  qwen2, following = map(ModelConfig.from_hf, (QWEN2_57B, QWEN3_NEXT_80B))
  assert qwen2.num_shared_experts == 8 and qwen2.shared_gate and not qwen2.norms_around_one
  assert qwen2.attention == GroupedQuery(num_heads=28, num_key_heads=4, head_dim=128, bias=True)
  slides = ModelConfig.from_hf(QWEN2_57B | {"use_sliding_window": True, "max_window_layers": 3})
  windows = [slides.mixer(i).window for i in range(28)]  # pyright: ignore[reportAttributeAccessIssue]
  assert windows == [65536, None, 65536, *[None] * 25]
  delta = GatedDelta(num_heads=32, num_key_heads=16, key_dim=128, value_dim=128, conv_width=4)
  attention = GroupedQuery(num_heads=16, num_key_heads=2, head_dim=256, qk_norm="head", gated=True)
  assert following.attention == (delta, delta, delta, attention) * 12
  assert following.runs == ((0, 1, 2, 3),) and following.stacks[3] == tuple(range(3, 48, 4))
  assert following.rotary == Rotary(dim=64, theta=1e7)
  assert following.norms_around_one and following.gating.normalize_topk
  kinds = ["full_attention"] * 47 + ["linear_attention"]
  assert ModelConfig.from_hf(QWEN3_NEXT_80B | {"layer_types": kinds}).runs == ((0,), (1,))


def test_minimax_dots_and_ernie():
  minimax, dots, ernie = map(ModelConfig.from_hf, (MINIMAX_M2, DOTS1, ERNIE_21B))
  assert minimax.rotary == Rotary(dim=64, theta=5e6) and minimax.num_extra_layers == 3
  assert minimax.gating.scoring == "sigmoid" and minimax.gating.use_selection_bias
  assert isinstance(dots.attention, GroupedQuery) and dots.attention.window is None
  assert [len(stack) for stack in dots.stacks] == [1, 61] and dots.num_shared_experts == 2
  late = ModelConfig.from_hf(DOTS1 | {"sliding_window": 4096, "max_window_layers": 60})
  assert [len(stack) for stack in late.stacks] == [1, 59, 2]
  assert ernie.rotary == Rotary(dim=128, theta=5e5, interleaved=True) and ernie.tied_embeddings
  assert ernie.gating.scoring == "softmax" and ernie.gating.use_selection_bias
  assert [len(stack) for stack in ernie.stacks] == [1, 27]


def test_gpt_oss():
  config = ModelConfig.from_hf(GPT_OSS_120B)
  whole = GroupedQuery(
    num_heads=64, num_key_heads=8, head_dim=64, bias=True, out_bias=True, sinks=True
  )
  assert config.attention == (dataclasses.replace(whole, window=128), whole) * 18
  assert config.runs == ((0, 1),) and config.activation == clamped_swiglu(1.702, 7.0)
  assert config.expert_layout == "interleaved" and config.expert_bias and config.router_bias
  yarn = config.rotary.yarn
  assert yarn is not None and not yarn.truncate
  assert yarn.attention_factor == pytest.approx(0.1 * np.log(32) + 1)


def test_what_a_file_is_silent_about_is_as_in_transformers():
  def silent(hf, *names, **changes):
    return ModelConfig.from_hf({k: v for k, v in hf.items() if k not in names} | changes)

  assert silent(MIXTRAL_8X7B, "rope_theta").rotary.theta == 1e6
  published = ModelConfig.from_hf(GPT_OSS_120B)
  assert silent(GPT_OSS_120B, "rope_scaling", "rope_theta") == published
  assert silent(GPT_OSS_120B, rope_scaling=None) == published
  plain = silent(GPT_OSS_120B, "rope_scaling", rope_parameters={"rope_type": "default"})
  assert plain.rotary == dataclasses.replace(published.rotary, yarn=None)
  dots = silent(DOTS1, "norm_topk_prob", "sliding_window", max_window_layers=60)
  assert not dots.gating.normalize_topk
  late = [dots.mixer(layer).window for layer in range(58, 62)]  # pyright: ignore[reportAttributeAccessIssue]
  assert late == [None, None, 4096, 4096]


def test_newer_form_of_positions_is_the_same():
  for hf in PUBLISHED:
    old = dict(hf)
    rope = dict(old.pop("rope_scaling", None) or {})
    rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
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
  with pytest.raises(ValueError, match="expected factor or original_max_position_embeddings"):
    ModelConfig.from_hf(QWEN3_30B | {"rope_scaling": {"rope_type": "yarn"}})


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
    (
      KIMI_K2,
      {"quantization_config": {"quant_method": "compressed-tensors"}},
      "expected 'fp8', or weights that are multiplied out, got 'compressed-tensors'",
    ),
    (
      GPT_OSS_120B,
      {"quantization_config": {"quant_method": "fp8"}},
      "expected 'mxfp4', or .*'fp8'",
    ),
    (GPT_OSS_120B, {"sliding_window": None}, "sliding_window: expected an integer .*got nothing"),
    (GPT_OSS_120B, {"layer_types": ["full_attention"] * 9}, "layer_types: expected 36 of"),
    (GPT_OSS_120B, {"layer_types": ["linear_attention"] * 36}, "layer_types: expected 36 of"),
    (OLMOE_1B_7B, {"clip_qkv": 8.0}, "clip_qkv: expected null, got 8.0"),
    (QWEN2_57B, {"shared_expert_intermediate_size": 99}, "expected a multiple of 2560, got 99"),
    (QWEN3_NEXT_80B, {"linear_num_key_heads": 3}, "linear_num_key_heads: expected a divisor of 32"),
    (MINIMAX_M2, {"attn_type_list": [0, 1]}, r"attn_type_list: expected a list of 1, got \[0, 1\]"),
    (MINIMAX_M2, {"qk_norm_type": "per_head"}, "qk_norm_type: .*got 'per_head'"),
    (ERNIE_21B, {"use_bias": True}, "use_bias: .*got True"),
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
  below = families.by_name(hf["model_type"]).moe["wo"].format(expert=config.gating.num_experts - 1)
  expert = f"model.layers.{config.num_layers - 1}.{below}"
  head = set() if config.tied_embeddings else {"lm_head.weight"}
  assert {"model.embed_tokens.weight", expert} | head <= set(names)
  extra = f"model.layers.{len(config.is_moe)}.*"
  assert (extra in ignored_patterns(config)) == (config.num_extra_layers > 0)


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
  ("kinds", "expected"),
  [
    ("", []),
    ("A", [[(0,)]]),
    ("AAB", [[(0, 1)], [(2,)]]),
    ("ABAB", [[(0, 2), (1, 3)]]),
    ("ABABA", [[(0,)], [(1, 3), (2, 4)]]),
    ("ABABABAABAAB", [[(0, 2, 4), (1, 3, 5)], [(6, 9), (7, 10), (8, 11)]]),
    ("ABBBBABBBB", [[(0,)], [(1, 2, 3, 4)], [(5,)], [(6, 7, 8, 9)]]),
  ],
)
def test_layers_that_repeat(kinds, expected):
  """Every layer is in one stack, in order, and no cut with fewer places is missed."""
  found = cycles(kinds)
  if len(kinds) < 12:
    assert found == expected
  assert sum(map(len, found)) == sum(map(len, expected))
  order = [layer for run in found for turn in zip(*run, strict=True) for layer in turn]
  assert order == list(range(len(kinds)))
  assert all(len({kinds[i] for i in stack}) == 1 for run in found for stack in run)


@pytest.mark.parametrize(
  ("text", "expected"), [("{", "expected JSON"), ("[]", "expected a JSON object")]
)
def test_a_folder_whose_configuration_is_damaged(tmp_path, text, expected):
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(ValueError, match=rf"config\.json: {expected}"):
    ModelConfig.from_folder(tmp_path)
