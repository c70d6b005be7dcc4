"""Published models: their checkpoints, read straight to sharded arrays."""

from ultraep_jax.models.checkpoint import Checkpoint as Checkpoint
from ultraep_jax.models.load import load_params as load_params
from ultraep_jax.models.sources import Source as Source
