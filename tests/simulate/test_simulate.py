"""The simulator: the layer's own numbers, limits, monotonicity and measurements."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import ultraep_jax as uep
from ultraep_jax.devices.device import Device
from ultraep_jax.devices.facts import FACTS
from ultraep_jax.simulate import balancers, traffic
from ultraep_jax.simulate.cost import (
  Setting,
  copy_seconds,
  exchange_seconds,
  layer_times,
  remote_tokens,
)
from ultraep_jax.simulate.models import MODELS
from ultraep_jax.simulate.run import band, share_of_ideal, simulate, step_seconds
from ultraep_jax.simulate.validation import points
from ultraep_jax.strategies import eplb, lplb
from ultraep_jax.testing import expert_indices, zipf_loads

SMALL = dataclasses.replace(MODELS["Qwen3-235B"], num_experts=8, top_k=2)
RATES = Device.load("nvl64")


def setting(**changes):
  defaults = {"model": SMALL, "device": RATES, "num_ranks": 4, "domain_size": 4, "tokens": 16}
  return Setting(**{**defaults, **changes})


def small_loads(steps=3, ratio=1.9):
  loads = [zipf_loads(seed, 8, 4, 16, 2, ratio) for seed in range(steps)]
  return np.stack(loads)[:, None]


class TestAgreesWithTheLayer:
  """For the same loads, the simulator has the rows that the layer measures, rank by rank."""

  @pytest.mark.parametrize("name", ["none", "quota", "exact", "eplb+", "eplb in slots", "lplb"])
  def test_rows_of_every_rank(self, name):
    loads = small_loads()
    outcome = simulate(loads, setting(), (name,), target=1.01, period=1)[name]
    config = uep.BalanceConfig(replica_slots=2, objective="balance", target=1.01)
    module = {"eplb in slots": eplb, "lplb": lplb}.get(name)
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("expert",), axis_types=(AxisType.Auto,))
    # As it comes back from a step, so that there is one program.
    state = jax.device_put(eplb.init(8, 4, config), jax.NamedSharding(mesh, jax.P()))
    weights = uep.ExpertWeights(jnp.ones((8, 2, 4)), jnp.ones((8, 2, 4)), jnp.ones((8, 4, 2)))

    @jax.jit
    def measure(state, index):
      strategy = name if module is None else module.planner(state)
      x, gate = jnp.ones((64, 2)), jnp.ones((64, 2))
      own = dataclasses.replace(config, strategy=strategy)
      _, stats = uep.sharded_moe(x, index, gate, weights, config=own)
      if module is not None:
        state = module.update(state, stats.expert_load_E, config, period=1, decay=0.9)
      return state, stats

    with jax.set_mesh(mesh):
      for step, load_LGE in enumerate(loads):
        index = jnp.asarray(expert_indices(step, load_LGE[0], 2).reshape(-1, 2))
        state, stats = measure(state, index)
        np.testing.assert_array_equal(outcome.placed.load[step, 0], stats.load_after_G[0])
        assert outcome.replicas[step, 0] == stats.replicas[0]
        assert outcome.fan_out[step, 0] == stats.max_fanout[0]
        remote = outcome.remote_share()[step, 0] * loads[step].sum()
        assert round(float(remote)) == stats.remote_assignments[0]


class TestPlacement:
  @pytest.mark.parametrize("name", balancers.NAMES)
  @pytest.mark.parametrize("domain", [4, 2])
  def test_conserves_rows(self, name, domain):
    loads = small_loads(4)
    outcome = simulate(loads, setting(domain_size=domain), (name,), period=2)[name]
    np.testing.assert_array_equal(outcome.placed.rows.sum(axis=(2, 3)), loads.sum(axis=(2, 3)))
    assert (outcome.placed.kept <= outcome.placed.load).all()
    if domain == 2 and name != "ideal" and name != "eplb":
      home = loads.sum(axis=2).reshape(4, 1, 2, 4).sum(axis=-1)
      np.testing.assert_array_equal(outcome.placed.load.reshape(4, 1, 2, 2).sum(axis=-1), home)

  def test_totals_stand_for_sources_that_are_alike(self):
    total_E = np.arange(8) * 12 + 4
    even = np.repeat(total_E[None, None, None] // 4, 4, axis=2).astype(np.int32)
    names = ("none", "quota", "eplb+")
    by_source = simulate(even, setting(tokens=46), names)
    by_total = simulate(even.sum(axis=2), setting(tokens=46), names)
    for name in names:
      jax.tree.map(np.testing.assert_array_equal, by_source[name].placed, by_total[name].placed)

  @pytest.mark.parametrize("assignments", [1003, 5006])
  def test_ideal_is_even_up_to_a_row(self, assignments):
    total = np.zeros((1, 1, 8), np.int32)
    total[..., 5] = assignments
    placed = simulate(total, setting(tokens=assignments // 8), ("ideal",))["ideal"].placed
    assert placed.load.sum() == assignments and np.ptp(placed.load) <= 1

  def test_without_slots_nothing_changes(self):
    outcomes = simulate(small_loads(), setting(replica_slots=0), ("none", "quota", "eplb+"))
    for outcome in outcomes.values():
      np.testing.assert_array_equal(outcome.placed.load, outcomes["none"].placed.load)
      assert outcome.replicas.max() == 0

  def test_published_eplb_moves_homes_once_a_period(self):
    loads = np.repeat(small_loads(1), 4, axis=0)
    outcome = simulate(loads, setting(), ("eplb",), period=2)["eplb"]
    moved = outcome.placed.moved.sum(axis=(1, 2))
    assert moved[0] == moved[2] == 0 and moved[1] > 0 and moved[3] == 0  # the same again
    assert outcome.imbalance[2, 0] < outcome.imbalance[0, 0]
    assert outcome.forward.move[1, 0] > 0

  @pytest.mark.parametrize(
    "loads, message",
    [
      (np.zeros((1, 1, 4, 7), np.int32), r"expected \[layer, 4, 8\] or \[layer, 8\] in step 0"),
      (np.zeros((1, 8), np.int32), r"got \[8\]"),
      (np.full((1, 1, 4, 8), -1), "integers of at least 0 in step 0, got -1"),
      (np.full((1, 1, 4, 8), np.nan), "integers of at least 0 in step 0, got float64"),
      (np.ones((1, 1, 4, 8), bool), "integers of at least 0 in step 0, got bool"),
      (np.full((1, 1, 4, 8), 2**30), r"less than 2\*\*31"),
      (np.zeros((0, 1, 4, 8), np.int32), "at least one step"),
    ],
  )
  def test_hostile_loads(self, loads, message):
    with pytest.raises(ValueError, match=message):
      simulate(loads, setting(), ("none",))

  def test_tokens_are_those_of_the_loads(self):
    """As far as masked tokens, ranks with less to do, and steps chosen from a run allow."""
    loads = small_loads()
    uneven = loads.copy()
    uneven[:, :, 0] = 0
    for tokens, given in [(16, loads), (31, loads), (12, loads), (16, uneven), (16, 0 * loads)]:
      assert simulate(given, setting(tokens=tokens), ("none",))
    for by_total in (loads, loads.sum(axis=2)):
      for tokens in (8192, 34, 10):
        message = f"tokens: expected about 16, as a rank has in the loads on .*, got {tokens}"
        with pytest.raises(ValueError, match=message):
          simulate(iter(by_total), setting(tokens=tokens), ("none",))

  def test_without_assignments_none_are_remote(self):
    outcome = simulate(np.zeros((2, 1, 4, 8), np.int32), setting(), ("none",))["none"]
    for locality in (True, False):
      np.testing.assert_array_equal(outcome.remote_share(locality=locality), np.zeros((2, 1)))

  @pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
      ({"period": 0}, ValueError, "period: expected at least 1, got 0"),
      ({"period": 2**31}, ValueError, "period: expected at most 2147483647"),
      ({"period": 1.5}, TypeError, "period: expected an int, got float"),
      ({"period": None}, TypeError, "period: expected an int, got NoneType"),
      ({"decay": 0.0}, ValueError, r"decay: expected a number in \(0, 1\], got 0.0"),
      ({"decay": 1.5}, ValueError, r"decay: expected a number in \(0, 1\], got 1.5"),
      ({"decay": np.nan}, ValueError, r"decay: expected a number in \(0, 1\], got nan"),
      ({"decay": "x"}, TypeError, "decay: expected a number, got str"),
    ],
  )
  def test_wrong_histories(self, options, kind, message):
    for name in ("none", "eplb"):
      with pytest.raises(kind, match=message):
        simulate(small_loads(), setting(), (name,), **options)

  def test_histories_take_numbers_of_numpy(self):
    loads, options = small_loads(), {"period": np.int64(2), "decay": np.float32(0.5)}
    one, other = (
      simulate(loads, setting(), ("eplb",), **each)["eplb"].placed
      for each in (options, {"period": 2, "decay": 0.5})
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)

  def test_unknown_strategy(self):
    with pytest.raises(ValueError, match=r"strategy: expected one of .*got 'best'"):
      simulate(small_loads(), setting(), ("best",))
    with pytest.raises(ValueError, match="strategies: expected at least one name, got none"):
      simulate(small_loads(), setting(), ())
    with pytest.raises(TypeError, match="strategies: expected a sequence of names, got 'none'"):
      simulate(small_loads(), setting(), "none")


class TestCost:
  def test_one_rank_has_no_exchange_and_no_copies(self):
    one = setting(num_ranks=1, domain_size=1, tokens=64)
    outcomes = simulate(small_loads().sum(axis=2, keepdims=True), one, ("quota",))
    forward = outcomes["quota"].forward
    assert forward.exchange.max() == forward.copy.max() == 0
    np.testing.assert_array_equal(remote_tokens(one, outcomes["quota"].placed), np.zeros((3, 1, 1)))

  # Of data sheets only the network counts, and of the others' rates all.
  @pytest.mark.parametrize(
    "rate",
    [
      "matmuls",
      *(
        name
        for name, (unit, _) in FACTS.items()
        if "/s" in unit and name not in ("peak", "memory_rate", "link_rate")
      ),
    ],
  )
  def test_faster_is_never_slower(self, rate):
    """Each rate alone, in one domain and in two, where the network counts."""
    loads = small_loads()
    seconds = []
    for factor in (0.5, 1.0, 4.0):
      if rate == "matmuls":
        matmuls = tuple(each.scaled("test", factor) for each in RATES.matmuls)
        rates = dataclasses.replace(RATES, matmuls=matmuls)
      else:
        rates = RATES.replace("test", **{rate: RATES[rate] * factor})
      step = []
      for domain in (4, 2):
        case = setting(device=rates, domain_size=domain)
        outcomes = simulate(loads, case, ("none", "quota", "ideal"))
        step += [step_seconds(outcome, outcomes["ideal"]) for outcome in outcomes.values()]
      seconds.append(step)
    assert (np.diff(seconds, axis=0) <= 1e-15).all()
    if rate != "reduce_rate":  # hidden on this machine
      assert (np.array(seconds[0]) > np.array(seconds[2])).any()

  def test_more_skew_costs_more(self):
    shares = []
    for ratio in (1.0, 1.5, 2.5):
      loads = np.stack([zipf_loads(0, 128, 64, 2048, 8, ratio)])[None]
      big = Setting(
        model=MODELS["Qwen3-235B"], device=RATES, num_ranks=64, domain_size=64, tokens=2048
      )
      outcomes = simulate(loads, big, ("none", "ideal"))
      shares.append(share_of_ideal(outcomes["none"], outcomes["ideal"]))
    assert 1 > shares[0] > shares[1] > shares[2]

  def test_tiles_and_rounds(self):
    loads = small_loads(1)
    tiled = RATES.replace("test", matmul_tile=1.0)
    fine, coarse = (
      simulate(loads, setting(device=rates), ("none",))["none"].forward.matmul[0, 0]
      for rates in (tiled, RATES)
    )
    assert coarse > fine
    exact = simulate(loads, setting(device=tiled), ("none",))["none"]
    rows = exact.placed.load.max()
    assert fine == pytest.approx(rows * SMALL.row_flops / RATES.matmul_rate(4096, 1536))
    limited = simulate(loads, setting(capacity_factor=1.0), ("none",))["none"]
    extra = limited.forward.exchange - exact.forward.exchange
    rounds = -(-rows // 32) - 1
    expected = 2 * rounds * RATES["exchange_seconds"] * RATES["routing_forward"]
    assert extra[0, 0] == pytest.approx(expected)

  def test_relays_shorten_copies_and_locality_the_exchange(self):
    loads = np.stack([zipf_loads(0, 128, 64, 2048, 8, 6.0)])[None]
    big = Setting(
      model=MODELS["Qwen3-235B"], device=RATES, num_ranks=64, domain_size=64, tokens=2048
    )
    quota = simulate(loads, big, ("quota",))["quota"]
    direct = dataclasses.replace(big, relay=False)
    assert copy_seconds(big, quota.placed) < copy_seconds(direct, quota.placed)
    made = balancers.make("quota", uep.BalanceConfig(), big.plan_cost)
    careless = dataclasses.replace(big, locality=False)
    times = [layer_times(s, made, quota.placed)[0].exchange[0, 0] for s in (big, careless)]
    assert times[0] < times[1]

  def test_bytes_of_everything_that_moves(self):
    """In bf16, but dispatch as it is told, and all that trains an expert."""
    fast = dict.fromkeys(("dispatch_rate", "combine_rate", "network_rate"), 1e29)
    rates = RATES.replace("test", **fast, copy_rate=1.0, reduce_rate=1.0, exchange_seconds=0.0)
    exposed = {"copy_seconds": 0.0, "copy_hop_seconds": 0.0, "reduce_exposed": 1.0}
    rates = rates.replace("test", **exposed, copy_exposed_forward=1.0)
    case = setting(device=rates, domain_size=2)
    outcomes = simulate(np.repeat(small_loads(1), 2, axis=0), case, ("quota", "eplb"), period=1)
    quota, moves = outcomes["quota"], outcomes["eplb"]

    params, placed = SMALL.expert_params, quota.placed
    busiest = np.maximum(placed.egress.max(axis=-1), placed.ingress.max(axis=-1))
    assert busiest.min() > 0 and moves.placed.moved.max() > 0
    np.testing.assert_allclose(quota.forward.copy, 2 * params * busiest)
    np.testing.assert_allclose(quota.backward.reduce, 2 * params * placed.direct)
    trained = 2 + 4 + 4 + 4  # the weight, its float32 copy, two moments
    moved = params * moves.placed.moved.max(axis=-1)
    np.testing.assert_allclose(moves.forward.move, trained * moved)
    served = dataclasses.replace(case, training=False)
    balancer = balancers.make("eplb", uep.BalanceConfig(replica_slots=2), case.plan_cost, period=1)
    np.testing.assert_allclose(layer_times(served, balancer, moves.placed)[0].move, 2 * moved)

    def exchange(token_bytes, **slow):
      own = dataclasses.replace(case, token_bytes=token_bytes, device=rates.replace("test", **slow))
      return exchange_seconds(own, placed)

    both = exchange(2, dispatch_rate=1.0, combine_rate=1.0)
    np.testing.assert_allclose(exchange(2, dispatch_rate=1.0), both / 2)
    np.testing.assert_allclose(exchange(1, dispatch_rate=1.0), both / 4)
    np.testing.assert_allclose(exchange(1, combine_rate=1.0), both / 2)
    network = exchange(2, network_rate=1.0)
    np.testing.assert_allclose(exchange(1, network_rate=1.0), network * 3 / 4)
    assert both.min() > 0 and network.min() > 0

  def test_training_has_a_backward_pass_and_prefill_none(self):
    loads = small_loads()
    training = simulate(loads, setting(), ("quota",))["quota"]
    prefill = simulate(loads, setting(training=False), ("quota",))["quota"]
    assert prefill.backward.total.max() == 0 < training.backward.total.min()
    np.testing.assert_array_equal(training.forward.matmul, prefill.forward.matmul)

  @pytest.mark.parametrize(
    "changes, message",
    [
      ({"domain_size": 3}, "domain_size: expected a divisor of 4 ranks, got 3"),
      ({"num_ranks": 3, "domain_size": 3}, "num_ranks: expected a divisor of 8 experts, got 3"),
      ({"tokens": 0}, "tokens: expected at least 1, got 0"),
      ({"replica_slots": -1}, "replica_slots: expected at least 0"),
    ],
  )
  def test_wrong_settings(self, changes, message):
    with pytest.raises(ValueError, match=message):
      setting(**changes)

  def test_numbers_are_integers(self):
    assert type(setting(num_ranks=np.int64(4)).num_ranks) is int
    for name in ("num_ranks", "tokens", "replica_slots"):
      with pytest.raises(TypeError, match=f"{name}: expected an int, got float"):
        setting(**{name: 4.0})

  def test_predictions_are_near_what_was_measured(self):
    """Bounds of today's errors: forward and copies within 10 %, backward over by up to 30 %.

    The layer on kernels is predicted up to 17 % too fast. It was measured when less of its copies
    and their gradients was hidden than the description says now.
    """
    for point in points():
      backward = "both" in point.what or "backward" in point.what
      low, high = (-0.10, 0.30) if backward else (-0.10, 0.10)
      if point.what.startswith("H200 layer"):
        low = -0.17
      assert low <= point.error <= high, point

  def test_two_nodes_cost_as_much_more_as_measured(self):
    times = {point.what: point for point in points() if point.what.startswith("H200 layer")}
    assert len(times) == 6
    for direction in ("forward", "both"):  # as above, beside matmuls alone
      one, two = (times[f"H200 layer, {what}, {direction}"] for what in ("kernels", "as two nodes"))
      measured = two.measured / one.measured
      assert two.predicted / one.predicted == pytest.approx(measured, rel=0.1)


SIZES = {"num_experts": 32, "num_ranks": 8, "top_k": 4, "steps": 24, "layers": 2}


class TestTraffic:
  @pytest.mark.parametrize("name", sorted(traffic.TRAFFIC))
  def test_sums_and_imbalance(self, name):
    kind = traffic.TRAFFIC[name]
    loads = traffic.generate_loads(0, kind, tokens=256, **SIZES)
    assert loads.shape == (24, 2, 8, 32) and loads.dtype == np.int32
    assert (loads.sum(axis=3) == 1024).all() and 0 <= loads.min() <= loads.max() <= 256
    load_G = loads.sum(axis=2).reshape(24, 2, 8, 4).sum(axis=3)
    imbalance = (load_G.max(axis=2) / load_G.mean(axis=2)).mean()
    if kind.imbalance is not None:
      assert imbalance == pytest.approx(kind.imbalance, rel=0.15)
    again = traffic.generate_loads(0, kind, tokens=256, **SIZES)
    np.testing.assert_array_equal(loads, again)
    totals = traffic.generate_totals(0, kind, tokens=256, **SIZES)
    assert np.abs(totals - loads.sum(axis=2)).max() <= 1

  def correlation(self, kind, steps):
    p = np.log(traffic.probabilities(0, kind, **SIZES)[:, 0])
    p -= p.mean(axis=1, keepdims=True)
    return np.corrcoef(p[0], p[steps])[0, 1]

  def test_drift_is_slow_noise_is_not(self):
    drifting = traffic.Traffic(drift=0.3, drift_steps=20)
    assert self.correlation(drifting, 1) > 0.9 > self.correlation(drifting, 20)
    assert abs(self.correlation(traffic.Traffic(noise=0.3), 1)) < 0.6

  def test_phases_change_the_hot_experts(self):
    phases = traffic.Traffic(imbalance=2.0, phase_steps=10)
    assert self.correlation(phases, 9) > 0.99 > 0.6 > self.correlation(phases, 10)

  @pytest.mark.parametrize("noise", [0.0, 0.3, 4.0])
  def test_every_imbalance_of_the_range_is_reached(self, noise):
    """Also where ranks are so uneven by themselves that a base evens them."""
    kind = traffic.Traffic(noise=noise)
    least, most = traffic.imbalance_range(0, kind, **SIZES)
    assert 1 <= least < most <= 8
    for wanted in (least, (least + most) / 2, most):
      own = dataclasses.replace(kind, imbalance=wanted)
      load_G = traffic.probabilities(0, own, **SIZES).reshape(48, 8, 4).sum(axis=2)
      found = (load_G.max(axis=1) / load_G.mean(axis=1)).mean()
      assert found == pytest.approx(wanted, abs=0.02)

  def test_wrong_traffic(self):
    with pytest.raises(ValueError, match=r"noise: expected a number in \[0, 10\], got -1"):
      traffic.Traffic(noise=-1)
    with pytest.raises(ValueError, match=r"imbalance: expected a number in \["):
      traffic.probabilities(0, traffic.Traffic(imbalance=30.0), **SIZES)

  @pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
      ({"phase_steps": 1.5}, TypeError, "phase_steps: expected an int, got float"),
      ({"phase_steps": 0}, ValueError, "phase_steps: expected at least 1, got 0"),
      ({"burst_steps": 1.5}, TypeError, "burst_steps: expected an int, got float"),
      ({"burst_steps": None}, TypeError, "burst_steps: expected an int, got NoneType"),
      ({"drift": 0.1, "drift_steps": None}, TypeError, "drift_steps: expected a number, got None"),
      ({"burst_factor": None}, TypeError, "burst_factor: expected a number, got NoneType"),
      ({"noise": "x"}, TypeError, "noise: expected a number, got str"),
      ({"imbalance": 0.5}, ValueError, r"imbalance: expected a number in \[1, 1e9\], got 0.5"),
      (
        {"drift_steps": np.nan},
        ValueError,
        r"drift_steps: expected a number in \[1, 1e9\], got nan",
      ),
    ],
  )
  def test_traffic_of_wrong_kinds(self, values, kind, message):
    with pytest.raises(kind, match=message):
      traffic.Traffic(**values)

  def test_traffic_takes_numbers_of_numpy(self):
    kind = traffic.Traffic(imbalance=np.float32(2), phase_steps=np.int64(3))
    assert kind == traffic.Traffic(imbalance=2.0, phase_steps=3)

  @pytest.mark.parametrize(
    ("sizes", "kind", "message"),
    [
      ({"steps": 0}, ValueError, "steps: expected at least 1, got 0"),
      ({"layers": 0}, ValueError, "layers: expected at least 1, got 0"),
      ({"layers": 1.5}, TypeError, "layers: expected an int, got float"),
      ({"top_k": 2.5}, TypeError, "top_k: expected an int, got float"),
      ({"tokens": 2.5}, TypeError, "tokens: expected an int, got float"),
      ({"num_ranks": 7}, ValueError, "num_experts: expected a multiple of 7 ranks, got 32"),
    ],
  )
  def test_wrong_sizes(self, sizes, kind, message):
    for generate in (traffic.generate_loads, traffic.generate_totals):
      with pytest.raises(kind, match=message):
        generate(0, traffic.TRAFFIC["steady"], **{"tokens": 64, **SIZES, **sizes})
    given = {"tokens": np.int64(64), **SIZES, "top_k": np.int32(4)}
    assert traffic.generate_totals(0, traffic.TRAFFIC["steady"], **given).shape == (24, 2, 32)


def test_bands():
  assert band([2.0]) == (2.0, 2.0, 2.0) and str(band([2.0])) == "2.000"
  wide = band([1.0, 2.0, 3.0])
  assert wide.mean == 2 and 1 <= wide.low < 2 < wide.high <= 3
