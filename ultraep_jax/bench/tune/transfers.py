"""What of the transfers between GPUs ``bench tune`` tries: blocks, workers, tiles and chunks."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels as kernels
from pallas_kernels import TransferTuning, combining, dispatching
from ultraep_jax.bench.contest import Contest, Program
from ultraep_jax.bench.kernels.exchange import random_routes
from ultraep_jax.bench.kernels.matmul_problems import HOME, REPLICA, Problem
from ultraep_jax.bench.kernels.portable import AXIS
from ultraep_jax.bench.kernels.transfers import time_cases
from ultraep_jax.config import BalanceConfig
from ultraep_jax.transport.replicate import COPYING, reducing_tuning
from ultraep_jax.types import Array

TOP_K = 8
# Changes to the defaults.
_CANDIDATES: Mapping[str, tuple[Mapping[str, int], ...]] = {
  "dispatch": ({"workers": 4}, {"steps": 2}, {"steps": 8}, {"tile_bytes": 8192}),
  "combine": ({"workers": 4}, {"steps": 1}, {"steps": 4}, {"steps": 8}, {"tile_bytes": 16384}),
  "replicate": ({"workers": 4}, {"tile_bytes": 8192}, {"tile_bytes": 32768}, {"blocks": 66}),
  "reduce": ({"workers": 4}, {"tile_bytes": 8192}, {"tile_bytes": 32768}, {"blocks": 66}),
  "copying": (
    {"blocks": 8},
    {"blocks": 16},
    {"blocks": 24},
    {"tile_bytes": 16384},
    {"tile_bytes": 32768},
  ),
  "reducing": (
    {"blocks": 8},
    {"blocks": 12},
    {"blocks": 16},
    {"blocks": 24},
    {"tile_bytes": 32768},
  ),
}
OPERATIONS = tuple(_CANDIDATES)


def default(operation: str, ranks: int, rows: int) -> TransferTuning:
  """What the operation has without a table, for so many rows of a rank and plans of few slots."""
  defaults = {
    "dispatch": dispatching(rows // TOP_K),
    "combine": combining(rows // TOP_K, ranks),
    "copying": COPYING,
    "reducing": reducing_tuning(ranks, 1),
  }
  return defaults.get(operation, TransferTuning())


def candidates(operation: str, ranks: int, rows: int) -> dict[str, TransferTuning]:
  """Tunings to try beside the operation's own, by a label."""
  own = default(operation, ranks, rows)
  found = {
    ", ".join(f"{name} {value}" for name, value in changes.items()): dataclasses.replace(
      own, **changes
    )
    for changes in _CANDIDATES[operation]
  }
  return {label: tuning for label, tuning in found.items() if tuning != own}


def widths(operation: str, problem: Problem) -> tuple[int]:
  """By which tables know a layer's transfer: bytes of a token, or of an expert."""
  if operation in ("dispatch", "combine"):
    return (2 * problem.wide,)
  return (3 * 2 * problem.wide * problem.inner,)


def contest(
  operation: str, problem: Problem, tunings: Mapping[str, TransferTuning], mesh: jax.sharding.Mesh
) -> Contest:
  """A transfer of a layer with the problem's widths and rows, over all ranks of a mesh."""
  title = f"{problem.model} {problem.rows} {operation}"
  if operation in ("dispatch", "combine"):
    return _exchange(title, operation, problem, tunings, mesh)
  return _weights(title, operation, problem, tunings, mesh)


def _over_ranks(
  title: str,
  make: Callable[[], Any],
  program: Callable[[Any], Program],
  tunings: Mapping[str, TransferTuning],
  only_used: Callable[[Any, Any], Any],
  mesh: jax.sharding.Mesh,
  most_error: float,
) -> Contest:
  """Of a program's tunings. The first one's result is the reference."""
  return Contest(
    title,
    make,
    {label: program(tuning) for label, tuning in tunings.items()},
    next(iter(tunings)),
    only_used,
    sharding=NamedSharding(mesh, P(AXIS)),
    most_error=most_error,
  )


def _on_ranks(function: Callable[..., Any], mesh: jax.sharding.Mesh) -> Program:
  return jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)


def _pattern(rows: int, cols: int, dtype: Any) -> Array:
  """Numbers that bfloat16 holds exactly, quickly made."""
  row, col = (lax.broadcasted_iota(jnp.int32, (rows, cols), axis) for axis in (0, 1))
  return ((row * 37 + col) % 251).astype(dtype)


# --- tokens ----------------------------------------------------------------------------------


