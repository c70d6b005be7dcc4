"""The router against an independent NumPy implementation, its losses and its bias."""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultraep_jax import gating
from ultraep_jax.gating import GatingConfig, gate

OPTIONS = {
  "scoring": ("softmax", "sigmoid", "sqrt_softplus"),
  "normalize_topk": (True, False),
  "routed_scaling": (1.0, 2.5),
  "groups": ((1, 1), (4, 2), (2, 1), (4, 4)),
  "use_selection_bias": (False, True),
  "masked": (False, True),
}


def numpy_gate(logits, config, bias, mask):
  """One token at a time, by sorting: expert indices, gates and scores."""
  tokens, experts = logits.shape
  k = config.num_experts_per_tok
  index, gates = np.full((tokens, k), -1, np.int32), np.zeros((tokens, k))
  scores = np.zeros((tokens, experts))
  for t in range(tokens):
    row = logits[t].astype(np.float64) if mask is None or mask[t] else np.zeros(experts)
    if config.scoring == "softmax":
      exp = np.exp(row - row.max())
      scores[t] = exp / exp.sum()
    elif config.scoring == "sigmoid":
      scores[t] = 1 / (1 + np.exp(-row))
    else:
      scores[t] = np.sqrt(np.log1p(np.exp(row)))
    if mask is not None and not mask[t]:
      continue
    # Ties are decided on what the router compares: float32.
    selection = scores[t].astype(np.float32) + (0 if bias is None else bias)
    members = np.split(np.arange(experts), config.num_expert_groups)
    group_score = [np.sort(selection[m])[-2:].sum() for m in members]
    best = sorted(range(len(members)), key=lambda g: (-group_score[g], g))[: config.topk_groups]
    allowed = [e for g in best for e in members[g]]
    index[t] = sorted(allowed, key=lambda e: (-selection[e], e))[:k]
    gates[t] = scores[t, index[t]]
    if config.normalize_topk:
      gates[t] /= gates[t].sum()
    gates[t] *= config.routed_scaling
  return index, gates, scores


def spaced_logits(seed, tokens=24, experts=16):
  """Logits whose scores are far enough apart that rounding cannot reorder them."""
  rng = np.random.default_rng(seed)
  levels = np.linspace(-2.0, 2.0, experts, dtype=np.float32)
  return np.stack([rng.permutation(levels) for _ in range(tokens)])


def make_bias(experts=16):
  return np.random.default_rng(7).normal(0.0, 0.3, experts).astype(np.float32)


@pytest.mark.parametrize("values", list(itertools.product(*OPTIONS.values())))
def test_every_combination_of_options_matches_numpy(values):
  options = dict(zip(OPTIONS, values, strict=True))
  num_groups, topk_groups = options.pop("groups")
  masked = options.pop("masked")
  config = GatingConfig(
    num_experts=16,
    num_experts_per_tok=3,
    num_expert_groups=num_groups,
    topk_groups=topk_groups,
    **options,
  )
  logits = spaced_logits(seed=len(str(values)))
  bias = make_bias() if config.use_selection_bias else None
  mask = np.arange(24) % 3 > 0 if masked else None
  got = gate(jnp.asarray(logits), config, bias, mask)
  index, gates, scores = numpy_gate(logits, config, bias, mask)
  np.testing.assert_array_equal(got.expert_index_TK, index)
  np.testing.assert_allclose(got.gate_TK, gates, rtol=2e-5)
  np.testing.assert_allclose(got.scores_TE, scores, rtol=2e-5)


@given(
  data=st.data(),
  groups=st.sampled_from([(1, 1), (2, 1), (3, 2)]),
  scoring=st.sampled_from(["softmax", "sigmoid"]),
)
def test_choices_are_legal_and_ties_go_to_the_lower_expert(data, groups, scoring):
  k = data.draw(st.integers(1, 2))
  config = GatingConfig(
    num_experts=6,
    num_experts_per_tok=k,
    scoring=scoring,
    num_expert_groups=groups[0],
    topk_groups=groups[1],
  )
  rows = st.lists(st.integers(-1, 1), min_size=6, max_size=6)
  logits = jnp.asarray(data.draw(st.lists(rows, min_size=5, max_size=5)), jnp.float32)
  index = np.asarray(gate(logits, config).expert_index_TK)
  expected, _, _ = numpy_gate(np.asarray(logits), config, None, None)
  np.testing.assert_array_equal(index, expected)
  assert all(len(set(row)) == k for row in index.tolist())


