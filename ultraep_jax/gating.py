"""The router's choice of experts, its losses and its selection bias: pure functions.

Routing never drops: every token that is not masked keeps all of its K experts, whatever the
load. Functions accept any number of leading token axes, written T here.
"""

import dataclasses
import math
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from ultraep_jax import implementation as implementation_lib
from ultraep_jax.checks import check_array
from ultraep_jax.config import (
  Implementation,
  as_python_numbers,
  check_choice,
  check_int,
  check_type,
)
from ultraep_jax.implementation import Implementations
from ultraep_jax.top_k import top_k
from ultraep_jax.types import Array

Scoring = Literal["softmax", "sigmoid", "sqrt_softplus"]

_TINY = 1e-20  # added to a sum of scores, which may all be 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatingConfig:
  """How a router turns logits into experts and gates. Hashable; NumPy's numbers become Python's.

  - Mixtral, Qwen3, GPT-OSS: the defaults (a softmax over the chosen logits alone is the same).
  - OLMoE, Qwen2-MoE: ``normalize_topk=False``.
  - ERNIE 4.5: ``use_selection_bias=True``.
  - MiniMax-M2: ``scoring="sigmoid"``, ``use_selection_bias=True``.
  - DeepSeek-V3: ``scoring="sigmoid"``, ``use_selection_bias=True``, ``routed_scaling=2.5``,
    ``num_expert_groups=8``, ``topk_groups=4``.
  - DeepSeek-V4: ``scoring="sqrt_softplus"``, ``use_selection_bias=True``, ``routed_scaling=1.5``.
    Its first layers have no bias and choose by the token (hash routing): pass the choices
    ``table_VK[token_T]`` as ``expert_index`` to the module.

  Attributes:
    num_experts: E, logical experts.
    num_experts_per_tok: K, experts chosen per token.
    scoring: ``"softmax"`` over the experts, or ``"sigmoid"`` or ``"sqrt_softplus"`` (the square
      root of ``log(1 + exp(logit))``) of each logit.
    normalize_topk: divide the gates of a token by their sum.
    routed_scaling: factor on the gates, after normalisation.
    num_expert_groups: contiguous groups of E / num_expert_groups experts; 1: no groups.
    topk_groups: groups that one token may choose from. A group's score is the sum of its two
      best biased scores (DeepSeek-V3, section 2.1.2); the maximum of DeepSeek-V2 is not offered.
    use_selection_bias: add a bias per expert to the scores when choosing, never to the gates.
    round_logits: to bfloat16, as a router gives them that was trained in that dtype, so that it
      chooses as it did; gradients pass.

  Raises:
    ValueError: a value is outside its range, or groups do not fit the experts.
    TypeError: a value has the wrong type.

  >>> mixtral = GatingConfig(num_experts=8, num_experts_per_tok=2)
  >>> mixtral.scoring, mixtral.normalize_topk
  ('softmax', True)
  >>> GatingConfig(num_experts=8, num_experts_per_tok=4, num_expert_groups=4, topk_groups=1)
  Traceback (most recent call last):
  ValueError: num_experts_per_tok: expected at most 2 (topk_groups=1 of groups of 2 experts), got 4
  """

  num_experts: int
  num_experts_per_tok: int
  scoring: Scoring = "softmax"
  normalize_topk: bool = True
  routed_scaling: float = 1.0
  num_expert_groups: int = 1
  topk_groups: int = 1
  use_selection_bias: bool = False
  round_logits: bool = False

  def __post_init__(self) -> None:
    as_python_numbers(self)
    for name in ("num_experts", "num_experts_per_tok", "num_expert_groups", "topk_groups"):
      check_int(name, getattr(self, name), minimum=1)
    check_choice("scoring", self.scoring, get_args(Scoring))
    for name in ("normalize_topk", "use_selection_bias", "round_logits"):
      check_type(name, getattr(self, name), bool)
    _check_scaling(self.routed_scaling)
    _check_groups(self)


class Gating(NamedTuple):
  """What the router decided.

  Attributes:
    expert_index_TK: ``[..., K]`` int32, chosen experts, best first unless they were given; −1 on
      masked tokens.
    gate_TK: ``[..., K]`` float32, weight of each chosen expert; 0 on masked tokens.
    scores_TE: ``[..., E]`` float32, scores of all experts, without bias.
  """

  expert_index_TK: Array
  gate_TK: Array
  scores_TE: Array


