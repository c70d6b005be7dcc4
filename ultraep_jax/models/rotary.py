"""Rotary positions: pairs of channels turned by their token's position times a frequency."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from ultraep_jax.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
  """Stretches the positions that a model was trained on (YaRN, arXiv 2309.00071, section 3).

  Attributes:
    factor: how much longer than the trained length positions may become.
    original_positions: the trained length, in tokens.
    beta_fast: channels that turn more often than this in the trained length keep their frequency.
    beta_slow: those that turn less often have it divided by ``factor``; between: a linear ramp.
    attention_factor: factor on the cosines and sines, so on rotated queries and keys each.
    truncate: the ramp starts and ends at whole channels.
  """

  factor: float
  original_positions: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float
  truncate: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
  """Which channels turn, and how fast.

  Attributes:
    dim: channels of a head that turn, the first ones; even.
    theta: pair i turns by ``theta ** (-2 i / dim)`` radians a token.
    interleaved: on input, pair i is channels 2i and 2i + 1 rather than i and i + dim / 2. The
      output always has the halves, since only inner products of queries and keys matter.
    yarn: of a stretched model.
  """

  dim: int
  theta: float
  interleaved: bool = False
  yarn: Yarn | None = None


def frequencies(rotary: Rotary) -> np.ndarray:
  """Radians a token of each pair of channels: ``[dim / 2]`` float32."""
  exponent = np.arange(0, rotary.dim, 2, dtype=np.float32) / np.float32(rotary.dim)
  own = 1 / np.float32(rotary.theta) ** exponent
  if rotary.yarn is None:
    return own
  keep = _kept_share(rotary, rotary.yarn)
  return own / np.float32(rotary.yarn.factor) * (1 - keep) + own * keep


def cosines_and_sines(rotary: Rotary, position_BT: Array) -> tuple[Array, Array]:
  """Of every token's angles: two ``[B, T, dim / 2]`` float32.

  Args:
    rotary: which channels turn.
    position_BT: ``[B, T]`` int32, places of tokens in their requests.
  """
  angle = position_BT[..., None].astype(jnp.float32) * jnp.asarray(frequencies(rotary))[None, None]
  factor = rotary.yarn.attention_factor if rotary.yarn else 1.0
  return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x_BTHC: Array, turn: tuple[Array, Array], rotary: Rotary) -> Array:
  """Turns the first ``rotary.dim`` channels of every head, in float32.

  Args:
    x_BTHC: ``[B, T, H, C]`` float.
    turn: the cosines and sines of the tokens.
    rotary: which channels turn.

  Returns:
    ``[B, T, H, C]``, dtype of ``x_BTHC``.
  """
  cos, sin = (value[:, :, None, :] for value in turn)
  part, rest = x_BTHC[..., : rotary.dim].astype(jnp.float32), x_BTHC[..., rotary.dim :]
  if rotary.interleaved:
    left, right = part[..., 0::2], part[..., 1::2]
  else:
    left, right = jnp.split(part, 2, axis=-1)
  turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
  return jnp.concatenate([turned.astype(x_BTHC.dtype), rest], axis=-1)


def _kept_share(rotary: Rotary, yarn: Yarn) -> np.ndarray:
  """How much of its own frequency each pair keeps: 1 for fast pairs, 0 for slow ones."""

  def pair_that_turns(times: float) -> float:
    """The pair, counted in fractions, that turns so many times in the trained length."""
    wavelengths = yarn.original_positions / (times * 2 * math.pi)
    return rotary.dim * math.log(wavelengths) / (2 * math.log(rotary.theta))

  first, last = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
  if yarn.truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, rotary.dim - 1)
  last = last + 0.001 if first == last else last
  pair = np.arange(rotary.dim // 2, dtype=np.float32)
  return 1 - np.clip((pair - np.float32(first)) / np.float32(last - first), 0, 1)
