"""The gradients between the matrices of an expert: interpreted, lowered, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_rows import clamped, lower, shape, swiglu, widths
from mosaic_interpret import interpreted

from pallas_kernels import support
from pallas_kernels.matmul.gated_grads import gated_grads

COLUMNS = ("apart", "fused", "interleaved", "ungated")


def projections(make, columns, rows, cols):
  return tuple(make(rows, width) for width in widths(columns, cols))


def told_apart(hidden, columns):
  if columns == "fused":
    return jnp.split(hidden[0], 2, axis=1)
  return [hidden[0][:, ::2], hidden[0][:, 1::2]] if columns == "interleaved" else list(hidden)


def reference(hidden, grad_CN, gate_C, unit, columns):
  """Of the same bfloat16 arrays, in float32, for all rows."""

  def weighted(hidden, gate_C):
    value = unit(*told_apart(hidden, columns))
    return gate_C[:, None] * value, value

  hidden = [x.astype(jnp.float32) for x in hidden]
  grad_CN = grad_CN.astype(jnp.float32)
  (inner_CN, _), vjp = jax.vjp(weighted, hidden, gate_C)
  hidden_grads, gate_grad_C = vjp((grad_CN, jnp.zeros_like(grad_CN)))
  return inner_CN, tuple(hidden_grads), gate_grad_C


def problem(columns, rows, cols, used, unused=np.nan):
  """Rows beyond those that are used are NaN, as a buffer's may be."""
  rng = np.random.default_rng(rows + cols)

  def make(*sizes):
    values = rng.standard_normal(sizes).astype(np.float32)
    values[used:] = unused
    return values

  arrays = *projections(make, columns, rows, cols), make(rows, cols)
  *hidden, grad_CN = (jnp.asarray(x, jnp.bfloat16) for x in arrays)
  return tuple(hidden), grad_CN, jnp.asarray(make(rows))


def computed(unit, columns, *operands):
  f = jax.jit(functools.partial(gated_grads.__wrapped__, unit=unit, columns=columns))
  with interpreted():
    return jax.block_until_ready(f(*operands))


def assert_near(found, expected, used):
  """Relative to the largest. Gates' gradients are not rounded, all else is to eight bits."""
  found, expected = (jax.tree.leaves(tuple(x)) for x in (found, expected))
  assert [x.shape for x in found] == [x.shape for x in expected]
  for i, (a, b) in enumerate(zip(found, expected, strict=True)):
    a, b = (np.asarray(x, np.float32)[:used] for x in (a, b))
    most = 1e-5 if i == len(found) - 1 else 2**-8
    assert np.abs(a - b).max(initial=0) <= most * np.abs(b).max(initial=0)


# No row, one, whole tiles, a last or only tile that the buffer cuts; one column of tiles and more,
# in one part or several, of one column or several.
@pytest.mark.parametrize(
  ("columns", "rows", "cols", "sizes"),
  [
    ("apart", 200, 128, (100, 0, 60, 37)),
    ("fused", 128, 192, (64, 64)),
    ("interleaved", 136, 64, (1, 0, 134)),
    ("interleaved", 72, 192, (0, 1)),
    ("ungated", 64, 64, (0, 0)),
    ("fused", 8, 64, (0, 3)),
    ("ungated", 192, 64, (0, 65)),
    ("interleaved", 72, 512, (30, 40)),
    ("fused", 64, 448, (60,)),
  ],
)
@pytest.mark.parametrize("unit", ["plain", "clamped"])
def test_equals_the_gradients_of_float32(columns, rows, cols, sizes, unit):
  units = {"plain": swiglu, "clamped": clamped}
  unit = jax.nn.silu if columns == "ungated" else units[unit]
  used = sum(sizes)
  operands = problem(columns, rows, cols, used)
  found = computed(unit, columns, *operands, jnp.asarray(sizes, jnp.int32))
  assert_near(found, reference(*operands, unit, columns), used)


@pytest.mark.parametrize("cols", [192, 256])
def test_blocks_go_on_to_further_tiles(monkeypatch, cols):
  """Of five tiles in parts of one column, two blocks take turns."""
  monkeypatch.setattr(support, "num_sms", lambda: 1)
  operands = problem("apart", 320, cols, 300)
  found = computed(swiglu, "apart", *operands, jnp.asarray([300], jnp.int32))
  assert_near(found, reference(*operands, swiglu, "apart"), 300)


