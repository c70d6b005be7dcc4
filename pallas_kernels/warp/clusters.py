"""What the blocks of a cluster tell each other, and barriers of several warpgroups.

A cluster is a few blocks that the GPU starts together and that reach each other's shared memory,
from the first line of a kernel on: Mosaic GPU has them all begin before. As in ``warps``, arrays
have one element a thread; each operation has an ``effect`` that tests know.
"""

from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import gpu, llvm, nvvm

from pallas_kernels.support import Array
from pallas_kernels.warp.warps import LAYOUT, chosen, element


def put_at_peer(table_ref: Any, peer: Array | int, index: Array, value: Array, mask: Array) -> None:
  """``scatter.put_at`` into the vector of another block of the cluster.

  Args:
    table_ref: a vector in shared memory, which every block of the cluster has.
    peer: ``[]`` int32, the block's place in the cluster.
    index: ``[128]`` int32.
    value: ``[128]`` int32.
    mask: ``[128]`` int32; threads with 0 write nothing.
  """

  def store(ctx: Any, table: ir.Value, *args: Any) -> None:
    del ctx
    index, value, mask, peer = map(element, args)
    table = utils.get_cluster_ptr(utils.memref_ptr(table), peer, generic=False)
    with chosen(mask):
      llvm.store(value, utils.getelementptr(table, [index], value.type))

  store.effect = "store_at_peer"
  arg_types = (plgpu.RefType(), LAYOUT, LAYOUT, LAYOUT, LAYOUT)
  plgpu.inline_mgpu(arg_types=arg_types)(store)(table_ref, index, value, mask, index * 0 + peer)


def wait_for_block() -> None:
  """A barrier of all threads of the block: what they wrote before, all read afterwards."""

  def wait(ctx: Any) -> None:
    del ctx
    gpu.barrier()

  wait.effect = "join_block"
  plgpu.inline_mgpu()(wait)()


def arrive_at_cluster() -> None:
  """Says that this thread has written what it has to write for its cluster."""

  def arrive(ctx: Any) -> None:
    del ctx
    nvvm.cluster_arrive(aligned=True)

  arrive.effect = "arrive_at_cluster"
  plgpu.inline_mgpu()(arrive)()


def wait_for_cluster() -> None:
  """Waits until all threads of the cluster have arrived; what they wrote before can be read.

  A block that has not waited may still be written to, so it has to wait before it ends.
  """

  def wait(ctx: Any) -> None:
    del ctx
    nvvm.cluster_wait(aligned=True)

  wait.effect = "wait_for_cluster"
  plgpu.inline_mgpu()(wait)()
