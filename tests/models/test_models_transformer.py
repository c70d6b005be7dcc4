"""The model itself: construction with and without memory, tracing, and checks of its input."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from prompts import lay_out
from published_configs import PUBLISHED

from ultraep_jax import models
from ultraep_jax.config import BalanceConfig
from ultraep_jax.gating import GatingConfig
from ultraep_jax.models import attention
from ultraep_jax.models.params import param_specs
from ultraep_jax.packed import PackedBatch

SMALL = models.ModelConfig(
  architecture="qwen3_moe",
  vocab_size=32,
  embed_dim=16,
  is_moe=(False, False),
  attention=models.GroupedQuery(num_heads=4, num_key_heads=2, head_dim=8),
  rotary=models.Rotary(dim=8, theta=10_000.0),
  dense_dim=24,
  expert_dim=8,
  gating=GatingConfig(num_experts=8, num_experts_per_tok=2),
)

WRONG_DTYPES = (
  *(("float17", "'float17'"), (None, "None"), (jnp.int32, "int32"), ("float64", "float64")),
  *((jnp.float8_e4m3fn, "float8_e4m3fn"), ({"a": 1}, "{'a': 1}")),
)


def make(config: models.ModelConfig, **changes: Any) -> models.MoETransformer:
  options: dict[str, Any] = {"param_dtype": jnp.bfloat16, "attention_block": 4} | changes
  return models.MoETransformer(
    config, balance=BalanceConfig(strategy="none"), rngs=nnx.Rngs(0), **options
  )


def expert_mesh(size: int) -> jax.sharding.Mesh:
  return jax.make_mesh((size,), ("expert",), devices=jax.devices()[:size])


@pytest.mark.parametrize("hf", PUBLISHED, ids=lambda hf: hf["model_type"])
def test_largest_models_are_made_without_memory(hf):
  config = models.ModelConfig.from_hf(hf)
  with jax.set_mesh(expert_mesh(8)):
    _, state = nnx.split(nnx.eval_shape(lambda: make(config)))
  specs = param_specs(config)
  params = dict(nnx.to_flat_state(state))
  assert set(params) == set(specs)
  for path, spec in specs.items():
    value = params[path].get_value()
    assert (value.shape, value.dtype) == (spec.shape, spec.dtype(jnp.bfloat16)), path
    assert value.sharding.spec == spec.partition, path
    is_mixture = len(path) == 3 and config.is_moe[config.stacks[path[1]][0]]
    is_expert = is_mixture and path[2].startswith(("wi", "wo"))
    assert ("expert" in spec.axes) == is_expert, path


def test_more_layers_are_not_more_to_trace():
  def size(layers: int) -> int:
    config = dataclasses.replace(SMALL, is_moe=(False,) + (True,) * layers)
    batch = lay_out([np.arange(5)], {0: (0, 0)}, rows=1, length=8, requests=1)
    model = nnx.eval_shape(lambda: make(config))
    return len(jax.make_jaxpr(lambda model, batch: model(batch))(model, batch).jaxpr.eqns)

  with jax.set_mesh(expert_mesh(1)):
    assert size(2) == size(47)


def test_every_mixture_has_statistics_and_every_layer_a_cache():
  config = dataclasses.replace(SMALL, is_moe=(True, False, False, True, True))
  batch = lay_out([np.arange(5)], {0: (0, 0)}, rows=4, length=8, requests=1)
  mesh = jax.make_mesh((2, 2), ("data", "expert"), devices=jax.devices()[:4])
  with jax.set_mesh(mesh):
    model = nnx.eval_shape(lambda: make(config))
    result = jax.eval_shape(lambda model, batch: model(batch), model, batch)
  assert result.stats.load_GE.shape == (3, 2, 2, 8)
  assert result.cache["value"].shape == (5, 4, 8, 2, 8)


def test_random_weights_and_no_mixture():
  """Also: construction under jit, and logits that are about as large as they should be."""
  prompts = [np.arange(9), np.arange(3, 20)]
  batch = lay_out(prompts, {0: (0, 0), 1: (1, 3)}, rows=2, length=24, requests=2)
  with jax.set_mesh(expert_mesh(1)):
    model = nnx.jit(lambda: make(SMALL))()
    result = jax.jit(lambda model, batch: model(batch))(model, batch)
  assert model.vocab_size == 32 and model.embed[...].dtype == jnp.bfloat16
  assert result.stats is None
  assert result.logits_BRV.shape == (2, 2, 32)
  assert 0.3 < np.std(np.asarray(result.logits_BRV)[:, 0]) < 3


@pytest.mark.parametrize("kind", [models.GroupedQuery, models.Latent])
def test_nothing_reads_what_attention_leaves_in_padding(monkeypatch, kind):
  own = dataclasses.replace(SMALL.attention, qk_norm="head")
  if kind is models.Latent:
    own = models.Latent(
      num_heads=4, query_rank=8, latent_rank=8, nope_dim=4, rope_dim=8, value_dim=6, scale=0.3
    )
  config = dataclasses.replace(
    SMALL, is_moe=(False, True, True), attention=own, num_shared_experts=1
  )
  places = {0: (0, 4), 1: (1, 0), 2: (1, 12)}  # padding before, between and behind
  batch = lay_out([np.arange(9), np.arange(3, 10), np.arange(5)], places, 2, 24, 2)
  padding = np.asarray(batch.segment_BT) == 0
  attend = attention.attend

  def untidy(query, key, value, segment, **options):
    mixed = attend(query, key, value, segment, **options)
    return jnp.where((segment > 0)[..., None, None], mixed, jnp.nan)

  def run():
    return jax.tree.map(np.asarray, jax.jit(lambda model, batch: model(batch))(model, batch))

  with jax.set_mesh(expert_mesh(2)):
    model = nnx.jit(lambda: make(config))()
    clean = run()
    monkeypatch.setattr(attention, "attend", untidy)
    spoilt = run()
  present = np.asarray(batch.last_BR) >= 0
  assert present.sum() == 3 and padding[0, 0]
  np.testing.assert_array_equal(spoilt.logits_BRV[present], clean.logits_BRV[present])
  for rest in ("cache", "stats"):
    got, want = getattr(spoilt, rest), getattr(clean, rest)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_batch_is_checked():
  good = lay_out([np.arange(5)], {0: (0, 0)}, rows=2, length=8, requests=1)

  def message(error: type[Exception], size: int = 2, **changes: jax.Array) -> str:
    with jax.set_mesh(expert_mesh(size)), pytest.raises(error) as raised:
      model = nnx.eval_shape(lambda: make(SMALL))
      jax.eval_shape(lambda model, batch: model(batch), model, good._replace(**changes))
    return str(raised.value)

  cut = {f: getattr(good, f)[:, :6] for f in PackedBatch._fields if f != "last_BR"}
  assert "multiple of attention_block = 4 tokens, got 6" in message(ValueError, **cut)
  none = {f: getattr(good, f)[:, :0] for f in PackedBatch._fields if f != "last_BR"}
  assert "positive multiple of attention_block = 4 tokens, got 0" in message(ValueError, **none)
  assert "4 devices of mesh axes ('expert',) can divide, got 2" in message(ValueError, size=4)
  assert "position_BT: expected shape [2, 8]" in message(
    ValueError, position_BT=good.position_BT[:1]
  )
  assert "last_BR: expected shape [2, R]" in message(ValueError, last_BR=good.last_BR[0])
  assert "token_BT: expected a dtype of kind int32" in message(
    TypeError, token_BT=good.token_BT.astype(jnp.uint32)
  )


def test_options_are_checked():
  def message(error: type[Exception], **options: Any) -> str:
    with jax.set_mesh(expert_mesh(2)), pytest.raises(error) as raised:
      nnx.eval_shape(lambda: make(SMALL, **options))
    return str(raised.value)

  for block in (0, -8):
    wanted = f"attention_block: expected at least 1, got {block}"
    assert message(ValueError, attention_block=block) == wanted
  assert message(TypeError, attention_block=8.0) == "attention_block: expected an int, got float"
  for name, (dtype, got) in itertools.product(("dtype", "param_dtype"), WRONG_DTYPES):
    wanted = f"{name}: expected bfloat16, float16 or float32, got {got}"
    assert message(TypeError, **{name: dtype}) == wanted


def test_configurations_are_checked():
  config: Any = None
  with jax.set_mesh(expert_mesh(2)):
    with pytest.raises(TypeError, match="balance: expected a BalanceConfig, got NoneType"):
      models.MoETransformer(SMALL, balance=config, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="config: expected a ModelConfig, got NoneType"):
      make(config)


def test_mesh_is_checked():
  with (
    jax.set_mesh(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])),
    pytest.raises(ValueError, match="axis_name: expected an axis of the mesh"),
  ):
    make(SMALL)
