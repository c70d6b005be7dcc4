"""Checks and times the kernels that carry tokens to rows and back, beside the portable exchange.

Run on every GPU of a host: ``ultraep bench exchange``. Rows must hold the tokens'
bits; sums are compared with float32. Times are of many calls chained inside one jit; those of a
dispatch in FP8 include quantising the tokens.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import UNTUNED, ExchangeTuning, combine, dispatch, dispatch_scaled
from ultraep_jax.bench import timing
from ultraep_jax.bench.kernels.transfers import open_mesh
from ultraep_jax.config import DispatchDtype
from ultraep_jax.tables import table
from ultraep_jax.tools import processes
from ultraep_jax.tools.arguments import natural, positive
from ultraep_jax.tools.errors import described
from ultraep_jax.transport import block_exchange, exchange, wire
from ultraep_jax.transport.exchange import Sent
from ultraep_jax.types import Array, Routes

AXIS = "expert"
SHAPES = {"4096x8x7168": (4096, 8, 7168), "8192x8x4096": (8192, 8, 4096)}


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  add_arguments(parser)
  return processes.run(run, parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("what", nargs="*", choices=["check", "time"], help="default: both")
  processes.add_argument(parser)
  parser.add_argument("--shapes", nargs="*", default=list(SHAPES), help="TxKxD")
  parser.add_argument("--tunings", nargs="*", default=[], help="more, BLOCKSxWORKERSxBYTESxSTEPS")
  parser.add_argument("--scale", type=positive, default=1, help="divide tokens, to try it on a CPU")
  parser.add_argument("--calls", type=positive, default=20, help="calls chained inside one jit")
  parser.add_argument("--repeats", type=positive, default=5)
  parser.add_argument(
    "--dispatch-dtype", choices=["float8_e4m3fn"], help="that tokens cross in; default: bfloat16"
  )
  parser.add_argument("--cases", type=natural, default=20, help="random cases to check")


def run(args: argparse.Namespace) -> int:
  mesh = open_mesh()
  what = args.what or ["check", "time"]
  if "check" in what:
    check(mesh, args.cases, args.dispatch_dtype)
  if "time" in what:
    tunings = [None, *(ExchangeTuning(*map(int, text.split("x"))) for text in args.tunings)]
    for name in args.shapes:
      tokens, top_k, width = map(int, name.split("x"))
      shape = tokens // args.scale, top_k, width
      time_shape(mesh, shape, tunings, args.calls, args.repeats, args.dispatch_dtype)
  return 0


def random_routes(
  rng: np.random.Generator, ranks: int, tokens: int, top_k: int, masked: float, favour: float
) -> tuple[np.ndarray, np.ndarray, int]:
  """Destinations and rows ``[G, T, K]``, rows of a rank in random order, and the capacity."""
  weight_G = np.where(np.arange(ranks) == 0, 1 + favour, 1.0)
  dest = rng.choice(ranks, size=(ranks, tokens, top_k), p=weight_G / weight_G.sum())
  dest = np.where(rng.random(dest.shape) < masked, -1, dest)
  busiest = max(int((dest == rank).sum()) for rank in range(ranks))
  return dest.astype(np.int32), number_rows(rng, dest), max(-(-busiest // 8) * 8, 8)


def number_rows(rng: np.random.Generator, dest: np.ndarray) -> np.ndarray:
  """Rows for destinations ``[G, T, K]``: those of a rank in random order, 0 if masked."""
  row = np.zeros(dest.shape, np.int32)
  for rank in range(dest.shape[0]):
    row[dest == rank] = rng.permutation((dest == rank).sum())
  return row


def on_mesh(mesh: jax.sharding.Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
  """``function`` on each rank's part of arrays with a leading axis of ranks."""

  def local(*args: Array) -> Any:
    return jax.tree.map(lambda out: out[None], function(*[arg[0] for arg in args]))

  return jax.jit(
    jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
  )


