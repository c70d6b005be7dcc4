"""What cuDNN's attention is told about packed rows, and what it makes of them on a GPU.

With one: ``python -m pytest -m gpu tests/models/test_models_cudnn.py``.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.sharding import PartitionSpec as P

from ultraep_jax.models import attention, cudnn
from ultraep_jax.models.spans import spans_of
from ultraep_jax.packed import PackedBatch

ROWS, LENGTH, HEADS, KEY_HEADS, CHANNELS = 3, 32, 4, 2, 8
# Of each row: where requests start and their sizes.
LAYOUT = ([(0, 7), (8, 3), (12, 20)], [], [(4, 28)])


def packed(layout=LAYOUT, requests=4, length=LENGTH) -> PackedBatch:
  position_BT, segment_BT = (np.zeros((len(layout), length), np.int32) for _ in range(2))
  last_BR = np.full((len(layout), requests), -1, np.int32)
  for row, spans in enumerate(layout):
    for r, (start, size) in enumerate(spans):
      position_BT[row, start : start + size] = np.arange(size)
      segment_BT[row, start : start + size] = r + 1
      last_BR[row, r] = start + size - 1
  return PackedBatch(*map(jnp.asarray, (position_BT, position_BT, segment_BT, last_BR)))


def operands(dtype=jnp.bfloat16):
  keys = jax.random.split(jax.random.key(0), 3)
  heads = (HEADS, KEY_HEADS, KEY_HEADS)
  shapes = [(ROWS, LENGTH, n, CHANNELS) for n in heads]
  return [jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True)]


def spied(run):
  """In the place of JAX's function: hands what cuDNN gets to ``run``."""

  def attend(query, key, value, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, **options):
    assert options == {"scale": 0.5, "mask_type": fused.MaskType.PADDING_CAUSAL}
    places = q_seqlen, kv_seqlen, q_offsets, kv_offsets
    return run(query, key, value, *fused._fix_seqlen_offsets(*places, query, key))

  return attend


def as_cudnn(query, key, value, q_size, k_size, q_offset, k_offset):
  """The meaning of the arguments, request by request; unwritten output is NaN."""
  assert q_offset.shape == (len(query), q_size.shape[1] + 1) and q_size.shape[1] >= 2
  out = np.full(query.shape, np.nan, np.float32).reshape(-1, *query.shape[2:])
  flat = [x.reshape(-1, *x.shape[2:]).astype(jnp.float32) for x in (query, key, value)]
  start = np.asarray(q_offset).ravel() // math.prod(query.shape[2:])
  assert (start * math.prod(key.shape[2:]) == np.asarray(k_offset).ravel()).all()
  assert (k_size == q_size).all()
  sizes = np.asarray(q_size).ravel()
  count = np.count_nonzero(sizes)
  assert (sizes[count:] == 0).all() and (start[count:] == len(out)).all()
  for first, size in zip(start[:count], sizes[:count], strict=True):
    one = (x[None, first : first + size] for x in flat)
    out[first : first + size] = jax.nn.dot_product_attention(*one, scale=0.5, is_causal=True)[0]
  return jnp.asarray(out.reshape(query.shape), query.dtype)


@pytest.fixture
def gpu(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


FULL = [(0, 8), (8, 8), (16, 8), (24, 8)]


@pytest.mark.parametrize(
  "layout", [LAYOUT, ([], [(0, 32)], []), (FULL, [], FULL), ([], FULL, [(3, 1), (5, 2)])]
)
def test_tells_where_requests_lie(monkeypatch, gpu, layout):
  monkeypatch.setattr(cudnn, "dot_product_attention", spied(as_cudnn))
  batch = packed(layout, requests=max(map(len, layout)))
  spans = spans_of(batch)
  assert all((value >= 0).all() for value in spans)
  got = cudnn.attend(*operands(), spans, scale=0.5)
  plain = attention.attend(*operands(), batch.segment_BT, scale=0.5, block=8)
  inside = np.asarray(batch.segment_BT) > 0
  np.testing.assert_allclose(
    np.asarray(got, np.float32)[inside], np.asarray(plain, np.float32)[inside], atol=0.02, rtol=0.02
  )


@pytest.mark.parametrize("layout", [LAYOUT, ([], FULL, [(3, 1), (5, 2)])])
def test_requests_are_in_order(layout):
  """JAX, which brings them into the order of cuDNN, changes no place."""
  spans = spans_of(packed(layout))
  query, key, _ = operands()
  places = fused._fix_seqlen_offsets(*[spans.size_BR] * 2, *[spans.start_BS] * 2, query, key)
  start_BS = spans.start_BS + np.arange(ROWS)[:, None] * LENGTH
  want = [*[spans.size_BR] * 2, start_BS * HEADS * CHANNELS, start_BS * KEY_HEADS * CHANNELS]
  for got, expected in zip(places, want, strict=True):
    np.testing.assert_array_equal(got, expected)


def test_lowers_for_gpus(monkeypatch, gpu):
  """JAX's own checks of shapes and layouts pass, and the request is a packed one."""
  monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91300)
  monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)
  monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda capability: False)
  batch = packed()

  def run(query, key, value, batch):
    return cudnn.attend(query, key, value, spans_of(batch), scale=0.5)

  lowered = jax.jit(run).trace(*operands(), batch).lower(lowering_platforms=("cuda",))
  text = lowered.as_text()
  assert "fmhaSoftmax" in text and '"max_seg_per_batch": 4' in text.replace("\\22", '"')


