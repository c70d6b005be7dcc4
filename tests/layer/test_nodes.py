"""Nodes: from devices or declared, and the layouts of a mesh that they allow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_devices import Device
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from layer_problems import layer, make_problem

import ultraep_jax as uep
from ultraep_jax import nodes


def described(*sizes, names=("data", "expert"), **config):
  mesh = AbstractMesh(sizes, names[-len(sizes) :])
  settled = nodes.settle(uep.BalanceConfig(**config), mesh, "expert")
  return settled.node_size, settled.domain_size


@pytest.mark.parametrize(
  ("sizes", "config", "settled"),
  [
    ((8,), {}, (8, 8)),
    ((8,), {"node_size": 2}, (2, 2)),
    ((8,), {"node_size": 72}, (8, 8)),
    ((2, 4), {"node_size": 4}, (4, 4)),  # experts inside a node, data across
    ((2, 4), {"node_size": 2}, (2, 2)),
    ((2, 4), {"node_size": 1}, (1, 1)),
    ((8,), {"node_size": 2, "domain_size": 4}, (2, 4)),
    ((8,), {"node_size": 2, "domain_size": None}, (2, 8)),
    ((8,), {"node_size": 4, "domain_size": 2}, (4, 2)),
  ],
)
def test_nodes_decide_where_copies_go(sizes, config, settled):
  assert described(*sizes, **config) == settled


def test_experts_along_the_outer_axis():
  names = ("expert", "data")
  assert described(4, 2, names=names, node_size=4) == (4, 2)
  assert described(4, 2, names=names, node_size=2) == (2, 1)
  assert described(4, 2, names=names, node_size=8) == (8, 4)


def test_ranks_of_a_node_along_the_axis(two_processes):
  """Whatever the domains are; nodes that take turns have one each."""
  outer = AbstractMesh((4, 2), ("expert", "data"))
  for mesh, config, ranks in (
    (AbstractMesh((2, 4), ("data", "expert")), {"node_size": 4, "domain_size": 2}, 4),
    (outer, {"node_size": 4}, 2),
    (outer, {"node_size": 8}, 4),
    (mesh_of(*range(8)), {"domain_size": None}, 4),
    (mesh_of(*INTERLEAVED), {"domain_size": None}, 1),
  ):
    assert nodes.ranks(uep.BalanceConfig(**config), mesh, "expert") == ranks


@pytest.mark.parametrize(
  ("config", "message"),
  [
    ({"node_size": 3}, "node_size: expected a divisor of the 8 devices of the mesh, or more"),
    ({"domain_size": 3}, "domain_size: expected a divisor of 8 ranks, got 3"),
  ],
)
def test_sizes_that_do_not_fit(config, message):
  with pytest.raises(ValueError, match=message):
    described(8, **config)


def test_devices_of_a_slice_are_a_node():
  slices = [Device(slice_index=i // 4, process_index=i // 2) for i in range(8)]
  assert nodes.of_devices(slices).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
  # Described ones, to compile for, are all of slice 0.
  described = [Device(local_hardware_id=None, coords=(i // 2, 0, i % 2)) for i in range(4)]
  assert nodes.of_devices(described).tolist() == [0, 0, 1, 1]
  here = [Device(coords=(i, 0, 0)) for i in range(4)]
  assert nodes.of_devices(here).tolist() == [0, 0, 0, 0]
  unknown = [_Plain("cpu", i // 2) for i in range(4)]
  assert nodes.of_devices(unknown).tolist() == [0, 0, 1, 1]
  assert nodes.smallest(np.array([0] * 8 + [1] * 4)) == 4


class _Plain:
  def __init__(self, platform, process_index):
    self.platform, self.process_index = platform, process_index


@pytest.fixture
def two_processes(monkeypatch):
  """As if the second half of the eight devices were of another process."""
  monkeypatch.setattr(nodes, "_node", lambda device: (device.id // 4,))


def mesh_of(*order, shape=None):
  devices = np.array(jax.devices())[list(order)]
  names = ("data", "expert")
  return Mesh(devices.reshape(shape or (len(order),)), names[-len(shape or (1,)) :])


INTERLEAVED = (0, 4, 1, 5, 2, 6, 3, 7)


def test_an_interleaved_mesh_is_refused_with_the_order_that_works(two_processes):
  mesh = mesh_of(*INTERLEAVED)
  message = (
    r"mesh: expected the ranks of each node side by side along 'expert', got those of nodes "
    r"\[0, 1, 0, 1, 0, 1, 0, 1\]; devices with the ids \[0, 1, 2, 3, 4, 5, 6, 7\], reshaped to "
    r"\(8,\), have them so"
  )
  with pytest.raises(ValueError, match=message):
    nodes.settle(uep.BalanceConfig(), mesh, "expert")
  assert nodes.settle(uep.BalanceConfig(), mesh_of(*range(8)), "expert").domain_size == 4
  # All ranks are one domain then, in whatever order.
  anywhere = uep.BalanceConfig(domain_size=None)
  assert nodes.settle(anywhere, mesh, "expert").domain_size == 8
  with pytest.raises(ValueError, match="side by side"):
    nodes.settle(uep.BalanceConfig(domain_size=4), mesh, "expert")
  # Domains inside a node, although the nodes alternate.
  by_two = mesh_of(0, 1, 4, 5, 2, 3, 6, 7)
  assert nodes.settle(uep.BalanceConfig(domain_size=2), by_two, "expert").domain_size == 2


def test_each_group_of_experts_counts(two_processes):
  inside = mesh_of(*range(8), shape=(2, 4))
  assert nodes.settle(uep.BalanceConfig(), inside, "expert").domain_size == 4
  across = mesh_of(0, 1, 4, 5, 2, 3, 6, 7, shape=(2, 4))
  assert nodes.settle(uep.BalanceConfig(), across, "expert").domain_size == 2


@pytest.mark.parametrize(
  "ranks", [(8,), (4, 4), (3, 3, 2), (2, 4, 2), (6, 2), (4, 2, 2), (5, 3), (1,) * 8], ids=str
)
def test_domains_are_the_largest_that_lie_in_nodes(monkeypatch, ranks):
  """Of one size, also where nodes have different numbers of ranks."""
  node_N = np.repeat(np.arange(len(ranks)), ranks)
  monkeypatch.setattr(nodes, "_node", lambda device: (node_N[device.id],))

  def fits(size):
    return all(len(set(part)) == 1 for part in node_N.reshape(-1, size))

  settled = nodes.settle(uep.BalanceConfig(), mesh_of(*range(8)), "expert")
  assert settled.domain_size == max(filter(fits, (1, 2, 4, 8)))
  assert settled.node_size == max(n for n in range(1, 9) if not any(rank % n for rank in ranks))


def test_devices_of_another_kind_are_not_taken_for_those_here(two_processes):
  """A program for them is compiled as for one node, unless told otherwise."""

  def domain(kind, size=8):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="cpu")
    mesh = AbstractMesh((size,), ("expert",), abstract_device=device)
    return nodes.settle(uep.BalanceConfig(), mesh, "expert").domain_size

  assert domain(jax.devices()[0].device_kind) == 4 and domain("another") == 8
  assert domain(jax.devices()[0].device_kind, size=16) == 16  # more than there are


@pytest.mark.parametrize("given", [True, False], ids=["given", "in context"])
def test_a_layer_on_an_interleaved_mesh_is_refused(two_processes, given):
  problem = make_problem(mesh_of(*INTERLEAVED))
  arguments = problem.x, problem.expert_index, problem.gate, problem.weights
  apply = functools.partial(uep.sharded_moe, config=uep.BalanceConfig())
  with pytest.raises(ValueError, match="side by side"):
    if given:
      jax.jit(functools.partial(apply, mesh=problem.mesh)).lower(*arguments)
    else:
      with jax.set_mesh(problem.mesh):
        jax.jit(apply).lower(*arguments)


def test_a_mesh_in_another_order_than_was_assumed_is_refused(two_processes):
  """Side by side, but fewer than while tracing, where only the number of devices was known."""
  mesh = mesh_of(0, 1, 4, 5)
  problem = make_problem(mesh)
  config = uep.BalanceConfig()
  with pytest.raises(
    ValueError, match=r"of nodes \[0, 0, 0, 0\], as JAX orders them, got \[0, 0, 1, 1\]"
  ):
    jax.jit(layer(problem, config)).lower(
      problem.x, problem.expert_index, problem.gate, problem.weights
    )
  given = functools.partial(uep.sharded_moe, config=config, mesh=mesh)
  jax.jit(given).lower(problem.x, problem.expert_index, problem.gate, problem.weights)


def test_copies_stay_inside_nodes(two_processes):
  """By default, also in a user's own ``shard_map``."""
  mesh = mesh_of(*range(8))
  problem = make_problem(mesh, load="skewed")
  config = uep.BalanceConfig(replica_slots=2, objective="balance")

  def local(x, index, gate, weights):
    y, stats = uep.moe(x, index, gate, weights, config=config)
    return y, stats.replica_expert_GS

  run = jax.shard_map(local, mesh=mesh, in_specs=P("expert"), out_specs=(P("expert"), P()))

  @jax.jit
  def loss(x):
    y, placed = run(x, problem.expert_index, problem.gate, problem.weights)
    return jnp.sum(y), placed

  with jax.set_mesh(mesh):
    placed_GS = jax.grad(loss, has_aux=True)(problem.x)[1]
  per_rank = problem.weights.wo.shape[0] // 8
  rank, slot = np.nonzero(np.asarray(placed_GS) >= 0)
  assert len(rank)
  home = np.asarray(placed_GS)[rank, slot] // per_rank
  np.testing.assert_array_equal(home // 4, rank // 4)
