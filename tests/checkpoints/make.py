"""Makes the small checkpoints beside this file, with the logits that `transformers` computes.

They are in the format of the Hugging Face Hub: one tensor for each expert. Not part of the tests'
environment; run it in one of its own:

  pip install torch==2.13.* transformers==5.23.* safetensors
  python tests/checkpoints/make.py           # writes the folders anew
  python tests/checkpoints/make.py --check   # computes the committed logits again, and compares
  python tests/checkpoints/make.py mixtral   # only some of them
"""

import argparse
import json
import pathlib
import shutil
import tempfile
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

HERE = pathlib.Path(__file__).parent
LENGTHS = (1, 6, 13, 24, 37)  # of the prompts
BLOCK = 16  # rows and columns of FP8 weights with one scale

_SIZES = {
  "vocab_size": 128,
  "hidden_size": 32,
  "intermediate_size": 48,
  "moe_intermediate_size": 16,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "hidden_act": "silu",
  "max_position_embeddings": 128,
  "torch_dtype": "float32",
}
# Of the checkpoints that hold bfloat16.
_SMALL = {
  "vocab_size": 96,
  "hidden_size": 32,
  "intermediate_size": 24,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "hidden_act": "silu",
  "max_position_embeddings": 128,
  "torch_dtype": "bfloat16",
}
_FP8 = {
  "quant_method": "fp8",
  "fmt": "e4m3",
  "activation_scheme": "dynamic",
  "weight_block_size": [BLOCK, BLOCK],
}
_DEEPSEEK = {
  "architectures": ["DeepseekV3ForCausalLM"],
  "model_type": "deepseek_v3",
  **_SIZES,
  "num_key_value_heads": 4,
  "kv_lora_rank": 24,
  "qk_nope_head_dim": 12,
  "qk_rope_head_dim": 8,
  "v_head_dim": 10,
  "n_routed_experts": 16,
  "num_experts_per_tok": 4,
  "n_shared_experts": 2,
  "n_group": 4,
  "topk_group": 2,
  "norm_topk_prob": True,
  "routed_scaling_factor": 2.5,
  "scoring_func": "sigmoid",
  "topk_method": "noaux_tc",
  "moe_layer_freq": 1,
  "first_k_dense_replace": 1,
  "num_nextn_predict_layers": 1,
  "rms_norm_eps": 1e-3,
  "rope_theta": 10000,
  "attention_bias": False,
  "tie_word_embeddings": False,
}
# Contents of config.json, in the form that the Hub has for these models. rms_norm_eps is large
# enough to show in the logits.
CONFIGS: dict[str, dict[str, Any]] = {
  "deepseek_v3": _DEEPSEEK
  | {
    "q_lora_rank": 20,
    # So that some pairs of channels lie on the ramp between kept and stretched frequencies.
    "qk_rope_head_dim": 16,
    "rope_theta": 100,
    "rope_scaling": {
      "type": "yarn",
      "factor": 4,
      "original_max_position_embeddings": 32,
      "beta_fast": 2,
      "beta_slow": 1,
      "mscale": 1.0,
      "mscale_all_dim": 0.8,
    },
  },
  # No latent of queries; sizes that blocks of BLOCK do not divide.
  "deepseek_v3_fp8": _DEEPSEEK
  | {
    "hidden_size": 40,
    "q_lora_rank": None,
    "rope_scaling": None,
    "quantization_config": _FP8,
  },
  "glm4_moe": {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    **_SIZES,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-3,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "use_qk_norm": True,
    "attention_bias": True,
    "tie_word_embeddings": False,
  },
  "qwen3_moe": {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    **_SIZES,
    "torch_dtype": "bfloat16",
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [2],
    "rms_norm_eps": 1e-3,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
  },
  # A window that is no multiple of a block of attention in the tests.
  "mixtral": {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    **_SMALL,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-3,
    "rope_theta": 1000000.0,
    "router_jitter_noise": 0.0,
    "sliding_window": 11,
    "tie_word_embeddings": False,
  },
  "olmoe": {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    **_SMALL,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "clip_qkv": None,
    "rms_norm_eps": 1e-3,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
  },
  "dots1": {
    "architectures": ["Dots1ForCausalLM"],
    "model_type": "dots1",
    **_SMALL,
    "num_hidden_layers": 5,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "noaux_tc",
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "layer_types": ["full_attention", *["sliding_attention", "full_attention"] * 2],
    "sliding_window": 9,
    "max_window_layers": 5,
    "rms_norm_eps": 1e-3,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
  },
  "ernie4_5_moe": {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    **_SMALL,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 2,
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 2,
    "moe_layer_interval": 1,
    "moe_gate": "topk",
    "moe_use_aux_free": True,
    "use_bias": False,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500000,
    "tie_word_embeddings": True,
  },
  "minimax_m2": {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    **_SMALL,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "qk_norm_type": "per_layer",
    "use_qk_norm": True,
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "attn_type_list": [1, 1],
    "num_mtp_modules": 3,
    "rms_norm_eps": 1e-3,
    "rope_theta": 5000000,
    "rotary_dim": 8,
    "tie_word_embeddings": False,
    "quantization_config": _FP8 | {"fmt": "float8_e4m3fn"},
  },
  # transformers has no kimi_k2: its DeepSeek-V3 computes the logits.
  "kimi_k2": _DEEPSEEK
  | {
    "model_type": "kimi_k2",
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 20,
    "rope_theta": 50000.0,
    "rope_scaling": {
      "type": "yarn",
      "factor": 32.0,
      "original_max_position_embeddings": 16,
      "beta_fast": 1.0,
      "beta_slow": 1.0,
      "mscale": 1.0,
      "mscale_all_dim": 1.0,
    },
    "quantization_config": _FP8,
  },
  "qwen2_moe": {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    **_SMALL,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 32,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "max_window_layers": 3,
    "rms_norm_eps": 1e-3,
    "rope_theta": 1000000.0,
    "sliding_window": 13,
    "use_sliding_window": True,
    "tie_word_embeddings": False,
  },
  "qwen3_next": {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    **_SMALL,
    "num_hidden_layers": 5,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-3,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
  },
  "gpt_oss": {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    **_SMALL,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 7,
    "swiglu_limit": 1.5,
    "rms_norm_eps": 1e-3,
    "rope_theta": 100,
    "rope_scaling": {
      "rope_type": "yarn",
      "factor": 4.0,
      "original_max_position_embeddings": 32,
      "beta_fast": 4.0,
      "beta_slow": 1.0,
      "truncate": False,
    },
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"},
  },
}
Tensors = dict[str, torch.Tensor]


