"""Mesh axes: which tokens are on, Explicit ones, what varies over manual ones, agreement, order."""

import functools
import importlib
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from ultraep_jax.types import Array, AxisName

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def axes_of(axis_name: AxisName, name: str = "axis_name") -> tuple[str, ...]:
  """The mesh axes that make up one; TypeError, with the argument's name, if they cannot."""
  axes = (axis_name,) if isinstance(axis_name, str) else axis_name
  if not isinstance(axes, tuple) or not all(isinstance(axis, str) for axis in axes):
    raise TypeError(f"{name}: expected a str or a tuple of them, got {axis_name!r}")
  return axes


def axis_size(mesh: Mesh, axis_name: AxisName) -> int:
  """Ranks along an axis, or along several as one."""
  return math.prod(mesh.shape[axis] for axis in axes_of(axis_name))


def legacy_mesh() -> jax.sharding.Mesh | None:
  """The mesh of an enclosing ``with mesh:``, which JAX deprecates, where none is in context."""
  if not jax.sharding.get_abstract_mesh().empty:
    return None
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    resources = getattr(importlib.import_module("jax.interpreters.pxla"), "thread_resources", None)
  mesh = None if resources is None else resources.env.physical_mesh
  return None if mesh is None or mesh.empty else mesh


def is_explicit() -> bool:
  """Whether the mesh in context has Explicit axes, so that arrays' types have a sharding."""
  return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def shard(value: Array, spec: PartitionSpec) -> Array:
  """Shards over the mesh in context, whether its axes are Auto or Explicit."""
  if is_explicit():
    return jax.reshard(value, spec)
  return lax.with_sharding_constraint(value, spec)


def checks_vma(mesh: Mesh, used: Iterable[str | None]) -> bool:
  """``check_vma`` of a ``shard_map`` that uses such axes of the mesh.

  An axis beside them may be a pipeline's, over which ``jax.vmap(..., spmd_axis_name=...)`` maps
  stages. JAX (0.11 and 0.12) then fails to type loops and conditionals. Without types, gradients
  are summed over such an axis, as means, where it maps nothing.
  """
  return set(mesh.axis_names) <= set(used)


def resolve_token_axes(
  mesh: Mesh, axis_name: AxisName, token_axes: Sequence[str] | None
) -> tuple[str, ...]:
  """The mesh axes of tokens, ``None`` resolved.

  Raises:
    ValueError: the mesh does not have the axes, or other kinds of axes than all Auto or Explicit.
    TypeError: no mesh, or no names of axes.
  """
  check_axis_name(mesh, axis_name)
  if AxisType.Manual in mesh.axis_types:
    raise ValueError(
      f"mesh: expected no manual axis, got {mesh}; inside a shard_map that {axis_name!r} is manual "
      "in, too, call ultraep_jax.moe"
    )
  if len(set(mesh.axis_types)) > 1:
    raise ValueError(f"mesh: expected all axes Auto or all Explicit, got {mesh}")
  axes = axes_of(axis_name)
  if token_axes is None:
    data = [axis for axis in ("data",) if axis in mesh.axis_names and axis not in axes]
    return *data, *axes
  given: Any = tuple(token_axes) if isinstance(token_axes, list) else token_axes
  found = axes_of(given, "token_axes")
  if not set(axes) <= set(found) <= set(mesh.axis_names) or len(set(found)) < len(found):
    raise ValueError(
      f"token_axes: expected distinct axes of {mesh.axis_names} with {axis_name!r} among them, "
      f"got {found}"
    )
  return found


def check_axis_name(mesh: Mesh, axis_name: AxisName) -> None:
  """Raises unless the mesh has the experts' axis, or the axes, in its own order.

  Raises:
    ValueError: it has not.
    TypeError: no mesh, or no names of axes.
  """
  axes = axes_of(axis_name)
  if not isinstance(mesh, Mesh):
    raise TypeError(f"mesh: expected a Mesh, got {type(mesh).__name__}")
  if mesh.empty:
    raise ValueError(
      f"mesh: expected a mesh with axis {axis_name!r} in context (jax.set_mesh), got none; on one "
      f"device: jax.set_mesh(jax.make_mesh({(1,) * len(axes)}, {axes}))"
    )
  if not axes or axes != tuple(axis for axis in mesh.axis_names if axis in axes):
    several = "" if len(axes) == 1 else ", or several in this order"
    raise ValueError(
      f"axis_name: expected an axis of the mesh, {mesh.axis_names}{several}, got {axis_name!r}"
    )


def varying_axes(*trees: object) -> frozenset[str]:
  """The manual axes over which any leaf is typed as varying (empty without ``check_vma``)."""
  axes: frozenset[str] = frozenset()
  for leaf in jax.tree.leaves(trees):
    axes |= frozenset(jax.typeof(leaf).manual_axis_type.varying)
  return axes


def to_varying[T](tree: T, axes: Iterable[str]) -> T:
  """Types every leaf as varying over ``axes``, whatever it varied over before."""
  axes = tuple(axes)

  def cast(leaf: Array) -> Array:
    known = jax.typeof(leaf).manual_axis_type.varying
    missing = tuple(axis for axis in axes if axis not in known)
    return lax.pcast(leaf, missing, to="varying") if missing else leaf

  return jax.tree.map(cast, tree)


def manual_axes() -> tuple[str, ...]:
  """The mesh axes that the enclosing ``shard_map`` made manual, in mesh order."""
  return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def mesh_max(value: Array, same_along: AxisName = ()) -> Array:
  """The maximum over every rank of every manual axis, the same on all of them.

  A loop that communicates must run equally often everywhere: token groups may plan
  differently, and some collectives and kernels synchronise the whole mesh.

  Args:
    value: of this rank.
    same_along: an axis along which all have the same value, and need not ask each other. That is
      believed, unless the value is typed as varying along it.
  """
  known = frozenset(axes_of(same_along)) - varying_axes(value)
  axes = tuple(axis for axis in manual_axes() if axis not in known)
  if not axes:
    return value
  # A cast to varying is free; without it pmax refuses values that vary over some axes only.
  return lax.pmax(to_varying(value, axes), axes)


def after(value: Array, count: Array, *earlier: Array) -> Array:
  """The same value, for a portable collective that must follow those which made ``earlier``.

  In a program that JAX's persistent cache gave back, XLA:CPU runs a loop's collectives beside
  others that do not need its results, on each rank in an order of its own. Ranks then wait for each
  other for ever, or take what another exchange of the same kind brought (seen in jax 0.11.2 and
  0.12.0). It drops barriers before that, so this is a select on what is never true: that ``count``,
  a scalar, is negative. Only the data say that it is not, so no simplification can find it out.
  """
  firsts = (array.reshape(-1)[0] for array in earlier if array.size)
  any_of_them = functools.reduce(jnp.logical_or, (first > 0 for first in firsts), jnp.bool_(False))
  return jnp.where(any_of_them & (count < 0), jnp.zeros((), value.dtype), value)
