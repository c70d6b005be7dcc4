"""Bytes to train on: the library sources and the manual that every Python carries."""

import pathlib
import sysconfig
from pydoc_data import topics

import numpy as np

VOCAB = 256
MAX_BYTES = 32 * 1024 * 1024


def load_text() -> np.ndarray:
  """``[bytes]`` uint8, at most ``MAX_BYTES``, the same in every run with the same Python."""
  folder = pathlib.Path(sysconfig.get_path("stdlib"))
  documents = [text.encode() for _, text in sorted(topics.topics.items())]
  size = sum(map(len, documents))
  for path in sorted(folder.rglob("*.py")):
    if "site-packages" in path.parts or size > MAX_BYTES:
      continue
    documents.append(path.read_bytes())
    size += len(documents[-1])
  return np.frombuffer(b"\n".join(documents), np.uint8)[:MAX_BYTES]


def batch_at(text: np.ndarray, step: int, batch: int, seq: int) -> np.ndarray:
  """The windows of one step, ``[batch, seq + 1]`` int32; they depend on the step alone."""
  start_B1 = np.random.default_rng((0, step)).integers(0, len(text) - seq, (batch, 1))
  return text[start_B1 + np.arange(seq + 1)].astype(np.int32)
