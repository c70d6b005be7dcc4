"""MaxText's own layers, models and trainer against the same on balanced experts.

``examples/maxtext/run_tests.sh`` makes the environment and runs this.
"""

import warnings

import jax
import numpy as np
import pytest
from flax import nnx

with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
  warnings.simplefilter("ignore")  # of packages that MaxText imports
  pytest.importorskip("maxtext.layers", reason="examples/maxtext/run_tests.sh installs MaxText")
  import balanced_maxtext
  import maxtext_options
  from maxtext.layers import moe
  from maxtext_runs import (
    Layer,
    configure,
    differences,
    model_gradients,
    skewed_tokens,
    train_steps,
  )

import ultraep_jax as uep

pytestmark = [pytest.mark.maxtext, pytest.mark.filterwarnings("ignore")]
CONFIG = uep.BalanceConfig(objective="balance")
EP = {"ici_fsdp_parallelism": 1, "ici_expert_parallelism": 4}
DEEPSEEK = {
  "model_name": "deepseek3-tiny",
  "decoder_block": "deepseek",
  "num_experts_per_tok": 4,
  "n_routing_groups": 4,
  "topk_routing_group": 2,
  "routed_bias_update_rate": 0.01,
}
GPT_OSS = {
  "model_name": "gpt-oss-20b",
  "mlp_activations_limit": 1.0,  # often reached
  "num_experts_per_tok": 4,
}


@pytest.fixture(scope="module", autouse=True)
def maxtexts_promotion():
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


def compare_layers(**options) -> dict[str, float]:
  """A balanced layer on its mesh with ``dense_matmul`` on one device; returns its scalars."""
  meshes = {name for name in options if name.startswith("ici_")}
  other = {*meshes, "custom_mesh_and_rule", "shard_mode", "check_vma"}
  alone = {name: value for name, value in options.items() if name not in other}
  dense = Layer(configure(**alone, sparse_matmul=False), jax.devices()[:1])
  layer = Layer(configure(**options))
  rng = np.random.default_rng(2)
  values = jax.tree.map(  # biases begin at zero
    lambda value: value if value.any() else 0.3 * rng.normal(size=value.shape).astype(np.float32),
    dense.parameters(),
  )
  for each in (dense, layer):
    each.set_parameters(values)
  assert balanced_maxtext.balance(layer.moe, CONFIG) == 1
  x_BLD = skewed_tokens((8, 16, 32))
  got, expected = (each.outputs_and_gradients(x_BLD) for each in (layer, dense))
  worst = differences(got, expected)
  print({name: f"{value:.1e}" for name, value in worst.items()})
  assert max(worst.values()) < 1e-6, worst
  assert all(np.abs(expected[name]).max() > 0 for name in expected if "grad" in name)
  return layer.scalars()


# --- the layer -------------------------------------------------------------------------------

MESHES = {
  "ep": {"ici_fsdp_parallelism": 1, "ici_expert_parallelism": 8},
  "fsdp": {**EP, "ici_fsdp_parallelism": 2},
  "data": {**EP, "ici_data_parallelism": 2},
  "tensor": {**EP, "ici_tensor_parallelism": 2},
  "context": {**EP, "ici_context_parallelism": 2},
  "fsdp and tensor": {
    "ici_fsdp_parallelism": 2,
    "ici_expert_parallelism": 2,
    "ici_tensor_parallelism": 2,
  },
  "fsdp and context as experts": {
    "ici_fsdp_parallelism": 2,
    "ici_context_parallelism": 2,
    "ici_expert_parallelism": 2,
    "custom_mesh_and_rule": "cp-as-ep",
  },
}


@pytest.mark.parametrize("shard_mode", ["auto", "explicit"])
@pytest.mark.parametrize("mesh", MESHES)
def test_layer_equals_maxtexts_dense_one(mesh, shard_mode):
  scalars = compare_layers(**MESHES[mesh], shard_mode=shard_mode, load_balance_loss_weight=0.01)
  assert scalars["imbalance_before"] > scalars["imbalance_after"] == 1
  assert scalars["replicas"] > 0 and scalars["invalid_assignments"] == 0


