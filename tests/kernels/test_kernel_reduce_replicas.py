"""The reduction kernel: lowering for GPUs, runs on virtual devices, and its work lists."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from jax import lax
from jax.sharding import PartitionSpec as P
from mosaic_interpret import interpreted
from placements import CROSSING, PLANS, placements
from programs import count_reaching

from pallas_kernels.transfer.reduce_replicas import reduce_replicas
from pallas_kernels.transfer.reduce_work import Fields, num_nodes_of, work_list
from pallas_kernels.transfer.tuning import TransferTuning

RANKS, HOME, SLOTS = 4, 2, 2


def mesh(*sizes_and_names):
  sizes, names = zip(*sizes_and_names or [(RANKS, "expert")], strict=True)
  axis_types = (jax.sharding.AxisType.Auto,) * len(sizes)
  return jax.make_mesh(sizes, names, axis_types, devices=jax.devices()[: int(np.prod(sizes))])


def sharded(mesh, tuning=None, check_vma=True):
  function = functools.partial(reduce_replicas, axis_name="expert", tuning=tuning)
  specs = (P("expert"), P("expert"), P(), P())
  return jax.jit(
    jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("expert"), check_vma=check_vma)
  )


def plan(name):
  return tuple(jnp.array(part, jnp.int32) for part in PLANS[name])


def gradients(name, *shapes, dtype=jnp.float32, most=1000):
  """Small integers, whose sums are exact in any order; NaN in empty slots."""
  rng = np.random.default_rng(0)
  empty_R = np.array(PLANS[name][0]).reshape(-1) < 0
  replicas, homes = [], []
  for shape in shapes:
    replica = rng.integers(-most, most, size=(RANKS * SLOTS, *shape)).astype(np.float32)
    replica[empty_R] = np.nan
    replicas.append(jnp.asarray(replica, dtype))
    homes.append(jnp.asarray(rng.integers(-most, most, (RANKS * HOME, *shape)), dtype))
  return replicas, homes


def assert_summed(sums, replicas, homes, name):
  expert_R = np.array(PLANS[name][0]).reshape(-1)
  for got, replica, home in zip(sums, replicas, homes, strict=True):
    expected, replica = (np.array(x, np.float32) for x in (home, replica))
    np.add.at(expected, expert_R[expert_R >= 0], replica[expert_R >= 0])
    assert got.dtype == home.dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), expected)


# --- interpreted -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PLANS)
def test_sums_exactly(name, dtype):
  """More tiles of two halves than the inbox holds, parts of tiles, rows smaller than a unit.

  Sums of up to eight integers below 32 are exact in bfloat16.
  """
  shapes = (43, 1024), (8,), (3, 700)
  replicas, homes = gradients(name, *shapes, dtype=dtype, most=31)
  tile_bytes = 6 * 1024 * jnp.dtype(dtype).itemsize  # six units
  with interpreted():
    run = sharded(mesh(), TransferTuning(blocks=1, workers=2, tile_bytes=tile_bytes))
    sums = run(replicas, homes, *plan(name))
  assert_summed(sums, replicas, homes, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_two_ranks_nobody_sends_to_an_inbox(dtype):
  """Both have copies of the other's. Tiles of one half and of two, in turn for each worker."""
  rng = np.random.default_rng(0)
  shapes, plan = ((9, 1024), (8,), (3, 1024)), np.array([[[3, -1], [-1, 0]], [[1, -1], [-1, 0]]])
  replicas, homes = (
    [jnp.asarray(rng.integers(-31, 31, (2 * count, *shape)), dtype) for shape in shapes]
    for count in (SLOTS, HOME)
  )
  function = functools.partial(
    reduce_replicas, axis_name="expert", tuning=TransferTuning(blocks=1, workers=2, tile_bytes=4096)
  )
  specs = P("expert"), P("expert"), P(), P()
  run = jax.shard_map(function, mesh=mesh((2, "expert")), in_specs=specs, out_specs=P("expert"))
  with interpreted():
    sums = jax.jit(run)(replicas, homes, *jnp.asarray(plan, jnp.int32))
  for got, replica, home in zip(sums, replicas, homes, strict=True):
    want = np.array(home, np.float32)
    want[3] += np.asarray(replica[0], np.float32)
    want[0] += np.asarray(replica[3], np.float32)
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["opposite", "chain", "star", "crossed"])
def test_ranks_sum_in_order_and_round_once(name, dtype):
  """Own value, then children by rank, in float32: sums that depend on the order."""
  rng = np.random.default_rng(0)
  replicas, homes = (
    jnp.asarray(10.0 ** rng.uniform(-3, 3, (RANKS * count, 1024)), dtype) for count in (SLOTS, HOME)
  )
  replica_GS, parent_GS = PLANS[name]
  with interpreted():
    run = sharded(mesh(), TransferTuning(blocks=1, workers=2, tile_bytes=4096))
    (sums,) = run([replicas], [homes], *plan(name))

  def total(rank, expert, value):
    value = np.asarray(value, np.float32)
    for child, slot in itertools.product(range(RANKS), range(SLOTS)):
      if replica_GS[child][slot] == expert and parent_GS[child][slot] == rank:
        value = value + total(child, expert, replicas[child * SLOTS + slot])
    return np.asarray(jnp.asarray(value, dtype), np.float32)

  expected = [total(e // HOME, e, home) for e, home in enumerate(homes)]
  np.testing.assert_array_equal(np.asarray(sums, np.float32), expected)


def test_sums_along_one_axis_of_two():
  """Two groups of ranks, each with its own gradients."""
  replicas, homes = gradients("chain", (64,))
  devices = mesh((2, "data"), (RANKS, "expert"))
  both = [jnp.stack([a, -a]).reshape(-1, 64) for a in (*replicas, *homes)]
  spec = P(("data", "expert"))
  function = functools.partial(
    reduce_replicas, axis_name="expert", tuning=TransferTuning(blocks=1, workers=1, tile_bytes=4096)
  )
  with interpreted():
    run = jax.shard_map(
      lambda replica, home, *plan: function([replica], [home], *plan),
      mesh=devices,
      in_specs=(spec, spec, P(), P()),
      out_specs=spec,
    )
    (sums,) = jax.jit(run)(*both, *plan("chain"))
  first, second = np.split(np.asarray(sums), 2)
  assert_summed([first], replicas, homes, "chain")
  assert_summed([-second], replicas, homes, "chain")


# --- lowering --------------------------------------------------------------------------------


def lowered(function, args, devices, check_vma):
  specs = (P("expert"), P("expert"), P(), P())
  run = jax.shard_map(
    function, mesh=devices, in_specs=specs, out_specs=P("expert"), check_vma=check_vma
  )
  return jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def aliases(text):
  """Which operands of the kernels are updated in place."""
  return [
    int(operand) for operand in re.findall(r"tuple_indices = \[\d+\], operand_index = (\d+)", text)
  ]


def shapes_of(shapes, dtype=jnp.float32):
  replicas = [jax.ShapeDtypeStruct((RANKS * SLOTS, *shape), dtype) for shape in shapes]
  homes = [jax.ShapeDtypeStruct((RANKS * HOME, *shape), dtype) for shape in shapes]
  return replicas, homes


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
  "shapes", [[(4096, 1536), (4096, 1536), (1536, 4096)], [(64, 33), (12,)], [(4,)]]
)
def test_lowers_for_gpus_and_updates_homes_in_place(shapes, dtype, check_vma):
  function = functools.partial(reduce_replicas, axis_name="expert")
  for devices in (mesh(), mesh((2, "data"), (RANKS, "expert"))):
    text = lowered(function, (*shapes_of(shapes, dtype), *plan("empty")), devices, check_vma)
    assert count_reaching(text) == 1  # one kernel for all arrays
    count = len(shapes)
    assert aliases(text)[:count] == list(range(1 + count, 1 + 2 * count))


def test_alias_survives_loops_and_derivatives():
  """Homes carried by loops and made in a backward pass, also one that is rematerialised."""

  def update(homes, replicas, *plan):
    return reduce_replicas(replicas, homes, *plan, axis_name="expert")

  def in_loops(replicas, homes, *plan):
    homes = lax.fori_loop(0, 3, lambda _, homes: update(homes, replicas, *plan), homes)
    homes = lax.while_loop(
      lambda homes: jnp.any(homes[0][0, :1] > 0), lambda h: update(h, replicas, *plan), homes
    )
    return lax.scan(lambda h, _: (update(h, replicas, *plan), None), homes, length=2)[0]

  def in_backward(replicas, homes, *plan):
    @jax.custom_vjp
    def square(homes):
      return [home * home for home in homes]

    def backward(homes, grads):
      grads = [2 * home * grad for home, grad in zip(homes, grads, strict=True)]
      return (update(grads, replicas, *plan),)

    square.defvjp(lambda homes: (square(homes), homes), backward)
    return jax.grad(lambda h: sum(jnp.sum(x) for x in jax.checkpoint(square)(h)))(homes)

  for check_vma, (function, kernels) in itertools.product(
    (True, False), ((in_loops, 3), (in_backward, 1))
  ):
    args = (*shapes_of([(64,)]), *plan("empty"))
    if function is in_loops and check_vma:  # the condition of a while loop must not vary
      continue
    text = lowered(function, args, mesh(), check_vma)
    # Equal kernels share a function.
    assert 1 <= count_reaching(text) <= kernels
    assert aliases(text).count(2) == count_reaching(text)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_checkpoint_runs_it_again(check_vma):
  """Where a gradient is made inside ``jax.checkpoint``, whose backward pass needs it."""

  @jax.checkpoint
  def norm(scale, replicas, homes, *plan):
    (total,) = reduce_replicas(replicas, homes, *plan, axis_name="expert")
    return lax.psum(jnp.sum((scale * total) ** 2), "expert")

  def backward(*args):
    return jax.grad(norm)(jnp.float32(2), *args)[None]

  text = lowered(backward, (*shapes_of([(64,)]), *plan("chain")), mesh(), check_vma)
  assert count_reaching(text) == 1
  assert aliases(text)[0] == 2


def test_output_varies_over_the_axis():
  """An output typed as the same on all ranks would multiply gradients by their number."""

  def varying(replicas, homes, *plan):
    (total,) = reduce_replicas(replicas, homes, *plan, axis_name="expert")
    assert jax.typeof(total).manual_axis_type.varying == {"expert"}
    return total

  args = ([jnp.zeros((SLOTS, 8))], [jnp.zeros((HOME, 8))])  # the same on all ranks
  jax.jit(jax.shard_map(varying, mesh=mesh(), in_specs=P(), out_specs=P("expert"))).trace(
    *args, *plan("star")
  )


def test_no_slots_and_no_arrays_need_no_kernel():
  empty = jnp.zeros((RANKS, 0), jnp.int32)
  homes = [jnp.ones((RANKS * HOME, 8))]
  (total,) = sharded(mesh())([jnp.zeros((0, 8))], homes, empty, empty)
  np.testing.assert_array_equal(np.asarray(total), np.ones((RANKS * HOME, 8)))
  assert sharded(mesh())([], [], *plan("star")) == []


# --- work lists ------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=3)
def jitted_work_list(replica_GS, parent_GS, rank, home):
  return work_list(replica_GS, parent_GS, rank, home)


def decoded(work, ranks, slots, home):
  """Nodes in order: source, parent, children and target."""
  nodes, begin, size = [], 0, num_nodes_of(ranks, slots, home)
  for index in range(work[Fields.COUNT]):
    source, parent, end, target = (
      int(work[Fields.node(size, index, column)]) for column in Fields.COLUMNS
    )
    children = [int(work[Fields.child(size, i)]) for i in range(begin, end)]
    nodes.append((source, parent, children, target))
    begin = end
  return nodes


@settings(max_examples=60)
@example(CROSSING)
@given(placements())
def test_work_lists_count_every_slot_once_and_never_wait_for_ever(placement):
  """Runs the lists of all ranks for four tiles, one worker a rank, as far as they get."""
  home, replica_GS, parent_GS = placement
  ranks, slots = replica_GS.shape
  tiles = 4
  lists = [
    decoded(
      np.asarray(jitted_work_list(replica_GS, parent_GS, jnp.int32(rank), home)), ranks, slots, home
    )
    for rank in range(ranks)
  ]
  inbox = {}  # slot: the tiles on their way to its parent, sets of what is summed
  acknowledged = np.zeros(ranks * slots, int)
  totals = [{} for _ in range(tiles)]
  ended = {}  # slot: those that add to a home by themselves and are done

  def run(rank):
    for tile, (source, parent, children, target) in itertools.product(range(tiles), lists[rank]):
      slot = rank * slots + source - home
      total = [rank * home + source] if source < home else [slot]
      assert children == sorted(children)
      if source < home:
        assert (target == 0) == (len(children) == 1)
        if target == 0:
          continue
      elif target < 0 and tile >= 2:
        while not acknowledged[slot]:
          yield "waits"
        acknowledged[slot] -= 1
      for child in children:
        while not inbox.get(child):
          yield "waits"
        sent_tile, sent = inbox[child].pop(0)
        assert sent_tile == tile and child // slots != rank
        total += sent
      if source < home:
        totals[tile][rank * home + source] = total[1:]
      elif target >= 0:
        assert parent * home + target == replica_GS.flat[slot]
        totals[tile][parent * home + target] = total
      else:
        assert parent == parent_GS.flat[slot]
        inbox.setdefault(slot, []).append((tile, total))
        assert len(inbox[slot]) <= 2
      acknowledged[children] += tile + 2 < tiles
    for source, _, children, target in lists[rank]:
      if source >= home and target >= 0:
        ended[rank * slots + source - home] = True
      while source < home and target == 0 and children[0] not in ended:
        yield "waits"

  running = {rank: run(rank) for rank in range(ranks)}
  for _ in range(2 * tiles * ranks * slots + 3):
    running = {rank: steps for rank, steps in running.items() if next(steps, None)}
  assert not running
  assert not acknowledged.any() and not any(inbox.values())
  for total in totals:
    expected = {e: np.flatnonzero(replica_GS == e).tolist() for e in set(replica_GS.flat) - {-1}}
    assert {e: sorted(slots) for e, slots in total.items()} == expected


# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("replica", "home", "error", "message"),
  [
    (((3,), "float32"), ((3,), "float32"), NotImplementedError, "multiple of 16 bytes, got 12 by"),
    (((8,), "float32"), ((4,), "float32"), ValueError, r"replicas: expected shapes \[\(2, 4\)\]"),
    (((8,), "bfloat16"), ((8,), "float32"), NotImplementedError, "all of float32 or all of bfl"),
    (((8,), "float16"), ((8,), "float16"), NotImplementedError, r"all of bfloat16, got \['float16"),
  ],
)
def test_rejects_arrays(replica, home, error, message):
  replicas = [jax.ShapeDtypeStruct((RANKS * SLOTS, *replica[0]), replica[1])]
  homes = [jax.ShapeDtypeStruct((RANKS * HOME, *home[0]), home[1])]
  with pytest.raises(error, match=message):
    sharded(mesh()).trace(replicas, homes, *plan("star"))


