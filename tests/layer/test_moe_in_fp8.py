"""Tokens that cross in FP8: the layer equals a dense one on the rounded tokens."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assignments import mesh, random_routes
from jax.sharding import PartitionSpec as P
from layer_problems import dense, layer, make_mesh, make_problem, relative_error, value_and_grads
from wire_rounding import on_rounded_tokens, rounded

import ultraep_jax as uep
from ultraep_jax.transport import block_exchange
from ultraep_jax.types import Routes

CONFIG = uep.BalanceConfig(
  replica_slots=1,
  objective="balance",
  implementation="portable",
  dispatch_dtype="float8_e4m3fn",
  capacity_factor=1.25,
)


CASES = {
  # ranks, data, width, load, changes: rows of a whole block and a part, and of less than one
  "one axis": (4, 1, 136, "skewed", {}),
  "two axes, several rounds": (
    *(4, 2, 24, "all-to-one"),
    {"capacity_factor": 1.0, "strategy": "none"},
  ),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_dense_on_rounded_tokens(case):
  ranks, data, width, load, changes = CASES[case]
  problem = make_problem(make_mesh(ranks, data), load=load, masked=True, width=width)
  config = dataclasses.replace(CONFIG, **changes)
  y, stats, grads = value_and_grads(layer(problem, config), problem)
  assert relative_error((y, grads), dense(on_rounded_tokens(problem))) <= 1e-5
  assert 1e-3 < relative_error(y, dense(problem)[0]) < 0.1
  assert (int(jnp.max(stats.rounds)) > 1) == ("rounds" in case)


def test_several_steps_of_a_block_carry_the_same_rows():
  """All tokens of all ranks go to one, in as many steps as the lists outgrow the blocks."""
  dest, row = random_routes(np.random.default_rng(0), 4, 16, 1, favourite=2)
  x = np.random.default_rng(1).normal(size=(4, 16, 136)).astype(jnp.bfloat16)

  def local(dest_TK, row_TK, x_TD):
    routes = Routes(dest_TK, row_TK, jnp.zeros(1, jnp.int32))
    crossing = block_exchange.cross(routes, 0, 64, "expert")
    return crossing.dispatch(x_TD, "float8_e4m3fn"), jnp.broadcast_to(crossing.steps, (1,))

  spec = P("expert")
  run = jax.shard_map(local, mesh=mesh((4, "expert")), in_specs=spec, out_specs=spec)
  rows, steps = jax.jit(run)(*[a.reshape(64, -1) for a in (dest, row, x)])
  assert steps.min() > 1
  expected = np.zeros((4 * 64, 136), np.float32)
  fed = dest.reshape(-1) == 2
  expected[2 * 64 + row.reshape(-1)[fed]] = rounded(x.reshape(64, -1))[0][fed]
  np.testing.assert_array_equal(np.asarray(rows), expected.astype(jnp.bfloat16))


def layer_vjp(problem, config):
  """Traced only: output, residuals of its gradient, and the gradient."""

  def both(x, gate, weights):
    def apply(x, gate, weights):
      return layer(problem, config)(x, problem.expert_index, gate, weights)[0]

    y, vjp = jax.vjp(apply, x, gate, weights)
    return jax.tree.leaves(vjp), vjp(y)

  with jax.set_mesh(problem.mesh):
    return jax.make_jaxpr(both, return_shape=True)(problem.x, problem.gate, problem.weights)


def test_only_tokens_cross_in_fp8_and_residuals_stay_in_the_compute_dtype():
  problem = make_problem(make_mesh(4), tokens=48, experts=8, top_k=3, width=136, dtype=jnp.bfloat16)
  whole = dataclasses.replace(CONFIG, capacity_factor=4.0)  # one round of one step
  plain, (plain_residuals, _) = layer_vjp(problem, dataclasses.replace(whole, dispatch_dtype=None))
  fp8, (residuals, grads) = layer_vjp(problem, whole)

  def crossings(jaxpr, dtype, width):
    return len(re.findall(rf":{dtype}\[\d+,{width}\]\S* = all_(?:gather|to_all)", str(jaxpr)))

  kinds = ("bf16", 136), ("f8_e4m3fn", 136), ("f32", 4)
  # Tokens, results, gradients of results and of tokens.
  assert [crossings(plain, *kind) for kind in kinds] == [4, 0, 0]
  assert [crossings(fp8, *kind) for kind in kinds] == [3, 1, 1]
  assert grads[0].dtype == jnp.bfloat16

  def held(leaves):
    return sorted((str(leaf.dtype), leaf.shape) for leaf in leaves)

  assert held(residuals) == held(plain_residuals)
