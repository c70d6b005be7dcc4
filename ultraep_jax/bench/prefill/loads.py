"""What experts a router is made to prefer, and what balancing can reach on its loads."""

import jax.numpy as jnp
import numpy as np

from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning.plan import plan_quotas

_STEEPEST = 6.0


def popularity(seed: int, num_experts: int, num_ranks: int, top_k: int, skew: float) -> np.ndarray:
  """``[E]`` probabilities that an expert is among a token's K: a Zipf law over shuffled experts.

  Its exponent is bisected until the busiest rank has ``skew`` times the mean. Where the shuffle
  spreads the popular experts too evenly for that, the most popular one elsewhere and the least
  popular one of the busiest rank change places, as often as it takes. One rank has no skew, and
  all experts are as popular.

  Raises:
    ValueError: no placement reaches ``skew``.

  >>> probability_E = popularity(0, num_experts=16, num_ranks=4, top_k=2, skew=1.5)
  >>> round(float(probability_E.sum()), 6), round(rank_imbalance(probability_E, 4), 3)
  (2.0, 1.5)
  """
  if num_ranks == 1:
    skew = 1.0  # it has all of the load
  place_E = np.random.default_rng(seed).permutation(num_experts) + 1.0
  for _ in range(num_experts):
    load_E = _chosen(place_E**-_STEEPEST, top_k)
    if rank_imbalance(load_E, num_ranks) >= skew:
      break
    _gather(place_E, load_E, num_ranks)
  else:
    raise ValueError(
      f"skew: expected what {top_k} of {num_experts} experts on {num_ranks} ranks can reach, "
      f"got {skew}"
    )
  low, high = 0.0, _STEEPEST
  for _ in range(40):
    middle = (low + high) / 2
    below = rank_imbalance(_chosen(place_E**-middle, top_k), num_ranks) < skew
    low, high = (middle, high) if below else (low, middle)
  return _chosen(place_E**-high, top_k)


def _gather(place_E: np.ndarray, load_E: np.ndarray, num_ranks: int) -> None:
  """Brings the most popular expert elsewhere to the busiest rank for its least popular one."""
  rank_E = np.arange(len(load_E)) * num_ranks // len(load_E)
  busiest = np.argmax(np.bincount(rank_E, load_E))
  there = np.flatnonzero(rank_E != busiest)
  here = np.flatnonzero(rank_E == busiest)
  come, go = there[np.argmin(place_E[there])], here[np.argmax(place_E[here])]
  place_E[[come, go]] = place_E[[go, come]]


def _chosen(weight_E: np.ndarray, top_k: int) -> np.ndarray:
  """``1 - exp(-c * weight)``, the chance to be met at least once, with c such that the sum is K."""
  low, high = -20.0, 60.0  # log c
  for _ in range(60):
    middle = (low + high) / 2
    enough = -np.expm1(-np.exp(middle) * weight_E).sum() >= top_k
    low, high = (low, middle) if enough else (middle, high)
  return -np.expm1(-np.exp(high) * weight_E)


def rank_imbalance(load_E: np.ndarray, num_ranks: int) -> float:
  """Busiest over mean rank of home placement."""
  load_G = np.asarray(load_E, np.float64).reshape(num_ranks, -1).sum(axis=1)
  return float(load_G.max() / max(load_G.mean(), 1e-12))


def reachable_floor(load_E: np.ndarray, num_ranks: int, slots: int) -> float:
  """A busiest over mean rank that no plan with ``slots`` replica slots a rank can go below.

  Whatever leaves the j busiest ranks goes to a slot of another rank, so at most the load of their
  ``(G - j) * S`` most loaded experts does.

  >>> load_E = np.repeat([32, 11, 11, 10], 16)  # 2 x the mean, flat inside the ranks
  >>> reachable_floor(load_E, num_ranks=4, slots=2)
  1.25
  """
  load_GM = np.sort(np.asarray(load_E, np.int64).reshape(num_ranks, -1), axis=1)
  load_GM = load_GM[np.argsort(-load_GM.sum(axis=1), kind="stable")]
  mean = load_GM.sum() / num_ranks
  floor = float(np.ceil(mean))
  for count in range(1, num_ranks):
    inside = np.sort(load_GM[:count].ravel())[::-1]
    kept = inside[(num_ranks - count) * slots :].sum()
    floor = max(floor, float(np.ceil(kept / count)))
  return float(floor / max(mean, 1e-12))


def planned(load_GE: np.ndarray, slots: int) -> float:
  """Busiest over mean rank of the planner's own answer, asked for the lowest maximum load."""
  if not slots:
    return rank_imbalance(load_GE.sum(axis=0), len(load_GE))
  config = BalanceConfig(replica_slots=slots, objective="balance", implementation="portable")
  load_G = np.asarray(plan_quotas(jnp.asarray(load_GE, jnp.int32), config).quota).sum(axis=0)
  return float(load_G.max() / max(load_G.mean(), 1e-12))


class BiasSearch:
  """Selection biases with which a router's loads become given ones.

  Each expert's bias moves up while it has less than its share and down while it has more, in
  steps that grow while the sign stays and halve when it turns.
  """

  def __init__(self, share_LE: np.ndarray, first_step: float):
    """Starts at 0.

    Args:
      share_LE: wanted shares of the load; each layer's sum is 1.
      first_step: about the spread of the router's scores.
    """
    self._share_LE = share_LE
    self._move_LE = np.full(share_LE.shape, first_step)
    self._sign_LE = np.zeros(share_LE.shape)
    self._bounds = first_step * 1e-3, first_step * 10
    self.bias_LE = np.zeros(share_LE.shape, np.float32)

  def update(self, load_LE: np.ndarray) -> None:
    """Takes the loads that ``bias_LE`` gave, and makes the next."""
    got_LE = load_LE / np.maximum(load_LE.sum(axis=1, keepdims=True), 1)
    sign_LE = np.sign(self._share_LE - got_LE)
    turned_LE = sign_LE * self._sign_LE < 0
    self._move_LE = np.clip(
      np.where(turned_LE, self._move_LE / 2, self._move_LE * 1.2), *self._bounds
    )
    self._sign_LE = sign_LE
    self.bias_LE = (self.bias_LE + sign_LE * self._move_LE).astype(np.float32)
