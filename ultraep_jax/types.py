"""The values that flow through a layer, and the glossary of their axes.

Array names carry their axes as a suffix, one letter (or word) an axis:

| letter | axis                                                                                |
|--------|-------------------------------------------------------------------------------------|
| T      | tokens of one rank                                                                  |
| K      | experts chosen per token; one (token, choice) pair is an *assignment*               |
| E      | logical experts                                                                     |
| G      | ranks along the expert mesh axis                                                    |
| M      | home experts per rank, ``M = E // G``; expert ``e`` has its home on rank ``e // M`` |
| S      | replica slots per rank: space for copies of other ranks' experts                    |
| P      | slots per rank, home slots first: ``P = M + S``                                     |
| C      | rows that one rank's buffer holds; a *row* is an assignment where it is computed    |
| D      | hidden width                                                                        |
| F      | expert inner width                                                                  |
"""

import enum
import importlib
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

Array = jax.Array
AxisName = str | tuple[str, ...]  # of a mesh, or of several as one, the first one slowest


class Layout(enum.StrEnum):
  """Where the matrices into an expert are.

  Attributes:
    APART: gate and up are two arrays, ``wi_gate`` and ``wi_up``.
    FUSED: both are in ``wi``, ``[D, 2F]``, the F columns of gate before those of up.
    INTERLEAVED: both are in ``wi``, gate in the even columns and up in the odd ones.
    UNGATED: there is one matrix in, ``wi``, ``[D, F]``.
  """

  APART = "apart"
  FUSED = "fused"
  INTERLEAVED = "interleaved"
  UNGATED = "ungated"