@pytest.mark.parametrize(
  "options",
  [
    pytest.param({**MESHES["fsdp"], "check_vma": True}, id="check_vma"),
    pytest.param({**MESHES["fsdp"], "prefuse_moe_weights": True}, id="fused weights"),
    pytest.param({**MESHES["data"], "norm_topk_prob": True}, id="normalised choice"),
    pytest.param({**MESHES["data"], **DEEPSEEK}, id="DeepSeek's groups"),
    pytest.param(
      {
        **MESHES["context"],
        **DEEPSEEK,
        "load_balance_loss_weight": 0.01,  # without the selection bias, as in MaxText's sparse path
        "moe_use_megatron_seq_aux_loss": True,
        "shard_mode": "explicit",
      },
      id="DeepSeek's groups, explicit",
    ),
    pytest.param(
      {**MESHES["data"], **DEEPSEEK, "mlp_activations_limit": 0.5}, id="DeepSeek-V4's clipping"
    ),
    pytest.param({**MESHES["fsdp"], **GPT_OSS, "decoder_block": "gpt_oss"}, id="GPT-OSS"),
    pytest.param({**MESHES["tensor"], **GPT_OSS, "decoder_block": "gpt_oss"}, id="GPT-OSS, tensor"),
    pytest.param(
      {**MESHES["data"], "decoder_block": "llama4", "num_experts_per_tok": 1}, id="Llama-4"
    ),
    pytest.param({**MESHES["data"], "decoder_block": "gemma4"}, id="Gemma-4"),
    pytest.param(
      {**MESHES["context"], "custom_mesh_and_rule": "cp-as-ep"}, id="context as experts"
    ),
  ],
)
def test_form_equals_maxtexts_dense_one(options):
  assert compare_layers(**options)["imbalance_after"] <= 1.01


def test_given_choices_are_kept_and_unused_slots_are_not_computed():
  dense, layer = (
    Layer(configure(sparse_matmul=False), jax.devices()[:1]),
    Layer(configure(**MESHES["fsdp"])),
  )
  layer.set_parameters(dense.parameters())
  balanced_maxtext.balance(layer.moe, CONFIG)
  x_BLD = skewed_tokens((8, 16, 32))
  forced_BLK = np.random.default_rng(3).integers(4, size=(8, 16, 2)).astype(np.int32)
  forced_BLK[..., 1] = 4 + forced_BLK[..., 1]
  forced_BLK[:, 12:] = -1
  got, expected = (
    each.outputs_and_gradients(x_BLD, forced_routed_experts=forced_BLK) for each in (layer, dense)
  )
  assert not got["['y']"][:, 12:].any()
  worst = differences(got, expected)
  assert max(worst.values()) < 1e-6, worst


def test_one_sequence_is_left_to_maxtext(monkeypatch):
  layer = Layer(configure(**MESHES["fsdp"]))
  balanced_maxtext.balance(layer.moe)
  seen = []
  monkeypatch.setattr(
    moe.RoutedMoE, "sparse_matmul", lambda self, x, *rest, **named: (seen.append(x.shape), x)
  )
  layer.moe.sparse_matmul(np.zeros((1, 16, 32)), None, None)
  assert seen == [(1, 16, 32)]


# --- models and the trainer ------------------------------------------------------------------

CUSTOM = {
  "remat_policy": "custom",
  "moe_routing_maps": "device",
  "moe_x_sorted": "device",
  "moe_mlpwi_0": "device",
}
STAGES = {
  "ici_pipeline_parallelism": 2,
  "num_pipeline_microbatches": 2,
  "num_layers_per_pipeline_stage": 1,
}


@pytest.mark.parametrize(
  "options",
  [
    pytest.param(
      {**MESHES["fsdp"], "load_balance_loss_weight": 0.01, "remat_policy": "full"}, id="scan"
    ),
    pytest.param({**MESHES["data"], "remat_policy": "minimal"}, id="scan, another remat"),
    pytest.param({**MESHES["data"], **CUSTOM, "scan_layers": False}, id="no scan, custom remat"),
    pytest.param(
      {**EP, **STAGES, "base_num_decoder_layers": 4, "num_layers_per_pipeline_stage": 2}, id="stage"
    ),
    pytest.param({**EP, **STAGES, "base_num_decoder_layers": 4}, id="stage, twice round"),
    pytest.param(
      {**MESHES["fsdp"], **DEEPSEEK, "base_num_decoder_layers": 3, "first_num_dense_layers": 1},
      id="DeepSeek",
    ),
  ],
)
def test_every_gradient_of_a_model_is_that_of_maxtexts_dense_path(options):
  expected = model_gradients(configure(**options, sparse_matmul=False), lambda model: None)
  got = model_gradients(configure(**options), lambda model: balanced_maxtext.balance(model, CONFIG))
  worst = differences(got, expected)
  print(f"largest {max(worst.values()):.1e} of {len(worst)}")
  assert max(worst.values()) < 1e-5, worst