def test_leading_axes_and_dtypes():
  config = GatingConfig(num_experts=16, num_experts_per_tok=3, use_selection_bias=True)
  logits = jnp.asarray(spaced_logits(0)).reshape(2, 3, 4, 16).astype(jnp.bfloat16)
  out = gate(logits, config, jnp.asarray(make_bias()))
  flat = gate(logits.reshape(24, 16), config, jnp.asarray(make_bias()))
  chex.assert_shape(out, [(2, 3, 4, 3), (2, 3, 4, 3), (2, 3, 4, 16)])
  assert [a.dtype for a in out] == [jnp.int32, jnp.float32, jnp.float32]
  out = jax.tree.map(lambda a: a.reshape(24, -1), out)
  chex.assert_trees_all_equal(out.expert_index_TK, flat.expert_index_TK)
  chex.assert_trees_all_close(out, flat, rtol=1e-6)


def test_softmax_of_topk_equals_normalised_topk_of_softmax():
  config = GatingConfig(num_experts=16, num_experts_per_tok=4)
  logits = jnp.asarray(spaced_logits(3))
  best, index = jax.lax.top_k(logits, 4)
  out = gate(logits, config)
  np.testing.assert_array_equal(out.expert_index_TK, index)
  np.testing.assert_allclose(out.gate_TK, jax.nn.softmax(best), rtol=1e-5)


def test_bias_changes_the_choice_and_not_the_gates():
  config = GatingConfig(
    num_experts=4,
    num_experts_per_tok=1,
    scoring="sigmoid",
    normalize_topk=False,
    use_selection_bias=True,
  )
  logits = jnp.asarray([[2.0, 1.0, 0.0, -1.0]])
  plain = gate(logits, config, jnp.zeros(4))
  biased = gate(logits, config, jnp.asarray([0.0, 0.0, 0.0, 5.0]))
  assert plain.expert_index_TK.item() == 0
  assert biased.expert_index_TK.item() == 3
  np.testing.assert_allclose(biased.gate_TK, jax.nn.sigmoid(logits[:, 3:]), rtol=1e-6)


SCORES = {
  "softmax": jax.nn.softmax,
  "sigmoid": jax.nn.sigmoid,
  "sqrt_softplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
}


@pytest.mark.parametrize("scoring", SCORES)
@pytest.mark.parametrize("normalize", [True, False])
def test_gradient_flows_through_the_gates_alone(scoring, normalize):
  config = GatingConfig(
    num_experts=16,
    num_experts_per_tok=3,
    scoring=scoring,
    normalize_topk=normalize,
    use_selection_bias=True,
  )
  logits, bias = jnp.asarray(spaced_logits(5)), jnp.asarray(make_bias())
  weight = jax.random.normal(jax.random.key(0), (24, 3))
  index = gate(logits, config, bias).expert_index_TK

  def expected(logits):
    gates = jnp.take_along_axis(SCORES[scoring](logits), index, axis=-1)
    if normalize:
      gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    return jnp.sum(gates * weight)

  def actual(logits, bias):
    return jnp.sum(gate(logits, config, bias).gate_TK * weight)

  to_logits, to_bias = jax.grad(actual, argnums=(0, 1))(logits, bias)
  np.testing.assert_allclose(to_logits, jax.grad(expected)(logits), atol=1e-6)
  assert np.abs(to_logits).max() > 1e-3
  np.testing.assert_array_equal(to_bias, jnp.zeros(16))


def test_square_root_has_a_gradient_wherever_logits_are():
  config = GatingConfig(num_experts=4, num_experts_per_tok=2, scoring="sqrt_softplus")
  logits = jnp.asarray([[-1e4, -200.0, 0.0, 1e4], [-1e4] * 4])
  out, grad = gate(logits, config), jax.grad(lambda x: gate(x, config).gate_TK[:, 0].sum())(logits)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((out, grad)))
  np.testing.assert_allclose(out.scores_TE[0, 2:], [np.log(2) ** 0.5, 100.0], rtol=1e-6)


