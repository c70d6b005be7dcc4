"""The two projections into a gated expert and their product, in one kernel.

Or in one for home slots and one for replica slots, where replicas arrive beside the first.

For every tile of rows, with the sums in registers until both are there::

  rows × wi_gate ──► gate ─┐
  rows × wi_up ────► up ───┴─► act(gate) * up ──► hidden
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from pallas_kernels.matmul.layout import MatmulTuning
from pallas_kernels.matmul.rows import Contraction, multiply_rows
from pallas_kernels.support import Array
from pallas_kernels.transfer.tiles import Transfer

# What Mosaic GPU computes element by element in registers.
_ELEMENTWISE = frozenset(
  {
    *("abs", "add", "clamp", "copy", "cos", "div", "erf", "exp", "exp2", "integer_pow", "log"),
    *("logistic", "max", "min", "mul", "neg", "rsqrt", "sign", "sin", "sqrt", "square", "sub"),
    *("tanh", "and", "eq", "ge", "gt", "le", "lt", "ne", "not", "or", "select_n"),
    *("convert_element_type", "stop_gradient"),
  }
)


class Gated(NamedTuple):
  """The gated product, and the projections by gate and up if they were to be kept."""

  inner_CN: Array
  gate_CN: Array | None
  up_CN: Array | None


@functools.partial(jax.jit, static_argnames=("activation", "keep_hidden", "tuning"))
def gated_matmul(
  rows_CK: Array,
  home_gate_MKN: Array,
  home_up_MKN: Array,
  replica_gate_SKN: Array,
  replica_up_SKN: Array,
  group_size_P: Array,
  activation: Callable[[Array], Array],
  *,
  keep_hidden: bool,
  tuning: MatmulTuning | None = None,
) -> Gated:
  """``activation(rows gate) * (rows up)`` for each group of rows by the weights of its slot.

  Both projections are rounded to bfloat16, as if they were stored; activation and product of the
  rounded values are computed in float32 and rounded once.

  Args:
    rows_CK: ``[C, K]`` bfloat16, grouped by slot from row 0 on. Rows at or beyond the sum of
      the group sizes may hold anything, NaN included.
    home_gate_MKN: ``[M, K, N]`` bfloat16.
    home_up_MKN: ``[M, K, N]`` bfloat16.
    replica_gate_SKN: ``[S, K, N]`` bfloat16; S may be 0.
    replica_up_SKN: ``[S, K, N]`` bfloat16.
    group_size_P: ``[M + S]`` int32, rows per slot; the sum is at most C.
    activation: elementwise, given float32.
    keep_hidden: whether to return the projections, too, which the backward pass needs.
    tuning: how the kernel is laid out.

  Returns:
    ``[C, N]`` bfloat16 each. Rows at or beyond the sum of the group sizes are not written: they
    hold anything.

  Raises:
    NotImplementedError: an activation that the kernel cannot compute, or as ``grouped_matmul``.
    ValueError: shapes that do not fit together.
  """
  weights = (home_gate_MKN, home_up_MKN), (replica_gate_SKN, replica_up_SKN)
  contraction = Contraction(rows_CK, *weights)
  return _multiply(contraction, group_size_P, activation, keep_hidden, tuning)[0]


def gated_beside(
  transfer: Transfer | None,
  rows_CK: Array,
  home_gate_MKN: Array,
  home_up_MKN: Array,
  group_size_P: Array,
  activation: Callable[[Array], Array],
  *,
  keep_hidden: bool,
  replicas: tuple[Array, Array] | None = None,
  tuning: MatmulTuning | None = None,
  replica_tuning: MatmulTuning | None = None,
) -> tuple[Gated, Any]:
  """``gated_matmul`` by replica weights that a transfer brings at the same time.

  The rows of home slots need none of them: the transfer rides in the kernel that multiplies
  these. When that is over on a rank, its copies are complete, and a second kernel multiplies the
  rows of replica slots into the same results. The results are those of ``gated_matmul`` bit for
  bit.

  No legal plan can deadlock, as the transfer alone cannot: only its blocks wait for other ranks.
  They are the first of the first kernel, which every rank runs, also without a row, and no more
  than it has SMs. So none waits for a block that multiplies; and of those, and of the second
  kernel, none waits for another rank.

  Args:
    transfer: brings the replicas' ``[S, K, N]`` gate and up, the first two of its results; it must
      not touch the other operands.
    rows_CK: as for ``gated_matmul``.
    home_gate_MKN: likewise.
    home_up_MKN: likewise.
    group_size_P: likewise.
    activation: likewise.
    keep_hidden: likewise.
    replicas: the replicas' gate and up, if the transfer does not bring them.
    tuning: of the kernel that the transfer rides in.
    replica_tuning: of the other one.

  Returns:
    As ``gated_matmul``, and the result of the transfer.

  Raises:
    NotImplementedError: as ``gated_matmul``.
    ValueError: likewise.
  """
  run = functools.partial(
    _multiply,
    group_size_P=group_size_P,
    activation=activation,
    keep_hidden=keep_hidden,
  )

  def of(gate: Array, up: Array) -> Contraction:
    return Contraction(rows_CK, (gate, up), (gate[:0], up[:0]))

  num_home, num_slots = home_gate_MKN.shape[0], group_size_P.shape[0]
  first, transferred = run(
    of(home_gate_MKN, home_up_MKN), tuning=tuning, slots=range(num_home), beside=transfer
  )
  gate, up, *_ = transferred if replicas is None else replicas
  rest = range(num_home, num_slots)
  whole, _ = run(of(gate, up), tuning=replica_tuning, slots=rest, into=first)
  return whole, transferred


def _multiply(
  contraction: Contraction,
  group_size_P: Array,
  activation: Callable[[Array], Array],
  keep_hidden: bool,
  tuning: MatmulTuning | None,
  *,
  slots: range | None = None,
  into: Gated | None = None,
  beside: Transfer | None = None,
) -> tuple[Gated, Any]:
  elementwise(activation, (64, 64))  # only whether it is

  def inner(gate: Any, up: Any) -> Any:
    activated = elementwise(activation, gate.shape)(gate.astype(jnp.float32))
    return (activated * up.astype(jnp.float32)).astype(jnp.bfloat16)

  hidden = (lambda gate, up: gate, lambda gate, up: up)
  results, transferred = multiply_rows(
    [contraction],
    group_size_P,
    transpose_rhs=False,
    results=[inner, *(hidden if keep_hidden else ())],
    tuning=tuning,
    kernel_name="gated_matmul",
    approx_math=True,  # of 11 bits or more: the result has 8
    slots=slots,
    into=jax.tree.leaves(into),
    beside=beside,
  )
  return Gated(*results, *(() if keep_hidden else (None, None))), transferred


def elementwise(
  activation: Callable[[Array], Array], shape: tuple[int, ...]
) -> Callable[[Array], Array]:
  """The activation of float32 of this shape, as operations that Mosaic GPU has.

  Calls are inlined: it knows no custom derivatives.

  Raises:
    NotImplementedError: an operation that it does not have, or that is not elementwise.
  """
  closed: Any = jax.make_jaxpr(activation)(jax.ShapeDtypeStruct(shape, jnp.float32))
  if [(x.shape, x.dtype) for x in closed.out_avals] != [(shape, jnp.float32)]:
    raise NotImplementedError(
      f"activation: expected float32 of its argument's shape, got {closed.out_avals}"
    )
  _expect_elementwise(closed, shape)
  return lambda x: _evaluate(closed, [x])[0]


def _inlined(eqn: core.JaxprEqn) -> Any:
  """The closed jaxpr that an operation calls, if all that it does is to call, else ``None``."""
  for name in ("jaxpr", "call_jaxpr"):
    inner = eqn.params.get(name)
    if hasattr(inner, "jaxpr") and hasattr(inner, "consts"):
      return inner
  return None


def _expect_elementwise(closed: Any, shape: tuple[int, ...]) -> None:
  if closed.consts:
    raise NotImplementedError(f"activation: expected no captured arrays, got {closed.consts}")
  shapes = {x.aval.shape for eqn in closed.jaxpr.eqns for x in eqn.outvars}
  if strange := sorted(shapes - {(), shape}):
    raise NotImplementedError(f"activation: expected scalars and arrays of {shape}, got {strange}")
  for eqn in closed.jaxpr.eqns:
    name, inner = eqn.primitive.name, _inlined(eqn)
    if inner is not None:
      _expect_elementwise(inner, shape)
    elif name not in _ELEMENTWISE and (name != "broadcast_in_dim" or eqn.invars[0].aval.shape):
      raise NotImplementedError(f"activation: expected elementwise operations, got {name}")


def _evaluate(closed: Any, args: list[Any]) -> list[Any]:
  jaxpr = closed.jaxpr
  values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))

  def read(x: Any) -> Any:
    return x.val if isinstance(x, core.Literal) else values[x]

  for eqn in jaxpr.eqns:
    operands = [read(x) for x in eqn.invars]
    if (inner := _inlined(eqn)) is not None:
      results = _evaluate(inner, operands)
    else:
      results = eqn.primitive.bind(*operands, **eqn.params)
      results = results if eqn.primitive.multiple_results else [results]
    values |= zip(eqn.outvars, results, strict=True)
  return [read(x) for x in jaxpr.outvars]
