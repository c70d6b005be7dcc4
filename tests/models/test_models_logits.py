"""Logits bit for bit, and checkpoints that do not fit; test_models_families.py has all families."""

import json
import shutil

import jax
import numpy as np
import pytest
from checkpoint_programs import ALONE, PACKED, Program, mesh_of
from prompts import FOLDER

from ultraep_jax import models
from ultraep_jax.config import BalanceConfig


def test_results_do_not_depend_on_the_batch():
  """Bit for bit, where requests start at blocks; and the cache holds what a prefix gives."""
  with jax.set_mesh(mesh_of("2x2")):
    program = Program("deepseek_v3", BalanceConfig(objective="balance", batch_invariant=True))
    alone, packed = program(ALONE), program(PACKED)
    replicas = [result.stats.replica_expert_GS for result in (alone, packed)]
    assert all((replica >= 0).any() for replica in replicas) and (replicas[0] != replicas[1]).any()
    program.check(alone, ALONE)
    pairs = zip(program.logits(alone, ALONE), program.logits(packed, PACKED), strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs)
    for name, cache in packed.cache.items():
      for prompt, (row, start) in PACKED.items():
        length = len(program.prompts[prompt])
        one, other = alone.cache[name][:, prompt, :length], cache[:, row, start : start + length]
        np.testing.assert_array_equal(one, other, err_msg=f"{name} of {prompt}")
        assert one.any(axis=-1).all()
    # The last prompt's first tokens, as a prompt of their own.
    program.prompts[3] = program.prompts[4][:24]
    prefix = program(PACKED)
    for name, cache in prefix.cache.items():
      np.testing.assert_array_equal(cache[:, 0, :24], cache[:, 0, 24:48], err_msg=name)


def test_checkpoint_of_another_model_is_refused(tmp_path):
  """Fewer layers, or another kind of layer, than the tensors are for."""
  shutil.copytree(FOLDER / "qwen3_moe", tmp_path, dirs_exist_ok=True)
  hf = json.loads((tmp_path / "config.json").read_text())

  def message(**changes: object) -> str:
    (tmp_path / "config.json").write_text(json.dumps(hf | changes))
    with jax.set_mesh(mesh_of("2")), pytest.raises(ValueError) as error:
      models.load(tmp_path, balance=BalanceConfig())
    return str(error.value)

  assert "model.layers.2.mlp.down_proj.weight" in message(num_hidden_layers=2)
  assert "model.layers.2.mlp.experts.0.gate_proj.weight: not in" in message(mlp_only_layers=[])
  assert "lm_head.weight: not in" in message(tie_word_embeddings=False)
  assert "model.layers.0.self_attn.v_proj.weight for" in message(head_dim=8)
