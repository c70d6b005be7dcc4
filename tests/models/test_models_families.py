"""Each family against the logits that `transformers` computed (checkpoints/make.py), on meshes.

Qwen3-MoE, GLM and DeepSeek are in test_models_logits.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_programs import ALONE, LENGTH, REQUESTS, ROWS, TIGHT, Program, mesh_of
from prompts import lay_out

from ultraep_jax import serve
from ultraep_jax.config import BalanceConfig
from ultraep_jax.trace import Recorder, read_choices

pytestmark = pytest.mark.usefixtures("unoptimized")

# One mesh each, so that together they are all, and another as a slow test.
FAST = {
  "mixtral": ("4", "quota"),
  "olmoe": ("8", "quota"),
  "dots1": ("2", "none"),
  "ernie4_5_moe": ("4", "quota"),
  "minimax_m2": ("1", "none"),
  "qwen2_moe": ("2", "quota"),
  "kimi_k2": ("2x4", "quota"),
  "qwen3_next": ("2", "quota"),
  "gpt_oss": ("4", "quota"),
}
OTHERS = {
  "mixtral": ("1", "none"),
  "olmoe": ("2", "quota"),
  "dots1": ("8", "quota"),
  "ernie4_5_moe": ("1", "none"),
  "minimax_m2": ("8", "quota"),
  "qwen2_moe": ("4", "none"),
  "kimi_k2": ("1", "none"),
  "qwen3_next": ("8", "quota"),
  "gpt_oss": ("1", "none"),
}
CASES = [(name, *case) for name, case in FAST.items()]
SLOW = [(name, *case) for name, case in OTHERS.items()]
# The engine serves on meshes whose programs the tests of logits compile, too.
SERVED = FAST | {
  "qwen3_moe": ("2", "quota"),
  "glm4_moe": ("4", "quota"),
  "deepseek_v3": ("2", "quota"),
}


@pytest.mark.parametrize(
  ("name", "mesh", "strategy"),
  [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_logits(name, mesh, strategy):
  with jax.set_mesh(mesh_of(mesh)):
    Program(name, BalanceConfig(strategy=strategy, objective="balance")).check_all()


@pytest.mark.parametrize(
  "name",
  [name if name == "qwen3_next" else pytest.param(name, marks=pytest.mark.slow) for name in SERVED],
)
def test_engine_serves_it(name):
  """Packed by the engine; with what decoding needs of each request as the model alone gives it."""
  config = serve.EngineConfig(buckets=(LENGTH,), alignment=8, max_requests=4, return_logits=True)
  mesh, strategy = SERVED[name]
  with jax.set_mesh(mesh_of(mesh)):
    program = Program(name, BalanceConfig(strategy=strategy, objective="balance"))
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


def test_choices_of_a_rollout_are_made_again(tmp_path):
  """By way of a trace, bit for bit; and by routers that would choose otherwise."""
  with jax.set_mesh(mesh_of("2")):
    program = Program("dots1", BalanceConfig(strategy="none"))
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
