"""Which tensors on disk make up a parameter, and whether a checkpoint has them."""

import fnmatch
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ultraep_jax.models.checkpoint import Checkpoint
from ultraep_jax.models.problems import SHOWN, summary


class Source(NamedTuple):
  """Where a parameter comes from.

  Attributes:
    names: of the tensors on disk, one for each index of the parameter's leading axes (layers,
      experts): nested sequences or an object array of that shape; a string for a plain tensor.
    transpose: the last two axes are swapped: on disk [out, in], in the parameter [in, out].
    lead: axes of size 1 that the tensors have before those of the parameter.
  """

  names: Any
  transpose: bool = False
  lead: int = 0

  def array(self) -> np.ndarray:
    """The names as an object array whose shape is that of the leading axes.

    Raises:
      ValueError: they are not strings, e.g. as there are more of some experts than of others.
    """
    names = np.asarray(self.names, dtype=object)
    for name in names.flat:
      if not isinstance(name, str):
        raise ValueError(f"names: expected strings in a regular array, got {name!r:.80}")
    return names


def check_sources[K: Hashable](
  checkpoint: Checkpoint,
  sources: Mapping[K, Source],
  shapes: Mapping[K, jax.ShapeDtypeStruct],
  ignored: Sequence[str],
) -> None:
  """Checks that a checkpoint holds what the parameters need, and nothing beside it.

  Raises:
    ValueError: with all that is wrong, of each kind the first few and the count.
  """
  missing: list[str] = []
  kinds: dict[str, list[str]] = {
    "parameters without a source": [_text(p) for p in shapes if p not in sources],
    "sources without a parameter": [_text(p) for p in sources if p not in shapes],
    "parameters without a sharding": [_text(p) for p, s in shapes.items() if s.sharding is None],
    "missing tensors": missing,
    "unreadable tensors": [],
    "tensors of another shape": [],
    "tensors of another dtype": [],
    "unexpected tensors": [],
  }
  used: set[str] = set()
  for path in [path for path in shapes if path in sources]:
    names = sources[path].array()
    shape = shapes[path]
    if names.shape != shape.shape[: names.ndim]:
      kinds["tensors of another shape"].append(
        f"{_text(path)}: expected names of shape {shape.shape[: names.ndim]}, got {names.shape}"
      )
    expected = shape.shape[names.ndim :]
    if sources[path].transpose:
      expected = (*expected[:-2], *reversed(expected[-2:]))
    expected = (*(1,) * sources[path].lead, *expected)
    for name in names.flat:
      used.update(checkpoint.parts(name))
      if name not in checkpoint.tensors:
        missing.append(name)
      elif problem := checkpoint.problem(name):
        kinds["unreadable tensors"].append(problem)
      else:
        tensor = checkpoint.tensors[name]
        if tensor.shape != expected:
          kinds["tensors of another shape"].append(
            f"{name} for {_text(path)}: expected {expected}, got {tensor.shape}"
          )
        if tensor.dtype != shape.dtype and not (_is_float(tensor.dtype) and _is_float(shape.dtype)):
          kinds["tensors of another dtype"].append(
            f"{name} for {_text(path)}: expected one that becomes {shape.dtype}, got {tensor.dtype}"
          )
  kinds["unexpected tensors"] = [
    name for name in checkpoint.tensors if name not in used and not is_ignored(name, ignored)
  ]
  # The search for close names takes long, so only for those that are shown.
  missing[:SHOWN] = [checkpoint.problem(name) or name for name in missing[:SHOWN]]
  if report := summary(kinds):
    raise ValueError(f"checkpoint {checkpoint.folder}: expected the model's tensors, got\n{report}")


def is_ignored(name: str, patterns: Sequence[str]) -> bool:
  return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_float(dtype: Any) -> bool:
  return jnp.issubdtype(dtype, jnp.floating)


def _text(path: Hashable) -> str:
  return ".".join(map(str, path)) if isinstance(path, tuple) else str(path)