@pytest.mark.parametrize("kind", ["no GPU", "float32", "narrow values", "window", "sinks"])
def test_says_what_it_cannot(monkeypatch, kind):
  if kind != "no GPU":
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91300)
  query, key, value = operands(jnp.float32 if kind == "float32" else jnp.bfloat16)
  value = value[..., :4] if kind == "narrow values" else value
  options = {"window": {"window": 3}, "sinks": {"sink_H": jnp.zeros(HEADS)}}.get(kind, {})
  with pytest.raises(NotImplementedError, match=r"cuDNN|fp16"):
    cudnn.attend(query, key, value, spans_of(packed()), scale=0.5, **options)


def real_operands(lengths, seed=0):
  """Rows full of requests of these lengths, at multiples of 128, with Qwen3-30B-A3B's heads."""
  length, heads, key_heads, channels = 2048, 32, 4, 128
  starts = np.cumsum([0, *(-(-n // 128) * 128 for n in lengths)])
  assert starts[-1] <= length
  row = list(zip(starts, lengths, strict=False))
  batch = packed([row, row], requests=16, length=length)
  keys = jax.random.split(jax.random.key(seed), 3)
  shapes = [(2, length, n, channels) for n in (heads, key_heads, key_heads)]
  pairs = zip(keys, shapes, strict=True)
  return [jax.random.normal(k, shape, jnp.bfloat16) for k, shape in pairs], batch


@jax.jit
def by_cudnn(query, key, value, batch):
  return cudnn.attend(query, key, value, spans_of(batch), scale=0.09)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[2048], [1, 127, 128, 129, 500, 700], [3] * 16])
def test_equals_the_portable_attention(lengths):
  (query, key, value), batch = real_operands(lengths)
  got = by_cudnn(query, key, value, batch).astype(jnp.float32)
  exact = [x.astype(jnp.float32) for x in (query, key, value)]
  want = attention.attend(*exact, batch.segment_BT, scale=0.09, block=128)
  got = jnp.where((batch.segment_BT > 0)[..., None, None], got, 0)
  error = jnp.linalg.norm(got - want) / jnp.linalg.norm(want)
  print(f"requests of {lengths}: relative error {error:.1e}")
  assert error < 5e-3


@pytest.mark.gpu
def test_layers_do_not_order_requests():
  if len(jax.devices()) < 2:
    pytest.skip("XLA finds less of it in programs for one GPU")
  operands, batch = real_operands([1, 127, 128, 129, 500, 700])
  axis_types = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((2,), ("row",), axis_types=axis_types, devices=jax.devices()[:2])

  @jax.shard_map(mesh=mesh, in_specs=P("row"), out_specs=P("row"), check_vma=False)
  def attend(query, key, value, spans):
    return cudnn.attend(query, key, value, spans, scale=0.09)

  @jax.jit
  def layers(query, key, value, batch):
    find = jax.shard_map(spans_of, mesh=mesh, in_specs=P("row"), out_specs=P("row"))
    spans = find(batch)
    return jax.lax.fori_loop(0, 4, lambda _, query: attend(query, key, value, spans), query)

  with jax.set_mesh(mesh):
    text = layers.lower(*operands, batch).compile().as_text()
  bodies = [
    re.search(rf"^%?{re.escape(name)} \(.*?^}}", text, re.MULTILINE | re.DOTALL).group()
    for name in re.findall(r"body=%?([\w.-]+)", text)
  ]
  (body,) = (body for body in bodies if "fmha" in body)
  assert not re.findall(r"\S*(?:scatter|reduce.window|sort)\S* =", body)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [0, 2, 5])
def test_keeps_a_bad_request_from_its_neighbours(bad):
  (query, key, value), batch = real_operands([100, 128, 300, 129, 64, 700])
  guilty_BT11 = (batch.segment_BT == bad + 1)[..., None, None]
  clean = by_cudnn(query, key, value, batch)
  spoilt = by_cudnn(*(jnp.where(guilty_BT11, jnp.nan, x) for x in (query, key, value)), batch)
  guilty = np.asarray(guilty_BT11)[..., 0, 0]
  others = (np.asarray(batch.segment_BT) > 0) & ~guilty
  assert np.isnan(np.asarray(spoilt, np.float32)[guilty]).all()
  np.testing.assert_array_equal(
    np.asarray(spoilt, np.float32)[others], np.asarray(clean, np.float32)[others]
  )
