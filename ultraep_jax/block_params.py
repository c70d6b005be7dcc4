"""The parameters of a model's MoE block: names, shapes, mesh axes and first values."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ultraep_jax.config import check_choice, check_int, check_type
from ultraep_jax.mesh import is_explicit, shard
from ultraep_jax.types import Array, AxisName, ExpertWeights, Layout

Initializer = jax.nn.initializers.Initializer
ROUTER = ("router", "router_bias")  # always float32
DEFAULT_INIT = jax.nn.initializers.lecun_normal()
_OF_EXPERTS = tuple(field.name for field in dataclasses.fields(ExpertWeights))


def param_shapes(
  embed_dim: int,
  expert_dim: int,
  num_experts: int,
  num_shared_experts: int,
  *,
  layout: str = "apart",
  use_bias: bool = False,
  use_shared_gate: bool = False,
  use_router_bias: bool = False,
  latent_dim: int | None = None,
) -> dict[str, tuple[int, ...]]:
  """Names and shapes of the parameters of ``MoE``, whose arguments these are.

  Raises:
    ValueError: a size out of range, an unknown layout, or a gate without shared experts.
    TypeError: a size that is no int, or a switch that is no bool.
  """
  check_int("embed_dim", embed_dim, minimum=1)
  check_int("expert_dim", expert_dim, minimum=1)
  check_int("num_shared_experts", num_shared_experts, minimum=0)
  check_choice("layout", layout, tuple(map(str, Layout)))
  check_type("use_bias", use_bias, bool)
  check_type("use_shared_gate", use_shared_gate, bool)
  check_type("use_router_bias", use_router_bias, bool)
  if use_shared_gate and not num_shared_experts:
    raise ValueError("use_shared_gate: expected num_shared_experts of at least 1, got 0")
  shapes: dict[str, tuple[int, ...]] = {"router": (embed_dim, num_experts)}
  if use_router_bias:
    shapes["router_bias"] = (num_experts,)
  width = embed_dim
  if latent_dim is not None:
    check_int("latent_dim", latent_dim, minimum=1)
    width = latent_dim
    shapes |= {"latent_down": (embed_dim, width), "latent_up": (width, embed_dim)}
  of_one = _expert_shapes(width, expert_dim, Layout(layout), use_bias)
  shapes |= {name: (num_experts, *shape) for name, shape in of_one.items()}
  if num_shared_experts:
    shared_dim = num_shared_experts * expert_dim
    of_shared = _expert_shapes(embed_dim, shared_dim, Layout(layout), use_bias)
    shapes |= {f"shared_{name}": shape for name, shape in of_shared.items()}
  if use_shared_gate:
    shapes["shared_gate"] = (embed_dim, 1)
  return shapes


def _expert_shapes(
  width: int, inner: int, layout: Layout, use_bias: bool
) -> dict[str, tuple[int, ...]]:
  """Of one expert's parameters, named as in ``ExpertWeights``."""
  cols = 2 * inner if layout in (Layout.FUSED, Layout.INTERLEAVED) else inner
  into = ("wi_gate", "wi_up") if layout is Layout.APART else ("wi",)
  matrices = {**dict.fromkeys(into, (width, cols)), "wo": (inner, width)}
  biases = {f"{name}_bias": shape[1:] for name, shape in matrices.items()} if use_bias else {}
  return matrices | biases


def init_param(
  name: str,
  key: Array,
  shape: tuple[int, ...],
  kernel_init: Initializer,
  param_dtype: DTypeLike,
  axis_name: AxisName,
  inner_axis: str | None = None,
) -> Array:
  """One ``[in, out]`` matrix, or one per expert over ``axis_name``; of the router in float32.

  Biases are zero. A matrix that holds gate and up is initialised as one of that width.
  """
  dtype = jnp.float32 if name in ROUTER else param_dtype
  spec = P(*param_axes(name, shape, axis_name, inner_axis))
  if name.endswith("_bias"):
    return shard(jnp.zeros(shape, dtype), spec)
  if name not in _OF_EXPERTS:
    return kernel_init(key, shape, dtype)
  # Of the keys, so that no device makes the matrices of other ranks' experts.
  key_E = shard(jax.random.split(key, shape[0]), P(axis_name))
  make = jax.vmap(lambda k: kernel_init(k, shape[1:], dtype))
  if is_explicit():  # not every kind of keys can be mapped over an Explicit axis
    mapped: Any = jax.sharding.auto_axes(make, out_sharding=spec)
    return mapped(key_E)
  return shard(make(key_E), spec)


def param_axes(
  name: str, shape: tuple[int, ...], axis_name: AxisName, inner_axis: str | None = None
) -> tuple[AxisName | None, ...]:
  """Mesh axes of a parameter: experts over ``axis_name``, F of theirs over ``inner_axis``."""
  axes: list[AxisName | None] = [None] * len(shape)
  if name in _OF_EXPERTS:
    axes[0] = axis_name
    if name != "wo_bias":  # of no columns of F
      axes[1 if name == "wo" else -1] = inner_axis
  return tuple(axes)


def expert_weights(params: Mapping[str, Any], layout: Layout, prefix: str = "") -> ExpertWeights:
  """The experts of parameters, or the shared ones, whose names have a prefix."""
  names = (name for name in _OF_EXPERTS if prefix + name in params)
  fields: Any = {"wi_gate": None, "wi_up": None, "wo": None}
  return ExpertWeights(**fields | {name: params[prefix + name] for name in names}, layout=layout)
