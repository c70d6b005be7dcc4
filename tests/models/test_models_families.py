"""Each family against the logits that `transformers` computed (checkpoints/make.py), on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_programs import ALONE, BLOCK, LENGTH, REQUESTS, ROWS, TIGHT, Program, mesh_of
from prompts import FOLDER, lay_out

from ultraep_jax import models, serve
from ultraep_jax.config import BalanceConfig
from ultraep_jax.trace import Recorder, read_choices

# One mesh each, whose program several tests share, so that together they are all kinds.
CASES = {
  "mixtral": ("4", "quota"),
  "olmoe": ("8", "quota"),
  "dots1": ("8", "quota"),
  "ernie4_5_moe": ("4", "quota"),
  "minimax_m2": ("1", "none"),
  "qwen2_moe": ("2", "quota"),
  "qwen3_moe": ("2", "quota"),
  "glm4_moe": ("2x4", "quota"),
  "deepseek_v3": ("8", "quota"),
  "deepseek_v3_fp8": ("2x4 auto", "quota"),
  "kimi_k2": ("2x4", "quota"),
  "qwen3_next": ("2", "quota"),
  "gpt_oss": ("4", "quota"),
}
# Those that run above on one rank or on an Auto mesh, and the one with states.
OTHERS = {
  "minimax_m2": ("8", "quota"),
  "deepseek_v3_fp8": ("1", "quota"),
  "qwen3_next": ("8", "quota"),
}
# What the engine sees of a family: its stacks, caches and states, on one rank, several and groups.
SERVED = ("mixtral", "minimax_m2", "glm4_moe", "deepseek_v3", "qwen3_next", "gpt_oss")
SLOW = ("qwen2_moe", "glm4_moe", "deepseek_v3", "deepseek_v3_fp8", "gpt_oss")


@functools.cache
def program_of(name: str) -> Program:
  """On its mesh, which must be in context."""
  return Program(name, BalanceConfig(strategy=CASES[name][1], objective="balance"))


@pytest.mark.parametrize(
  "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_logits(name):
  with jax.set_mesh(mesh_of(CASES[name][0])):
    program_of(name).check_all()


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_logits_on_another_mesh(name):
  mesh, strategy = OTHERS[name]
  with jax.set_mesh(mesh_of(mesh)):
    Program(name, BalanceConfig(strategy=strategy, objective="balance")).check_all()


@pytest.mark.parametrize(
  "name",
  [name if name == "qwen3_next" else pytest.param(name, marks=pytest.mark.slow) for name in SERVED],
)
def test_engine_serves_it(name):
  """Packed by the engine; with what decoding needs of each request as the model alone gives it."""
  config = serve.EngineConfig(buckets=(LENGTH,), alignment=8, max_requests=4, return_logits=True)
  with jax.set_mesh(mesh_of(CASES[name][0])):
    program = program_of(name)
    engine = serve.PrefillEngine(program.model, config)
    alone = program(ALONE)
  futures = [engine.submit(prompt) for prompt in program.prompts]
  while engine.run_batch():
    pass
  for i, (future, expected) in enumerate(zip(futures, program.expected, strict=True)):
    result = future.result()
    atol = 2e-5 * np.abs(expected).max()
    np.testing.assert_allclose(result.logits_V, expected, rtol=2e-5, atol=atol)
    for key, cache in result.cache.items():
      own = np.asarray(cache)[:, : result.length]
      np.testing.assert_allclose(own, alone.cache[key][:, i, : result.length], atol=2e-4)
    assert (result.state is None) == (name != "qwen3_next")
    for key, state in (result.state or {}).items():
      np.testing.assert_allclose(state, alone.state[key][:, i, 0], atol=2e-4, err_msg=key)
      assert np.asarray(state).any(axis=tuple(range(1, state.ndim))).all()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tolerance"), [("qwen3_moe", 0.05), ("gpt_oss", 0.15)])
def test_bfloat16_is_close(name, tolerance):
  """With the experts of float32; `transformers` with its own choices is within 0.04 and 0.14."""
  run = jax.jit(lambda model, batch, index: model(batch, expert_index_LBTK=index))
  with jax.set_mesh(mesh_of(CASES[name][0])):
    program = program_of(name)
    batch = lay_out(program.prompts, ALONE, ROWS, LENGTH, REQUESTS)
    chosen = program.run(program.model, batch).expert_index_LBTK
    balance = BalanceConfig(objective="balance")
    model = models.load(FOLDER / name, balance=balance, attention_block=BLOCK)
    result = run(model, batch, chosen)
  assert model.embed[...].dtype == result.cache["key"].dtype == jnp.bfloat16
  assert model.stacks[0].router[...].dtype == result.logits_BRV.dtype == jnp.float32
  for prompt, logits in enumerate(program.expected):
    error = np.abs(np.asarray(result.logits_BRV)[prompt, 0] - logits).max()
    assert error < tolerance * np.abs(logits).max()


def test_choices_of_a_rollout_are_made_again(tmp_path):
  """By way of a trace, bit for bit; and by routers that would choose otherwise."""
  with jax.set_mesh(mesh_of("2")):
    program = Program("dots1", BalanceConfig(strategy="none", objective="balance"))
    batch = lay_out(program.prompts, TIGHT, ROWS, LENGTH, REQUESTS)
    first = program.run(program.model, batch)
    with Recorder(tmp_path) as recorder:
      recorder.record(3, first.stats, axes=("layer", "group"), expert_index=first.expert_index_LBTK)
    index = jnp.asarray(np.stack(list(read_choices(tmp_path, 3).values())))
    assert index.shape == (4, ROWS, LENGTH, 3)
    np.testing.assert_array_equal((index < 0).all(axis=(0, 3)), batch.segment_BT == 0)
    replay = jax.jit(lambda model, batch, index: model(batch, expert_index_LBTK=index))
    again = replay(program.model, batch, index)
    jax.tree.map(np.testing.assert_array_equal, again, first)
    for stack in program.model.stacks:
      if hasattr(stack, "router"):
        stack.router[...] = -stack.router[...]
    moved = replay(program.model, batch, index)
    own = program.run(program.model, batch)
  np.testing.assert_array_equal(moved.expert_index_LBTK, index)
  np.testing.assert_array_equal(moved.stats.load_GE, first.stats.load_GE)
  assert (own.expert_index_LBTK != index).any()
  assert (moved.logits_BRV != first.logits_BRV).any()
