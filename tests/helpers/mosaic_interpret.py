"""Teaches JAX's interpreter of Mosaic GPU kernels remote references and semaphores.

``interpreted()`` is a context in which kernels run on virtual CPU devices: several devices, remote
copies and signals, races reported. ``install`` patches private parts of JAX; it is written for
the versions that the project supports and is for tests only.

Every warpgroup occupies a thread of XLA's pool while it waits. With fewer threads than warpgroups
at work, all may wait for one that has none. ``PJRT_NPROC`` is their number, which tests set. XLA
runs at most 32 programs at a time on a device: the warpgroups of all ranks, and one.
"""

import collections
import contextlib
import dataclasses
import functools
import math
import operator
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import mosaic_sums
import numpy as np
from jax._src import callback, config, dispatch, source_info_util, util
from jax._src.pallas import core as pallas_core
from jax._src.pallas import primitives as pallas
from jax._src.pallas.mosaic.interpret import race_detection_state, thread_map, utils
from jax._src.pallas.mosaic_gpu import core as gpu
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.pallas.mosaic_gpu.interpret import (
  gpu_callbacks,
  interpret_pallas_call,
  jaxpr_interpret,
  shared_memory,
)
from jax._src.state import types as state_types
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.transfer import reduce_kernel

_SIGNALS = (pallas.semaphore_signal_p, gpu_primitives.semaphore_signal_p)
_WAITS = (pallas.semaphore_wait_p, gpu_primitives.semaphore_wait_p)
_DEVICE = 1  # where an allocation key, an int array, holds the device
_BLOCK = 2  # of the cluster
_REFERENCES = 4  # and how many threads refer to it, which is no part of its identity
_ALL_BLOCKS = -1  # in place of a block: of semaphores that all blocks of a device share

# Numbers that no named barrier has.
_BLOCK_BARRIER, _CLUSTER_BARRIER = -1, -2

_faults: list[str] = []  # of the kernels that have ended
_changed = threading.Condition()
_here = threading.local()
_patience = [60.0]


@contextlib.contextmanager
def interpreted(patience: float = 60.0) -> Iterator[None]:
  """Runs kernels interpreted; a wait longer than ``patience`` seconds is an error.

  Raises:
    AssertionError: on leaving, if a kernel had a race or left a semaphore that is not zero.
  """
  install()
  _patience[0] = patience
  _faults.clear()
  interpret_pallas_call.reset_gpu_interpret_mode_state()
  try:
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)), adding():
      yield
      jax.effects_barrier()  # until all devices are done
  except BaseException:
    dispatch.runtime_tokens.clear()  # else every later computation fails too
    raise
  assert not _faults, _faults


def adding() -> Any:
  """Tiles are added to others' memory by a copy that adds, which a GPU cannot aim at any peer."""
  add = functools.partial(plgpu.copy_smem_to_gmem, reduction_op="add", commit_group=False)
  return mock.patch.object(reduce_kernel, "add_to", add)


@functools.cache
def install() -> None:
  """Patches the interpreter, once."""
  _patch_callbacks()
  _patch_threads()
  _patch_devices()
  _patch_remote_references()
  _patch_semaphores()
  mosaic_sums.install()


# --- callbacks -------------------------------------------------------------------------------


def _patch_callbacks() -> None:
  """Hands callbacks NumPy arrays: to place them on a device takes longer than what they do."""

  def call(*args: Any, callback: Callable[..., Any], **_: Any) -> Any:
    # What a callback keeps outlives the program's buffers.
    return [np.asarray(result) for result in callback(*map(np.array, args))]

  callback.io_callback_impl = call
  to_int = shared_memory._to_int
  shared_memory._to_int = lambda x: x.item() if isinstance(x, np.ndarray) else to_int(x)
  _patch_accesses()


