"""Gradients of copies on their way home, beside those matmuls of backward that come after them.

With gate and up apart, copies of up travel beside the gradient of gate. The last matmul is two in
one. So each has as much beside it as it lasts::

  gradient of gate
  gradient of up           wo
  gradient to the rows     gate, up

Where no copies have to travel there, each gradient goes beside the next matmul.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ultraep_jax.transport.replicate import Replicas
from ultraep_jax.types import Array

Grads = tuple[Array, Array]  # of home slots, and of copies


class Homeward(NamedTuple):
  """Gradients of matrices, the first of which have travelled.

  Attributes:
    replicas: where they go.
    made: gradients that there are, of wo and then of projections.
    home: how many have travelled.
  """

  replicas: Replicas
  made: tuple[Grads, ...]
  home: int = 0

  def next(self) -> Any:
    """The transfer that runs beside the next projection's gradient; ``None``: there is none."""
    return self._transfer(self._left[:1])

  def then(self, made: Grads, arrived: Sequence[Array] | None) -> "Homeward":
    """With that projection's gradient, and what the transfer brought, if there was one."""
    there = self if arrived is None else self._with(arrived)
    return there._replace(made=(*there.made, made))

  def last(self, biases: Sequence[Grads]) -> Any:
    """The transfer of all that has not travelled, if need be without biases; ``None``: none can."""
    with_biases = self._transfer([*self._left, *biases])
    return self._transfer(self._left) if with_biases is None and biases else with_biases

  def totals(self, biases: Sequence[Grads], arrived: Sequence[Array] | None) -> list[Array]:
    """The gradients of homes with those of all copies, once the last transfer is over.

    Args:
      biases: as ``last`` had them.
      arrived: what it brought; ``None``: there was none.
    """
    if arrived is None:
      there, left = self, [*self._left, *biases]
    else:
      count = len(self._left)
      there, left = self._with(arrived[:count]), biases[len(arrived) - count :]
    brought = [] if arrived is None else arrived[len(self._left) :]
    return [home for home, _ in there.made[: there.home]] + [*brought, *self._reduced(left)]

  @property
  def _left(self) -> tuple[Grads, ...]:
    return self.made[self.home :]

  def _transfer(self, grads: Sequence[Grads]) -> Any:
    return self.replicas.reducing([c for _, c in grads], [home for home, _ in grads])

  def _with(self, arrived: Sequence[Array]) -> "Homeward":
    """After a transfer of the next ones."""
    end = self.home + len(arrived)
    copies = [c for _, c in self.made[self.home : end]]
    made = (*self.made[: self.home], *zip(arrived, copies, strict=True), *self.made[end:])
    return self._replace(made=made, home=end)

  def _reduced(self, grads: Sequence[Grads]) -> list[Array]:
    if not grads:
      return []
    return list(self.replicas.reduce([c for _, c in grads], [home for home, _ in grads]))
