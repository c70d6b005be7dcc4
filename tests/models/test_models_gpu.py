"""Checkpoints of all families on one GPU, against the logits that `transformers` computed.

Whatever is compared here, test_models_logits.py and test_models_families.py compare on CPU devices.
"""

import jax
import pytest
from checkpoint_programs import ALONE, PACKED, TIGHT, Program, mesh_of
from prompts import FOLDER

from ultraep_jax.config import BalanceConfig

FAMILIES = sorted(path.parent.name for path in FOLDER.glob("*/logits.npz"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_logits(name):
  with jax.set_mesh(mesh_of("1")), jax.default_matmul_precision("highest"):
    program = Program(name, BalanceConfig())
    for places in (ALONE, PACKED, TIGHT):
      program.check(program(places), places)
