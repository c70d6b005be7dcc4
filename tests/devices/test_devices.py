"""Descriptions of devices: what they say, whose they are, and what is refused."""

import copy
import dataclasses
import json
import pathlib
import re

import jax
import numpy as np
import pytest
from hostile_values import VALUES, replaced, some_places
from jax.sharding import AbstractDevice, AbstractMesh

import ultraep_jax as uep
from ultraep_jax.devices import facts, known
from ultraep_jax.devices.device import Device, parse

FOLDER = pathlib.Path(known.__file__).parent
H200 = Device.load("h200")


# --- what comes with the package ---------------------------------------------------------------


@pytest.mark.parametrize("name", Device.names())
def test_every_number_says_where_it_is_from(name):
  device = Device.load(name)
  assert device.name == name and device.hardware
  portable = device.running(kernels=False)
  for layer in (device, portable):
    assert tuple(layer.facts) == tuple(facts.FACTS)
    for each in (*layer.facts.values(), *layer.matmuls):
      assert each.source and each.kind in facts.KINDS, each
  assert portable.portable is None and portable.in_blocks
  assert device["peak"] > max(rate.forward for rate in device.matmuls)
  assert device["link_rate"] >= device["copy_rate"]
  assert portable is device or device["copy_rate"] > portable["copy_rate"]


def test_what_is_not_said_is_scaled_by_data_sheets():
  slower = Device.load("h100_pcie")
  peak, link = 756 / 989, 300 / 450
  assert slower["sms"] == 114 and slower["launch_seconds"] == H200["launch_seconds"]
  for one, other in ((slower, H200), (slower.portable, H200.portable)):
    assert one["rest_forward"] == pytest.approx(peak * other["rest_forward"])
    assert one["copy_rate"] == pytest.approx(link * other["copy_rate"])
    assert one.matmul_rate(4096, 1536) == pytest.approx(peak * other.matmul_rate(4096, 1536))
    assert one["memory_rate"] == 2e12
  fact = slower.facts["copy_rate"]
  assert fact.kind == "derived" and "h200: docs/lab/kernels.md, Replication" in fact.source


@pytest.mark.parametrize("name", ["h100", "h20", "gb300"])
def test_every_fact_and_rate_is_scaled_as_its_unit_says(name):
  said = json.loads((FOLDER / f"{name}.json").read_text())
  assert said["like"] == "h200" and not {"matmuls", "portable"} & set(said)
  device = Device.load(name)
  peak, link = (device[sheet] / H200[sheet] for sheet in ("peak", "link_rate"))
  over_links = {"dispatch_rate", "combine_rate", "copy_rate", "reduce_rate"}
  for one, other in ((device, H200), (device.portable, H200.portable)):
    for fact, (unit, _) in facts.FACTS.items():
      if fact in said["facts"]:
        assert one[fact] == said["facts"][fact]["value"]
        continue
      ratio = peak if unit == "FLOP/s" else link if fact in over_links else 1
      assert one[fact] == pytest.approx(ratio * other[fact]), fact
    for mine, theirs in zip(one.matmuls, other.matmuls, strict=True):
      assert mine.widths == theirs.widths
      assert mine.forward == pytest.approx(peak * theirs.forward)
      assert mine.backward == pytest.approx(peak * theirs.backward)


def test_tunings_of_an_operation_are_of_one_device():
  said = json.loads((FOLDER / "h100.json").read_text())["tunings"]
  own = {entry["operation"] for entry in said}
  found = Device.load("h100").tunings.entries
  others = [entry for entry in H200.tunings.entries if entry.operation not in own]
  assert "wgrad" in own and any(entry.operation == "sum" for entry in others)
  assert [entry for entry in found if entry.operation not in own] == others
  assert len(found) == len(said) + len(others)
  assert Device.load("h20").tunings == H200.tunings


def test_the_portable_layer_shares_what_it_does_not_say():
  assert H200.portable["memory_rate"] == H200["memory_rate"]
  assert H200.portable["matmul_tile"] == 1024 and H200["matmul_tile"] == 128
  assert H200.portable.tunings == H200.tunings


def test_what_cannot_run_kernels_is_described_in_plain_jax():
  for name in Device.names():
    device = Device.load(name)
    assert device.layer.endswith("plain JAX" if "a100" in name else "kernels"), name
    assert device.running(kernels=False).layer == "the layer in plain JAX"
  a100, h100 = Device.load("a100"), Device.load("h100")
  assert a100.running(kernels=True) is a100.on_nodes() is a100 and a100.in_blocks
  links = a100["link_rate"] / h100["link_rate"]
  assert a100["copy_rate"] == pytest.approx(links * h100.portable["copy_rate"])
  assert a100.matmul_rate(4096, 1536) == 1.1e14  # of its file's "portable"


