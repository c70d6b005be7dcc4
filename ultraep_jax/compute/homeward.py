"""Gradients of copies on their way home, beside those matmuls of backward that come after them.

Each matmul has beside it as much as it hides. With gate and up apart the last one is two in one,
so in quarters of each gradient::

  gradient of gate           wo  ■ ■ ■ □
  gradient of up             wo  □ □ □ ■   gate  ■ ■ □ □
  gradient to the rows                     gate  □ □ ■ ■   up  ■ ■ ■ ■
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ultraep_jax.transport.replicate import Replicas
from ultraep_jax.types import Array

Grads = tuple[Array, Array]  # of home slots, and of copies
_Parts = Sequence[tuple[int, int, int]]  # of which gradient, from which quarter, up to which

# By the number of projections: what travels beside the gradient of each, and beside that to the
# rows. Gradient 0 is that of wo.
_BESIDE: Mapping[int, Sequence[_Parts]] = {
  1: (((0, 0, 4),), ((1, 0, 4),)),
  2: (((0, 0, 3),), ((0, 3, 4), (1, 0, 2)), ((1, 2, 4), (2, 0, 4))),
}


class Homeward(NamedTuple):
  """Gradients of matrices, some of which have travelled.

  Attributes:
    replicas: where they go.
    projections: how many matrices there are beside wo.
    made: gradients that there are, of wo and then of projections.
    moved: whether parts of them are home: of all that the matmuls so far had beside them.
  """

  replicas: Replicas
  projections: int
  made: tuple[Grads, ...]
  moved: bool = False

  def next(self) -> Any:
    """The transfer that runs beside the next projection's gradient; ``None``: no kernel can."""
    return self._transfer(self._parts)

  def then(self, made: Grads, arrived: Sequence[Array] | None) -> "Homeward":
    """With that projection's gradient, and what the transfer brought, if there was one."""
    there = self if arrived is None else self._with(arrived)
    return there._replace(made=(*there.made, made))

  def last(self, biases: Sequence[Grads]) -> Any:
    """The transfer of all that has not travelled; ``None``: no kernel can."""
    together = self._transfer(self._parts, biases)
    return self._transfer(self._parts) if self.moved and together is None else together

  def totals(self, biases: Sequence[Grads], arrived: Sequence[Array] | None) -> list[Array]:
    """The gradients of homes with those of all copies, once the last transfer is over.

    Args:
      biases: as ``last`` had them.
      arrived: what it brought; ``None``: it was none.
    """
    if arrived is None:
      return self._reduced([*self.made, *biases])
    count = len(self._parts)
    homes = [home for home, _ in self._with(arrived[:count]).made]
    return homes + (list(arrived[count:]) or self._reduced(biases))

  @property
  def _parts(self) -> _Parts:
    """That travel next: in their turn; or all, if none has travelled before the last matmul."""
    if len(self.made) <= self.projections or self.moved:
      return _BESIDE[self.projections][len(self.made) - 1]
    return [(of, 0, 4) for of in range(len(self.made))]

  def _transfer(self, parts: _Parts, biases: Sequence[Grads] = ()) -> Any:
    chosen = [*(self.made[of] for of, *_ in parts), *biases]
    quarters = [*((first, end) for _, first, end in parts), *((0, 4) for _ in biases)]
    return self.replicas.reducing([c for _, c in chosen], [home for home, _ in chosen], quarters)

  def _with(self, arrived: Sequence[Array]) -> "Homeward":
    homes = {of: home for (of, *_), home in zip(self._parts, arrived, strict=True)}
    made = tuple((homes.get(of, home), c) for of, (home, c) in enumerate(self.made))
    return self._replace(made=made, moved=True)

  def _reduced(self, grads: Sequence[Grads]) -> list[Array]:
    if not grads:
      return []
    return list(self.replicas.reduce([c for _, c in grads], [home for home, _ in grads]))
