"""Which gradients travel beside which matmul."""

import itertools

import jax.numpy as jnp
import pytest

from ultraep_jax.compute.homeward import Homeward

BIASES = [(jnp.full(3, 1000.0), jnp.full(3, 7.0))]


class Replicas:
  """Adds copies' gradients to their homes'.

  Attributes:
    moves: whether a kernel does, given the gradients of copies.
    asked: sizes of what transfers had.
    reduced: gradients that were reduced without a matmul beside.
  """

  def __init__(self, moves=lambda copies: True):
    self.moves, self.asked, self.reduced = moves, [], 0

  def reducing(self, copies, homes):
    if not self.moves(copies):
      return None
    self.asked.append([int(c[0]) for c in copies])
    return [home + c for c, home in zip(copies, homes, strict=True)]

  def reduce(self, copies, homes):
    self.reduced += len(homes)
    return [home + c for c, home in zip(copies, homes, strict=True)]


def gradients(of):
  return jnp.arange(4.0) + 10 * of, jnp.full(4, 100.0 * (of + 1))


def run(replicas, projections, biases, skipped=0):
  """As backward does it; the transfer is what it brings. Beside the first ones nothing travels."""
  homeward = Homeward(replicas, (gradients(0),))
  for of in range(1, projections + 1):
    homeward = homeward.then(gradients(of), None if of <= skipped else homeward.next())
  return [each.tolist() for each in homeward.totals(biases, homeward.last(biases))]


def expected(projections, biases):
  pairs = [*map(gradients, range(projections + 1)), *biases]
  return [(home + copy).tolist() for home, copy in pairs]


@pytest.mark.parametrize(
  ("projections", "skipped", "asked"),
  [
    (1, 0, [[100], [200]]),
    (2, 0, [[100], [200], [300]]),
    (2, 1, [[100], [200, 300]]),  # beside the first, copies travel
    (2, 2, [[100, 200, 300]]),
  ],
)
def test_each_travels_once_beside_what_comes_after_it(projections, skipped, asked):
  replicas = Replicas()
  assert run(replicas, projections, [], skipped) == expected(projections, [])
  assert replicas.asked == asked and replicas.reduced == 0


@pytest.mark.parametrize("biases", [[], BIASES])
@pytest.mark.parametrize("projections", [1, 2])
@pytest.mark.parametrize("refused", list(itertools.product([False, True], repeat=2)))
def test_what_no_transfer_took_travels_with_the_last(refused, projections, biases):
  answers = iter([*refused[:projections], False])
  replicas = Replicas(lambda copies: not next(answers))
  assert run(replicas, projections, biases) == expected(projections, biases)
  assert replicas.reduced == 0


@pytest.mark.parametrize("projections", [1, 2])
def test_biases_that_no_kernel_takes_are_reduced_alone(projections):
  replicas = Replicas(lambda copies: len(copies[-1]) == 4)
  assert run(replicas, projections, BIASES) == expected(projections, BIASES)
  assert replicas.reduced == len(BIASES)


@pytest.mark.parametrize("biases", [[], BIASES])
@pytest.mark.parametrize("projections", [1, 2])
def test_without_kernels_all_are_reduced_at_the_end(projections, biases):
  replicas = Replicas(lambda copies: False)
  assert run(replicas, projections, biases) == expected(projections, biases)
  assert replicas.reduced == projections + 1 + len(biases)


def test_what_the_last_transfer_refuses_is_reduced():
  answers = iter([True, True, False, False])
  replicas = Replicas(lambda copies: next(answers))
  assert run(replicas, 2, BIASES) == expected(2, BIASES)
  assert replicas.reduced == 2
