"""How many assignments each rank sends to each expert: the only metadata ranks exchange."""

import jax.numpy as jnp
from jax import lax

import pallas_kernels as kernels
from ultraep_jax.implementation import Implementations, first_that_can
from ultraep_jax.types import Array, AxisName

_TABLES = 64


def drop_invalid(expert_index_TK: Array, num_experts: int) -> Array:
  """int32, with −1, the masked assignment, for every index outside ``[0, num_experts)``."""
  expert_index_TK = expert_index_TK.astype(jnp.int32)  # -1 is no value of an unsigned type
  valid = (expert_index_TK >= 0) & (expert_index_TK < num_experts)
  return jnp.where(valid, expert_index_TK, -1)


def expert_load(expert_index_TK: Array, num_experts: int) -> Array:
  """Counts assignments per expert.

  Args:
    expert_index_TK: ``[T, K]`` int32; values outside ``[0, num_experts)`` are counted nowhere.
    num_experts: E.

  Returns:
    ``[E]`` int32.

  >>> import jax.numpy as jnp
  >>> expert_load(jnp.array([[0, 2], [2, -1]]), 3).tolist()
  [1, 0, 2]
  """
  index_A = drop_invalid(expert_index_TK, num_experts).reshape(-1)
  # A negative index would wrap around; one past the end is dropped.
  return _count(jnp.where(index_A < 0, num_experts, index_A), num_experts)


def gather_loads(
  load_E: Array, axis_name: AxisName, implementations: Implementations
) -> tuple[Array, Array]:
  """The load matrix ``[G, E]``, equal on every rank of ``axis_name`` and typed so; the rank."""

  def by_collective() -> tuple[Array, Array]:
    return lax.all_gather(load_E, axis_name, to="invarying"), lax.axis_index(axis_name)

  candidates = {
    "mosaic_gpu": lambda: tuple(kernels.gather(load_E, axis_name=axis_name)),
    "portable": by_collective,
  }
  return first_that_can(implementations, candidates)


def position_in_group(group_A: Array, num_groups: int) -> tuple[Array, Array]:
  """The ordinal of each element among the elements of its group, in order.

  Args:
    group_A: ``[A]`` int32 in ``[0, num_groups]``; ``num_groups`` means none.
    num_groups: number of groups.

  Returns:
    ``position_A`` int32 (meaningless where the group is none) and ``count`` ``[num_groups]``.

  >>> import jax.numpy as jnp
  >>> position_in_group(jnp.array([1, 0, 1, 1]), 2)[0].tolist()
  [0, 0, 1, 2]
  """
  iota_A = jnp.arange(group_A.shape[0], dtype=jnp.int32)
  # A stable sort keeps O(A) memory where a running count per group would need O(A * groups).
  sorted_group_A, order_A = lax.sort_key_val(group_A.astype(jnp.int32), iota_A, is_stable=True)
  count = _count(group_A, num_groups)
  start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count, dtype=jnp.int32)])
  position_A = iota_A - start[sorted_group_A]
  return jnp.zeros_like(iota_A).at[order_A].set(position_A, unique_indices=True), count


def _count(group_A: Array, num_groups: int) -> Array:
  """``[num_groups]``, the elements of each group; those of ``num_groups`` are dropped.

  Neighbours count in tables of their own: on a GPU, additions to one number are made one by one.
  """
  table_A = jnp.arange(group_A.size, dtype=jnp.int32) % _TABLES
  count_XN = jnp.zeros((_TABLES, num_groups), jnp.int32).at[table_A, group_A].add(1, mode="drop")
  return jnp.sum(count_XN, axis=0, dtype=jnp.int32)