def _patch_accesses() -> None:
  """Makes each key, and the source line of each access, once: they are most of what reads take."""
  key = shared_memory.HostAllocationKey
  make, summarize = key.from_array, source_info_util.summarize

  @functools.lru_cache(maxsize=1 << 16)
  def key_of(content: bytes) -> Any:
    return make(np.frombuffer(content, np.int32))

  @functools.lru_cache(maxsize=1 << 16)
  def line_of(traceback: Any) -> str:
    return summarize(source_info_util.SourceInfo(traceback, source_info_util.NameStack()))

  key.from_array = staticmethod(lambda array: key_of(np.asarray(array, np.int32).tobytes()))
  source_info_util.summarize = lambda source_info: line_of(source_info.traceback)

  def unplaced(access: Callable[..., Any]) -> Callable[..., Any]:
    """Without the place in the mesh, which is for logs alone."""
    return lambda **arguments: access(**{**arguments, "mesh_location": None})

  gpu_callbacks.call_get = unplaced(gpu_callbacks.call_get)
  gpu_callbacks.call_swap = unplaced(gpu_callbacks.call_swap)


# --- threads ---------------------------------------------------------------------------------


def _patch_threads() -> None:
  """Compiles what warpgroups run once; JAX asks its caches for each warpgroup of each block."""
  one_at_a_time = threading.Lock()

  @util.cache(max_size=None, trace_context_in_key=False)  # ``jax.clear_caches`` empties it
  def program_of(jaxpr: Any) -> list[Any]:
    return []

  def run(jaxpr: Any, consts: Any, *args: Any) -> None:
    with one_at_a_time:
      program = program_of(jaxpr)
      if not program:
        traced = jax.jit(thread_map._run, static_argnums=0).trace(jaxpr, consts, *args)
        program.append(traced.lower().compile())
    try:
      program[0](consts, *args)
    except Exception as fault:  # those that wait for this warpgroup learn of XLA's faults, too
      # Not at the top level: the device itself joins the others when all its warpgroups have ended.
      gpu_callbacks._get_shared_memory().set_failed(fault, top_level=False)
      raise

  thread_map._run_jaxpr = run


# --- devices ---------------------------------------------------------------------------------


def _patch_devices() -> None:
  """Devices that run side by side, start together, and read their results when they are done."""
  memory = shared_memory.GPUSharedMemory
  # The first device to finish would complain about the barriers of the others,
  memory.assert_no_barriers_allocated = lambda self: None
  # and would reset the clocks of all.
  reset = memory.reset_per_cluster_state

  def reset_once(self: Any) -> None:
    if self.num_devices == 1 or not hasattr(self, "has_clocks"):
      reset(self)
      self.has_clocks = hasattr(self, "clocks")

  memory.reset_per_cluster_state = reset_once
  update = gpu_callbacks._update_clocks_for_device_barrier

  def start_or_finish(token: Any, device: Any) -> Any:
    shared = gpu_callbacks._get_shared_memory()
    token = update(token, device)
    phases = shared.__dict__.setdefault("device_phases", collections.Counter())
    phases[device.device_id] += 1
    if shared.num_devices > 1 and phases[device.device_id] == 1:
      shared.barrier.wait(timeout=60)
    elif shared.num_devices > 1 and shared.detect_races:
      _read_results(shared, device)
    return token

  gpu_callbacks._update_clocks_for_device_barrier = start_or_finish
  clear = gpu_callbacks._clear_shared_memory

  def clear_and_judge() -> None:
    """Once all devices have ended a kernel."""
    _faults.extend(_found(gpu_callbacks._get_shared_memory(), gpu_callbacks.get_races()))
    clear()

  gpu_callbacks._clear_shared_memory = clear_and_judge


def _found(shared: Any, races: Any) -> Iterator[str]:
  """What is wrong with a kernel that has ended."""
  if races.races_found:
    yield "the kernel has a race"
  # No signal is one too many. Of those that all blocks share, each counts up to what it waits for.
  semaphores = shared.__dict__.get("semaphores", {})
  values = [value for key, (value, _) in semaphores.items() if key[_BLOCK] != _ALL_BLOCKS]
  if any(values):
    yield f"the kernel leaves {sum(map(bool, values))} semaphores of {len(values)} above zero"


def _read_results(shared: Any, device: Any) -> None:
  """An access to all memory of the device: a peer that still uses it races with this."""
  thread = shared.concurrent_threads(device)[0]
  clock = shared.incr_clock(thread)
  for key, allocation in list(shared.mem.items()):
    here = key.device_id == device.device_id and key.memory_space_id == 0
    if here and isinstance(allocation, shared_memory.memory.Buffer):
      access = shared.access(key, ())
      gpu_callbacks.get_races().check_write(thread, clock.generic_clock, key, access)


