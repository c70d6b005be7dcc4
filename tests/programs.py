"""What traced programs consist of."""

import jax
import jax.extend


def equations(jaxpr):
  """All of a program, inner ones after theirs, those of kernels too."""
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from equations(inner)
