"""How much memory the inbox of a reduction takes, and layouts that keep it small.

Each worker has a place in it for ``AHEAD`` tiles of every slot of another rank. On rank 0 of three
with two slots each, for one worker::

  rank, slot    1, 0   1, 1   2, 0   2, 1
  even step     tile   tile   tile   tile
  odd step      tile   tile   tile   tile

Nothing here needs Mosaic.
"""

import dataclasses

from pallas_kernels.transfer.tuning import TransferTuning

AHEAD = 2  # tiles that a sender may be ahead of its parent
_MOST_BYTES = 1 << 30
_LEAST_BLOCKS = 8
_TILE_UNIT = 4 * 1024  # bytes: of float32 what a warpgroup adds at a time, of bfloat16 twice that


def senders(num_ranks: int, num_slots: int) -> int:
  """How many slots have places in the inbox of a rank: all of the other ranks, but none of two.

  Of two ranks every home has one child at most, and nothing is sent to an inbox.
  """
  return (num_ranks - 1) * num_slots if num_ranks > 2 else 0


def bounded_inbox(tuning: TransferTuning, num_ranks: int, num_slots: int) -> TransferTuning:
  """A placed tuning, with fewer blocks or smaller tiles where the inbox would be above 1 GiB.

  First there are fewer blocks, down to 8. Then tiles are smaller, down to 4 KiB. Then there are
  still fewer blocks. More than 1 GiB is left only where tiles of one block take more.

  >>> default = TransferTuning(blocks=132, workers=2, tile_bytes=16384)
  >>> sizes = (2, 256), (4, 28), (4, 96), (32, 31), (64, 62), (256, 62)
  >>> found = [bounded_inbox(default, *each) for each in sizes]
  >>> [(each.num_blocks, each.tile_bytes) for each in found]
  [(132, 16384), (132, 16384), (56, 16384), (17, 16384), (8, 8192), (4, 4096)]
  """
  count = AHEAD * senders(num_ranks, num_slots) * tuning.workers  # tiles for each block
  if count * tuning.num_blocks * tuning.tile_bytes <= _MOST_BYTES:
    return tuning
  most = _MOST_BYTES // count  # of blocks * tile_bytes
  blocks = min(max(most // tuning.tile_bytes, _LEAST_BLOCKS), tuning.num_blocks)
  tile = min(max(most // blocks // _TILE_UNIT, 1) * _TILE_UNIT, tuning.tile_bytes)
  blocks = min(max(most // tile, 1), blocks)
  return dataclasses.replace(tuning, blocks=blocks, tile_bytes=tile)
