"""Tables of the bench of a layer that need no clock: what slots can reach, and memory."""

import argparse
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ultraep_jax import testing
from ultraep_jax.bench import timing
from ultraep_jax.bench.layer.problem import Problem, specs, tokens_spec
from ultraep_jax.bench.layer.variants import (
  SLACK,
  Factor,
  bound,
  config_of,
  layer,
  one_call,
  planned,
  settled,
)
from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning import plan
from ultraep_jax.tables import table_of_records

Row = dict[str, Any]


def bounds(args: argparse.Namespace, ranks: int, top_k: int) -> list[Row]:
  """Loads flat inside the hot rank, with 2, 4, 8 and M replica slots.

  No expert is hot then, so that few slots bound what any plan can reach.
  """
  experts = args.experts or 16 * ranks
  home, rows = experts // ranks, []
  for ratio in args.ratios:
    loads = [
      testing.flat_loads(seed, experts, ranks, args.tokens, top_k, ratio)
      for seed in range(args.steps)
    ]
    for slots in sorted({slots for slots in (2, 4, 8, home) if slots <= home}):
      config = BalanceConfig(replica_slots=slots, objective="balance")
      plans = [jax.device_get(plan.plan_quotas(jnp.asarray(load), config)) for load in loads]
      mean = args.tokens * top_k
      rows.append(
        {
          "ranks": ranks,
          "experts": experts,
          "ratio": ratio,
          "slots": slots,
          "bound": max(bound(load, slots) for load in loads),
          "reached": max(float(p.quota.sum(axis=0).max()) / mean for p in plans),
          "replicas": max(int((p.replica_expert >= 0).sum()) for p in plans),
        }
      )
  columns = {"flat loads, ratio": "ratio", "experts": "experts", "ranks": "ranks", "slots": "slots"}
  columns |= {"bound": "bound", "reached": "reached", "copies": "replicas"}
  print(table_of_records(columns, rows, digits=4), flush=True)
  return rows


def memory(
  mesh: jax.sharding.Mesh, problems: Iterable[tuple[str, Problem]], args: argparse.Namespace
) -> list[Row]:
  """What one call takes of a device as compiled, with buffers that drop nothing.

  ``none`` has either a buffer for its busiest rank, or a tight one and several rounds.
  """
  rows = []
  for name, problem in problems:
    for direction in args.passes:
      cases: tuple[tuple[str, Factor], ...] = (
        ("none", max(SLACK, problem.busiest)),
        ("none", SLACK),
        ("quota", "auto"),
        ("ideal", "auto"),
      )
      for variant, factor in cases:
        rows.append(_memory(mesh, name, problem, direction, variant, factor, args))
  print(_memory_table(rows), flush=True)
  return rows


def _memory(
  mesh: jax.sharding.Mesh,
  name: str,
  problem: Problem,
  direction: str,
  variant: str,
  factor: Factor,
  args: argparse.Namespace,
) -> Row:
  call = one_call(layer(variant, problem, args, factor), direction)
  function = jax.shard_map(
    functools.partial(call, jnp.int32(0)),
    mesh=mesh,
    in_specs=specs(mesh),
    out_specs=tokens_spec(mesh),
    check_vma=False,
  )
  with timing.quiet():
    compiled = jax.jit(function).lower(*problem.arguments).compile()
  chosen = problem.tokens * problem.arrays.gate.shape[1]
  sizes = settled(problem, config_of(variant, args, factor), direction)
  buffer = sizes.transient_capacity if direction == "forward" else sizes.capacity
  busiest = planned(variant, problem, args)
  analysis = compiled.memory_analysis()
  return {
    "shape": name,
    "ratio": problem.busiest,
    "pass": direction,
    "variant": variant,
    "capacity_factor": factor,
    "buffer_rows": buffer,
    "rounds": math.ceil(round(busiest * chosen) / buffer),
    "arguments_gb": getattr(analysis, "argument_size_in_bytes", 0) / 1e9,
    "results_gb": getattr(analysis, "output_size_in_bytes", 0) / 1e9,
    "temp_gb": getattr(analysis, "temp_size_in_bytes", 0) / 1e9,
    "peak_gb": timing.gigabytes(analysis),
  }


def _memory_table(rows: Sequence[Row]) -> str:
  columns = {
    "": "shape",
    "ratio": "ratio",
    "pass": "pass",
    "variant": "variant",
    "buffer": "capacity_factor",
    "rows": "buffer_rows",
    "rounds": "rounds",
    "GB": "peak_gb",
    "arguments": "arguments_gb",
    "results": "results_gb",
    "temporary": "temp_gb",
  }
  return table_of_records(columns, rows)
