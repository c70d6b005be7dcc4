"""Router traces as Megatron-LM writes them, of known loads."""

import json
import pathlib
from typing import Any

import numpy as np

from ultraep_jax import testing

E, G, K = 8, 4, 2


def chosen(seed: int) -> tuple[np.ndarray, np.ndarray]:
  """A load matrix and tokens that have it."""
  load_GE = testing.zipf_loads(seed, E, G, tokens=32, top_k=K, ratio=2.0)
  return load_GE, testing.expert_indices(seed, load_GE, K)


def write(folder: pathlib.Path, records: list[dict[str, Any]], rank: int, end: str = "") -> None:
  folder.mkdir(exist_ok=True)
  lines = "".join(json.dumps(record) + "\n" for record in records)
  (folder / f"router_trace_rank{rank}.jsonl").write_text(lines + end)


def record(step: int, layer: int, index: Any, **others: Any) -> dict[str, Any]:
  top = np.asarray(index).tolist()
  return {
    "step": step,
    "layer": layer,
    "num_tokens": len(top),
    "topk": K,
    "top_indices": top,
  } | others


def write_run(folder: pathlib.Path, ranks: int = G, steps: int = 3) -> None:
  for rank in range(ranks):
    records = []
    for step in range(steps):
      for layer in (2, 10):
        index = chosen(100 * step + layer + rank // G)[1][rank % G]
        records.append(record(step, layer, index, rank=rank, block="decoder"))
    write(folder, records, rank)
