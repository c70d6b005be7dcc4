"""Widths that kernels refuse, made up to ones that they take by columns of zeros.

A hidden value of such a column is the activation of zeros, times a row of zeros of ``wo``, and a
column of tokens meets a row of zeros of the projections: outputs and gradients stay what they are.
With F of 3 made up to 4 and D of 2 to 3, of one expert and gate alone::

  wi_gate   a b c 0      wo   p q 0
            d e f 0           r s 0
            0 0 0 0           t u 0
                              0 0 0
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels as kernels
from ultraep_jax import activations
from ultraep_jax.activations import Activation
from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning.cost import multiplied_by_kernel
from ultraep_jax.types import Array, ExpertWeights, Layout

# Of an expert. Below, plain JAX may take less than to read and write all weights: with 64 rows it
# takes 1.1 times as long forward (docs/lab/kernels.md, Widths between multiples of 64).
_LEAST_ROWS = 64

# Times the multiplications: with 1.02 times as many, plain JAX takes twice as long as kernels.
_MOST_WORK = 2


class Columns(NamedTuple):
  """How many columns of zeros each expert gets; a true value if any.

  Attributes:
    inner: of each projection, and as many rows of ``wo``: of F.
    width: of tokens and of ``wo``, and as many rows of each projection: of D.
  """

  inner: int = 0
  width: int = 0

  def __bool__(self) -> bool:
    return any(self[:])


def missing_columns(
  weights: ExpertWeights,
  dtype: jnp.dtype,
  config: BalanceConfig,
  activation: Activation,
  rows: int,
) -> Columns:
  """What experts get, so that kernels multiply them; nothing if that does not pay.

  Args:
    weights: of a rank's home experts; shapes and layout count.
    dtype: that the layer computes in.
    config: ``implementation``, ``node_size`` and ``batch_invariant`` count.
    activation: of the layer. With one that mixes columns, is not finite at 0, or has no finite
      slope there, F stays what it is.
    rows: mean rows of a rank.
  """
  home, inner, width = weights.wo.shape
  missing = Columns(-inner % kernels.UNIT, -width % kernels.UNIT)
  work = (inner + missing.inner) * (width + missing.width)
  if not missing or work > _MOST_WORK * inner * width:
    return Columns()
  # Bits that do not depend on the batch cannot depend on its size.
  if rows < _LEAST_ROWS * home and not config.batch_invariant:
    return Columns()
  if not multiplied_by_kernel(config, dtype) or not _on_hopper():
    return Columns()
  suits = not missing.inner or _keeps_zeros_apart(activation, weights.layout)
  return missing if suits else Columns()


def widen(weights: ExpertWeights, columns: Columns) -> ExpertWeights:
  """The weights with the columns, and the rows that go with them."""
  return _resized(weights, columns, _append) if columns else weights


def narrow(weights: ExpertWeights, columns: Columns) -> ExpertWeights:
  """Without what ``widen`` added: of gradients, which are 0 there."""
  return _resized(weights, columns, _drop) if columns else weights


def widen_tokens(x_TD: Array, columns: Columns) -> Array:
  """Tokens as wide as the experts."""
  return _append(x_TD, -1, columns.width) if columns.width else x_TD


def narrow_tokens(y_TD: Array, columns: Columns) -> Array:
  """Outputs as wide as the tokens were."""
  return _drop(y_TD, -1, columns.width) if columns.width else y_TD


_Resize = Callable[[Array, int, int], Array]  # of an array, an axis, by so many


def _append(array: Array, axis: int, count: int) -> Array:
  after = [0] * array.ndim
  after[axis] = count
  return jnp.pad(array, [(0, each) for each in after])


def _drop(array: Array, axis: int, count: int) -> Array:
  return lax.slice_in_dim(array, 0, array.shape[axis] - count, axis=axis)


def _resized(weights: ExpertWeights, columns: Columns, resize: _Resize) -> ExpertWeights:
  def hidden(array: Array) -> Array:
    """A projection, or its bias."""
    if weights.layout is Layout.FUSED:  # both halves
      halves = array.reshape(*array.shape[:-1], 2, -1)
      return resize(halves, -1, columns.inner).reshape(*array.shape[:-1], -1)
    each = 2 if weights.layout is Layout.INTERLEAVED else 1
    return resize(array, -1, each * columns.inner)

  return weights.with_values(
    [resize(hidden(each), -2, columns.width) for each in weights.projections],
    resize(resize(weights.wo, -2, columns.inner), -1, columns.width),
    [hidden(each) for each in weights.projection_biases],
    None if weights.wo_bias is None else resize(weights.wo_bias, -1, columns.width),
  )


def _on_hopper() -> bool:
  """Other GPUs' matmuls want more than this makes of widths."""
  return kernels.generation(kernels.device()) == kernels.HOPPER


def _keeps_zeros_apart(activation: Activation, layout: Layout) -> bool:
  """Whether zeros stay zeros, and no other column sees them."""
  return _is_elementwise(activation, layout) and _is_finite_at_zero(activation, layout)


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
