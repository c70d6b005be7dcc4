"""A model with the weights of a published checkpoint."""

import os

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from ultraep_jax.config import BalanceConfig
from ultraep_jax.models.checkpoint import Checkpoint
from ultraep_jax.models.config import ModelConfig
from ultraep_jax.models.load import load_params
from ultraep_jax.models.names import ignored_patterns, sources
from ultraep_jax.models.params import param_specs
from ultraep_jax.models.transformer import AttentionImplementation, MoETransformer


def load(
  folder: str | os.PathLike[str],
  *,
  balance: BalanceConfig,
  dtype: DTypeLike = jnp.bfloat16,
  param_dtype: DTypeLike | None = None,
  attention: AttentionImplementation = "auto",
  attention_block: int = 128,
  threads: int = 8,
) -> MoETransformer:
  """Loads a folder as it is on the Hugging Face Hub, onto the mesh in context.

  Every process reads the bytes that its own devices hold, straight into their shards. The folder
  has ``config.json`` and safetensors; block-scaled FP8 and MXFP4 weights become ``param_dtype``.

  Args:
    folder: of the checkpoint.
    balance: how every mixture of experts balances.
    dtype: of the computation: bfloat16, float16 or float32.
    param_dtype: of the parameters but routers and selection biases: one of the same; ``None``:
      ``dtype``.
    attention: as for ``MoETransformer``.
    attention_block: likewise.
    threads: that read and convert.

  Raises:
    FileNotFoundError: no checkpoint in the folder, or a file of it is not there.
    ValueError: the configuration asks for something that is not supported, the tensors are not
      those of the model, no mesh that can hold the experts is in context, or ``attention_block`` is
      below 1.
    TypeError: another dtype, or ``balance`` is no ``BalanceConfig``.
    OSError: a file cannot be read.
  """
  config = ModelConfig.from_folder(folder)
  param_dtype = dtype if param_dtype is None else param_dtype
  model = nnx.eval_shape(
    lambda: MoETransformer(
      config,
      balance=balance,
      dtype=dtype,
      param_dtype=param_dtype,
      attention=attention,
      attention_block=attention_block,
      rngs=nnx.Rngs(0),
    )
  )
  mesh = jax.sharding.get_mesh()
  shapes = {
    path: jax.ShapeDtypeStruct(
      spec.shape, spec.dtype(param_dtype), sharding=NamedSharding(mesh, spec.partition)
    )
    for path, spec in param_specs(config).items()
  }
  values = load_params(
    Checkpoint(folder),
    sources(config),
    shapes,
    ignored=ignored_patterns(config),
    threads=threads,
  )
  graphdef, state = nnx.split(model)
  params = [(path, param.replace(values[path])) for path, param in nnx.to_flat_state(state)]
  return nnx.merge(graphdef, nnx.from_flat_state(params))
