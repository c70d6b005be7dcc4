"""Work that each device does on its own rows of a batch."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ultraep_jax.mesh import is_explicit


def row_axes() -> tuple[str, ...]:
  """The axes of the mesh in context that divide rows: ``"data"``, if it is there, ``"expert"``."""
  mesh = jax.sharding.get_abstract_mesh()
  return tuple(axis for axis in ("data", "expert") if axis in mesh.axis_names)


def by_rows(
  function: Callable[..., Any], *args: Any, specs: tuple[PartitionSpec, ...], out_specs: Any
) -> Any:
  """Calls a function that does not communicate on every device, with its part of the arguments.

  Nothing has to know how to partition what the function does, loops with a length of their own
  on every device among it.

  Args:
    function: of one device's part of ``args``, pytrees of arrays.
    *args: global arrays; on Explicit meshes they are resharded where they need to be.
    specs: of ``args``.
    out_specs: of the results.
  """
  if is_explicit():
    args = tuple(
      jax.tree.map(lambda leaf, spec=spec: jax.reshard(leaf, spec), arg)
      for arg, spec in zip(args, specs, strict=True)
    )
  # check_vma: the carries of loops would need a cast each.
  return jax.shard_map(function, in_specs=specs, out_specs=out_specs, check_vma=False)(*args)