def gate(
  logits_TE: Array,
  config: GatingConfig,
  bias_E: Array | None = None,
  mask_T: Array | None = None,
  *,
  expert_index_TK: Array | None = None,
  implementation: Implementation = "auto",
) -> Gating:
  """Chooses K experts per token, in float32. Equal scores go to the lower expert index.

  Gradients reach the logits through the gates and the scores, never through the choice. A choice
  that is given, such as an earlier call's, gets the gates that it would have got if it were made
  here: those of an earlier call's logits are the same bit for bit.

  Args:
    logits_TE: ``[..., E]``, a float dtype.
    config: the kind of router.
    bias_E: ``[E]`` float, added to the scores for the choice only; given exactly when
      ``config.use_selection_bias``.
    mask_T: ``[...]`` bool, False where a token takes no part; its logits may be anything.
    expert_index_TK: ``[..., K]`` int32, the choice, if it is made already; −1: no expert. Groups
      and bias then play no part.
    implementation: of the choice, as in ``BalanceConfig``; results are the same. The kernel takes
      what is one device's, inside a ``shard_map`` over all mesh axes.

  Raises:
    ValueError: shapes disagree, or the bias is missing or not expected.
    TypeError: something is no array, or a dtype is wrong.
    NotImplementedError: ``"mosaic_gpu"`` cannot do it here.
  """
  _check_arrays(logits_TE, config, bias_E, mask_T, expert_index_TK)
  logits_TE = logits_TE.astype(jnp.float32)
  if config.round_logits:  # a cast there and back could be left out
    logits_TE = jax.lax.reduce_precision(logits_TE, exponent_bits=8, mantissa_bits=7)
  if mask_T is not None:  # before any arithmetic: NaN must not meet a zero cotangent
    logits_TE = jnp.where(mask_T[..., None], logits_TE, 0.0)
  scores_TE = _score(logits_TE, config.scoring)
  index_TK = expert_index_TK
  if index_TK is None:
    index_TK = _choose(
      scores_TE, config, bias_E, implementation_lib.resolve(implementation, "choose")
    )

  # A masked sum, not a gather: it partitions over any token axes, and its gradient too.
  chosen_TKE = _one_hot(index_TK, config.num_experts)
  gate_TK = jnp.sum(jnp.where(chosen_TKE, scores_TE[..., None, :], 0.0), axis=-1)
  if config.normalize_topk:
    gate_TK = _shares(gate_TK)
  gate_TK *= config.routed_scaling
  if mask_T is not None:
    index_TK = jnp.where(mask_T[..., None], index_TK, -1)
    gate_TK = jnp.where(mask_T[..., None], gate_TK, 0.0)
  return Gating(index_TK, gate_TK, scores_TE)


def router_load(expert_index_TK: Array, num_experts: int) -> Array:
  """Counts the assignments of each expert: ``[..., K]`` int32 (−1 = masked) to ``[E]`` int32.

  Raises:
    TypeError: indices that are no integers.
  """
  check_array("expert_index", expert_index_TK, None, jnp.integer)
  chosen_TKE = _one_hot(expert_index_TK, num_experts)
  return jnp.sum(chosen_TKE, axis=tuple(range(chosen_TKE.ndim - 1)), dtype=jnp.int32)


def load_balance_loss(scores_TE: Array, expert_index_TK: Array) -> Array:
  """The loss that equal loads minimise, ``E * sum_e f_e * p_e``; 1 when balanced.

  ``f_e`` is the share of all assignments that go to expert e and ``p_e`` the mean over tokens
  of its score, normalised per token. Gradients flow through ``p_e`` alone. Source: Switch
  Transformer, section 2.2, with the K of DeepSeekMoE, section 3.3. Tokens are those of the
  whole (global) batch; those without any expert (all −1) do not count.

  Args:
    scores_TE: ``[..., E]`` float32, of ``Gating``.
    expert_index_TK: ``[..., K]`` int32, of ``Gating``.

  Returns:
    ``[]`` float32; 0 if every token is masked.

  Raises:
    ValueError: scores and indices of different tokens.
    TypeError: scores that are no floats, or indices that are no integers.
  """
  check_array("scores", scores_TE, None, jnp.floating)
  *tokens, num_experts = scores_TE.shape
  check_array("expert_index", expert_index_TK, (*tokens, "K"), jnp.integer)
  load_E = router_load(expert_index_TK, num_experts).astype(jnp.float32)
  share_E = load_E / jnp.maximum(jnp.sum(load_E), 1.0)
  probability_E = _token_mean(_shares(scores_TE), jnp.any(expert_index_TK >= 0, axis=-1))
  return num_experts * jnp.sum(share_E * probability_E)


