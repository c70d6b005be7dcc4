"""What traced programs consist of."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.extend

PORTABLE_COPIES = {"plan_probes", "plan_quotas"}  # no kernel moves these
PLANNING = PORTABLE_COPIES | {"transfer_lists"}
# Copies ride in the kernels of matmuls.
FORWARD = {"route_rows", "dispatch", "gated_matmul", "grouped_matmul", "combine"}
LAYER = FORWARD | {"gated_grads", "grouped_matmul_wgrad"}
EXCHANGE = {"gather", "dispatch", "combine"}  # across GPUs
# Of portable programs; their sums and maxima are typed as equal on all ranks, or not.
COLLECTIVES = (
  *("all_to_all", "ppermute", "all_gather", "all_gather_invariant"),
  *("reduce_scatter", "psum", "pmax"),
)


def equations(jaxpr, in_kernels=True):
  """All of a program, inner ones after theirs, those of kernels too or not."""
  for eqn in jaxpr.eqns:
    yield eqn
    if not in_kernels and eqn.primitive.name == "mpmd_map":
      continue
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from equations(inner, in_kernels)


def kernels(jaxpr):
  """The calls of a program's kernels, whose name is ``params["name"]``."""
  return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "mpmd_map"]


def kernel_names(jaxpr):
  return {kernel.params["name"] for kernel in kernels(jaxpr)}


def count_reaching(text: str) -> int:
  """How many kernels of a lowered program reach other GPUs."""
  return text.count("uses_xla_collective_metadata = true")


def collectives(jaxpr) -> set[str]:
  """Those of a program that no kernel does."""
  return {eqn.primitive.name for eqn in equations(jaxpr)} & set(COLLECTIVES)


def exchanges_rows(jaxpr) -> bool:
  """Whether a program has an exchange of rows that no kernel does."""
  return any(eqn.primitive.name in ("all_to_all", "ppermute") for eqn in equations(jaxpr))


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


class _Operation(NamedTuple):
  """An operation of a traced program, with what it needs, directly or not."""

  eqn: Any
  needs: frozenset[int]


class _Value(NamedTuple):
  """What a value needs, and what is equal for values that are."""

  needs: frozenset[int]
  same: Any


def unordered_exchanges(jaxpr, *primitives: str) -> Iterator[tuple[Any, Any]]:
  """As ``unordered_loops``, of a traced program, and each loop against all that is beside it.

  What is written twice, outside of loops, counts once, as XLA computes it once.
  """
  operations: list[_Operation] = []
  seen: dict[tuple, list[_Value]] = {}

  def has_exchange(eqn) -> bool:
    inner = jax.extend.core.jaxprs_in_params(eqn.params)
    return eqn.primitive.name in primitives or any(
      has_exchange(each) for jaxpr in inner for each in jaxpr.eqns
    )

  def walk(jaxpr, known: dict[Any, _Value]) -> list[_Value]:
    """What each result needs; calls are taken apart, loops are not."""

    def value(atom) -> _Value:
      if isinstance(atom, jax.extend.core.Var):
        return known.setdefault(atom, _Value(frozenset(), atom))
      return _Value(frozenset(), str(atom))

    for eqn in jaxpr.eqns:
      operands = [value(atom) for atom in eqn.invars]
      inner = list(jax.extend.core.jaxprs_in_params(eqn.params))
      loop = eqn.primitive.name in ("while", "scan", "cond")
      if len(inner) == 1 and not loop and len(inner[0].invars) == len(eqn.invars):
        results = walk(inner[0], dict(zip(inner[0].invars, operands, strict=True)))
      elif eqn.primitive.name == "optimization_barrier":  # which XLA:CPU drops
        results = operands
      else:
        params = object() if loop else str(eqn.params)
        key = eqn.primitive.name, params, *(each.same for each in operands)
        if key not in seen:
          needs = frozenset().union(*(each.needs for each in operands))
          if has_exchange(eqn):
            operations.append(_Operation(eqn, needs))
            needs |= {len(operations) - 1}
          seen[key] = [_Value(needs, object()) for _ in eqn.outvars]
        results = seen[key]
      known |= dict(zip(eqn.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]

  used = frozenset().union(*(each.needs for each in walk(jaxpr, {})))
  for number, (eqn, needs) in enumerate(operations):
    if number not in used or eqn.primitive.name in primitives:
      continue
    for other, operation in enumerate(operations):
      ordered = other in needs or number in operation.needs
      if other in used and other != number and not ordered:
        yield eqn, operation.eqn
    for body in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from unordered_exchanges(body, *primitives)
