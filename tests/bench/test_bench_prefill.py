"""The bench of prefill: loads to order, the open loop in virtual time, and a run of it all."""

import concurrent.futures
import json
import math
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraep_jax.bench import timing
from ultraep_jax.bench.prefill import command as prefill
from ultraep_jax.bench.prefill import loads as prefill_loads
from ultraep_jax.bench.prefill import profile as prefill_profile
from ultraep_jax.bench.prefill import text as prefill_text
from ultraep_jax.bench.prefill.arrivals import Point, find_limit, growth, offer, poisson_arrivals
from ultraep_jax.serve import Prefilled, QueueFull

RUN = (
  "--model tiny --dtype float32 --alignment 16 --max-requests 8 --lengths 8 64 "
  "--saturate 2 --tries 1 --bound 5000"
)


# --- loads -----------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.floats(1.0, 1.8))
def test_popularity_has_the_skew_and_is_a_chance(seed, skew):
  probability_E = prefill_loads.popularity(seed, 32, 4, 4, skew)
  assert probability_E.sum() == pytest.approx(4) and probability_E.min() > 0
  assert probability_E.max() <= 1
  assert prefill_loads.rank_imbalance(probability_E, 4) == pytest.approx(skew, abs=1e-3)


def test_one_rank_has_no_skew():
  np.testing.assert_allclose(prefill_loads.popularity(0, 8, 1, 2, 1.5), 0.25, rtol=1e-6)


def test_popularity_says_what_cannot_be():
  with pytest.raises(ValueError, match="skew: expected what 2 of 4 experts on 4 ranks can reach"):
    prefill_loads.popularity(0, 4, 4, 2, 3.0)


def test_no_plan_is_below_the_floor_and_some_reach_it():
  rng = np.random.default_rng(0)
  ratios = []
  for i in range(8):
    load_GE = rng.integers(0, 40, (4, 16)) * rng.permutation(np.arange(16) < 8 + i % 8)
    load_GE = load_GE * np.where(np.arange(16) < 4, 4, 1)  # rank 0 is hot, over its experts
    floor = prefill_loads.reachable_floor(load_GE.sum(axis=0), 4, slots=1)
    got = prefill_loads.planned(load_GE, slots=1)
    assert got >= floor - 1e-9
    ratios.append(got / floor)
  assert min(ratios) < 1.001 and np.mean(ratios) < 1.05
  # One slot on each of three ranks, a rank with four equal experts: a fourth has to stay.
  assert prefill_loads.reachable_floor(np.repeat([8, 0, 0, 0], 4), 4, 1) == 1.0
  assert prefill_loads.reachable_floor(np.repeat([8, 0], 4), 2, 1) == 1.5


def test_biases_make_the_loads():
  rng = np.random.default_rng(0)
  score_TE = np.exp(rng.normal(size=(4000, 16)))
  score_TE /= score_TE.sum(axis=1, keepdims=True)
  share_LE = np.stack([prefill_loads.popularity(s, 16, 4, 2, 1.6) / 2 for s in range(2)])
  search = prefill_loads.BiasSearch(share_LE, 0.02)
  load_LE = share_LE
  for _ in range(40):
    chosen_LTK = np.argsort(-(score_TE + search.bias_LE[:, None]), axis=-1)[..., :2]
    load_LE = np.stack([np.bincount(chosen.ravel(), minlength=16) for chosen in chosen_LTK])
    search.update(load_LE)
  for load_E in load_LE:
    assert prefill_loads.rank_imbalance(load_E, 4) == pytest.approx(1.6, abs=0.05)


def test_prompts_are_of_all_domains_and_the_same_again():
  prompts, again = (prefill_text.make_prompts(3, 60, 8, 64, 512, 20_000) for _ in range(2))
  assert {prompt.domain for prompt in prompts} == set(prefill_text.DOMAINS)
  for prompt, same in zip(prompts, again, strict=True):
    np.testing.assert_array_equal(prompt.tokens, same.tokens)
    assert 8 <= len(prompt.tokens) <= 64 and prompt.tokens.dtype == np.int32
    assert prompt.tokens.min() >= 0 and prompt.tokens.max() < 512
  texts = [prefill_text.domain_text(name, 20_000) for name in prefill_text.DOMAINS]
  assert len(set(texts)) == 3 and all(len(text) == 20_000 for text in texts)
  assert "def " in texts[0] and "matrix" in texts[1]


# --- arrivals --------------------------------------------------------------------------------


