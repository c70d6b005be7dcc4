"""Teaches JAX's interpreter of Mosaic GPU kernels copies that add: ``reduction_op="add"``."""

import threading
from typing import Any

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

_here = threading.local()


def install() -> None:
  """Patches the interpreter, once."""
  copy, task = gpu_callbacks.copy_smem_to_gmem, gpu_callbacks.AsyncCopySmemToGmemTask
  one_at_a_time = threading.Lock()

  class Add(task):
    def __call__(self, tma_thread_id: int) -> None:
      shared = gpu_callbacks._get_shared_memory()
      self.pre_read(tma_thread_id, shared)

      def read(key: Any, access: Any) -> Any:
        return shared.get_buffer_content(key, access, self.thread, logging_info=self.logging_info)[
          0
        ]

      value = read(self.src_allocation_key, self.src_access)
      self.post_read(tma_thread_id, shared)
      with one_at_a_time:  # as the device's memory adds
        total = read(self.dst_allocation_key, self.dst_access) + value
        shared.store_buffer_content(
          self.dst_allocation_key,
          self.dst_access,
          total,
          self.thread,
          logging_info=self.logging_info,
        )
      self.post_write(tma_thread_id, shared)

  def make(**arguments: Any) -> Any:
    return (Add if getattr(_here, "adds", False) else task)(**arguments)

  def copy_or_add(*, reduction_op: Any, predicate: Any, **arguments: Any) -> Any:
    assert reduction_op in (None, "add"), reduction_op
    if predicate is not None and not predicate:
      return arguments["token"]
    _here.adds = reduction_op is not None
    try:
      return copy(reduction_op=None, predicate=None, **arguments)
    finally:
      _here.adds = False

  gpu_callbacks.AsyncCopySmemToGmemTask = make
  gpu_callbacks.copy_smem_to_gmem = copy_or_add
