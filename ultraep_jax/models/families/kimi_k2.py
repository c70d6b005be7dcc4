"""Kimi-K2: DeepSeek-V3 under another ``model_type``."""

import dataclasses

from ultraep_jax.models.families.deepseek_v3 import DEEPSEEK_V3

KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2")
