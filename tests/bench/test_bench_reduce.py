"""The reduction's own command, with the portable operation for the kernel, and with faults."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import TransferTuning
from ultraep_jax.bench.kernels import reduce
from ultraep_jax.bench.kernels.portable import AXIS

CHECK = {"plans": 3, "tuning": reduce.SMALL, "most_units": 40}


def mesh(ranks=4):
  axis_types = (jax.sharding.AxisType.Auto,)
  return jax.make_mesh((ranks,), (AXIS,), axis_types, devices=jax.devices()[:ranks])


def rounds_each_sum(replicas, homes, *plan):
  """Adds copies one by one, and rounds in between."""
  replica_GS, parent_GS = plan
  for index in np.ndindex(replica_GS.shape):
    one_GS = jnp.full_like(replica_GS, -1).at[index].set(replica_GS[index])
    homes = reduce.ring(replicas, homes, one_GS, parent_GS)
  return homes


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16",)])
def test_right_sums_are_right(dtypes, monkeypatch, capsys):
  monkeypatch.setattr(reduce, "kernel", lambda tuning: reduce.ring)
  reduce.check(mesh(), **CHECK, dtypes=dtypes)
  lines = capsys.readouterr().out.splitlines()
  exact = [line for line in lines if line.startswith("exact")]
  assert len(exact) == 3 * len(dtypes) and len(lines) == 4 * len(dtypes)
  assert all(sum(dtype in line for line in exact) == 3 for dtype in dtypes)
  found = [line.split() for line in lines if line not in exact]
  errors = {words[4].rstrip(","): float(words[3]) for words in found}
  assert list(errors) == list(dtypes)
  assert errors["bfloat16"] > 1e-3  # half of a unit in the last place


@pytest.mark.parametrize("tuning", [reduce.SMALL, TransferTuning()])
def test_what_is_checked_lowers_for_gpus(tuning, monkeypatch):
  """Homes that the kernel refuses would end the check."""
  sharded, texts = reduce.sharded, []

  def lowered(operation, mesh):
    kernel, right = sharded(operation, mesh), sharded(reduce.ring, mesh)

    def run(*args):
      texts.append(kernel.trace(*args).lower(lowering_platforms=("cuda",)).as_text())
      return right(*args)

    return run

  monkeypatch.setattr(reduce, "sharded", lowered)
  reduce.check(mesh(2), plans=1, tuning=tuning, most_units=40)
  assert all(text.count("custom_call @mosaic_gpu") == 1 for text in texts)
  assert sum("bf16" in text for text in texts) == 5  # a run twice, and three cases


def test_sums_that_are_not_rounded_once_are_wrong(monkeypatch):
  monkeypatch.setattr(reduce, "kernel", lambda tuning: rounds_each_sum)
  reduce.check(mesh(), **CHECK, dtypes=("float32",))
  with pytest.raises(AssertionError, match=r"(?s)sums are wrong.* bfloat16"):
    reduce.check(mesh(), **CHECK)


def test_all_dtypes_are_timed(monkeypatch, capsys):
  """At one size in bytes."""
  seen = []

  def timed(run, *_, **__):
    home, replica, _ = run[1]
    seen.append((str(home.dtype), str(replica.dtype), home.shape[1]))
    return 1e-3

  monkeypatch.setattr(reduce, "open_mesh", mesh)
  monkeypatch.setattr(reduce, "timed", timed)
  monkeypatch.setattr(reduce, "device_times", lambda *_, **__: "-")
  reduce.main(["time", "--megabytes", "1", "--scale", "10", "--portable"])
  text = capsys.readouterr().out
  assert set(seen) == {("float32", "float32", 25_000), ("bfloat16", "bfloat16", 50_000)}
  labels = re.findall(r"^ *(2 x 16384, \w+|portable, \w+)  ", text, re.MULTILINE)
  assert list(dict.fromkeys(labels)) == [
    f"{label}, {dtype}" for dtype in reduce.DTYPES for label in ("2 x 16384", "portable")
  ]
