"""Matmuls by replicas that arrive beside them, on one GPU: its copies are of its own experts."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels import Gated, Projections, Transfer, gated_beside, matmul_beside, replication
from ultraep_jax.activations import swiglu
from ultraep_jax.bench.kernels.portable import AXIS
from ultraep_jax.transport.replicate import COPYING
from ultraep_jax.types import Array


def gated_by_copies(
  rows: Array, gate: Array, up: Array, more_gate: Array, more_up: Array, sizes: Array, **kwargs: Any
) -> Gated:
  """``matmul_problems.swiglu_matmul`` by copies that arrive beside it, from the same GPU."""

  def run(rows: Array, gate: Array, up: Array, *operands: Array) -> Gated:
    *more, sizes = operands
    home = Projections((gate, up))
    return gated_beside(_copying(more), rows, home, sizes, swiglu, **kwargs)[0]

  return _on_one_rank(run)(rows, gate, up, more_gate, more_up, sizes)


def matmul_by_copies(rows: Array, home: Array, more: Array, sizes: Array, **kwargs: Any) -> Array:
  """``grouped_matmul`` by copies that arrive beside it, from the same GPU."""

  def run(rows: Array, home: Array, more: Array, sizes: Array) -> Array:
    return matmul_beside(_copying([more]), rows, home, sizes, **kwargs)[0]

  return _on_one_rank(run)(rows, home, more, sizes)


def _on_one_rank(function: Callable[..., Any]) -> Callable[..., Any]:
  axis_types = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((1,), (AXIS,), axis_types=axis_types, devices=jax.devices()[:1])
  return jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


def _copying(experts: Sequence[Array]) -> Transfer:
  """Copies each expert of ``[S, ...]`` arrays to a slot, in a turn of its own.

  In no plan does a rank send itself copies. So what there is to send is listed here, as
  ``replication`` would: how many copies are sent, how many are sent or got, which slots are filled,
  and of each copy the slot, the expert, and where copies end that are forwarded, of the same
  expert, of the same turn.
  """
  slots = experts[0].shape[0]
  none = jnp.full((1, slots), -1, jnp.int32)
  copying = replication(experts, none, none, axis_name=AXIS, tuning=COPYING, flat=False)
  if copying is None:
    raise ValueError(f"experts: expected at least one, got {slots}")
  work, *rest = copying.operands
  copies = ((slot, slot, slot, slot + 1, slot + 1) for slot in range(slots))
  listed = [slots, slots, *[1] * slots, *itertools.chain(*copies)]
  listed += [0] * (work.size - len(listed))
  return dataclasses.replace(copying, operands=[jnp.array(listed, jnp.int32), *rest])