def router_z_loss(logits_TE: Array, mask_T: Array | None = None) -> Array:
  """Mean over tokens of ``logsumexp(logits)^2``, which keeps logits small.

  Source: ST-MoE, equation 5.

  Args:
    logits_TE: ``[..., E]``, a float dtype.
    mask_T: ``[...]`` bool, False where a token does not count; its logits may be anything.

  Returns:
    ``[]`` float32; 0 if every token is masked.

  Raises:
    ValueError: a mask of other tokens.
    TypeError: logits that are no floats, or a mask that is no bool.
  """
  check_array("logits", logits_TE, None, jnp.floating)
  if mask_T is not None:
    check_array("mask", mask_T, logits_TE.shape[:-1], jnp.bool_)
  logits_TE = logits_TE.astype(jnp.float32)
  if mask_T is None:
    mask_T = jnp.ones_like(logits_TE[..., 0], dtype=jnp.bool_)
  logits_TE = jnp.where(mask_T[..., None], logits_TE, 0.0)
  squared_T1 = jnp.square(jax.nn.logsumexp(logits_TE, axis=-1, keepdims=True))
  return _token_mean(squared_T1, mask_T)[0]


def update_selection_bias(bias_E: Array, load_E: Array, rate: float | Array) -> Array:
  """One step of loss-free balancing, ``bias + rate * sign(mean(load) - load)``.

  Experts below the mean load become easier to choose. Source: DeepSeek-V3, section 2.1.2.

  Args:
    bias_E: ``[E]`` float.
    load_E: ``[E]`` integers, assignments of the whole batch; sum those of several.
    rate: size of the step, e.g. 0.001.

  Returns:
    ``[E]``, dtype of ``bias_E``.

  Raises:
    ValueError: the bias has more axes than one, the load is of other experts, or the rate has axes.
    TypeError: one of them is no array, the bias no float, the load no integer, or the rate no
      number.
  """
  check_array("bias", bias_E, ("E",), jnp.floating)
  check_array("load", load_E, bias_E.shape, jnp.integer)
  if hasattr(rate, "dtype"):
    check_array("rate", rate, (), jnp.number)
  elif isinstance(rate, bool) or not isinstance(rate, int | float):
    raise TypeError(f"rate: expected a number, got {type(rate).__name__}")
  load_E = load_E.astype(jnp.int32)  # differences of unsigned loads would wrap around
  # The mean is whole + rest / E: exact where a float mean could miss equality.
  whole, rest = jnp.divmod(jnp.sum(load_E), load_E.shape[0])
  sign_E = jnp.where(load_E == whole, jnp.sign(rest), jnp.sign(whole - load_E))
  return bias_E + sign_E.astype(bias_E.dtype) * jnp.asarray(rate, bias_E.dtype)


def _score(logits_TE: Array, scoring: Scoring) -> Array:
  if scoring == "softmax":
    return jax.nn.softmax(logits_TE)
  if scoring == "sigmoid":
    return jax.nn.sigmoid(logits_TE)
  # The root has no slope at 0, where the float32 softplus of very small logits is.
  return jnp.sqrt(jnp.maximum(jax.nn.softplus(logits_TE), jnp.finfo(jnp.float32).tiny))


@jax.custom_jvp
def _shares(scores_TX: Array) -> Array:
  """Each token's scores over their sum."""
  return scores_TX / (jnp.sum(scores_TX, axis=-1, keepdims=True) + _TINY)


@_shares.defjvp
def _shares_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
  """JAX's rule divides by the square of the sum, which is 0 in float32 where all are small."""
  (scores_TX,), (change_TX,) = primals, tangents
  total_T1 = jnp.sum(scores_TX, axis=-1, keepdims=True) + _TINY
  shares_TX = scores_TX / total_T1
  rest_TX = change_TX - shares_TX * jnp.sum(change_TX, axis=-1, keepdims=True)
  return shares_TX, rest_TX / total_T1


