"""The prefill engine: right results whatever runs beside, isolation, limits, steady memory."""

import concurrent.futures
import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from tiny_prefill import NAN_TOKEN, VOCAB, Tiny, dense_logits

import ultraep_jax as uep
from ultraep_jax import serve
from ultraep_jax.bench.prefill import model as prefill_model

CONFIG = serve.EngineConfig(
  buckets=(16, 32), alignment=4, max_requests=4, queue_limit=400, return_logits=True
)


def make_mesh(axis_type=AxisType.Auto, shape=(2, 2)):
  devices = jax.devices()[: shape[0] * shape[1]]
  return jax.make_mesh(shape, ("data", "expert"), axis_types=(axis_type,) * 2, devices=devices)


def make_engine(make_model=Tiny, mesh=None, config=CONFIG, **kwargs):
  with jax.set_mesh(mesh or make_mesh()):
    return serve.PrefillEngine(make_model(), config, **kwargs)


def make_prompts(count, seed=0, longest=32):
  rng = np.random.default_rng(seed)
  return [rng.integers(0, NAN_TOKEN, n) for n in rng.integers(1, longest + 1, count)]


@pytest.fixture(scope="module")
def warm():
  """The compiled programs, for engines that differ in nothing else."""
  with jax.set_mesh(make_mesh()):
    model = Tiny()
  engine = make_engine(lambda: model)
  engine.warm_up()
  return model, engine._programs


@pytest.fixture
def engine(warm):
  model, programs = warm
  engine = make_engine(lambda: model)
  engine._programs = programs
  yield engine
  engine.close(drain=False)


@pytest.fixture
def compilations():
  """The names of what is compiled, as it happens."""
  seen = []

  def listen(event, seconds, **_):
    if "compile" in event:
      seen.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield seen
  jax.monitoring.unregister_event_duration_listener(listen)


def assert_right(model, prompt, result):
  logits = dense_logits(model, prompt)
  np.testing.assert_allclose(result.logits_V, logits, rtol=1e-4, atol=1e-4)
  assert result.token == np.argmax(result.logits_V) and result.length == len(prompt)
  (kept,) = jax.tree.leaves(result.cache)
  assert len(kept.devices()) == 1 and len(prompt) <= kept.shape[1] < max(2 * len(prompt), 5)
  (kept,) = np.asarray(kept)
  np.testing.assert_array_equal(kept[: len(prompt)], np.asarray(model.embed[...])[prompt])
  assert not kept[len(prompt) :].any()


def test_many_threads_get_their_own_results_and_nothing_compiles(warm, engine, compilations):
  model, _ = warm
  prompts = make_prompts(120)
  with engine, concurrent.futures.ThreadPoolExecutor(4) as pool:
    jobs = [pool.submit(lambda p: engine.submit(p).result(timeout=60), p) for p in prompts[:60]]
    rest = [engine.submit(prompt) for prompt in prompts[60:]]
    results = [job.result() for job in jobs + rest]
  assert not compilations
  assert not engine._thread.is_alive()
  for prompt, result in zip(prompts, results, strict=True):
    assert_right(model, prompt, result)
    assert result.queued <= result.started <= result.finished
    assert result.batch_tokens <= result.batch_slots in (4 * 16, 4 * 32)
  seen = engine.metrics()
  assert (seen.submitted, seen.completed, seen.failed, seen.waiting) == (120, 120, 0, 0)
  assert seen.tokens == sum(map(len, prompts))
  batches = {result.batch: result for result in results}
  assert seen.batches == len(batches) == len(seen.recent_seconds)
  room = sum(result.batch_slots for result in batches.values())
  assert seen.padding_share == pytest.approx(1 - seen.tokens / room)
  assert seen.imbalance_after.shape == (len(batches), 0)
  with pytest.raises(RuntimeError, match="closed"):
    engine.submit([1])


def test_next_batch_starts_beside_the_running_one_only_if_full(engine):
  for _ in range(5):
    engine.submit(np.zeros(32, np.int32))
  assert engine._step() and len(engine._flights) == 1  # four of the five, a row each
  assert engine._step() and len(engine._flights) == 0  # the fifth would go alone: first land
  for _ in range(6):
    engine.submit(np.zeros(32, np.int32))
  for in_flight, waiting in ((1, 3), (1, 3), (0, 3), (1, 0), (0, 0)):
    if (in_flight, waiting) == (1, 3) and engine._flights:
      continue
    engine._step()
    assert (len(engine._flights), len(engine._queue)) == (in_flight, waiting)


