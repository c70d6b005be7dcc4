"""The compiled programs of an engine: nothing here can compile after ``compile``."""

import concurrent.futures
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ultraep_jax.mesh import shard
from ultraep_jax.packed import PackedBatch, PrefillResult
from ultraep_jax.serve.config import EngineConfig
from ultraep_jax.serve.packing import Packing, aligned
from ultraep_jax.tools.progress import progress
from ultraep_jax.types import Array, LayerStats

_COMPILE_WORKERS = 4
# Where XLA may use Triton's matmuls, it copies a layer's weights out of their stack for them, also
# if it then finds cuBLAS faster (docs/lab/prefill.md: what that took). Other backends ignore this.
_COMPILER_OPTIONS: Any = {"xla_gpu_enable_triton_gemm": False}


class Outputs(NamedTuple):
  """What one batch leaves on the devices.

  Attributes:
    token_BR: int32, the likeliest next token of each request.
    finite_BR: bool, whether all its logits are finite.
    logits_BRV: float32, or None if the engine does not return them.
    cache: ``[layers, B, T, ...]``, or None if the engine does not return it.
    stats: of the MoE layers, or None.
    state: ``[layers, B, R, ...]``, or None if the engine does not return it or there is none.
  """

  token_BR: Array
  finite_BR: Array
  logits_BRV: Array | None
  cache: Any
  stats: LayerStats | None
  state: Any = None


