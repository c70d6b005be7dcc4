"""Which implementation of an operation is picked, and that the first which can runs."""

import jax
import pytest
from fake_devices import Device, gpus
from jax.sharding import AbstractMesh

from ultraep_jax import implementation

LOCAL = {"choose", "plan", "route", "matmul", "place"}


def on_mesh(ranks):
  return jax.sharding.use_abstract_mesh(AbstractMesh((ranks,), ("expert",)))


def by_kernel(node_size="auto"):
  return {name for name, reason in implementation.picks(node_size).items() if reason is None}


def test_auto_is_portable_on_other_devices(caplog):
  with caplog.at_level("INFO", logger="ultraep_jax"):
    implementation._say_once.cache_clear()
    for operation in implementation.OPERATIONS:
      assert implementation.resolve("auto", operation) == ("portable",)
  assert [record.message for record in caplog.records] == [
    'implementation "auto" is "portable" where kernels cannot run: the kernels need NVIDIA GPUs, '
    "this is a cpu"
  ]


def test_auto_picks_kernels_where_they_run():
  with gpus():
    assert by_kernel() == set(implementation.OPERATIONS)
    assert implementation.resolve("auto", "matmul") == ("mosaic_gpu", "portable")
    assert implementation.resolve("mosaic_gpu", "matmul") == ("mosaic_gpu",)
  with gpus("10.0"):
    assert by_kernel() == set(implementation.OPERATIONS)


def test_kernels_that_reach_others_need_a_mesh_on_one_node():
  with gpus(), on_mesh(8):
    assert by_kernel() == by_kernel(8) == by_kernel(72) == set(implementation.OPERATIONS)
    assert by_kernel(4) == by_kernel(1) == LOCAL
    reason = implementation.why_portable("exchange", 4)
    assert reason == "it reaches other GPUs, which needs a mesh on one node, this is on 2"
  with gpus(), on_mesh(32):
    assert by_kernel(72) == set(implementation.OPERATIONS)
  with gpus(), on_mesh(72):  # joined, but too many for XLA's barrier
    assert by_kernel(72) == LOCAL
    reason = implementation.why_portable("replicate", 72)
    assert reason == "it reaches other GPUs, of which XLA joins at most 32, this is a mesh of 72"
  with gpus(), on_mesh(1):
    assert by_kernel(1) == set(implementation.OPERATIONS)


@pytest.mark.parametrize(
  ("devices", "reason"),
  [
    ([Device(slice_index=0, process_index=0), Device(slice_index=1, process_index=1)], "is on 2"),
    ([Device(process_index=0), Device(process_index=1)], "needs NCCL >= 2.29"),
    ([Device(), Device()], None),
  ],
)
def test_devices_say_what_node_they_are_of(devices, reason, monkeypatch):
  monkeypatch.setattr(jax, "devices", lambda: devices)
  with gpus():
    reasons = implementation.picks()
  assert reasons["plan"] is None
  if reason is None:
    assert reasons["exchange"] is None
  else:
    assert reason in reasons["exchange"] and reasons["exchange"] == reasons["replicate"]


class Old(Device):
  device_kind = "an old one"


def test_a_node_of_different_gpus_runs_what_all_of_them_can(monkeypatch):
  monkeypatch.setattr(jax, "devices", lambda: [Device(), Device(), Old(compute_capability="8.0")])
  with gpus():
    assert by_kernel() == set()
    reason = implementation.why_portable("plan")
    assert reason == "the kernels need Hopper or Blackwell GPUs, this is a an old one"
    with on_mesh(3):
      assert by_kernel() == set()
    with on_mesh(2):  # of the two that are alike
      assert by_kernel() == set(implementation.OPERATIONS)


def test_the_last_reason_is_raised():
  def cannot(reason):
    def fail():
      raise NotImplementedError(reason)

    return fail

  candidates = {"mosaic_gpu": cannot("first"), "portable": cannot("second")}
  with pytest.raises(NotImplementedError, match="second"):
    implementation.first_that_can(("mosaic_gpu", "portable"), candidates)
  with pytest.raises(NotImplementedError, match="need NVIDIA GPUs, this is a cpu; first"):
    implementation.first_that_can(("mosaic_gpu",), candidates)