def test_two_full_batches_are_in_flight_and_no_third(engine):
  for _ in range(13):
    engine.submit(np.zeros(32, np.int32))
  for in_flight, waiting in ((1, 9), (2, 5), (1, 5), (2, 1), (1, 1), (0, 1), (1, 0), (0, 0)):
    engine._step()
    assert (len(engine._flights), len(engine._queue)) == (in_flight, waiting)


def test_what_cannot_run_is_refused_at_submit(engine):
  for tokens, error, message in (
    ([], ValueError, "expected at least one, got an empty prompt"),
    ([0] * 33, ValueError, r"at most 32 \(the largest bucket\), got 33"),
    ([3, VOCAB], ValueError, r"expected values in \[0, 40\), got 40"),
    ([-1], ValueError, r"expected values in \[0, 40\), got -1"),
    ([[1]], ValueError, "expected one axis"),
    ([[1], [1, 2]], ValueError, "expected one axis, got sequences within the sequence"),
    ([1.0], TypeError, "expected integers, got float64"),
    (None, TypeError, "expected a sequence or an array of integers, got NoneType"),
    ("abc", TypeError, "expected a sequence or an array of integers, got str"),
    (np.ones(2, bool), TypeError, "expected integers, got bool"),
  ):
    with pytest.raises(error, match=message):
      engine.submit(tokens)
  futures = [engine.submit([1]) for _ in range(CONFIG.queue_limit)]
  with pytest.raises(serve.QueueFull, match=r"fewer than 400 requests .*, got 400 with 400 tokens"):
    engine.submit([1])
  futures[7].cancel()
  engine.submit([1])  # the cancelled one waits no longer
  assert engine.metrics().refused == 1 and engine.metrics().cancelled == 1


def test_cancelled_before_it_starts_never_runs_and_later_is_dropped(engine):
  early, late, kept = (engine.submit([i, 2, 3]) for i in range(3))
  assert early.cancel()
  engine._step()
  (flight,) = engine._flights
  assert [request.future for request in flight.requests] == [late, kept]
  assert late.cancel() and not late.running()
  engine._step()
  assert kept.result().batch_requests == 2
  assert concurrent.futures.wait([early, late], timeout=5).not_done == set()
  with pytest.raises(concurrent.futures.CancelledError):
    late.result()
  seen = engine.metrics()
  assert (seen.completed, seen.cancelled, seen.waiting) == (1, 2, 0)

  waiting = engine.submit([1])
  engine.close(drain=False)
  assert waiting.cancelled()


def test_non_finite_logits_fail_their_request_alone(warm, engine):
  prompts = make_prompts(8, longest=12)
  prompts[3] = np.append(prompts[3], NAN_TOKEN)
  futures = [engine.submit(prompt) for prompt in prompts]
  while engine.run_batch():
    pass
  for i, (prompt, future) in enumerate(zip(prompts, futures, strict=True)):
    if i == 3:
      with pytest.raises(serve.RequestFailed, match="finite ones, got NaN or infinity"):
        future.result()
    else:
      assert_right(warm[0], prompt, future.result())
  assert engine.metrics().failed == 1 and engine.metrics().completed == 7


def test_a_batch_that_raises_runs_again_until_the_guilty_fail_alone(warm, engine, monkeypatch):
  programs, calls = engine._programs, []
  run = type(programs).run

  def raise_for_five(batch):
    calls.append(int((batch.last_BR >= 0).sum()))
    if (batch.token_BT == 5).any():
      raise ZeroDivisionError("five")
    return run(programs, batch)

  monkeypatch.setattr(programs, "run", raise_for_five)
  prompts = [np.where(p == 5, 6, p) for p in make_prompts(16, longest=8)]
  prompts[2] = prompts[11] = np.array([1, 5])
  futures = [engine.submit(prompt) for prompt in prompts]
  with engine:
    for i, (prompt, future) in enumerate(zip(prompts, futures, strict=True)):
      if i in (2, 11):
        with pytest.raises(serve.RequestFailed, match=r"prompt of 2 tokens: .*five"):
          future.result(timeout=60)
      else:
        assert_right(warm[0], prompt, future.result(timeout=60))
  assert len(calls) <= 2 * 16 and calls.count(1) == 4


