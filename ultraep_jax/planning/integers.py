"""Integer arithmetic that stays inside int32. Operands are not negative."""

from fractions import Fraction

import jax.numpy as jnp

from ultraep_jax.types import Array

INT32_MAX = 2**31 - 1


def ceil_div(value: Array, divisor: Array | int) -> Array:
  """``ceil(value / divisor)``."""
  return value // divisor + (value % divisor > 0).astype(jnp.int32)


def saturating_mul(left: Array, right: Array | int) -> Array:
  """``min(left * right, INT32_MAX)``."""
  fits = left <= INT32_MAX // jnp.maximum(right, 1)
  return jnp.where(fits, left * right, INT32_MAX)


def saturating_add(left: Array, right: Array) -> Array:
  """``min(left + right, INT32_MAX)``."""
  return left + jnp.minimum(right, INT32_MAX - left)


def simplest(factor: float, parts: int) -> Fraction:
  """The simplest fraction near a factor, at most ``parts``, that ``ceil_scale`` multiplies by.

  >>> simplest(1.01, 64)
  Fraction(101, 100)
  """
  return min(Fraction(factor), Fraction(parts)).limit_denominator(INT32_MAX // (3 * parts))


def ceil_scale(total: Array, factor: float, parts: int) -> Array:
  """``ceil(factor * total / parts)``, exact for the ``simplest`` fraction near ``factor``.

  Multiplies bit by bit, keeping quotient and remainder, so nothing exceeds ``total`` or int32. A
  factor above ``parts`` counts as ``parts``.

  >>> import jax.numpy as jnp
  >>> int(ceil_scale(jnp.int32(2**31 - 1), 1.01, 64))
  33889977
  """
  ratio = simplest(factor, parts)
  divisor = ratio.denominator * parts
  quotient = remainder = total * 0
  for bit in f"{ratio.numerator:b}":
    remainder = 2 * remainder + total % divisor * int(bit)
    quotient = 2 * quotient + total // divisor * int(bit) + remainder // divisor
    remainder %= divisor
  return quotient + (remainder > 0).astype(jnp.int32)