class ExpertWeights(struct.PyTreeNode):
  """Parameters of experts, each ``wo(unit(x wi_gate, x wi_up))`` or, ungated, ``wo(act(x wi))``.

  ``ExpertWeights(wi_gate, wi_up, wo)``, ``ExpertWeights.fused(wi, wo)`` and
  ``ExpertWeights.ungated(wi, wo)`` make them; biases are optional. ``act`` is the layer's
  ``activation``, a function of one projection, and ``unit(gate, up)`` is ``act(gate) * up``; or
  the activation is a ``GatedUnit``, and ``unit`` is that. The leading axis is M inside
  ``shard_map`` and E on global arrays. A pytree of its arrays, of which ``replace`` makes another.
  Checkpoints hold the arrays alone.

  Attributes:
    wi_gate: ``[M, D, F]``; ``None`` if it is in ``wi``, or there is none.
    wi_up: ``[M, D, F]``, likewise.
    wo: ``[M, F, D]``.
    wi_gate_bias: ``[M, F]`` or ``None``.
    wi_up_bias: ``[M, F]``, given if ``wi_gate_bias`` is.
    wo_bias: ``[M, D]`` or ``None``.
    wi: ``[M, D, 2F]``, or ``[M, D, F]`` of experts that are not gated; else ``None``.
    wi_bias: of as many columns as ``wi``, or ``None``.
    layout: which of ``wi_gate``, ``wi_up`` and ``wi`` there are, and how ``wi`` holds both.

  >>> wi, wo = jnp.ones((4, 8, 2 * 16)), jnp.ones((4, 16, 8))  # 4 experts, D = 8, F = 16
  >>> weights = ExpertWeights.fused(wi, wo)
  >>> weights.layout.value, weights.expert_size
  ('fused', 384)
  """

  wi_gate: Array | None
  wi_up: Array | None
  wo: Array
  wi_gate_bias: Array | None = None
  wi_up_bias: Array | None = None
  wo_bias: Array | None = None
  wi: Array | None = None
  wi_bias: Array | None = None
  # No leaf and no field of a tuple: Orbax and Flax would write its text, and not read it back.
  layout: Layout = struct.field(pytree_node=False, default=Layout.APART)

  @classmethod
  def fused(
    cls,
    wi: Array,
    wo: Array,
    wi_bias: Array | None = None,
    wo_bias: Array | None = None,
    *,
    interleaved: bool = False,
  ) -> "ExpertWeights":
    """Gated experts whose two matrices in are one array, used as it is: nothing cuts it up.

    Args:
      wi: ``[M, D, 2F]``, the columns of gate before those of up.
      wo: ``[M, F, D]``.
      wi_bias: ``[M, 2F]``, its columns as those of ``wi``.
      wo_bias: ``[M, D]``.
      interleaved: columns take turns instead, gate first (``wi[..., ::2]``), as in GPT-OSS.
    """
    layout = Layout.INTERLEAVED if interleaved else Layout.FUSED
    return cls(None, None, wo, wi=wi, wi_bias=wi_bias, wo_bias=wo_bias, layout=layout)

  @classmethod
  def ungated(
    cls, wi: Array, wo: Array, wi_bias: Array | None = None, wo_bias: Array | None = None
  ) -> "ExpertWeights":
    """Experts of two matrices, ``wo(act(x wi))``.

    Args:
      wi: ``[M, D, F]``.
      wo: ``[M, F, D]``.
      wi_bias: ``[M, F]``.
      wo_bias: ``[M, D]``.
    """
    return cls(None, None, wo, wi=wi, wi_bias=wi_bias, wo_bias=wo_bias, layout=Layout.UNGATED)

  @property
  def projections(self) -> tuple[Array, ...]:
    """The matrices in: gate and up, or the one that there is."""
    return _given(self.wi_gate, self.wi_up, self.wi)

  @property
  def projection_biases(self) -> tuple[Array, ...]:
    """One for each of ``projections``, or none."""
    return _given(self.wi_gate_bias, self.wi_up_bias, self.wi_bias)

  def with_values(
    self,
    projections: Sequence[Array],
    wo: Array,
    projection_biases: Sequence[Array],
    wo_bias: Array | None,
  ) -> "ExpertWeights":
    """Others of the same layout, such as gradients."""
    names = ("wi_gate", "wi_up") if self.layout is Layout.APART else ("wi",)
    biases = [f"{name}_bias" for name in names[: len(projection_biases)]]
    values = (*projections, *projection_biases)
    fields: Any = dict(zip([*names, *biases], values, strict=True))
    return self.replace(wo=wo, wo_bias=wo_bias, **fields)

  @property
  def expert_size(self) -> int:
    """Values of one expert."""
    lead = len(self.wo.shape) - 2
    return sum(math.prod(leaf.shape[lead:]) for leaf in jax.tree.leaves(self))

  @property
  def grad_dtype(self) -> jnp.dtype:
    """Of gradients in matmuls, on their way home, and from round to round.

    bfloat16 needs a fifth of the memory traffic that float32 and a pass to round it need, and half
    of the links'. Each further round that has rows of a slot rounds its sum again. A slot's rows
    lie side by side, so that only one with more rows than a buffer has rows of many rounds.
    """
    rounded = all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(self))
    return jnp.dtype(jnp.bfloat16 if rounded else jnp.float32)

  @property
  def num_matrices(self) -> int:
    """Of one expert, as if none were fused: three of gated ones, else two."""
    return 2 if self.layout is Layout.UNGATED else 3


def _given(*arrays: Array | None) -> tuple[Array, ...]:
  return tuple(array for array in arrays if array is not None)


def _above(name: str) -> Any:
  """A module that imports this one, loaded when a value is shown or asked for advice."""
  return importlib.import_module(f"ultraep_jax.{name}")


class Plan(NamedTuple):
  """Where replicas live and how many assignments each copy of an expert serves.

  Every rank computes the same plan from the same load matrix. A legal plan has at most one copy
  of an expert on a rank, none on its home, and no copy outside the home's domain;
  ``testing.assert_legal_plan`` checks that, the layer only shapes and dtypes.

  Attributes:
    replica_expert: ``[G, S]`` int32, the expert whose copy fills the slot, −1 if empty.
    quota: ``[E, G]`` int32, assignments of expert e that run on rank g. Row sums are the
      experts' loads; only the home and the holders of a replica have entries.
    parent: ``[G, S]`` int32, the rank that sends the slot its copy (the home, or a rank that
      relays it), −1 if empty.
  """

  replica_expert: Array
  quota: Array
  parent: Array

  def __repr__(self) -> str:
    return _above("show").plan_text(self)

  def _repr_html_(self) -> str:
    return _above("show").plan_html(self)


