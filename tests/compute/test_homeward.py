"""Which parts of gradients travel beside which matmul."""

import itertools

import jax.numpy as jnp
import pytest

from ultraep_jax.compute.homeward import _HOME_AFTER, Homeward

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
def test_in_the_end_all_are_home(projections):
  """None of them leaves before it is made, and none goes back."""
  *_, last = steps = _HOME_AFTER[projections]
  assert [len(home) for home in steps] == list(range(1, projections + 2))
  assert set(last) == {4}
  for before, after in itertools.pairwise(steps):
    assert all(a <= b for a, b in zip(before, after, strict=False))


@pytest.mark.parametrize("biases", [[], BIASES])
@pytest.mark.parametrize("projections", [1, 2])
@pytest.mark.parametrize("refused", list(itertools.product([False, True], repeat=2)))
def test_what_no_transfer_took_travels_with_the_next(refused, projections, biases):
  """A tiny gradient has no tiles in some of its quarters, say."""
  answers = iter([*refused[:projections], False])
  replicas = Replicas(lambda quarters: not next(answers))
  assert run(replicas, projections, biases) == expected(projections, biases)
  assert replicas.reduced == 0


@pytest.mark.parametrize("projections", [1, 2])
def test_biases_that_no_kernel_takes_are_reduced_alone(projections):
  answers = iter([*[True] * projections, False, True])
  replicas = Replicas(lambda quarters: next(answers))
  assert run(replicas, projections, BIASES) == expected(projections, BIASES)
  assert replicas.reduced == len(BIASES)


@pytest.mark.parametrize("biases", [[], BIASES])
@pytest.mark.parametrize("projections", [1, 2])
def test_without_kernels_all_are_reduced_at_the_end(projections, biases):
  replicas = Replicas(lambda quarters: False)
  assert run(replicas, projections, biases) == expected(projections, biases)
  assert replicas.reduced == projections + 1 + len(biases)


def test_a_rest_that_nothing_brings_is_an_error():
  answers = iter([True, True, False, False])
  with pytest.raises(NotImplementedError, match="gradients: expected a transfer"):
    run(Replicas(lambda quarters: next(answers)), 2, BIASES)


def test_where_nothing_travelled_before_all_travels_at_last():
  replicas = Replicas()
  assert run(replicas, 2, BIASES, adds=True) == expected(2, BIASES)
  assert replicas.asked[-1] == [(0, 4)] * 4
