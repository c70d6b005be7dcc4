"""Tables of tunings: what they say for which widths, what they may hold, and that kernels obey."""

import copy
import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh
from layer_problems import make_mesh

import ultraep_jax as uep
from pallas_kernels import tunings
from pallas_kernels.matmul.layout import MatmulTuning
from pallas_kernels.transfer.tuning import TransferTuning
from pallas_kernels.tunings import OPERATIONS, UNTUNED, Entry, Tunings
from ultraep_jax import implementation
from ultraep_jax.bench.kernels.matmul_problems import PROBLEMS, Problem
from ultraep_jax.bench.tune import matmuls, transfers
from ultraep_jax.devices import known
from ultraep_jax.devices.device import Device

H200 = Device.load("h200")


# --- what is found ---------------------------------------------------------------------------


def entry(operation, widths, band):
  return Entry(operation=operation, widths=widths, tuning=MatmulTuning(band=band))


wide = st.integers(1, 40).map(lambda n: 128 * n)


@given(st.lists(st.tuples(wide, wide), max_size=5, unique=True), wide, wide)
def test_the_nearest_entry_is_found(known, contracted, columns):
  entries = [entry("forward", widths, 256 + i) for i, widths in enumerate(known)]
  entries += [entry("dgrad", (contracted, columns), 1024)]
  found = Tunings(tuple(entries)).find("forward", contracted, columns)

  def times(widths):
    """How many times larger or smaller each is."""
    pairs = zip(widths, (contracted, columns), strict=True)
    return [max(a, b) / min(a, b) for a, b in pairs]

  near = [
    widths
    for widths in known
    if max(times(widths)) <= 2 and widths[1] % 256 == columns % 256  # of multiples of 128
  ]
  if not near:
    assert found is None
  else:
    product = [a * b for a, b in map(times, near)]
    chosen = known[found.band - 256]
    assert product[near.index(chosen)] == pytest.approx(min(product))


def test_any_widths_come_last():
  table = Tunings((entry("forward", (), 300), entry("forward", (4096, 1536), 400)))
  assert table.find("forward", 4096, 1536).band == table.find("forward", 4096, 1024).band == 400
  assert table.find("forward", 4096, 128).band == 300
  assert table.find("dgrad", 4096, 1536) is None
  assert hash(table) == hash(copy.deepcopy(table))


def test_the_device_is_the_one_that_is_lowered_for():
  resolve = implementation.resolve_tunings
  h200 = jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu")
  with jax.sharding.use_abstract_mesh(AbstractMesh((4,), ("expert",), abstract_device=h200)):
    assert resolve(None, ("mosaic_gpu", "portable")) == H200.tunings != UNTUNED
    assert resolve(None, ("portable",)) == UNTUNED
    assert resolve(dataclasses.replace(H200, tunings=UNTUNED), ("mosaic_gpu",)) == UNTUNED
  with jax.set_mesh(make_mesh(2)):
    assert resolve(None, ("mosaic_gpu",)) == UNTUNED
  assert resolve(None, ("mosaic_gpu",)) == UNTUNED


# --- what tables may hold --------------------------------------------------------------------

