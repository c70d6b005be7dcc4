"""Bytes to learn from: the text that every Python carries."""

import pathlib
import sysconfig
from pydoc_data import topics

import numpy as np

NUM_SOURCES = 60  # files of the standard library
HELD_OUT_EVERY = 16  # documents


def load_text() -> tuple[np.ndarray, np.ndarray]:
  """Training and held-out text, ``[bytes]`` uint8 each, split between documents.

  A document is a topic of Python's manual or a source file of the standard library.
  """
  sources = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))[:NUM_SOURCES]
  documents = [text.encode() for _, text in sorted(topics.topics.items())]
  documents += [path.read_bytes() for path in sources]
  held_out = documents[::HELD_OUT_EVERY]
  kept = [text for i, text in enumerate(documents) if i % HELD_OUT_EVERY]
  return np.frombuffer(b"\n".join(kept), np.uint8), np.frombuffer(b"\n".join(held_out), np.uint8)


def batch_at(text: np.ndarray, seed: int, step: int, batch: int, seq: int) -> np.ndarray:
  """The windows of one step, ``[batch, seq + 1]`` int32.

  They depend on the step alone, not on the steps before it, so a resumed run sees the same.
  """
  start_B1 = np.random.default_rng((seed, step)).integers(0, len(text) - seq, (batch, 1))
  return text[start_B1 + np.arange(seq + 1)].astype(np.int32)
