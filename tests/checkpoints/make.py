"""Makes the small checkpoints beside this file, with the logits that `transformers` computes.

They are in the format of the Hugging Face Hub: one tensor for each expert. Not part of the tests'
environment; run it in one of its own:

  pip install torch==2.13.* transformers==5.23.* safetensors
  python tests/checkpoints/make.py           # writes the folders anew
  python tests/checkpoints/make.py --check   # computes the committed logits again, and compares
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
    "quantization_config": {
      "quant_method": "fp8",
      "fmt": "e4m3",
      "activation_scheme": "dynamic",
      "weight_block_size": [BLOCK, BLOCK],
    },
  },
}
Tensors = dict[str, torch.Tensor]


def random_weights(name: str) -> Tensors:
  """Random tensors by their names on the Hub, large enough that every part of a model matters."""
  config = {k: v for k, v in CONFIGS[name].items() if k != "quantization_config"}
  with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "config.json").write_text(json.dumps(config))
    parsed = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(parsed).save_pretrained(folder)
    tensors = load_file(pathlib.Path(folder, "model.safetensors"))
  assert not [n for n in tensors if "gate_up_proj" in n], "expected a tensor for each expert"
  generator = torch.Generator().manual_seed(sorted(CONFIGS).index(name))

  def draw(key: str, tensor: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=generator)
    if "norm" in key:
      return 1 + 0.3 * noise
    if tensor.ndim == 1:  # a bias
      return 0.2 * noise
    if "embed" in key:
      return noise
    gain = 2.0 if "mlp.gate." in key else 1.5
    return gain * noise / tensor.shape[1] ** 0.5

  return {key: draw(key, tensor) for key, tensor in sorted(tensors.items())}


def quantized(tensors: Tensors) -> Tensors:
  """The linear maps of layers as FP8 with a scale for each block, all else as it is."""
  result: Tensors = {}
  for key, weight in tensors.items():
    if not key.endswith("_proj.weight") and "kv_a_proj_with_mqa" not in key:
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
    if key.endswith("_scale_inv"):
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
  if name == "qwen3_moe":
    tensors = {key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()}
  if "quantization_config" in CONFIGS[name]:
    tensors = quantized(tensors)
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
  source = folder
  with tempfile.TemporaryDirectory() as scratch:
    if config.pop("quantization_config", None):
      source = pathlib.Path(scratch)
      tensors = dequantized(load_file(folder / "model.safetensors"))
      save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
      (source / "config.json").write_text(json.dumps(config))
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(source, dtype=torch.float32, attn_implementation="eager").eval()
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
  check = parser.parse_args().check
  for name in CONFIGS:
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
