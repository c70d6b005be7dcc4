"""Decoders with mixtures of experts, for prefill: packed requests to logits and caches.

Everything but the experts runs on each device for its own rows; experts lie over the mesh axis
``"expert"`` and are balanced by the layer.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from ultraep_jax.block import check_mesh
from ultraep_jax.checks import as_compute_dtype
from ultraep_jax.config import BalanceConfig, check_choice, check_int, check_type
from ultraep_jax.gating import check_choices
from ultraep_jax.models import layers
from ultraep_jax.models.config import ModelConfig
from ultraep_jax.models.params import AXIS, Spec, param_specs, random_param
from ultraep_jax.packed import PackedBatch, PrefillResult
from ultraep_jax.stats import layer_stats
from ultraep_jax.types import Array

AttentionImplementation = Literal["auto", "cudnn", "portable"]


class Stack(nnx.Module):
  """The parameters of consecutive layers of one kind, layers first."""

  def __init__(self, params: Mapping[str, nnx.Param[Array]]):
    for name, param in params.items():
      setattr(self, name, param)

  def arrays(self) -> dict[str, Array]:
    return {name: value[...] for name, value in vars(self).items() if isinstance(value, nnx.Param)}


class MoETransformer(nnx.Module):
  """A decoder as ``ModelConfig`` describes it. Changes no state when called.

  Parameters: ``embed`` ``[V, D]``, ``norm`` ``[D]``, ``head`` ``[D, V]`` (unless it is the
  embedding) and ``stacks``, one ``Stack`` for each of ``config.stacks``, layers of one kind, with
  names as in ``params.layer_specs`` and layers as leading axis. Experts are sharded over
  ``"expert"``, all else is on every device; routers and selection biases are float32.

  Construction and calls need the mesh in context. Construct under ``nnx.jit`` where one device
  cannot hold all experts.

  >>> import jax, jax.numpy as jnp
  >>> from flax import nnx
  >>> import ultraep_jax as uep
  >>> from ultraep_jax import models, packed
  >>>
  >>> config = models.ModelConfig(
  ...   architecture="qwen3_moe", vocab_size=32, embed_dim=16, is_moe=(True,) * 4,
  ...   attention=models.GroupedQuery(num_heads=4, num_key_heads=2, head_dim=8),
  ...   rotary=models.Rotary(dim=8, theta=10_000.0), dense_dim=16, expert_dim=16,
  ...   gating=uep.GatingConfig(num_experts=8, num_experts_per_tok=2),
  ... )
  >>> row = jnp.arange(8, dtype=jnp.int32)[None]
  >>> batch = packed.PackedBatch(
  ...   token_BT=row, position_BT=row, segment_BT=jnp.ones_like(row), last_BR=row[:, 7:]
  ... )
  >>> with jax.set_mesh(jax.make_mesh((1,), ("expert",))):
  ...   model = nnx.eval_shape(lambda: models.MoETransformer(
  ...     config, balance=uep.BalanceConfig(), attention_block=4, rngs=nnx.Rngs(0)
  ...   ))
  ...   result = jax.eval_shape(lambda model, batch: model(batch), model, batch)
  >>> result.logits_BRV.shape, result.cache["key"].shape, result.stats.expert_load_E.shape
  ((1, 1, 32), (4, 1, 8, 2, 8), (4, 1, 8))
  """

  def __init__(
    self,
    config: ModelConfig,
    *,
    balance: BalanceConfig,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    attention: AttentionImplementation = "auto",
    attention_block: int = 128,
    rngs: nnx.Rngs,
  ):
    """Creates random parameters, already sharded.

    Args:
      config: of the model.
      balance: how every mixture of experts balances.
      dtype: of the computation: bfloat16, float16 or float32. Routers, softmax, norms and rotary
        positions use float32.
      param_dtype: of all parameters but routers and selection biases: one of the same.
      attention: ``"cudnn"`` (flash attention on NVIDIA GPUs, 16 bits, values as wide as keys),
        ``"portable"`` (plain JAX) or ``"auto"``: cuDNN if it can.
      attention_block: tokens that portable attention takes together, at least 1; divides the length
        of rows. Where requests start at multiples of it, it does not depend on what else is in a
        row.
      rngs: the stream ``params`` is used.

    Raises:
      ValueError: no mesh with axis ``"expert"`` is in context, it does not divide the experts,
        ``attention`` is none of the names, or ``attention_block`` is below 1.
      TypeError: another dtype, or a configuration of another kind.
    """
    check_type("config", config, ModelConfig)
    check_type("balance", balance, BalanceConfig)
    check_mesh(AXIS, config.gating.num_experts)
    check_choice("attention", attention, ("auto", "cudnn", "portable"))
    check_int("attention_block", attention_block, minimum=1)
    self.dtype = as_compute_dtype("dtype", dtype)
    param_dtype = as_compute_dtype("param_dtype", param_dtype)

    def param(spec: Spec) -> nnx.Param[Array]:
      return nnx.Param(random_param(rngs.params(), spec, param_dtype), out_sharding=spec.axes)

    specs = param_specs(config)
    self.embed = param(specs["embed",])
    self.norm = param(specs["norm",])
    self.head = None if config.tied_embeddings else param(specs["head",])
    self.stacks = nnx.List(
      Stack({str(path[-1]): param(s) for path, s in specs.items() if path[:2] == ("stacks", i)})
      for i in range(len(config.stacks))
    )
    self.config = config
    self.balance = balance
    names = ("cudnn", "portable") if attention == "auto" else (attention,)
    self.attention = layers.Attention(names, attention_block)

  @property
  def vocab_size(self) -> int:
    return self.config.vocab_size

  @property
  def attention_block(self) -> int:
    return self.attention.block

  def __call__(
    self, batch: PackedBatch, *, expert_index_LBTK: Array | None = None
  ) -> PrefillResult:
    """Runs the requests of a batch through all layers.

    Args:
      batch: rows are divided over the mesh axes ``"data"``, if there is one, and ``"expert"``.
      expert_index_LBTK: ``[L, B, T, K]`` int32, the choices of the L mixtures in order, if they
        are made already, as an earlier result's.

    Returns:
      Logits of the token after each request. The cache is a dict: for grouped queries of ``key``
      (rotated) and ``value`` ``[layers, B, T, N, C]``; for latent attention of ``latent``
      (normed) ``[layers, B, T, R]`` and ``rotary_key`` ``[layers, B, T, C]``, in the dtype of the
      computation. In padding it holds anything finite. The state, of the gated delta rule, is a
      dict of ``delta_state`` ``[layers, B, R, H, C, V]`` float32 and ``delta_inputs``
      ``[layers, B, R, conv_width − 1, channels]``. Layers are those that have them, in order.

    Raises:
      ValueError: shapes do not fit each other, the mesh or ``attention_block``.
      TypeError: a dtype is wrong.
    """
    layers.check_batch(batch, self.attention.block)
    if expert_index_LBTK is not None:
      check_choices(
        expert_index_LBTK,
        (sum(self.config.is_moe), *batch.token_BT.shape, self.config.gating.num_experts_per_tok),
      )
    config, embed_VD = self.config, self.embed[...]
    head_DV = embed_VD.T if self.head is None else self.head[...]
    carry, context = layers.start(embed_VD, batch, config, self.dtype)
    all_measured, first = [], 0
    for run in config.runs:
      stacks = [config.stacks[i] for i in run]
      mixtures = [stack for stack in stacks if config.is_moe[stack[0]]]
      chosen: list[Array | None] = [None] * len(stacks)
      if expert_index_LBTK is not None and mixtures:
        count = len(mixtures) * len(mixtures[0])
        chosen = _by_stack(expert_index_LBTK[first : first + count], stacks, mixtures)
        first += count
      kinds = tuple(
        layers.Layer(config, stack[0], self.balance, self.attention) for stack in stacks
      )
      places = [layers.places(config, stack) for stack in stacks]
      params = [self.stacks[i].arrays() for i in run]
      step = functools.partial(layers.step, context, kinds=kinds)
      carry, measured = lax.scan(step, carry, tuple(zip(places, params, chosen, strict=True)))
      if measured:
        all_measured.append(_in_order(measured))
    logits_BRV = layers.logits(carry.x_BTD, batch.last_BR, self.norm[...], head_DV, config)
    cache, state = layers.by_token_and_request(carry.cache, config)
    if not all_measured:
      return PrefillResult(logits_BRV, cache, None, None, state or None)
    of_runs = [(layer_stats(measured), index) for measured, index in all_measured]
    stats, index_LBTK = jax.tree.map(lambda *parts: jnp.concatenate(parts), *of_runs)
    return PrefillResult(logits_BRV, cache, stats, index_LBTK, state or None)


def _by_stack(
  chosen_XBTK: Array, stacks: Sequence[tuple[int, ...]], mixtures: Sequence[tuple[int, ...]]
) -> list[Array | None]:
  """The choices of a run's mixtures in order, for each of its stacks."""
  cycles = chosen_XBTK.reshape(-1, len(mixtures), *chosen_XBTK.shape[1:])
  return [cycles[:, mixtures.index(s)] if s in mixtures else None for s in stacks]


def _in_order[T](measured: Sequence[T]) -> T:
  """Of the mixtures of a cycle, each with the cycles along the first axis: of one after another."""

  def merge(*leaves: Array) -> Array:
    return jnp.stack(leaves, axis=1).reshape(-1, *leaves[0].shape[1:])

  return measured[0] if len(measured) == 1 else jax.tree.map(merge, *measured)
