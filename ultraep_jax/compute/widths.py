"""Inner widths that kernels refuse, made up to ones that they take by columns of zeros.

A hidden value of such a column is the activation of zeros, times a row of zeros of ``wo``: outputs
and gradients stay what they are. With F of 3 made up to 4, of one expert and gate alone::

  wi_gate   a b c 0      wo   p q
            d e f 0           r s
                              t u
                              0 0
"""

import jax
import jax.numpy as jnp

import pallas_kernels as kernels
from ultraep_jax import activations
from ultraep_jax.activations import Activation
from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning.cost import multiplied_by_kernel
from ultraep_jax.types import Array, ExpertWeights, Layout

# Of an expert. Below, plain JAX may take less than to read and write all weights: with 64 rows it
# takes 1.1 times as long forward (docs/lab/kernels.md, Widths between multiples of 64).
_LEAST_ROWS = 64


def missing_columns(
  weights: ExpertWeights,
  dtype: jnp.dtype,
  config: BalanceConfig,
  activation: Activation,
  rows: int,
) -> int:
  """How many columns each projection gets, so that kernels multiply it; 0 if that does not pay.

  Args:
    weights: of a rank's home experts; shapes and layout count.
    dtype: that the layer computes in.
    config: ``implementation``, ``node_size`` and ``batch_invariant`` count.
    activation: of the layer. One that mixes columns, is not finite at 0, or has no finite slope
      there gets none.
    rows: mean rows of a rank.
  """
  home, inner, width = weights.wo.shape
  missing = -inner % kernels.UNIT
  if not missing or width % kernels.UNIT:
    return 0
  # Bits that do not depend on the batch cannot depend on its size.
  if rows < _LEAST_ROWS * home and not config.batch_invariant:
    return 0
  if not multiplied_by_kernel(config, dtype) or not _on_hopper():
    return 0
  suits = _is_elementwise(activation, weights.layout)
  return missing if suits and _is_finite_at_zero(activation, weights.layout) else 0


def widen(weights: ExpertWeights, columns: int) -> ExpertWeights:
  """The weights with so many columns of zeros more in each projection, and rows in ``wo``."""
  if not columns:
    return weights
  return weights.with_values(
    [_widened(each, weights.layout, columns) for each in weights.projections],
    jnp.pad(weights.wo, ((0, 0), (0, columns), (0, 0))),
    [_widened(each, weights.layout, columns) for each in weights.projection_biases],
    weights.wo_bias,
  )


def narrow(weights: ExpertWeights, columns: int) -> ExpertWeights:
  """Without what ``widen`` added: of gradients, which are 0 there."""
  if not columns:
    return weights
  return weights.with_values(
    [_narrowed(each, weights.layout, columns) for each in weights.projections],
    weights.wo[:, :-columns],
    [_narrowed(each, weights.layout, columns) for each in weights.projection_biases],
    weights.wo_bias,
  )


def _widened(array: Array, layout: Layout, columns: int) -> Array:
  if layout is Layout.FUSED:  # both halves
    halves = array.reshape(*array.shape[:-1], 2, -1)
    return _widened(halves, Layout.APART, columns).reshape(*array.shape[:-1], -1)
  columns *= 2 if layout is Layout.INTERLEAVED else 1
  return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, columns)])


def _narrowed(array: Array, layout: Layout, columns: int) -> Array:
  if layout is Layout.FUSED:
    halves = array.reshape(*array.shape[:-1], 2, -1)[..., :-columns]
    return halves.reshape(*array.shape[:-1], -1)
  columns *= 2 if layout is Layout.INTERLEAVED else 1
  return array[..., :-columns]


def _on_hopper() -> bool:
  """Other GPUs' matmuls want more than this makes of widths."""
  return kernels.generation(kernels.device()) == kernels.HOPPER


def _is_elementwise(activation: Activation, layout: Layout) -> bool:
  """Else columns of zeros would change what it makes of others, as a norm does."""
  arguments = 1 if layout is Layout.UNGATED else 2
  try:
    kernels.elementwise(activations.unit(activation, layout), arguments, (8, kernels.UNIT))
  except NotImplementedError:
    return False
  return True


def _is_finite_at_zero(activation: Activation, layout: Layout) -> bool:
  """Else zeros times what it makes of zeros would be NaN, forward or backward."""
  nowhere = jax.sharding.AbstractMesh((), ())
  with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(nowhere):
    zeros = [jnp.zeros(2)] * (2 if layout is Layout.APART else 1)  # a gate and an up, or two
    value, vjp = jax.vjp(lambda *hidden: activations.inner(hidden, layout, activation), *zeros)
    return all(bool(jnp.isfinite(each).all()) for each in (value, *vjp(jnp.ones_like(value))))
