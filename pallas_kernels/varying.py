"""Which mesh axes arrays are typed as varying over (``check_vma``), where kernels need it."""

from collections.abc import Iterable, Sequence

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_kernels.support import Array


def axes_of(*arrays: Array) -> frozenset[str]:
  """The axes that any array varies over; none without ``check_vma``."""
  return frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))


def vary(array: Array, axes: Iterable[str]) -> Array:
  """Types an array as varying over ``axes`` too."""
  missing = tuple(sorted(frozenset(axes) - axes_of(array)))
  return lax.pcast(array, missing, to="varying") if missing else array


def vary_alike(*arrays: Array) -> list[Array]:
  """Types all arrays as varying over the axes of any; a kernel's outputs take theirs."""
  axes = axes_of(*arrays)
  return [vary(array, axes) for array in arrays]


def untyped(arrays: Sequence[Array]) -> list[Array]:
  """Hides from the type what arrays vary over, which kernels demand of mutable references.

  Nothing else may see the result: ``vary`` what comes out of the kernel.
  """
  return [_untyped_p.bind(array) if axes_of(array) else array for array in arrays]


_untyped_p = Primitive("untyped")
_untyped_p.def_abstract_eval(
  lambda aval: aval.update(manual_axis_type=jax.sharding.ManualAxisType())
)
mlir.register_lowering(_untyped_p, lambda _, value: [value])
