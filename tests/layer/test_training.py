"""A training run with balanced experts against the same run without any distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_moe.data import batch_at, load_text
from tiny_moe.settings import Settings
from tiny_moe.training import make_mesh, make_training

# A high learning rate on purpose: see the test.
TINY = {"layers": 2, "width": 32, "seq": 32, "batch": 16, "steps": 200, "learning_rate": 1e-2}
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
def test_training_is_that_of_a_dense_model():
  """Three comparisons, because training is chaotic.

  Rounding grows slowly until some token's second and third expert tie within it; then two runs
  choose differently and part for good, balanced or not. So the curves are compared closely
  before that, and afterwards with how far dense runs part that only sum in another order. The
  learning rate makes all runs part early, so that this is not the luck of one tie. What is
  exact throughout is the layer: at each step of the balanced run, a dense model with its
  parameters has its loss.
  """
  text, _ = load_text()
  data = [batch_at(text, 0, step, QUOTA.batch, QUOTA.seq) for step in range(QUOTA.steps)]

  with jax.set_mesh(make_mesh(DENSE)):
    dense = make_training(DENSE)

  def dense_curve(order: np.ndarray) -> np.ndarray:
    state, losses = jax.tree.map(jnp.copy, dense.state), []
    with jax.set_mesh(make_mesh(DENSE)):
      for bytes_NS in data:
        state, scalars, _ = dense.step(state, bytes_NS[None, order])
        losses.append(scalars["loss"])
    return np.array(jax.device_get(losses))

  in_order = np.arange(QUOTA.batch)
  losses = dense_curve(in_order)
  rng = np.random.default_rng(0)
  reordered = [dense_curve(rng.permutation(in_order)) for _ in range(4)]
  rounding = np.abs(np.array(reordered) - losses).max(axis=0)

  with jax.set_mesh(make_mesh(QUOTA)):
    quota = make_training(QUOTA)
  state, records, same_parameters = quota.state, [], []
  for bytes_NS in data:
    with jax.set_mesh(make_mesh(DENSE)):
      same_parameters.append(dense.loss(jax.device_get(state.params), bytes_NS)[1]["loss"])
    with jax.set_mesh(make_mesh(QUOTA)):
      state, scalars, _ = quota.step(state, bytes_NS[None])
    records.append(jax.device_get(scalars))
  balanced, before, after = (
    np.array([[record[name] for name in names] for record in records]).mean(axis=1)
    for names in (
      ["loss"],
      ["layer0/imbalance_before", "layer1/imbalance_before"],
      ["layer0/imbalance_after", "layer1/imbalance_after"],
    )
  )

  distance, layer = np.abs(balanced - losses), np.abs(balanced - same_parameters)
  print(f"\nloss: {losses[0]:.2f} to {losses[-20:].mean():.2f}")
  print(f"same parameters, balanced against dense: {layer.max():.1e}")
  for name, steps in (("first 15 steps", slice(15)), ("whole run", slice(None))):
    print(f"{name}: balanced against dense {distance[steps].max():.1e}, ", end="")
    print(f"dense against dense in another order {rounding[steps].max():.1e}")
  print(f"mean imbalance: {before.mean():.3f} as routed, {after.mean():.4f} balanced")

  assert losses[-20:].mean() < 3.0 < 5.0 < losses[0]
  assert layer.max() < 1e-5
  assert distance[:15].max() < 1e-5
  assert distance.max() <= 2 * rounding.max()
  assert before.mean() > 1.2
  assert after.mean() <= 1.02
