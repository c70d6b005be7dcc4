"""Causal attention over packed requests by cuDNN's flash attention, on NVIDIA GPUs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

from ultraep_jax.models.spans import Spans
from ultraep_jax.types import Array


def attend(
  query_BTHC: Array,
  key_BTNC: Array,
  value_BTNV: Array,
  spans: Spans,
  *,
  scale: float,
  window: int | None = None,
  sink_H: Array | None = None,
) -> Array:
  """Causal attention inside each request of each row; see ``attention.attend``.

  JAX's public ``jax.nn.dot_product_attention`` cannot say where packed sequences start, the
  function below it can.

  Args:
    query_BTHC: ``[B, T, H, C]`` bfloat16 or float16.
    key_BTNC: ``[B, T, N, C]``; N divides H.
    value_BTNV: ``[B, T, N, V]``.
    spans: where the requests lie.
    scale: factor on the scores.
    window: none; see ``attention.attend``.
    sink_H: none; likewise.

  Returns:
    ``[B, T, H, V]``, dtype of the values; anything outside of requests, NaN included.

  Raises:
    NotImplementedError: no GPU, no cuDNN, or not these sizes and dtypes.
  """
  platform = _platform()
  if platform != "gpu":
    raise NotImplementedError(f"cuDNN: expected NVIDIA GPUs, got {platform}")
  if window is not None or sink_H is not None:
    raise NotImplementedError("cuDNN: expected neither a window nor sinks, got one")
  if query_BTHC.shape[3] != value_BTNV.shape[3]:
    raise NotImplementedError(  # it would take the values' strides for the keys'
      f"cuDNN: expected values as wide as keys, got {value_BTNV.shape[3]}, {query_BTHC.shape[3]}"
    )
  # JAX would move what is not negative to the front, in every layer. Nothing is negative, but XLA
  # only knows that of a flat maximum; then it leaves the moving out.
  size_BR, start_BS = (jnp.maximum(v.ravel(), 0).reshape(v.shape) for v in spans)
  try:
    mixed_BTHV: Any = dot_product_attention(  # custom_vjp hides the type
      query_BTHC,
      key_BTNC,
      value_BTNV,
      q_seqlen=size_BR,
      kv_seqlen=size_BR,
      q_offsets=start_BS,
      kv_offsets=start_BS,
      scale=scale,
      mask_type=MaskType.PADDING_CAUSAL,
    )
  except RuntimeError as error:  # no cuDNN
    raise NotImplementedError(f"cuDNN: {error}") from error
  return mixed_BTHV


def _platform() -> str:
  """Of the mesh in context, or of the default device."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform
