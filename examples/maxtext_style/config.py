"""MaxText's names: fields of its configuration, mesh axes, and which axes divide what."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

MESH_AXES = ("data", "fsdp", "context", "tensor", "expert")
LOGICAL_AXIS_RULES = {
  "activation_batch": ("data", "fsdp", "expert"),
  "activation_norm_length": ("context",),
  "exp": ("expert",),
  "embed_moe": ("fsdp", "context"),
  "mlp_moe": ("tensor",),
}
# Ranks along "expert" are one group of tokens; each position on these axes has its own group.
GROUP_AXES = ("data", "fsdp", "context")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The part of the configuration that the block reads."""

  base_emb_dim: int = 32
  base_moe_mlp_dim: int = 64
  num_experts: int = 16
  num_experts_per_tok: int = 2
  sparse_matmul: bool = True
  load_balance_loss_weight: float = 0.01
  dtype: DTypeLike = jnp.float32
  weight_dtype: DTypeLike = jnp.float32


def mesh_axes(*logical: str | None) -> P:
  """The mesh axes of logical ones."""
  return P(*(name if name is None else LOGICAL_AXIS_RULES[name] for name in logical))


def make_mesh(**sizes: int) -> jax.sharding.Mesh:
  """A mesh of ``MESH_AXES``; those that are not given have size 1.

  Raises:
    ValueError: a name is not one of them, or there are too few devices.
  """
  if not set(sizes) <= set(MESH_AXES):
    raise ValueError(f"sizes: expected axes of {MESH_AXES}, got {tuple(sizes)}")
  shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
  return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(shape))