class OneServer:
  """Serves requests one after the other, each in ``service`` seconds, in a time of its own."""

  def __init__(self, service, limit=10**9, fails=()):
    self.service, self.limit, self.fails = service, limit, fails
    self.now, self.free, self.submitted, self.running = 100.0, 0.0, 0, []

  def clock(self):
    return self.now

  def sleep(self, seconds):
    self.now += max(seconds, 1e-9)  # a smaller step would be lost in rounding
    while self.running and self.running[0][0] <= self.now:
      self._finish(*self.running.pop(0))

  def submit(self, tokens):
    if len(self.running) >= self.limit:
      raise QueueFull("full")
    self.free = max(self.now, self.free) + self.service
    future = concurrent.futures.Future()
    self.running.append((self.free, self.submitted, tokens, future))
    self.submitted += 1
    return future

  def _finish(self, at, number, tokens, future):
    if not future.set_running_or_notify_cancel():
      return
    if number in self.fails:
      future.set_exception(RuntimeError("failed"))
      return
    future.set_result(
      Prefilled(
        token=0, logits_V=None, cache=None, length=len(tokens), queued=0.0, started=0.0,
        finished=at, batch=number, batch_requests=1, batch_tokens=len(tokens), batch_slots=8,
      )
    )  # fmt: skip


def offer_to(server, rate, count=4000, give_up=1e9):
  prompts = [np.zeros(6, np.int32)] * count
  return offer(
    server, prompts, poisson_arrivals(0, count), rate, give_up, server.clock, server.sleep
  )


def test_times_are_those_of_a_queue_with_one_server():
  """Mean wait of M/D/1: rho s / (2 (1 - rho))."""
  server = OneServer(0.1)
  point = offer_to(server, rate=6.0)
  assert point.overloaded is None and point.served == point.offered == 4000
  assert point.ttft_mean == pytest.approx(0.1 + 0.6 * 0.1 / (2 * 0.4), rel=0.1)
  assert 0.1 <= point.ttft_p50 < point.ttft_mean < point.ttft_p99
  assert point.requests_per_second == pytest.approx(6.0, rel=0.05)
  assert point.tokens_per_second == pytest.approx(6 * point.requests_per_second)
  assert point.padding_share == pytest.approx(1 / 4)


def test_a_rate_beyond_what_is_served_is_given_up():
  server = OneServer(0.1)
  point = offer_to(server, rate=20.0, give_up=3.0)
  assert "the oldest for 3 s" in point.overloaded and not point.holds(1e9)
  assert point.offered < 200  # of 4000
  assert point.served < point.offered and not [f for *_, f in server.running if not f.done()]
  assert offer_to(OneServer(0.1, limit=5), rate=20.0).overloaded == "full"
  # Not given up, a queue that grows is seen all the same; all at once is no queue that grows.
  assert "rose from" in offer_to(OneServer(0.1), rate=13.0, count=400).overloaded
  at_once = offer_to(OneServer(0.1), rate=math.inf, count=40)
  assert at_once.served == 40 and at_once.overloaded is None


def test_a_failed_request_is_counted_and_nothing_is_held():
  point = offer_to(OneServer(0.1, fails={3, 50}), rate=5.0, count=100)
  assert (point.served, point.failed) == (98, 2) and not point.holds(1e9)


def test_growth_is_no_burst():
  steady = np.full(400, 0.2)
  burst = np.concatenate([steady, np.linspace(0.2, 2, 50), np.linspace(2, 0.2, 50), steady])
  rising = np.linspace(0.1, 2.0, 400)
  assert growth(steady, 10) is None and growth(burst, 10) is None
  assert growth(rising, 10) is not None and growth(rising, 1000) is None


def test_a_short_load_holds_no_rate_that_cannot_be_served():
  """Each second brings a fifth more than is served, but the mean stays below a bound of 0.8 s."""
  seconds = 4
  ttft = 0.3 + 0.2 * np.linspace(0, seconds, 400)
  assert ttft.mean() < 0.8 and "rose from" in growth(ttft, seconds)
  assert growth(0.3 + 0.04 * np.linspace(0, seconds, 400), seconds) is None


def queue_point(rate, service=0.1):
  rho = rate * service
  mean = service + rho * service / (2 * (1 - rho)) if rho < 1 else math.nan
  overloaded = None if rho < 1 else "grows"
  return Point(rate, 100, 100, 0, overloaded, mean, mean, mean, rate, rate, 0.0)


@pytest.mark.parametrize("known", [[1.0], [1.0, 5.0, 9.99], [20.0], [4.0, 30.0]])
def test_limit_is_where_the_mean_meets_the_bound(known):
  bound = 0.15  # at rho = 1/2
  limit = find_limit(queue_point, [queue_point(rate) for rate in known], bound, tries=20)
  assert limit.held <= 5.0 <= limit.exceeded <= limit.held * 1.03
  assert limit.held <= limit.estimate <= limit.exceeded
  assert limit.estimate == pytest.approx(5.0, rel=0.01)


def test_limit_counts_its_tries_and_knows_when_nothing_holds():
  measured = []

  def measure(rate):
    measured.append(rate)
    return queue_point(rate)

  limit = find_limit(measure, [queue_point(8.0)], bound=0.05, tries=3)
  assert measured == [4.0, 2.0, 1.0] and limit == (0.0, 1.0, 0.0)


# --- profiles --------------------------------------------------------------------------------


