"""How many assignments travel from each rank to each rank."""

import numpy as np

from ultraep_jax.types import Plan


def token_links(load_GE: np.ndarray, plan: Plan) -> np.ndarray:
  """Assignments by the rank of their token and the rank that computes them.

  What ``route_tokens`` does, for all ranks and without looking at single tokens: a host first
  keeps what it sent itself, then sources and hosts own intervals of the rest, in order of rank.

  Args:
    load_GE: ``[G, E]``, the load matrix.
    plan: its plan, of NumPy arrays.

  Returns:
    ``[G, G]`` int64, from source to host. The diagonal stays on its rank.
  """
  quota_EG = np.asarray(plan.quota).astype(np.int64)
  load_EG = np.asarray(load_GE).T.astype(np.int64)
  kept_EG = np.minimum(load_EG, quota_EG)
  sent_EG, taken_EG = load_EG - kept_EG, quota_EG - kept_EG
  links_GG = np.diag(kept_EG.sum(axis=0))
  # Most experts run in one place: all that their ranks do not keep goes there.
  single_E = (taken_EG > 0).sum(axis=1) <= 1
  host_E = taken_EG.argmax(axis=1)
  np.add.at(links_GG.T, host_E[single_E], sent_EG[single_E])
  for expert in np.nonzero(~single_E)[0]:
    source_end, host_end = sent_EG[expert].cumsum(), taken_EG[expert].cumsum()
    source_start, host_start = source_end - sent_EG[expert], host_end - taken_EG[expert]
    end = np.minimum(source_end[:, None], host_end[None])
    start = np.maximum(source_start[:, None], host_start[None])
    links_GG += np.maximum(end - start, 0)
  return links_GG