def of_transformers(config: dict[str, Any]) -> dict[str, Any]:
  """What transformers is told: no quantisation, as it gets the values, and a type that it knows."""
  config = {k: v for k, v in config.items() if k != "quantization_config"}
  if config["model_type"] == "kimi_k2":
    config["model_type"] = "deepseek_v3"
  return config


def random_weights(name: str) -> Tensors:
  """Random tensors by their names on the Hub, large enough that every part of a model matters."""
  with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "config.json").write_text(json.dumps(of_transformers(CONFIGS[name])))
    parsed = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(parsed).save_pretrained(folder)
    tensors = load_file(pathlib.Path(folder, "model.safetensors"))
  fused = [key for key in tensors if "gate_up_proj" in key]
  assert name == "gpt_oss" or not fused, "expected a tensor for each expert"
  generator = torch.Generator().manual_seed(list(CONFIGS).index(name))

  def draw(key: str, tensor: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=generator)
    if "norm" in key:
      around_one = name == "qwen3_next" and "linear_attn" not in key
      return 0.3 * noise + (0 if around_one else 1)
    if "conv1d" in key:
      return noise / 2
    if tensor.ndim == 1 or "bias" in key:
      return 0.2 * noise
    if "embed" in key:
      return noise
    gain = 2.0 if ".gate." in key else 1.5
    return gain * noise / tensor.shape[1] ** 0.5

  return {key: draw(key, tensor) for key, tensor in sorted(tensors.items())}


