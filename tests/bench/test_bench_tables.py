"""What the measurements of kernels print, without kernels: the clock's answers are planted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ultraep_jax.bench.kernels import reduce, replicate
from ultraep_jax.bench.kernels.portable import AXIS
from ultraep_jax.bench.layer import times
from ultraep_jax.bench.train import report


@pytest.mark.parametrize("module", [reduce, replicate])
def test_a_row_for_each_plan(module, monkeypatch, capsys):
  monkeypatch.setattr(module, "timed", lambda *args, **kwargs: 2e-3)
  monkeypatch.setattr(module, "device_times", lambda *args, **kwargs: "1500 us")
  mesh = jax.make_mesh((2,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
  one = np.array([[-1], [0]]), np.array([[-1], [0]])
  experts = [jnp.zeros((1, 1_000_000), jnp.bfloat16)]
  sized = (2_000_000, "bfloat16") if module is reduce else (experts,)
  module.report("kernel", lambda *args: args, mesh, *sized, {"one copy": one}, 1, 1)
  header, _, row = capsys.readouterr().out.splitlines()
  assert header.split()[:4] == ["layout", "plan", "MB", "copies"]
  layout = ["kernel,", "bfloat16"] if module is reduce else ["kernel"]
  expected = [*layout, "one", "copy", "2.0", "1", "2000.0", "1.0"]
  assert row.split() == [*expected, "1500", "us"]


def test_what_a_row_lacks_is_a_dash():
  row = {"shape": "a", "ratio": 2.0, "pass": "forward", "variant": "none", "ms": 1.0}
  row |= {"of_ideal": None, "over_none": 1.0, "temp_gb": 0.5}
  balanced = row | {"variant": "quota", "imbalance_after": 1.0, "kinds_us": {"matmul": 3.0}}
  header, _, first, second = times.times_table([row, balanced]).splitlines()
  assert "matmul us" in header and first.split()[4:] == ["1.000", "–", "1.000", "0.500", *"––––––"]
  assert second.split()[-6:] == ["–", "1.000", "–", "–", "–", "3.000"]


def test_training_has_a_column_for_each_number():
  names = "loads variant ms tokens_per_second mfu of_ideal over_none imbalance_before"
  names += " imbalance_after worst_before worst_after replicas rounds gigabytes"
  row = {name: float(i) for i, name in enumerate(names.split())}
  *_, shown = report.times_table([row]).splitlines()
  assert [float(value) for value in shown.split()] == list(range(14))