def send(
  kind: Any,
  x_TD: Array,
  gate_TK: Array,
  dest_TK: Array,
  row_TK: Array,
  capacity: int,
  dispatch_dtype: DispatchDtype | None,
) -> Sent:
  """By kernels, or by blocks as ``exchange.send`` does where these hold fewer tokens than all."""
  if kind is block_exchange:
    crossing = blocks(dest_TK, row_TK, capacity)
    gate_C = crossing.spread(gate_TK)
    return Sent(crossing.dispatch(x_TD, dispatch_dtype), gate_C, gate_C, crossing)
  routes = Routes(dest_TK, row_TK, jnp.zeros(1, jnp.int32))
  return exchange.send(
    *(x_TD, gate_TK, routes, 0, capacity, AXIS),
    dispatch_dtype=dispatch_dtype,
    node_ranks=lax.axis_size(AXIS),
    implementations=("mosaic_gpu",),
    placing=("portable",),
    tunings=UNTUNED,
    rank=lax.axis_index(AXIS),
    count=None,
  )


def blocks(dest_TK: Array, row_TK: Array, capacity: int) -> block_exchange.BlockCrossing:
  routes = Routes(dest_TK, row_TK, jnp.zeros(1, jnp.int32))
  return block_exchange.cross(routes, 0, capacity, AXIS)


def check(mesh: jax.sharding.Mesh, cases: int, dispatch_dtype: DispatchDtype | None) -> None:
  """Raises AssertionError unless both kernels do what the portable exchange does."""
  rng = np.random.default_rng(0)
  for index in range(cases):
    tokens, top_k = int(rng.integers(1, 3000)), int(rng.choice([1, 2, 3, 8]))
    width = 16 * int(rng.integers(1, 480))
    dtype = jnp.dtype(rng.choice(["bfloat16", "float32"]))
    masked, favour = (float(rng.choice([0.0, 0.1, 0.9])), float(rng.choice([0.0, 2.0, 50.0])))
    dest, row, capacity = random_routes(rng, mesh.size, tokens, top_k, masked, favour)
    x = np.asarray(rng.normal(size=(mesh.size, tokens, width)), dtype)
    gate = rng.uniform(0.5, 1, dest.shape).astype(np.float32)

    def both(
      kind: Any,
      summed: Any,
      dest_TK: Array,
      row_TK: Array,
      x_TD: Array,
      gate_TK: Array,
      capacity: int = capacity,
    ) -> Any:
      arguments = x_TD, gate_TK, dest_TK, row_TK, capacity, dispatch_dtype
      rows_CD, gates, gate_C, cross = send(kind, *arguments)
      used_C1 = (gate_C > 0)[:, None]  # others may hold anything
      rows_CD = jnp.where(used_C1, rows_CD, 0)
      again_CD = jnp.where(used_C1, cross.dispatch(x_TD), 0)
      summed_CD = rows_CD.astype(summed)
      y_TD = cross.combine(summed_CD * 2, gates)
      sums_TD, value_TK, _ = exchange.combine_values(cross, summed_CD, gate_C, (), None)
      return rows_CD, again_CD, gate_C, value_TK, y_TD, sums_TD

    args = processes.put((dest, row, x, gate), NamedSharding(mesh, P(AXIS)))
    by_kernels = functools.partial(both, exchange, dtype)
    by_blocks = functools.partial(both, block_exchange, jnp.float32)
    got, want = (processes.gather(on_mesh(mesh, run)(*args)) for run in (by_kernels, by_blocks))
    parts = "rows", "again", "gates", "value", "y", "sum"
    for part, a, b in zip(parts, got, want, strict=True):
      a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
      if part in ("y", "sum"):  # what crosses is rounded, and the sum
        error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-9)
        assert error < (1e-6 if dtype == jnp.float32 else 4e-3), f"{part}: {error}"
      else:
        wrong = int((a != b).sum())
        assert not wrong, f"{part}: {wrong} of {a.size} differ, {tokens} {top_k} {width} {dtype}"
    print(f"correct: case {index}, T{tokens} K{top_k} D{width} {dtype}", flush=True)


