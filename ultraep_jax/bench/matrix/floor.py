"""The least time that a layer could take: from FLOPs, bytes and launches, for equal loads."""

import math
from typing import NamedTuple

from ultraep_jax.bench.layer.problem import Shape

_BYTES = 2  # of a value in bfloat16
# Kernels that no layer here does without: count, gather, route, dispatch, two matmuls, combine.
_LAUNCHES = {"forward": 7, "train": 7 + 6}


class Rates(NamedTuple):
  """Of a device.

  Attributes:
    flops: of a dense bfloat16 matmul, per second.
    memory: bytes per second.
    link: bytes per second that a device sends to others; 0: there are none.
    launch: seconds from one kernel to the next.
  """

  flops: float
  memory: float
  link: float
  launch: float


class Floor(NamedTuple):
  """Seconds of one rank; matmuls and the memory they read overlap, nothing else is taken to.

  Attributes:
    flops: of the matmuls.
    memory: to read the weights of experts that have rows and to read and write rows.
    link: of tokens to other ranks and back.
    launches: of kernels that no layer does without.
  """

  flops: float
  memory: float
  link: float
  launches: float

  @property
  def seconds(self) -> float:
    return max(self.flops, self.memory) + self.link + self.launches


def floor(
  shape: Shape,
  ranks: int,
  tokens: int,
  direction: str,
  rates: Rates,
  weight_bytes: int = _BYTES,
) -> Floor:
  """The floor of a layer with equal loads.

  Args:
    shape: sizes.
    ranks: G.
    tokens: T, of a rank.
    direction: ``"forward"``, or ``"train"``: forward and every gradient, kept projections.
    rates: of the device.
    weight_bytes: of a weight, and of its gradient.
  """
  train = direction == "train"
  expert = 3 * shape.width * shape.inner
  rows = tokens * shape.top_k
  home = shape.experts // ranks
  # Rows fall on home experts evenly; few rows leave experts without any.
  used = home * -math.expm1(rows * math.log1p(-1 / home)) if home > 1 else 1.0
  weights = used * expert * weight_bytes
  # Both matmuls read their input and write their output.
  row = (2 * shape.width + 2 * shape.inner) * _BYTES
  # Backward reads the weights again, writes their gradients, and of rows reads the
  # gradient and what forward kept, and writes gradients of hidden and input.
  memory = weights + rows * row
  if train:
    memory += weights + home * expert * weight_bytes
    memory += rows * (3 * shape.width + 6 * shape.inner) * _BYTES
  crossing = tokens * _ranks_of_token(shape, ranks) * shape.width * _BYTES
  return Floor(
    flops=2 * rows * expert * (3 if train else 1) / rates.flops,
    memory=memory / rates.memory,
    link=crossing * (4 if train else 2) / rates.link if ranks > 1 else 0.0,
    launches=_LAUNCHES[direction] * rates.launch,
  )


def _ranks_of_token(shape: Shape, ranks: int) -> float:
  """Other ranks that a token's experts lie on, on average; it crosses to each once."""
  home = shape.experts // ranks
  missed = math.comb(shape.experts - home, shape.top_k) / math.comb(shape.experts, shape.top_k)
  return (ranks - 1) * (1 - missed)
