"""The bench of copies beside a matmul: what it compares. It needs GPUs to run."""

import jax
import numpy as np
import pytest

from ultraep_jax.bench import timing
from ultraep_jax.bench.kernels import beside
from ultraep_jax.bench.kernels.portable import AXIS
from ultraep_jax.bench.kernels.transfers import tunings_of


def test_every_rank_has_as_many_rows_after_planning():
  plan = beside.make_plan(4, 256, 8, 2.0)
  assert plan.rows_GP.sum() == 4 * 256 * 8
  np.testing.assert_array_less(plan.rows_GP.sum(axis=1), 1.01 * 256 * 8)
  assert (plan.rows_GP[:, 16:][plan.expert_GS[0] < 0] == 0).all()
  assert (plan.rows_GP[:, 16:][plan.expert_GS[0] >= 0] > 0).all()


@pytest.mark.parametrize("name", ["copies known", "copies before", "beside, 12 x 3 x 16384"])
def test_variants_lower_for_gpus(name):
  axis_types = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((2,), (AXIS,), axis_types=axis_types, devices=jax.devices()[:2])
  data = beside.random_arrays(mesh, 1088, 256, 128)
  plan = [beside.on_ranks(mesh, part) for part in beside.make_plan(2, 128, 8, 1.3)]
  call = beside.variants(tunings_of(["12x3x16384"]))[name]
  program = beside.sharded(timing.chain(call, 2), mesh)
  text = program.trace(*data, *plan).lower(lowering_platforms=("cuda",)).as_text()
  kernels = {"copies known": 1, "copies before": 2, "beside, 12 x 3 x 16384": 1}
  assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == kernels[name]