def _exchange(
  title: str,
  operation: str,
  problem: Problem,
  tunings: Mapping[str, TransferTuning],
  mesh: jax.sharding.Mesh,
) -> Contest:
  """Even random routes of as many tokens as fill the rows."""
  ranks, tokens, width = mesh.size, problem.rows // TOP_K, problem.wide
  rng = np.random.default_rng(0)
  dest, row, capacity = random_routes(rng, ranks, tokens, TOP_K, 0.0, 0.0)
  received = np.where(dest[None] == np.arange(ranks)[:, None, None, None], row[None], -1)
  used = (dest.reshape(-1)[None] == np.arange(ranks)[:, None]).sum(axis=1)

  def make() -> Any:
    count = tokens if operation == "dispatch" else capacity
    values = _pattern(ranks * count, width, jnp.bfloat16).reshape(ranks, count, width)
    return (), (values, *map(jnp.asarray, (dest, row, received)))

  def program(tuning: Any) -> Program:
    def run(first: Any, rest: tuple[Array, ...]) -> tuple[Any, Array]:
      values, dest_TK, row_TK, received_GTK = (part[0] for part in rest)
      if operation == "dispatch":
        sizes: Any = {"capacity": capacity, "axis_name": AXIS, "tuning": tuning}
        gate_TK = jnp.full(dest_TK.shape, 0.125, jnp.float32)  # they travel along
        (out,) = kernels.dispatch([values], dest_TK, row_TK, gate_TK, **sizes).arrays
      else:
        gate_GTK = jnp.where(received_GTK >= 0, 0.125, 0.0).astype(jnp.float32)
        out = kernels.combine(
          values, gate_GTK, dest_TK, received_GTK, axis_name=AXIS, tuning=tuning
        )
      return first, out[None]

    return _on_ranks(run, mesh)

  def only_used(results: tuple[Any, Array], _: Any) -> Array:
    if operation == "combine":
      return results[1]
    mine = jnp.arange(capacity)[None, :] < used[:, None]
    return jnp.where(mine[:, :, None], results[1], 0)

  most_error = 1e-3 if operation == "combine" else 0.0
  return _over_ranks(title, make, program, tunings, only_used, mesh, most_error)


# --- weights and their gradients -------------------------------------------------------------


def _weights(
  title: str,
  operation: str,
  problem: Problem,
  tunings: Mapping[str, TransferTuning],
  mesh: jax.sharding.Mesh,
) -> Contest:
  """Copies for a skewed load, or their gradients' way home; alone or beside the layer's matmul."""
  ranks, size = mesh.size, 3 * problem.wide * problem.inner
  # The portable planner: on a CPU "auto" would see the process's GPUs and choose kernels.
  config = BalanceConfig(replica_slots=REPLICA, objective="balance", implementation="portable")
  cases = time_cases(ranks, config)
  ratio = "ratio 2.0" if ranks > 2 else "ratio 1.5"
  replica_GS, parent_GS = next(case for name, case in cases.items() if name.startswith(ratio))
  filled = replica_GS.reshape(-1) >= 0
  adds, rides = operation in ("reduce", "reducing"), operation in ("copying", "reducing")
  matmul = dataclasses.replace(problem, name="sum beside" if adds else "wgrad down beside")
  shapes = matmul.parts().shapes if rides else ()

  def make() -> Any:
    home = _pattern(ranks * HOME, size, jnp.bfloat16)
    replica = (_pattern(ranks * REPLICA, size, jnp.bfloat16),) if adds else ()
    operands = [
      _pattern(ranks * shape[0], int(np.prod(shape[1:])), jnp.bfloat16).reshape(-1, *shape[1:])
      for shape in shapes
    ]
    group_sizes = (jnp.tile(jnp.asarray(matmul.sizes, jnp.int32), ranks),) if rides else ()
    # The sums take the place of the gradients, as in a layer.
    first, moved = (home, replica) if adds else ((), (home,))
    return first, (*moved, *operands, *group_sizes)

  plan = jnp.asarray(replica_GS, jnp.int32), jnp.asarray(parent_GS, jnp.int32)

  def program(tuning: TransferTuning) -> Program:
    with_tuning: Any = {"axis_name": AXIS, "tuning": tuning}

    def run(first: Any, rest: tuple[Array, ...]) -> tuple[Any, Any]:
      if operation == "replicate":
        return first, (kernels.replicate([rest[0]], *plan, **with_tuning)[0], ())
      if operation == "reduce":
        return kernels.reduce_replicas([rest[0]], [first], *plan, **with_tuning)[0], ()
      if operation == "copying":
        home, rows, grad, sizes = rest
        copying = kernels.replication([home], *plan, **with_tuning)
        grads, copies = kernels.wgrad_beside(copying, rows, grad, sizes, HOME)
        return first, (copies[0], grads)
      replica, rows, other, weight, more, other_weight, other_more, sizes = rest
      reducing = kernels.reduction([replica], [first], *plan, **with_tuning)
      out, (sums,) = kernels.sum_beside(
        reducing,
        [rows, other],
        [weight, other_weight],
        [more, other_more],
        sizes,
        transpose_rhs=True,
      )
      return sums, out

    return _on_ranks(run, mesh)

  def only_used(results: tuple[Any, Any], _: Any) -> Any:
    first, others = results
    if not adds:
      copies, grads = others
      return jnp.where(filled[:, None], copies, 0), grads
    if not rides:
      return first
    rows = jnp.arange(problem.rows) < int(matmul.sizes.sum())
    return first, jnp.where(jnp.tile(rows, ranks)[:, None], others, 0)

  return _over_ranks(title, make, program, tunings, only_used, mesh, most_error=1e-6)
