"""Experts inside nodes or across them: what crosses the network, and which layout is predicted."""

import dataclasses

import numpy as np
import pytest

from ultraep_jax.devices.device import Device
from ultraep_jax.devices.facts import TRANSFERS
from ultraep_jax.simulate import cost
from ultraep_jax.simulate.layouts import compare_layouts
from ultraep_jax.simulate.models import MODELS
from ultraep_jax.simulate.run import simulate
from ultraep_jax.testing import zipf_loads

MODEL = dataclasses.replace(MODELS["Qwen3-235B"], num_experts=16)
H100 = Device.load("h100")
TOKENS = 512


def loads(ratio=1.5):
  return zipf_loads(0, 16, 8, TOKENS, 8, ratio)[None, None]


def compare(device, **options):
  return compare_layouts(MODEL, device, loads(), node_size=4, tokens=TOKENS, **options)


def test_several_nodes_run_transfers_as_plain_jax_and_the_rest_as_kernels():
  mixed = H100.on_nodes()
  for name, fact in mixed.facts.items():
    assert fact == (H100.portable if name in TRANSFERS else H100).facts[name]
  assert {"dispatch_rate", "copy_seconds", "reduce_exposed"} < set(TRANSFERS)
  assert mixed.matmuls == H100.matmuls and mixed.in_blocks and not H100.in_blocks
  assert H100.portable.on_nodes() is H100.portable


def test_layouts():
  inside, across = compare(H100.on_nodes())
  assert (inside.ranks, inside.groups, across.ranks, across.groups) == (4, 2, 8, 1)
  assert inside.expert_bytes == 2 * across.expert_bytes
  assert across.sum_seconds == 0 < inside.sum_seconds
  # Each rank's four experts, in float32, half of them there and half back, twice.
  assert inside.sum_seconds == pytest.approx(4 * MODEL.expert_params * 4 / 50e9)
  assert inside.microbatch_seconds(4) == inside.layer_seconds + inside.sum_seconds / 4
  served = compare(H100.on_nodes(), training=False)
  assert served[0].sum_seconds == 0 and served[0].layer_seconds < inside.layer_seconds


def test_the_network_decides():
  """Without a step's sums, across is never faster; with them it is where microbatches are few."""
  slow, fast = (compare(H100.on_nodes().replace("test", network_rate=rate)) for rate in (1e9, 1e13))
  assert slow[1].exchange_seconds > 10 * slow[0].exchange_seconds
  assert slow[0].exchange_seconds == fast[0].exchange_seconds
  assert fast[1].exchange_seconds < 3 * fast[0].exchange_seconds
  assert slow[0].microbatch_seconds() > slow[1].microbatch_seconds()
  assert slow[0].microbatch_seconds(1000) < slow[1].microbatch_seconds(1000)


def test_tokens_cross_the_network_as_the_layer_sends_them():
  """Once a node: all tokens of the other node's rank in the same place, there and back."""
  device = H100.on_nodes().replace("test", network_rate=1e6)
  setting = cost.Setting(
    model=MODEL, device=device, num_ranks=8, domain_size=4, tokens=TOKENS, training=False
  )
  outcome = simulate(loads(), setting, ("none",))["none"]
  seconds = TOKENS * MODEL.embed_dim * 2 * 2 / 1e6
  assert outcome.forward.exchange.item() == pytest.approx(seconds, rel=1e-3)


def test_tokens_are_those_of_the_loads():
  """By default, and no others: times would be of loads that are not there."""
  device = H100.on_nodes()
  by_default = compare_layouts(MODEL, device, loads(), node_size=4)
  assert by_default == compare(device)
  with pytest.raises(ValueError, match=r"tokens: expected about 512, as .*, got 8192"):
    compare_layouts(MODEL, device, loads(), node_size=4, tokens=8192)
  with pytest.raises(ValueError, match="loads: expected integers of at least 0 in step 0"):
    compare_layouts(MODEL, device, loads() * np.nan, node_size=4)
  with pytest.raises(ValueError, match=r"loads: expected \[step, layer, G, E\], got \[8, 16\]"):
    compare_layouts(MODEL, device, loads()[0, 0], node_size=4)


def test_nodes_that_are_not_whole():
  with pytest.raises(ValueError, match="node_size: expected a divisor of 8 ranks, got 3"):
    compare_layouts(MODEL, H100, np.zeros((1, 1, 8, 16), np.int32), node_size=3)
  with pytest.raises(ValueError, match="node_size: expected a divisor of 8 ranks, got 0"):
    compare_layouts(MODEL, H100, np.zeros((1, 1, 8, 16), np.int32), node_size=0)
