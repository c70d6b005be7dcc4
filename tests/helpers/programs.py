"""What traced programs consist of."""

import re
from collections.abc import Iterator

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


def unordered_loops(hlo: str, opcode: str) -> Iterator[tuple[str, str]]:
  """Loops with some ``opcode`` inside, and what has it later in the same computation, but does
  not need the loop's results; of a compiled program's text.
  """
  computations: dict[str, dict[str, str]] = {}
  for line in hlo.splitlines():
    if line.endswith("{") and (head := re.match(r"(?:ENTRY )?%([\w.-]+) \(", line)):
      computations[head[1]] = operations = {}
    elif operation := re.match(r"  (?:ROOT )?%([\w.-]+) = (.*)", line):
      operations[operation[1]] = operation[2].split(", metadata=")[0]

  def has_opcode(text: str) -> bool:
    inner = [name for name in re.findall(r"%([\w.-]+)", text) if name in computations]
    return f" {opcode}(" in text or any(
      has_opcode(text) for name in inner for text in computations[name].values()
    )

  for operations in computations.values():
    needs: dict[str, set[str]] = {}
    for name, text in operations.items():
      operands = [operand for operand in re.findall(r"%([\w.-]+)", text) if operand in needs]
      needs[name] = set(operands).union(*(needs[operand] for operand in operands))
    having = [name for name, text in operations.items() if has_opcode(text)]
    for i, name in enumerate(having):
      if " while(" in operations[name]:
        yield from ((name, later) for later in having[i + 1 :] if name not in needs[later])
