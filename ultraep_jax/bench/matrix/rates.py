"""The rates of the devices at hand, for the floor."""

from ultraep_jax.bench.matrix.floor import Rates


def rates_here() -> Rates:
  """Of the first device's kind."""
  return Rates(790e12, 4.3e12, 350e9, 2.5e-6)
