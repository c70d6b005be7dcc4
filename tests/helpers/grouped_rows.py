"""Helpers of the tests of the matmul kernels: group sizes, lowering, and interpreting."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import mosaic_interpret
import numpy as np
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul import pipeline
from pallas_kernels.matmul.layout import MatmulTuning

TOGETHER = MatmulTuning(blocks=2, even=False)
LARGE_TILES = MatmulTuning(rows=256, cols=192, stages=3, blocks=2, even=False)
DEFERRED = MatmulTuning("deferred", blocks=2, even=False)
IN_TURNS = MatmulTuning("in_turns", stages=6, blocks=2, even=False)
IN_PAIRS = MatmulTuning("in_turns", stages=6, blocks=4, cluster=2, even=False)
EVEN = MatmulTuning(blocks=2, even=True)

CAPACITY = 640

# Groups that begin anywhere, are small, empty, alone, or all empty.
SIZES = [
  [150, 70, 0, 300],
  [1, 63, 129, 64],
  [0, 0, 640, 0],
  [0, 0, 0, 0],
]
# Few rows in all, and groups of them.
FEW = {1: [0, 1, 0, 0], 7: [3, 0, 0, 3], 63: [20, 0, 43, 0], 255: [1, 155, 0, 99]}
# Groups of whole tiles: no row is computed twice, and stored twice with the same bits.
WHOLE = [128, 64, 0, 320]


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  return jax.nn.silu(gate) * up


def clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
  gate, up = jnp.minimum(gate, 0.5), jnp.clip(up, -0.5, 0.5)
  return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def widths(columns: str, cols: int) -> list[int]:
  """Columns of each projection into an expert."""
  return {"apart": [cols, cols], "ungated": [cols]}.get(columns, [2 * cols])


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(sizes, dtype)


def lower(f: Callable[..., Any], *args: Any) -> str:
  return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@functools.cache
def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
  """Traced once for all group sizes."""
  return jax.jit(functools.partial(f, **options))


def sizes_that_fit(capacity: int, slots: int) -> st.SearchStrategy[np.ndarray]:
  """Cuts of a random used count; small groups and borders near multiples of tiles are common."""
  near = st.builds(lambda a, b: a * 64 + b, st.integers(0, capacity // 64), st.integers(-9, 9))
  cut = st.one_of(st.integers(0, capacity), near.map(lambda x: min(max(x, 0), capacity)))
  return st.lists(cut, min_size=slots, max_size=slots).map(
    lambda cuts: np.diff(np.sort(np.array(cuts)), prepend=0)
  )


@contextlib.contextmanager
def interpreted(races: bool = False) -> Iterator[None]:
  """Interprets the kernels, with races an error if asked for.

  The interpreter knows neither tiling nor swizzles, and gives the views of a union memories of
  their own. Parts alike are one memory here: the first view's.
  """
  launch = pipeline.launch

  def with_common_parts(
    body: Callable[..., None], *operands: Any, shared: Any, **kwargs: Any
  ) -> Any:
    kinds = [[(part.shape, part.dtype) for part in parts] for parts in shared]
    first = [[kind == common for kind, common in zip(x, kinds[0], strict=True)] for x in kinds]

    def with_views(inputs: Any, outs: Any, views: Any, *barriers: Any) -> None:
      views = [
        [common if alike else own for own, common, alike in zip(x, views[0], of, strict=True)]
        for x, of in zip(views, first, strict=True)
      ]
      body(inputs, outs, views, *barriers)

    return launch(with_views, *operands, shared=shared, **kwargs)

  # Copies from beyond an operand's end give zeros, as on a GPU. Other reads there give what a test
  # sees if it is used.
  params = plgpu.InterpretGPUParams(out_of_bounds_reads="uninitialized")
  mosaic_interpret.install()  # what kernels inline is interpreted by its twin
  mode = mosaic_interpret.interpreted() if races else plgpu.force_gpu_interpret_mode(params)
  common = mock.patch.object(pipeline, "launch", with_common_parts)
  with common, mosaic_interpret.adding(), mode:
    yield


def used_rows(
  rng: np.random.Generator, sizes: Sequence[int], width: int, capacity: int = CAPACITY
) -> jax.Array:
  """Rows of which the unused are NaN."""
  rows = np.array(exact(rng, capacity, width))
  rows[sum(sizes) :] = np.nan
  return jnp.asarray(rows)


def exact(rng: np.random.Generator, *sizes: int) -> jax.Array:
  """Multiples of 1/64 below 2: sums of a thousand products are exact in float32, in any order.

  So they have the same bits on any machine, wherever in a tile a row is, and whichever of two
  tiles stores a row last.
  """
  return jnp.asarray((rng.integers(-127, 128, size=sizes) / 64).astype(jnp.bfloat16))


def spans(sizes: Sequence[int]) -> list[slice]:
  end = np.cumsum(sizes)
  return [slice(e - size, e) for e, size in zip(end, sizes, strict=True)]


def assert_products(
  got: jax.Array,
  rows: jax.Array,
  weights: jax.Array,
  sizes: Sequence[int],
  bias: jax.Array | None = None,
):
  """Each group's rows times its weights, and its bias, rounded once."""
  assert got.shape == (rows.shape[0], weights.shape[2])
  assert got.dtype == jnp.bfloat16
  got = np.asarray(got)[: sum(sizes)]
  np.testing.assert_array_equal(got, products(rows, weights, sizes, bias))


def products(
  rows: jax.Array, weights: jax.Array, sizes: Sequence[int], bias: jax.Array | None = None
) -> np.ndarray:
  """Of the used rows."""
  bias = np.zeros(weights.shape[::2]) if bias is None else bias
  rows_32, weights_32, bias_32 = (np.asarray(x, np.float32) for x in (rows, weights, bias))
  groups = zip(spans(sizes), weights_32, bias_32, strict=True)
  each = [rows_32[span] @ weight + offset for span, weight, offset in groups]
  return np.concatenate(each).astype(jnp.bfloat16)
