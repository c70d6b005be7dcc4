"""The matmuls of an expert on random operands: kernels, peers, and a dense one to compare with."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import (
  UNIT,
  Gated,
  MatmulTuning,
  Projections,
  Tile,
  Tunings,
  choose_tile,
  gated_matmul,
  grouped_matmul,
  grouped_matmul_sum,
  grouped_matmul_wgrad,
  turns_for,
)
from ultraep_jax.activations import clamped_swiglu, swiglu
from ultraep_jax.bench.contest import Contest, Program
from ultraep_jax.bench.kernels.by_copies import gated_by_copies, matmul_by_copies
from ultraep_jax.bench.layer.problem import SHAPES
from ultraep_jax.compute import grouped
from ultraep_jax.types import Array

Kernel = Callable[..., Any]

HOME, REPLICA = 16, 2
DENSE = "dense"
# What the layer runs comes first, the rest after it.
PROBLEMS = {
  "forward down beside": "forward beside",
  "dgrad down beside": "dgrad beside",
  "wgrad down beside": "wgrad beside",
  "wgrad up beside": "wgrad beside",
  "sum beside": "sum beside",
  "gated beside": "gated beside",
  "gated only beside": "gated only beside",
  "forward down": "forward",
  "dgrad down": "dgrad",
  "gated": "gated",
  "gated only": "gated only",
  "gated gpt-oss": "gated",  # interleaved, with biases and a clamped unit
  "gated only gpt-oss": "gated only",
  "forward up": "forward",
  "dgrad up": "dgrad",
  "wgrad down": "wgrad",
  "wgrad up": "wgrad",
  "sum": "sum",
}


class Parts(NamedTuple):
  """The kernel of a problem, and what it is compared with.

  Attributes:
    shapes: of the operands but the group sizes.
    kernel: of the operands and the group sizes; takes a tuning.
    dense: as many operations on all rows, of the operands ``dense_operands``.
    dense_operands: from the kernel's operands.
    peers: other implementations of the kernel.
  """

  shapes: tuple[tuple[int, ...], ...]
  kernel: Kernel
  dense: Kernel
  dense_operands: Callable[..., tuple[Array, ...]]
  peers: Mapping[str, Kernel]


@dataclasses.dataclass(frozen=True)
class Problem:
  """A matmul of an expert, or some of them.

  Attributes:
    name: one of ``PROBLEMS``.
    model: whose widths it has.
    rows: that a rank can hold.
    wide: D.
    inner: F.
    skew: of the group sizes, 0: about equal.
    home: slots of home experts.
    replica: slots of copies.
  """

  name: str
  model: str
  rows: int
  wide: int
  inner: int
  skew: float = 1.0
  home: int = HOME
  replica: int = REPLICA

  @classmethod
  def of(
    cls, name: str, model: str, rows: int, scale: int = 1, skew: float = 1.0, **slots: int
  ) -> "Problem":
    """With all sizes but slots divided by ``scale``, and rounded up to what the kernels know.

    Args:
      name: as for the class.
      model: one of ``SHAPES``, or D and F as in "2880x2880".
      rows: as for the class, like the rest.
      scale: to try it on a CPU.
      skew: see above.
      **slots: ``home`` and ``replica``.
    """
    sizes = SHAPES[model][:2] if model in SHAPES else map(int, model.split("x"))
    wide, inner = (-(-size // (UNIT * scale)) * UNIT for size in sizes)
    return cls(name, model, max(rows // scale // 8 * 8, 8), wide, inner, skew, **slots)

  @property
  def operation(self) -> str:
    """As tables call it."""
    return PROBLEMS[self.name]

  @property
  def widths(self) -> tuple[int, int]:
    """By which tables know it."""
    if self.operation.startswith("wgrad"):  # rows, columns
      return (self.wide, self.inner) if "up" in self.name else (self.inner, self.wide)
    if self.operation.startswith("sum"):  # contracted, columns
      return 2 * self.inner, self.wide
    into = self.name.startswith(("gated", "forward up", "dgrad down"))
    return (self.wide, self.inner) if into else (self.inner, self.wide)

  @property
  def title(self) -> str:
    return f"{self.model} {self.rows} {self.name}"

  @property
  def sizes(self) -> np.ndarray:
    """Of the groups; a few rows are not used."""
    used = self.rows - min(self.rows // 8, 999)
    return group_sizes(np.random.default_rng(0), self.home + self.replica, used, self.skew)

  @property
  def _products(self) -> int:
    """Of an expert's rows by a matrix."""
    return 2 if self.operation.startswith(("gated", "sum")) else 1

  @property
  def flop(self) -> float:
    """Of the used rows."""
    return 2.0 * self._products * float(self.sizes.sum()) * self.wide * self.inner

  @property
  def replicas_arrive(self) -> bool:
    """Whether a transfer beside it brings the replicas that it multiplies by."""
    return self.operation in ("forward beside", "gated beside", "gated only beside")

  @property
  def slot_bytes(self) -> int:
    """Of a slot's weights."""
    return 2 * self._products * self.wide * self.inner

  @property
  def default(self) -> MatmulTuning:
    """The kernel's own."""
    return turns_for(*self.widths) if self.operation.startswith("wgrad") else MatmulTuning()

  def tuned(self, tunings: Tunings) -> MatmulTuning:
    """As the layer runs it."""
    return tunings.find(self.operation, *self.widths) or self.default

  def tile(self, tuning: MatmulTuning) -> Tile:
    """What the kernel computes at a time in a tuning."""
    rows, cols = self.widths
    if self.operation.startswith("wgrad"):
      return choose_tile(rows, cols, 1, tuning)
    return choose_tile(256, cols, 2 if self.operation.startswith("gated") else 1, tuning)

  def parts(self) -> Parts:
    if self.name.endswith("gpt-oss"):
      return _gated_as_gpt_oss(self)
    make = {"wgrad": _wgrad, "gated": _gated, "sum": _sum}
    return make.get(self.operation.split()[0], _product)(self)

  def contest(self, kernels: Mapping[str, Kernel]) -> Contest:
    """Kernels of the same operands, the first as reference, beside the dense matmul."""
    parts, sizes = self.parts(), jnp.asarray(self.sizes, jnp.int32)

    def make() -> Any:
      keys = jax.random.split(jax.random.key(0), len(parts.shapes))
      operands = tuple(
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, parts.shapes, strict=True)
      )
      return (), ((*operands, sizes), parts.dense_operands(*operands))

    def program(kernel: Kernel, which: int) -> Program:
      return lambda first, rest: (first, kernel(*rest[which]))

    return Contest(
      title=self.title,
      make=make,
      programs={name: program(kernel, 0) for name, kernel in kernels.items()},
      reference=next(iter(kernels)),
      used=lambda results, rest: [used_part(x, rest[0][-1]) for x in jax.tree.leaves(results)],
      others={DENSE: program(parts.dense, 1)},
    )

  def ratio(self, seconds: float, dense: float) -> float:
    """Of the operations per second to the dense matmul's, which computes unused rows too."""
    return dense / seconds * (float(self.sizes.sum()) / self.rows)