@pytest.mark.parametrize("low", [-30.0, -46.0, -60.0, -100.0])
@pytest.mark.parametrize("scoring", SCORES)
@pytest.mark.parametrize("choice", [None, [[0, 2], [1, 3]]])
def test_gradients_are_finite_however_small_all_scores_are(scoring, low, choice):
  config = GatingConfig(num_experts=4, num_experts_per_tok=2, scoring=scoring)
  choice = None if choice is None else jnp.array(choice)

  def loss(logits):
    found = gate(logits, config, expert_index_TK=choice)
    spread = gating.load_balance_loss(found.scores_TE, found.expert_index_TK)
    return jnp.sum(found.gate_TK[:, 0]) + spread

  for first in (0.0, 100.0):  # after a softmax, others' probabilities are 0
    logits = jnp.full((2, 4), low).at[:, 0].add(first) - jnp.arange(4.0)[None] / 4
    assert np.isfinite(jax.grad(loss)(logits)).all()


@pytest.mark.parametrize("low", [-10.0, -40.0, -46.0])
def test_gradients_of_small_scores_are_those_of_float64(low):
  config = GatingConfig(num_experts=4, num_experts_per_tok=2, scoring="sigmoid")
  logits = low - np.arange(4.0) / 4
  score = 1 / (1 + np.exp(-logits))
  one, other = score[0], score[1] + 1e-20
  slope = one * (1 - one) * other / (one + other) ** 2
  grad = jax.grad(lambda row: gate(row, config).gate_TK[0])(jnp.float32(logits))
  np.testing.assert_allclose(grad[0], slope, rtol=1e-3)


@pytest.mark.parametrize("scoring", SCORES)
def test_a_choice_that_is_made_again_gets_the_same_gates(scoring):
  """Bit for bit, gradients too, whatever bias and groups would choose; −1 is no expert."""
  config = GatingConfig(
    num_experts=16,
    num_experts_per_tok=3,
    scoring=scoring,
    num_expert_groups=4,
    topk_groups=2,
    routed_scaling=2.5,
    use_selection_bias=True,
  )
  logits, bias, mask = jnp.asarray(spaced_logits(9)), jnp.asarray(make_bias()), jnp.arange(24) > 2

  def run(bias, index=None):
    def gates(logits):
      out = gate(logits, config, bias, mask, expert_index_TK=index)
      return jnp.sum(jnp.square(out.gate_TK)), out

    return jax.grad(gates, has_aux=True)(logits)

  first = run(bias)
  index = first[1].expert_index_TK
  again = run(-bias, index)
  assert (run(-bias)[1].expert_index_TK != index).any()
  jax.tree.map(np.testing.assert_array_equal, again, first)

  table = jax.random.randint(jax.random.key(0), (40, 3), 0, 16)  # hash routing: by the token
  table = table.at[7].set(jnp.array([5, -1, -1]))
  token = jnp.arange(24) % 8
  hashed = gate(logits, config, bias, expert_index_TK=table[token])
  np.testing.assert_array_equal(hashed.expert_index_TK, table[token])
  np.testing.assert_array_equal(hashed.gate_TK[7], [2.5, 0.0, 0.0])
  score = SCORES[scoring](logits)[3, table[3]]
  np.testing.assert_allclose(hashed.gate_TK[3], 2.5 * score / score.sum(), rtol=1e-6)


def test_logits_of_a_router_in_bfloat16():
  """It chooses among rounded logits as PyTorch does, and the lower expert of two that are equal."""
  exact = GatingConfig(num_experts=3, num_experts_per_tok=1, normalize_topk=False)
  rounded = dataclasses.replace(exact, round_logits=True)
  logits = jnp.array([[1.0, 1.0 + 2**-9, 0.0]])
  assert jax.jit(lambda x: gate(x, exact))(logits).expert_index_TK.item() == 1
  out = jax.jit(lambda x: gate(x, rounded))(logits)
  assert out.expert_index_TK.item() == 0
  narrow = logits.astype(jnp.bfloat16).astype(jnp.float32)
  np.testing.assert_array_equal(out.scores_TE, jax.nn.softmax(narrow))
  grad = jax.grad(lambda x: gate(x, rounded).gate_TK.sum())(logits)
  want = jax.grad(lambda x: gate(x, exact).gate_TK.sum())(narrow)
  np.testing.assert_allclose(grad, want, rtol=0.02)


