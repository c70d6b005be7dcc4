"""Finds barriers that a kernel of one warpgroup a block lacks, and indices outside of vectors.

The interpreter runs the 128 threads in step, so a thread sees what another one has just written
even where a GPU would need a barrier. ``watched`` notes which thread touches which element with
the functions of ``pallas_kernels.warps``, ``scatter`` and ``clusters``. Wrap the kernel in a
function of its own: only what is traced inside the context is watched. Clusters have one block.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import mosaic_interpret
import numpy as np
from jax._src import callback
from mosaic_interpret import gpu_callbacks, jaxpr_interpret

from pallas_kernels.warp import clusters, scatter, warps

_UNORDERED = ("read", "add", "min", "max")  # what threads may do to one element side by side
_PEER = -1  # stands for the threads of other blocks, which only barriers of a cluster join


class Watch:
  """Accesses since the last barrier, and the races among them."""

  def __init__(self) -> None:
    self.accesses: dict[Any, set[tuple[int, str, int]]] = {}
    self.arrived: dict[Any, set[tuple[int, str, int]]] = {}  # those before the cluster's barrier
    self.barriers = 0
    self.races: set[tuple[str, str, str]] = set()

  def join(self, token: Any) -> Any:
    for place, others in list(self.accesses.items()):
      self.accesses[place] = {access for access in others if access[0] == _PEER}
    self.barriers += 1
    return token

  def arrive(self, token: Any) -> Any:
    self.arrived = {place: set(others) for place, others in self.accesses.items()}
    return token

  def wait(self, token: Any) -> Any:
    for place, others in self.arrived.items():
      self.accesses.get(place, set()).difference_update(others)
    return token

  def touch(self, effect: str, line: str, size: int, token: Any, key: Any, *args: Any) -> Any:
    kind, from_peer = effect.removesuffix("_at_peer"), effect.endswith("_at_peer")
    index, value, mask = (np.broadcast_to(arg, warps.THREADS).tolist() for arg in args)
    vector = tuple(np.delete(np.asarray(key), mosaic_interpret._REFERENCES).tolist())
    for place in range(warps.THREADS):
      if not mask[place]:
        continue
      if not 0 <= index[place] < size:  # where the interpreter takes another element
        self.races.add((line, "outside", kind))
        continue
      thread, written = _PEER if from_peer else place, value[place]
      others = self.accesses.setdefault((vector, index[place]), set())
      for other, other_kind, other_written in others - {(thread, kind, written)}:
        same = kind == other_kind
        if other == thread or (same and (kind in _UNORDERED or written == other_written)):
          continue
        self.races.add((line, other_kind, kind))
      others.add((thread, kind, written))
    return token


def _line(traceback: Any) -> str:
  """Where the kernel calls what touches a vector, from the inside out."""
  tools = (warps.__file__, scatter.__file__, clusters.__file__)
  frames = [f for f in traceback.frames if "site-packages" not in f.file_name]
  return " < ".join(f"{f.function_name}:{f.line_num}" for f in frames if f.file_name not in tools)


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
  """Watches the kernels traced inside.

  Raises:
    AssertionError: on leaving, if two threads met at an element, one touched what lies outside of a
      vector, or no barrier was seen.
  """
  mosaic_interpret.install()
  watch, call, swap = Watch(), mosaic_interpret._call_twin, gpu_callbacks._swap
  shape = gpu_callbacks.TOKEN_SHAPE_DTYPE
  barriers = {"join_warpgroup": watch.join, "join_block": watch.join}
  barriers |= {"arrive_at_cluster": watch.arrive, "wait_for_cluster": watch.wait}

  def watched_call(self: Any, eqn: Any, token: Any, values: Any) -> Any:
    function, args = eqn.params["mgpu_fn"], values()
    effect = getattr(function, "effect", "read")
    if effect in barriers:
      token = callback.io_callback(barriers[effect], shape, token)
    elif hasattr(eqn.invars[0].aval, "inner_aval"):
      line = _line(eqn.source_info.traceback)
      key, _ = jaxpr_interpret.resolve_ref(eqn.invars[0].aval, args[0], ())
      index, value, mask = (*args[1:4], 0, 1) if effect == "read" else args[1:4]
      (size,) = eqn.invars[0].aval.inner_aval.shape
      touch = functools.partial(watch.touch, effect, line, size)
      token = callback.io_callback(touch, shape, token, key, index, value, mask)
    return call(self, eqn, token, values)

  def joining_swap(*args: Any, **kwargs: Any) -> Any:
    watch.join(None)  # a store of Pallas has a barrier before it and after it
    return swap(*args, **kwargs)

  mosaic_interpret._call_twin, gpu_callbacks._swap = watched_call, joining_swap
  try:
    yield watch
  finally:
    mosaic_interpret._call_twin, gpu_callbacks._swap = call, swap
  assert watch.barriers and not watch.races, "\n".join(map(str, sorted(watch.races)))
