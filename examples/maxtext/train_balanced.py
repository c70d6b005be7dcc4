"""MaxText's pre-training with balanced experts: its command line, and options ``balance.…``.

  python examples/maxtext/train_balanced.py base.yml model_name=… ici_expert_parallelism=8 \
    balance.replica_slots=4 balance.target=1.02

``balance.NAME`` are fields of ``ultraep_jax.BalanceConfig``. With MaxText's own option
``record_internal_nn_metrics=true`` its metrics have what the layers did, as ``balance/NAME``.
"""

import ast
from collections.abc import Callable, Sequence
from typing import Any

import balanced_maxtext
from absl import app
from maxtext.trainers.pre_train import train

import ultraep_jax as uep

_PREFIX = "balance."


def main(argv: Sequence[str]) -> None:
  """Runs MaxText's trainer; of MaxText, two functions are wrapped that its loop calls."""
  own = [argument for argument in argv if argument.startswith(_PREFIX)]
  config = balance_config(own)
  train.train_utils.setup_train_loop = balanced(train.train_utils.setup_train_loop, config)
  train.record_activation_metrics = recording(train.record_activation_metrics)
  train.main([argument for argument in argv if argument not in own])


def balance_config(arguments: Sequence[str]) -> uep.BalanceConfig:
  """The configuration that ``balance.NAME=VALUE`` say; values are Python's literals or text."""
  fields: dict[str, Any] = {}
  for argument in arguments:
    name, _, value = argument.removeprefix(_PREFIX).partition("=")
    try:
      fields[name] = ast.literal_eval(value)
    except (ValueError, SyntaxError):
      fields[name] = value
  return uep.BalanceConfig(**fields)


def balanced(
  setup: Callable[..., tuple[Any, ...]], config: uep.BalanceConfig
) -> Callable[..., Any]:
  """``setup_train_loop`` of a model whose experts are balanced."""

  def balanced_setup(maxtext_config: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    balanced_maxtext.keep_named(maxtext_config)
    parts = setup(maxtext_config, *args, **kwargs)
    sow = maxtext_config.record_internal_nn_metrics
    balanced_maxtext.balance(parts[-1], config, sow_scalars=sow)  # the train state, last
    return parts

  return balanced_setup


def recording(record: Callable[..., None]) -> Callable[..., None]:
  """``record_activation_metrics``, which adds what the layers did to a step's metrics."""

  def record_with_balance(metrics: dict[str, Any], intermediates: Any, config: Any) -> None:
    record(metrics, intermediates, config)
    for name, value in balanced_maxtext.scalars(intermediates).items():
      metrics["scalar"][f"balance/{name}"] = value

  return record_with_balance


if __name__ == "__main__":
  app.run(main)