# --- remote references -----------------------------------------------------------------------


def _patch_remote_references() -> None:
  resolve = jaxpr_interpret.resolve_ref

  def resolve_remote(aval: Any, key: Any, transforms: Any) -> tuple[Any, tuple[Any, ...]]:
    key, transforms = resolve(aval, key, transforms)
    for transform in transforms:
      if isinstance(transform, gpu.PeerMemRef):
        key = _on_device(key, transform.device_id)
    return key, tuple(t for t in transforms if not isinstance(t, gpu.PeerMemRef))

  jaxpr_interpret.resolve_ref = resolve_remote


def _on_device(key: Any, device_id: Any) -> jax.Array:
  info = _here.device
  logical = utils.device_coords_to_logical_id(device_id, info.axis_sizes, info.axis_indices)
  return jnp.asarray(key).at[_DEVICE].set(logical)


# --- semaphores ------------------------------------------------------------------------------


def _patch_semaphores() -> None:
  uninitialized = jaxpr_interpret.get_uninitialized_array

  def zero_semaphores(shape: Sequence[int], dtype: Any, *rest: Any) -> jax.Array:
    if jnp.issubdtype(dtype, pallas_core.semaphore_dtype):
      return jnp.zeros(shape, jnp.int32)
    return uninitialized(shape, dtype, *rest)

  jaxpr_interpret.get_uninitialized_array = zero_semaphores
  interpret = jaxpr_interpret.JaxprInterpreter.interpret

  def interpret_here(self: Any, jaxpr: Any, token: Any, *args: Any) -> Any:
    """Disguises semaphore operations as custom code, whose handler carries the token along."""
    disguised = [
      eqn.replace(
        primitive=gpu_primitives.inline_mgpu_p, params={**eqn.params, "is": eqn.primitive}
      )
      if eqn.primitive in (*_SIGNALS, *_WAITS, pallas.get_global_p)
      else eqn
      for eqn in jaxpr.eqns
    ]
    before, _here.device = getattr(_here, "device", None), self.device_info
    try:
      with config._check_vma(False):
        return interpret(self, jaxpr.replace(eqns=disguised), token, *args)
    finally:
      _here.device = before

  jaxpr_interpret.JaxprInterpreter.interpret = interpret_here
  custom = jaxpr_interpret.JaxprInterpreter._interpret_inline_mgpu_p

  def semaphore_or_custom(self: Any, eqn: Any, token: Any, values: Any) -> Any:
    function = eqn.params.get("mgpu_fn")
    if hasattr(function, "twin") or hasattr(function, "effect"):
      return _call_twin(self, eqn, token, values)
    if "is" not in eqn.params:
      return custom(self, eqn, token, values)
    if eqn.params["is"] is pallas.get_global_p:
      key = gpu_callbacks.HostAllocationKey.shape_and_dtype()
      key = jnp.zeros(key.shape, key.dtype).at[_BLOCK].set(_ALL_BLOCKS)
      return token, [key.at[_DEVICE].set(self.thread.device_id)]
    tree = eqn.params["args_tree"]
    args = jax.tree.unflatten(tree, values())
    aval = jax.tree.unflatten(tree, [v.aval for v in eqn.invars])[0]
    index = _semaphore_index(args[1], aval.shape)
    if eqn.params["is"] in _SIGNALS:
      key, _, amount, device_id, _ = args
      key = key if device_id is None else _on_device(key, device_id)
      operate, amounts = _signal, {"amount": amount}
    else:
      key, _, amount, decrement = args
      operate, amounts = _wait, {"amount": amount, "decrement": jnp.asarray(decrement)}
    shape = gpu_callbacks.TOKEN_SHAPE_DTYPE
    place = {"token": token, "thread": self.thread, "key": key, "index": index}
    return callback.io_callback(operate, shape, **place, **amounts), []

  jaxpr_interpret.JaxprInterpreter._interpret_inline_mgpu_p = semaphore_or_custom


class _Here(NamedTuple):
  """What executes an effect."""

  token: Any
  thread: Any
  location: Any


