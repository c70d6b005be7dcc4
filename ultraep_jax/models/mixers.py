"""Attention of one layer on the rows of one device: from normed hidden states to mixed ones.

Both kinds return what decoding needs of every token as a dict of arrays ``[B, T, ...]``.
"""

from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ultraep_jax.models.config import GroupedQuery, Latent, ModelConfig
from ultraep_jax.models.rotary import rotate
from ultraep_jax.types import Array

Params = Mapping[str, Array]
Cache = dict[str, Array]
Turn = tuple[Array, Array]


class Attend(Protocol):
  """Causal attention inside the requests of a batch; see ``attention.attend``."""

  def __call__(self, query: Array, key: Array, value: Array, /, *, scale: float) -> Array: ...


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
  """Divides by the root of the mean square, in float32, then scales in the dtype of ``x``."""
  wide = x.astype(jnp.float32)
  mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  normed = (wide * jax.lax.rsqrt(mean + eps)).astype(x.dtype)
  return normed * jnp.expand_dims(scale.astype(x.dtype), range(x.ndim - 1))


def empty_cache(
  attention: GroupedQuery | Latent, shape: tuple[int, ...], dtype: DTypeLike
) -> Cache:
  """Zeros for tokens of ``shape``, ``[layers, B, T]``."""
  if isinstance(attention, GroupedQuery):
    heads = (attention.num_key_heads, attention.head_dim)
    sizes = {"key": heads, "value": heads}
  else:
    sizes = {"latent": (attention.latent_rank,), "rotary_key": (attention.rope_dim,)}
  return {name: jnp.zeros((*shape, *size), dtype) for name, size in sizes.items()}


def grouped_query(
  params: Params, x_BTD: Array, turn: Turn, config: ModelConfig, attend: Attend
) -> tuple[Array, Cache]:
  """Returns ``[B, T, D]`` and ``key`` and ``value``, ``[B, T, N, C]``, keys as they are used."""
  attention, rotary = config.attention, config.rotary
  assert isinstance(attention, GroupedQuery)

  def by_head(name: str) -> Array:
    y_BTX = project(params, name, x_BTD)
    return y_BTX.reshape(*y_BTX.shape[:2], -1, attention.head_dim)

  query, key, value = by_head("query"), by_head("key"), by_head("value")
  if attention.qk_norm:
    query = rms_norm(query, params["query_norm"], config.norm_eps)
    key = rms_norm(key, params["key_norm"], config.norm_eps)
  query, key = rotate(query, turn, rotary), rotate(key, turn, rotary)
  mixed = attend(query, key, value, scale=attention.scale)
  y_BTD = project(params, "out", mixed.reshape(*mixed.shape[:2], -1))
  return y_BTD, {"key": key, "value": value}


def latent(
  params: Params, x_BTD: Array, turn: Turn, config: ModelConfig, attend: Attend
) -> tuple[Array, Cache]:
  """Returns ``[B, T, D]``, the normed ``latent`` ``[B, T, R]`` and ``rotary_key`` ``[B, T, C]``."""
  attention, rotary = config.attention, config.rotary
  assert isinstance(attention, Latent)
  eps, nope_dim = attention.latent_norm_eps, attention.nope_dim
  shape = (*x_BTD.shape[:2], attention.num_heads)
  hidden = x_BTD
  if attention.query_rank is not None:
    hidden = rms_norm(project(params, "query_latent", x_BTD), params["query_norm"], eps)
  query = project(params, "query", hidden).reshape(*shape, -1)
  still, turned = query[..., :nope_dim], rotate(query[..., nope_dim:], turn, rotary)
  query = jnp.concatenate([still, turned], axis=-1)

  both = project(params, "latent", x_BTD)
  latent_BTR = rms_norm(both[..., : attention.latent_rank], params["latent_norm"], eps)
  rotary_key = rotate(both[..., None, attention.latent_rank :], turn, rotary)
  key_value = project(params, "key_value", latent_BTR).reshape(*shape, -1)
  shared = jnp.broadcast_to(rotary_key, (*shape, attention.rope_dim))
  key = jnp.concatenate([key_value[..., :nope_dim], shared], axis=-1)

  mixed = attend(query, key, key_value[..., nope_dim:], scale=attention.scale)
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
