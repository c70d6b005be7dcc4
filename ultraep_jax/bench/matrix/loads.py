"""The choices that tokens of a cell make."""

import numpy as np

from ultraep_jax import testing
from ultraep_jax.bench.matrix.cells import HIGHEST

_SPREAD = 0.7  # of the logarithm of experts' popularity
_HIGHEST = 0.97  # of what ranks allow: the last experts of the others get something


def highest_ratio(experts: int, ranks: int, top_k: int) -> float:
  """Busiest over mean rank, nearly as high as distinct choices allow.

  >>> highest_ratio(64, 2, 8), highest_ratio(8, 8, 2)
  (1.94, 3.88)
  """
  return max(1.0, round(_HIGHEST * min(ranks, experts / top_k), 2))


def choices(
  seed: int, kind: str, ratio: str, experts: int, ranks: int, tokens: int, top_k: int
) -> np.ndarray:
  """``[G * T, K]`` int32, distinct experts of each token.

  ``zipf`` has a few hot experts, ``flat`` is equal over the busiest rank's. With ``independent``
  every token draws for itself, by lognormal popularity with rank 0's raised to the ratio, so
  that the sources differ too. A ratio of 1 is exactly even, but for independent tokens.

  Args:
    seed: of all draws.
    kind: of ``cells.LOADS``.
    ratio: busiest over mean rank; ``"max"``: ``highest_ratio``.
    experts: E.
    ranks: G.
    tokens: T, of a rank.
    top_k: K.
  """
  highest = highest_ratio(experts, ranks, top_k)
  value = highest if ratio == HIGHEST else min(float(ratio), highest)
  if kind == "independent":
    return _independent(seed, value, experts, ranks, tokens, top_k)
  sizes = experts, ranks, tokens, top_k
  if value == 1:
    load_GE = testing.balanced_loads(seed, *sizes)
  elif kind == "flat":
    load_GE = testing.flat_loads(seed, *sizes, value)
  else:
    load_GE = _steepest_zipf(seed, sizes, value)
  return testing.expert_indices(seed, load_GE, top_k).reshape(-1, top_k).astype(np.int32)


def _steepest_zipf(seed: int, sizes: tuple[int, int, int, int], ratio: float) -> np.ndarray:
  """Zipf loads of the ratio; where their form does not reach it, flat ones."""
  try:
    return testing.zipf_loads(seed, *sizes, ratio)
  except ValueError:
    return testing.flat_loads(seed, *sizes, ratio)


def _independent(
  seed: int, ratio: float, experts: int, ranks: int, tokens: int, top_k: int
) -> np.ndarray:
  rng = np.random.default_rng(seed)
  home = experts // ranks
  popularity_E = rng.normal(0.0, _SPREAD, experts)
  popularity_E -= np.repeat(_log_sum(popularity_E.reshape(ranks, home)), home)  # ranks alike
  noise_AE = rng.gumbel(size=(ranks * tokens, experts)).astype(np.float32)

  enough_AM = enough_warmth(noise_AE + popularity_E.astype(np.float32), home, top_k)
  low, high = 0.0, 20.0
  for _ in range(10):  # the share of rank 0 grows with its warmth
    middle = (low + high) / 2
    share = np.count_nonzero(enough_AM < middle) / (len(noise_AE) * top_k)
    low, high = (middle, high) if share * ranks < ratio else (low, middle)
  warmth_E = (low if ratio == 1 else high) * (np.arange(experts) < home)
  score_AE = noise_AE + (popularity_E + warmth_E).astype(np.float32)
  return np.argpartition(-score_AE, top_k - 1, axis=1)[:, :top_k].astype(np.int32)


def enough_warmth(score_AE: np.ndarray, home: int, top_k: int) -> np.ndarray:
  """From what on, added to scores of rank 0, a token chooses one more expert of that rank.

  That is when its i-th best expert there is above the (K + 1 − i)-th best of all others.

  Args:
    score_AE: ``[A, E]`` float32, of each token for each expert; the best K are chosen.
    home: M, experts of rank 0, the first ones.
    top_k: K.

  Returns:
    ``[A, min(M, K)]`` float32, rising: of all that are below a warmth each is one choice more.
  """
  here_AM, others_AX = -score_AE[:, :home], -score_AE[:, home:]
  count = min(home, top_k)
  here_AM = np.sort(np.partition(here_AM, count - 1, axis=1)[:, :count], axis=1)
  others_AK = np.full((len(score_AE), top_k), np.inf, np.float32)  # −score of an expert that is not
  known = min(others_AX.shape[1], top_k)
  others_AK[:, :known] = np.sort(np.partition(others_AX, known - 1, axis=1)[:, :known], axis=1)
  return here_AM - others_AK[:, ::-1][:, :count]


def _log_sum(values_GM: np.ndarray) -> np.ndarray:
  return np.log(np.exp(values_GM).sum(axis=1))


def imbalance(index: np.ndarray, experts: int, ranks: int) -> float:
  """Busiest over mean rank, by homes."""
  rank_G = np.bincount(index.reshape(-1) // (experts // ranks), minlength=ranks)
  return float(rank_G.max() / rank_G.mean())


def load_matrix(index: np.ndarray, experts: int, ranks: int) -> np.ndarray:
  """``[G, E]``, from the choices of all ranks' tokens in turn."""
  parts = index.reshape(ranks, -1)
  return np.stack([np.bincount(part, minlength=experts) for part in parts])
