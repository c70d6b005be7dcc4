"""Mesh axes: whether they are Explicit, what varies over manual ones, and agreement across them."""

from collections.abc import Iterable

import jax
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from ultraep_jax.types import Array


def is_explicit() -> bool:
  """Whether the mesh in context has Explicit axes, so that arrays' types have a sharding."""
  return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def shard(value: Array, spec: PartitionSpec) -> Array:
  """Shards over the mesh in context, whether its axes are Auto or Explicit."""
  if is_explicit():
    return jax.reshard(value, spec)
  return lax.with_sharding_constraint(value, spec)


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


def mesh_max(value: Array, same_along: str | None = None) -> Array:
  """The maximum over every rank of every manual axis, the same on all of them.

  A loop that communicates must run equally often everywhere: token groups may plan
  differently, and some collectives and kernels synchronise the whole mesh.

  Args:
    value: of this rank.
    same_along: an axis along which all have the same value, and need not ask each other. That is
      believed, unless the value is typed as varying along it.
  """
  known = same_along if same_along not in varying_axes(value) else None
  axes = tuple(axis for axis in manual_axes() if axis != known)
  if not axes:
    return value
  # A cast to varying is free; without it pmax refuses values that vary over some axes only.
  return lax.pmax(to_varying(value, axes), axes)