class PlanCost(NamedTuple):
  """What ``objective="time"`` weighs, in rows of expert matmul (int32).

  Attributes:
    copy_rows: rows whose matmuls take as long as sending one expert's weights delays a layer.
    capacity_rows: rows that a rank computes in one round. A plan that fits comes before any that
      does not, whatever its copies cost.
    link_rows: rows whose matmuls take as long as one copy is on its way. Copies travel beside
      matmuls, so a layer takes no less than they travel. Where gradients are taken, some matmuls of
      backward each have to hide a part of the copy, or of its gradient. The part that needs most
      rows for that counts, if it needs more than the whole.
    group_rows: rows whose matmuls take as long as one group more for the same rows: reading an
      expert's weights, and what its last tile lacks. An expert with rows is a group at home, unless
      copies serve all of them, and one in each of its copies. It counts as less where a domain's
      loads would not fit int32.
  """

  copy_rows: int | Array
  capacity_rows: int | Array
  link_rows: int | Array = 0
  group_rows: int | Array = 0


class Routes(NamedTuple):
  """Where each assignment of one rank runs, and what that rank computes.

  Attributes:
    dest_TK: ``[T, K]`` int32, the rank that computes the assignment, −1 if masked.
    row_TK: ``[T, K]`` int32, its row on that rank, numbered across rounds: row
      ``r`` is computed in round ``r // C``. 0 if masked.
    group_size_P: ``[P]`` int32, rows of each slot on *this* rank. Rows are grouped by slot,
      then by source rank, then in the order of the source's assignments.
  """

  dest_TK: Array
  row_TK: Array
  group_size_P: Array