GOOD = {"operation": "forward", "widths": [1, 2], "tuning": {"schedule": "deferred"}, "measured": 0}


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"operation": "backward"}, r"entries\[0\]: operation: expected one of"),
    ({"widths": [1]}, r"widths: expected 2 \(contracted, columns\), got \(1,\)"),
    ({"widths": [1, 0]}, "widths: expected a tuple of positive integers"),
    ({"widths": 5}, "widths: expected a list"),
    ({"tuning": {"speed": 2}}, "tuning: expected null or an object of"),
    ({"tuning": {"blocks": 0}}, "blocks: expected at least 1, got 0"),
    ({"tuning": {"blocks": "132"}}, "blocks: expected an int, got str"),
    ({"tuning": {"blocks": 133, "cluster": 2}}, "blocks: expected a multiple of 2, got 133"),
    ({"tuning": {"band": 0}}, "band: expected at least 1, got 0"),
    ({"tuning": {"schedule": "later"}}, "schedule: expected one of"),
    ({"tuning": {"band": 128}}, "band: expected at least 256"),
    ({"tuning": {"stages": 5}}, "stages: expected at most 229376 shared bytes, got 245760"),
    ({"tuning": {"rows": 64, "cols": 256}}, "rows, cols: expected multiples of 128 and 64"),
    ({"tuning": {"rows": 256, "cols": 256}}, "their product at most 49152"),
    ({"tuning": {"rows": 128}}, "cols: expected an int, got NoneType"),
    (
      {"tuning": {"rows": 256, "cols": 192}},
      "stages, buffers: expected at most 229376 shared bytes",
    ),
    ({"tuning": {"buffers": 4}}, "stages, buffers: expected at most 229376 shared bytes"),
    ({"tuning": {"auto_barriers": 1}}, "auto_barriers: expected a bool"),
    ({"operation": "wgrad"}, "schedule: expected"),
    ({"operation": "sum beside", "tuning": {"cluster": 2}}, "cluster: expected 1"),
    ({"operation": "combine", "widths": [8], "tuning": {"steps": 0}}, "steps: expected at least 1"),
    ({"operation": "copying", "widths": [8], "tuning": {}}, "workers: expected 3"),
    (
      {"operation": "reduce", "widths": [8], "tuning": {"workers": 8, "tile_bytes": 28672}},
      r"workers \* tile_bytes: expected at most 229376 .* got 262144",
    ),
    ({"measured": ...}, "entry: expected an object of"),
  ],
)
def test_a_bad_entry_says_what_is_wrong(changes, message):
  values = {key: value for key, value in (GOOD | changes).items() if value is not ...}
  with pytest.raises(ValueError, match=message):
    tunings.parse([values])


def test_a_bad_table_says_what_is_wrong():
  for table, message in (
    ({}, "entries: expected a list, got dict"),
    ([GOOD, GOOD], "expected one for each operation and widths"),
  ):
    with pytest.raises(ValueError, match=message):
      tunings.parse(table)
  with pytest.raises(TypeError, match="tuning: expected ExchangeTuning for"):
    Entry(operation="dispatch", widths=(), tuning=TransferTuning())


# --- what is committed -----------------------------------------------------------------------


def committed():
  """Each tuning of an operation once for columns that divide alike, at its own widths."""
  seen = {}
  for name in Device.names():
    for each in Device.load(name).tunings.entries:
      if each.tuning is not None:
        seen.setdefault((each.operation, each.tuning, each.widths[-1] % 256), each)
  return list(seen.values())


