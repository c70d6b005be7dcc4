"""Legal plans and routes without end: random ones, and the extreme ones again and again."""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ultraep_jax.bench.kernels.exchange import number_rows, random_routes
from ultraep_jax.bench.kernels.transfers import Placement, random_placement

_PERIOD = 16  # of so many, the first are the extreme ones


class Named(NamedTuple):
  """A placement (``replica_expert_GS``, ``parent_GS``) or routes (``dest_GTK``, ``row_GTK``)."""

  name: str
  plan: tuple[np.ndarray, np.ndarray]


def _mixed(extremes: dict[str, Callable[[], Placement]], draw: Callable[[], Named]) -> Iterator:
  for index in itertools.count():
    names = list(extremes)
    place = index % _PERIOD
    yield Named(names[place], extremes[names[place]]()) if place < len(names) else draw()


def placements(rng: np.random.Generator, ranks: int, home: int, slots: int) -> Iterator[Named]:
  """Placements with trees of any depth; all are empty for one rank."""

  def tree(parents: Callable[[int], int], expert: int, column: int = 0) -> Placement:
    """One expert on all other ranks, in a slot that moves on with the rank."""
    replica_GS, parent_GS = np.full((2, ranks, slots), -1, np.int32)
    for rank in range(ranks):
      if rank != expert // home:
        slot = (column + rank) % slots
        replica_GS[rank, slot], parent_GS[rank, slot] = expert, parents(rank)
    return replica_GS, parent_GS

  def full() -> Placement:
    """All slots hold experts of the rank's neighbours, sent by their homes."""
    rank_G1, slot_S = np.arange(ranks)[:, None], np.arange(slots)
    parent_GS = (rank_G1 + 1 + slot_S // home) % ranks
    replica_GS = parent_GS * home + slot_S % home
    legal_GS = (parent_GS != rank_G1) & (slot_S < home * (ranks - 1))
    replica_GS, parent_GS = np.where(legal_GS, (replica_GS, parent_GS), -1).astype(np.int32)
    return replica_GS, parent_GS

  def full_of_hot() -> Placement:
    """All slots hold the same few experts, in chains of both directions."""
    replica_GS, parent_GS = np.full((2, ranks, slots), -1, np.int32)
    for slot in range(min(slots, home)):
      for first, step in ((0, 1), (ranks - 1, -1)):
        half = range(ranks // 2, ranks) if first == 0 else range(ranks // 2)
        for rank in half:
          before = rank - step
          replica_GS[rank, slot] = first * home + slot
          parent_GS[rank, slot] = before if before in half else first
    return replica_GS, parent_GS

  def empty() -> Placement:
    replica_GS, parent_GS = np.full((2, ranks, slots), -1, np.int32)
    return replica_GS, parent_GS

  if ranks == 1:
    return itertools.repeat(Named("empty", empty()))
  last = ranks * home - 1
  extremes = {
    "empty": empty,
    "all slots": full,
    "all slots, few experts": full_of_hot,
    "one to all, direct": lambda: tree(lambda _: 0, 0),
    "one to all, chain": lambda: tree(lambda rank: rank - 1, 0),
    "last to all, chain": lambda: tree(lambda rank: rank + 1, last, 1),
  }

  return _mixed(extremes, lambda: Named("random", random_placement(rng, ranks, home, slots)))


def routes(rng: np.random.Generator, ranks: int, tokens: int, top_k: int) -> Iterator[Named]:
  """Routes with rows in random order."""
  shape = (ranks, tokens, top_k)
  rank_G11 = np.arange(ranks)[:, None, None]

  def to(dest_GTK: np.ndarray | int) -> Placement:
    dest_GTK = np.broadcast_to(dest_GTK, shape).astype(np.int32)
    return dest_GTK, number_rows(rng, dest_GTK)

  def anywhere() -> np.ndarray:
    return rng.integers(0, ranks, shape)

  extremes = {
    "all masked": lambda: to(-1),
    "all to the first rank": lambda: to(0),
    "all to the last rank": lambda: to(ranks - 1),
    "all at home": lambda: to(rank_G11),
    "all to the next rank": lambda: to((rank_G11 + 1) % ranks),
    "no tokens on the first rank": lambda: to(np.where(rank_G11 == 0, -1, anywhere())),
    "tokens on the last rank only": lambda: to(np.where(rank_G11 < ranks - 1, -1, anywhere())),
    "every token to one rank": lambda: to(anywhere()[:, :, :1]),
  }

  def draw() -> Named:
    masked, favour = float(rng.choice([0.0, 0.1, 0.9])), float(rng.choice([0.0, 2.0, 50.0]))
    dest_GTK, row_GTK, _ = random_routes(rng, ranks, tokens, top_k, masked, favour)
    return Named(f"random, {masked:.0%} masked", (dest_GTK, row_GTK))

  return _mixed(extremes, draw)
