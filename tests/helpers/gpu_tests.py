"""Tests marked ``gpu``: alone, and then on GPUs; all the others on virtual CPU devices."""

import itertools
import re

import jax
import pytest
from _pytest.mark.expression import Expression


def only_gpu(markexpr: str) -> bool:
  """Whether ``pytest -m`` takes tests marked ``gpu`` and no others.

  >>> [only_gpu(chosen) for chosen in ("gpu", "gpu and not slow", "not slow", "not gpu", "")]
  [True, True, False, False, False]
  """
  if not markexpr:
    return False
  expression = Expression.compile(markexpr)
  others = sorted({*re.findall(r"\w+", markexpr)} - {"gpu", "and", "or", "not"})
  chosen = [
    itertools.compress(others, bits) for bits in itertools.product((0, 1), repeat=len(others))
  ]

  def takes(marks: set[str]) -> bool:
    return expression.evaluate(lambda name, /, **_: name in marks)

  marks = [{*each} for each in chosen]
  return any(takes({"gpu", *each}) for each in marks) and not any(map(takes, marks))


def skip_without_gpu(item: pytest.Item) -> None:
  """Skips a test marked ``gpu`` where JAX does not run on GPUs."""
  if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
    pytest.skip("needs NVIDIA GPUs: `python -m pytest -m gpu`, where there are some")
