"""Counting assignments and their ordinals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from ultraep_jax.planning import load

indices = st.lists(st.integers(-3, 9), min_size=1, max_size=40)


@given(indices)
def test_expert_load_counts_valid_indices_only(values):
  got = load.expert_load(jnp.array([values], jnp.int32), 6)
  expected = np.bincount([v for v in values if 0 <= v < 6], minlength=6)
  np.testing.assert_array_equal(got, expected)
  assert got.dtype == jnp.int32


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_position_in_group_is_the_ordinal(groups):
  position, count = load.position_in_group(jnp.array(groups, jnp.int32), 5)
  for i, group in enumerate(groups):
    if group < 5:  # 5 means no group
      assert position[i] == groups[:i].count(group)
  assert count.tolist() == [groups.count(group) for group in range(5)]


def test_gathered_loads_are_invariant_and_ordered_by_rank():
  mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))

  # out_specs=P() holds only if the matrix is typed as equal on every rank
  out_specs = P(), P("expert")

  @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("expert"), out_specs=out_specs)
  def gather(index_TK):
    load_E = load.expert_load(index_TK, 4)
    load_GE, rank = load.gather_loads(load_E, "expert", ("portable",))
    return load_GE, rank[None]

  index = jnp.arange(4, dtype=jnp.int32)[:, None].repeat(3, 1)
  load_GE, rank = jax.jit(gather)(index)
  np.testing.assert_array_equal(load_GE, 3 * np.eye(4, dtype=np.int32))
  assert rank.tolist() == [0, 1, 2, 3]
