"""The script that compares random layers with dense ones."""

import collections

import pytest
import random_layers
from random_layers import CPU, GPU

from ultraep_jax import differentiated


def test_layers_equal_dense_ones(capsys):
  assert random_layers.main(["--first", "6", "--layers", "2"]) == 0
  assert "2 layers on up to 8 x cpu, 0 off" in capsys.readouterr().out


@pytest.mark.parametrize("number", [17, 46])
def test_layers_that_plan_in_one_pass_equal_dense_ones(number, capsys, monkeypatch):
  chosen = []
  right = differentiated.choose
  monkeypatch.setattr(
    differentiated, "choose", lambda *passes: chosen.append(passes) or right(*passes)
  )
  assert random_layers.main(["--first", str(number), "--layers", "1", "--one-pass"]) == 0
  assert chosen and "1 layers on up to 8 x cpu, 0 off" in capsys.readouterr().out


def test_a_layer_that_differs_is_named(monkeypatch, capsys):
  right = random_layers.dense

  def other(problem):
    y, (x_grad, gate_grad, weight_grads) = right(problem)
    return y, (x_grad, gate_grad, weight_grads.replace(wo=weight_grads.wo * 1.001))

  monkeypatch.setattr(random_layers, "dense", other)
  assert random_layers.main(["--first", "6", "--layers", "1"]) == 1
  said = capsys.readouterr().out
  assert said.startswith("6: off by ") and "1 layers on up to 8 x cpu, 1 off" in said


def test_every_setting_is_drawn():
  for sizes in (CPU, GPU):
    drawn = [random_layers.draw(number, 8, sizes) for number in range(300)]
    assert drawn[7] == random_layers.draw(7, 8, sizes)
    values = collections.defaultdict(set)
    for which in drawn:
      settings = which.config.__dict__ | which._asdict()
      del settings["config"]
      for name, value in settings.items():
        values[name].add(value)
    assert values["ranks"] == set(range(1, 9))
    assert values["groups"] == {1, 2}
    assert values["dtype"] == values["weights_dtype"] == {"float32", "float16", "bfloat16"}
    fixed = {"node_size", "implementation", "dispatch_dtype", "device"}
    assert {name for name, found in values.items() if len(found) == 1} == fixed