def in_mxfp4(tensors: Tensors) -> Tensors:
  """Random blocks and scales in the place of the experts' matrices."""
  generator = torch.Generator().manual_seed(0)
  result: Tensors = {}
  for key, weight in tensors.items():
    if not key.endswith(("gate_up_proj", "down_proj")):
      result[key] = weight
      continue
    experts, inner, outer = weight.shape
    shape = (experts, outer, inner // 32)
    blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(123, 126, shape, generator=generator, dtype=torch.uint8)
    result |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
  return result


def quantized(tensors: Tensors) -> Tensors:
  """The linear maps of layers as FP8 with a scale for each block, all else as it is."""
  result: Tensors = {}
  for key, weight in tensors.items():
    ends = ("_proj.weight", "kv_a_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    if not key.endswith(ends):
      result[key] = weight
      continue
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
      for j in range(scale.shape[1]):
        part = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
        scale[i, j] = weight[part].abs().max() / 448  # the largest float8_e4m3fn
        values[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
    result[key], result[key + "_scale_inv"] = values, scale
  return result


def dequantized(tensors: Tensors) -> Tensors:
  result: Tensors = {}
  for key, weight in tensors.items():
    if key.endswith(("_scale_inv", "_scales")):
      continue
    if key.endswith("_blocks"):
      whole = key.removesuffix("_blocks")
      scales = tensors[f"{whole}_scales"]
      result[whole] = convert_moe_packed_tensors(weight, scales, dtype=torch.float32).contiguous()
      continue
    result[key] = weight.float()
    if weight.dtype == torch.float8_e4m3fn:
      scale = tensors[key + "_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
      result[key] *= scale[: weight.shape[0], : weight.shape[1]]
  return result


def extra_layer(name: str) -> Tensors:
  """Some tensors that prefill does not need, as the Hub's checkpoints have them."""
  if name != "glm4_moe":
    return {}
  width = CONFIGS[name]["hidden_size"]
  return {
    "model.layers.3.eh_proj.weight": torch.ones(width, 2 * width),
    "model.layers.3.enorm.weight": torch.ones(width),
  }


def write(name: str, folder: pathlib.Path) -> None:
  tensors = random_weights(name)
  if CONFIGS[name]["torch_dtype"] == "bfloat16":
    tensors = {key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()}
  if "quantization_config" in CONFIGS[name]:
    tensors = in_mxfp4(tensors) if name == "gpt_oss" else quantized(tensors)
  tensors |= extra_layer(name)
  (folder / "config.json").write_text(json.dumps(CONFIGS[name], indent=2) + "\n")
  if name != "glm4_moe":
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return
  places = {}
  for part in range(2):
    file = f"model-{part + 1:05}-of-00002.safetensors"
    chosen = {key: tensors[key] for key in sorted(tensors)[part::2]}
    save_file(chosen, folder / file, metadata={"format": "pt"})
    places |= dict.fromkeys(chosen, file)
  index = {"metadata": {}, "weight_map": dict(sorted(places.items()))}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def reference(folder: pathlib.Path) -> dict[str, np.ndarray]:
  """Prompts, and the logits after each, computed alone in float32."""
  config = json.loads((folder / "config.json").read_text())
  files = sorted(folder.glob("*.safetensors"))
  tensors = {key: tensor for file in files for key, tensor in load_file(file).items()}
  with tempfile.TemporaryDirectory() as scratch:
    source = pathlib.Path(scratch)
    save_file(dequantized(tensors), source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text(json.dumps(of_transformers(config)))
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(
      source, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
  assert not info["missing_keys"] and not info["mismatched_keys"], info
  model.eval()
  generator = torch.Generator().manual_seed(0)
  arrays: dict[str, np.ndarray] = {}
  for i, length in enumerate(LENGTHS):
    prompt = torch.randint(config["vocab_size"], (1, length), generator=generator)
    with torch.no_grad():
      logits = model(prompt).logits[0, -1]
    arrays[f"prompt_{i}"] = prompt[0].numpy().astype(np.int32)
    arrays[f"logits_{i}"] = logits.numpy()
  return arrays


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--check", action="store_true", help="compare instead of writing")
  parser.add_argument("names", nargs="*", help="of the checkpoints; all unless given")
  args = parser.parse_args()
  check = args.check
  for name in args.names or CONFIGS:
    folder = HERE / name
    if not check:
      shutil.rmtree(folder, ignore_errors=True)
      folder.mkdir()
      write(name, folder)
    arrays = reference(folder)
    if not check:
      np.savez_compressed(folder / "logits.npz", **arrays)
    committed = np.load(folder / "logits.npz")
    for key, array in arrays.items():
      np.testing.assert_allclose(array, committed[key], rtol=1e-4, atol=1e-4)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: {size / 1e3:.0f} kB, logits up to {np.abs(arrays['logits_4']).max():.2f}")


if __name__ == "__main__":
  main()
