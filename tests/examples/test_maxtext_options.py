"""What a balanced layer obeys and refuses of MaxText's options, without MaxText."""

import enum
import types

import maxtext_options
import pytest


class Block(enum.Enum):
  MIXTRAL = "mixtral"
  LLAMA4 = "llama4"
  NEW = "new"


def config(**options):
  defaults = {"decoder_block": Block.MIXTRAL, "attention": "flash", "num_experts_per_tok": 2}
  return types.SimpleNamespace(**(defaults | options))


@pytest.mark.parametrize(
  "options",
  [
    {},
    {"decoder_block": "gpt_oss", "mlp_bias": True},
    {"decoder_block": Block.LLAMA4, "num_experts_per_tok": 1},
    {"use_ring_of_experts": True, "num_moe_token_chunks": 4, "wi_tile_fwd_mlp_dim": 256},
    {"quantization": None, "ragged_buffer_factor": 0, "capacity_factor": -2.0},
  ],
)
def test_config_passes(options):
  maxtext_options.check(config(**options), {"use_ring_of_experts": False, "mlp_bias": False})


@pytest.mark.parametrize("name, expected, reason", maxtext_options.REFUSED)
def test_refused_option_is_named(name, expected, reason):
  others = {bool: not expected, int: 3, float: 2.0, str: "fp8", type(None): "step"}
  got = others[type(expected)]
  maxtext_options.check(config(**{name: expected}))
  with pytest.raises(NotImplementedError) as error:
    maxtext_options.check(config(**{name: got}))
  assert str(error.value) == f"{name}: expected {expected!r}, got {got!r}: {reason}"


@pytest.mark.parametrize(
  "options, message",
  [
    ({"decoder_block": Block.NEW}, r"^decoder_block: expected one of \[.*\].*, got 'new'"),
    ({"decoder_block": Block.LLAMA4}, r"^num_experts_per_tok: expected 1 .*, got 2"),
    ({"attention": "vllm_rpa"}, r"^attention: expected none of .*, got 'vllm_rpa'"),
    ({"moe_of_tomorrow": True}, r"^moe_of_tomorrow: expected False, .* not known here, got True"),
  ],
)
def test_refused_config_is_explained(options, message):
  with pytest.raises(NotImplementedError, match=message):
    maxtext_options.check(config(**options), {"moe_of_tomorrow": False})


def test_unknown_option_passes_at_its_default():
  maxtext_options.check(config(moe_of_tomorrow=False), {"moe_of_tomorrow": False})


def test_each_option_is_in_one_list():
  refused = [name for name, _, _ in maxtext_options.REFUSED]
  lists = [maxtext_options.OBEYED, maxtext_options.REPLACED, frozenset(refused)]
  assert len(refused) == len(set(refused))
  assert sum(map(len, lists)) == len(frozenset().union(*lists))
