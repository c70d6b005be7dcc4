"""What a function does where JAX takes gradients through it, and what it does elsewhere.

Only JAX knows that, and it says so by which function of a ``custom_vjp`` it traces.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ultraep_jax.types import Array


@jax.custom_vjp
def taken(operands: Any) -> Array:
  """``[]`` int32: 1 where JAX differentiates by any of these, which are not used, and 0 elsewhere.

  XLA knows it when it compiles.
  """
  del operands
  return jnp.int32(0)


taken.defvjp(lambda _: (jnp.int32(1), None), lambda *_: (None,))


def choose[T](plain: Callable[..., T], differentiated: Callable[..., T]) -> Callable[..., T]:
  """``differentiated`` where JAX takes gradients, and ``plain`` elsewhere.

  Both compute the same, by programs of their own: shapes, and what runs at all, cannot depend on
  a number such as ``taken``. They close over no array. What they return has the same types and
  varies over the same mesh axes, and ``jax.vmap`` maps the same of it.

  >>> call = choose(lambda x: 2 * x, lambda x: x + x)
  >>> float(call(3.0)), float(jax.grad(call)(3.0))
  (6.0, 2.0)
  """
  call: Any = jax.custom_vjp(lambda *operands: plain(*operands))
  call.defvjp(lambda *operands: jax.vjp(differentiated, *operands), lambda vjp, grad: vjp(grad))
  return call
