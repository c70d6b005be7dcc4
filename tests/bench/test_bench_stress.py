"""The stress test of transfers, with portable operations for kernels, and with planted errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import (
  COLLECTIVES,
  EXCHANGE,
  FORWARD,
  LAYER,
  PLANNING,
  count_reaching,
  exchanges_rows,
  kernel_names,
  unordered_exchanges,
)

import pallas_kernels
from ultraep_jax import testing
from ultraep_jax.bench.kernels.portable import AXIS
from ultraep_jax.bench.stress import command as stress
from ultraep_jax.bench.stress import layer as stress_layer
from ultraep_jax.bench.stress import plans as stress_plans
from ultraep_jax.bench.stress import transfers
from ultraep_jax.bench.stress.operations import KERNELS, PORTABLE
from ultraep_jax.config import BalanceConfig
from ultraep_jax.types import Plan


def problem(ranks=4, scale=32, streams=False):
  axis_types = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((ranks,), (AXIS,), axis_types, devices=jax.devices()[:ranks])
  return transfers.Problem(mesh, scale, streams=streams)


# --- plans -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks, home, slots", [(1, 4, 3), (2, 4, 3), (4, 4, 3), (4, 1, 3)])
def test_placements_are_legal(ranks, home, slots):
  plans = stress_plans.placements(np.random.default_rng(0), ranks, home, slots)
  config = BalanceConfig(replica_slots=slots, transfer="relay")
  filled = {}
  for name, (replica_GS, parent_GS) in (next(plans) for _ in range(40)):
    quota_EG = np.zeros((ranks * home, ranks), np.int32)
    for rank, slot in np.argwhere(replica_GS >= 0):
      quota_EG[replica_GS[rank, slot], rank] = 1
    load_GE = np.zeros((ranks, ranks * home), np.int32)
    load_GE[0] = quota_EG.sum(axis=1)
    plan = Plan(*map(jnp.asarray, (replica_GS, quota_EG, parent_GS)))
    testing.assert_legal_plan(plan, load_GE, config)
    filled.setdefault(name, (replica_GS >= 0).sum())
  assert filled["empty"] == 0
  if ranks > 1:
    assert filled["all slots"] == ranks * min(slots, home * (ranks - 1))
    assert filled["one to all, chain"] == filled["one to all, direct"] == ranks - 1
    assert "random" in filled


@pytest.mark.parametrize("ranks", [1, 4])
def test_routes_are_legal(ranks):
  plans = stress_plans.routes(np.random.default_rng(0), ranks, 5, 3)
  seen = {}
  for name, (dest, row) in (next(plans) for _ in range(40)):
    seen[name] = dest
    assert dest.dtype == row.dtype == np.int32 and dest.shape == row.shape == (ranks, 5, 3)
    for rank in range(ranks):
      np.testing.assert_array_equal(np.sort(row[dest == rank]), np.arange((dest == rank).sum()))
  assert (seen["all masked"] == -1).all() and (seen["all to the last rank"] == ranks - 1).all()
  assert (seen["no tokens on the first rank"][0] == -1).all()
  assert (seen["every token to one rank"].max(2) == seen["every token to one rank"].min(2)).all()


# --- transfers -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", transfers.CHECKS)
@pytest.mark.parametrize("ranks", [1, 4])
def test_right_transfers_are_right(name, ranks, monkeypatch, capsys):
  monkeypatch.setattr(transfers, "BATCH", 16)
  assert transfers.stress(name, PORTABLE * 2, problem(ranks), 20) == []
  assert f"{name}: 32 x 2 calls" in capsys.readouterr().out  # whole programs


@pytest.mark.parametrize("name", transfers.CHECKS)
def test_checks_wait_for_the_transfers_that_they_check(name):
  """And for those of the other operations; virtual devices might mix them up."""
  here = problem()
  plans = here.plans(transfers.CHECKS[name][1])
  named = [next(plans).plan for _ in range(2)]
  arguments = np.arange(2, dtype=np.uint32), jax.tree.map(lambda *parts: np.stack(parts), *named)
  jaxpr = jax.make_jaxpr(transfers.program(name, PORTABLE * 2, here))(*arguments).jaxpr
  unordered = unordered_exchanges(jaxpr, *COLLECTIVES)
  assert not [(a.primitive, b.primitive) for a, b in unordered]


def flip(array):
  """One bit of the first element, on rank 1."""
  bits = lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}").ravel()
  bits = bits.at[0].set(bits[0] ^ (lax.axis_index(AXIS) == 1).astype(bits.dtype))
  return lax.bitcast_convert_type(bits.reshape(array.shape), array.dtype)


def planted(name, part="arrays"):
  """Operations of which one is wrong in one element: of its last array, or of each of a tuple."""
  good = PORTABLE[0]

  def wrong(*args):
    result = getattr(good, name)(*args)
    if isinstance(result, pallas_kernels.Dispatched):
      return result._replace(**{part: wrong_in(getattr(result, part))})
    return wrong_in(result)

  return good._replace(**{name: wrong})


def wrong_in(result):
  if isinstance(result, tuple):
    return tuple(map(flip, result))
  return [*result[:-1], flip(result[-1])] if isinstance(result, list) else flip(result)


@pytest.mark.parametrize(
  "name, operation, count, first",
  [  # of 16 repetitions
    ("replicate", "replicate", None, "1 (all slots)"),
    ("reduce_replicas", "reduce_replicas", 32, "0 (empty)"),  # of both dtypes
    ("dispatch", "dispatch", None, "2 (all to the last rank)"),
    ("combine", "combine", 16, "0 (all masked)"),
    ("combine", "combine_values", 32, "0 (all masked)"),  # sums and numbers
  ],
)
def test_one_wrong_bit_is_found(name, operation, count, first):
  """Of slots and rows only where they are used."""
  (text,) = transfers.stress(name, [PORTABLE[0], planted(operation)], problem(ranks=2), 16)
  assert f"repetitions, on ranks [1], first in repetition {first}" in text
  found = int(text.split()[0])
  assert found == count if count else 4 < found < 16


@pytest.mark.parametrize("part", ["received_GTK", "value_GTK"])
def test_one_wrong_bit_of_what_is_told_is_found(part):
  (text,) = transfers.stress("dispatch", [planted("dispatch", part)], problem(ranks=2), 3)
  assert text.startswith("3 wrong elements")


def rounds_each_sum(replicas, homes, *plan):
  """Adds copies one by one, and rounds in between."""
  replica_GS, parent_GS = plan
  for index in np.ndindex(replica_GS.shape):
    one_GS = jnp.full_like(replica_GS, -1).at[index].set(replica_GS[index])
    sums = PORTABLE[0].reduce_replicas(replicas, homes, one_GS, parent_GS)
    homes = [lax.optimization_barrier(each) for each in sums]
  return homes


def cuts_sums(replicas, homes, *plan):
  """Towards zero."""
  if homes[0].dtype == jnp.float32:
    return PORTABLE[0].reduce_replicas(replicas, homes, *plan)
  wide = ([x.astype(jnp.float32) for x in each] for each in (replicas, homes))
  sums = PORTABLE[0].reduce_replicas(*wide, *plan)
  return [lax.bitcast_convert_type(each, jnp.bfloat16)[..., 1] for each in sums]


@pytest.mark.parametrize("fault", [rounds_each_sum, cuts_sums])
def test_sums_that_are_not_rounded_once_are_found(fault):
  wrong = PORTABLE[0]._replace(reduce_replicas=fault)
  (text,) = transfers.stress("reduce_replicas", [wrong], problem(), 4)
  assert "wrong elements" in text


@pytest.mark.parametrize("name", ["replicate", "dispatch"])
def test_what_an_earlier_call_left_is_found(name):
  """Results of data that never change."""

  def zeros(*args):
    return jax.tree.map(lambda array: array * 0, getattr(PORTABLE[0], name)(*args))

  stale = PORTABLE[0]._replace(**{name: zeros})
  (text,) = transfers.stress(name, [stale], problem(), 16)
  assert "wrong elements" in text and "on ranks [0, 1, 2, 3]" in text


def test_a_write_into_other_memory_is_found(monkeypatch):
  monkeypatch.setattr(transfers, "_multiply", flip)
  (text,) = transfers.stress("replicate", PORTABLE, problem(), 3)
  assert text == "1 elements of the matrices multiplied beside differ between ranks"


@pytest.mark.parametrize(
  "name, ranks", [("replicate", 4), ("reduce_replicas", 2), ("dispatch", 4), ("combine", 2)]
)
def test_kernels_lower_for_gpus(name, ranks):
  """All tunings, at full size."""
  full = problem(ranks, scale=1, streams=ranks == 4)
  plan = next(full.plans(transfers.CHECKS[name][1])).plan
  shapes = [jax.ShapeDtypeStruct((7, *part.shape), part.dtype) for part in plan]
  salts = jax.ShapeDtypeStruct((7,), jnp.uint32)
  traced = transfers.program(name, KERNELS, full).trace(salts, tuple(shapes))
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  kernels = len(KERNELS) * (2 if name in ("combine", "reduce_replicas") else 1)
  assert count_reaching(text) == kernels
  assert ('_xla_stream_annotation = "1"' in text) == full.streams


# --- layer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "what, data, domain_size",
  [
    *(("layer", 2, None), ("layer", 1, 2), ("layer with room", 1, None)),
    *(("scan", 1, None), ("train", 2, None)),
  ],
)
def test_layers_lower_for_gpus(what, data, domain_size):
  """At full size, no operation of the layer is left to the portable implementation.

  ``train`` is lowered for GPUs, of few tokens and with room: it has scans of layers and their
  gradients, on two groups. Further rounds have kernels of the same kinds.
  """
  layer = stress_layer.Problem.make(jax.devices()[:4], data, 1, 0, domain_size)
  layer = layer._replace(room=what in ("scan", "layer with room", "train"))
  if what.startswith("layer"):
    batch = layer.batch()
    traced = stress_layer.value_and_grads(layer, "mosaic_gpu").trace(
      batch, layer.weights(jnp.bfloat16), batch.x
    )
  elif what == "scan":
    batch = jax.tree.map(lambda leaf: leaf[0], layer.batch(1, 2))
    traced = stress_layer.residual_layers(layer, "mosaic_gpu").trace(
      layer.weights(jnp.bfloat16, 2), batch
    )
  else:
    layer = layer._replace(tokens=64)
    traced = stress_layer.update_step(layer, "mosaic_gpu").trace(
      layer.weights(jnp.float32, 2), layer.batch(2, 2)
    )
  assert kernel_names(traced.jaxpr) == (FORWARD if what == "scan" else LAYER) | EXCHANGE | PLANNING
  assert not exchanges_rows(traced.jaxpr)
  if what.startswith("layer"):  # gradients of a rank's home experts have the weights' dtype
    assert f"bf16[{stress_layer.HOME},512,256]" in str(traced.jaxpr)
    assert f"f32[{stress_layer.HOME},512,256]" not in str(traced.jaxpr)
  elif what == "train":
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "all_to_all" not in text and "collective_permute" not in text


def test_compare_finds_differences():
  want = {"a": jnp.ones(100), "n": jnp.arange(3)}
  assert stress_layer.compare(want, want) == []
  small = {"a": want["a"] * 1.001, "n": want["n"]}
  assert stress_layer.compare(small, want) == []
  (text,) = stress_layer.compare({"a": want["a"].at[3].set(2), "n": want["n"]}, want)
  assert "'a'" in text and "relative error 1.0e-01" in text
  (text,) = stress_layer.compare({"a": want["a"].at[3].set(jnp.nan), "n": want["n"]}, want)
  assert "relative error nan" in text
  (text,) = stress_layer.compare({"a": want["a"], "n": want["n"] + 1}, want)
  assert "'n'" in text and "is not" in text


@pytest.mark.slow
def test_all_parts_on_portable_operations(capsys, monkeypatch):
  """From the command line; one group of two needs several rounds."""
  for name in ("value_and_grads", "update_step"):  # both implementations are the same one here
    monkeypatch.setattr(stress_layer, name, functools.cache(getattr(stress_layer, name)))
  devices = jax.devices()[:4]
  monkeypatch.setattr(jax, "devices", lambda: devices)
  assert stress.main(["--implementation", "portable", "--scale", "64", "--repetitions", "4"]) == 0
  text = capsys.readouterr().out
  assert [line for line in text.splitlines() if line.endswith("begins")] == [
    f"{part}: begins" for part in stress.PARTS
  ]
  assert "rounds [3]" in text and "rounds [2, 2]" in text and "WRONG" not in text


def test_wrong_elements_are_an_error(capsys, monkeypatch):
  devices = jax.devices()[:4]
  monkeypatch.setattr(jax, "devices", lambda: devices)
  monkeypatch.setattr(stress.stress_operations, "PORTABLE", (planted("combine"),))
  arguments = "--implementation portable --parts replicate combine --scale 64 --repetitions 2"
  assert stress.main(arguments.split()) == 1
  text = capsys.readouterr().out
  assert "replicate: correct" in text and "\nWRONG: combine: 2 wrong elements in 2 of 2" in text
