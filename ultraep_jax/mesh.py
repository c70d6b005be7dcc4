"""Mesh axes: which tokens are on, Explicit ones, what varies over manual ones, agreement."""

from collections.abc import Iterable, Sequence

import jax
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from ultraep_jax.types import Array

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def is_explicit() -> bool:
  """Whether the mesh in context has Explicit axes, so that arrays' types have a sharding."""
  return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def shard(value: Array, spec: PartitionSpec) -> Array:
  """Shards over the mesh in context, whether its axes are Auto or Explicit."""
  if is_explicit():
    return jax.reshard(value, spec)
  return lax.with_sharding_constraint(value, spec)


def resolve_token_axes(
  mesh: Mesh, axis_name: str, token_axes: Sequence[str] | None
) -> tuple[str, ...]:
  """The mesh axes of tokens, ``None`` resolved.

  Raises:
    ValueError: the mesh does not have the axes, or other kinds of axes than all Auto or Explicit.
  """
  if axis_name not in mesh.axis_names:
    raise ValueError(
      f"axis_name: expected an axis of the mesh, {mesh.axis_names}, got {axis_name!r}; set one "
      'with jax.set_mesh(jax.make_mesh((ranks,), ("expert",)))'
    )
  if AxisType.Manual in mesh.axis_types:
    raise ValueError(
      f"mesh: expected no manual axis, got {mesh}; inside shard_map call ultraep_jax.moe"
    )
  if len(set(mesh.axis_types)) > 1:
    raise ValueError(f"mesh: expected all axes Auto or all Explicit, got {mesh}")
  if token_axes is None:
    token_axes = [axis for axis in ("data",) if axis in mesh.axis_names] + [axis_name]
  if axis_name not in token_axes or not set(token_axes) <= set(mesh.axis_names):
    raise ValueError(
      f"token_axes: expected axes of {mesh.axis_names} with {axis_name!r} among them, "
      f"got {tuple(token_axes)}"
    )
  return tuple(token_axes)


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
