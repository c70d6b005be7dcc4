"""Which parts of gradients travel beside which matmul."""

import jax.numpy as jnp
import numpy as np
import pytest

from ultraep_jax.compute.homeward import _BESIDE, Homeward

BIASES = [(jnp.full(3, 1000.0), jnp.full(3, 7.0))]


class Replicas:
  """Adds a copy's gradient to its home's, each quarter on its own.

  Attributes:
    moves: whether a kernel does, given what it is asked for.
    asked: quarters that transfers had.
  """

  def __init__(self, moves=lambda quarters: True):
    self.moves, self.asked, self.reduced = moves, [], 0

  def reducing(self, copies, homes, quarters):
    if not self.moves(quarters):
      return None
    self.asked.append(quarters)
    pairs = zip(copies, homes, quarters, strict=True)
    return [home.at[..., first:end].add(c[..., first:end]) for c, home, (first, end) in pairs]

  def reduce(self, copies, homes):
    self.reduced += len(homes)
    return [home + c for c, home in zip(copies, homes, strict=True)]


def gradients(of):
  return jnp.arange(4.0) + 10 * of, jnp.full(4, 100.0 * (of + 1))


def run(replicas, projections, biases, adds=False):
  """As backward does it; the transfer is what it brings."""
  homeward = Homeward(replicas, projections, (gradients(0),))
  for of in range(1, projections + 1):
    homeward = homeward.then(gradients(of), None if adds else homeward.next())
  return [each.tolist() for each in homeward.totals(biases, homeward.last(biases))]


def expected(projections, biases):
  pairs = [*map(gradients, range(projections + 1)), *biases]
  return [(home + copy).tolist() for home, copy in pairs]


@pytest.mark.parametrize("projections", [1, 2])
def test_every_quarter_travels_once_and_after_it_is_made(projections):
  quarters = np.zeros((projections + 1, 4), int)
  for made, parts in enumerate(_BESIDE[projections], start=1):
    for of, first, end in parts:
      assert of < made
      quarters[of, first:end] += 1
  assert (quarters == 1).all()


@pytest.mark.parametrize("biases", [[], BIASES])
@pytest.mark.parametrize("projections", [1, 2])
@pytest.mark.parametrize(
  ("moves", "reduced"),
  [
    (lambda quarters: True, "nothing"),
    (lambda quarters: False, "all"),
    (lambda quarters: len(quarters) < 3, "biases"),  # with them it would be three arrays
  ],
)
def test_all_gradients_are_added_once(moves, reduced, projections, biases):
  if reduced == "biases" and projections == 1:
    moves = lambda quarters: len(quarters) < 2  # noqa: E731
  replicas = Replicas(moves)
  assert run(replicas, projections, biases) == expected(projections, biases)
  counts = {"nothing": 0, "all": projections + 1 + len(biases), "biases": len(biases)}
  assert replicas.reduced == counts[reduced]
  assert len(replicas.asked) == (0 if reduced == "all" else projections + 1)


def test_where_nothing_travelled_before_all_travels_at_last():
  replicas = Replicas()
  assert run(replicas, 2, BIASES, adds=True) == expected(2, BIASES)
  assert replicas.asked[-1] == [(0, 4)] * 4
