"""Attention of one layer on the rows of one device: from normed hidden states to mixed ones.

Both kinds return what decoding needs of every token as a dict of arrays ``[B, T, ...]``.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ultraep_jax.models.parts import GroupedQuery, Latent, Mixer
from ultraep_jax.models.rotary import Rotary, rotate
from ultraep_jax.types import Array

Params = Mapping[str, Array]
Cache = dict[str, Array]
Turn = tuple[Array, Array]


class Attend(Protocol):
  """Causal attention inside the requests of a batch; see ``attention.attend``."""

  def __call__(
    self, query: Array, key: Array, value: Array, /, *, scale: float, window: int | None = None
  ) -> Array: ...


class Shared(NamedTuple):
  """What the mixers of all layers share.

  Attributes:
    turn: cosines and sines of the tokens' positions.
    rotary: which channels turn.
    norm_eps: added to the mean square in norms.
    attend: computes attention.
  """

  turn: Turn
  rotary: Rotary
  norm_eps: float
  attend: Attend


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
  """Divides by the root of the mean square, in float32, then scales in the dtype of ``x``."""
  wide = x.astype(jnp.float32)
  mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  normed = (wide * jax.lax.rsqrt(mean + eps)).astype(x.dtype)
  return normed * jnp.expand_dims(scale.astype(x.dtype), range(x.ndim - 1))


def cache_shapes(mixer: Mixer) -> dict[str, tuple[int, ...]]:
  """What decoding needs of each token, by name."""
  if isinstance(mixer, GroupedQuery):
    heads = (mixer.num_key_heads, mixer.head_dim)
    return {"key": heads, "value": heads}
  return {"latent": (mixer.latent_rank,), "rotary_key": (mixer.rope_dim,)}


def mix(mixer: Mixer, params: Params, x_BTD: Array, shared: Shared) -> tuple[Array, Cache]:
  """Returns ``[B, T, D]`` and the cache."""
  if isinstance(mixer, GroupedQuery):
    return _grouped_query(mixer, params, x_BTD, shared)
  return _latent(mixer, params, x_BTD, shared)


def _grouped_query(
  mixer: GroupedQuery, params: Params, x_BTD: Array, shared: Shared
) -> tuple[Array, Cache]:
  """The cache: ``key`` and ``value``, ``[B, T, N, C]``, keys as they are used."""

  def heads(name: str) -> Array:
    y_BTX = project(params, name, x_BTD)
    norm = params.get(f"{name}_norm")
    if norm is not None and mixer.qk_norm == "all":
      y_BTX = rms_norm(y_BTX, norm, shared.norm_eps)
    y_BTHC = y_BTX.reshape(*y_BTX.shape[:2], -1, mixer.head_dim)
    if norm is not None and mixer.qk_norm == "head":
      y_BTHC = rms_norm(y_BTHC, norm, shared.norm_eps)
    return y_BTHC

  query, key = (rotate(heads(name), shared.turn, shared.rotary) for name in ("query", "key"))
  value = heads("value")
  mixed = shared.attend(query, key, value, scale=mixer.scale, window=mixer.window)
  y_BTD = project(params, "out", mixed.reshape(*mixed.shape[:2], -1))
  return y_BTD, {"key": key, "value": value}


def _latent(mixer: Latent, params: Params, x_BTD: Array, shared: Shared) -> tuple[Array, Cache]:
  """The cache: the normed ``latent`` ``[B, T, R]`` and ``rotary_key`` ``[B, T, C]``."""
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