def _choose(
  scores_TE: Array, config: GatingConfig, bias_E: Array | None, implementations: Implementations
) -> Array:
  """The K best of each token."""
  selection_TE = scores_TE
  if bias_E is not None:
    selection_TE += jnp.broadcast_to(bias_E.astype(jnp.float32), selection_TE.shape)
  selection_TE = jax.lax.stop_gradient(selection_TE)
  if config.topk_groups < config.num_expert_groups:
    selection_TE = _keep_best_groups(selection_TE, config, implementations)
  return top_k(selection_TE, config.num_experts_per_tok, implementations)


def _keep_best_groups(
  selection_TE: Array, config: GatingConfig, implementations: Implementations
) -> Array:
  """Sets the scores outside each token's best groups to −inf."""
  shape = selection_TE.shape
  per_group = config.num_experts // config.num_expert_groups
  grouped = selection_TE.reshape(*shape[:-1], config.num_expert_groups, per_group)
  best_two = jnp.any(_one_hot(top_k(grouped, 2, implementations), per_group), axis=-2)
  group_score = jnp.sum(jnp.where(best_two, grouped, 0.0), axis=-1)
  best = top_k(group_score, config.topk_groups, implementations)
  kept = jnp.any(_one_hot(best, config.num_expert_groups), axis=-2)
  return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(shape)


def _one_hot(index: Array, size: int) -> Array:
  """``[...]`` int32 to ``[..., size]`` bool; out-of-range indices are all False."""
  return index[..., None] == jax.lax.broadcasted_iota(
    jnp.int32, (1,) * index.ndim + (size,), index.ndim
  )


def _token_mean(value_TX: Array, mask_T: Array) -> Array:
  """Mean of ``[..., X]`` over the tokens that are not masked: ``[X]``."""
  axes = tuple(range(mask_T.ndim))
  total_X = jnp.sum(jnp.where(mask_T[..., None], value_TX, 0.0), axis=axes)
  return total_X / jnp.maximum(jnp.sum(mask_T, axis=axes, dtype=jnp.float32), 1.0)


def _check_scaling(value: object) -> None:
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise TypeError(f"routed_scaling: expected a float, got {type(value).__name__}")
  if not (value > 0 and math.isfinite(value)):
    raise ValueError(f"routed_scaling: expected a finite number above 0, got {value}")


def _check_groups(config: GatingConfig) -> None:
  experts, groups = config.num_experts, config.num_expert_groups
  if experts % groups:
    raise ValueError(f"num_expert_groups: expected a divisor of {experts}, got {groups}")
  if groups > 1 and experts // groups < 2:
    raise ValueError(f"num_expert_groups: expected groups of at least 2 experts, got {groups}")
  if config.topk_groups > groups:
    raise ValueError(f"topk_groups: expected at most {groups}, got {config.topk_groups}")
  reachable = config.topk_groups * (experts // groups)
  if config.num_experts_per_tok > reachable:
    limit = ""
    if reachable < experts:
      limit = f" (topk_groups={config.topk_groups} of groups of {experts // groups} experts)"
    raise ValueError(
      f"num_experts_per_tok: expected at most {reachable}{limit}, got {config.num_experts_per_tok}"
    )


def _check_arrays(
  logits_TE: Array,
  config: GatingConfig,
  bias_E: Array | None,
  mask_T: Array | None,
  expert_index_TK: Array | None,
) -> None:
  experts = config.num_experts
  check_array("logits", logits_TE, None, jnp.floating)
  if logits_TE.ndim == 0 or logits_TE.shape[-1] != experts:
    raise ValueError(f"logits: expected shape [..., {experts}], got {logits_TE.shape}")
  if config.use_selection_bias != (bias_E is not None):
    expected = "an array" if config.use_selection_bias else "None"
    raise ValueError(f"bias: expected {expected} (use_selection_bias), got {type(bias_E).__name__}")
  if bias_E is not None:
    check_array("bias", bias_E, (experts,), jnp.floating)
  if mask_T is not None:
    check_array("mask", mask_T, logits_TE.shape[:-1], jnp.bool_)
  if expert_index_TK is not None:
    check_choices(expert_index_TK, (*logits_TE.shape[:-1], config.num_experts_per_tok))


def check_choices(expert_index: Array, shape: tuple[int, ...]) -> None:
  """Checks choices that are given.

  Raises:
    ValueError: another shape.
    TypeError: no array, or another dtype than int32.
  """
  check_array("expert_index", expert_index, shape, jnp.int32)
