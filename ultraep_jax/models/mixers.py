"""Attention of one layer on the rows of one device: from normed hidden states to mixed ones.

Each kind returns what decoding needs as a dict of arrays: of every token ``[B, T, ...]``, or of
every request ``[B, R, ...]``.
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ultraep_jax.models import delta_rule
from ultraep_jax.models.parts import GatedDelta, GroupedQuery, Latent, Mixer
from ultraep_jax.models.rotary import Rotary, rotate
from ultraep_jax.types import Array

Params = Mapping[str, Array]
Cache = dict[str, Array]
Turn = tuple[Array, Array]
_CHUNK = 64  # tokens that the delta rule takes together at most


class Attend(Protocol):
  """Causal attention inside the requests of a batch; see ``attention.attend``."""

  def __call__(
    self,
    query: Array,
    key: Array,
    value: Array,
    /,
    *,
    scale: float,
    window: int | None = None,
    sink_H: Array | None = None,
  ) -> Array: ...


class Shared(NamedTuple):
  """What the mixers of all layers share.

  Attributes:
    turn: cosines and sines of the tokens' positions.
    rotary: which channels turn.
    norm_eps: added to the mean square in norms.
    norm: ``rms_norm`` as the model has it.
    attend: computes attention.
    segment_BT: which request of its row a token belongs to, 0: none.
    last_BR: where each request ends, −1: no such request.
    block: tokens that are taken together; requests that start at multiples of it are as alone.
  """

  turn: Turn
  rotary: Rotary
  norm_eps: float
  norm: Callable[[Array, Array], Array]
  attend: Attend
  segment_BT: Array
  last_BR: Array
  block: int


class Kept(NamedTuple):
  """One array of what decoding needs.

  Attributes:
    sizes: of a token or request.
    of_request: not of a token.
    float32: whatever the dtype of the computation.
  """

  sizes: tuple[int, ...]
  of_request: bool = False
  float32: bool = False


def rms_norm(x: Array, scale: Array, eps: float, around_one: bool = False) -> Array:
  """Divides by the root of the mean square, in float32, then scales in the dtype of ``x``.

  A scale around one is added to 1, and scales in float32.
  """
  wide = x.astype(jnp.float32)
  mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  normed = wide * jax.lax.rsqrt(mean + eps)
  if around_one:
    scale = 1 + scale.astype(jnp.float32)
    return (normed * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)
  return normed.astype(x.dtype) * jnp.expand_dims(scale.astype(x.dtype), range(x.ndim - 1))


def kept(mixer: Mixer) -> dict[str, Kept]:
  """What decoding needs, by name."""
  if isinstance(mixer, GroupedQuery):
    heads = Kept((mixer.num_key_heads, mixer.head_dim))
    return {"key": heads, "value": heads}
  if isinstance(mixer, Latent):
    return {"latent": Kept((mixer.latent_rank,)), "rotary_key": Kept((mixer.rope_dim,))}
  state = (mixer.num_heads, mixer.key_dim, mixer.value_dim)
  return {
    "delta_state": Kept(state, of_request=True, float32=True),
    "delta_inputs": Kept((mixer.conv_width - 1, mixer.conv_dim), of_request=True),
  }


def mix(mixer: Mixer, params: Params, x_BTD: Array, shared: Shared) -> tuple[Array, Cache]:
  """Returns ``[B, T, D]`` and what decoding needs, as ``kept`` says."""
  if isinstance(mixer, GroupedQuery):
    return _grouped_query(mixer, params, x_BTD, shared)
  if isinstance(mixer, Latent):
    return _latent(mixer, params, x_BTD, shared)
  return _gated_delta(mixer, params, x_BTD, shared)


def _grouped_query(
  mixer: GroupedQuery, params: Params, x_BTD: Array, shared: Shared
) -> tuple[Array, Cache]:
  """Keeps ``key`` and ``value``, ``[B, T, N, C]``, keys as they are used."""

  def normed(name: str, y: Array, of: Literal["head", "all"]) -> Array:
    return shared.norm(y, params[f"{name}_norm"]) if mixer.qk_norm == of else y

  def heads(name: str, size: int) -> Array:
    y_BTX = project(params, name, x_BTD)
    return y_BTX.reshape(*y_BTX.shape[:2], -1, size)

  def turned(name: str, y_BTHC: Array) -> Array:
    shape = y_BTHC.shape
    y_BTHC = normed(name, y_BTHC.reshape(*shape[:2], -1), "all").reshape(shape)
    return rotate(normed(name, y_BTHC, "head"), shared.turn, shared.rotary)

  query = heads("query", mixer.head_dim * (1 + mixer.gated))
  query, gate = query[..., : mixer.head_dim], query[..., mixer.head_dim :]
  query, key = turned("query", query), turned("key", heads("key", mixer.head_dim))
  value = heads("value", mixer.head_dim)
  mixed = shared.attend(
    query, key, value, scale=mixer.scale, window=mixer.window, sink_H=params.get("sinks")
  )
  if mixer.gated:
    mixed *= jax.nn.sigmoid(gate)
  y_BTD = project(params, "out", mixed.reshape(*mixed.shape[:2], -1))
  return y_BTD, {"key": key, "value": value}


def _latent(mixer: Latent, params: Params, x_BTD: Array, shared: Shared) -> tuple[Array, Cache]:
  """Keeps the normed ``latent`` ``[B, T, R]`` and ``rotary_key`` ``[B, T, C]``."""
  eps, nope_dim = mixer.latent_norm_eps, mixer.nope_dim
  shape = (*x_BTD.shape[:2], mixer.num_heads)
  if mixer.query_rank is None:
    query = project(params, "query", x_BTD)
  else:
    low = rms_norm(project(params, "query_latent", x_BTD), params["query_norm"], eps)
    query = project(params, "query_up", low)
  query = query.reshape(*shape, -1)
  still, turned = query[..., :nope_dim], rotate(query[..., nope_dim:], shared.turn, shared.rotary)
  query = jnp.concatenate([still, turned], axis=-1)

  both = project(params, "latent", x_BTD)
  latent_BTR = rms_norm(both[..., : mixer.latent_rank], params["latent_norm"], eps)
  rotary_key = rotate(both[..., None, mixer.latent_rank :], shared.turn, shared.rotary)
  key_value = project(params, "key_value", latent_BTR).reshape(*shape, -1)
  spread = jnp.broadcast_to(rotary_key, (*shape, mixer.rope_dim))
  key = jnp.concatenate([key_value[..., :nope_dim], spread], axis=-1)

  mixed = shared.attend(query, key, key_value[..., nope_dim:], scale=mixer.scale)
  y_BTD = project(params, "out", mixed.reshape(*shape[:2], -1))
  return y_BTD, {"latent": latent_BTR, "rotary_key": rotary_key[:, :, 0]}


def _gated_delta(
  mixer: GatedDelta, params: Params, x_BTD: Array, shared: Shared
) -> tuple[Array, Cache]:
  """Keeps ``delta_state`` ``[B, R, H, C, V]`` and ``delta_inputs``, of the convolution."""
  rows, length, _ = x_BTD.shape
  heads, key_heads, width = mixer.num_heads, mixer.num_key_heads, mixer.key_dim

  def split(y_BTX: Array, *sizes: int) -> list[Array]:
    """The parts of each key head's columns, of all heads together."""
    y = y_BTX.reshape(rows, length, key_heads, -1)
    parts = jnp.split(y, np.cumsum(sizes)[:-1].tolist(), axis=-1)
    return [part.reshape(rows, length, -1) for part in parts]

  values, shares = heads // key_heads * mixer.value_dim, heads // key_heads
  *inputs, gate = split(project(params, "delta_in", x_BTD), width, width, values, values)
  beta, decay = split(project(params, "delta_rates", x_BTD), shares, shares)
  inputs_BTX = jnp.concatenate(inputs, axis=-1)
  convolved = delta_rule.causal_conv(inputs_BTX, params["delta_conv"], shared.segment_BT)
  convolved = jax.nn.silu(convolved)
  keys = key_heads * width
  query, key, value = jnp.split(convolved, [keys, 2 * keys], axis=-1)

  def of_heads(y_BTX: Array) -> Array:
    """Each key head serves the value heads behind one another."""
    unit = delta_rule.unit_length(y_BTX.reshape(rows, length, key_heads, width))
    return jnp.repeat(unit, shares, axis=2)

  step_H = params["delta_step"].astype(jnp.float32)[None, None]
  rate_H = jnp.exp(params["delta_decay"].astype(jnp.float32))[None, None]
  tokens = delta_rule.Tokens(
    query_BTHC=of_heads(query) * width**-0.5,
    key_BTHC=of_heads(key),
    value_BTHV=value.reshape(rows, length, heads, -1).astype(jnp.float32),
    decay_BTH=-rate_H * jax.nn.softplus(decay.astype(jnp.float32) + step_H),
    beta_BTH=jax.nn.sigmoid(beta).astype(jnp.float32),
  )
  chunk = math.gcd(shared.block, _CHUNK)
  mixed, states = delta_rule.delta_rule(tokens, shared.segment_BT, shared.last_BR, chunk=chunk)
  normed = rms_norm(mixed.astype(x_BTD.dtype), params["delta_norm"], shared.norm_eps)
  gate = jax.nn.silu(gate.astype(jnp.float32)).reshape(normed.shape)
  gated = (normed.astype(jnp.float32) * gate).astype(x_BTD.dtype)
  y_BTD = project(params, "delta_out", gated.reshape(rows, length, -1))
  last = (mixer.conv_width - 1, shared.segment_BT, shared.last_BR)
  return y_BTD, {
    "delta_state": states,
    "delta_inputs": delta_rule.last_inputs(inputs_BTX, *last),
  }


def dense_mlp(params: Params, x_BTD: Array) -> Array:
  """A gated MLP that every token takes."""
  hidden = jax.nn.silu(project(params, "wi_gate", x_BTD)) * project(params, "wi_up", x_BTD)
  return project(params, "wo", hidden)


def project(params: Params, name: str, x_BTD: Array) -> Array:
  """A linear map in the dtype of ``x_BTD``, with the bias ``{name}_bias`` if there is one."""
  y_BTX = x_BTD @ params[name].astype(x_BTD.dtype)
  if f"{name}_bias" in params:
    y_BTX += params[f"{name}_bias"].astype(x_BTD.dtype)[None, None]
  return y_BTX
