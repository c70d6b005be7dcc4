"""The block in MaxText's form: plain and balanced agree, and share their checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare_maxtext_style import copy_by_checkpoint, main, outputs_and_gradients, skewed_input
from flax import nnx
from jax.sharding import PartitionSpec as P
from maxtext_style.balanced import BalancedRoutedMoE
from maxtext_style.block import RoutedMoE
from maxtext_style.config import Config, make_mesh
from maxtext_style.exchange import exchange_rows

import ultraep_jax as uep

pytestmark = pytest.mark.usefixtures("unoptimized")

CONFIG = Config(base_emb_dim=8, base_moe_mlp_dim=12, num_experts=8)
BALANCE = uep.BalanceConfig(replica_slots=4, objective="balance")


def paths(tree):
  leaves = jax.tree.leaves_with_path(nnx.to_pure_dict(tree))
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


# Compiles in half the time: one way to plan, and room for all in one round.
QUICK = dataclasses.replace(BALANCE, strategy="exact", transfer="direct", capacity_factor=4.0)


@pytest.mark.parametrize(
  "axes, balance",
  [
    ({"data": 2, "expert": 4}, QUICK),
    pytest.param({"fsdp": 2, "tensor": 2, "expert": 2}, BALANCE, marks=pytest.mark.slow),
    pytest.param({"context": 2, "expert": 4}, BALANCE, marks=pytest.mark.slow),
  ],
  ids=["data-expert", "fsdp-tensor-expert", "context-expert"],
)
def test_balanced_block_computes_the_same_from_a_checkpoint_of_the_plain_one(
  axes, balance, tmp_path
):
  with jax.set_mesh(make_mesh(**axes)):
    plain = RoutedMoE(CONFIG, rngs=nnx.Rngs(0))
    dense = RoutedMoE(dataclasses.replace(CONFIG, sparse_matmul=False), rngs=nnx.Rngs(0))
    balanced = BalancedRoutedMoE(CONFIG, balance, rngs=nnx.Rngs(1))
    copy_by_checkpoint(plain, balanced, tmp_path / "plain")
    x_BLD = skewed_input(jax.random.key(2), (8, 6, 8))
    blocks = {"dense": dense, "plain": plain, "balanced": balanced}
    results = {name: outputs_and_gradients(block, x_BLD) for name, block in blocks.items()}
    again = RoutedMoE(CONFIG, rngs=nnx.Rngs(3))
    copy_by_checkpoint(balanced, again, tmp_path / "balanced")

  assert {name: leaf.shape for name, leaf in paths(nnx.state(balanced)).items()} == {
    "gate/kernel": (8, 8),
    "wi_0": (8, 8, 12),
    "wi_1": (8, 8, 12),
    "wo": (8, 12, 8),
  }
  for name, leaf in paths(nnx.state(plain)).items():
    np.testing.assert_array_equal(leaf, paths(nnx.state(again))[name], err_msg=name)
    local = leaf.sharding.shard_shape(leaf.shape)[0]
    assert local == (8 if name == "gate/kernel" else 8 // axes["expert"]), name

  results = jax.device_get(results)
  output, *grads = results.pop("balanced")
  groups = axes.get("data", 1) * axes.get("fsdp", 1) * axes.get("context", 1)
  assert output.stats.load_after_G.shape == (groups, axes["expert"])
  assert output.stats.load_before_G.max() > 1.2 * output.stats.load_before_G.mean()
  assert (output.stats.load_after_G == output.stats.load_before_G.mean()).all()
  got = jax.tree.leaves((output._replace(stats=None), *grads))
  assert all(np.abs(leaf).max() > 0 for leaf in got)
  for name, expected in results.items():
    for a, b in zip(got, jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max(), err_msg=name)


def test_rows_arrive_by_source_and_accelerators_get_a_ragged_all_to_all():
  sizes_GG = np.array([[1, 0, 2], [0, 0, 3], [2, 1, 0]], np.int32)
  rows_GA = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.float32)
  mesh = jax.make_mesh(
    (3,), ("expert",), devices=jax.devices()[:3], axis_types=(jax.sharding.AxisType.Auto,)
  )

  @jax.jit
  @jax.shard_map(mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
  def run(rows_AD):
    return exchange_rows(rows_AD, jnp.asarray(sizes_GG), 6)

  rows = jnp.asarray(rows_GA.reshape(9, 1))
  got = np.asarray(run(rows)).reshape(3, 6)
  np.testing.assert_array_equal(got, [[1, 7, 8, 0, 0, 0], [9, 0, 0, 0, 0, 0], [2, 3, 4, 5, 6, 0]])
  for platform in ("cuda", "tpu"):
    text = run.trace(rows).lower(lowering_platforms=(platform,)).as_text()
    assert "ragged_all_to_all" in text and "all_gather" not in text


def test_what_the_layer_does_not_take_is_named():
  """As MaxText would hand it over: two axes for the experts, quantized or fused weights."""
  mesh = make_mesh(context=2, expert=4)
  x, index = jnp.ones((8, 8)), jnp.zeros((8, 2), jnp.int32)
  gate, wi, wo = jnp.ones((8, 2)), jnp.ones((8, 8, 12)), jnp.ones((8, 12, 8))

  def call(weights, axis_name="expert"):
    def body(x, index, gate, weights):
      return uep.moe(x, index, gate, weights, config=BALANCE, axis_name=axis_name)[0]

    spec = P(("context", "expert"))
    in_specs = (spec, spec, spec, P("expert"))
    jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=spec)(x, index, gate, weights)

  with pytest.raises(ValueError, match="axis_name: expected a manual axis"):
    call(uep.ExpertWeights(wi, wi, wo), axis_name=("context", "expert"))
  with pytest.raises(TypeError, match="expected a dtype of kind floating"):
    call(uep.ExpertWeights(*(w.astype(jnp.int8) for w in (wi, wi, wo))))
  with pytest.raises(ValueError, match=r"weights.wi_up: expected shape \[2, 8, 24\]"):
    call(uep.ExpertWeights(jnp.ones((8, 8, 24)), wi, wo))  # wi_0 and wi_1 fused
  with pytest.raises(ValueError, match="sizes: expected axes"):
    make_mesh(experts=8)


@pytest.mark.slow
def test_comparison_prints_small_differences(capsys):
  main()
  lines = capsys.readouterr().out.splitlines()
  differences = [float(line.split()[-1]) for line in lines if "differs by" in line]
  assert len(differences) == 7 and max(differences) < 1e-5
  assert any(line.startswith("imbalance_after") for line in lines)
