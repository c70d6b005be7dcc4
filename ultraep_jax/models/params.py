"""The parameters of a model as a table: shapes, mesh axes, dtypes and random values."""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from ultraep_jax.block_params import ROUTER, param_axes, param_shapes
from ultraep_jax.mesh import is_explicit
from ultraep_jax.models.config import ModelConfig
from ultraep_jax.models.parts import GatedDelta, GroupedQuery, Latent
from ultraep_jax.types import Array, AxisName

AXIS = "expert"  # of the mesh, over which experts lie
Path = tuple[Any, ...]  # of names and indices
Kind = Literal["matrix", "kernel", "scale", "bias"]


class Spec(NamedTuple):
  """One parameter.

  Attributes:
    shape: of the global array.
    axes: the mesh axis that divides each axis of the array.
    kind: ``"matrix"`` ``[..., in, out]``, ``"kernel"`` ``[..., out, 1, width]`` of a convolution,
      ``"scale"`` of a norm, or ``"bias"``.
    float32: whatever the dtype of the others.
  """

  shape: tuple[int, ...]
  axes: tuple[AxisName | None, ...]
  kind: Kind = "matrix"
  float32: bool = False

  @property
  def partition(self) -> PartitionSpec:
    return PartitionSpec(*self.axes)

  def dtype(self, param_dtype: DTypeLike) -> jnp.dtype:
    return jnp.dtype(jnp.float32 if self.float32 else param_dtype)


def param_specs(config: ModelConfig) -> dict[Path, Spec]:
  """Every parameter of a model, by its path: ``(name,)`` or ``("stacks", stack, name)``.

  The parameters of a stack of layers of one kind lie in one array, layers first.
  """
  specs: dict[Path, Spec] = {
    ("embed",): _plain((config.vocab_size, config.embed_dim)),
    ("norm",): _norm(config.embed_dim, config),
  }
  if not config.tied_embeddings:
    specs["head",] = _plain((config.embed_dim, config.vocab_size))
  for stack, layers in enumerate(config.stacks):
    for name, spec in layer_specs(config, layers[0]).items():
      stacked = spec._replace(shape=(len(layers), *spec.shape), axes=(None, *spec.axes))
      specs["stacks", stack, name] = stacked
  return specs


def layer_specs(config: ModelConfig, layer: int) -> dict[str, Spec]:
  """The parameters of a layer by name. Those of experts are named as in ``nnx.MoE``."""
  norm = {"mlp_norm": _norm(config.embed_dim, config)}
  second = _moe(config) if config.is_moe[layer] else _dense(config)
  return mixer_specs(config, layer) | norm | second


def mixer_specs(config: ModelConfig, layer: int) -> dict[str, Spec]:
  """The parameters of the first half of a layer, attention."""
  mixer, width = config.mixer(layer), config.embed_dim
  norm = {"attention_norm": _norm(width, config)}
  if isinstance(mixer, GroupedQuery):
    return norm | _grouped_query(mixer, config)
  if isinstance(mixer, Latent):
    return norm | _latent(mixer, width)
  return norm | _gated_delta(mixer, width)


def random_param(key: Array, spec: Spec, param_dtype: DTypeLike) -> Array:
  """Ones for scales, zeros for biases, and matrices that keep the size of what they multiply."""
  dtype = spec.dtype(param_dtype)
  if spec.kind in ("scale", "bias"):
    return jnp.full(spec.shape, float(spec.kind == "scale"), dtype)
  # Without it, every device of an Explicit mesh would make the whole array.
  sharding = spec.partition if is_explicit() else None
  value = jax.random.normal(key, spec.shape, dtype, out_sharding=sharding)
  return value / math.sqrt(spec.shape[-2 if spec.kind == "matrix" else -1])


