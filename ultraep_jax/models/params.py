"""The parameters of a model as a table: shapes, mesh axes, dtypes and random values."""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from ultraep_jax.block import param_axes, param_shapes
from ultraep_jax.mesh import is_explicit
from ultraep_jax.models.config import GroupedQuery, Latent, ModelConfig
from ultraep_jax.types import Array, AxisName

AXIS = "expert"  # of the mesh, over which experts lie
Path = tuple[Any, ...]  # of names and indices


class Spec(NamedTuple):
  """One parameter.

  Attributes:
    shape: of the global array.
    axes: the mesh axis that divides each axis of the array.
    kind: ``"matrix"`` ``[..., in, out]``, ``"scale"`` of a norm, or ``"bias"``.
    float32: whatever the dtype of the others.
  """

  shape: tuple[int, ...]
  axes: tuple[AxisName | None, ...]
  kind: Literal["matrix", "scale", "bias"] = "matrix"
  float32: bool = False

  @property
  def partition(self) -> PartitionSpec:
    return PartitionSpec(*self.axes)

  def dtype(self, param_dtype: DTypeLike) -> jnp.dtype:
    return jnp.dtype(jnp.float32 if self.float32 else param_dtype)


def param_specs(config: ModelConfig) -> dict[Path, Spec]:
  """Every parameter of a model, by its path: ``(name,)`` or ``("stacks", run, name)``.

  The parameters of a run of layers of one kind lie in one array, layers first.
  """
  specs: dict[Path, Spec] = {
    ("embed",): _plain((config.vocab_size, config.embed_dim)),
    ("norm",): _plain((config.embed_dim,), "scale"),
  }
  if not config.tied_embeddings:
    specs["head",] = _plain((config.embed_dim, config.vocab_size))
  for run, layers in enumerate(config.runs):
    for name, spec in layer_specs(config, config.is_moe[layers[0]]).items():
      stacked = spec._replace(shape=(len(layers), *spec.shape), axes=(None, *spec.axes))
      specs["stacks", run, name] = stacked
  return specs


def layer_specs(config: ModelConfig, is_moe: bool) -> dict[str, Spec]:
  """The parameters of one layer by name. Those of experts are named as in ``nnx.MoE``."""
  norm = {"mlp_norm": _plain((config.embed_dim,), "scale")}
  return mixer_specs(config) | norm | (_moe(config) if is_moe else _dense(config))


def mixer_specs(config: ModelConfig) -> dict[str, Spec]:
  """The parameters of the first half of a layer, attention."""
  norm = {"attention_norm": _plain((config.embed_dim,), "scale")}
  if isinstance(config.attention, GroupedQuery):
    return norm | _grouped_query(config.attention, config.embed_dim)
  return norm | _latent(config.attention, config.embed_dim)


def random_param(key: Array, spec: Spec, param_dtype: DTypeLike) -> Array:
  """Ones for scales, zeros for biases, and matrices that keep the size of what they multiply."""
  dtype = spec.dtype(param_dtype)
  if spec.kind != "matrix":
    return jnp.full(spec.shape, float(spec.kind == "scale"), dtype)
  # Without it, every device of an Explicit mesh would make the whole array.
  sharding = spec.partition if is_explicit() else None
  value = jax.random.normal(key, spec.shape, dtype, out_sharding=sharding)
  return value / math.sqrt(spec.shape[-2])


def _grouped_query(attention: GroupedQuery, width: int) -> dict[str, Spec]:
  queries = attention.num_heads * attention.head_dim
  keys = attention.num_key_heads * attention.head_dim
  specs = {
    "query": _plain((width, queries)),
    "key": _plain((width, keys)),
    "value": _plain((width, keys)),
    "out": _plain((queries, width)),
  }
  if attention.bias:
    for name, size in (("query", queries), ("key", keys), ("value", keys)):
      specs[f"{name}_bias"] = _plain((size,), "bias")
  if attention.out_bias:
    specs["out_bias"] = _plain((width,), "bias")
  if attention.qk_norm:
    specs["query_norm"] = specs["key_norm"] = _plain((attention.head_dim,), "scale")
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
    specs["query"] = _plain((attention.query_rank, queries))
  if attention.bias:
    specs["latent_bias"] = _plain((rank + attention.rope_dim,), "bias")
    specs["out_bias"] = _plain((width,), "bias")
    if attention.query_rank is not None:
      specs["query_latent_bias"] = _plain((attention.query_rank,), "bias")
  return specs


def _dense(config: ModelConfig) -> dict[str, Spec]:
  wide = _plain((config.embed_dim, config.dense_dim))
  return {"wi_gate": wide, "wi_up": wide, "wo": _plain((config.dense_dim, config.embed_dim))}


def _moe(config: ModelConfig) -> dict[str, Spec]:
  gating = config.gating
  shapes = param_shapes(
    config.embed_dim, config.expert_dim, gating.num_experts, config.num_shared_experts
  )
  specs = {
    name: Spec(shape, param_axes(name, shape, AXIS), float32=name == "router")
    for name, shape in shapes.items()
  }
  if gating.use_selection_bias:
    specs["selection_bias"] = _plain((gating.num_experts,), "bias")._replace(float32=True)
  return specs


def _plain(shape: tuple[int, ...], kind: Literal["matrix", "scale", "bias"] = "matrix") -> Spec:
  """A parameter that every device holds whole."""
  return Spec(shape, (None,) * len(shape), kind)
