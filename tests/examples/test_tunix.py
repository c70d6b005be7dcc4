"""tunix's Qwen3 MoE against the same on balanced experts, and a step of its trainer.

``examples/tunix/run_tests.sh`` makes the environment and runs this.
"""

import dataclasses
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
  warnings.simplefilter("ignore")  # of packages that tunix imports
  pytest.importorskip("tunix.models", reason="examples/tunix/run_tests.sh installs tunix")
  import balanced_tunix
  from tunix.models.qwen3 import model as qwen3
  from tunix.sft import peft_trainer

import ultraep_jax as uep

pytestmark = [pytest.mark.tunix, pytest.mark.filterwarnings("ignore")]
CONFIG = uep.BalanceConfig(objective="balance")
MESHES = {
  "fsdp": {"fsdp": 8, "tp": 1},
  "fsdp and tp": {"fsdp": 4, "tp": 2},
  "fsdp and ep": {"fsdp": 2, "ep": 2, "tp": 2},
}
BOTH = ("fsdp", "ep")  # as one axis, which experts and tokens lie over
ON_BOTH = dataclasses.replace(
  qwen3.ShardingConfig.get_default_sharding(),
  exp_weight_edf=(BOTH, None, "tp"),  # pyright: ignore[reportArgumentType]
  exp_weight_efd=(BOTH, "tp", None),  # pyright: ignore[reportArgumentType]
  act_btd=(BOTH, None, "tp"),  # pyright: ignore[reportArgumentType]
)


@pytest.fixture(scope="module", autouse=True)
def tunixs_promotion():
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


def make_mesh(mesh: str) -> jax.sharding.Mesh:
  names, sizes = tuple(MESHES[mesh]), tuple(MESHES[mesh].values())
  return jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def make_model(
  mesh: str = "fsdp", remat: qwen3.RematConfig = qwen3.RematConfig.NONE
) -> qwen3.Qwen3:
  default = qwen3.ShardingConfig.get_default_sharding()
  config = qwen3.ModelConfig(
    num_layers=2,
    vocab_size=64,
    embed_dim=32,
    hidden_dim=64,
    num_heads=4,
    head_dim=16,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-6,
    num_experts=16,
    num_experts_per_tok=2,
    remat_config=remat,
    shd_config=ON_BOTH if "ep" in MESHES[mesh] else default,
  )
  model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
  rng = np.random.default_rng(0)
  for layer in model.layers:  # tunix's own initial values are tiny
    for param in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
      param[...] = jnp.asarray(0.2 * rng.normal(size=param.shape), jnp.float32)
  return model


def place(model: qwen3.Qwen3, mesh: jax.sharding.Mesh) -> None:
  """Puts parameters on the mesh as tunix's metadata say."""
  state = nnx.state(model)
  specs = nnx.get_partition_spec(state)
  placed = jax.tree.map(
    lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), state, specs
  )
  nnx.update(model, placed)


def tokens(seed: int = 1) -> dict[str, np.ndarray]:
  values = np.random.default_rng(seed).integers(64, size=(8, 16)).astype(np.int32)
  values[:, ::2] = 3  # so that some experts are busier
  return {
    "input_tokens": values,
    "positions": np.broadcast_to(np.arange(16, dtype=np.int32), (8, 16)),
    "attention_mask": np.broadcast_to(np.tril(np.ones((16, 16), bool)), (8, 16, 16)),
  }


def loss_of(model: qwen3.Qwen3, batch: dict[str, np.ndarray]) -> jax.Array:
  logits, _ = model(batch["input_tokens"], batch["positions"], None, batch["attention_mask"])
  return jnp.mean(jnp.square(jnp.sin(logits)))


step = nnx.jit(nnx.value_and_grad(loss_of))


@pytest.fixture(scope="module")
def dense():
  """Loss and gradients of tunix's dense path."""
  return step(make_model(), tokens())


