"""Copies of hot experts' weights to replica slots, and the adjoint: their gradients home.

The kernels push copies along the plan's transfer trees, and sum gradients along them backwards;
both may ride in a matmul's kernel. The portable form is ``turn_replicate``.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels as kernels
from pallas_kernels import UNTUNED, TransferTuning, Tunings
from ultraep_jax.implementation import Implementations, first_that_can
from ultraep_jax.transport import turn_replicate
from ultraep_jax.types import Array, AxisName


@jax.named_scope("uep.replicate")
def replicate[T](
  home: T,
  replica_expert_GS: Array,
  parent_GS: Array,
  *,
  axis_name: AxisName,
  domain_size: int | None = None,
  implementations: Implementations = ("portable",),
  tunings: Tunings = UNTUNED,
  work: Array | None = None,
) -> T:
  """Fills every rank's replica slots with copies of their experts' arrays.

  Args:
    home: a pytree of ``[M, ...]`` arrays of any dtypes, this rank's home experts.
    replica_expert_GS: ``[G, S]`` int32, the plan's placement (−1: empty slot).
    parent_GS: ``[G, S]`` int32, the plan's transfer trees.
    axis_name: the expert mesh axis.
    domain_size: ranks per domain; copies stay inside. ``None``: all ranks.
    implementations: what to try, in order.
    tunings: how kernels are laid out.
    work: what kernels send and await, if it is known already.

  Returns:
    The same pytree of ``[S, ...]`` arrays; empty slots may hold anything, NaN included.

  Raises:
    NotImplementedError: none of the implementations can.
  """

  def push() -> T:
    leaves, tree = jax.tree.flatten(home)
    copies = kernels.replicate(
      leaves,
      replica_expert_GS,
      parent_GS,
      axis_name=axis_name,
      tuning=_tuning(tunings, "replicate", leaves),
      work=work,
    )
    return jax.tree.unflatten(tree, copies)

  candidates = {
    "mosaic_gpu": push,
    "portable": lambda: turn_replicate.replicate(home, replica_expert_GS, axis_name, domain_size),
  }
  return first_that_can(implementations, candidates)


@jax.named_scope("uep.replicate")
def reduce_replicas[T](
  replica: T,
  home: T,
  replica_expert_GS: Array,
  parent_GS: Array,
  *,
  axis_name: AxisName,
  domain_size: int | None = None,
  implementations: Implementations = ("portable",),
  tunings: Tunings = UNTUNED,
  work: Array | None = None,
) -> T:
  """Adds every replica slot's gradient to its expert's home gradient, in a fixed order.

  A rank adds in float32, and rounds to the dtype of the gradients: kernels what it passes on, the
  portable form a sum that is complete.

  Args:
    replica: a pytree of ``[S, ...]`` gradients of this rank's replica slots.
    home: the same pytree of ``[M, ...]`` gradients of this rank's home experts.
    replica_expert_GS: as for ``replicate``.
    axis_name: the expert mesh axis.
    parent_GS: as for ``replicate``.
    domain_size: as for ``replicate``.
    implementations: as for ``replicate``.
    tunings: as for ``replicate``.
    work: as for ``replicate``.

  Returns:
    The home gradients with all replicas' added.

  Raises:
    NotImplementedError: none of the implementations can.
  """

  def push() -> T:
    leaves, tree = jax.tree.flatten(home)
    sent = jax.tree.leaves(replica)
    sums = kernels.reduce_replicas(
      sent,
      leaves,
      replica_expert_GS,
      parent_GS,
      axis_name=axis_name,
      tuning=_tuning(tunings, "reduce", sent),
      work=work,
    )
    return jax.tree.unflatten(tree, sums)

  candidates = {
    "mosaic_gpu": push,
    "portable": lambda: turn_replicate.reduce_replicas(
      replica, home, replica_expert_GS, axis_name, domain_size
    ),
  }
  return first_that_can(implementations, candidates)


@dataclasses.dataclass(frozen=True)
class Replicas:
  """A plan's copies of weights, and the way home of their gradients, in either of two ways.

  ``copies`` and ``reduce`` move them and are done. ``copying`` and ``reducing`` give a transfer of
  some arrays to run beside a matmul, where kernels can, else ``None``.

  Attributes:
    home: ``[M, ...]`` weights of this rank's home experts, a pytree.
    replica_expert_GS: ``[G, S]`` int32, the plan's placement.
    parent_GS: ``[G, S]`` int32, the plan's transfer trees.
    home_rows_G: ``[G]`` int32, rows that ranks can compute before copies are there. Beside a
      matmul, the copies for ranks with few are sent first.
    axis_name: the expert mesh axis.
    domain_size: ranks per domain; ``None``: all.
    implementations: what to try, in order.
    tunings: how kernels are laid out.
    rank: this rank along the axis.
    lists: what kernels send and await, if it is known already. Of copies, the last list has one
      turn, for arrays that all arrive before they are needed.
    known: the copies, once they are there.
  """

  home: Any
  replica_expert_GS: Array
  parent_GS: Array
  home_rows_G: Array
  axis_name: AxisName
  domain_size: int | None
  implementations: Implementations
  tunings: Tunings
  rank: Array
  lists: "kernels.TransferLists | None" = None
  known: Any = None

  def filled_S(self) -> Array:
    """``[S]`` bool, which of this rank's slots hold a copy."""
    return self.replica_expert_GS[self.rank] >= 0

  def copies(self) -> Any:
    """The same pytree of ``[S, ...]`` arrays; empty slots may hold anything, NaN included."""
    return self.copies_of(self.home) if self.known is None else self.known

  def copies_of[T](self, home: T) -> T:
    """Those of a pytree of ``[M, ...]`` arrays."""
    return replicate(
      home,
      self.replica_expert_GS,
      self.parent_GS,
      axis_name=self.axis_name,
      domain_size=self.domain_size,
      implementations=self.implementations,
      tunings=self.tunings,
      work=None if self.lists is None else self.lists.copying[-1],
    )

  def copying(
    self, home: Sequence[Array], which: int, *, flat: bool = True
  ) -> "kernels.Transfer | None":
    """Brings the copies of such arrays beside a matmul; not ``flat``, one that waits for them.

    ``which`` of the lists says what is sent.
    """
    if self.known is not None:
      return None

    def transfer() -> "kernels.Transfer | None":
      return kernels.replication(
        home,
        self.replica_expert_GS,
        self.parent_GS,
        axis_name=self.axis_name,
        tuning=_tuning(self.tunings, "copying", jax.tree.leaves(self.home)) or COPYING,
        home_rows_G=None if flat else self.home_rows_G,  # what none waits for has one turn
        flat=flat,
        work=None if self.lists is None else self.lists.copying[which],
      )

    candidates = {"mosaic_gpu": transfer, "portable": lambda: None}
    return first_that_can((*self.implementations, "portable"), candidates)

  def reduce[T](self, replica_grads: T, home_grads: T) -> T:
    """The gradients of the homes with those of all their copies added."""
    return reduce_replicas(
      replica_grads,
      home_grads,
      self.replica_expert_GS,
      self.parent_GS,
      axis_name=self.axis_name,
      domain_size=self.domain_size,
      implementations=self.implementations,
      tunings=self.tunings,
      work=None if self.lists is None else self.lists.reducing,
    )

  def reducing(
    self,
    replica_grads: Sequence[Array],
    home_grads: Sequence[Array],
  ) -> "kernels.Transfer | None":
    """Makes ``reduce`` of such arrays beside a matmul that does not need them."""

    def transfer() -> "kernels.Transfer | None":
      leaves, dtype = jax.tree.leaves(self.home), home_grads[0].dtype
      return kernels.reduction(
        replica_grads,
        home_grads,
        self.replica_expert_GS,
        self.parent_GS,
        axis_name=self.axis_name,
        tuning=_tuning(self.tunings, "reducing", leaves, dtype)
        or reducing_tuning(*self.replica_expert_GS.shape),
        work=None if self.lists is None else self.lists.reducing,
      )

    candidates = {"mosaic_gpu": transfer, "portable": lambda: None}
    return first_that_can((*self.implementations, "portable"), candidates)