def contest_of(each):
  """Of its tuning, at its widths."""
  tunings = {"tuned": each.tuning}
  if OPERATIONS[each.operation].tuning is MatmulTuning:
    return matmuls.contest(problem_of(each), tunings)
  mesh = jax.make_mesh((2,), ("expert",), devices=jax.devices()[:2])
  itemsize = 4 if each.operation in ("reduce", "reducing") else 2
  wide = each.widths[0] // 2 if "token" in OPERATIONS[each.operation].widths[0] else 0
  # Of an expert only the size counts.
  problem = Problem("sum beside", "", 32768, wide or each.widths[0] // (3 * 128 * itemsize), 128)
  assert transfers.widths(each.operation, problem) == each.widths
  return transfers.contest(each.operation, problem, tunings, mesh)


FEW_ROWS = 1024  # for the tuning's own tiles: of more rows the default is even ones, alike for all


def problem_of(each):
  """The problem of a matmul's entry."""
  for name, operation in PROBLEMS.items():
    for wide, inner in (each.widths, each.widths[::-1], (each.widths[1], each.widths[0] // 2)):
      problem = Problem(name, "", FEW_ROWS, wide, inner)
      if operation == each.operation and problem.widths == each.widths:
        return problem
  raise AssertionError(each)


@pytest.mark.parametrize("each", committed(), ids=lambda each: f"{each.operation} {each.widths}")
def test_committed_tunings_lower_for_gpus(each):
  contest = contest_of(each)
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=contest.sharding),
    jax.eval_shape(contest.make),
  )
  program = jax.jit(contest.programs["tuned"], donate_argnums=0)
  text = program.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("custom_call @mosaic_gpu") == 1


# --- what reaches kernels --------------------------------------------------------------------


# Each operation has a number of blocks of its own, which is its grid, or a part of it.
BLOCKS = {operation: 3 + 7 * i for i, operation in enumerate(OPERATIONS)}
# What goes home is known by its bytes: an expert's gradients, in bfloat16, and parts of these.
EXPERT_BYTES = 3 * 256 * 128 * 2
BLOCKS_OF_PARTS = {2: 9, 3: 13}


def table_of_blocks():
  entries = []
  for operation, what in OPERATIONS.items():
    workers = {"workers": 3} if operation in ("copying", "reducing") else {}
    tuning = dataclasses.replace(what.tuning(), blocks=BLOCKS[operation], **workers)
    widths = (EXPERT_BYTES,) if operation == "reducing" else ()
    entries.append(Entry(operation=operation, widths=widths, tuning=tuning))
  for part, count in BLOCKS_OF_PARTS.items():
    tuning = TransferTuning(count, 3, 32768)
    entries.append(Entry(operation="reducing", widths=(EXPERT_BYTES // part,), tuning=tuning))
  return Tunings(tuple(entries))


def grids(backward, biases=False, **changes):
  """Of all kernels of a layer."""
  config = uep.BalanceConfig(
    replica_slots=1, objective="balance", implementation="mosaic_gpu", capacity_factor=2.0
  )
  config = dataclasses.replace(config, **changes)

  def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)

  tokens, width, inner, experts = 512, 256, 128, 4
  into = shape(experts, width, inner)
  arguments = (
    shape(tokens, width),
    shape(tokens, 2, dtype=jnp.int32),
    shape(tokens, 2, dtype=jnp.float32),
    uep.ExpertWeights(
      into, into, shape(experts, inner, width), wo_bias=shape(experts, width) if biases else None
    ),
  )

  def run(x, index, gate, weights):
    def loss(x, weights):
      return jnp.sum(uep.sharded_moe(x, index, gate, weights, config=config)[0])

    return (jax.grad(loss, argnums=(0, 1)) if backward else loss)(x, weights)

  with jax.set_mesh(make_mesh(2)):
    text = str(jax.jit(run).trace(*arguments).jaxpr)
  return {int(grid) for grid in re.findall(r"Mesh\(grid=\((\d+),\)", text)}


def blocks_of(*operations):
  """Copies have a block more, which watches the slots."""
  return {
    sum(BLOCKS[part] + (part in ("copying", "replicate")) for part in operation.split(" + "))
    for operation in operations
  }


FORWARD = blocks_of("gated beside + copying", "forward beside + copying", "dispatch", "combine")
BACKWARD = blocks_of(
  "wgrad beside + copying", "dgrad beside + copying", "wgrad beside + reducing"
) | blocks_of("sum beside + reducing")


@pytest.fixture(scope="module")
def backward_grids():
  return grids(backward=True, device=dataclasses.replace(H200, tunings=table_of_blocks()))


def test_kernels_are_laid_out_as_the_config_says(backward_grids):
  assert backward_grids >= FORWARD | BACKWARD
  assert not {132, 7 * 132 + 13, 7 * 132 + 16} & backward_grids


def test_gradients_of_bfloat16_weights_are_known_by_the_bytes_that_travel(backward_grids):
  """Those of the whole expert, whose parts go home one after the other."""
  for beside in ("sum beside", "wgrad beside"):
    assert BLOCKS[beside] + BLOCKS["reducing"] in backward_grids
    for count in BLOCKS_OF_PARTS.values():
      assert BLOCKS[beside] + count not in backward_grids


def test_kernels_without_copies_are_laid_out_as_the_config_says():
  device = dataclasses.replace(H200, tunings=table_of_blocks())
  found = grids(backward=True, device=device, replica_slots=0)
  assert found >= blocks_of("gated", "forward", "dispatch", "combine", "dgrad", "wgrad", "sum")
  assert 132 not in found


def test_biases_are_replicated_as_the_config_says(backward_grids):
  device = dataclasses.replace(H200, tunings=table_of_blocks())
  alone = blocks_of("replicate")
  assert grids(backward=False, device=device, biases=True) >= alone
  assert not backward_grids & alone


def test_kernels_are_laid_out_as_the_table_says(monkeypatch):
  device = dataclasses.replace(H200, tunings=table_of_blocks())
  monkeypatch.setattr(known, "find", {"cpu": device}.get)
  found = grids(backward=False, dispatch_dtype="float8_e4m3fn")
  expected = blocks_of(
    *("gated only beside + copying", "forward beside + copying", "dispatch scaled", "combine")
  )
  assert expected <= found and 132 not in found