class Programs:
  """One program per bucket, and those that cut requests out of its cache."""

  def __init__(self, model: nnx.Module, config: EngineConfig):
    """Takes the mesh in context and the model's parameters as they are.

    Raises:
      ValueError: the mesh is missing, has axes that divide no tokens, spans processes, or has
        other devices than the parameters.
    """
    self.config = config
    self.mesh = jax.sharding.get_mesh()
    self.axes = _token_axes(self.mesh)
    self.rows = self.mesh.size
    self._graphdef, self._state = nnx.split(model)
    _check_devices(self._state, self.mesh)
    self._by_row = NamedSharding(self.mesh, P(self.axes))
    devices = self._by_row.devices_indices_map((self.rows,))
    self._row_of = {device: index[0].start or 0 for device, index in devices.items()}
    self._prefill: dict[int, Callable[..., Outputs]] = {}
    self._cut: dict[tuple[int, int], Callable[..., Any]] = {}

  def compile(self) -> None:
    """Compiles everything, several programs at a time with a progress bar, and runs it once.

    What a model raises at trace time is raised here.
    """
    if self._prefill:
      return
    with jax.set_mesh(self.mesh):
      prefill = {bucket: self._lower_prefill(bucket) for bucket in self.config.buckets}
      cut = {
        (bucket, length): self._lower_cut((lowered.out_info.cache, lowered.out_info.state), length)
        for bucket, lowered in prefill.items()
        for length in lengths(bucket, self.config.alignment)
        if self.config.return_cache
      }
    with concurrent.futures.ThreadPoolExecutor(_COMPILE_WORKERS) as pool:
      waiting = {
        key: pool.submit(low.compile, _COMPILER_OPTIONS)
        for key, low in [*prefill.items(), *cut.items()]
      }
      done = {
        key: future.result() for key, future in progress(waiting.items(), "compile", "program")
      }
    self._prefill = {bucket: done[bucket] for bucket in prefill}
    self._cut = {key: done[key] for key in cut}
    try:
      self._run_each()
    except BaseException:
      self._prefill, self._cut = {}, {}
      raise

  def run(self, batch: PackedBatch) -> Outputs:
    """Starts the batch's program; the results are on their way."""
    placed = jax.device_put(batch, self._by_row)
    return self._prefill[batch.token_BT.shape[1]](self._state, placed)

  def cut(self, outputs: Outputs, packing: Packing, sizes: Sequence[int]) -> list[tuple[Any, Any]]:
    """Each request's part of a batch's cache and its state, on its row's device.

    They are ``[layers, P, ...]`` and ``[layers, ...]``. P is the least of
    ``lengths(bucket, alignment)`` that holds the request; what lies beyond its tokens is 0. One
    call of a program serves one request of every row.

    Args:
      outputs: of the batch.
      packing: of the batch.
      sizes: tokens of each request.
    """
    calls: dict[int, list[dict[int, int]]] = {}  # by P: the request of each row, call by call
    for i, (row, size) in enumerate(zip(packing.row, sizes, strict=True)):
      length = self._cut_length(packing.bucket, size)
      of_length = calls.setdefault(length, [])
      free = next((call for call in of_length if row not in call), None)
      if free is None:
        of_length.append({row: i})
      else:
        free[row] = i
    parts: list[Any] = [None] * len(sizes)
    for length, of_length in calls.items():
      for call in of_length:
        where_B3 = np.zeros((self.rows, 3), np.int32)
        for row, i in call.items():
          where_B3[row] = packing.start[i], sizes[i], packing.slot[i]
        kept = outputs.cache, outputs.state
        pieces = self._cut[packing.bucket, length](kept, self._put(where_B3))
        for row, i in call.items():
          parts[i] = jax.tree.map(functools.partial(self._on_row, row=row), pieces)
    return parts

  def _cut_length(self, bucket: int, size: int) -> int:
    return next(n for n in lengths(bucket, self.config.alignment) if n >= size)

  def _on_row(self, leaf: Array, row: int) -> Array:
    """One row's shard, which keeps no other alive."""
    return next(s.data for s in leaf.addressable_shards if self._row_of[s.device] == row)

  def _put(self, array: np.ndarray) -> Array:
    return jax.device_put(array, self._by_row)

  def _lower_prefill(self, bucket: int) -> jax.stages.Lowered:
    def shape(columns: int) -> Any:
      return jax.ShapeDtypeStruct((self.rows, columns), jnp.int32, sharding=self._by_row)

    # Only the cache is large, and no output has the shape of an input: donating gains nothing.
    per_token, per_request = shape(bucket), shape(self.config.max_requests)
    return jax.jit(self._step).lower(
      self._state, PackedBatch(per_token, per_token, per_token, per_request)
    )

  def _step(self, state: nnx.State, batch: PackedBatch) -> Outputs:
    result = nnx.merge(self._graphdef, state)(batch)
    if not isinstance(result, PrefillResult):
      raise TypeError(f"model: expected to return a PrefillResult, got {type(result).__name__}")
    self._check(result, batch)
    logits_BRV, kept = result.logits_BRV, (None, None)
    if self.config.return_cache:
      kept = jax.tree.map(
        lambda leaf: shard(leaf, P(None, self.axes)), (result.cache, result.state)
      )
    return Outputs(
      token_BR=shard(jnp.argmax(logits_BRV, axis=-1).astype(jnp.int32), P()),
      finite_BR=shard(jnp.all(jnp.isfinite(logits_BRV), axis=-1), P()),
      logits_BRV=logits_BRV if self.config.return_logits else None,
      cache=kept[0],
      stats=result.stats,
      state=kept[1],
    )

  def _check(self, result: PrefillResult, batch: PackedBatch) -> None:
    """What the engine needs of a model's results, at trace time."""
    logits, requests = result.logits_BRV, batch.last_BR.shape
    if not isinstance(logits, jax.Array):
      raise TypeError(f"logits_BRV: expected an array, got {type(logits).__name__}")
    if logits.ndim != 3 or logits.shape[:2] != requests or logits.dtype != jnp.float32:
      raise ValueError(
        f"logits_BRV: expected float32 [{requests[0]}, {requests[1]}, V], "
        f"got {logits.dtype} {list(logits.shape)}"
      )
    if not self.config.return_cache:
      return
    for leaf in jax.tree.leaves(result.cache):
      if leaf.shape[1:3] != batch.token_BT.shape:
        rows, bucket = batch.token_BT.shape
        raise ValueError(
          f"cache: expected arrays [layers, {rows}, {bucket}, ...], got {list(leaf.shape)}"
        )
    for leaf in jax.tree.leaves(result.state):
      if leaf.shape[1:3] != requests:
        raise ValueError(
          f"state: expected arrays [layers, {requests[0]}, {requests[1]}, ...], "
          f"got {list(leaf.shape)}"
        )

  def _lower_cut(self, kept: tuple[Any, Any], length: int) -> jax.stages.Lowered:
    """Of cache and state."""

    def local(kept: tuple[Any, Any], where_B3: Array) -> tuple[Any, Any]:
      start, size, slot = where_B3[0]
      iota_P = jnp.arange(length, dtype=jnp.int32)

      def piece(leaf: Array) -> Array:  # [layers, 1, T, ...]
        # Beyond the row's end indices are clipped, where a slice would move its start.
        rows = jnp.take(leaf[:, 0], start + iota_P, axis=1, mode="clip")
        inside = (iota_P < size).reshape(1, length, *(1,) * (rows.ndim - 2))
        return jnp.where(inside, rows, jnp.zeros((), rows.dtype))

      def of_request(leaf: Array) -> Array:  # [layers, 1, R, ...]
        return jnp.take(leaf[:, 0], slot, axis=1, mode="clip")

      cache, state = kept
      return jax.tree.map(piece, cache), jax.tree.map(of_request, state)

    by_row = P(self.axes)
    function = jax.shard_map(
      local, mesh=self.mesh, in_specs=(P(None, self.axes), by_row), out_specs=by_row
    )
    placed = NamedSharding(self.mesh, P(None, self.axes))
    shapes = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), kept
    )
    where = jax.ShapeDtypeStruct((self.rows, 3), jnp.int32, sharding=self._by_row)
    return jax.jit(function).lower(shapes, where)

  def _run_each(self) -> None:
    """Without requests; the first run of a program sets up communicators and more."""
    for bucket in progress(self.config.buckets, "first run", "program"):
      empty = np.zeros((self.rows, bucket), np.int32)
      last_BR = np.full((self.rows, self.config.max_requests), -1, np.int32)
      none = self._put(np.zeros((self.rows, 3), np.int32))
      out = self.run(PackedBatch(empty, empty, empty, last_BR))  # type: ignore[arg-type]
      for (of_bucket, _), program in self._cut.items():
        if of_bucket == bucket:
          jax.block_until_ready(program((out.cache, out.state), none))
      jax.block_until_ready(out)


