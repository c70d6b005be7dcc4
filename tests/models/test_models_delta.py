"""The gated delta rule over packed rows against its definition, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultraep_jax.models import delta_rule
from ultraep_jax.models.delta_rule import Tokens

LENGTH, HEADS, CHANNELS, VALUES = 32, 3, 4, 5
# Of each row, where requests start and how long they are: at chunks of 8, and anywhere.
LAYOUTS = {
  "aligned": ([(0, 7), (8, 16), (24, 1)], [], [(8, 24)]),
  "anywhere": ([(1, 1), (2, 3), (5, 18), (30, 2)], [(0, 32)], [(3, 4), (9, 23)]),
}


def packed(layout, requests=4):
  segment_BT = np.zeros((len(layout), LENGTH), np.int32)
  last_BR = np.full((len(layout), requests), -1, np.int32)
  for row, spans in enumerate(layout):
    for r, (start, size) in enumerate(spans):
      segment_BT[row, start : start + size] = r + 1
      last_BR[row, r] = start + size - 1
  return segment_BT, last_BR


def some_tokens(rows, seed=0) -> Tokens:
  rng = np.random.default_rng(seed)
  shape = (rows, LENGTH, HEADS)
  key = rng.normal(size=(*shape, CHANNELS))
  tokens = Tokens(
    query_BTHC=rng.normal(size=(*shape, CHANNELS)),
    key_BTHC=key / np.linalg.norm(key, axis=-1, keepdims=True),
    value_BTHV=rng.normal(size=(*shape, VALUES)),
    decay_BTH=-rng.exponential(size=shape),
    beta_BTH=rng.uniform(size=shape),
  )
  return Tokens(*(np.asarray(leaf, np.float32) for leaf in tokens))


def by_definition(tokens: Tokens, spans):
  """Of one row, in float64."""
  query, key, value, decay, beta = (np.asarray(leaf, np.float64) for leaf in tokens)
  out, states = np.zeros((LENGTH, HEADS, VALUES)), []
  for start, size in spans:
    state = np.zeros((HEADS, CHANNELS, VALUES))
    for t in range(start, start + size):
      state *= np.exp(decay[t])[:, None, None]
      held = np.einsum("hc,hcv->hv", key[t], state)
      state += np.einsum("hc,hv->hcv", key[t], beta[t][:, None] * (value[t] - held))
      out[t] = np.einsum("hc,hcv->hv", query[t], state)
    states.append(state.copy())
  return out, states


@pytest.mark.parametrize("chunk", [1, 4, 8, 32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_request_is_as_by_definition(layout, chunk):
  layout = LAYOUTS[layout]
  segment_BT, last_BR = packed(layout)
  tokens = some_tokens(len(layout))
  run = jax.jit(delta_rule.delta_rule, static_argnames="chunk")
  out, states = run(tokens, segment_BT, last_BR[:, ::-1], chunk=chunk)  # requests in any order
  states = np.asarray(states)[:, ::-1]
  for row, spans in enumerate(layout):
    of_row = Tokens(*(leaf[row] for leaf in tokens))
    expected, ends = by_definition(of_row, spans)
    np.testing.assert_allclose(out[row], expected, atol=2e-6, rtol=1e-5)
    for r, end in enumerate(ends):
      np.testing.assert_allclose(states[row, r], end, atol=2e-6, rtol=1e-5)
    assert not states[row, len(spans) :].any()
  assert not np.asarray(out)[segment_BT == 0].any()


def test_requests_at_chunks_do_not_depend_on_others():
  """Bit for bit, and another's NaN stays its own."""
  run = jax.jit(delta_rule.delta_rule, static_argnames="chunk")
  tokens = Tokens(*(leaf.copy() for leaf in some_tokens(3)))
  segment_BT, last_BR = packed(LAYOUTS["aligned"])
  first, states = run(tokens, segment_BT, last_BR, chunk=8)
  tokens.value_BTHV[0, 8:24] = np.nan
  second, spoilt = run(tokens, segment_BT, last_BR, chunk=8)
  assert np.isnan(second[0, 8:24]).all() and np.isnan(spoilt[0, 1]).all()
  for row, places in ((0, [*range(8), *range(24, 32)]), (2, range(32))):
    np.testing.assert_array_equal(second[row, list(places)], first[row, list(places)])
  np.testing.assert_array_equal(spoilt[0, ::2], states[0, ::2])


def test_convolution_sees_its_own_request():
  rng = np.random.default_rng(0)
  x, kernel = rng.normal(size=(3, LENGTH, 6)), rng.normal(size=(6, 1, 4))
  x, kernel = jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32)
  layout = LAYOUTS["anywhere"]
  segment_BT, last_BR = map(jnp.asarray, packed(layout))
  got = np.asarray(delta_rule.causal_conv(x, kernel, segment_BT))
  inputs = np.asarray(delta_rule.last_inputs(x, 3, segment_BT, last_BR))
  for row, spans in enumerate(layout):
    for r, (start, size) in enumerate(spans):
      own = np.pad(x[row, start : start + size], ((3, 0), (0, 0)))
      expected = [np.sum(own[t : t + 4] * np.asarray(kernel)[:, 0].T, axis=0) for t in range(size)]
      np.testing.assert_allclose(got[row, start : start + size], expected, atol=1e-5)
      np.testing.assert_array_equal(inputs[row, r], own[-3:])
    assert not inputs[row, len(spans) :].any()
  assert not got[np.asarray(segment_BT) == 0].any()
