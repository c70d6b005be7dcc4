"""Gradients of copies on their way home, beside those matmuls of backward that come after them.

Each matmul has as much of them beside it as it lasts. With gate and up apart the last one is two in
one, so in quarters of each gradient::

  gradient of gate           wo  ■ ■ ■ □
  gradient of up             wo  □ □ □ ■   gate  ■ ■ □ □
  gradient to the rows                     gate  □ □ ■ ■   up  ■ ■ ■ ■
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ultraep_jax.transport.replicate import Replicas
from ultraep_jax.types import Array

Grads = tuple[Array, Array]  # of home slots, and of copies
_ALL = 4  # quarters
# By the number of projections: how many quarters of each gradient, that of wo first, are home after
# the gradient of each projection, and after that to the rows.
_HOME_AFTER: Mapping[int, Sequence[Sequence[int]]] = {
  1: ((4,), (4, 4)),
  2: ((3,), (4, 2), (4, 4, 4)),
}


class Homeward(NamedTuple):
  """Gradients of matrices, some of which have travelled.

  Attributes:
    replicas: where they go.
    projections: how many matrices there are beside wo.
    made: gradients that there are, of wo and then of projections.
    home: how many quarters of each have travelled.
  """

  replicas: Replicas
  projections: int
  made: tuple[Grads, ...]
  home: tuple[int, ...] = (0,)

  def next(self) -> Any:
    """The transfer that runs beside the next projection's gradient; ``None``: there is none."""
    return self._transfer(self._parts)

  def then(self, made: Grads, arrived: Sequence[Array] | None) -> "Homeward":
    """With that projection's gradient, and what the transfer brought, if there was one."""
    there = self if arrived is None else self._with(arrived)
    return there._replace(made=(*there.made, made), home=(*there.home, 0))

  def last(self, biases: Sequence[Grads]) -> Any:
    """The transfer of all that has not travelled; ``None``: no kernel can.

    Raises:
      NotImplementedError: a kernel brought parts of these gradients, and none can bring the rest.
    """
    transfer = self._transfer(self._parts, biases)
    if transfer is None and any(self.home):
      transfer = self._transfer(self._parts)
      if transfer is None:
        raise NotImplementedError(
          "gradients: expected a transfer of what is left of them, got none"
        )
    return transfer

  def totals(self, biases: Sequence[Grads], arrived: Sequence[Array] | None) -> list[Array]:
    """The gradients of homes with those of all copies, once the last transfer is over.

    Args:
      biases: as ``last`` had them.
      arrived: what it brought; ``None``: there was none.
    """
    if arrived is None:
      return self._reduced([*self.made, *biases])
    count = len(self._parts)
    homes = [home for home, _ in self._with(arrived[:count]).made]
    return homes + (list(arrived[count:]) or self._reduced(biases))

  @property
  def _parts(self) -> dict[int, tuple[int, int]]:
    """Of which gradients which quarters travel next."""
    ends = _HOME_AFTER[self.projections][len(self.made) - 1]
    ranges = zip(self.home, ends, strict=True)
    return {of: (home, end) for of, (home, end) in enumerate(ranges) if home < end}

  def _transfer(self, parts: Mapping[int, tuple[int, int]], biases: Sequence[Grads] = ()) -> Any:
    chosen = [*(self.made[of] for of in parts), *biases]
    quarters = [*parts.values(), *((0, _ALL) for _ in biases)]
    return self.replicas.reducing([c for _, c in chosen], [home for home, _ in chosen], quarters)

  def _with(self, arrived: Sequence[Array]) -> "Homeward":
    parts = self._parts
    sums = dict(zip(parts, arrived, strict=True))
    return self._replace(
      made=tuple((sums.get(of, home), c) for of, (home, c) in enumerate(self.made)),
      home=tuple(parts.get(of, (0, home))[1] for of, home in enumerate(self.home)),
    )

  def _reduced(self, grads: Sequence[Grads]) -> list[Array]:
    if not grads:
      return []
    return list(self.replicas.reduce([c for _, c in grads], [home for home, _ in grads]))
