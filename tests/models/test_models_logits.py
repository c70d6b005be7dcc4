"""Published architectures against the logits that `transformers` computed (checkpoints/make.py)."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_programs import ALONE, BLOCK, LENGTH, PACKED, REQUESTS, ROWS, Program, mesh_of
from prompts import FOLDER, lay_out, read_prompts

from ultraep_jax import models
from ultraep_jax.config import BalanceConfig


@pytest.mark.parametrize(
  ("name", "mesh", "strategy"),
  [
    ("qwen3_moe", "2", "quota"),
    ("glm4_moe", "1", "none"),
    ("deepseek_v3_fp8", "1", "none"),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        ("qwen3_moe", "1", "quota"),
        ("qwen3_moe", "8", "none"),
        ("qwen3_moe", "2 auto", "none"),
        ("glm4_moe", "4", "quota"),
        ("glm4_moe", "2x4", "quota"),
        ("deepseek_v3", "2", "quota"),
        ("deepseek_v3", "8", "quota"),
        ("deepseek_v3_fp8", "2x4 auto", "quota"),
      )
    ),
  ],
)
def test_logits(name, mesh, strategy):
  with jax.set_mesh(mesh_of(mesh)):
    Program(name, BalanceConfig(strategy=strategy, objective="balance")).check_all()


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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tolerance"), [("qwen3_moe", 0.05), ("gpt_oss", 0.15)])
def test_bfloat16_is_close(name, tolerance):
  """With the experts of float32; `transformers` with its own choices is within 0.04 and 0.14."""
  prompts, expected = read_prompts(name)
  batch = lay_out(prompts, ALONE, ROWS, LENGTH, REQUESTS)
  balance = BalanceConfig(objective="balance")
  run = jax.jit(lambda model, batch, index: model(batch, expert_index_LBTK=index))
  with jax.set_mesh(mesh_of("2")):
    program = Program(name, balance)
    chosen = program.run(program.model, batch).expert_index_LBTK
    model = models.load(FOLDER / name, balance=balance, attention_block=BLOCK)
    result = run(model, batch, chosen)
  assert model.embed[...].dtype == result.cache["key"].dtype == jnp.bfloat16
  assert model.stacks[0].router[...].dtype == result.logits_BRV.dtype == jnp.float32
  for prompt, logits in enumerate(expected):
    error = np.abs(np.asarray(result.logits_BRV)[prompt, 0] - logits).max()
    assert error < tolerance * np.abs(logits).max()


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
