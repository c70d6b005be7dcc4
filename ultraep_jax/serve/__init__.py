"""Prefill: prompts in, first tokens and caches out, every MoE layer balanced in every batch.

>>> from ultraep_jax import serve
>>> serve.EngineConfig(buckets=(256, 1024), alignment=128).max_requests
64

See docs/prefill.md.
"""

from ultraep_jax.serve.config import EngineConfig as EngineConfig
from ultraep_jax.serve.engine import PrefillEngine as PrefillEngine
from ultraep_jax.serve.metrics import Metrics as Metrics
from ultraep_jax.serve.requests import Prefilled as Prefilled
from ultraep_jax.serve.requests import QueueFull as QueueFull
from ultraep_jax.serve.requests import RequestFailed as RequestFailed