def test_unused_tiles_are_not_written():
  operands = problem("apart", 256, 64, 100, unused=1.0)
  found = computed(swiglu, "apart", *operands, jnp.asarray([60, 40], jnp.int32))
  for array, wrong in zip(
    jax.tree.leaves(tuple(found)),
    jax.tree.leaves(reference(*operands, swiglu, "apart")),
    strict=True,
  ):
    assert not np.any(np.isclose(np.asarray(array, np.float32)[128:], np.asarray(wrong)[128:]))


def test_a_gate_of_zero_has_a_gradient():
  hidden, grad_CN, _ = problem("apart", 64, 64, 64)
  operands = hidden, grad_CN, jnp.zeros(64, jnp.float32)
  found = computed(clamped, "apart", *operands, jnp.asarray([64], jnp.int32))
  assert not any(np.any(np.asarray(x, np.float32)) for x in (found.inner_CN, *found.hidden_grad))
  assert np.all(np.asarray(found.gate_grad_C))
  assert_near(found, reference(*operands, clamped, "apart"), 64)


def lowered(unit, columns, rows=4096, cols=256):
  operands = shape(rows, cols), shape(rows, dtype=jnp.float32), shape(18, dtype=jnp.int32)
  f = functools.partial(gated_grads, unit=unit, columns=columns)
  text = lower(f, projections(shape, columns, rows, cols), *operands)
  assert text.count("custom_call @mosaic_gpu") == 1


UNGATED = [
  *(jax.nn.silu, jax.nn.relu, jax.nn.gelu, jax.nn.sigmoid, jax.nn.tanh, jax.nn.leaky_relu),
  *(jax.nn.hard_swish, jax.nn.soft_sign, jnp.square, lambda x: x, lambda x: x**0 + x**-1),
  *(lambda x: x / (1 + jnp.exp(-x)), lambda x: 1 / x, lambda x: x**3 + x**-2),
  lambda x: jnp.where(x > 0, jnp.minimum(x, 7.0), jnp.float32(0.5)),
  lambda x: jax.lax.stop_gradient(x) * x,
]
# Of some arguments the gradient is a constant.
GATED = [
  *(lambda gate, up: up, lambda gate, up: jax.nn.silu(gate), lambda gate, up: jnp.sign(gate) * up),
  lambda gate, up: jnp.where(gate > 0, up, 0.0),
]


@pytest.mark.parametrize("unit", UNGATED)
def test_derivatives_that_lower(unit):
  lowered(unit, "ungated")


@pytest.mark.parametrize("columns", ["apart", "interleaved"])
@pytest.mark.parametrize("unit", GATED)
def test_units_that_ignore_an_argument_lower(unit, columns):
  lowered(unit, columns)


def test_units_that_add_a_number_lower_inside_shard_map():
  mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
  f = functools.partial(gated_grads, unit=lambda gate, up: gate * (up + 1), columns="apart")
  split = jax.sharding.PartitionSpec("expert")
  local = jax.shard_map(f, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
  operands = shape(4096, 256), shape(4096, dtype=jnp.float32), shape(36, dtype=jnp.int32)
  text = lower(local, projections(shape, "apart", 4096, 256), *operands)
  assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("columns", COLUMNS)
def test_every_form_lowers_to_one_kernel(columns):
  lowered(jax.nn.gelu if columns == "ungated" else clamped, columns, cols=2880)


def test_what_it_cannot_do_is_refused():
  def refused(error, message, hidden=None, grad=None, gate=None, unit=swiglu, columns="apart"):
    hidden = (shape(128, 64), shape(128, 64)) if hidden is None else hidden
    grad, gate = grad or shape(128, 64), gate or shape(128, dtype=jnp.float32)
    with pytest.raises(error, match=message):
      jax.eval_shape(
        functools.partial(gated_grads, unit=unit, columns=columns),
        *(hidden, grad, gate, shape(3, dtype=jnp.int32)),
      )

  refused(
    NotImplementedError, "N: expected a multiple of 64", (shape(128, 48),) * 2, shape(128, 48)
  )
  refused(NotImplementedError, "bfloat16", grad=shape(128, 64, dtype=jnp.float32))
  refused(NotImplementedError, "elementwise", unit=lambda a, b: jnp.cumsum(a, 1) * b)
  refused(ValueError, "hidden: expected 2 that are apart, got 1", (shape(128, 64),))
  refused(ValueError, r"hidden\[1\]", (shape(128, 64), shape(128, 128)))
  refused(ValueError, "gate_C", gate=shape(64, dtype=jnp.float32))
  refused(TypeError, "gate_C: expected float32", gate=shape(128))
  refused(ValueError, "columns: expected one of", columns="halves")