def _call_twin(self: Any, eqn: Any, token: Any, values: Any) -> Any:
  """Code that brings the same function of arrays, which references are read as.

  Code that has an ``effect`` updates a reference instead, or is a barrier and may return, too.
  """
  args, leaves = util.split_list(values(), [eqn.params["pytree_args"].num_leaves])
  parts = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], leaves)
  function = eqn.params["mgpu_fn"]
  twin, effect = getattr(function, "twin", None), getattr(function, "effect", None)
  for place, var in enumerate(eqn.invars[: len(args)]):
    if hasattr(var.aval, "inner_aval"):
      part = parts[place]
      args[place], transforms = jaxpr_interpret.resolve_ref(var.aval, args[place], part)
      read = var.aval.inner_aval
      if part:
        view = state_types.TransformedRef(var.aval, part)
        read = read.update(shape=view.shape, dtype=view.dtype)
      if effect is None:
        get = _get_as_wgmma if getattr(function, "reads_as_wgmma", False) else gpu_callbacks._get
        get = functools.partial(get, source_info=eqn.source_info)
        results = gpu_callbacks.TOKEN_SHAPE_DTYPE, read
        here = token, None, self.thread  # anywhere in the mesh, which is for logs alone
        token, args[place] = callback.io_callback(get, results, *here, args[place], transforms)
  if effect is not None:
    groups = self.num_threads_per_block, math.prod(self.cluster_dims)
    execute = functools.partial(_execute, effect, groups)
    here = _Here(token, self.thread, self.mesh_location)
    token = callback.io_callback(execute, gpu_callbacks.TOKEN_SHAPE_DTYPE, here, *args)
  return token, jax.tree.leaves(twin(*args)) if twin is not None else []


@gpu_callbacks.fail_on_exception
def _get_as_wgmma(
  token: Any, place: Any, thread: Any, key: Any, transforms: Any, source_info: Any
) -> Any:
  """Sees what TMA wrote and what was committed, and needs no fence before TMA writes."""
  shared, races = gpu_callbacks._get_shared_memory(), gpu_callbacks.get_races()
  if shared.detect_races:
    seen, key_of = shared.get_clock(thread).async_smem_clock, gpu_callbacks.HostAllocationKey
    transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    memory, line = key_of.from_array(key), source_info_util.summarize(source_info)
    read = shared.access(memory, transforms).range
    with races.lock:
      races.reads[memory].append((thread, seen, read, line))
      for writer, clock, written, at in races.writes[memory]:
        if (clock.clock > seen.clock).any() and race_detection_state._ranges_overlap(read, written):
          raise RuntimeError(f"RACE DETECTED: {line} reads what {writer} wrote in {at}")
  return gpu_callbacks._get(token, place, None, key, transforms, source_info=source_info)


@gpu_callbacks.fail_on_exception
def _execute(effect: str, groups: tuple[int, int], here: _Here, *args: Any) -> Any:
  """``groups`` are warpgroups of a block, and blocks of a cluster."""
  _EFFECTS[effect](groups, here, *args)
  return here.token


def _update(change: Callable[..., None], groups: Any, here: Any, key: Any, *args: Any) -> None:
  """Changes a vector at indices where a mask is not 0, perhaps that of another block."""
  del groups, here
  index, value, mask, *peer = map(np.asarray, args)
  shared, key = gpu_callbacks._get_shared_memory(), np.asarray(key).copy()
  if peer:
    key[_BLOCK] = peer[0][0]
  deadline = time.monotonic() + _patience[0]
  # Blocks of a cluster start together on a GPU.
  while (place := gpu_callbacks.HostAllocationKey.from_array(key)) not in shared.mem:
    shared.check_failed()
    if time.monotonic() > deadline:
      raise RuntimeError(f"block {key[_BLOCK]} does not begin")
    time.sleep(1e-3)
  chosen = mask != 0
  with shared.lock:
    change(shared.mem[place].content, index[chosen], value[chosen])


