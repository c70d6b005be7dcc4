"""The steps of a forward pass as pure functions on global arrays."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ultraep_jax.block import Block, measured_block
from ultraep_jax.checks import check_array
from ultraep_jax.config import BalanceConfig
from ultraep_jax.implementation import Implementations, first_that_can
from ultraep_jax.models import attention, cudnn, mixers
from ultraep_jax.models.config import ModelConfig
from ultraep_jax.models.mixers import Cache, rms_norm
from ultraep_jax.models.params import AXIS, mixer_specs
from ultraep_jax.models.rotary import cosines_and_sines
from ultraep_jax.models.rows import by_rows, row_axes
from ultraep_jax.models.spans import Spans, spans_of
from ultraep_jax.packed import PackedBatch
from ultraep_jax.stats import Measured
from ultraep_jax.types import Array, Layout

Params = Mapping[str, Array]


class Carry(NamedTuple):
  """What one layer hands to the next: hidden states, and the cache of all layers so far.

  Hidden states of padding are anything, NaN included, as attention leaves them; what they are
  normed to is zero, so nothing that tokens or the cache get is of padding.
  """

  x_BTD: Array
  cache: Cache


class Context(NamedTuple):
  """What all layers share: requests, what is not padding, cosines and sines of positions."""

  segment_BT: Array
  last_BR: Array
  valid_BT: Array
  spans: Spans
  turn: tuple[Array, Array]


class Attention(NamedTuple):
  """How attention is computed.

  Attributes:
    implementations: ``"cudnn"`` and ``"portable"``, in the order to try them.
    block: tokens that the portable one takes together.
  """

  implementations: Implementations
  block: int


class Layer(NamedTuple):
  """What is fixed of a layer."""

  config: ModelConfig
  index: int  # of any layer of its kind
  balance: BalanceConfig
  how: Attention


def start(
  embed_VD: Array, batch: PackedBatch, config: ModelConfig, dtype: DTypeLike
) -> tuple[Carry, Context]:
  """Embeds the tokens and makes room for the cache of every layer."""

  def local(embed_VD: Array, batch: PackedBatch) -> tuple[Array, Cache, Context]:
    valid_BT = batch.segment_BT > 0
    x_BTD = embed_VD[jnp.where(valid_BT, batch.token_BT, 0)].astype(dtype)
    turn = cosines_and_sines(config.rotary, jnp.where(valid_BT, batch.position_BT, 0))
    cache = {
      name: jnp.zeros(
        (len(layers), *(batch.last_BR if one.of_request else batch.token_BT).shape, *one.sizes),
        jnp.float32 if one.float32 else dtype,
      )
      for name, (one, layers) in _kept(config).items()
    }
    context = Context(batch.segment_BT, batch.last_BR, valid_BT, spans_of(batch), turn)
    return x_BTD, cache, context

  rows = P(row_axes())
  x_BTD, cache, context = by_rows(
    local, embed_VD, batch, specs=(P(), rows), out_specs=(rows, _of_cache(), rows)
  )
  return Carry(x_BTD, cache), context


def places(config: ModelConfig, layers: Sequence[int]) -> Array:
  """Where the cache of each layer lies among those of its kind: ``[layers]`` int32."""
  of_name = _kept(config)
  first = [next(iter(mixers.kept(config.mixer(layer)))) for layer in layers]
  found = [of_name[name][1].index(layer) for name, layer in zip(first, layers, strict=True)]
  return jnp.asarray(found, jnp.int32)


def by_token_and_request(cache: Cache, config: ModelConfig) -> tuple[Cache, Cache]:
  """What is kept of every token, and what of every request."""
  of_request = {name for name, (one, _) in _kept(config).items() if one.of_request}
  tokens = {name: value for name, value in cache.items() if name not in of_request}
  return tokens, {name: value for name, value in cache.items() if name in of_request}


def step(
  context: Context,
  carry: Carry,
  layers: tuple[tuple[Array, Params, Array | None], ...],
  *,
  kinds: tuple[Layer, ...],
) -> tuple[Carry, tuple[tuple[Measured, Array], ...]]:
  """One layer of each kind, with what those that are mixtures measured and chose.

  Args:
    context: of the batch.
    carry: of the layers before.
    layers: of each kind, the place of the layer's cache, its parameters and its choices, if they
      are made already.
    kinds: what is fixed of them.
  """
  measured = []
  for kind, (place, params, expert_index) in zip(kinds, layers, strict=True):
    carry, normed_BTD, params = _mix(context, carry, place, params, kind)
    if kind.config.is_moe[kind.index]:
      y_BTD, routed, of_layer = measured_block(
        {name: value for name, value in params.items() if name != "selection_bias"},
        normed_BTD,
        context.valid_BT,
        params.get("selection_bias"),
        _block(kind),
        expert_index,
      )
      measured.append((of_layer, routed.expert_index))
    else:
      rows = P(row_axes())
      y_BTD = by_rows(mixers.dense_mlp, params, normed_BTD, specs=(P(), rows), out_specs=rows)
    carry = carry._replace(x_BTD=carry.x_BTD + y_BTD)
  return carry, tuple(measured)


def logits(
  x_BTD: Array, last_BR: Array, norm_D: Array, head_DV: Array, config: ModelConfig
) -> Array:
  """``[B, R, V]`` float32 of the token after each request."""

  def local(norm_D: Array, head_DV: Array, x_BTD: Array, last_BR: Array) -> Array:
    last_BR1 = jnp.maximum(last_BR, 0)[..., None]
    hidden_BRD = jnp.take_along_axis(x_BTD, last_BR1, axis=1)
    hidden_BRD = rms_norm(hidden_BRD, norm_D, config.norm_eps, config.norms_around_one)
    return jnp.matmul(
      hidden_BRD, head_DV.astype(hidden_BRD.dtype), preferred_element_type=jnp.float32
    )

  rows = P(row_axes())
  return by_rows(
    local, norm_D, head_DV, x_BTD, last_BR, specs=(P(), P(), rows, rows), out_specs=rows
  )


def _mix(
  context: Context, carry: Carry, place: Array, params: Params, kind: Layer
) -> tuple[Carry, Array, Params]:
  """Attention; also the normed hidden states for the rest of the layer, and its parameters."""
  own = {*mixer_specs(kind.config, kind.index), "mlp_norm"}
  names = mixers.kept(kind.config.mixer(kind.index))
  rows = P(row_axes())
  x_BTD, normed_BTD, cache = by_rows(
    functools.partial(_mix_rows, kind=kind),
    place,
    {name: params[name] for name in own},
    carry.x_BTD,
    context,
    {name: carry.cache[name] for name in names},
    specs=(P(), P(), rows, rows, _of_cache()),
    out_specs=(rows, rows, _of_cache()),
  )
  rest = {name: value for name, value in params.items() if name not in own}
  return Carry(x_BTD, {**carry.cache, **cache}), normed_BTD, rest


def _mix_rows(
  place: Array, params: Params, x_BTD: Array, context: Context, cache: Cache, *, kind: Layer
) -> tuple[Array, Array, Cache]:
  """``_mix`` on the rows of one device."""
  config = kind.config
  norm = functools.partial(rms_norm, eps=config.norm_eps, around_one=config.norms_around_one)

  def normed(x_BTD: Array, name: str) -> Array:
    """Selects here, not in what attention returns: it costs nothing as a part of the norm."""
    normed_BTD = norm(x_BTD, params[name])
    return jnp.where(context.valid_BT[..., None], normed_BTD, jnp.zeros((), x_BTD.dtype))

  shared = mixers.Shared(
    turn=context.turn,
    rotary=config.rotary,
    norm_eps=config.norm_eps,
    norm=norm,
    attend=functools.partial(_attend, context, kind.how),
    segment_BT=context.segment_BT,
    last_BR=context.last_BR,
    block=kind.how.block,
  )
  mixer = config.mixer(kind.index)
  y_BTD, new = mixers.mix(mixer, params, normed(x_BTD, "attention_norm"), shared)
  x_BTD += y_BTD
  cache = {
    name: lax.dynamic_update_index_in_dim(cache[name], value, place, axis=0)
    for name, value in new.items()
  }
  return x_BTD, normed(x_BTD, "mlp_norm"), cache


def _attend(
  context: Context,
  how: Attention,
  query: Array,
  key: Array,
  value: Array,
  **options: Any,
) -> Array:
  candidates = {
    "cudnn": lambda: cudnn.attend(query, key, value, context.spans, **options),
    "portable": lambda: attention.attend(
      query, key, value, context.segment_BT, block=how.block, **options
    ),
  }
  return first_that_can(how.implementations, candidates)


def check_batch(batch: PackedBatch, block: int) -> None:
  """Raises unless the arrays of a batch fit each other, the mesh and the attention's blocks.

  Raises:
    ValueError: a shape does not fit.
    TypeError: a dtype is wrong.
  """
  check_array("token_BT", batch.token_BT, ("B", "T"), jnp.int32)
  rows, length = batch.token_BT.shape
  for name in ("position_BT", "segment_BT"):
    check_array(name, getattr(batch, name), (rows, length), jnp.int32)
  check_array("last_BR", batch.last_BR, (rows, "R"), jnp.int32)
  if not length or length % block:
    raise ValueError(
      f"token_BT: expected rows of a positive multiple of attention_block = {block} tokens, "
      f"got {length}"
    )
  mesh = jax.sharding.get_abstract_mesh()
  parts = math.prod(mesh.shape[axis] for axis in row_axes())
  if rows % parts:
    raise ValueError(
      f"token_BT: expected rows that the {parts} devices of mesh axes {row_axes()} can divide, "
      f"got {rows}"
    )


def _kept(config: ModelConfig) -> dict[str, tuple[mixers.Kept, list[int]]]:
  """Each array that decoding needs, with the layers that have it."""
  found: dict[str, tuple[mixers.Kept, list[int]]] = {}
  for layer in range(config.num_layers):
    for name, one in mixers.kept(config.mixer(layer)).items():
      found.setdefault(name, (one, []))[1].append(layer)
  return found


def _block(kind: Layer) -> Block:
  return Block(
    gating=kind.config.gating,
    config=kind.balance,
    activation=kind.config.activation,
    dtype=None,
    axis_name=AXIS,
    token_axes=row_axes(),
    layout=Layout(kind.config.expert_layout),
  )


def _of_cache() -> P:
  return P(None, row_axes())
