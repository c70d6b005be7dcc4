"""The small checkpoints, their prompts, and rows laid out by hand, for tests of models."""

import pathlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ultraep_jax.packed import PackedBatch

FOLDER = pathlib.Path(__file__).parents[1] / "checkpoints"


def read_prompts(name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Prompts, and the logits after each that checkpoints/make.py wrote."""
  with np.load(FOLDER / name / "logits.npz") as file:
    return [file[f"prompt_{i}"] for i in range(5)], [file[f"logits_{i}"] for i in range(5)]


def lay_out(
  prompts: Sequence[np.ndarray],
  places: Mapping[int, tuple[int, int]],
  rows: int,
  length: int,
  requests: int,
  padding_token: int = 0,
) -> PackedBatch:
  """A batch with some prompts.

  Args:
    prompts: tokens.
    places: per prompt, its row and where it starts in it; in the order of starts within a row.
    rows: B.
    length: T.
    requests: R.
    padding_token: what padding holds; then its positions are wild too.
  """
  token_BT = np.full((rows, length), padding_token, np.int32)
  position_BT = token_BT * 7
  segment_BT = np.zeros((rows, length), np.int32)
  last_BR = np.full((rows, requests), -1, np.int32)
  for prompt, (row, start) in places.items():
    tokens = prompts[prompt]
    here = slice(start, start + len(tokens))
    request = np.count_nonzero(last_BR[row] >= 0)
    assert not segment_BT[row, here].any() and here.stop <= length
    token_BT[row, here], segment_BT[row, here] = tokens, request + 1
    position_BT[row, here] = np.arange(len(tokens))
    last_BR[row, request] = here.stop - 1
  return jax.tree.map(jnp.asarray, PackedBatch(token_BT, position_BT, segment_BT, last_BR))


def request_of(places: Mapping[int, tuple[int, int]], prompt: int) -> tuple[int, int]:
  """Row and request, where the logits of a prompt are."""
  row, start = places[prompt]
  return row, sum(r == row and s < start for r, s in places.values())