@pytest.mark.parametrize(
  ("like", "kinds", "layer"),
  [
    ("h200", ["NVIDIA L40S"], "the layer in plain JAX"),
    ("h200", ["NVIDIA L40S", "NVIDIA H800"], "the layer on kernels"),
    ("h200", [], "the layer on kernels"),
    ("a100", [], "the layer in plain JAX"),
    ("a100", ["NVIDIA H800"], "the layer in plain JAX"),  # what kernels cost is not known
  ],
)
def test_kinds_say_whether_kernels_run(like, kinds, layer):
  device = parse(json.dumps({"format": 1, "like": like, "kinds": kinds}))
  assert device.layer == layer
  base = Device.load(like).running(kernels=layer == "the layer on kernels")
  assert device["copy_rate"] == base["copy_rate"] and device.in_blocks == base.in_blocks


# --- rates between what was measured -------------------------------------------------------------


def test_rates_are_those_measured_and_between_them_elsewhere():
  for known_shape in H200.matmuls:
    assert H200.matmul_rate(*known_shape.widths) == known_shape.forward
    assert H200.matmul_rate(*known_shape.widths, backward=True) == known_shape.backward
  slowest, *_, fastest = sorted(known_shape.forward for known_shape in H200.matmuls)
  for width in (512, 2880, 3000, 20000):
    for inner in (256, 2880, 20000):
      assert slowest < H200.matmul_rate(width, inner) < fastest
  narrow, wide = H200.matmul_rate(2048, 520), H200.matmul_rate(4096, 1500)
  assert narrow == pytest.approx(700e12, rel=0.01) and wide == pytest.approx(795e12, rel=0.01)


@pytest.mark.parametrize("left_out", H200.matmuls, ids=lambda each: str(each.widths))
def test_a_shape_is_near_what_the_others_say(left_out):
  others = tuple(each for each in H200.matmuls if each != left_out)
  guess = dataclasses.replace(H200, matmuls=others).matmul_rate(*left_out.widths)
  narrowest = left_out.widths == (2048, 512)  # beyond the others
  assert guess == pytest.approx(left_out.forward, rel=0.35 if narrowest else 0.1)


# --- whose it is -----------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("kind", "name"),
  [
    ("NVIDIA H200", "h200"),
    ("NVIDIA H200 NVL", "h200"),
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H100 PCIe", "h100_pcie"),
    ("NVIDIA H20", "h20"),
    ("NVIDIA H20-3e", "h20"),
    ("NVIDIA H205", None),  # another part, not an H20
    ("NVIDIA GB2000", None),
    ("NVIDIA GB200", "gb200"),
    ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
    ("NVIDIA A100-PCIE-40GB", "a100_40gb"),
    ("NVIDIA A100 80GB PCIe", "a100_pcie"),
    ("NVIDIA A10", None),
    ("cpu", None),
    ("TPU v5", None),
  ],
)
def test_a_kind_of_device_has_its_description(kind, name):
  found = known.find(kind)
  assert (None if found is None else found.name) == name


@pytest.mark.parametrize(
  ("kind", "platform", "name"),
  [("NVIDIA H20", "gpu", "h20"), ("NVIDIA L40S", "gpu", "h200"), ("TPU v5", "tpu", None)],
)
def test_the_mesh_says_which_devices_count(kind, platform, name):
  device = AbstractDevice(kind, None, platform)
  with jax.sharding.use_abstract_mesh(AbstractMesh((4,), ("expert",), abstract_device=device)):
    found = known.resolve()
    assert known.resolve(H200) is H200
    assert found is None or found.layer.endswith("plain JAX" if "L40" in kind else "kernels")
  assert (None if found is None else found.name) == name
  assert known.resolve() is None  # the CPU's


def test_a_config_holds_a_description():
  config = uep.BalanceConfig(device=H200)
  again = uep.BalanceConfig(device=parse((FOLDER / "h200.json").read_text()))
  assert config == again and hash(config) == hash(again)
  slower = dataclasses.replace(config, device=H200.replace("test", copy_rate=1e9))
  assert slower != config and slower.device["copy_rate"] == 1e9
  with pytest.raises(TypeError, match="device: expected a Device or None, got str"):
    uep.BalanceConfig(device="h200")  # type: ignore


