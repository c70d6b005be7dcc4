"""Conditions in kernels that compile quickly.

``pl.when`` and ``astype`` convert booleans to integers, and for each such conversion that it lowers
Mosaic GPU starts a process that asks ptxas for its version (jax 0.11.2 to 0.12.0). A layer's
gradient has 900 of them, most of its time to compile. Selecting an integer asks nobody.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.support import Array


def when(condition: Array | bool) -> Callable[[Callable[[], None]], None]:
  """``pl.when``: calls the decorated function if the condition holds."""

  def run(body: Callable[[], None]) -> None:
    if not isinstance(condition, bool):
      cond(condition, body, lambda: None)
    elif condition:
      body()

  return run


def cond(condition: Array, holds: Callable[[], Any], fails: Callable[[], Any]) -> Any:
  """``lax.cond`` without operands."""
  return lax.switch(one_if(condition), [fails, holds])


def for_size(count: Array, sizes: Sequence[int], body: Callable[[int], None]) -> None:
  """Calls ``body`` with the smallest of ascending sizes that is ``count`` or more, or the last."""
  larger = sum((one_if(count > size) for size in sizes[:-1]), jnp.int32(0))
  lax.switch(larger, [functools.partial(body, size) for size in sizes])


def one_if(condition: Array) -> Array:
  """int32, 1 where a scalar condition holds."""
  return lax.select(condition, jnp.int32(1), jnp.int32(0))
