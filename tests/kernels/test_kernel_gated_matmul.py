"""The fused projections into an expert: lowering, results interpreted, activations."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assignments import mesh
from grouped_rows import (
  CAPACITY,
  DEFERRED,
  EVEN,
  FEW,
  IN_PAIRS,
  IN_TURNS,
  SIZES,
  TOGETHER,
  WHOLE,
  assert_products,
  clamped,
  compiled,
  exact,
  interpreted,
  lower,
  products,
  shape,
  swiglu,
  used_rows,
  widths,
)
from jax.sharding import PartitionSpec as P
from programs import kernels

from pallas_kernels.matmul.gated import Projections, gated_beside, gated_matmul
from pallas_kernels.matmul.grouped import matmul_beside
from pallas_kernels.matmul.layout import MatmulTuning
from pallas_kernels.transfer.replicate import replication
from pallas_kernels.transfer.tuning import TransferTuning

CAPTURED = np.ones((64, 64), np.float32)


def reglu(gate, up):
  return jax.nn.relu(gate) * up


# Of rounded projections, in float32, on any machine.
EXACT = (jax.nn.relu, reglu)


def projections(make, columns, biases, slots, depth, cols):
  """Of slots, made by a function of shapes."""
  sizes = widths(columns, cols)
  weights = tuple(make(slots, depth, width) for width in sizes)
  return Projections(weights, tuple(make(slots, width) for width in sizes) if biases else ())


def lowered(
  unit,
  keep_hidden=False,
  c=4096,
  k=4096,
  n=2880,
  m=16,
  s=2,
  tuning=None,
  columns="apart",
  biases=False,
):
  f = functools.partial(
    gated_matmul, unit=unit, columns=columns, keep_hidden=keep_hidden, tuning=tuning
  )
  operands = (projections(shape, columns, biases, slots, k, n) for slots in (m, s))
  return lower(f, shape(c, k), *operands, shape(m + s, dtype=jnp.int32))


# Each schedule and each form of columns, with hidden and without.
@pytest.mark.parametrize(
  ("columns", "keep_hidden", "schedule"),
  [
    ("apart", False, "together"),
    ("apart", True, "deferred"),
    ("fused", False, "deferred"),
    ("fused", True, "in_turns"),
    ("interleaved", False, "in_turns"),
    ("interleaved", True, "together"),
    ("ungated", False, "together"),
    ("ungated", True, "deferred"),
    ("apart", True, "even"),
    ("fused", False, "even"),
  ],
)
def test_every_form_lowers_to_one_kernel_and_no_copy_of_weights(columns, keep_hidden, schedule):
  unit = jax.nn.relu if columns == "ungated" else clamped
  stages = 6 if schedule == "in_turns" else 4
  even = schedule == "even"
  tuning = MatmulTuning(even=True) if even else MatmulTuning(schedule, stages=stages, even=False)
  text = lowered(unit, keep_hidden, columns=columns, biases=True, tuning=tuning)
  assert text.count("custom_call @mosaic_gpu") == 1
  assert "stablehlo.multiply" not in "".join(x for x in text.splitlines() if "bf16" in x)
  made = [x for x in text.splitlines() if "4096x" in x.partition(" = ")[2].partition("->")[2]]
  assert all("custom_call @mosaic_gpu" in x or "func" in x or "call @" in x for x in made)


ACTIVATIONS = [
  jax.nn.silu,
  jax.nn.relu,
  jax.nn.gelu,
  jax.nn.sigmoid,
  jax.nn.leaky_relu,
  jax.nn.hard_swish,
  lambda x: jnp.square(jax.nn.relu(x)),
  lambda x: jnp.where(x > 0, jnp.minimum(x, 7.0), jnp.float32(0.5)),
  lambda x: jnp.where(x.astype(bool), x, jnp.float32(0.5)),
]


def test_activations_that_lower():
  """All in one kernel; what does not lower names its operation."""

  def unit(x):
    return sum(activation(x) for activation in ACTIVATIONS)

  text = lowered(unit, columns="ungated", tuning=MatmulTuning(even=False))
  assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
  ("activation", "match"),
  [
    (jax.nn.softmax, "expected scalars and arrays of"),
    (lambda x: jnp.cumsum(x, axis=0), "expected elementwise operations, got cumsum"),
    (lambda x: x[:, ::-1], "expected elementwise operations, got rev"),
    (jax.nn.softplus, "expected elementwise operations, got log1p"),
    (lambda x: x.astype(jnp.bfloat16), "expected float32 of its argument's shape"),
    (lambda x: x + CAPTURED, "expected no captured arrays, got"),
    (lambda x: x * np.ones((1, 256), np.float32), r"expected one of \(64, 64\), got "),
    (lambda x: x / x.shape[-1], "expected no number that depends on its argument's shape"),
    (lambda x: jax.lax.select_n(x.astype(jnp.int32), x, x, x), "expected choices of 2, got 3"),
  ],
)
def test_activations_that_are_refused(activation, match):
  with pytest.raises(NotImplementedError, match=match):
    lowered(activation, columns="ungated")


def unit_of(hidden, unit, columns):
  """In float32, of rounded projections."""
  hidden = [np.asarray(x, np.float32) for x in hidden]
  if columns == "fused":
    hidden = np.split(hidden[0], 2, axis=1)
  elif columns == "interleaved":
    hidden = [hidden[0][:, ::2], hidden[0][:, 1::2]]
  return np.asarray(unit(*hidden))


def check(
  sizes,
  tuning,
  keep_hidden,
  num_home,
  unit,
  depth=128,
  cols=256,
  capacity=CAPACITY,
  columns="apart",
  biases=False,
):
  rng = np.random.default_rng(0)
  rows = used_rows(rng, sizes, depth, capacity)
  every = projections(functools.partial(exact, rng), columns, biases, 4, depth, cols)
  every = jax.tree.map(np.asarray, every)
  run = compiled(gated_matmul, unit=unit, columns=columns, keep_hidden=keep_hidden, tuning=tuning)
  home, replica = (
    jax.tree.map(lambda x, part=part: x[part], every)
    for part in (slice(num_home), slice(num_home, None))
  )
  inner, hidden = jax.tree.map(np.asarray, run(rows, home, replica, jnp.array(sizes)))
  assert (inner.dtype, inner.shape) == (jnp.bfloat16, (capacity, cols))
  assert len(hidden) == keep_hidden * len(every.weights)
  bias = every.biases or [None] * len(every.weights)
  for got, weights, offset in zip(hidden, every.weights, bias, strict=keep_hidden):
    assert_products(got, rows, weights, sizes, offset)
  projected = [
    products(rows, weights, sizes, offset)
    for weights, offset in zip(every.weights, bias, strict=True)
  ]
  expected = unit_of(projected, unit, columns)
  # Of the rounded projections, rounded once, which is half a step of bfloat16 at most.
  got = inner[: sum(sizes)]
  np.testing.assert_allclose(got.astype(np.float32), expected, rtol=1.01 * 2**-8, atol=1e-30)
  if unit in EXACT:
    np.testing.assert_array_equal(got, expected.astype(jnp.bfloat16))
  return got


@pytest.mark.parametrize(
  ("tuning", "num_home", "sizes"),
  [
    (TOGETHER, 3, SIZES[0]),
    (DEFERRED, 2, SIZES[1]),
    (IN_TURNS, 4, SIZES[0]),
    (IN_TURNS, 4, SIZES[3]),
    (IN_PAIRS, 3, SIZES[1]),
    (EVEN, 3, SIZES[0]),
    (EVEN, 3, SIZES[1]),
  ],
)
def test_gated_interpreted(tuning, num_home, sizes):
  with interpreted():
    check(sizes, tuning, keep_hidden=True, num_home=num_home, unit=swiglu)


@pytest.mark.parametrize(
  ("columns", "tuning", "cols", "biases"),
  [
    ("fused", IN_TURNS, 128, False),
    ("interleaved", IN_TURNS, 64, False),
    ("interleaved", IN_PAIRS, 192, True),
    ("ungated", TOGETHER, 64, False),
    ("fused", EVEN, 192, True),
    ("ungated", EVEN, 64, True),
    ("ungated", EVEN, 192, True),  # the last tile of columns begins inside the one before
    ("interleaved", EVEN, 64, True),
  ],
)
def test_forms_interpreted(columns, tuning, cols, biases):
  check_form(columns, tuning, cols, biases)


def check_form(columns, tuning, cols, biases, keep_hidden=True):
  unit = jax.nn.relu if columns == "ungated" else clamped
  options = {"depth": 64, "cols": cols, "columns": columns, "biases": biases}
  with interpreted():
    return check(SIZES[0], tuning, keep_hidden, num_home=3, unit=unit, **options)


@pytest.mark.parametrize(
  ("capacity", "tuning", "depth", "cols"),
  [(1, TOGETHER, 64, 64), (63, IN_TURNS, 64, 192), (255, EVEN, 192, 320)],
)
def test_few_rows_and_any_multiple_of_64(capacity, tuning, depth, cols):
  options = {"keep_hidden": True, "num_home": 2, "unit": reglu}
  with interpreted():
    check(FEW[capacity], tuning, **options, depth=depth, cols=cols, capacity=capacity)


def test_columns_of_a_wide_result_come_some_at_a_time():
  options = {"keep_hidden": True, "num_home": 2, "unit": reglu, "depth": 64, "cols": 1152}
  with interpreted():
    check([500, 0, 190, 210], EVEN, **options, capacity=904)


@pytest.mark.parametrize(
  ("columns", "tuning"),
  [("apart", TOGETHER), ("fused", DEFERRED), ("interleaved", TOGETHER), ("ungated", EVEN)],
)
def test_inner_is_the_same_without_hidden(columns, tuning):
  one, other = (check_form(columns, tuning, 192, True, keep) for keep in (True, False))
  np.testing.assert_array_equal(one, other)


# Two ranks of two experts have copies of each other's, in another order.
COPIES, SENDERS = jnp.array([[3, 2], [1, 0]], jnp.int32), jnp.array([[1, 1], [0, 0]], jnp.int32)


def copying(arrays):
  tuning = TransferTuning(blocks=1, workers=3, tile_bytes=1024)
  return replication(arrays, COPIES, SENDERS, axis_name="expert", tuning=tuning, flat=False)


def on_two_ranks(function, *operands):
  specs = {"in_specs": P("expert"), "out_specs": P("expert")}
  return jax.shard_map(function, mesh=mesh((2, "expert")), **specs)(*operands)


def brought(rows, home, sizes, biases=(), **options):
  """``gated_beside``, of both ranks."""

  def run(rows, home, sizes, biases):
    transfer = copying(home.weights)
    return gated_beside(transfer, rows, home, sizes, replica_biases=biases, **options)

  return on_two_ranks(run, rows, home, sizes, biases)


# Of two home and two replica slots: a border inside a tile, replicas without rows, homes without.
BROUGHT = [[0, 77, 0, 50], [150, 70, 1, 300], [300, 340, 0, 0], [0, 0, 640, 0], [0, 0, 0, 0]]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("keep_hidden", "columns", "biases", "tuning"),
  [
    (True, "apart", False, TOGETHER),
    (False, "interleaved", True, TOGETHER),
    (True, "fused", False, DEFERRED),
    (False, "ungated", True, IN_TURNS),
    (True, "apart", False, EVEN),
    (False, "fused", True, EVEN),
  ],
)
def test_replicas_that_are_brought_give_the_same_bits(keep_hidden, columns, biases, tuning):
  rng = np.random.default_rng(0)
  home = projections(functools.partial(exact, rng), columns, biases, 4, 64, 128)
  replica = jax.tree.map(lambda x: x[COPIES.reshape(-1)], home)
  # The biases are the caller's, which is to show.
  replica = replica._replace(biases=tuple(2 * x for x in replica.biases))
  unit = jax.nn.relu if columns == "ungated" else reglu
  options = {"unit": unit, "keep_hidden": keep_hidden, "tuning": tuning, "columns": columns}
  beside = jax.jit(functools.partial(brought, **options))
  for pair in itertools.pairwise(BROUGHT):
    rows = [used_rows(rng, sizes, 64) for sizes in pair]
    with interpreted():
      sizes_N = jnp.array(pair).reshape(-1)
      got, copies = beside(jnp.concatenate(rows), home, sizes_N, replica.biases)
      got, copies = jax.block_until_ready((got, copies))
    for copy, weights in zip(copies, replica.weights, strict=True):
      np.testing.assert_array_equal(copy, weights)
    inner, hidden = jax.tree.map(np.asarray, got)
    assert len(hidden) == keep_hidden * len(home.weights)
    for rank, sizes in enumerate(pair):
      slots = slice(2 * rank, 2 * rank + 2)
      mine = jax.tree.map(lambda *x, at=slots: np.concatenate([y[at] for y in x]), home, replica)
      expected = [
        products(rows[rank], weights, sizes, bias)
        for weights, bias in itertools.zip_longest(mine.weights, mine.biases)
      ]
      used = slice(rank * CAPACITY, rank * CAPACITY + sum(sizes))
      for x, y in zip(expected, hidden, strict=keep_hidden):
        np.testing.assert_array_equal(x, y[used])
      expected = unit_of(expected, unit, columns).astype(jnp.bfloat16)
      np.testing.assert_array_equal(expected, inner[used])


def brought_gated(rows, home, sizes):
  return brought(rows, home, sizes, unit=swiglu, keep_hidden=False)[0].inner_CN


def brought_plain(rows, home, sizes):
  def run(rows, weights, sizes):
    return matmul_beside(copying([weights]), rows, weights, sizes)[0]

  return on_two_ranks(run, rows, home.weights[0], sizes)


KERNELS = {brought_gated: "gated_matmul", brought_plain: "grouped_matmul"}


@pytest.mark.parametrize("forward", KERNELS)
def test_a_kernel_with_copies_runs_again_under_checkpoint(forward):
  """An effect, as that of a mutable reference, would not: gradients would be wrong."""
  multiply = jax.custom_vjp(forward)

  def kept(*operands):
    out = forward(*operands)
    return out, out

  multiply.defvjp(kept, lambda out, grad: (out[:, :256] * grad[:, :256], None, None))

  def loss(wrap, rows, *operands):
    return jnp.sum(wrap(jax.jit(multiply))(rows, *operands).astype(jnp.float32))

  weights = Projections((shape(4, 256, 256),) * 2)
  operands = shape(512, 256), weights, shape(8, dtype=jnp.int32)
  for wrap, runs in (lambda function: function, 1), (jax.checkpoint, 2):
    gradient = jax.jit(jax.value_and_grad(functools.partial(loss, wrap)))
    traced = gradient.trace(*operands)
    assert [kernel.params["name"] for kernel in kernels(traced.jaxpr)] == [KERNELS[forward]] * runs
    assert "custom_call @mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
  ("tuning", "columns"),
  [
    (TOGETHER, "apart"),
    (DEFERRED, "apart"),
    (IN_TURNS, "apart"),
    (TOGETHER, "interleaved"),
    (EVEN, "apart"),
  ],
)
def test_gated_has_no_race(tuning, columns):
  options = {"columns": columns, "biases": columns != "apart"}
  with interpreted(races=True):
    check(WHOLE, tuning, keep_hidden=True, num_home=3, unit=swiglu, **options)


def zeros(*sizes):
  return jnp.zeros(sizes, jnp.bfloat16)


def test_refuses_slots_without_weights():
  weights = Projections((zeros(4, 64, 128),) * 2)
  arguments = zeros(512, 64), weights, jnp.zeros(10, jnp.int32)
  with pytest.raises(ValueError, match=r"group_size_P: expected shape \(4,\), got \(5,\)"):
    jax.eval_shape(lambda: brought(*arguments, unit=swiglu, keep_hidden=False))


def test_refuses_replicas_without_the_biases_of_homes():
  weights = Projections((zeros(4, 64, 128),) * 2, (zeros(4, 128),) * 2)
  arguments = zeros(512, 64), weights, jnp.zeros(8, jnp.int32)
  with pytest.raises(ValueError, match="replica_biases: expected 2, as of the homes, got 0"):
    jax.eval_shape(lambda: brought(*arguments, unit=swiglu, keep_hidden=False))


@pytest.mark.parametrize(
  ("home", "replica", "columns", "match"),
  [
    ([zeros(2, 64, 128)] * 2, [zeros(1, 64, 128), zeros(2, 64, 256)], "apart", "replica_SKN: exp"),
    ([zeros(2, 64, 128)], [zeros(1, 64, 128)], "apart", "weights: expected 2 that are apart, got"),
    ([zeros(2, 64, 128)] * 2, [zeros(1, 64, 128)] * 2, "fused", "weights: expected 1 that are fus"),
    ([zeros(2, 64, 128)], [zeros(1, 64, 128)], "halves", "columns: expected one of"),
  ],
)
def test_refuses_weights_that_do_not_fit_together(home, replica, columns, match):
  operands = zeros(256, 64), Projections(tuple(home)), Projections(tuple(replica))
  sizes = jnp.zeros(3, jnp.int32)
  with pytest.raises(ValueError, match=match):
    gated_matmul(*operands, sizes, reglu, columns=columns, keep_hidden=True)


def test_refuses_biases_of_other_columns():
  home, replica = Projections((zeros(2, 64, 256),), (zeros(2, 128),)), zeros(1, 64, 256)
  operands = zeros(256, 64), home, Projections((replica,), (zeros(1, 128),))
  with pytest.raises(ValueError, match=r"biases\[0\]: expected shape \(3, 256\), got \(3, 128\)"):
    gated_matmul(*operands, jnp.zeros(3, jnp.int32), reglu, columns="fused", keep_hidden=True)


def test_columns_that_take_turns_need_pairs_of_64():
  weights = [Projections((zeros(slots, 64, 192),)) for slots in (2, 1)]
  with pytest.raises(NotImplementedError, match="N: expected a multiple of 128, got 192"):
    gated_matmul(
      *(zeros(256, 64), *weights, jnp.zeros(3, jnp.int32), reglu),
      columns="interleaved",
      keep_hidden=True,
    )