def _take_one(groups: Any, here: _Here, counter: Any, queue: Any, place: Any) -> None:
  """What a counter was, before one is added, into an element of a vector."""
  del groups, here
  shared = gpu_callbacks._get_shared_memory()
  key = gpu_callbacks.HostAllocationKey.from_array(np.asarray(queue))
  with _changed, shared.lock:
    semaphore = _semaphore(shared, counter, (0,))
    shared.mem[key].content[int(place)] = semaphore[0]
    semaphore[0] += 1


def _meet(arrives: bool, waits: bool, of: str, groups: tuple[int, int], here: _Here) -> None:
  """Arrives at the barrier of a block or a cluster, waits for it, or both."""
  shared = gpu_callbacks._get_shared_memory()
  at, number, size = here.thread, _BLOCK_BARRIER, groups[0]
  if of == "cluster":
    at, number, size = dataclasses.replace(at, block_id=0), _CLUSTER_BARRIER, math.prod(groups)
  barrier = shared.named_barrier(at, number, size)
  info = shared_memory.GPULoggingInfo(here.location, here.thread, None)
  if arrives:
    clock = shared.incr_clock(here.thread) if shared.detect_races else None
    barrier.arrive(here.thread, clock, info)
  if waits:
    barrier.wait(here.thread, info)


_EFFECTS: dict[str, Callable[..., None]] = {
  "store": functools.partial(_update, operator.setitem),
  "store_at_peer": functools.partial(_update, operator.setitem),
  "add": functools.partial(_update, np.add.at),
  "min": functools.partial(_update, np.minimum.at),
  "max": functools.partial(_update, np.maximum.at),
  "take_one": _take_one,
  "join_warpgroup": lambda *_: None,  # whose threads are interpreted in step
  "join_block": functools.partial(_meet, True, True, "block"),
  "arrive_at_cluster": functools.partial(_meet, True, False, "cluster"),
  "wait_for_cluster": functools.partial(_meet, False, True, "cluster"),
}


def _semaphore_index(transforms: Any, shape: Sequence[int]) -> tuple[jax.Array, ...]:
  """One index per axis; scalar indexers come one after the other or together."""
  indices: list[Any] = []
  left = list(range(len(shape)))
  for transform in transforms or ():
    chosen = [getattr(i, "start", i) for i in transform.indices]
    kept = [hasattr(i, "start") for i in transform.indices]
    indices = indices or [jnp.int32(0)] * len(shape)
    for axis, value in zip(left, chosen, strict=True):
      indices[axis] = indices[axis] + jnp.asarray(value, jnp.int32)
    left = [axis for axis, keep in zip(left, kept, strict=True) if keep]
  return tuple(indices)


def _semaphore(shared: Any, key: Any, index: Any) -> list[Any]:
  """Value and clock of a semaphore; they come into being at zero."""
  identity = tuple(int(k) for i, k in enumerate(np.asarray(key)) if i != _REFERENCES)
  semaphores = shared.__dict__.setdefault("semaphores", collections.defaultdict(lambda: [0, None]))
  return semaphores[identity + tuple(int(i) for i in index)]


@gpu_callbacks.fail_on_exception
def _signal(*, token: Any, thread: Any, key: Any, index: Any, amount: Any) -> Any:
  shared = gpu_callbacks._get_shared_memory()
  clock = shared.incr_clock(thread) if shared.detect_races else None
  with _changed:
    semaphore = _semaphore(shared, key, index)
    semaphore[0] += int(amount)
    if clock is not None and semaphore[1] is not None:
      clock.update(semaphore[1])
    semaphore[1] = clock
    _changed.notify_all()
  return token


@gpu_callbacks.fail_on_exception
def _wait(*, token: Any, thread: Any, key: Any, index: Any, amount: Any, decrement: Any) -> Any:
  shared = gpu_callbacks._get_shared_memory()
  deadline = time.monotonic() + _patience[0]
  with _changed:
    semaphore = _semaphore(shared, key, index)
    while semaphore[0] < int(amount):
      shared.check_failed()
      if time.monotonic() > deadline:
        raise RuntimeError(f"{thread} waits for ever: {semaphore[0]} of {int(amount)}")
      _changed.wait(timeout=0.1)
    semaphore[0] -= int(amount) * bool(decrement)
    clock = semaphore[1]
  if shared.detect_races and clock is not None:
    with shared.lock:
      shared.clocks[thread].update(clock)
  return token
