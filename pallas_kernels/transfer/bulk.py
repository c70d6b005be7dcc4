"""Tiles that the hardware adds to what is there, in the memory of any GPU.

TMA reads a tile from shared memory, and the memory that it goes to adds it. No thread sees the
numbers, and a GPU whose memory is added to does nothing for it. A tile is contiguous, so it takes
no descriptor, which would have to know the GPU before the kernel starts::

  shared memory of rank 1    1  2  3  4
  memory of rank 0          10 20 30 40  ──►  11 22 33 44
"""

import math
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

# Subnormal numbers are kept in bfloat16, where the instruction has a choice; in float32 they are 0.
_KINDS = {"bf16": "noftz.bf16", "f32": "f32"}


def add_to(buffer: Any, target: Any) -> None:
  """Starts to add a tile, each sum rounded once to its dtype; float32 below 1.2e-38 counts as 0.

  It belongs to the group that ``plgpu.commit_smem_to_gmem_group`` ends next, and is over when
  ``plgpu.wait_smem_to_gmem`` says so of that.

  Args:
    buffer: a reference to bfloat16 or float32 in shared memory, a multiple of 16 bytes.
    target: to as many in a GPU's memory, perhaps of a peer (``peers.remote_ref``).
  """

  def add(ctx: Any, buffer: ir.Value, target: ir.Value) -> None:
    del ctx
    of, i32 = ir.MemRefType(buffer.type), ir.IntegerType.get_signless(32)
    size = math.prod(of.shape) * utils.bitwidth(of.element_type) // 8
    code = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add." + _KINDS[str(of.element_type)]
    utils.inline_ptx(
      f"{code} [$0], [$1], $2;",
      *(utils.memref_ptr(target), utils.memref_ptr(buffer), arith.constant(i32, size)),
      predicate=mgpu.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP),
      has_side_effects=True,
    )

  plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))(add)(buffer, target)