def lengths(bucket: int, alignment: int) -> list[int]:
  """The padded lengths of caches: the alignment times powers of two, and the bucket.

  >>> lengths(96, 16)
  [16, 32, 64, 96]
  """
  assert aligned(bucket, alignment) == bucket
  powers = [alignment << i for i in range((bucket // alignment).bit_length())]
  return [n for n in powers if n < bucket] + [bucket]


def _token_axes(mesh: jax.sharding.Mesh) -> tuple[str, ...]:
  """The axes that divide the rows: all of the mesh's."""
  axes = tuple(axis for axis in ("data", "expert") if axis in mesh.axis_names)
  if "expert" not in axes or set(axes) != set(mesh.axis_names):
    raise ValueError(
      'mesh: expected one in context with the axis "expert", and "data" if need be, got axes '
      f"{mesh.axis_names}; set one with jax.set_mesh(jax.make_mesh((ranks,), ('expert',)))"
    )
  if any(device.process_index != jax.process_index() for device in mesh.devices.flat):
    raise ValueError("mesh: expected devices of this process, got some of others")
  return axes


def _check_devices(state: nnx.State, mesh: jax.sharding.Mesh) -> None:
  """Refuses arrays that were put elsewhere; JAX moves those that are nowhere in particular."""
  devices = set(mesh.devices.flat)
  for path, leaf in nnx.to_flat_state(state):
    array = leaf[...] if isinstance(leaf, nnx.Variable) else leaf
    if isinstance(array, jax.Array) and array.committed and array.sharding.device_set != devices:
      found = sorted(device.id for device in array.sharding.device_set)
      raise ValueError(
        f"model: expected parameters on the devices of the mesh in context, "
        f"{sorted(device.id for device in devices)}, got {'.'.join(map(str, path))} on {found}"
      )