# --- what is refused -------------------------------------------------------------------------


def changed(**changes):
  data = json.loads((FOLDER / "h200.json").read_text())
  data["facts"] |= {name: value for name, value in changes.items() if name in facts.FACTS}
  return json.dumps(data | {k: v for k, v in changes.items() if k not in facts.FACTS})


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("{", "expected JSON"),
    ("[]", "expected an object with"),
    ('{"format": 2}', 'expected an object with "format": 1, got 2'),
    ('{"format": 1}', r"facts: expected all of .*missing: \['peak'"),
    (changed(facts=3), "facts: expected facts of"),
    (changed(facts={"speed": 1}), r"expected facts of .*got \['speed'\]"),
    (changed(speed=1), r"expected keys of .*got \['speed'\]"),
    (changed(like="nothing"), "like: expected one of"),
    (changed(kinds="NVIDIA"), "kinds: expected a list of texts"),
    (changed(matmuls=[]), "matmuls: expected at least one"),
    (changed(matmuls={}), "matmuls: expected a list, got dict"),
    (changed(matmuls=[{"widths": [1, 2]}]), r"matmuls\[0\]: expected an object with"),
    (changed(portable=[1]), "portable: expected an object"),
    (changed(portable={"facts": {"copy_rate": 1}}), "portable facts, copy_rate: expected an"),
    (changed(tunings=[1]), r"tunings: entries\[0\]: entry: expected an object"),
  ],
)
def test_refuses_what_is_none(text, message):
  with pytest.raises(ValueError, match=f"^device.*{message}"):
    parse(text)


@pytest.mark.parametrize("value", [float("nan"), -1, 0, "fast", True, None])
def test_refuses_bad_values(value):
  bad = {"value": value, "unit": "B/s", "kind": "measured", "source": ""}
  with pytest.raises(ValueError, match="copy_rate: expected a"):
    parse(changed(copy_rate=bad))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"unit": "GB/s"}, "expected unit '', got 'GB/s'"),
    ({"kind": "guessed"}, "expected a kind of"),
    ({"value": 1.5}, "expected a whole number"),
  ],
)
def test_refuses_other_units_and_kinds(changes, message):
  good = {"value": 8, "unit": "", "kind": "measured", "source": ""}
  assert parse(changed(sms=good))["sms"] == 8
  with pytest.raises(ValueError, match=message):
    parse(changed(sms=good | changes))


@pytest.mark.parametrize(
  ("name", "value", "message"),
  [
    ("outside", 1, "expected a share below 1, got 1.0"),
    ("outside", 1.5, "expected a share in [0, 1], got 1.5"),
    ("bubble", 2, "expected a share in [0, 1], got 2.0"),
    ("weights_exposed", 1.01, "expected a share in [0, 1], got 1.01"),
    ("copy_exposed_forward", 50, "expected a share in [0, 1], got 50.0"),
    ("copy_exposed_backward", 1e9, "expected a share in [0, 1], got 1000000000.0"),
    ("reduce_exposed", -0.1, "expected a positive number, got -0.1"),
    ("matmul_tile", 1.5, "expected a whole number, got 1.5"),
    ("matmul_tile", 0, "expected a positive number, got 0"),
    ("matmul_tile", 2**21, "expected at most 1048576, got 2.09715e+06"),
    ("domain_size", 0.5, "expected a whole number, got 0.5"),
    ("domain_size", 1e20, "expected at most 1048576, got 1e+20"),
    ("memory_bytes", 1e17, "expected at most 9007199254740992, got 1e+17"),
  ],
)
def test_refuses_shares_and_counts_that_cannot_be(name, value, message):
  fact = {"value": value, "unit": facts.FACTS[name][0], "kind": "measured", "source": ""}
  with pytest.raises(ValueError, match=f"facts, {name}: {re.escape(message)}$"):
    parse(changed(**{name: fact}))
  with pytest.raises(ValueError, match=f"^h200, {name}: {re.escape(message)}$"):
    H200.replace("test", **{name: value})