def test_masked_tokens_may_hold_nan_and_get_no_gradient():
  config = GatingConfig(num_experts=16, num_experts_per_tok=3)
  mask = jnp.arange(24) % 2 == 0
  logits = jnp.where(mask[:, None], jnp.asarray(spaced_logits(1)), jnp.nan)
  weight = jnp.broadcast_to(jnp.arange(3.0), (24, 3))

  def loss(logits):
    out = gate(logits, config, mask_T=mask)
    balance = gating.load_balance_loss(out.scores_TE, out.expert_index_TK)
    return jnp.sum(out.gate_TK * weight) + balance + gating.router_z_loss(logits, mask)

  value, grad = jax.value_and_grad(loss)(logits)
  assert np.isfinite(value)
  np.testing.assert_array_equal(grad[1::2], 0.0)
  assert np.all(np.any(np.asarray(grad[::2]) != 0, axis=-1))


def test_router_load_counts_every_unmasked_assignment():
  index = jnp.asarray([[[0, 2], [2, 3]], [[-1, -1], [2, 0]]])
  load = gating.router_load(index, 5)
  assert load.dtype == jnp.int32
  assert load.tolist() == [2, 0, 3, 1, 0]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_load_balance_loss_is_one_at_balance_and_more_when_collapsed(scoring):
  # Each token prefers the next pair of experts: every load and every mean score is equal.
  logits = jnp.asarray([[4.0 if e // 2 == t % 4 else 0.0 for e in range(8)] for t in range(8)])
  config = GatingConfig(num_experts=8, num_experts_per_tok=2, scoring=scoring)
  out = gate(logits, config)
  balanced = gating.load_balance_loss(out.scores_TE, out.expert_index_TK)
  np.testing.assert_allclose(balanced, 1.0, rtol=1e-6)
  collapsed = gate(jnp.broadcast_to(logits[:1], (8, 8)), config)
  worse = gating.load_balance_loss(collapsed.scores_TE, collapsed.expert_index_TK)
  normalised = collapsed.scores_TE[0] / collapsed.scores_TE[0].sum()
  np.testing.assert_allclose(worse, 8 * 0.5 * normalised[:2].sum(), rtol=1e-5)
  assert worse > 1.2


def test_load_balance_gradient_takes_load_from_the_busy_expert():
  config = GatingConfig(num_experts=4, num_experts_per_tok=1)

  def loss(logits):
    out = gate(logits, config)
    return gating.load_balance_loss(out.scores_TE, out.expert_index_TK)

  grad = jax.grad(loss)(jnp.asarray([[1.0, 0.0, 0.0, 0.0]] * 3 + [[0.0, 1.0, 0.0, 0.0]]))
  assert np.all(np.asarray(grad[:, 0]) > 0)
  assert np.all(np.asarray(grad[:, 2:]) < 0)


def test_losses_ignore_masked_tokens_and_survive_an_empty_batch():
  config = GatingConfig(num_experts=16, num_experts_per_tok=3)
  logits, mask = jnp.asarray(spaced_logits(2)), jnp.arange(24) < 10
  out, kept = gate(logits, config, mask_T=mask), gate(logits[:10], config)
  np.testing.assert_allclose(
    gating.load_balance_loss(out.scores_TE, out.expert_index_TK),
    gating.load_balance_loss(kept.scores_TE, kept.expert_index_TK),
    rtol=1e-6,
  )
  np.testing.assert_allclose(
    gating.router_z_loss(logits, mask), gating.router_z_loss(logits[:10]), rtol=1e-6
  )
  empty = gate(logits, config, mask_T=jnp.zeros(24, jnp.bool_))
  assert gating.load_balance_loss(empty.scores_TE, empty.expert_index_TK) == 0
  assert gating.router_z_loss(logits, jnp.zeros(24, jnp.bool_)) == 0


@given(index=st.lists(st.permutations([-1, -1, 0, 2, 3]), min_size=4, max_size=4))
def test_load_balance_loss_counts_choices_in_any_order(index):
  """Those that are made already may lack an expert at any place."""
  index_TK = np.array(index)[:, :3]
  scores_TE = np.random.default_rng(0).random((4, 4)).astype(np.float32)
  share_E = np.array([np.sum(index_TK == e) for e in range(4)]) / max(np.sum(index_TK >= 0), 1)
  chosen_TE = scores_TE[(index_TK >= 0).any(axis=1)]
  mean_E = np.mean(chosen_TE / chosen_TE.sum(axis=1, keepdims=True), axis=0)
  got = gating.load_balance_loss(jnp.asarray(scores_TE), jnp.asarray(index_TK, jnp.int32))
  np.testing.assert_allclose(got, 4 * np.sum(share_E * mean_E), rtol=1e-5)


def test_router_z_loss_matches_numpy():
  logits = spaced_logits(4) + np.arange(24, dtype=np.float32)[:, None] / 8
  expected = np.mean(np.log(np.exp(logits.astype(np.float64)).sum(-1)) ** 2)
  np.testing.assert_allclose(gating.router_z_loss(jnp.asarray(logits)), expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32])
@given(loads=st.lists(st.integers(0, 9), min_size=1, max_size=9), scale=st.sampled_from([1, 10**7]))
def test_bias_moves_towards_the_mean_load(loads, scale, dtype):
  load = [x * scale + 1 for x in loads]
  bias = gating.update_selection_bias(jnp.zeros(len(load)), jnp.asarray(load, dtype), 0.25)
  mean = sum(load)  # times the number of experts, to stay in integers
  signs = [np.sign(mean - x * len(load)) for x in load]
  np.testing.assert_array_equal(bias, 0.25 * np.asarray(signs, np.float32))


def test_bias_updates_balance_a_skewed_router():
  config = GatingConfig(
    num_experts=8, num_experts_per_tok=2, scoring="sigmoid", use_selection_bias=True
  )
  skew = jnp.linspace(1.5, -1.5, 8)[None, :]
  logits = skew + jax.random.normal(jax.random.key(0), (512, 8))

  def step(bias, _):
    load = gating.router_load(gate(logits, config, bias).expert_index_TK, 8)
    return gating.update_selection_bias(bias, load, 0.01), load

  loads = np.asarray(jax.lax.scan(step, jnp.zeros(8), length=150)[1])
  assert np.max(loads[0]) > 1.8 * 128
  assert np.max(loads[-1]) < 1.15 * 128


@pytest.mark.parametrize(
  ("fields", "error", "message"),
  [
    ({"num_experts": 0}, ValueError, "num_experts: expected at least 1, got 0"),
    ({"num_experts": 8.0}, TypeError, "num_experts: expected an int, got float"),
    ({"num_experts_per_tok": 9}, ValueError, "num_experts_per_tok: expected at most 8, got 9"),
    ({"num_experts_per_tok": 0}, ValueError, "num_experts_per_tok: expected at least 1, got 0"),
    ({"scoring": "tanh"}, ValueError, "scoring: expected one of"),
    ({"normalize_topk": 1}, TypeError, "normalize_topk: expected a bool, got int"),
    ({"use_selection_bias": None}, TypeError, "use_selection_bias: expected a bool"),
    ({"round_logits": "yes"}, TypeError, "round_logits: expected a bool, got str"),
    ({"routed_scaling": 0.0}, ValueError, "routed_scaling: expected a finite number above 0"),
    ({"routed_scaling": float("nan")}, ValueError, "routed_scaling: expected a finite number"),
    ({"routed_scaling": "2"}, TypeError, "routed_scaling: expected a float, got str"),
    ({"num_expert_groups": 3}, ValueError, "num_expert_groups: expected a divisor of 8, got 3"),
    ({"num_expert_groups": 8}, ValueError, "num_expert_groups: expected groups of at least 2"),
    ({"topk_groups": 2}, ValueError, "topk_groups: expected at most 1, got 2"),
    (
      {"num_expert_groups": 4, "topk_groups": 1, "num_experts_per_tok": 3},
      ValueError,
      r"num_experts_per_tok: expected at most 2 \(topk_groups=1 of groups of 2 experts\), got 3",
    ),
  ],
)
def test_config_rejects(fields, error, message):
  with pytest.raises(error, match=message):
    GatingConfig(**{"num_experts": 8, "num_experts_per_tok": 2, **fields})


def test_config_takes_numbers_of_numpy():
  sizes = {"num_experts": np.int32(8), "num_experts_per_tok": np.uint8(2)}
  config = GatingConfig(**sizes, routed_scaling=np.float64(2.5))
  assert config == GatingConfig(num_experts=8, num_experts_per_tok=2, routed_scaling=2.5)
  assert {type(config.num_experts), type(config.routed_scaling)} == {int, float}


@pytest.mark.parametrize(
  ("kwargs", "error", "message"),
  [
    ({"logits_TE": jnp.zeros((4, 7))}, ValueError, r"logits: expected shape \[..., 8\]"),
    ({"logits_TE": jnp.zeros((4, 8), jnp.int32)}, TypeError, "logits: expected a dtype of kind"),
    ({"logits_TE": [[0.0] * 8] * 4}, TypeError, "logits: expected an array, got list"),
    ({"bias_E": None}, ValueError, "bias: expected an array"),
    ({"bias_E": jnp.zeros(4)}, ValueError, r"bias: expected shape \[8\], got \[4\]"),
    ({"bias_E": [0.0] * 8}, TypeError, "bias: expected an array, got list"),
    ({"mask_T": jnp.ones(3, jnp.bool_)}, ValueError, r"mask: expected shape \[4\], got \[3\]"),
    ({"mask_T": [True] * 4}, TypeError, "mask: expected an array, got list"),
    ({"expert_index_TK": [[0, 1]] * 4}, TypeError, "expert_index: expected an array, got list"),
    ({"mask_T": jnp.ones(4)}, TypeError, "mask: expected a dtype of kind bool, got"),
  ],
)
def test_gate_rejects(kwargs, error, message):
  config = GatingConfig(num_experts=8, num_experts_per_tok=2, use_selection_bias=True)
  good = {"logits_TE": jnp.zeros((4, 8)), "bias_E": jnp.zeros(8)}
  with pytest.raises(error, match=message):
    gate(**{**good, **kwargs}, config=config)


def test_gate_rejects_a_bias_it_would_not_use():
  with pytest.raises(ValueError, match="bias: expected None"):
    gate(jnp.zeros((4, 8)), GatingConfig(num_experts=8, num_experts_per_tok=2), jnp.zeros(8))


def step_of(rate, load_E=None):
  load_E = jnp.arange(8) if load_E is None else load_E
  return gating.update_selection_bias(jnp.zeros(8), load_E, rate)


@pytest.mark.parametrize("rate", [1, 1.0, np.float32(1), jnp.ones((), jnp.bfloat16)])
def test_a_rate_is_any_number(rate):
  np.testing.assert_array_equal(step_of(rate), [1, 1, 1, 1, -1, -1, -1, -1])


@pytest.mark.parametrize(
  ("function", "error", "message"),
  [
    (
      lambda: gating.load_balance_loss(jnp.zeros((4, 8)), jnp.zeros((5, 2), jnp.int32)),
      ValueError,
      r"expert_index: expected shape \[4, K\], got \[5, 2\]",
    ),
    (
      lambda: gating.load_balance_loss([[0.0] * 8], jnp.zeros((1, 2), jnp.int32)),
      TypeError,
      "scores: expected an array, got list",
    ),
    (lambda: gating.router_z_loss([0.0]), TypeError, "logits: expected an array, got list"),
    (
      lambda: gating.router_z_loss(jnp.zeros((4, 8)), jnp.ones(4)),
      TypeError,
      "mask: expected a dtype of kind bool, got float32",
    ),
    (
      lambda: gating.router_load(jnp.zeros((4, 2)), 8),
      TypeError,
      "expert_index: expected a dtype of kind integer, got float32",
    ),
    (lambda: step_of(1, jnp.zeros(4, int)), ValueError, r"load: expected shape \[8\], got \[4\]"),
    (lambda: step_of(1, jnp.ones(8)), TypeError, "load: expected a dtype of kind integer, got fl"),
    (
      lambda: gating.update_selection_bias(jnp.zeros((2, 8)), jnp.zeros((2, 8), jnp.int32), 0.1),
      ValueError,
      r"bias: expected shape \[E\], got \[2, 8\]",
    ),
    (lambda: step_of(None), TypeError, "rate: expected a number, got NoneType"),
    (lambda: step_of("0.1"), TypeError, "rate: expected a number, got str"),
    (lambda: step_of(True), TypeError, "rate: expected a number, got bool"),
    (lambda: step_of(jnp.ones(8)), ValueError, r"rate: expected shape \[\], got \[8\]"),
    (lambda: step_of(jnp.bool_(True)), TypeError, "rate: expected a dtype of kind number"),
  ],
)
def test_losses_and_steps_reject(function, error, message):
  with pytest.raises(error, match=message):
    function()
