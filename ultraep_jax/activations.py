"""What is between the matrices of an expert: functions of one projection, or of gate and up."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ultraep_jax.types import Array, Layout

_ROWS = 3  # that an activation is traced with, to see whether it mixes columns
_MOVING = "cum", "dot_general", "fft", "rev", "sort"  # operations that may keep the shape


@dataclasses.dataclass(frozen=True)
class GatedUnit:
  """A function of both projections of a gated expert, ``wo(function(x wi_gate, x wi_up))``.

  A function of one argument, such as ``jax.nn.silu``, stands for ``act(gate) * up``, and needs no
  ``GatedUnit``. Equal if the functions are. A function of your own equals itself alone: make it
  once, as it is a static argument of compiled programs.

  >>> import jax, jax.numpy as jnp
  >>> reglu = GatedUnit(lambda gate, up: jax.nn.relu(gate) * up)
  >>> reglu(jnp.array([2.0, -2.0]), jnp.array([3.0, 3.0])).tolist()
  [6.0, 0.0]

  Attributes:
    function: of ``(gate, up)``, float32 arrays of one shape, to an array of that shape;
      elementwise, and of its arguments alone.
  """

  function: Callable[[Array, Array], Array]

  def __call__(self, gate: Array, up: Array) -> Array:
    return self.function(gate, up)


# A function of one projection, elementwise, stands for ``act(gate) * up``, or for ``act(x wi)`` of
# experts that are not gated.
Activation = Callable[[Array], Array] | GatedUnit


def _swiglu(gate: Array, up: Array) -> Array:
  return jax.nn.silu(gate) * up


def _geglu(gate: Array, up: Array) -> Array:
  return jax.nn.gelu(gate) * up


swiglu = GatedUnit(_swiglu)
geglu = GatedUnit(_geglu)


@dataclasses.dataclass(frozen=True)
class _Clamped:
  """Of ``clamped_swiglu``."""

  alpha: float
  limit: float

  def __call__(self, gate: Array, up: Array) -> Array:
    gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
    return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


@dataclasses.dataclass(frozen=True)
class _Clipped:
  """Of ``clipped_swiglu``."""

  limit: float

  def __call__(self, gate: Array, up: Array) -> Array:
    return jax.nn.silu(jnp.minimum(gate, self.limit)) * jnp.clip(up, -self.limit, self.limit)


def clamped_swiglu(alpha: float = 1.702, limit: float = 7.0) -> GatedUnit:
  """GPT-OSS's: ``g * sigmoid(alpha * g) * (u + 1)``, g at most ``limit``, u within ``±limit``.

  >>> unit = clamped_swiglu()
  >>> unit(jnp.array(1e3), jnp.array([1e3, -1e3])).tolist()
  [55.99..., -41.99...]
  """
  return GatedUnit(_Clamped(alpha, limit))


def clipped_swiglu(limit: float = 10.0) -> GatedUnit:
  """DeepSeek-V4's: ``silu(g) * u``, g at most ``limit``, u within ``±limit``.

  >>> clipped_swiglu(2.0)(jnp.array(1e3), jnp.array([1e3, 1.0])).tolist()
  [3.52..., 1.76...]
  """
  return GatedUnit(_Clipped(limit))


def squared_relu(x: Array) -> Array:
  """``max(x, 0)²``, of one projection."""
  return jnp.square(jax.nn.relu(x))


@dataclasses.dataclass(frozen=True)
class _Product:
  """``act(gate) * up``."""

  activation: Callable[[Array], Array]

  def __call__(self, gate: Array, up: Array) -> Array:
    return self.activation(gate) * up


def unit(activation: Activation, layout: Layout) -> Callable[..., Array]:
  """The function of as many arrays as experts have projections; equal for equal activations."""
  if layout is Layout.UNGATED or isinstance(activation, GatedUnit):
    return activation
  return _Product(activation)


def mixes_columns(activation: Activation, layout: Layout, width: int) -> bool:
  """Whether a column of the result may depend on other columns, as a softmax's does.

  By its operations: some do not keep the shape, such as a sum, or move values in it, as a sort.

  >>> [mixes_columns(each, Layout.APART, 64) for each in (jax.nn.silu, jax.nn.softmax)]
  [False, True]
  """
  arguments = 1 if layout is Layout.UNGATED else 2
  given = [jax.ShapeDtypeStruct((_ROWS, width), jnp.float32)] * arguments
  return _mixes(jax.make_jaxpr(unit(activation, layout))(*given).jaxpr, (_ROWS, width))


def _mixes(jaxpr: Any, shape: tuple[int, ...]) -> bool:
  def moves(eqn: Any) -> bool:
    of_all = any(x.aval.shape == shape for x in eqn.invars)
    kept = all(x.aval.shape == shape for x in eqn.outvars)
    return of_all and (not kept or eqn.primitive.name.startswith(_MOVING))

  for eqn in jaxpr.eqns:
    calls = [x.jaxpr for x in eqn.params.values() if hasattr(x, "jaxpr")]
    if any(_mixes(call, shape) for call in calls) or (not calls and moves(eqn)):
      return True
  return False


def inner(hidden: Sequence[Array], layout: Layout, activation: Activation) -> Array:
  """What the rows are between the matrices of their experts.

  Args:
    hidden: rows times each of ``ExpertWeights.projections``, biases added.
    layout: of the weights.
    activation: a ``GatedUnit`` computes in float32, a function of one projection in its dtype.

  Returns:
    ``[..., F]`` in the dtype of ``hidden``.
  """
  if isinstance(activation, GatedUnit):
    gate, up = halves(hidden, layout)
    return activation(gate.astype(jnp.float32), up.astype(jnp.float32)).astype(up.dtype)
  one, *others = hidden if layout is Layout.UNGATED else halves(hidden, layout)
  activated = activation(one).astype(one.dtype)  # it may compute in float32
  return functools.reduce(jnp.multiply, others, activated)


def halves(hidden: Sequence[Array], layout: Layout) -> tuple[Array, Array]:
  """Gate and up of gated experts, wherever their columns are."""
  if layout is Layout.APART:
    gate, up = hidden
    return gate, up
  (both,) = hidden
  parts = (2, -1) if layout is Layout.FUSED else (-1, 2)
  both = both.reshape(*both.shape[:-1], *parts)
  axis = -2 if layout is Layout.FUSED else -1
  gate, up = (jax.lax.index_in_dim(both, i, axis, keepdims=False) for i in range(2))
  return gate, up
