"""The block with balanced experts: one method replaced."""

from flax import nnx

import ultraep_jax as uep
from maxtext_style.block import Array, RoutedMoE
from maxtext_style.config import Config


class BalancedRoutedMoE(RoutedMoE):
  """Has the parameters of ``RoutedMoE``, computes the same, and shares the work evenly."""

  def __init__(self, config: Config, balance: uep.BalanceConfig | None = None, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.balance = balance or uep.BalanceConfig()

  def route_and_compute(
    self,
    x_TD: Array,
    index_TK: Array,
    gate_TK: Array,
    wi_0_MDF: Array,
    wi_1_MDF: Array,
    wo_MFD: Array,
  ) -> tuple[Array, uep.LayerStats]:
    """One rank's tokens, through experts wherever the plan has them run."""
    weights = uep.ExpertWeights(wi_0_MDF, wi_1_MDF, wo_MFD)
    return uep.moe(x_TD, index_TK, gate_TK, weights, config=self.balance, axis_name="expert")
