"""The router's choice by the kernel, which nothing else may depend on."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from mosaic_interpret import interpreted
from programs import kernels

from ultraep_jax import implementation
from ultraep_jax.gating import GatingConfig, gate


def on_one_device(function):
  """Inside a ``shard_map``, where the kernel may be taken."""
  mesh = jax.make_mesh((1,), ("expert",), (AxisType.Auto,), devices=jax.devices()[:1])
  return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


# DeepSeek-V3's kind, small; and no groups, no bias.
KINDS = {
  "groups": GatingConfig(
    num_experts=16,
    num_experts_per_tok=3,
    scoring="sigmoid",
    num_expert_groups=4,
    topk_groups=2,
    use_selection_bias=True,
    routed_scaling=2.5,
  ),
  "plain": GatingConfig(num_experts=16, num_experts_per_tok=3),
}


def kernel_problem(kind):
  """Logits with many ties, a bias if there is one, and a mask."""
  rng = np.random.default_rng(0)
  logits = jnp.asarray(rng.integers(-2, 3, (2, 5, 16)), jnp.float32)
  config = KINDS[kind]
  bias = (
    jnp.asarray(rng.integers(-1, 2, 16) / 4, jnp.float32) if config.use_selection_bias else None
  )
  return config, logits, bias, jnp.arange(10).reshape(2, 5) % 4 != 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_chooses_as_lax_top_k_does(kind):
  """And nothing else depends on it: gates, scores and gradients are the same."""
  config, logits, bias, mask = kernel_problem(kind)
  weight = jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, 3)), jnp.float32)

  def results(implementation):
    def choose(logits, mask):
      return gate(logits, config, bias, mask, implementation=implementation)

    def loss(logits):
      out = choose(logits, mask)
      return jnp.sum(out.gate_TK * weight), out

    return jax.grad(loss, has_aux=True)(logits), jax.vmap(choose)(logits, mask)

  want = on_one_device(lambda: results("portable"))()
  with interpreted():
    got = jax.block_until_ready(on_one_device(lambda: results("mosaic_gpu"))())
  chex.assert_trees_all_equal(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_lowers_in_checkpointed_scans(kind):
  """The choice is made again in backward; without groups it is one kernel, else three."""
  config, logits, bias, mask = kernel_problem(kind)

  @jax.checkpoint
  def row(total, rows):
    out = gate(rows[0], config, bias, rows[1], implementation="mosaic_gpu")
    return total + jnp.sum(out.gate_TK**2), out.expert_index_TK

  def loss(logits):
    return jax.lax.scan(row, jnp.float32(0), (logits, mask))

  traced = on_one_device(jax.grad(loss, has_aux=True)).trace(logits)
  assert "custom_call @mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
  assert len(kernels(traced.jaxpr)) == 2 * (3 if kind == "groups" else 1)


def test_the_kernel_is_for_tokens_of_one_device(monkeypatch):
  config, logits, _, _ = kernel_problem("plain")
  mesh = jax.make_mesh((2,), ("expert",), (AxisType.Auto,), devices=jax.devices()[:2])

  def lowered(name, mesh):
    def choose(x):
      return gate(x, config, implementation=name).expert_index_TK

    with jax.set_mesh(mesh) if mesh is not None else jax.enable_x64(False):
      return jax.jit(choose).trace(logits).lower(lowering_platforms=("cuda",)).as_text()

  one = jax.make_mesh((1,), ("expert",), (AxisType.Explicit,), devices=jax.devices()[:1])
  for where in (mesh, one, None):
    with pytest.raises(NotImplementedError, match="expected those of one device, in a shard_map"):
      lowered("mosaic_gpu", where)
  monkeypatch.setattr(implementation, "resolve", lambda *_: ("mosaic_gpu", "portable"))
  for where in (mesh, one, None):
    assert "mosaic_gpu" not in lowered("auto", where)
  choose = on_one_device(lambda x: gate(x, config).expert_index_TK)
  text = choose.trace(logits).lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("custom_call @mosaic_gpu") == 1


def test_no_tokens_and_many_experts_are_left_to_lax_top_k(monkeypatch):
  monkeypatch.setattr(implementation, "resolve", lambda *_: ("mosaic_gpu", "portable"))
  few = GatingConfig(num_experts=16, num_experts_per_tok=3)
  many = GatingConfig(num_experts=2048, num_experts_per_tok=2)
  none, first = on_one_device(
    lambda: (gate(jnp.zeros((2, 0, 16)), few), gate(jnp.zeros((1, 2048)), many))
  )()
  assert none.expert_index_TK.shape == (2, 0, 3)
  np.testing.assert_array_equal(first.expert_index_TK, [[0, 1]])