class LayerStats(NamedTuple):
  """What one layer did with one batch. ``sharded_moe`` adds a leading axis of token groups.

  Attributes:
    load_GE: ``[G, E]`` int32, the load matrix.
    expert_load_E: ``[E]`` int32, assignments per expert.
    load_before_G: ``[G]`` int32, assignments that home placement would give each rank.
    load_planned_G: ``[G]`` int32, assignments that the plan gives each rank.
    load_after_G: ``[G]`` int32, assignments that went to each rank, counted where they come from.
    load_floor: ``[]`` int32, the lowest maximum load that copies inside domains can reach.
    replicas: ``[]`` int32, filled replica slots.
    max_fanout: ``[]`` int32, the most copies that one rank sends along the plan's trees.
    replica_bytes: ``[]`` float32, bytes of all copies, each counted once.
    remote_assignments: ``[]`` int32, assignments computed on another rank than their token's.
    rounds: ``[]`` int32, rounds that were run.
    masked: ``[]`` int32, assignments with index −1.
    invalid: ``[]`` int32, assignments with an index below −1 or at least E, treated as masked.
    replica_expert_GS: ``[G, S]`` int32, the expert whose copy fills the slot, −1 if empty; S of
      the configuration, also where nothing is planned. It is 0 for strategies ``"none"`` and
      ``"ideal"``, and for ``replica_slots="auto"`` where a domain is one rank.
    replica_parent_GS: ``[G, S]`` int32, the rank that sends the slot its copy along the plan's
      trees, −1 if empty.
    replica_load_GS: ``[G, S]`` int32, assignments that the plan gives the slot; of an expert's
      load, its home keeps what its copies do not serve.
  """

  load_GE: Array
  expert_load_E: Array
  load_before_G: Array
  load_planned_G: Array
  load_after_G: Array
  load_floor: Array
  replicas: Array
  max_fanout: Array
  replica_bytes: Array
  remote_assignments: Array
  rounds: Array
  masked: Array
  invalid: Array
  replica_expert_GS: Array
  replica_parent_GS: Array
  replica_load_GS: Array

  def flat(self) -> Array:
    """All of it as one int32 vector ``[..., n]``, for what carries one array more easily than many.

    Leading axes, of token groups or layers, stay. n depends on G, E and S alone. ``replica_bytes``
    keeps its bits.
    """
    lead = self.rounds.shape
    bits = self._replace(replica_bytes=lax.bitcast_convert_type(self.replica_bytes, jnp.int32))
    return jnp.concatenate([leaf.reshape(*lead, -1) for leaf in bits], axis=-1)

  @classmethod
  def unflatten(cls, flat: Array, num_ranks: int, num_experts: int) -> "LayerStats":
    """The statistics that ``flat`` made a vector of.

    Args:
      flat: ``[..., n]`` int32.
      num_ranks: G.
      num_experts: E.

    Raises:
      ValueError: no statistics of so many ranks and experts have that length.
    """

    def shapes(slots: int) -> list[tuple[int, ...]]:
      sizes = {"G": num_ranks, "E": num_experts, "S": slots}
      axes = (name.rpartition("_")[2] for name in cls._fields)  # a count's name has none
      return [tuple(sizes[axis] for axis in each if each.isupper()) for each in axes]

    def count(slots: int) -> int:
      return sum(map(math.prod, shapes(slots)))

    least, each = count(0), count(1) - count(0)
    slots, rest = divmod(flat.shape[-1] - least, each)
    if rest or slots < 0:
      raise ValueError(
        f"flat: expected {least} + {each} * slots values for {num_ranks} ranks and "
        f"{num_experts} experts, got {flat.shape[-1]}"
      )
    ends = list(itertools.accumulate(map(math.prod, shapes(slots))))
    parts = jnp.split(flat, ends[:-1], axis=-1)
    pairs = zip(parts, shapes(slots), strict=True)
    stats = cls(*(part.reshape(*flat.shape[:-1], *shape) for part, shape in pairs))
    return stats._replace(replica_bytes=lax.bitcast_convert_type(stats.replica_bytes, jnp.float32))

  def __repr__(self) -> str:
    return _above("show").stats_text(self)

  def _repr_html_(self) -> str:
    return _above("show").stats_html(self)

  def advice(self, config: Any = None) -> list[str]:
    """What keeps the load uneven, and what would help: one line for each cause.

    Of the least even layer and token group. Plans that load again with more slots, which takes a
    second or two the first time; not under ``jit``.

    Args:
      config: the layer's ``BalanceConfig``, for its strategy, domains, target and objective.
    """
    return _above("advice").of_stats(self, config)

  def scalars(self, prefix: str = "") -> dict[str, Array]:
    """A flat dict of float32 scalars, ready for TensorBoard or wandb.

    Over token groups (a leading axis) imbalances, fan-out and rounds are the worst group's,
    the other counts are summed.

    | name                    | meaning                                                    |
    |-------------------------|------------------------------------------------------------|
    | ``imbalance_before``    | busiest rank over mean rank under home placement           |
    | ``imbalance_after``     | busiest rank over mean rank as computed                    |
    | ``imbalance_floor``     | least ``imbalance_after`` that the domains allow           |
    | ``replicas``            | filled replica slots                                       |
    | ``max_fanout``          | most copies that one rank sends along the plan's trees     |
    | ``replica_megabytes``   | bytes of all copies, in 10^6 bytes                         |
    | ``remote_fraction``     | share of assignments computed away from their token's rank |
    | ``rounds``              | rounds run by the layer                                    |
    | ``masked_assignments``  | assignments with index −1                                  |
    | ``invalid_assignments`` | assignments with an index outside [−1, E), not computed    |

    Args:
      prefix: put before each name, e.g. ``"layer3/"``.
    """
    after = self.load_after_G.astype(jnp.float32)
    mean = jnp.maximum(jnp.mean(after, axis=-1), 1.0 / after.shape[-1])
    empty = jnp.sum(after, axis=-1) == 0

    def imbalance(busiest: Array) -> Array:
      return jnp.max(jnp.where(empty, 1.0, busiest.astype(jnp.float32) / mean))

    def total(count: Array) -> Array:
      return jnp.sum(count.astype(jnp.float32))  # several groups' counts may pass int32

    values = {
      "imbalance_before": imbalance(jnp.max(self.load_before_G, axis=-1)),
      "imbalance_after": imbalance(jnp.max(self.load_after_G, axis=-1)),
      "imbalance_floor": imbalance(self.load_floor),
      "replicas": total(self.replicas),
      "max_fanout": jnp.max(self.max_fanout),
      "replica_megabytes": total(self.replica_bytes) / 1e6,
      "remote_fraction": total(self.remote_assignments) / jnp.maximum(jnp.sum(after), 1.0),
      "rounds": jnp.max(self.rounds),
      "masked_assignments": total(self.masked),
      "invalid_assignments": total(self.invalid),
    }
    return {prefix + name: value.astype(jnp.float32) for name, value in values.items()}