# Beside a matmul. Few SMs fill the links with copies; to add gradients takes more of them. Three
# workers, as a matmul's kernels have. Each waits until a tile is loaded, so that smaller tiles
# leave the links idle (docs/lab/layer.md, Copies in larger tiles).
COPYING = TransferTuning(blocks=12, workers=3, tile_bytes=32 * 1024)
REDUCING = TransferTuning(blocks=16, workers=3, tile_bytes=64 * 1024)
_TO_ONE = 12  # blocks, of two ranks: nobody adds in registers


def reducing_tuning(num_ranks: int, num_slots: int) -> TransferTuning:
  """``REDUCING``, with an inbox of 1 GiB at most; fewer blocks on two ranks.

  On two ranks the home's memory adds what a rank with a copy sends (docs/lab/kernels.md, Sums in
  the home's memory). Twelve blocks then fill the link beside a matmul (docs/lab/layer.md, Gradients
  by more blocks).

  >>> found = [reducing_tuning(*sizes) for sizes in ((2, 64), (4, 28), (8, 28), (32, 31))]
  >>> [(each.blocks, each.tile_bytes) for each in found]
  [(12, 65536), (16, 65536), (13, 65536), (8, 20480)]
  """
  if num_ranks == 2:
    return dataclasses.replace(REDUCING, blocks=_TO_ONE)
  return kernels.bounded_inbox(REDUCING, num_ranks, num_slots)


def _tuning(
  tunings: Tunings, operation: str, leaves: Sequence[Array], dtype: jnp.dtype | None = None
) -> Any:
  """By the bytes of a whole expert, also where its parts travel one after the other."""
  sizes = (math.prod(leaf.shape[1:]) * (dtype or leaf.dtype).itemsize for leaf in leaves)
  return tunings.find(operation, max(sum(sizes), 1))
