"""A router that balances perfectly: the bound that a measurement compares with.

Tokens go to experts that were not chosen for them, so **the layer's results are wrong on
purpose**.
"""

import warnings

import jax.numpy as jnp

from ultraep_jax.types import Array


def reassign(expert_index_TK: Array, rank: Array | int, num_experts: int, num_ranks: int) -> Array:
  """Deals assignments out to ranks in turn, and on each rank to its experts in turn.

  Loads of any two ranks differ by at most one, with masked assignments by at most one per source
  rank. The experts of a token are distinct.

  Args:
    expert_index_TK: ``[T, K]`` int32, K at most E. Values outside ``[0, num_experts)`` stay.
    rank: the rank that these tokens are on.
    num_experts: E.
    num_ranks: G.

  Returns:
    ``[T, K]`` int32.

  Raises:
    ValueError: K is above E.
  """
  tokens, top_k = expert_index_TK.shape
  if top_k > num_experts:
    raise ValueError(f"expert_index_TK: expected K of at most E={num_experts}, got {top_k}")
  warnings.warn(
    'strategy="ideal" overrides the router: the results of this layer are wrong on purpose, '
    "it is for measuring speed only",
    UserWarning,
    stacklevel=2,
  )
  chosen_TK = (expert_index_TK >= 0) & (expert_index_TK < num_experts)
  # Any E consecutive turns meet every expert once. Sources begin where the previous one ends.
  count_A = jnp.cumsum(chosen_TK.reshape(-1), dtype=jnp.int32) - 1
  turn_TK = (count_A + rank * (tokens * top_k % num_experts)).reshape(tokens, top_k)
  num_home = num_experts // num_ranks
  expert_TK = turn_TK % num_ranks * num_home + turn_TK // num_ranks % num_home
  return jnp.where(chosen_TK, expert_TK, expert_index_TK)
