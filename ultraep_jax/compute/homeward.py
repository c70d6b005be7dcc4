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
  """Gradients of matrices, of wo and then of projections.

  Attributes:
    replicas: where those of copies go.
    left: gradients that have not travelled.
    home: sums of those before, which have.
  """

  replicas: Replicas
  left: tuple[Grads, ...]
  home: tuple[Array, ...] = ()

  def next(self) -> Any:
    """The transfer that runs beside the next projection's gradient; ``None``: there is none."""
    return self._transfer(self.left[:1])

  def then(self, made: Grads, arrived: Sequence[Array] | None) -> "Homeward":
    """With that projection's gradient, and what the transfer brought, if there was one."""
    sums = arrived or ()
    return Homeward(self.replicas, (*self.left[len(sums) :], made), (*self.home, *sums))

  def last(self, biases: Sequence[Grads]) -> Any:
    """The transfer of all that has not travelled, if need be without biases; ``None``: none can."""
    with_biases = self._transfer([*self.left, *biases])
    return self._transfer(self.left) if with_biases is None and biases else with_biases

  def totals(self, biases: Sequence[Grads], arrived: Sequence[Array] | None) -> list[Array]:
    """The gradients of homes with those of all copies, once the last transfer is over.

    Args:
      biases: as ``last`` had them.
      arrived: what it brought; ``None``: there was none.
    """
    sums, grads = arrived or (), [*self.left, *biases]
    return [*self.home, *sums, *self._reduced(grads[len(sums) :])]

  def _transfer(self, grads: Sequence[Grads]) -> Any:
    return self.replicas.reducing([c for _, c in grads], [home for home, _ in grads])

  def _reduced(self, grads: Sequence[Grads]) -> list[Array]:
    if not grads:
      return []
    return list(self.replicas.reduce([c for _, c in grads], [home for home, _ in grads]))
