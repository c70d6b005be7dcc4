"""A training run with balanced experts against the same run without any distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layer_problems import relative_error
from tiny_moe.data import batch_at, load_text
from tiny_moe.settings import Settings
from tiny_moe.training import make_mesh, make_training

TINY = {"layers": 2, "width": 32, "seq": 32, "batch": 16, "steps": 100, "learning_rate": 1e-2}
QUOTA = Settings(strategy="quota", ranks=8, **TINY)
DENSE = Settings(strategy="dense", ranks=1, **TINY)

# Its steps take longer than their compilation.
pytestmark = pytest.mark.usefixtures("optimized")


@pytest.fixture(autouse=True)
def promotion():
  """Adam of optax takes the power of a float to an int."""
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.mark.slow
def test_every_step_is_that_of_a_dense_model():
  """From the state of the balanced run: training is chaotic, so two runs part for good.

  Rounding grows slowly until some token's second and third expert tie within it. Before that, the
  run is also compared with a dense one of its own.
  """
  text, _ = load_text()
  data = [batch_at(text, 0, step, QUOTA.batch, QUOTA.seq)[None] for step in range(QUOTA.steps)]

  with jax.set_mesh(make_mesh(DENSE)):
    dense = make_training(DENSE)
    own, curve = jax.tree.map(jnp.copy, dense.state), []
    for bytes_ABS in data[:15]:
      own, scalars, _ = dense.step(own, bytes_ABS)
      curve.append(scalars["loss"])
  with jax.set_mesh(make_mesh(QUOTA)):
    quota = make_training(QUOTA)

  state, records, same_state, gradients = quota.state, [], [], []
  for bytes_ABS in data:
    before = jax.device_get(state)
    with jax.set_mesh(make_mesh(DENSE)):
      expected, scalars, _ = dense.step(jax.device_put(before, placement_of(dense)), bytes_ABS)
    same_state.append(scalars["loss"])
    with jax.set_mesh(make_mesh(QUOTA)):
      state, scalars, _ = quota.step(state, bytes_ABS)
    records.append(jax.device_get(scalars))
    gradients.append(relative_error(first_moments(state), first_moments(expected)))
  losses, before, after = (
    np.array([[record[name] for name in names] for record in records]).mean(axis=1)
    for names in (
      ["loss"],
      ["layer0/imbalance_before", "layer1/imbalance_before"],
      ["layer0/imbalance_after", "layer1/imbalance_after"],
    )
  )

  steps = np.abs(losses - np.array(jax.device_get(same_state)))
  runs = np.abs(losses[: len(curve)] - np.array(jax.device_get(curve)))
  print(f"\nloss: {losses[0]:.2f} to {losses[-20:].mean():.2f}")
  print(f"steps from one state, balanced against dense: loss {steps.max():.1e}, ", end="")
  print(f"gradients {max(gradients):.1e}")
  print(f"runs of {len(curve)} steps, balanced against dense: {runs.max():.1e}")
  print(f"mean imbalance: {before.mean():.3f} as routed, {after.mean():.4f} balanced")

  assert losses[-20:].mean() < 3.0 < 5.0 < losses[0]
  assert steps.max() < 1e-5 and max(gradients) < 3e-5
  assert runs.max() < 1e-5
  assert before.mean() > 1.2
  assert after.mean() <= 1.02


def placement_of(training):
  return jax.tree.map(lambda leaf: leaf.sharding, training.state)


def first_moments(state):
  """Adam's: linear in the gradients, unlike its updates."""
  return optax.tree_utils.tree_get(state.opt_state, "mu")
