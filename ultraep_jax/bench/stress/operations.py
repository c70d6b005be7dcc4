"""The transfers under stress: the kernels, and portable operations that can stand in for them."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

import pallas_kernels
from pallas_kernels import Dispatched, ExchangeTuning, TransferTuning
from ultraep_jax.bench.kernels.portable import AXIS
from ultraep_jax.transport import block_exchange, replicate
from ultraep_jax.types import Array, Routes


class Crossing(NamedTuple):
  """Routes of all ranks as one rank uses them, and the gates at the rows; see ``dispatch``."""

  capacity: int
  dest_TK: Array
  row_TK: Array
  received_GTK: Array


class Operations(NamedTuple):
  """What is tested: the kernels with a tuning, or what stands in for them."""

  replicate: Callable[[list[Array], Array, Array], list[Array]]
  reduce_replicas: Callable[[list[Array], list[Array], Array, Array], list[Array]]
  dispatch: Callable[[list[Array], Array, Crossing], Dispatched]
  combine: Callable[[Array, Array, Crossing], Array]
  combine_values: Callable[[Array, Array, Crossing], tuple[Array, Array]]


def kernels(
  tuning: TransferTuning | None,
  dealt: ExchangeTuning | None,
  copied: TransferTuning | None = None,
) -> Operations:
  """The kernels; ``tuning`` is that of transfers of experts, ``dealt`` that of tokens.

  Copies have ``copied`` for their own, and are then sent in turns, which differ from plan to plan.
  """

  def copy(arrays: list[Array], replica_GS: Array, parent_GS: Array) -> list[Array]:
    rows_G = (replica_GS[:, 0] * 37 + jnp.sum(replica_GS)) % 101 if copied else None
    return pallas_kernels.replicate(
      arrays, replica_GS, parent_GS, axis_name=AXIS, tuning=copied or tuning, home_rows_G=rows_G
    )

  def dispatch(arrays: list[Array], value_TK: Array, to: Crossing) -> Dispatched:
    assignments = to.dest_TK, to.row_TK, value_TK
    return pallas_kernels.dispatch(
      arrays, *assignments, capacity=to.capacity, axis_name=AXIS, tuning=dealt
    )

  def combine(rows_CD: Array, gate_GTK: Array, to: Crossing) -> Array:
    return pallas_kernels.combine(
      rows_CD, gate_GTK, to.dest_TK, to.received_GTK, axis_name=AXIS, tuning=dealt
    )

  def combine_values(rows_CD: Array, value_C: Array, to: Crossing) -> tuple[Array, Array]:
    return pallas_kernels.combine_values(
      rows_CD, value_C, to.dest_TK, to.received_GTK, axis_name=AXIS, tuning=dealt
    )

  reduce = functools.partial(pallas_kernels.reduce_replicas, axis_name=AXIS, tuning=tuning)
  return Operations(copy, reduce, dispatch, combine, combine_values)


# As the layer runs them, and with few workers, which wait for their peers again and again. Of
# copies these have so many small tiles that they go in runs.
_FEW = ExchangeTuning(blocks=8, workers=3, tile_bytes=1024, steps=5)
_COPYING = TransferTuning(2, 3, 3 * 1024)
KERNELS = (kernels(None, None), kernels(TransferTuning(2, 3, 20 * 1024), _FEW, _COPYING))


def _portable() -> Operations:
  def cross(to: Crossing) -> block_exchange.BlockCrossing:
    routes = Routes(to.dest_TK, to.row_TK, jnp.zeros(1, jnp.int32))
    return block_exchange.cross(routes, 0, to.capacity, AXIS)

  # As bits: where XLA computes bfloat16 in float32, signalling NaNs come out quiet.
  def copies(arrays: list[Array], *plan: Array) -> list[Array]:
    moved = replicate.replicate([as_bits(array) for array in arrays], *plan, axis_name=AXIS)
    return [lax.bitcast_convert_type(m, a.dtype) for m, a in zip(moved, arrays, strict=True)]

  def dispatch(arrays: list[Array], value_TK: Array, to: Crossing) -> Dispatched:
    moved = [cross(to).dispatch(as_bits(array)) for array in arrays]
    moved = [lax.bitcast_convert_type(m, a.dtype) for m, a in zip(moved, arrays, strict=True)]
    return Dispatched(moved, to.received_GTK, lax.all_gather(value_TK, AXIS))

  def combine(rows_CD: Array, gate_GTK: Array, to: Crossing) -> Array:
    row_GTK = jnp.where(to.received_GTK < 0, to.capacity, to.received_GTK)
    gate_C = jnp.zeros(to.capacity, gate_GTK.dtype).at[row_GTK].set(gate_GTK, mode="drop")
    return cross(to).combine(rows_CD, gate_C)

  def combine_values(rows_CD: Array, value_C: Array, to: Crossing) -> tuple[Array, Array]:
    return cross(to).combine(rows_CD, None), cross(to).collect(value_C)

  reduce = functools.partial(replicate.reduce_replicas, axis_name=AXIS)
  return Operations(copies, reduce, dispatch, combine, combine_values)


def as_bits(array: Array) -> Array:
  """The array as unsigned integers."""
  return lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")


PORTABLE = (_portable(),)
