"""Load matrices to test and measure with, from a seed.

Every generator returns ``load_GE``, ``[G, E]`` int32: assignments of each source rank to each
expert. Each row sums to ``tokens * top_k``, and no entry exceeds ``tokens``, so that
``expert_indices`` can turn any of them into tokens with ``top_k`` distinct experts. The totals
per expert are set by the generator, exactly; how they spread over the sources is random.
"""

import math

import numpy as np

ADVERSARIAL_KINDS = ("medium", "giant", "indivisible", "staircase")

_LOCAL_EXPONENT = 4.0
_MAX_ALPHA = 8.0
_EXCHANGES = 6


def zipf_loads(
  seed: int,
  num_experts: int,
  num_ranks: int,
  tokens: int,
  top_k: int,
  ratio: float,
  *,
  shuffle: bool = True,
) -> np.ndarray:
  """Loads whose busiest home rank has ``ratio`` times the mean, with a few hot experts.

  The weight of an expert is ``i**-alpha * j**-4`` for the i-th rank from the hottest and its
  j-th expert; an expert of weight w is in a token with probability ``1 - exp(-c * w)``. Alpha
  is bisected to the ratio. The busiest rank is within two assignments of ``ratio`` times the
  mean. This is the form of workload that the UltraEP system is measured on, which does not
  shuffle.

  Args:
    seed: of ``numpy.random.default_rng``.
    num_experts: E, a multiple of ``num_ranks``.
    num_ranks: G.
    tokens: T, tokens per rank.
    top_k: K, distinct experts per token.
    ratio: busiest over mean rank, at least 1.
    shuffle: put the ranks, and the experts within each rank, in random order; otherwise the
      first are the hottest.

  Returns:
    ``load_GE``, ``[G, E]`` int32.

  Raises:
    ValueError: sizes do not fit, or no alpha in [0, 8] gives ``ratio``.

  >>> load_GE = zipf_loads(0, num_experts=32, num_ranks=8, tokens=512, top_k=4, ratio=2.0)
  >>> load_GE.shape, int(load_GE.sum(axis=1).max())
  ((8, 32), 2048)
  >>> int(load_GE.sum(axis=0).reshape(8, 4).sum(axis=1).max())
  4096
  """
  check_sizes(num_experts, num_ranks, tokens, top_k)
  rng = _generator(seed)
  probability_GM = _zipf_probability(num_experts, num_ranks, top_k, ratio)
  if shuffle:
    probability_GM = rng.permuted(rng.permutation(probability_GM), axis=1)
  return sample_loads(rng, probability_GM, num_ranks, tokens)