def _grouped_query(attention: GroupedQuery, config: ModelConfig) -> dict[str, Spec]:
  width = config.embed_dim
  queries = attention.num_heads * attention.head_dim
  keys = attention.num_key_heads * attention.head_dim
  both = queries * (1 + attention.gated)
  specs = {
    "query": _plain((width, both)),
    "key": _plain((width, keys)),
    "value": _plain((width, keys)),
    "out": _plain((queries, width)),
  }
  if attention.bias:
    for name, size in (("query", both), ("key", keys), ("value", keys)):
      specs[f"{name}_bias"] = _plain((size,), "bias")
  if attention.out_bias:
    specs["out_bias"] = _plain((width,), "bias")
  if attention.sinks:
    specs["sinks"] = _plain((attention.num_heads,), "bias")
  if attention.qk_norm is not None:
    whole = attention.qk_norm == "all"
    specs["query_norm"] = _norm(queries if whole else attention.head_dim, config)
    specs["key_norm"] = _norm(keys if whole else attention.head_dim, config)
  return specs


def _latent(attention: Latent, width: int) -> dict[str, Spec]:
  heads, rank = attention.num_heads, attention.latent_rank
  queries = heads * (attention.nope_dim + attention.rope_dim)
  specs = {
    "latent": _plain((width, rank + attention.rope_dim)),
    "latent_norm": _plain((rank,), "scale"),
    "key_value": _plain((rank, heads * (attention.nope_dim + attention.value_dim))),
    "out": _plain((heads * attention.value_dim, width)),
  }
  if attention.query_rank is None:
    specs["query"] = _plain((width, queries))
  else:
    specs["query_latent"] = _plain((width, attention.query_rank))
    specs["query_norm"] = _plain((attention.query_rank,), "scale")
    specs["query_up"] = _plain((attention.query_rank, queries))
  if attention.bias:
    specs["latent_bias"] = _plain((rank + attention.rope_dim,), "bias")
    specs["out_bias"] = _plain((width,), "bias")
    if attention.query_rank is not None:
      specs["query_latent_bias"] = _plain((attention.query_rank,), "bias")
  return specs


def _gated_delta(mixer: GatedDelta, width: int) -> dict[str, Spec]:
  values = mixer.num_heads * mixer.value_dim
  return {
    "delta_in": _plain((width, mixer.conv_dim + values)),
    "delta_rates": _plain((width, 2 * mixer.num_heads)),
    "delta_conv": _plain((mixer.conv_dim, 1, mixer.conv_width), "kernel"),
    "delta_decay": _plain((mixer.num_heads,), "bias")._replace(float32=True),
    "delta_step": _plain((mixer.num_heads,), "scale")._replace(float32=True),
    "delta_norm": _plain((mixer.value_dim,), "scale"),
    "delta_out": _plain((values, width)),
  }


def _norm(width: int, config: ModelConfig) -> Spec:
  return _plain((width,), "bias" if config.norms_around_one else "scale")


def _dense(config: ModelConfig) -> dict[str, Spec]:
  wide = _plain((config.embed_dim, config.dense_dim))
  return {"wi_gate": wide, "wi_up": wide, "wo": _plain((config.dense_dim, config.embed_dim))}


def _moe(config: ModelConfig) -> dict[str, Spec]:
  gating = config.gating
  shapes = param_shapes(
    config.embed_dim,
    config.expert_dim,
    gating.num_experts,
    config.num_shared_experts,
    layout=config.expert_layout,
    use_bias=config.expert_bias,
    use_shared_gate=config.shared_gate,
    use_router_bias=config.router_bias,
  )
  specs = {
    name: Spec(
      shape,
      param_axes(name, shape, AXIS),
      "bias" if name.endswith("_bias") else "matrix",
      float32=name in ROUTER,
    )
    for name, shape in shapes.items()
  }
  if gating.use_selection_bias:
    specs["selection_bias"] = _plain((gating.num_experts,), "bias")._replace(float32=True)
  return specs


def _plain(shape: tuple[int, ...], kind: Kind = "matrix") -> Spec:
  """A parameter that every device holds whole."""
  return Spec(shape, (None,) * len(shape), kind)
