"""Tokens that cross the network once a node: as by blocks for each rank, in fewer bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assignments import mesh, random_routes
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import PartitionSpec as P
from layer_problems import dense, layer, make_mesh, make_problem, relative_error, value_and_grads

from pallas_kernels import UNTUNED
from ultraep_jax.config import BalanceConfig
from ultraep_jax.transport import block_exchange, exchange, node_exchange
from ultraep_jax.types import Routes

RANKS, TOKENS, TOP_K, WIDTH = 8, 16, 4, 130


def on_ranks(cross, capacity, function, count):
  """``function`` of the crossing that ``cross`` builds and of arrays, on all ranks."""
  spec = P("expert")

  def local(dest_TK, row_TK, *args):
    routes = Routes(dest_TK, row_TK, jnp.zeros(1, jnp.int32))
    return [function(cross(routes, index, capacity, "expert"), *args) for index in range(2)]

  sharded = jax.shard_map(
    local, mesh=mesh((RANKS, "expert")), in_specs=(spec,) * (2 + count), out_specs=spec
  )
  return jax.jit(sharded)


def both_ways(crossing, x, gate, dtype):
  """Everything that a crossing does: dispatched rows, gates of rows, sums of rows, values back."""
  rows_CD, gate_C = crossing.dispatch(x, dtype), crossing.spread(gate)
  whole_CD = jnp.round(4 * rows_CD)  # small integers: sums are exact in any order
  return rows_CD, gate_C, crossing.combine(whole_CD, jnp.round(gate_C)), crossing.collect(gate_C)


@pytest.mark.parametrize(
  ("node_ranks", "favourite", "dtype"), [(2, None, None), (4, 5, "float8_e4m3fn")]
)
def test_equals_blocks_for_each_rank(node_ranks, favourite, dtype):
  """In two rounds. With one favourite, lists outgrow their blocks."""
  rng = np.random.default_rng(node_ranks)
  dest, row = random_routes(rng, RANKS, TOKENS, TOP_K, favourite)
  capacity = -(-(int(row.max()) + 1) // 2)
  x = jnp.asarray(rng.normal(size=(RANKS * TOKENS, WIDTH)), jnp.float32)
  gate = jnp.asarray(rng.normal(size=(RANKS * TOKENS, TOP_K)), jnp.float32)
  flat = [jnp.asarray(a.reshape(-1, TOP_K)) for a in (dest, row)]
  by_node = functools.partial(node_exchange.cross, node_ranks=node_ranks)
  run = functools.partial(both_ways, dtype=dtype)
  by_rank, by_node = (
    on_ranks(cross, capacity, run, 2)(*flat, x, gate) for cross in (block_exchange.cross, by_node)
  )
  assert all(float(jnp.abs(y_TD).max()) > 0 for _, _, y_TD, _ in by_rank)
  jax.tree.map(np.testing.assert_array_equal, by_node, by_rank)


# --- bytes -----------------------------------------------------------------------------------


def network_bytes(jaxpr: Jaxpr, node_ranks: int) -> int:
  """What rank 0 sends to ranks of other nodes; loops count as one step more than none."""
  total = 0
  for eqn in jaxpr.eqns:
    for value in eqn.params.values():
      inner = value.jaxpr if isinstance(value, ClosedJaxpr) else value
      if isinstance(inner, Jaxpr) and eqn.primitive.name not in ("while", "cond"):
        total += network_bytes(inner, node_ranks)
    if eqn.primitive.name in ("all_gather", "all_to_all"):
      groups = eqn.params["axis_index_groups"]
      group = range(RANKS) if groups is None else next(group for group in groups if 0 in group)
      others = sum(rank >= node_ranks for rank in group)
      size = sum(var.aval.size * var.aval.dtype.itemsize for var in eqn.invars)
      total += size * others // (len(group) if eqn.primitive.name == "all_to_all" else 1)
  return total


@pytest.mark.parametrize("node_ranks", [2, 4])
def test_fewer_bytes_cross_the_network(node_ranks):
  """K 8 on 2 nodes of 4 and 4 of 2, of 8 KB a token: against blocks of all tokens and lists."""
  top_k, width = 8, 2048
  shapes = [(RANKS * TOKENS, top_k)] * 2 + [(RANKS * TOKENS, width)]
  dtypes = (jnp.int32, jnp.int32, jnp.float32)
  arguments = [jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

  def there_and_back(crossing, x):
    return crossing.combine(crossing.dispatch(x), None)

  by_node = functools.partial(node_exchange.cross, node_ranks=node_ranks)
  flat, once = (
    network_bytes(
      jax.make_jaxpr(on_ranks(cross, 64, there_and_back, 1))(*arguments).jaxpr, node_ranks
    )
    for cross in (block_exchange.cross, by_node)
  )
  tokens = 2 * 2 * TOKENS * width * 4  # of one rank, there and back, in two rounds
  nodes = RANKS // node_ranks
  assert flat >= (RANKS - node_ranks) * tokens
  assert (nodes - 1) * tokens <= once < 1.02 * (nodes - 1) * tokens
  assert flat / once == pytest.approx((RANKS - node_ranks) / (nodes - 1), rel=0.02)
  assert node_exchange.network_tokens(TOKENS, top_k, RANKS, node_ranks) == (nodes - 1) * TOKENS


def test_runs_where_it_saves(monkeypatch):
  made = []
  cross = node_exchange.cross
  monkeypatch.setattr(
    node_exchange, "cross", lambda *a, **options: made.append(a[-1]) or cross(*a, **options)
  )
  arguments = [jnp.zeros((RANKS * TOKENS, TOP_K), jnp.int32)] * 2

  def choice(node_ranks):
    made.clear()

    def chosen(*args):
      return exchange.send(
        *(jnp.ones((TOKENS, 8)), jnp.ones((TOKENS, TOP_K)), *args),
        dispatch_dtype=None,
        node_ranks=node_ranks,
        implementations=("portable",),
        placing=("portable",),
        tunings=UNTUNED,
        rank=jax.lax.axis_index("expert"),
        count=None,
      )

    run = on_ranks(chosen, 64, lambda sent: sent.gate_C, 0)
    jax.make_jaxpr(run)(*arguments)
    return set(made) == {node_ranks}

  # Blocks of a rank hold 10 of its 16 tokens: 40 for a node of four, 10 for one of a single rank.
  assert [choice(node_ranks) for node_ranks in (1, 2, 4, 8)] == [False, True, True, False]


def test_tokens_over_the_network():
  """Where nodes are many and choices few, as blocks for each rank."""
  sizes = [(8192, 8, ranks, 8) for ranks in (8, 16, 64, 128)]
  assert [node_exchange.network_tokens(*each) for each in sizes] == [0, 8192, 7 * 8192, 120 * 640]


# --- the layer ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("data", "node_size"), [(1, 4), (1, 2), (2, 2)])
def test_the_layer_equals_a_dense_one(data, node_size, monkeypatch):
  """In several rounds, with copies inside a node: output, statistics and every gradient."""
  made = []
  cross = node_exchange.cross
  monkeypatch.setattr(
    node_exchange, "cross", lambda *a, **options: made.append(a[-1]) or cross(*a, **options)
  )
  problem = make_problem(make_mesh(8 // data, data), top_k=4, masked=True)
  config = BalanceConfig(
    replica_slots=2,
    objective="balance",
    node_size=node_size,
    capacity_factor=1.0,
  )
  y, stats, grads = value_and_grads(layer(problem, config), problem)
  assert set(made) == {node_size}
  assert int(stats.replicas.sum()) > 0 and int(stats.rounds.max()) > 1
  assert relative_error((y, grads), dense(problem)) < 2e-6