def flat_loads(
  seed: int,
  num_experts: int,
  num_ranks: int,
  tokens: int,
  top_k: int,
  ratio: float,
  *,
  shuffle: bool = True,
) -> np.ndarray:
  """One rank has ``ratio`` times the mean, equal over its experts; the other ranks are equal.

  The hardest shape for few replica slots: no single expert is hot. Arguments, result and errors
  as for ``zipf_loads``; the hot rank is rank 0 without ``shuffle``.

  >>> load_GE = flat_loads(0, 32, 8, tokens=512, top_k=4, ratio=2.0, shuffle=False)
  >>> load_GE.sum(axis=0)[:6].tolist()
  [1024, 1024, 1024, 1024, 439, 439]
  """
  check_sizes(num_experts, num_ranks, tokens, top_k)
  limit = highest_flat_ratio(num_experts, num_ranks, top_k)
  if not 1 <= ratio <= limit:
    raise ValueError(f"ratio: expected a number in [1, {limit:g}], got {ratio}")
  rng = _generator(seed)
  cold = (num_ranks - ratio) / max(num_ranks - 1, 1)
  probability_GM = np.full((num_ranks, num_experts // num_ranks), top_k / num_experts)
  hot = int(rng.integers(num_ranks)) if shuffle else 0
  probability_GM *= np.where(np.arange(num_ranks) == hot, ratio, cold)[:, None]
  return sample_loads(rng, probability_GM, num_ranks, tokens)


def balanced_loads(
  seed: int, num_experts: int, num_ranks: int, tokens: int, top_k: int
) -> np.ndarray:
  """Every expert has the same load, within one assignment.

  Arguments, result and errors as for ``zipf_loads``.

  >>> balanced_loads(0, 8, 4, tokens=16, top_k=2).sum(axis=0).tolist()
  [16, 16, 16, 16, 16, 16, 16, 16]
  """
  check_sizes(num_experts, num_ranks, tokens, top_k)
  probability_E = np.full(num_experts, top_k / num_experts)
  return sample_loads(_generator(seed), probability_E, num_ranks, tokens)


def all_to_one_loads(
  num_experts: int, num_ranks: int, tokens: int, top_k: int, *, rank: int = 0
) -> np.ndarray:
  """Every token of every rank chooses the same K experts, from the first of ``rank`` on.

  With ``top_k=1`` all load is on one expert. Other arguments, result and errors as for
  ``zipf_loads``.

  >>> all_to_one_loads(8, 4, tokens=16, top_k=1).sum(axis=0).tolist()
  [64, 0, 0, 0, 0, 0, 0, 0]
  """
  check_sizes(num_experts, num_ranks, tokens, top_k)
  if not 0 <= rank < num_ranks:
    raise ValueError(f"rank: expected a rank in [0, {num_ranks}), got {rank}")
  load_GE = np.zeros((num_ranks, num_experts), np.int32)
  first = rank * (num_experts // num_ranks)
  load_GE[:, (first + np.arange(top_k)) % num_experts] = tokens
  return load_GE


def bursty_loads(
  seed: int,
  num_experts: int,
  num_ranks: int,
  tokens: int,
  top_k: int,
  ratio: float,
  *,
  steps: int,
) -> np.ndarray:
  """A sequence whose hot ranks and skew jump every one to four steps: history predicts little.

  Each step is a ``zipf_loads`` with a ratio drawn log-uniformly from ``[1, ratio]``. Other
  arguments and errors as for ``zipf_loads``.

  Returns:
    ``[steps, G, E]`` int32.

  >>> bursty_loads(0, 8, 4, tokens=16, top_k=2, ratio=2.0, steps=5).shape
  (5, 4, 8)
  """
  if steps < 1:
    raise ValueError(f"steps: expected at least 1, got {steps}")
  rng = _generator(seed)
  loads: list[np.ndarray] = []
  while len(loads) < steps:
    burst = int(rng.integers(2**31))
    skew = ratio ** float(rng.random())
    load_GE = zipf_loads(burst, num_experts, num_ranks, tokens, top_k, skew)
    loads += [load_GE] * int(rng.integers(1, 5))
  return np.stack(loads[:steps])


def adversarial_loads(
  seed: int, num_experts: int, num_ranks: int, tokens: int, top_k: int, *, kind: str
) -> np.ndarray:
  """Loads that are hard for greedy planners.

  | kind            | totals                                                                     |
  |-----------------|----------------------------------------------------------------------------|
  | ``medium``      | half of the ranks have many equal experts, three times those of the others |
  | ``giant``       | one expert is in every token, far more than the mean of a rank if K < G    |
  | ``indivisible`` | a few hot ranks, the others' deficits all differ: no transfer fits two     |
  | ``staircase``   | the loads of the ranks rise evenly, and so do the experts within a rank    |

  Arguments, result and errors as for ``zipf_loads``; ``kind`` is one of ``ADVERSARIAL_KINDS``.

  >>> int(adversarial_loads(0, 32, 8, tokens=16, top_k=2, kind="giant").sum(axis=0).max())
  128
  """
  check_sizes(num_experts, num_ranks, tokens, top_k)
  if kind not in ADVERSARIAL_KINDS:
    raise ValueError(f"kind: expected one of {ADVERSARIAL_KINDS}, got {kind!r}")
  rng = _generator(seed)
  num_home = num_experts // num_ranks
  weight_GM = np.ones((num_ranks, num_home))
  rank_G1 = np.arange(num_ranks)[:, None]
  if kind == "medium":
    weight_GM[: num_ranks // 2] = 3.0
  elif kind == "giant":
    weight_GM[0, 0] = 1e9
  elif kind == "indivisible":
    weight_GM *= np.where(rank_G1 < max(num_ranks // 8, 1), 4.0, 1 / np.sqrt(2.0 + rank_G1))
  else:
    weight_GM *= (1.0 + rank_G1) * (1.0 + np.arange(num_home))
  weight_GM = rng.permuted(rng.permutation(weight_GM), axis=1)
  probability_GM = _capped(weight_GM, top_k)
  return sample_loads(rng, probability_GM, num_ranks, tokens)


def expert_indices(seed: int, load_GE: np.ndarray, top_k: int) -> np.ndarray:
  """Tokens with K distinct experts each that have exactly these loads.

  A token's experts are spread over the list of experts as far as loads allow, so that it goes to
  more ranks than independent choices would.

  Args:
    seed: of ``numpy.random.default_rng``.
    load_GE: ``[G, E]`` integers, as from the generators of this module.
    top_k: K.

  Returns:
    ``expert_index_GTK``, ``[G, T, K]`` int32, in random order.

  Raises:
    ValueError: the rows have different sums, no multiple of K, or an expert has more
      assignments than the rank has tokens.

  >>> load_GE = balanced_loads(0, num_experts=8, num_ranks=4, tokens=16, top_k=2)
  >>> expert_index_GTK = expert_indices(0, load_GE, top_k=2)
  >>> expert_index_GTK.shape, bool((expert_index_GTK[..., 0] != expert_index_GTK[..., 1]).all())
  ((4, 16, 2), True)
  """
  num_ranks, num_experts = load_GE.shape
  rows = np.unique(load_GE.sum(axis=1))
  if rows.size != 1 or rows[0] % top_k:
    raise ValueError(f"load_GE: expected equal row sums, multiples of {top_k}, got {rows}")
  tokens = int(rows[0]) // top_k
  if load_GE.max() > tokens or load_GE.min() < 0:
    raise ValueError(f"load_GE: expected entries in [0, {tokens}], got {load_GE.max()}")
  rng = _generator(seed)
  # Assignment i in expert order belongs to token i mod T: at most T in a row have one expert.
  experts = np.arange(num_experts, dtype=np.int32)
  index_GTK = np.stack([np.repeat(experts, row).reshape(top_k, tokens).T for row in load_GE])
  shuffled = [rng.permuted(rng.permutation(index_TK), axis=1) for index_TK in index_GTK]
  return np.stack(shuffled).reshape(num_ranks, tokens, top_k)


def check_sizes(num_experts: int, num_ranks: int, tokens: int, top_k: int) -> None:
  """Checks the sizes of loads against each other, and against what int32 counts.

  Raises:
    ValueError: they do not fit.
  """
  if num_ranks < 1 or num_experts < num_ranks or num_experts % num_ranks:
    raise ValueError(f"num_experts: expected a multiple of {num_ranks} ranks, got {num_experts}")
  if tokens < 1:
    raise ValueError(f"tokens: expected at least 1, got {tokens}")
  if not 1 <= top_k <= num_experts:
    raise ValueError(f"top_k: expected a number in [1, {num_experts}], got {top_k}")
  if max(num_ranks * tokens * top_k, num_ranks * num_experts) >= 2**31:
    raise ValueError(
      "sizes: expected ranks * tokens * top_k and ranks * experts below 2**31 (int32 counts), "
      f"got {num_ranks} ranks, {tokens} tokens, {top_k} of {num_experts} experts"
    )


def _generator(seed: int) -> np.random.Generator:
  if seed < 0:
    raise ValueError(f"seed: expected at least 0, got {seed}")
  return np.random.default_rng(seed)


def highest_zipf_ratio(num_experts: int, num_ranks: int, top_k: int) -> float:
  """The most that ``zipf_loads`` takes for sizes that fit."""
  return _zipf_skew(_zipf_at(_MAX_ALPHA, num_experts, num_ranks, top_k), top_k)


def highest_flat_ratio(num_experts: int, num_ranks: int, top_k: int) -> float:
  """The most that ``flat_loads`` takes for sizes that fit."""
  return min(num_ranks, num_experts / top_k)


def _zipf_at(alpha: float, num_experts: int, num_ranks: int, top_k: int) -> np.ndarray:
  """``[G, M]`` probabilities that an expert is in a token, hottest rank and expert first."""
  rank_G1 = np.arange(1.0, num_ranks + 1)[:, None]
  local_M = np.arange(1.0, num_experts // num_ranks + 1) ** -_LOCAL_EXPONENT
  return _poisson(rank_G1**-alpha * local_M, top_k)


def _zipf_skew(probability_GM: np.ndarray, top_k: int) -> float:
  """The first rank over the mean."""
  return float(probability_GM.sum(axis=1)[0]) * len(probability_GM) / top_k


def _zipf_probability(num_experts: int, num_ranks: int, top_k: int, ratio: float) -> np.ndarray:
  """As ``_zipf_at``, with the alpha whose hottest rank has ``ratio`` times the mean."""
  sizes = num_experts, num_ranks, top_k
  low, high = 0.0, _MAX_ALPHA
  limit = highest_zipf_ratio(*sizes)
  if not 1 <= ratio <= limit:
    raise ValueError(f"ratio: expected a number in [1, {limit:.4g}] for these sizes, got {ratio}")
  for _ in range(40):
    middle = (low + high) / 2
    below = _zipf_skew(_zipf_at(middle, *sizes), top_k) < ratio
    low, high = (middle, high) if below else (low, middle)
  return _zipf_at((low + high) / 2, *sizes)


def _poisson(weight: np.ndarray, total: float) -> np.ndarray:
  """``1 - exp(-c * weight)`` with c such that the sum is ``total``."""
  low, high = -20.0, 60.0  # log c
  for _ in range(60):
    middle = (low + high) / 2
    enough = -np.expm1(-math.exp(middle) * weight).sum() >= total
    low, high = (low, middle) if enough else (middle, high)
  return -np.expm1(-math.exp(high) * weight)


def _capped(weight: np.ndarray, total: float) -> np.ndarray:
  """``min(1, c * weight)`` with c such that the sum is ``total``."""
  low, high = -60.0, 60.0  # log c
  for _ in range(80):
    middle = (low + high) / 2
    enough = np.minimum(1, math.exp(middle) * weight).sum() >= total
    low, high = (low, middle) if enough else (middle, high)
  return np.minimum(1, math.exp(high) * weight)


def _round(probability: np.ndarray, count: int) -> np.ndarray:
  """``count * probability``, flat, as integers of at most ``count`` that keep the running sum."""
  running = np.concatenate([[0.0], np.cumsum(probability.reshape(-1) * count)])
  whole = np.floor(np.round(running, 6) + 0.5)  # rounded twice: no jump from float noise
  return np.diff(whole.astype(np.int64))


def sample_loads(
  rng: np.random.Generator, probability: np.ndarray, num_ranks: int, tokens: int
) -> np.ndarray:
  """Loads of experts with given probabilities of being in a token.

  The totals are divided over the sources evenly, then mixed by exchanges that keep all sums.

  Args:
    rng: where the mixing is drawn from; the totals are not random.
    probability: ``[E]`` or ``[G, M]`` in [0, 1], with sum K.
    num_ranks: G.
    tokens: T.

  Returns:
    ``load_GE``, ``[G, E]`` int32.
  """
  total_E = _round(probability, num_ranks * tokens)
  end_E = np.cumsum(total_E)
  rank_G1 = np.arange(num_ranks)[:, None]
  # Assignment i of the line of all experts comes from source i mod G.
  upto_GE = (end_E + num_ranks - 1 - rank_G1) // num_ranks
  load_GE = np.diff(upto_GE, axis=1, prepend=0)
  for _ in range(_EXCHANGES):
    sources = rng.permutation(num_ranks)[: num_ranks // 2 * 2].reshape(2, -1, 1)
    experts = rng.permutation(total_E.size)[: total_E.size // 2 * 2].reshape(2, 1, -1)
    _exchange(rng, load_GE, sources, experts, tokens)
  return load_GE.astype(np.int32)


def _exchange(
  rng: np.random.Generator,
  load_GE: np.ndarray,
  sources: np.ndarray,
  experts: np.ndarray,
  tokens: int,
) -> None:
  """Moves assignments between pairs of sources and of experts, in place."""
  (first, second), (this, that) = sources, experts
  gains = np.minimum(tokens - load_GE[first, this], tokens - load_GE[second, that])
  losses = np.minimum(load_GE[first, that], load_GE[second, this])
  moved = (rng.random(gains.shape) * (np.minimum(gains, losses) + 1) / 2).astype(np.int64)
  load_GE[first, this] += moved
  load_GE[second, that] += moved
  load_GE[first, that] -= moved
  load_GE[second, this] -= moved