def time_shape(
  mesh: jax.sharding.Mesh,
  shape: tuple[int, int, int],
  tunings: Sequence[ExchangeTuning | None],
  calls: int,
  repeats: int,
  dispatch_dtype: DispatchDtype | None,
) -> None:
  tokens, top_k, width = shape
  rng = np.random.default_rng(0)
  dest, row, capacity = random_routes(rng, mesh.size, tokens, top_k, 0.0, 0.0)
  ranks = np.arange(mesh.size)[:, None, None, None]
  received = np.where(dest[None] == ranks, row[None], -1)
  crossings = sum(int((dest == g).any(axis=2).sum()) for g in range(mesh.size))
  own = sum(int((dest[g] == g).any(axis=1).sum()) for g in range(mesh.size))
  remote = (crossings - own) / mesh.size  # tokens that a rank sends to others, and gets back
  sharding = NamedSharding(mesh, P(AXIS))

  @functools.partial(jax.jit, out_shardings=sharding)
  def normal(key: Array) -> Array:
    return jax.random.normal(key, (mesh.size, tokens, width), jnp.bfloat16)

  @functools.partial(jax.jit, out_shardings=sharding)
  def normal_rows(key: Array) -> Array:
    return jax.random.normal(key, (mesh.size, capacity, width), jnp.bfloat16)

  x, rows = normal(jax.random.key(0)), normal_rows(jax.random.key(1))
  gate, value = (rng.random(of.shape).astype(np.float32) for of in (received, dest))
  arrays = processes.put((dest, row, received, gate, value), sharding)
  dest, row, received, gate, value = arrays

  def there(tuning: ExchangeTuning | None, _: Array, x: Array, *tables: Array) -> Any:
    sizes: Any = {"capacity": capacity, "axis_name": AXIS, "tuning": tuning}
    arrays = wire.pack(x, dispatch_dtype)
    if dispatch_dtype is None:
      return dispatch(arrays, *tables, **sizes)
    return dispatch_scaled(*arrays, *tables, dtype=x.dtype, **sizes)

  def there_and_pass(_: Array, x: Array, *tables: Array) -> Array:
    sent = dispatch(wire.pack(x, dispatch_dtype), *tables, capacity=capacity, axis_name=AXIS)
    return wire.unpack(sent.arrays, x.dtype)

  def back(
    tuning: ExchangeTuning | None, _: Array, rows: Array, gate: Array, *tables: Array
  ) -> Array:
    dest_TK, received_GTK = tables
    return combine(rows, gate, dest_TK, received_GTK, axis_name=AXIS, tuning=tuning)

  def block_there(_: Array, x: Array, dest_TK: Array, row_TK: Array) -> Array:
    return blocks(dest_TK, row_TK, capacity).dispatch(x, dispatch_dtype)

  def block_back(_: Array, rows: Array, dest_TK: Array, row_TK: Array) -> Array:
    return blocks(dest_TK, row_TK, capacity).combine(rows, jnp.ones(capacity, jnp.float32))

  variants: dict[str, tuple[Callable[..., Any], tuple[Array, ...]]] = {
    "dispatch, portable": (block_there, (x, dest, row)),
    "combine, portable": (block_back, (rows, dest, row)),
  }
  if dispatch_dtype is not None:
    variants["dispatch, scaled by a pass"] = (there_and_pass, (x, dest, row, value))
  for t in tunings:
    label = f"{t.blocks} x {t.workers} x {t.tile_bytes} x {t.steps}" if t else "by default"
    variants[f"dispatch {label}"] = (functools.partial(there, t), (x, dest, row, value))
    variants[f"combine {label}"] = (functools.partial(back, t), (rows, gate, dest, received))
  measured = []
  for name, (function, args) in variants.items():
    chained = functools.partial(on_mesh(mesh, timing.chain(function, calls)), *args)
    try:
      seconds = timing.median(timing.in_turn({name: chained}, repeats, calls)[name])
      kernels = timing.grouped(
        timing.kernel_times(chained, calls), {k: [k] for k in ("dispatch", "combine")}
      )
    except Exception as error:
      print(f"{name}: {described(error)}", flush=True)
      continue
    on_device = ", ".join(f"{k} {v:.0f}" for k, v in kernels.items())
    dtype = dispatch_dtype if name.startswith("dispatch") else None
    sent = remote * wire.token_bytes(width, 2, dtype)
    sizes = f"T{tokens} K{top_k} D{width}"
    measured.append([sizes, name, seconds * 1e6, sent / seconds / 1e9, on_device])
  header = ["", "operation", "us a call", "GB/s remote", "us on the device"]
  print(table(header, measured, digits=1), flush=True)


if __name__ == "__main__":
  raise SystemExit(main())
