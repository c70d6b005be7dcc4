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
from configs import BLOCK, CONFIGS
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

HERE = pathlib.Path(__file__).parent
LENGTHS = (1, 6, 13, 24, 37)  # of the prompts
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
