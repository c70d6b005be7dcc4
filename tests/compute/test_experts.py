"""The grouped matmul against a plain one, group by group."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_rows import widths
from mosaic_interpret import interpreted
from slots import HOME, REPLICA, SIZES, C, D, F, normal, poison, reference

from ultraep_jax.compute import experts, grouped
from ultraep_jax.types import ExpertWeights, Layout

pytestmark = pytest.mark.usefixtures("optimized")


@pytest.mark.parametrize("capacity", [40, 41, 300])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("transpose", [False, True])
def test_grouped_matmul(sizes, transpose, capacity):
  rng = np.random.default_rng(sum(sizes))
  sizes = [size * (capacity // C) for size in sizes]
  rows = poison(normal(rng, capacity, D), sizes)
  weights = normal(rng, HOME + REPLICA, D, F)
  operand = jnp.swapaxes(weights, 1, 2) if transpose else weights
  got = jax.jit(grouped.grouped_matmul, static_argnames="transpose_rhs")(
    rows, operand[:HOME], operand[HOME:], jnp.array(sizes, jnp.int32), transpose_rhs=transpose
  )
  np.testing.assert_allclose(got, reference(rows, weights, sizes), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES)
def test_weight_gradient_of_an_empty_slot_is_zero(sizes):
  rng = np.random.default_rng(0)
  rows, grad = poison(normal(rng, C, D), sizes), poison(normal(rng, C, F), sizes)
  home, replica = jax.jit(grouped.grouped_matmul_wgrad, static_argnums=3)(
    rows, grad, jnp.array(sizes, jnp.int32), HOME
  )
  assert home.shape == (HOME, D, F) and replica.shape == (REPLICA, D, F)
  end = np.cumsum(sizes)
  for slot, size in enumerate(sizes):
    span = slice(end[slot] - size, end[slot])
    got = home[slot] if slot < HOME else replica[slot - HOME]
    np.testing.assert_allclose(got, np.asarray(rows[span]).T @ grad[span], rtol=1e-5, atol=1e-5)
    if not size:
      assert not np.asarray(got).any()


def test_without_replica_slots():
  rng = np.random.default_rng(0)
  rows, weights = normal(rng, C, D), normal(rng, HOME, D, F)
  sizes = [10, 20, 10]
  empty = jnp.zeros((0, D, F), jnp.float32)
  got = grouped.grouped_matmul(rows, weights, empty, jnp.array(sizes, jnp.int32))
  np.testing.assert_allclose(got, reference(rows, weights, sizes), rtol=1e-5, atol=1e-5)
  home, replica = grouped.grouped_matmul_wgrad(rows, got, jnp.array(sizes, jnp.int32), HOME)
  assert home.shape == (HOME, D, F) and replica.shape == (0, D, F)


def test_no_operand_is_joined_or_expanded():
  """Neither home and replica weights in one array, nor one copy of the rows per slot."""
  rows, width, inner, home, replica = 512, 64, 32, 30, 2
  shapes = [(rows, width), (home, width, inner), (replica, width, inner)]
  args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  sizes = jax.ShapeDtypeStruct((home + replica,), jnp.int32)
  compiled = jax.jit(grouped.grouped_matmul).lower(*args, sizes).compile()
  joined = 4 * (home + replica) * width * inner
  expanded = 4 * (home + replica) * rows * width
  assert compiled.memory_analysis().temp_size_in_bytes < min(joined, expanded) / 2


class Replicas:
  """Copies that are there, and whose gradients stay."""

  def __init__(self, copies):
    self.filled_S = lambda: jnp.ones(copies.wo.shape[0], bool)
    self.copies = lambda: copies
    self.copying = lambda arrays, which, flat=True: None
    self.reducing = lambda replica_grads, home_grads: None

  def reduce(self, replica_grads, home_grads):
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), home_grads, replica_grads)


@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.gelu, jnp.tanh])
def test_expert_backward_is_the_gradient(activation):
  rng = np.random.default_rng(1)
  sizes = jnp.array([7, 0, 13, 5, 1], jnp.int32)
  slot_C = np.repeat(np.arange(5), sizes)
  used = len(slot_C)
  rows, grad = poison(normal(rng, C, D), sizes.tolist()), normal(rng, C, D)
  gate = normal(rng, C).at[used:].set(jnp.nan)
  weights = ExpertWeights(normal(rng, 5, D, F), normal(rng, 5, D, F), normal(rng, 5, F, D))
  home = jax.tree.map(lambda leaf: leaf[:HOME], weights)
  replica = jax.tree.map(lambda leaf: leaf[HOME:], weights)

  def plain(rows, gate, weights):
    gathered = jax.tree.map(lambda leaf: leaf[slot_C], weights)
    inner = activation(jnp.einsum("cd,cdf->cf", rows, gathered.wi_gate))
    inner *= jnp.einsum("cd,cdf->cf", rows, gathered.wi_up)
    return jnp.sum(gate[:, None] * jnp.einsum("cf,cfd->cd", inner, gathered.wo) * grad[:used])

  expected = jax.grad(plain, argnums=(0, 1, 2))(rows[:used], gate[:used], weights)
  replicas = Replicas(replica)
  out = experts.expert_forward(rows, home, replicas, sizes, activation)
  assert out.hidden is not None
  got = experts.expert_backward(grad, gate, rows, out.hidden, home, replicas, sizes, activation)
  chex.assert_trees_all_equal(got.copies, replica)
  got = (got.rows_CD[:used], got.gate_C[:used], got.home)
  chex.assert_trees_all_close(got, expected, rtol=2e-5, atol=2e-5)


def test_gates_count_in_float32_among_rows_in_bfloat16():
  """A row in each slot, so that every product can be told from its rounding."""
  rng = np.random.default_rng(0)
  width, inner, slots = 8, 256, HOME + REPLICA

  def low(*shape):
    return normal(rng, *shape).astype(jnp.bfloat16)

  rows, grad, gate = low(slots, width), low(slots, width), normal(rng, slots)
  weights = ExpertWeights(
    low(slots, width, inner), low(slots, width, inner), low(slots, inner, width)
  )
  home = jax.tree.map(lambda leaf: leaf[:HOME], weights)
  replicas = Replicas(jax.tree.map(lambda leaf: leaf[HOME:], weights))
  sizes = jnp.ones(slots, jnp.int32)
  hidden = low(slots, inner), low(slots, inner)
  got = experts.expert_backward(grad, gate, rows, hidden, home, replicas, sizes, jax.nn.relu)

  gated = np.asarray(jax.nn.relu(hidden[0]) * hidden[1], np.float64)
  product = (gated * np.asarray(gate, np.float64)[:, None]).astype(jnp.bfloat16)
  outer = np.asarray(product, np.float64)[:, :, None] * np.asarray(grad, np.float64)[:, None]
  np.testing.assert_array_equal(got.home.wo, outer.astype(np.float32))
  ungated = grouped.grouped_matmul(grad, home.wo, weights.wo[HOME:], sizes, transpose_rhs=True)
  summed = (gated * np.asarray(ungated, np.float64)).sum(axis=1)
  np.testing.assert_allclose(got.gate_C, summed, rtol=1e-5, atol=1e-5)


def test_gradients_of_bfloat16_weights_are_rounded_by_more_than_a_cast():
  """XLA for GPUs drops casts there and back: copies would add to what kernels do not have."""
  rows, grad = jnp.ones((8, 4), jnp.bfloat16), jnp.ones((8, 4), jnp.bfloat16)
  sizes = jnp.array([5, 3], jnp.int32)

  def wgrad(dtype):
    arguments = None, rows, grad, sizes, 1, None, ("portable",), grouped.UNTUNED
    return jax.make_jaxpr(lambda: grouped.wgrad_beside(*arguments, dtype=dtype)[0])()

  rounds = "reduce_precision[exponent_bits=8 mantissa_bits=7]"
  text = " ".join(str(wgrad(jnp.bfloat16)).split())
  assert text.count(rounds) == 2  # of homes and of copies
  assert "reduce_precision" not in str(wgrad(jnp.float32))


@pytest.mark.parametrize("layout", Layout)
def test_the_kernel_between_the_matrices_does_as_plain_jax(layout):
  rng = np.random.default_rng(0)
  rows, used, inner = 136, 131, 64

  def make(*sizes):
    return poison(jnp.asarray(rng.normal(size=sizes), jnp.bfloat16), [used])

  arguments = (
    tuple(make(rows, width) for width in widths(str(layout), inner)),
    make(rows, inner),
    jnp.asarray(rng.random(rows), jnp.float32),
    jnp.array([used - 30, 0, 30], jnp.int32),
    *(layout, jax.nn.silu),
  )
  with interpreted():
    found = jax.jit(lambda: experts._between(*arguments, ("mosaic_gpu",)))()
  expected = experts._between(*arguments, ("portable",))
  for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert got.dtype == want.dtype and got.shape == want.shape
    got, want = (np.asarray(x, np.float32)[:used] for x in (got, want))
    assert np.linalg.norm(got - want) < 2**-7 * np.linalg.norm(want)
