"""Parameters of a model, from a checkpoint straight to sharded arrays."""

import concurrent.futures
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ultraep_jax.config import check_int
from ultraep_jax.models.checkpoint import Checkpoint
from ultraep_jax.models.sources import Source, check_sources
from ultraep_jax.tools.progress import byte_progress

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

  Each process reads what its own devices hold, once for devices that hold the same, and makes one
  shard of one parameter at a time in host memory. It checks everything before it reads data.

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
      be read; ``sources`` and ``shapes`` do not fit; or ``threads`` is below 1.
    OSError: a file was cut short since the checkpoint was opened.
  """
  check_int("threads", threads, minimum=1)
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
  kind = shape.sharding.memory_kind
  arrays = []
  for ranges, devices in local_shards(shape).items():
    places = [jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for device in devices]
    shard = _read_shard(checkpoint, source, ranges, shape.dtype, pool, advance)
    arrays += [jax.device_put(shard, place) for place in places]
    # Else the shards of all devices would be in host memory, as with make_array_from_callback.
    # They cannot share a buffer: an array on a CPU device may be the host's memory itself.
    jax.block_until_ready(arrays)
    del shard
  return jax.make_array_from_single_device_arrays(
    shape.shape, shape.sharding, arrays, dtype=shape.dtype
  )


def _read_shard(
  checkpoint: Checkpoint,
  source: Source,
  ranges: Sequence[range],
  dtype: np.dtype,
  pool: concurrent.futures.Executor,
  advance: Callable[[int], object],
) -> np.ndarray:
  shard = np.empty([len(r) for r in ranges], dtype)
  futures = {
    pool.submit(checkpoint.read_into, piece.out, piece.name, piece.index): piece
    for piece in _pieces(checkpoint, source, ranges, shard)
  }
  try:
    for future in concurrent.futures.as_completed(futures):
      future.result()
      advance(checkpoint.nbytes(futures[future].name, futures[future].index))
  finally:
    for future in futures:
      future.cancel()
  return shard


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
  index = (*[slice(0, 1)] * source.lead, *index)
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
    out = out[(*(None,) * source.lead, ...)]
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