def group_sizes(rng: np.random.Generator, slots: int, used: int, skew: float) -> np.ndarray:
  """Random sizes with the given sum; the larger the skew, the less equal."""
  weight = np.exp(skew * rng.normal(size=slots))
  return rng.multinomial(used, weight / weight.sum())


def used_part(result: Array, sizes: Array) -> Array:
  """A matrix whose unused rows are zero; results by slot as they are."""
  if result.ndim == 3:
    return result
  used = jnp.arange(result.shape[0]) < sizes.sum()
  return jnp.where(used[:, None], result, 0)


def _pair(problem: Problem, *shape: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
  return (problem.home, *shape), (problem.replica, *shape)


def _product(problem: Problem) -> Parts:
  transpose = problem.operation.startswith("dgrad")
  up = problem.name.endswith("up")
  shape = (problem.wide, problem.inner) if up else (problem.inner, problem.wide)

  def joined(rows: Array, home: Array, replica: Array, sizes: Array) -> Array:
    weights = jnp.concatenate([home, replica])
    return lax.ragged_dot(rows, weights.mT if transpose else weights, sizes)

  whole = functools.partial(grouped_matmul, transpose_rhs=transpose)
  others = {
    "ragged": joined,
    "portable": functools.partial(grouped.grouped_matmul, transpose_rhs=transpose),
  }
  arrive = problem.replicas_arrive
  return Parts(
    shapes=((problem.rows, shape[1] if transpose else shape[0]), *_pair(problem, *shape)),
    kernel=matmul_by_copies if arrive else whole,
    dense=lambda rows, weight: rows @ (weight.T if transpose else weight),
    dense_operands=lambda rows, home, _: (rows, home[0]),
    peers={"whole": whole} if arrive else others,
  )


def _wgrad(problem: Problem) -> Parts:
  numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

  # As in a layer with bfloat16 parameters.
  kernel = functools.partial(grouped_matmul_wgrad, num_home=problem.home, dtype=jnp.bfloat16)

  def dense(rows: Array, grad: Array) -> Array:
    return jnp.einsum("ck,cn->kn", rows, grad, preferred_element_type=jnp.float32)

  def ragged(rows: Array, grad: Array, sizes: Array) -> tuple[Array, Array]:
    grads = lax.ragged_dot_general(rows, grad, sizes, numbers, preferred_element_type=jnp.float32)
    grads = grads.astype(jnp.bfloat16)
    return grads[: problem.home], grads[problem.home :]

  def portable(rows: Array, grad: Array, sizes: Array) -> tuple[Array, Array]:
    home, replica = grouped.grouped_matmul_wgrad(rows, grad, sizes, problem.home)
    return home.astype(jnp.bfloat16), replica.astype(jnp.bfloat16)

  return Parts(
    shapes=tuple((problem.rows, width) for width in problem.widths),
    kernel=kernel,
    dense=dense,
    dense_operands=lambda rows, grad: (rows, grad),
    peers={"ragged": ragged, "portable": portable},
  )


def _gated(problem: Problem) -> Parts:
  keep = "only" not in problem.name
  whole = functools.partial(swiglu_matmul, keep_hidden=keep)
  by_copies = functools.partial(gated_by_copies, keep_hidden=keep)

  def unfused(
    rows: Array, gate: Array, up: Array, more_gate: Array, more_up: Array, sizes: Array
  ) -> Any:
    gate_CF = grouped_matmul(rows, gate, more_gate, sizes)
    up_CF = grouped_matmul(rows, up, more_up, sizes)
    inner_CF = jax.nn.silu(gate_CF) * up_CF
    return Gated(inner_CF, (gate_CF, up_CF) if keep else ())

  (home, replica), rows = _pair(problem, problem.wide, problem.inner), (problem.rows, problem.wide)
  return Parts(
    shapes=(rows, home, home, replica, replica),
    kernel=by_copies if problem.replicas_arrive else whole,
    dense=lambda rows, weight: rows @ weight,
    dense_operands=lambda rows, gate, up, *_: (rows, jnp.concatenate([gate[0], up[0]], axis=1)),
    peers={"whole": whole} if problem.replicas_arrive else {"unfused": unfused},
  )


def _gated_as_gpt_oss(problem: Problem) -> Parts:
  def kernel(
    rows: Array,
    home: Array,
    more: Array,
    bias: Array,
    more_bias: Array,
    sizes: Array,
    **tuning: Any,
  ) -> Gated:
    return gated_matmul(
      rows,
      Projections((home,), (bias,)),
      Projections((more,), (more_bias,)),
      sizes,
      clamped_swiglu(),
      columns="interleaved",
      keep_hidden="only" not in problem.name,
      **tuning,
    )

  both = 2 * problem.inner
  rows, weights = (problem.rows, problem.wide), _pair(problem, problem.wide, both)
  return Parts(
    shapes=(rows, *weights, *_pair(problem, both)),
    kernel=kernel,
    dense=lambda rows, weight: rows @ weight,
    dense_operands=lambda rows, home, *_: (rows, home[0]),
    peers={},
  )


def swiglu_matmul(
  rows: Array, gate: Array, up: Array, more_gate: Array, more_up: Array, sizes: Array, **kwargs: Any
) -> Gated:
  """``gated_matmul`` of gate and up apart."""
  home, replica = Projections((gate, up)), Projections((more_gate, more_up))
  return gated_matmul(rows, home, replica, sizes, swiglu, **kwargs)


def _sum(problem: Problem) -> Parts:
  def kernel(
    rows: Array, other: Array, home: Array, more: Array, *operands: Array, **tuning: Any
  ) -> Array:
    other_home, other_more, sizes = operands
    add = functools.partial(grouped_matmul_sum, transpose_rhs=True, **tuning)
    return add([rows, other], [home, other_home], [more, other_more], sizes)

  def separate(rows: Array, other: Array, home: Array, more: Array, *operands: Array) -> Array:
    other_home, other_more, sizes = operands
    one = functools.partial(grouped_matmul, transpose_rhs=True)
    return one(rows, home, more, sizes) + one(other, other_home, other_more, sizes)

  def dense_operands(
    rows: Array, other: Array, home: Array, _: Array, other_home: Array, __: Array
  ) -> tuple[Array, Array]:
    return (
      jnp.concatenate([rows, other], axis=1),
      jnp.concatenate([home[0], other_home[0]], axis=1),
    )

  pair, rows = _pair(problem, problem.wide, problem.inner), (problem.rows, problem.inner)
  return Parts(
    shapes=(rows, rows, *pair, *pair),
    kernel=kernel,
    dense=lambda rows, weight: rows @ weight.T,
    dense_operands=dense_operands,
    peers={"separate": separate},
  )