def test_nobody_waits_for_a_thread_that_died(engine, monkeypatch):
  monkeypatch.setattr(engine, "_pack", lambda requests: 1 / 0)
  future = engine.submit([1])
  engine.start()
  with pytest.raises(serve.RequestFailed, match="the engine ended: ZeroDivisionError"):
    future.result(timeout=60)
  with pytest.raises(RuntimeError, match="closed"):
    engine.submit([1])


def test_memory_is_steady_and_a_result_holds_its_own_cache_alone(warm):
  model, programs = warm
  prompts = make_prompts(400, longest=16)
  prompts[100] = np.array([NAN_TOKEN])

  def serve_all(times):
    """One of the results, and the count and bytes of arrays after the thread has ended."""
    engine, result = make_engine(lambda: model), None
    engine._programs = programs
    with engine:
      for _ in range(times):
        futures = [engine.submit(prompt) for prompt in prompts]
        assert [f for f in futures if f.exception(timeout=60)] == [futures[100]]
        result = futures[5].result()
    arrays = jax.live_arrays()
    return result, len(arrays), sum(array.nbytes for array in arrays)

  gc.collect()  # what other tests left
  gc.disable()  # the engine leaves no cycles
  try:
    first, count, size = serve_all(1)
    kept, more, larger = serve_all(6)
  finally:
    gc.enable()
  assert (more - count, larger - size) == (1, kept.cache["embedded"].nbytes)
  np.testing.assert_array_equal(first.cache["embedded"], kept.cache["embedded"])


def test_a_model_that_cannot_be_traced_fails_the_warm_up(warm):
  class Wrong(Tiny):
    def __call__(self, batch):
      result = super().__call__(batch)
      return result._replace(cache=jax.tree.map(lambda leaf: leaf[:, :, 1:], result.cache))

  class Broken(Tiny):
    def __call__(self, batch):
      raise KeyError("no such parameter")

  with pytest.raises(ValueError, match=r"cache: expected arrays \[layers, 4, 16, ...\], got"):
    make_engine(Wrong).start()
  for end in (serve.PrefillEngine.start, serve.PrefillEngine.close):
    engine = make_engine(Broken)
    future = engine.submit([1])
    with pytest.raises(KeyError, match="no such parameter"):
      end(engine)
    with pytest.raises(serve.RequestFailed, match="the engine ended: KeyError"):
      future.result(timeout=0)

  class Nothing(Tiny):
    def __call__(self, batch):
      return None

  with pytest.raises(TypeError, match="model: expected to return a PrefillResult, got NoneType"):
    make_engine(Nothing).start()

  class Silent(Tiny):
    def __call__(self, batch):
      return super().__call__(batch)._replace(logits_BRV=None)

  with pytest.raises(TypeError, match="logits_BRV: expected an array, got NoneType"):
    make_engine(Silent).start()


def test_what_no_engine_can_be_made_of_is_refused(warm):
  model, _ = warm
  with pytest.raises(ValueError, match='mesh: expected one in context with the axis "expert"'):
    serve.PrefillEngine(model, CONFIG)
  with pytest.raises(TypeError, match="model: expected a Module, got NoneType"):
    make_engine(lambda: None)
  with pytest.raises(TypeError, match="config: expected a EngineConfig, got dict"):
    make_engine(lambda: model, config={"buckets": (16,)})
  with pytest.raises(TypeError, match="vocab_size: expected an int, got None"):
    make_engine(nnx.Module)
  others = jax.make_mesh((2, 2), ("data", "expert"), devices=jax.devices()[4:])
  for mesh in (others, make_mesh(shape=(1, 2))):
    message = r"the devices of the mesh in context, \[.*\], got embed on \[0, 1, 2, 3\]"
    with pytest.raises(ValueError, match=message):
      make_engine(lambda: model, mesh)


def test_parameters_that_are_nowhere_in_particular_are_brought_to_the_mesh():
  mesh, config = make_mesh(shape=(1, 2)), dataclasses.replace(CONFIG, buckets=(16,))
  with jax.set_mesh(mesh):
    model = Tiny()
  for name in ("embed", "window"):
    setattr(model, name, nnx.Param(jnp.asarray(np.asarray(getattr(model, name)[...]))))
  assert not model.embed[...].committed
  engine = make_engine(lambda: model, mesh, config)
  future = engine.submit([1, 2])
  assert engine.run_batch() == 1
  assert_right(model, [1, 2], future.result())