@pytest.mark.parametrize(
  ("mesh", "remat"),
  [
    *itertools.product(["fsdp", "fsdp and tp"], qwen3.RematConfig),
    ("fsdp and ep", qwen3.RematConfig.NONE),
  ],
)
def test_every_gradient_is_that_of_tunixs_dense_path(dense, mesh, remat):
  loss, grads = dense
  model = make_model(mesh, remat)
  assert balanced_tunix.balance(model, CONFIG) == 2
  with make_mesh(mesh) as devices:
    place(model, devices)
    got, got_grads = step(model, tokens())
  expected = {"loss": loss} | dict(nnx.to_flat_state(grads))
  values = {"loss": got} | dict(nnx.to_flat_state(got_grads))
  assert values.keys() == expected.keys()
  worst = {}
  for name, leaf in expected.items():
    a, b = (np.asarray(getattr(v, "value", v), np.float64) for v in (values[name], leaf))
    worst[name] = float(np.linalg.norm(a - b) / np.linalg.norm(b))
  print(f"largest {max(worst.values()):.1e} of {len(worst)}")
  assert max(worst.values()) < 1e-5, worst


def train(balanced: bool, mesh: str) -> tuple[list[float], list[dict[str, float]]]:
  """Losses of some steps of tunix's trainer, and what the last layer's balancing did in each."""
  model, losses, did = make_model(mesh), [], []
  if balanced:
    balanced_tunix.balance(model, CONFIG, sow_stats=True)

  def loss_and_stats(model, input_tokens, input_mask, positions, attention_mask):
    loss = peft_trainer._default_loss_fn(model, input_tokens, input_mask, positions, attention_mask)
    stats = balanced_tunix.pop_stats(model)
    return loss, (loss, [each.scalars() for each in stats])

  class Trainer(peft_trainer.PeftTrainer):
    def _post_process_train_step(self, aux):
      loss, scalars = jax.device_get(aux)
      losses.append(float(loss))
      did.extend(scalars[-1:])

  with make_mesh(mesh) as devices:
    place(model, devices)
    config = peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=4)
    trainer = Trainer(model, optax.sgd(0.5), config).with_loss_fn(loss_and_stats, has_aux=True)
    ones = np.ones((8, 16), np.int32)
    trainer.train([{**tokens(), "input_mask": ones}] * 4)
  return losses, did


@pytest.mark.parametrize("mesh", MESHES)
def test_steps_of_the_trainer_have_the_same_losses(mesh):
  losses, did = train(True, mesh)
  expected, nothing = train(False, mesh)
  print(losses, np.abs(np.subtract(losses, expected)).max())
  assert len(losses) == 4 and losses[-1] < losses[0] and not nothing
  np.testing.assert_allclose(losses, expected, rtol=1e-5)
  for scalars in did:
    assert scalars["imbalance_after"] < scalars["imbalance_before"]
    assert scalars["invalid_assignments"] == 0


def test_layer_without_expert_parallelism_is_left_to_tunix(monkeypatch):
  model = make_model()
  balanced_tunix.balance(model)
  layer, seen = model.layers[0].mlp, []
  monkeypatch.setattr(
    qwen3.MoELayer, "__call__", lambda self, x, use_megablox=True: seen.append(x.shape)
  )
  layer(np.zeros((8, 16, 32), np.float32))  # without a mesh
  with make_mesh("fsdp"):
    layer(np.zeros((2, 1, 32), np.float32))  # sampling
  assert seen == [(8, 16, 32), (2, 1, 32)]


def test_experts_on_axes_without_tokens_are_refused():
  model = make_model()
  balanced_tunix.balance(model)
  layer = model.layers[0].mlp
  object.__setattr__(layer.shd_config, "exp_weight_edf", ("tp", None, None))
  try:
    with (
      make_mesh("fsdp and tp"),
      pytest.raises(
        NotImplementedError, match=r"^shd_config: expected tokens on the experts' axes"
      ),
    ):
      layer(np.zeros((8, 16, 32), np.float32))
  finally:
    object.__setattr__(layer.shd_config, "exp_weight_edf", ("fsdp", None, "tp"))


def test_models_without_such_layers_and_other_layers_are_refused():
  class Other(qwen3.MoELayer):
    pass

  model = make_model()
  with pytest.raises(ValueError, match=r"^model: expected one with a MoELayer, got RMSNorm"):
    balanced_tunix.balance(model.final_norm)
  model.layers[0].mlp.__class__ = Other
  with pytest.raises(NotImplementedError, match=r"^layer: expected a MoELayer, got a Other"):
    balanced_tunix.balance(model)
