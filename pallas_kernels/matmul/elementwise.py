"""Functions as elementwise operations that Mosaic GPU has in registers."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from pallas_kernels.support import Array

_ELEMENTWISE = frozenset(
  {
    *("abs", "add", "clamp", "cos", "div", "erf", "exp", "exp2", "log", "one_minus_square"),
    *("logistic", "max", "min", "mul", "neg", "rsqrt", "sign", "sin", "sqrt", "square", "sub"),
    *("tanh", "and", "eq", "ge", "gt", "le", "lt", "ne", "not", "or", "select_n"),
    "convert_element_type",
  }
)


def _integer_power(x: Array, *, y: int) -> Array:
  """Mosaic has those above 1, and -1."""
  if y == 0:
    return jnp.ones_like(x)
  power = x if abs(y) == 1 else lax.integer_pow(x, abs(y))
  return power if y > 0 else 1 / power


def _converted(x: Array, *, new_dtype: Any, **params: Any) -> Array:
  """Mosaic cannot convert to booleans."""
  if new_dtype == jnp.bool_:
    return lax.ne(x, lax.full_like(x, 0))
  return lax.convert_element_type_p.bind(x, new_dtype=new_dtype, **params)


# What Mosaic lacks, or has for some parameters, and functions or their derivatives have.
_INSTEAD: dict[str, Callable[..., Any]] = {
  "add_any": lax.add,
  "convert_element_type": _converted,
  "copy": lambda x: x,
  "integer_pow": _integer_power,
  # What JAX makes of the gradient of ``x + 1`` inside ``shard_map``.
  "reshard": lambda x, **_: x,
  "stop_gradient": lambda x: x,
}


def elementwise(
  function: Callable[..., Array], arguments: int, shape: tuple[int, ...]
) -> Callable[..., Array]:
  """Rewrites a function of float32 arrays of one shape in operations that Mosaic GPU has.

  Calls are inlined: it knows no custom derivatives.

  Args:
    function: elementwise.
    arguments: how many arrays it takes.
    shape: of each.

  Returns:
    A function of as many arrays.

  Raises:
    NotImplementedError: an operation that it does not have, or that is not elementwise.
  """
  operations = _operations(function, arguments, shape)
  return lambda *args: operations(*args)[0]


def elementwise_vjp(
  function: Callable[..., Array], arguments: int, shape: tuple[int, ...]
) -> Callable[..., list[Array]]:
  """``(*arguments, gradient) -> [value, *gradients of the arguments]``, as ``elementwise``."""

  def value_and_grads(*args: Array) -> tuple[Array, ...]:
    value, vjp = jax.vjp(function, *args[:-1])
    return value, *vjp(args[-1])

  return _operations(value_and_grads, arguments + 1, shape)


def _operations(
  function: Callable[..., Any], arguments: int, shape: tuple[int, ...]
) -> Callable[..., list[Array]]:
  """All results of a function, or why Mosaic GPU has not its operations."""

  def traced(shape: tuple[int, ...]) -> Any:
    try:
      return jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(shape, jnp.float32)] * arguments)
    except (TypeError, ValueError) as error:  # as of a constant for each of an expert's columns
      raise NotImplementedError(f"activation: expected one of {shape}, got {error}") from error

  closed = traced(shape)
  if {(x.shape, x.dtype) for x in closed.out_avals} != {(shape, jnp.dtype(jnp.float32))}:
    raise NotImplementedError(
      f"activation: expected float32 of its argument's shape, got {closed.out_avals}"
    )
  _expect_elementwise(closed, shape)
  # A kernel calls it with a tile, whose sizes are not those of the experts.
  larger = traced(tuple(2 * size for size in shape))
  if [*_numbers(closed)] != [*_numbers(larger)]:
    raise NotImplementedError("activation: expected no number that depends on its argument's shape")
  return lambda *args: _evaluate(closed, list(args))


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
    elif name == "broadcast_in_dim" and not eqn.invars[0].aval.shape:
      continue  # of a scalar
    elif name == "select_n" and len(eqn.invars) > 3:
      raise NotImplementedError(f"activation: expected choices of 2, got {len(eqn.invars) - 1}")
    elif name not in _ELEMENTWISE and name not in _INSTEAD:
      raise NotImplementedError(f"activation: expected elementwise operations, got {name}")


def _numbers(closed: Any) -> Iterator[str]:
  """The constants in a program, as text, in which NaN equals itself."""
  for eqn in closed.jaxpr.eqns:
    if (inner := _inlined(eqn)) is not None:
      yield from _numbers(inner)
    yield from (repr(x.val) for x in eqn.invars if isinstance(x, core.Literal))


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
      bind: Any = _INSTEAD.get(eqn.primitive.name, eqn.primitive.bind)
      results = bind(*operands, **eqn.params)
      results = results if eqn.primitive.multiple_results else [results]
    values |= zip(eqn.outvars, results, strict=True)
  return [read(x) for x in jaxpr.outvars]