def make_decoder(balance):
  """Rows of 16 experts, 4 of them for a token, and attention in blocks of the alignment."""
  named = prefill_model.NAMED["tiny"]
  gating = dataclasses.replace(named.gating, num_experts_per_tok=4)
  model = prefill_model.build(
    dataclasses.replace(named, gating=gating, vocab_size=VOCAB), jnp.dtype("float32"), block=4
  )
  return prefill_model.balanced_by(model, balance)


def test_nan_amid_a_prompt_fails_it_alone():
  """Later tokens attend to it; those of other requests lie in other blocks of the same row."""
  config = serve.EngineConfig(buckets=(32,), alignment=4, max_requests=4, return_logits=True)

  def make_model():
    model = make_decoder(uep.BalanceConfig(strategy="none"))
    model.embed[...] = model.embed[...].at[NAN_TOKEN].set(jnp.nan)
    return model

  engine = make_engine(make_model, make_mesh(shape=(1, 1)), config)
  prompts = [[1, 2, 3, 4, 5], [6, NAN_TOKEN, 7], [8, 9]]
  before, guilty, behind = (engine.submit(prompt) for prompt in prompts)
  assert engine.run_batch() == 3
  with pytest.raises(serve.RequestFailed, match="finite ones, got NaN or infinity"):
    guilty.result()
  for prompt, future in ((prompts[0], before), (prompts[2], behind)):
    alone = engine.submit(prompt)
    assert engine.run_batch() == 1
    np.testing.assert_array_equal(future.result().logits_V, alone.result().logits_V)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(future.result().cache))


def test_requests_must_start_at_the_models_blocks():
  config = serve.EngineConfig(buckets=(32,), alignment=2)
  with pytest.raises(ValueError, match=r"alignment: expected a multiple .* = 4, got 2"):
    make_engine(lambda: make_decoder(uep.BalanceConfig()), config=config)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("make_model", "strategy", "axis_type"),
  [
    (Tiny, "quota", AxisType.Auto),
    (Tiny, "none", AxisType.Explicit),
    (make_decoder, "quota", AxisType.Auto),
  ],
)
def test_a_result_does_not_depend_on_the_batch(make_model, strategy, axis_type, tmp_path):
  """Bit for bit, in every row and place, beside anything; and the plans do differ."""
  balance = uep.BalanceConfig(
    replica_slots=2, strategy=strategy, objective="balance", batch_invariant=True
  )
  mesh, loads = make_mesh(axis_type), []
  config = serve.EngineConfig(buckets=(32,), alignment=4, max_requests=4, return_logits=True)
  engine = make_engine(
    lambda: make_model(balance),
    mesh,
    config,
    on_stats=lambda number, stats: loads.append((number, stats)),
  )
  prompts = make_prompts(12, longest=20)
  alone = []
  for prompt in prompts:
    future = engine.submit(prompt)
    assert engine.run_batch() == 1
    alone.append(future.result())
  rng = np.random.default_rng(1)
  places = set()
  for _ in range(6):
    order = rng.permutation(len(prompts))
    futures = {i: engine.submit(prompts[i]) for i in order}
    if make_model is Tiny:
      engine.submit(np.append(prompts[order[0]], NAN_TOKEN))
    while engine.run_batch():
      pass
    for i, future in futures.items():
      result, leaves = future.result(), jax.tree.leaves(future.result().cache)
      places.add((i, *leaves[0].devices()))
      assert result.logits_V.tobytes() == alone[i].logits_V.tobytes(), i
      for leaf, same in zip(leaves, jax.tree.leaves(alone[i].cache), strict=True):
        assert np.asarray(leaf).tobytes() == np.asarray(same).tobytes(), i
  assert len(places) > 2 * len(prompts)  # rows did change
  seen = engine.metrics()
  assert [number for number, _ in loads] == list(range(seen.batches))
  assert seen.failed == 6 * (make_model is Tiny)
  assert (seen.imbalance_before >= seen.imbalance_after - 1e-6).all()
  if strategy == "quota":
    assert (seen.imbalance_before > seen.imbalance_after + 0.05).any()
    replicas = {np.asarray(stats.replica_expert_GS).tobytes() for _, stats in loads}
    assert len(replicas) > 3
  with uep.trace.Recorder(tmp_path) as recorder:
    for number, stats in loads:
      recorder.record(number, stats, axes=("layer", "group"))
  groups, layers = mesh.shape["data"], len(seen.imbalance_after[0])
  assert len(uep.trace.read(tmp_path).load_NGE) == groups * layers * seen.batches