def test_names_are_kept_as_maxtexts_own():
  config = configure(remat_policy="custom", moe_routing_maps="device", moe_mlpwi_0="offload")
  plan, rows, hidden = uep.REMAT_NAMES
  for _ in range(2):
    balanced_maxtext.keep_named(config)
    assert plan in config.tensors_on_device and hidden in config.tensors_to_offload
    assert len(config.tensors_on_device) == len(set(config.tensors_on_device))
  assert rows not in config.tensors_on_device + config.tensors_to_offload
  balanced_maxtext.keep_named(configure())  # another policy has no such lists


def test_twenty_steps_of_the_trainer_have_the_same_losses(tmp_path):
  options = {**MESHES["fsdp"], "steps": 20, "load_balance_loss_weight": 0.01}
  options |= {"record_internal_nn_metrics": True}
  dense = train_steps(tmp_path, False, **options, sparse_matmul=False)
  balanced = train_steps(tmp_path, True, **options, **{"balance.objective": "balance"})
  losses, expected = ([step["learning/loss"] for step in run] for run in (balanced, dense))
  print(losses, np.abs(np.subtract(losses, expected)).max())
  assert len(losses) == 20 and losses[-1] < 0.5 * losses[0]
  np.testing.assert_allclose(losses, expected, rtol=2e-6)
  for step in balanced:
    assert step["balance/imbalance_after"] <= step["balance/imbalance_before"]
    assert step["balance/invalid_assignments"] == 0
  assert not any(name.startswith("balance/") for name in dense[-1])


def test_run_goes_on_balanced_from_a_checkpoint_of_before(tmp_path):
  options = {**MESHES["fsdp"], "enable_checkpointing": True, "async_checkpointing": False}
  options |= {"checkpoint_period": 2, "learning_rate_schedule_steps": 4}
  whole = train_steps(tmp_path, False, **options, run_name="whole", sparse_matmul=False, steps=4)
  train_steps(tmp_path, False, **options, run_name="parts", sparse_matmul=False, steps=2)
  rest = train_steps(tmp_path, True, **options, run_name="parts", steps=4)
  losses, expected = ([step["learning/loss"] for step in run] for run in (rest, whole[2:]))
  np.testing.assert_allclose(losses, expected, rtol=2e-6)


# --- what is refused -------------------------------------------------------------------------


def test_every_option_about_moe_is_known():
  defaults = balanced_maxtext.default_options()
  assert len(defaults) > 80
  assert [name for name in defaults if not maxtext_options.known(name)] == []
  refused = {name for name, _, _ in maxtext_options.REFUSED}
  config = configure().get_keys()
  assert maxtext_options.OBEYED | maxtext_options.REPLACED | refused <= config.keys()


@pytest.mark.parametrize(
  "name, value",
  [("capacity_factor", 1.0), ("ragged_buffer_factor", 2.0), ("use_random_routing", True)],
)
def test_option_of_maxtext_is_refused(name, value):
  layer = Layer(configure(**MESHES["fsdp"], **{name: value}))
  with pytest.raises(NotImplementedError, match=rf"^{name}: expected .*, got {value}"):
    balanced_maxtext.balance(layer.moe)
  assert type(layer.moe) is moe.RoutedMoE


def test_quantised_training_is_refused():
  layer = Layer(configure(**MESHES["fsdp"]))
  layer.moe.config = configure(**MESHES["fsdp"], quantization="int8")
  with pytest.raises(NotImplementedError, match=r"^quantization: expected '', got 'int8'"):
    balanced_maxtext.balance(layer.moe)


def test_other_layers_and_models_without_are_refused():
  class Other(moe.RoutedMoE):
    pass

  layer = Layer(configure(**MESHES["fsdp"]))
  with pytest.raises(ValueError, match=r"^model: expected one with a RoutedMoE, got GateLogit"):
    balanced_maxtext.balance(layer.moe.gate)
  layer.moe.__class__ = Other
  with pytest.raises(NotImplementedError, match=r"^layer: expected a RoutedMoE, got a Other"):
    balanced_maxtext.balance(layer.moe)


def test_rules_that_put_the_inner_width_on_tokens_axes_are_refused():
  layer = Layer(configure(**EP, ici_tensor_sequence_parallelism=2))
  balanced_maxtext.balance(layer.moe)
  with pytest.raises(NotImplementedError, match=r"^logical_axis_rules: expected tokens on"):
    layer.outputs_and_gradients(skewed_tokens((8, 16, 32)))


def test_variables_are_those_of_maxtexts_layer():
  layer = Layer(configure(**MESHES["fsdp"]))
  before = nnx.to_pure_dict(nnx.state(layer.moe))
  balanced_maxtext.balance(layer.moe)
  after = nnx.to_pure_dict(nnx.state(layer.moe))
  jax.tree.map(lambda a, b: np.testing.assert_equal(a is b, True), before, after)
