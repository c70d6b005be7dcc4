"""The training step of the bench's model, compiled once per way of balancing, on one state."""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ultraep_jax.bench import timing
from ultraep_jax.bench.train.transformer import AXIS, Attend, LanguageModel, Sizes
from ultraep_jax.config import BalanceConfig
from ultraep_jax.types import Array

WEIGHT_DECAY = 0.1
# AdamW, less the learning rate, which is an argument of the step: at 0 a step does all its work
# and leaves the parameters as they are.
OPTIMIZER = optax.chain(
  optax.clip_by_global_norm(1.0),
  optax.scale_by_adam(b1=0.9, b2=0.95),
  optax.add_decayed_weights(WEIGHT_DECAY),
)


class State(NamedTuple):
  """What training changes."""

  params: Any  # nnx.State
  moments: optax.OptState


class Metrics(NamedTuple):
  """What one step did; L is the layers.

  Attributes:
    loss: ``[]`` float32, mean cross-entropy in nats per byte.
    load_LE: ``[L, E]`` int32, assignments per expert as the router chose.
    before_L: ``[L]`` float32, busiest over mean rank under home placement.
    after_L: ``[L]`` float32, the same as computed.
    rounds_L: ``[L]`` float32.
    replicas_L: ``[L]`` float32, copies of experts, over all ranks.
  """

  loss: Array
  load_LE: Array
  before_L: Array
  after_L: Array
  rounds_L: Array
  replicas_L: Array


Step = Callable[[State, Array, Array, Array], tuple[State, Metrics]]


@dataclasses.dataclass(frozen=True)
class Options:
  """What all steps of a program share.

  Attributes:
    sizes: of the model.
    attend: the attention to use.
    remat: make activations again in backward, but those of ``REMAT_NAMES``.
    balance_loss: weight of the router's auxiliary loss.
  """

  sizes: Sizes
  attend: Attend
  remat: bool = False
  balance_loss: float = 1e-3


def make_model(options: Options, config: BalanceConfig) -> LanguageModel:
  return LanguageModel(options.sizes, config, options.attend, nnx.Rngs(0))


def init(options: Options) -> State:
  params = nnx.state(make_model(options, BalanceConfig()), nnx.Param)
  return State(params, OPTIMIZER.init(params))


def make_step(options: Options, config: BalanceConfig) -> Step:
  """``(state, bytes [B, S + 1], bias [L, E], learning rate []) -> (state, metrics)``."""

  def loss_fn(params: Any, bytes_BS: Array, bias_LE: Array) -> tuple[Array, Metrics]:
    graphdef, _, other = nnx.split(
      nnx.eval_shape(functools.partial(make_model, options, config)), nnx.Param, ...
    )
    bias = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), other)
    model = nnx.merge(graphdef, params, bias)
    logits_BSV, all_aux = model(bytes_BS[:, :-1], bias_LE, options.remat)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_BSV, bytes_BS[:, 1:])
    loss = jnp.mean(losses)
    balance = jnp.mean(jnp.stack([aux.load_balance_loss for aux in all_aux]))
    scalars = [aux.stats.scalars() for aux in all_aux]

    def of_layers(name: str) -> Array:
      return jnp.stack([s[name] for s in scalars])

    metrics = Metrics(
      loss,
      jnp.stack([aux.expert_load_E for aux in all_aux]),
      of_layers("imbalance_before"),
      of_layers("imbalance_after"),
      of_layers("rounds"),
      of_layers("replicas"),
    )
    return loss + options.balance_loss * balance, metrics

  def step(
    state: State, bytes_BS: Array, bias_LE: Array, learning_rate: Array
  ) -> tuple[State, Metrics]:
    grads, metrics = jax.grad(loss_fn, has_aux=True)(state.params, bytes_BS, bias_LE)
    updates, moments = OPTIMIZER.update(grads, state.moments, state.params)
    params = jax.tree.map(lambda p, u: p - learning_rate * u, state.params, updates)
    return State(params, moments), metrics

  return step


