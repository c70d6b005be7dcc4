"""Counting assignments and their ordinals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
  @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("expert"), out_specs=P())
  def gather(index_TK):
    return load.gather_loads(load.expert_load(index_TK, 4), "expert")

  index = jnp.arange(4, dtype=jnp.int32)[:, None].repeat(3, 1)
  np.testing.assert_array_equal(jax.jit(gather)(index), 3 * np.eye(4, dtype=np.int32))


@pytest.mark.parametrize("value", [-2, 4, 1000])
def test_concrete_index_outside_raises(value):
  with pytest.raises(ValueError, match=rf"expected values in \[-1, 4\), got {value} \(1 outside\)"):
    load.check_expert_index(jnp.array([[0, -1], [value, 3]], jnp.int32), 4)


def test_traced_index_passes():
  jax.jit(lambda index: load.check_expert_index(index, 4))(jnp.array([[9]]))
