"""Decoders with mixtures of experts for prefill, and their checkpoints."""

from ultraep_jax.models.checkpoint import Checkpoint as Checkpoint
from ultraep_jax.models.config import ModelConfig as ModelConfig
from ultraep_jax.models.load import load_params as load_params
from ultraep_jax.models.parts import GatedDelta as GatedDelta
from ultraep_jax.models.parts import GroupedQuery as GroupedQuery
from ultraep_jax.models.parts import Latent as Latent
from ultraep_jax.models.pretrained import load as load
from ultraep_jax.models.rotary import Rotary as Rotary
from ultraep_jax.models.rotary import Yarn as Yarn
from ultraep_jax.models.save import save as save
from ultraep_jax.models.sources import Source as Source
from ultraep_jax.models.transformer import AttentionImplementation as AttentionImplementation
from ultraep_jax.models.transformer import MoETransformer as MoETransformer
