"""Each family against the logits that `transformers` computed (checkpoints/make.py), on meshes.

Qwen3-MoE, GLM and DeepSeek are in test_models_logits.py.
"""

import jax
import numpy as np
import pytest
from checkpoint_programs import ALONE, PACKED, TIGHT, Program, mesh_of

from ultraep_jax.config import BalanceConfig

pytestmark = pytest.mark.usefixtures("unoptimized")

# One mesh each, so that together they are all; the other meshes are slow tests.
FAST = {
  "mixtral": ("4", "quota"),
  "olmoe": ("8", "quota"),
  "dots1": ("2", "none"),
  "ernie4_5_moe": ("4", "quota"),
  "minimax_m2": ("1", "none"),
  "kimi_k2": ("2x4", "quota"),
}
MESHES = {"1": "none", "2": "quota", "4": "none", "8": "quota"}
CASES = [(name, *case) for name, case in FAST.items()]
SLOW = [(name, *case) for name in FAST for case in MESHES.items() if case != FAST[name]]


@pytest.mark.parametrize(
  ("name", "mesh", "strategy"),
  [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_logits(name, mesh, strategy):
  with jax.set_mesh(mesh_of(mesh)):
    program = Program(name, BalanceConfig(strategy=strategy, objective="balance"))
    for places in (ALONE, PACKED, TIGHT):
      result = program(places)
      program.check(result, places)
      assert (result.stats.replicas.sum() > 0) == (strategy == "quota")
    clean, wild = program(TIGHT), program(TIGHT, padding_token=90)
    np.testing.assert_array_equal(clean.logits_BRV, wild.logits_BRV)
