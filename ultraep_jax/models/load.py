"""Parameters of a model, from a checkpoint straight to sharded arrays."""

import concurrent.futures
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ultraep_jax.models.checkpoint import Checkpoint
from ultraep_jax.models.sources import Source, check_sources
from ultraep_jax.progress import byte_progress

PIECE_BYTES = 2**21  # a thread reads and converts at a time: in its cache, and enough for a disk


def load_params[K: Hashable](
  checkpoint: Checkpoint,
  sources: Mapping[K, Source],
  shapes: Mapping[K, jax.ShapeDtypeStruct],
  *,
  ignored: Sequence[str] = (),
  threads: int = 8,
) -> dict[K, jax.Array]:
  """Reads parameters as sharded arrays.

  Each process reads what its own devices hold, once for devices that hold the same, and keeps one
  shard of one parameter in host memory at a time. It checks everything before it reads data.

  Args:
    checkpoint: to read from.
    sources: per parameter, the tensors on disk.
    shapes: per parameter of ``sources``, its shape, dtype and sharding. Floating point tensors are
      converted to the dtype; FP8 weights are multiplied by their factors in float32 first.
    ignored: patterns (`fnmatch`) of tensors that the checkpoint may hold beside those of
      ``sources``, e.g. ``"model.layers.61.*"``.
    threads: that read and convert.

  Returns:
    An array for each of ``shapes``.

  Raises:
    ValueError: tensors are missing, unexpected, of another shape than the parameters need or cannot
      be read; or ``sources`` and ``shapes`` do not fit.
    OSError: a file was cut short since the checkpoint was opened.
  """
  check_sources(checkpoint, sources, shapes, ignored)
  total = sum(
    checkpoint.nbytes(name, index)
    for path, shape in shapes.items()
    for ranges in local_shards(shape)
    for _, name, index in _slices(sources[path], ranges)
  )
  with (
    concurrent.futures.ThreadPoolExecutor(threads) as pool,
    byte_progress(total, "load") as advance,
  ):
    return {
      path: _load(checkpoint, sources[path], shape, pool, advance) for path, shape in shapes.items()
    }


def local_shards(shape: jax.ShapeDtypeStruct) -> dict[tuple[range, ...], list[Any]]:
  """What the devices of this process hold of a parameter: each shard, and the devices with it."""
  assert shape.sharding is not None
  shards: dict[tuple[range, ...], list[Any]] = {}
  for device, index in shape.sharding.addressable_devices_indices_map(shape.shape).items():
    assert index is not None
    ranges = tuple(range(*s.indices(n)) for s, n in zip(index, shape.shape, strict=True))
    shards.setdefault(ranges, []).append(device)
  return shards


def _load(
  checkpoint: Checkpoint,
  source: Source,
  shape: jax.ShapeDtypeStruct,
  pool: concurrent.futures.Executor,
  advance: Callable[[int], object],
) -> jax.Array:
  assert shape.sharding is not None
  arrays = []
  for ranges, devices in local_shards(shape).items():
    values = np.empty([len(r) for r in ranges], shape.dtype)
    futures = {
      pool.submit(checkpoint.read_into, piece.out, piece.name, piece.index): piece
      for piece in _pieces(checkpoint, source, ranges, values)
    }
    try:
      for future in concurrent.futures.as_completed(futures):
        future.result()
        piece = futures[future]
        advance(checkpoint.nbytes(piece.name, piece.index))
    finally:
      for future in futures:
        future.cancel()
    for device in devices:
      place = jax.sharding.SingleDeviceSharding(device, memory_kind=shape.sharding.memory_kind)
      arrays.append(jax.device_put(values, place))
    # Or the shards of all devices would be in host memory, as in make_array_from_callback.
    jax.block_until_ready(arrays)
  return jax.make_array_from_single_device_arrays(
    shape.shape, shape.sharding, arrays, dtype=shape.dtype
  )


class _Piece(NamedTuple):
  """Rows of a tensor on disk, and where they go."""

  name: str
  index: tuple[slice, ...]
  out: np.ndarray


def _slices(
  source: Source, ranges: Sequence[range]
) -> Iterator[tuple[tuple[int, ...], str, tuple[slice, ...]]]:
  """For each tensor that a shard needs: its place along the lead axes, its name, its slice."""
  names = source.array()
  index = tuple(slice(r.start, r.stop) for r in ranges[names.ndim :])
  if source.transpose:
    index = (*index[:-2], index[-1], index[-2])
  lead = ranges[: names.ndim]
  for place in itertools.product(*(range(len(r)) for r in lead)):
    yield place, names[tuple(r[p] for r, p in zip(lead, place, strict=True))], index


def _pieces(
  checkpoint: Checkpoint, source: Source, ranges: Sequence[range], values: np.ndarray
) -> Iterator[_Piece]:
  """Cuts what a shard needs along the rows on disk, at multiples of an FP8 block's rows."""
  for place, name, index in _slices(source, ranges):
    out = values[(*place, ...)]
    if source.transpose:
      out = out.swapaxes(-1, -2)
    if not index:
      yield _Piece(name, index, out)
      continue
    rows = index[0]
    step = PIECE_BYTES // max(checkpoint.nbytes(name, index) // max(len(out), 1), 1)
    block = checkpoint.block[0] if checkpoint.block else 1
    step = max(step // block, 1) * block
    starts = range(rows.start // step * step, rows.stop, step)
    for start in starts:
      cut = slice(max(start, rows.start), min(start + step, rows.stop))
      yield _Piece(name, (cut, *index[1:]), out[cut.start - rows.start : cut.stop - rows.start])