def test_rejects_plans_and_tunings():
  replicas, homes = gradients("star", (8,))
  replica_GS, parent_GS = plan("star")
  with pytest.raises(ValueError, match=r"parent_GS: expected shape \[4, S\], got \(4, 1\)"):
    sharded(mesh())(replicas, homes, replica_GS, parent_GS[:, :1])
  with pytest.raises(TypeError, match="parent_GS: expected int32, got float32"):
    sharded(mesh())(replicas, homes, replica_GS, parent_GS.astype(jnp.float32))
  with pytest.raises(ValueError, match=r"replicas: expected shapes \[\(2, 8\)\], got \[\]"):
    sharded(mesh())([], homes, replica_GS, parent_GS)
  replicas, homes = gradients("star", (32768,))
  with pytest.raises(ValueError, match="tiles of a multiple of 1024 elements of bfloat16, got 512"):
    halved = ([each.astype(jnp.bfloat16) for each in arrays] for arrays in (replicas, homes))
    sharded(mesh(), TransferTuning(tile_bytes=1024))(*halved, replica_GS, parent_GS)
  shared = "reduce_replicas: expected at most 232448 bytes of shared memory, got 26"
  with pytest.raises(NotImplementedError, match=shared):
    sharded(mesh(), TransferTuning(blocks=1, workers=8, tile_bytes=28672))(
      replicas, homes, replica_GS, parent_GS
    )
