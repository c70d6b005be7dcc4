"""What traced programs consist of."""

import jax
import jax.extend

PLANNING = {"plan_probes", "plan_quotas"}
# Copies ride in the kernels of matmuls.
FORWARD = {"route_rows", "dispatch", "gated_matmul", "grouped_matmul", "combine"}
LAYER = FORWARD | {"grouped_matmul_wgrad"}


def equations(jaxpr):
  """All of a program, inner ones after theirs, those of kernels too."""
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from equations(inner)


def kernels(jaxpr):
  """The calls of a program's kernels, whose name is ``params["name"]``."""
  return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "mpmd_map"]


def kernel_names(jaxpr):
  return {kernel.params["name"] for kernel in kernels(jaxpr)}
