"""The small checkpoints compiled on meshes, and layouts of their prompts."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from prompts import FOLDER, lay_out, read_prompts, request_of

from ultraep_jax import models
from ultraep_jax.config import BalanceConfig

ROWS, LENGTH, REQUESTS, BLOCK = 8, 64, 3, 8
ALONE = {prompt: (prompt, 0) for prompt in range(5)}
# Starts are multiples of BLOCK; most rows are empty.
PACKED = {3: (0, 0), 4: (0, 24), 0: (2, 8), 1: (2, 16), 2: (2, 40)}
# Starts are anywhere, with and without padding between requests.
TIGHT = {4: (1, 3), 3: (1, 40), 2: (5, 5), 1: (5, 18), 0: (5, 63)}


def mesh_of(text: str) -> jax.sharding.Mesh:
  """``"4"`` along ``expert`` or ``"2x4"`` along ``data`` and it; Explicit unless it says auto."""
  sizes = tuple(map(int, text.removesuffix(" auto").split("x")))
  kind = AxisType.Auto if text.endswith("auto") else AxisType.Explicit
  names = ("data", "expert")[-len(sizes) :]
  devices = jax.devices()[: math.prod(sizes)]
  return jax.make_mesh(sizes, names, (kind,) * len(sizes), devices=devices)


class Program:
  """One checkpoint on the mesh in context, compiled once for all layouts."""

  def __init__(self, name: str, balance: BalanceConfig):
    self.prompts, self.expected = read_prompts(name)
    self.model = models.load(
      FOLDER / name, balance=balance, dtype=jnp.float32, attention_block=BLOCK
    )
    self.run = jax.jit(lambda model, batch: model(batch))
    ranks = jax.sharding.get_abstract_mesh().shape["expert"]
    self.copies = balance.strategy != "none" and ranks > 1

  def check_all(self) -> None:
    """Right logits of each layout, whatever padding holds; copies where there are other ranks.

    And the same caches and states, which no other program computed.
    """
    config, copies = self.model.config, self.copies
    choices = sum(config.is_moe) * config.gating.num_experts_per_tok * sum(map(len, self.prompts))
    alone, packed, tight = (self(places) for places in (ALONE, PACKED, TIGHT))
    for result, places in ((alone, ALONE), (packed, PACKED), (tight, TIGHT)):
      self.check(result, places)
      self.check_same(result, places, alone)
      assert result.stats.expert_load_E.sum() == choices
      assert (result.stats.replicas.sum() > 0) == copies
    wild = self(TIGHT, padding_token=90)
    np.testing.assert_array_equal(tight.logits_BRV, wild.logits_BRV)

  def __call__(self, places: dict[int, tuple[int, int]], padding_token: int = 0) -> Any:
    batch = lay_out(self.prompts, places, ROWS, LENGTH, REQUESTS, padding_token)
    return jax.tree.map(np.asarray, self.run(self.model, batch))

  def logits(self, result: Any, places: dict[int, tuple[int, int]]) -> list[np.ndarray]:
    return [result.logits_BRV[request_of(places, prompt)] for prompt in sorted(places)]

  def check_same(self, result: Any, places: dict[int, tuple[int, int]], alone: Any) -> None:
    """Caches and states are those of ``ALONE``."""
    for prompt, (row, start) in places.items():
      length = len(self.prompts[prompt])
      for name, cache in result.cache.items():
        own, expected = cache[:, row, start : start + length], alone.cache[name][:, prompt, :length]
        np.testing.assert_allclose(own, expected, atol=2e-4, err_msg=f"{name} of {prompt}")
        assert own.any(axis=-1).all()
      for name, state in (result.state or {}).items():
        own = state[:, *request_of(places, prompt)]
        np.testing.assert_allclose(own, alone.state[name][:, prompt, 0], atol=2e-4, err_msg=name)
        assert own.any(axis=tuple(range(1, own.ndim))).all()

  def check(self, result: Any, places: dict[int, tuple[int, int]]) -> None:
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result))
    for logits, expected in zip(self.logits(result, places), self.expected, strict=True):
      np.testing.assert_allclose(logits, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())
