"""Matmuls on Blackwell: what they refuse, and, where XLA's CUDA compiler is, that they compile."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_devices import gpus

import pallas_kernels as kernels
from pallas_kernels.matmul import blackwell
from ultraep_jax.bench.compile import targets
from ultraep_jax.compute import grouped
from ultraep_jax.tools.errors import CommandError


def operands(rows=256, depth=64, cols=128, slots=3, dtype=jnp.bfloat16):
  weights = jnp.ones((slots, depth, cols), dtype)
  return jnp.ones((rows, depth), dtype), weights[1:], weights[:1], jnp.full(slots, 8, jnp.int32)


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    ({"rows": 192}, "C: expected a multiple of 128, got 192"),
    ({"cols": 192}, "N: expected a multiple of 128, got 192"),
    ({"depth": 96}, "K: expected a multiple of 64, got 96"),
    ({"slots": 129}, "expected at most 128 slots, got 129"),
    ({"dtype": jnp.float32}, "expected bfloat16, got float32"),
    ({}, "asks a GPU at hand for its SMs"),
  ],
)
def test_what_jax_has_no_kernel_for_is_refused(sizes, message):
  with gpus("10.0"), pytest.raises(NotImplementedError, match=message):
    jax.eval_shape(lambda *args: kernels.grouped_matmul(*args), *operands(**sizes))


def test_a_bias_is_refused():
  bias = jnp.ones((2, 128), jnp.bfloat16), jnp.ones((1, 128), jnp.bfloat16)
  with pytest.raises(NotImplementedError, match="bias"):
    blackwell.grouped_matmul(*operands(), transpose_rhs=False, bias=bias)


def test_what_the_kernel_gets_is_what_the_operation_is_given(monkeypatch):
  """JAX's kernel replaced by a dense one: weights are joined in order, and transposed."""
  from jax.experimental.pallas.ops.gpu import blackwell_ragged_dot_mgpu

  seen = []

  def ragged_dot(rows, weights, sizes, config):
    seen.append(config.collective)
    return jax.lax.ragged_dot(rows, weights, sizes)

  monkeypatch.setattr(blackwell_ragged_dot_mgpu, "ragged_dot_kernel", ragged_dot)
  monkeypatch.setattr(jax, "local_devices", lambda: [type("Gpu", (), {"core_count": 148})])
  rng = np.random.default_rng(0)
  sizes = jnp.array([100, 0, 90], jnp.int32)
  for rows, transpose_rhs in ((256, False), (384, True)):
    shape = (3, 256, 128) if transpose_rhs else (3, 128, 256)
    weights = jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    rows_CK = jnp.asarray(rng.normal(size=(rows, 128)), jnp.bfloat16)
    arguments = rows_CK, weights[:2], weights[2:], sizes
    got = blackwell.grouped_matmul(*arguments, transpose_rhs=transpose_rhs, bias=None)
    want = grouped.grouped_matmul(*arguments, transpose_rhs=transpose_rhs)
    np.testing.assert_allclose(
      *(np.float32(each[:190]) for each in (got, want)), rtol=2e-2, atol=0.1
    )
  assert seen == [True, False]


_COMPILES = """
import types, jax
from ultraep_jax.bench.compile import programs, targets
devices = targets.devices("gb200", "1x1x2")
here = jax.local_devices
jax.local_devices = lambda *a, **k: [types.SimpleNamespace(core_count=148)]
for name in ("matmul", "layer and gradients"):
  function, arguments = programs.build(name, devices)
  traced = jax.jit(function).trace(*arguments)
  traced.lower().compile()
  names = ("ragged_dot_kernel", "replicate", "grouped_matmul_wgrad")
  print(name, [f"name={each}" in str(traced.jaxpr) for each in names])
"""


@pytest.mark.slow
def test_the_layer_compiles_with_it():
  """``python -m pytest tests/kernels/test_kernel_blackwell.py``, where the compiler is."""
  try:
    environment = targets.environment()
  except CommandError as reason:
    pytest.skip(str(reason))
  command = [sys.executable, "-c", _COMPILES]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert done.stdout.split("\n")[:2] == [
    "matmul [True, False, False]",
    "layer and gradients [True, True, False]",
  ]
