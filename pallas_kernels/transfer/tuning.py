"""How transfers between GPUs are laid out: workers, and what they move at a time.

Nothing here needs Mosaic, so that settings can be read and checked without the kernels.
"""

import dataclasses
from typing import Self

from pallas_kernels import support

SHARED_BYTES = 224 * 1024  # what a block may use of the 227 KB of Hopper and Blackwell
SHARED_ALIGNMENT = 128  # bytes between the buffers of two workers
GRADIENT_UNIT = 1024  # elements: half a tile of gradients has buffers of a multiple
_MOST_WORKERS = 8  # a warpgroup of 128 threads each, of the 1024 that a block may have


@dataclasses.dataclass(frozen=True)
class TransferTuning:
  """How many workers there are, and the size of their tiles; the same on every rank.

  Attributes:
    blocks: thread blocks, which all run at a time; ``None``: one for each SM of the device.
    workers: workers per block, at most 8.
    tile_bytes: the most bytes of a tile, a multiple of 128.
  """

  blocks: int | None = None
  workers: int = 2
  tile_bytes: int = 16 * 1024

  def __post_init__(self) -> None:
    check_positive(self, "workers", "tile_bytes")
    if self.blocks is not None:
      check_positive(self, "blocks")
    if self.workers > _MOST_WORKERS:
      raise ValueError(f"workers: expected at most {_MOST_WORKERS}, got {self.workers}")
    if self.tile_bytes % SHARED_ALIGNMENT:
      raise ValueError(f"tile_bytes: expected a multiple of 128, got {self.tile_bytes}")
    if self.workers * self.tile_bytes > SHARED_BYTES:
      raise ValueError(
        f"workers * tile_bytes: expected at most {SHARED_BYTES}, "
        f"got {self.workers * self.tile_bytes}"
      )

  def placed(self) -> Self:
    """With the number of blocks that a kernel has on the device.

    Raises:
      ValueError: ``blocks`` is more than the device has SMs.
    """
    return dataclasses.replace(self, blocks=support.num_blocks(self.blocks))

  @property
  def num_blocks(self) -> int:
    """Of a kernel, if placed."""
    assert self.blocks is not None, "expected a tuning that is placed"
    return self.blocks

  @property
  def num_workers(self) -> int:
    """Of all blocks, if placed."""
    return self.num_blocks * self.workers


@dataclasses.dataclass(frozen=True)
class ExchangeTuning(TransferTuning):
  """How many workers carry tokens, and how many at a time; the same on every rank.

  Attributes:
    blocks: thread blocks, which all run at a time; ``None``: one for each SM of the device.
    workers: workers per block.
    tile_bytes: the most bytes of a part of a row, a multiple of 128.
    steps: chunks of a worker, if there are tokens for as many, or more so that chunks stay small.
      Each costs a signal to every rank;
      what one rank sends waits for a whole chunk before others use it.
  """

  workers: int = 4
  steps: int = 4

  def __post_init__(self) -> None:
    super().__post_init__()
    check_positive(self, "steps")


def check_positive(tuning: object, *names: str) -> None:
  """Raises TypeError or ValueError unless these attributes are positive integers."""
  for name in names:
    value = getattr(tuning, name)
    if isinstance(value, bool) or not isinstance(value, int):
      raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < 1:
      raise ValueError(f"{name}: expected at least 1, got {value}")


def dispatching(tokens: int, *, scaled: bool = False) -> ExchangeTuning:
  """How ``dispatch`` is laid out for so many tokens of a rank, as measured on one and two H200.

  Args:
    tokens: T.
    scaled: in FP8. Products take room as well then, and there are at most four workers.
  """
  return ExchangeTuning(workers=min(_workers(tokens), 4 if scaled else 8))


def combining(tokens: int, num_ranks: int) -> ExchangeTuning:
  """How ``combine`` is laid out, as measured on H200.

  Of two ranks a worker has four chunks, so that links are busy early. More ranks have more to
  signal for each, and one rank gains nothing.
  """
  steps = 4 if num_ranks == 2 else 2
  return ExchangeTuning(workers=_workers(tokens), tile_bytes=8192, steps=steps)


def _workers(tokens: int) -> int:
  """Of a block, two to eight: no more than have a token each, as threads take time to start."""
  sms = support.num_blocks(None)
  return next((workers for workers in (2, 4) if sms * workers >= tokens), 8)
