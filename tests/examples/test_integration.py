"""docs/integration.md: its code runs, and its blocks compute the same before and after."""

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "docs/integration.md").read_text()
DEVICES = 'jax.config.update("jax_num_cpu_devices", 8)'
BLOCKS = re.findall(r"```(diff|python)\n(.*?)```", TEXT, re.DOTALL)


def one_side(diff: str, sign: str) -> str:
  """The code before (``-``) or after (``+``) a change."""
  return "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] in (sign, " ", ""))


@pytest.fixture(scope="module")
def scopes():
  """The names that the page's code defines, before the changes and after."""
  before: dict[str, Any] = {"__name__": "before"}
  after: dict[str, Any] = {"__name__": "after"}
  mesh = jax.make_mesh((1,), ("none",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
  with jax.set_mesh(mesh):  # restores what was set before the page's code sets its own
    for language, block in BLOCKS:
      if language == "diff":
        exec(one_side(block, "-"), before)
      else:
        exec(block.replace(DEVICES, ""), after)  # there are eight already
    yield before, after


def test_page_has_both_kinds_of_code():
  code = [block for language, block in BLOCKS if language == "python"]
  statements = [line for line in code[0].splitlines() if line]
  assert statements[1] == DEVICES and len(code) >= 10
  assert TEXT.count("```") == 2 * len(BLOCKS)  # no code that is not run
  diffs = [block for language, block in BLOCKS if language == "diff"]
  for diff, full in zip(diffs, code[:2], strict=True):  # what changed is what stands above
    block = one_side(diff, "+")
    assert block[block.index("class") :] == full[full.index("class") :]


@pytest.mark.slow
def test_blocks_compute_the_same_before_and_after(scopes):
  before, after = scopes
  x = after["x"]
  old = before["MoE"](8, 2, 32, 64, rngs=nnx.Rngs(0))
  nnx.update(old, jax.device_get(nnx.state(after["model"])))
  np.testing.assert_allclose(after["y"], old(np.asarray(x)), rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(
    jax.tree.leaves(nnx.state(after["other"]))[0], jax.tree.leaves(nnx.state(after["model"]))[0]
  )

  params = nn.unbox(after["variables"])["params"]["moe"]
  expected = np.asarray(x)
  for layer in range(3):
    weights = {"params": jax.device_get(jax.tree.map(lambda leaf: leaf[layer], params))}  # noqa: B023
    expected = expected + before["LinenMoE"](8, 2, 64).apply(weights, expected)
  np.testing.assert_allclose(after["linen_y"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_what_is_around_the_block_does_what_the_page_says(scopes):
  _, after = scopes
  masked = int((~after["mask"]).sum()) * 2
  assert after["metrics"]["layer0/masked_assignments"] == masked > 0
  assert after["metrics"]["layer0/imbalance_after"] < after["metrics"]["layer0/imbalance_before"]
  assert 1 <= float(after["balance"]) < 2
  assert after["by_layer"]["imbalance_before"].shape == (3,)
  assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(after["layer_grads"]))
  assert after["linen_stats"].load_after_G.shape == (3, 2, 4)
  assert after["stats_by_microbatch"].load_after_G.shape == (2, 2, 4)
  accumulate, model, x = (after[name] for name in ("accumulate", "model", "x"))
  alone = [accumulate(model, jnp.stack([part, part]))[0] for part in (x, 2 * x)]
  for got, *twice in zip(*map(jax.tree.leaves, (after["total"], *alone)), strict=True):
    expected = sum(twice) / 2
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * float(jnp.abs(got).max()))