def shapes(options: Options) -> State:
  """The state of the mesh in context, with shardings and without memory."""
  abstract = jax.eval_shape(functools.partial(init, options))
  placement = nnx.get_named_sharding(abstract, jax.sharding.get_mesh())
  return jax.tree.map(
    lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), abstract, placement
  )


def traced_step(options: Options, config: BalanceConfig, batch: int) -> Any:
  """The step traced for the mesh in context and ``batch`` sequences in all; takes the state."""
  sizes, state = options.sizes, shapes(options)

  def shape(spec: P, dtype: Any, *axes: int) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(jax.sharding.get_mesh(), spec)
    return jax.ShapeDtypeStruct(axes, dtype, sharding=sharding)

  everywhere = NamedSharding(jax.sharding.get_mesh(), P())
  step = jax.jit(
    make_step(options, config),
    donate_argnums=0,
    out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, state), everywhere),
  )
  with timing.quiet():
    return step.trace(
      state,
      shape(P(AXIS), jnp.int32, batch, sizes.seq + 1),
      shape(P(), jnp.float32, sizes.layers, sizes.experts),
      shape(P(), jnp.float32),
    )


class Program:
  """A model on the mesh in context, and a compiled step per configuration.

  Attributes:
    state: the only copy; every step takes its memory.
    compile_seconds: of each configuration.
    gigabytes: what each configuration's step takes of a device: arguments, results that are no
      arguments, and temporary memory, as compiled.
  """

  def __init__(self, options: Options, batch: int, compile_threads: int = 1):
    self.options, self.batch, self.compile_threads = options, batch, compile_threads
    self.compile_seconds: dict[BalanceConfig, float] = {}
    self.gigabytes: dict[BalanceConfig, float] = {}
    self._steps: dict[BalanceConfig, Any] = {}
    placement = jax.tree.map(lambda leaf: leaf.sharding, shapes(options))
    self._init = jax.jit(functools.partial(init, options), out_shardings=placement)
    self.state: Any = None

  def reset(self) -> None:
    """The initial parameters, the same every time."""
    self.state = None  # frees the old ones first
    self.state = self._init()

  def compile(self, configs: Iterable[BalanceConfig]) -> dict[BalanceConfig, Exception]:
    """Compiles those not compiled yet, XLA's part side by side; returns what failed."""
    failed: dict[BalanceConfig, Exception] = {}
    running: dict[BalanceConfig, tuple[float, concurrent.futures.Future]] = {}
    with concurrent.futures.ThreadPoolExecutor(self.compile_threads) as pool:
      for config in dict.fromkeys(configs):
        if config in self._steps:
          continue
        start = time.perf_counter()
        try:
          lowered = traced_step(self.options, config, self.batch).lower()
          running[config] = start, pool.submit(lowered.compile)
        except Exception as error:
          failed[config] = error
      for config, (start, future) in running.items():
        try:
          self._steps[config] = future.result()
        except Exception as error:
          failed[config] = error
          continue
        self.compile_seconds[config] = time.perf_counter() - start
        self.gigabytes[config] = timing.gigabytes(self._steps[config].memory_analysis())
    return failed

  def has(self, config: BalanceConfig) -> bool:
    return config in self._steps

  def batch_of(self, bytes_BS: np.ndarray) -> Array:
    return jax.device_put(bytes_BS, NamedSharding(jax.sharding.get_mesh(), P(AXIS)))

  def run(
    self,
    config: BalanceConfig,
    batches: Sequence[Array],
    bias_LE: np.ndarray,
    learning_rate: float = 0.0,
  ) -> list[Metrics]:
    """One step per batch; the metrics may not be ready yet."""
    everywhere = NamedSharding(jax.sharding.get_mesh(), P())
    bias, rate = jax.device_put(
      (np.asarray(bias_LE, np.float32), np.float32(learning_rate)), everywhere
    )
    results: list[Metrics] = []
    # Virtual CPU devices share threads: several steps at once can starve each other.
    ahead = 0 if jax.default_backend() == "cpu" else 1
    for batch in batches:
      if len(results) > ahead:
        jax.block_until_ready(results[-1 - ahead])
      self.state, metrics = self._steps[config](self.state, batch, bias, rate)
      results.append(metrics)
    return results
