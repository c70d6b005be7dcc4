"""Choices of experts beside a trace: recorded, read back, and refused where they are damaged."""

import jax.numpy as jnp
import numpy as np
import pytest
import traces

from ultraep_jax.trace import Recorder, TraceError, read, read_choices
from ultraep_jax.trace import disk as files
from ultraep_jax.types import LayerStats

TOKENS, TOP_K, EXPERTS = 12, 2, 8


def some_choices(seed: int, *lead: int) -> jnp.ndarray:
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.integers(-1, EXPERTS, (*lead, TOKENS, TOP_K)), jnp.int32)


def stats(*lead: int, tokens: int = TOKENS) -> LayerStats:
  """Of so many tokens, three of whose assignments are masked."""
  load_GE = np.zeros((4, EXPERTS), np.int32)
  load_GE[0, 0] = tokens * TOP_K - 3
  one = traces.stats_of(load_GE)
  return LayerStats(*(np.broadcast_to(leaf, (*lead, *np.shape(leaf))) for leaf in one))


def test_choices_come_back(tmp_path):
  """Of layers by name and of stacks of them, in their shapes; the last counts."""
  named = {"a": some_choices(0), "b": some_choices(1)[:5].reshape(5, 1, TOP_K)}
  stacked = some_choices(2, 3, 11)  # layers, microbatches
  with Recorder(tmp_path) as recorder:
    layers = {"a": stats(1), "b": stats(1, tokens=5), "c": stats(1)}
    recorder.record(4, layers, expert_index=named)
    recorder.record(5, stats(3, 11, 1), axes=("layer", "microbatch", "group"), expert_index=stacked)
    recorder.record(6, stats(1))
    recorder.flush()
    recorder.record(4, {"a": stats(1)}, expert_index={"a": some_choices(3)})
  got = read_choices(tmp_path, 4)
  assert list(got) == ["a", "b"] and all(index.dtype == np.int32 for index in got.values())
  np.testing.assert_array_equal(got["a"], some_choices(3))
  np.testing.assert_array_equal(got["b"], named["b"])
  for microbatch in range(11):
    of_layers = read_choices(tmp_path, 5, microbatch)
    assert list(of_layers) == ["0", "1", "2"]
    np.testing.assert_array_equal(np.stack(list(of_layers.values())), stacked[:, microbatch])
  with pytest.raises(TraceError, match="expected choices of step 6, microbatch 0, got none"):
    read_choices(tmp_path, 6)
  assert len(read(tmp_path)) == 3 + 33 + 1


def test_wrong_choices_are_refused(tmp_path):
  with Recorder(tmp_path) as recorder:
    with pytest.raises(ValueError, match=r"expected layers of stats, got \['d'\]"):
      recorder.record(0, {"a": stats(1)}, expert_index={"d": some_choices(0)})
    with pytest.raises(ValueError, match=r"expected the leading axes \(3,\) of stats"):
      recorder.record(0, stats(3, 1), axes=("layer", "group"), expert_index=some_choices(0))
    recorder.record(0, stats(1), expert_index=some_choices(0) + 1)
    with pytest.raises(TraceError, match=r"0: expected values in \[-1, 8\), got 0 to 8"):
      recorder.flush()


@pytest.mark.parametrize("lead", [(), (1,), (2,), (3, 1), (3, 2)])
def test_choices_of_other_tokens_are_refused(lead, tmp_path):
  """Groups have their tokens in one array; layers and microbatches each their own."""
  axes = ("layer", "group")[2 - len(lead) :] if lead else ()
  layers, groups = lead[:-1], lead[-1] if lead else 1
  tokens = groups * TOKENS
  with Recorder(tmp_path) as recorder:
    for of_one in (tokens, tokens - 1, tokens + 1):
      index = np.zeros((*layers, of_one, TOP_K), np.int32)
      recorder.record(0, stats(*lead), axes=axes, expert_index=index)  # pyright: ignore
      if of_one == tokens:
        recorder.flush()
        continue
      message = rf"0: expected {tokens * TOP_K} choices, .*got {of_one * TOP_K} of shape \[{of_one}"
      with pytest.raises(ValueError, match=message):
        recorder.flush()
  assert len(files.chunks(tmp_path)) == len(list(tmp_path.glob("choices-*"))) == 1


@pytest.mark.parametrize(
  "change",
  [
    {"shape_NA": np.array([[TOKENS, TOP_K + 1]])},
    {"shape_NA": np.array([TOKENS, TOP_K])},
    {"shape_NA": np.array([[TOKENS, TOP_K], [1, 1]])},
    {"expert_X": np.full(TOKENS * TOP_K, 0.5)},
    {"expert_X": np.full(TOKENS * TOP_K, EXPERTS)},
    {"layer_N": np.array([3])},
    {"layer_N": np.array([{}], object)},
    None,
  ],
)
def test_damaged_choices(tmp_path, change):
  with Recorder(tmp_path) as recorder:
    recorder.record(0, stats(1), expert_index=some_choices(0))
  (path,) = tmp_path.glob("choices-*.npz")
  if change is None:
    path.write_bytes(path.read_bytes()[:-30])
  else:
    with np.load(path) as file:
      np.savez(path, **{**file, **change})
  with pytest.raises(TraceError, match=r"choices|expert_index"):
    read_choices(tmp_path, 0)
  assert len(read(tmp_path)) == 1  # records are not concerned