class Event(NamedTuple):
  name: str
  start_ns: int
  duration_ns: int


def test_a_layer_is_from_dispatch_to_dispatch(monkeypatch):
  """Two whole layers, with kernels side by side and one under another."""
  one = [
    Event("dispatch_mosaic_gpu_kernel", 0, 1000),
    Event("gated_matmul_mosaic_gpu_kernel", 1500, 4000),
    Event("loop_add_fusion_1", 5000, 1000),
    Event("loop_add_fusion_2", 5200, 100),
  ]
  layers = [e._replace(start_ns=e.start_ns + 8000 * n) for n in range(3) for e in one]
  events = [Event("memset", -9000, 500), *layers]
  monkeypatch.setattr(timing, "device_events", lambda run: [[], events])
  row = prefill_profile.profile({"quota": lambda: 0}, layers=3)["quota"]
  assert row["layer_us"] == 8 and row["kernels"] == 4 and row["batch_ms"] >= 0
  assert row["kinds_us"] == pytest.approx({"dispatch": 1, "experts": 4, "other": 1.1})
  assert row["gaps_us"] == pytest.approx(0.5 + 2)
  several_rounds = prefill_profile.profile({"quota": lambda: 0}, layers=2)["quota"]
  assert set(several_rounds) == {"batch_ms"}
  text = prefill_profile.profile_table({"quota": row, "none": {"batch_ms": 2.0}})
  (quota,) = (line.split() for line in text.splitlines() if line.split()[:1] == ["quota"])
  assert quota[2:6] == ["8.00", "4.00", "1.00", "0.00"]


def test_profiles_batches_without_a_gpu(tmp_path, capsys):
  path = tmp_path / "profile.json"
  flags = f"{RUN} --ranks 2 --skew 1 --strategies none quota --buckets 32 64 --profile"
  assert prefill.main([*flags.split(), "--json", str(path)]) == 0
  rows = json.loads(path.read_text())["profile"]
  assert set(rows) == {"none", "quota"} and all(row["batch_ms"] > 0 for row in rows.values())
  assert "a batch of 64 tokens a rank" in capsys.readouterr().out


def test_lengths_that_no_prompt_can_have_are_refused(capsys):
  with pytest.raises(SystemExit, match="2"):
    prefill.main(["--model", "tiny", "--lengths", "50", "10"])
  said = capsys.readouterr().err
  assert "--lengths: expected the shortest, then the longest, got [50, 10]" in said


# --- the whole -------------------------------------------------------------------------------


def test_a_soak_compiles_nothing(tmp_path, capsys):
  path = tmp_path / "soak.json"
  flags = f"{RUN} --ranks 1 --layers 1 --skew 1 --slots 0 --strategies none --buckets 64"
  assert prefill.main(f"{flags} --requests 300 --json {path}".split()) == 0
  samples = json.loads(path.read_text())["strategies"]["none"]["samples"]
  assert samples[-1]["requests"] == 300 and len(samples) == 10
  assert samples[-1]["compilations"] == 0
  assert samples[-1]["arrays"] == samples[2]["arrays"]
  assert "0 failed, 0 compilations" in capsys.readouterr().out


@pytest.mark.slow
def test_strategies_have_the_same_parameters_and_arrivals(tmp_path, capsys):
  path, figure = tmp_path / "prefill.json", tmp_path / "prefill.png"
  run = f"{RUN} --objective balance"  # by time, layers of few tokens plan nothing
  flags = f"{run} --ranks 4 --buckets 64 --calibrate 20 --seconds 0.2 --rates 100 200"
  assert prefill.main([*flags.split(), "--json", str(path), "--plot", str(figure)]) == 0
  results = json.loads(path.read_text())
  points = results["points"]
  assert results["same_first_tokens"] > 0.98
  assert [p["order"] for p in points] == list(range(len(points)))
  assert [p["strategy"] for p in points[:6]] == ["none", "quota", "ideal", "quota", "ideal", "none"]
  for rate in (100.0, 200.0):
    assert len({p["offered"] for p in points if p["rate"] == rate}) == 1
  none, quota, ideal = (results["strategies"][name] for name in prefill.STRATEGIES)
  for load in results["loads"]:
    assert load["home"] == pytest.approx(2, abs=0.25)
    assert 1 <= load["floor"] <= load["planned"] < 1.1
  assert np.mean(none["imbalance_after_L"]) > 1.7 > 1.1 > np.mean(quota["imbalance_after_L"])
  assert np.mean(ideal["imbalance_after_L"]) < 1.15
  assert all(row["batches"] > 5 and row["rounds"] >= 1 for row in (none, quota, ideal))
  assert set(results["limits"]) == set(results["saturated"]) == set(prefill.STRATEGIES)
  assert figure.stat().st_size > 10_000
  out = capsys.readouterr().out
  assert "In the order of measurement" in out and "no plan below" in out
  assert not jax.config.jax_log_compiles