def test_takes_shares_and_counts_at_their_ends():
  for name in ("bubble", "reduce_exposed", "copy_exposed_forward"):
    assert [H200.replace("test", **{name: value})[name] for value in (0, 1)] == [0, 1]
  assert H200.replace("test", outside=0.99)["outside"] == 0.99
  assert H200.replace("test", matmul_tile=1, domain_size=2**20)["domain_size"] == 2**20


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"network_rate": -12.5e9}, r"^h200, network_rate: expected a positive number, got -12500"),
    ({"network_rate": 0}, "network_rate: expected a positive number, got 0"),
    ({"network_rate": float("nan")}, "network_rate: expected a finite number, got nan"),
    ({"network_rate": "x"}, "network_rate: expected a finite number, got 'x'"),
    ({"sms": 1.5}, "sms: expected a whole number, got 1.5"),
    ({"speed": 1.0}, r"^h200: expected facts of \('peak', .*'network_rate', .*got \['speed'\]"),
    ({"kind": "guessed", "sms": 1}, "sms: expected a kind of"),
  ],
)
def test_replaces_by_what_a_description_may_have(values, message):
  with pytest.raises(ValueError, match=message):
    H200.replace("test", **values)


def test_replaced_values_say_where_they_are_from():
  device = H200.replace("a slower card", "measured", network_rate=np.float64(12.5e9), sms=100)
  assert device.facts["network_rate"] == (12.5e9, "B/s", "measured", "a slower card")
  assert device["sms"] == 100 and device.facts["peak"] == H200.facts["peak"]
  portable = device.running(kernels=False)
  assert portable["network_rate"] == 12.5e9 and portable["copy_rate"] == H200.portable["copy_rate"]


@pytest.mark.parametrize("name", ["peak", "link_rate"])
def test_rates_follow_replaced_data_sheets_as_in_a_file(name):
  value = H200[name] / 4
  device = H200.replace("data sheet", "datasheet", **{name: value})
  fact = {"value": value, "unit": facts.FACTS[name][0], "kind": "datasheet", "source": "data sheet"}
  said = parse(json.dumps({"format": 1, "like": "h200", "facts": {name: fact}}))
  for one, other in ((device, said), (device.portable, said.portable)):
    assert {n: f.value for n, f in one.facts.items()} == {
      n: f.value for n, f in other.facts.items()
    }
    assert [m[:3] for m in one.matmuls] == [m[:3] for m in other.matmuls]
  follows = "copy_rate" if name == "link_rate" else "rest_forward"
  assert device[follows] == H200[follows] / 4 and device.facts[follows].kind == "derived"
  assert device.facts["launch_seconds"] == H200.facts["launch_seconds"]
  own = H200.replace("data sheet", **{name: value, follows: 3.0})
  assert own[follows] == own.portable[follows] == 3


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.int64, np.uint8])
def test_replaces_by_numbers_of_numpy(kind):
  device = H200.replace("test", network_rate=kind(3), sms=kind(4))
  assert device["network_rate"] == 3 and type(device["network_rate"]) is float
  assert device == H200.replace("test", network_rate=3, sms=4)
  with pytest.raises(ValueError, match="sms: expected a finite number, got "):
    H200.replace("test", sms=np.bool_(True))


@pytest.mark.parametrize("widths", [[4096], [4096, 0], [4096, 1.5], "wide"])
def test_refuses_bad_shapes(widths):
  matmul = copy.deepcopy(json.loads(changed())["matmuls"][0]) | {"widths": widths}
  with pytest.raises(ValueError, match=r"matmuls\[0\]: expected widths \[D, F\]"):
    parse(changed(matmuls=[matmul]))


def test_no_such_file(tmp_path):
  with pytest.raises(ValueError, match=r"expected one of .*or a readable file, got 'nowhere'"):
    Device.load("nowhere")
  path = tmp_path / "mine.json"
  path.write_text(changed(name="mine"))
  assert Device.load(path).name == "mine"


def test_any_value_in_any_place_is_read_or_refused():
  data = json.loads((FOLDER / "h200.json").read_text())
  refused = 0
  for place in some_places(data, each=1):
    for value in VALUES:
      try:
        parse(json.dumps(replaced(data, place, value)))
      except ValueError:
        refused += 1
  assert refused > 250


@pytest.mark.parametrize("text", ["[" * 100_000, '{"name": "\\ud800"}', b"\xff\xfe{}"])
def test_what_is_no_json_is_refused(text, tmp_path):
  path = tmp_path / "device.json"
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(ValueError, match=r"device\.json: expected JSON"):
    Device.load(path)
  for other in (tmp_path, "/dev/zero", tmp_path / "none"):
    with pytest.raises(ValueError, match=r"device: expected one of .*expected a file, got"):
      Device.load(other)
