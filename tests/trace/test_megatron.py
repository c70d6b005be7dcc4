"""Importing Megatron-LM's router traces."""

import itertools
import json
import os

import numpy as np
import pytest
from router_traces import E, G, K, chosen, record, write, write_run

from ultraep_jax import testing
from ultraep_jax.config import BalanceConfig
from ultraep_jax.trace import TraceError, import_megatron, megatron
from ultraep_jax.trace import disk as files
from ultraep_jax.trace.format import COLUMNS, Manifest
from ultraep_jax.trace.summary import summarise


def test_loads_and_plans(tmp_path):
  write_run(tmp_path / "from")
  trace = import_megatron(tmp_path / "from", tmp_path / "to", num_experts=E, expert_bytes=10)
  assert len(trace) == 6 and trace.layers == ["decoder 002", "decoder 010"]
  assert not trace.manifest.measured and trace.manifest.name == "from"
  config = BalanceConfig(objective="balance")
  for i in range(len(trace)):
    step, layer = int(trace.step_N[i]), int(trace.layer_N[i].split()[1])
    np.testing.assert_array_equal(trace.load_NGE[i], chosen(100 * step + layer)[0])
    testing.assert_legal_plan(trace.plan(i), trace.load_NGE[i], config)
  np.testing.assert_array_equal(trace.after_NG, trace.planned_NG)
  assert trace.imbalance_after_N.max() < trace.imbalance_before_N.min()
  np.testing.assert_array_equal(trace.replica_bytes_N, 10 * trace.replicas_N)


def test_buffers_are_those_of_the_rank_with_most_tokens(tmp_path):
  """32 rows of one rank's 16 tokens; the mean of all would be 14, and make three rounds."""
  for rank, tokens in enumerate((16, 4, 4, 4)):
    write(tmp_path / "from", [record(0, 0, [[0, 1]] * tokens)], rank)
  config = BalanceConfig(objective="balance", replica_slots=0, capacity_factor=1.0)
  trace = import_megatron(tmp_path / "from", tmp_path / "to", num_experts=E, config=config)
  assert trace.after_NG.tolist() == [[56, 0, 0, 0]] and trace.rounds_N.tolist() == [2]


@pytest.mark.parametrize("slots", [0, 1])
def test_what_is_counted_of_a_plan(slots, tmp_path):
  """One assignment at a time; neither domains nor buffers divide the loads."""
  rng = np.random.default_rng(0)
  index_NGTK = rng.integers(0, E, (4, G, 13, K)) * (rng.random((4, G, 1, K)) < 0.6)
  for rank in range(G):
    write(tmp_path / "from", [record(s, 0, index_NGTK[s, rank]) for s in range(4)], rank)
  config = BalanceConfig(
    objective="balance", replica_slots=slots, domain_size=2, capacity_factor=1.0
  )
  trace = import_megatron(tmp_path / "from", tmp_path / "to", num_experts=E, config=config)
  uneven = 0
  for i, index_GTK in enumerate(index_NGTK):
    home_GTK = index_GTK // (E // G)
    of_domain = np.bincount(home_GTK.reshape(-1) // 2, minlength=G // 2)
    assert trace.floor_N[i] == next(n for n in itertools.count() if 2 * n >= of_domain.max())
    dest_GTK = testing.brute_force_routes(index_GTK, trace.plan(i))[0]
    after_G = np.bincount(dest_GTK.reshape(-1), minlength=G)
    np.testing.assert_array_equal(trace.after_NG[i], after_G)
    rows = 32  # of 13 * 2 assignments, in eights
    assert trace.rounds_N[i] == next(n for n in itertools.count(1) if n * rows >= after_G.max())
    assert trace.remote_N[i] == (dest_GTK != np.arange(G)[:, None, None]).sum()
    uneven += of_domain.max() % 2
  assert uneven and (trace.rounds_N > 1).any()


def test_groups_of_ranks(tmp_path):
  write_run(tmp_path / "from", ranks=2 * G, steps=1)
  trace = import_megatron(tmp_path / "from", tmp_path / "to", num_experts=E, num_ranks=G)
  assert trace.group_N.tolist() == [0, 1, 0, 1]
  np.testing.assert_array_equal(trace.load_NGE[1], chosen(2 + 1)[0])


def test_every_column_is_what_the_layers_would_have_recorded(tmp_path):
  """One assignment at a time; the busiest domain of two ranks has no even load."""
  config = BalanceConfig(
    replica_slots=1,
    objective="balance",
    domain_size=2,
    capacity_factor=1.0,
    min_tokens_per_replica=3,
  )
  rng = np.random.default_rng(6)
  index_GTK = np.minimum(rng.zipf(1.9, (2 * G, 41, K)) - 1, E - 1)
  index_GTK[rng.random(index_GTK.shape) < 0.05] = -1
  for rank in range(2 * G):
    write(tmp_path / "from", [record(3, 5, index_GTK[rank])], rank)
  trace = import_megatron(
    tmp_path / "from", tmp_path / "to", num_experts=E, num_ranks=G, config=config, expert_bytes=7
  )
  uneven = rounds = 0
  for group in range(2):
    index = index_GTK[group * G : group * G + G]
    one = {name: getattr(trace, name)[group] for name in COLUMNS}
    plan = trace.plan(group)
    dest_GTK, _, rows_GP = testing.brute_force_routes(index, plan)
    testing.assert_legal_plan(plan, one["load_NGE"], config)
    for rank, expert in np.ndindex(G, E):
      assert one["load_NGE"][rank, expert] == (index[rank] == expert).sum()
    went = [int((dest_GTK == rank).sum()) for rank in range(G)]
    assert one["planned_NG"].tolist() == one["after_NG"].tolist() == went
    of_domain = [int((index // 4 == domain).sum()) for domain in range(2)]
    busiest = max(of_domain)
    assert one["floor_N"] == min(n for n in range(busiest) if 2 * n >= busiest)
    filled = one["replica_expert_NGS"] >= 0
    assert filled.any() and one["replica_bytes_N"] == 7 * filled.sum()
    assert ((one["replica_parent_NGS"] >= 0) == filled).all()
    np.testing.assert_array_equal(one["replica_load_NGS"], rows_GP[:, E // G :])
    own_G11 = np.arange(G)[:, None, None]
    assert one["remote_N"] == ((dest_GTK != own_G11) & (dest_GTK >= 0)).sum()
    assert one["rounds_N"] == -(-max(went) // 88)  # rows of 41 tokens of 2 choices, by eights
    assert one["masked_N"] == (index == -1).sum() and one["invalid_N"] == 0
    assert (one["step_N"], one["layer_N"], one["group_N"]) == (3, "decoder 005", group)
    uneven, rounds = uneven + busiest % 2, max(rounds, int(one["rounds_N"]))
  assert uneven and rounds > 1


def test_repeated_lines_are_microbatches_and_blocks_are_layers(tmp_path):
  for rank in range(G):
    first, second, third = (chosen(seed)[1][rank] for seed in (1, 2, 3))
    records = [record(0, 1, first), record(0, 1, third, block="mtp", mtp_idx=0)]
    write(tmp_path / "from", [*records, record(0, 1, second)], rank)
  trace = import_megatron(tmp_path / "from", tmp_path / "to", num_experts=E)
  keys = list(zip(trace.layer_N.tolist(), trace.microbatch_N.tolist(), strict=True))
  assert keys == [("decoder 001", 0), ("mtp 0 001", 0), ("decoder 001", 1)]
  for i, seed in enumerate((1, 3, 2)):
    np.testing.assert_array_equal(trace.load_NGE[i], chosen(seed)[0])


def test_masked_choices_are_counted(tmp_path):
  write(tmp_path / "from", [record(0, 1, [[0, -1], [3, 7]])], 0)
  trace = import_megatron(tmp_path / "from", tmp_path / "to", num_experts=E)
  assert trace.load_NGE[0].tolist() == [[1, 0, 0, 1, 0, 0, 0, 1]]
  assert trace.masked_N.tolist() == [1] and trace.invalid_N.tolist() == [0]


def test_indices_of_more_experts_are_refused(tmp_path):
  """The largest of all files is named, as it tells how many experts there are at least."""
  write(tmp_path / "from", [record(0, 1, [[0, E]]), record(0, 2, [[-1, 7]])], 0)
  write(tmp_path / "from", [record(0, 1, [[0, 1]]), record(0, 2, [[11, 10]])], 1)
  message = r"rank1.jsonl, line 2: .* below 8 \(num_experts, --experts\), got 11, the largest"
  with pytest.raises(TraceError, match=message):
    import_megatron(tmp_path / "from", tmp_path / "to", num_experts=E)
  write(tmp_path / "from", [record(0, 1, [[0, -2]])], 0)
  with pytest.raises(TraceError, match=r"rank0.jsonl, line 1: .* at least -1 \(masked\), got -2"):
    import_megatron(tmp_path / "from", tmp_path / "to", num_experts=E)
  assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
  ("lines", "message"),
  [
    ([record(0, 1, [[0, 1]], rank=0)], "line 1: rank: expected 1, as in the file's name, got 0"),
    ([record(0, 1, [[0, 1]], num_tokens=3)], "line 1: num_tokens: expected 1, its top_indices, g"),
    ([record(0, 1, [], num_tokens=3)], "line 1: num_tokens: expected 0, its top_indices, got 3"),
    ([record(0, 1, [[0, 1]], num_tokens=None)], "num_tokens: expected 1, its .*, got None"),
    ([record(0, 1, [[0, 1]], topk=3)], "line 1: topk: expected 2, the experts in each row of .* 3"),
    (
      [record(0, 1, [[0, 1]]), record(0, 2, [[0, 1, 2]], topk=3)],
      "rank1.jsonl, line 2: .* expected 2 experts of each token, as in .*rank0.jsonl, line 1, ",
    ),
    (
      [record(0, 1, [[0]], topk=1)],
      "line 1: .*expected 2 experts of each token, .* got 1",
    ),
    (
      [record(0, 1, [[0, 1]], logit_shape=[1, 16])],
      r"logit_shape: expected \[1, 8\], its tokens and num_experts \(--experts\), got \[1, 16\]",
    ),
  ],
)
def test_lines_that_contradict_others_are_refused(lines, message, tmp_path):
  write(tmp_path / "from", [record(0, 1, [[0, 1]], rank=0, logit_shape=[1, E])], 0)
  write(tmp_path / "from", lines, 1)
  with pytest.raises(TraceError, match=message):
    import_megatron(tmp_path / "from", tmp_path / "to", num_experts=E)
  assert not (tmp_path / "to").exists()


def test_a_copy_of_a_file_is_refused(tmp_path):
  write_run(tmp_path / "from", steps=1)
  (tmp_path / "from" / "router_trace_rank1 (copy).jsonl").write_text("")
  with pytest.raises(TraceError, match=r"expected router_trace_rank and a number, got .*\(copy\)"):
    import_megatron(tmp_path / "from", tmp_path / "to", num_experts=E)


def test_a_killed_run_keeps_its_whole_steps(tmp_path):
  write_run(tmp_path / "from", steps=3)
  last = tmp_path / "from" / f"router_trace_rank{G - 1}.jsonl"
  text = last.read_text()
  last.write_text(text[: int(len(text) * 0.9)])
  trace = import_megatron(tmp_path / "from", tmp_path / "to", num_experts=E)
  assert len(trace) == 5
  assert trace.manifest.metadata["incomplete_records"] == 1
  assert trace.manifest.metadata["damaged_lines"] == 1


def test_a_trace_without_its_manifest_is_kept(tmp_path):
  write_run(tmp_path / "from", steps=1)
  import_megatron(tmp_path / "from", tmp_path / "to", num_experts=E)
  (tmp_path / "to" / files.MANIFEST).unlink()
  for number in range(4):
    (tmp_path / "to" / f"choices-0-0-{number:08d}.npz").write_bytes(b"")
  before = sorted((tmp_path / "to").iterdir())
  with pytest.raises(TraceError) as error:
    import_megatron(tmp_path / "from", tmp_path / "to", num_experts=E)
  assert "got chunk-00000000.npz, choices-0-0-00000000.npz" in str(error.value)
  assert "and 2 more but no trace.json; bring trace.json back if" in str(error.value)
  assert sorted((tmp_path / "to").iterdir()) == before


def test_an_import_that_is_stopped_leaves_nothing(tmp_path, monkeypatch):
  """While it writes chunks, and when they have their names already."""
  write_run(tmp_path / "from", steps=3)
  monkeypatch.setattr(megatron, "_PER_CHUNK", 2)
  write_chunks, publish = files.write_chunks, files.publish
  for name, original, stop in (("write_chunks", write_chunks, 2), ("publish", publish, 6)):
    calls = itertools.count(1)

    def stopped(*arguments, calls=calls, original=original, stop=stop):
      if next(calls) == stop:
        raise KeyboardInterrupt
      return original(*arguments)

    monkeypatch.setattr(files, name, stopped)
    with pytest.raises(KeyboardInterrupt):
      import_megatron(tmp_path / "from", tmp_path / "to", num_experts=E)
    monkeypatch.setattr(files, name, original)
    assert not list((tmp_path / "to").iterdir())
  trace = import_megatron(tmp_path / "from", tmp_path / "to", num_experts=E)
  assert trace.step_N.tolist() == [0, 0, 1, 1, 2, 2] and len(files.chunks(tmp_path / "to")) == 3


def test_microbatches_behind_a_damaged_line_are_left_out(tmp_path):
  """Of the next step there, which may be short of the damaged one; else they would be shifted."""
  for rank in range(G):
    steps = [record(s, 1, chosen(10 * s + m)[1][rank]) for s in range(3) for m in range(2)]
    write(tmp_path / "from", steps, rank)
  file = tmp_path / "from" / "router_trace_rank1.jsonl"
  lines = file.read_text().splitlines(keepends=True)
  lines[2] = lines[2][:9] + "\n"  # the first microbatch of step 1
  file.write_text("".join(lines))
  trace = import_megatron(tmp_path / "from", tmp_path / "to", num_experts=E)
  keys = list(zip(trace.step_N.tolist(), trace.microbatch_N.tolist(), strict=True))
  assert keys == [(0, 0), (0, 1), (2, 0), (2, 1)]
  for i, (step, microbatch) in enumerate(keys):
    np.testing.assert_array_equal(trace.load_NGE[i], chosen(10 * step + microbatch)[0])
  assert trace.manifest.metadata["incomplete_records"] == 2
  assert trace.manifest.metadata["damaged_lines"] == 1


LINE = '{"step": %s, "layer": %s, "top_indices": %s}'


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("[]", 'line 1: expected a record with "step", "layer" and "top_indices"'),
    ('{"step": 1, "layer": 2}', "line 1: expected a record with"),
    ('{"step": "1", "layer": 2, "top_indices": [[0]]}', "expected integers, got step '1'"),
    ('{"step": 1, "layer": 2, "top_indices": [[0], [0, 1]]}', "expected rows of equal length"),
    ('{"step": 1, "layer": 2, "top_indices": [[NaN]]}', "expected rows of integers, got float64"),
    ('{"step": 1, "layer": 2, "top_indices": [0, 1]}', "expected rows of integers"),
    (LINE % ("1", "2", "[[1e400]]"), "expected rows of integers, got float64"),
    (LINE % ("1", "2", f"[[{2**70}]]"), "expected rows of integers, got object"),
    (LINE % ("1", "2", "[[true]]"), "expected rows of integers, got bool"),
    (LINE % ("1", "2", '"text"'), "expected rows of integers"),
    (LINE % ("1", "2", '{"0": 1}'), "expected rows of integers"),
    (LINE % ("1", "2", "null"), "expected rows of integers"),
    (LINE % ("1", "2", "[" * 99 + "1" + "]" * 99), "top_indices: expected rows of"),
    (LINE % ("1", "2", "[[0]]") + " x", "expected a step and layer that all ranks have, got none"),
    (LINE % (2**63, "2", "[[0]]"), "expected a step and a layer, got 9223372036854775808 and 2"),
    (LINE % (10**4000, "2", "[[0]]"), "expected a step and a layer, got 10"),
    (LINE % ("1", "-1", "[[0]]"), "expected a step and a layer, got 1 and -1"),
    (LINE % ("1", "true", "[[0]]"), "expected integers, got step 1 and layer True"),
    (LINE % ("1", '2, "block": "\\ud800"', "[[0]]"), "expected a block's name, got '.ud800'"),
    (LINE % ("1", '2, "block": "\\u0000"', "[[0]]"), "expected a block's name"),
    (LINE % ("1", '2, "block": {"x": []}', "[[0]]"), "expected a block's name, got {'x'"),
    (LINE % ("1", '2, "mtp_idx": null', "[[0]]"), "expected a block's name, got .* and None"),
    ("[" * 10**5, "expected a step and layer that all ranks have, got none"),
    ('{"step": ' * 10**5, "expected a step and layer that all ranks have, got none"),
    (LINE % ("9" * 5000, "2", "[[0]]"), "expected a step and layer that all ranks have, got none"),
    ("not json", "expected a step and layer that all ranks have, got none"),
    ("", "expected a step and layer that all ranks have, got none"),
  ],
)
def test_foreign_lines(tmp_path, line, message):
  (tmp_path / "router_trace_rank0.jsonl").write_text(line + "\n")
  with pytest.raises(TraceError, match=message):
    import_megatron(tmp_path, tmp_path / "to", num_experts=E)
  assert not (tmp_path / "to").exists()


def test_what_is_there_instead_of_a_file(tmp_path):
  (tmp_path / "router_trace_rank0.jsonl").mkdir()
  with pytest.raises(TraceError, match=r"router_trace_rank0.jsonl: expected a file"):
    import_megatron(tmp_path, tmp_path / "to", num_experts=E)
  (tmp_path / "router_trace_rank0.jsonl").rmdir()
  os.mkfifo(tmp_path / "router_trace_rank0.jsonl")
  with pytest.raises(TraceError, match=r"router_trace_rank0.jsonl: expected a file"):
    import_megatron(tmp_path, tmp_path / "to", num_experts=E)
  (tmp_path / "router_trace_rank0.jsonl").unlink()
  for name in ("0", "00"):
    (tmp_path / f"router_trace_rank{name}.jsonl").write_text(LINE % ("1", "2", "[[0]]"))
  with pytest.raises(TraceError, match=r"expected one file of a rank, got .* of rank 0 too"):
    import_megatron(tmp_path, tmp_path / "to", num_experts=E)
  assert not (tmp_path / "to").exists()


def test_a_trace_that_is_there_already_stays(tmp_path):
  write_run(tmp_path / "from", steps=1)
  (tmp_path / "folder" / files.MANIFEST).mkdir(parents=True)
  (tmp_path / "link").mkdir()
  (tmp_path / "link" / files.MANIFEST).symlink_to(tmp_path / "nothing")

  def written_meanwhile(items):
    if len(items) != G:  # the second loop, over records
      files.write_manifest(tmp_path / "raced", other)
    return items

  other = Manifest(name="another", num_ranks=G, num_experts=E, replica_slots=1)
  for to, progress in (("folder", iter), ("link", iter), ("raced", written_meanwhile)):
    with pytest.raises(TraceError, match="expected a folder without a trace, got one"):
      import_megatron(tmp_path / "from", tmp_path / to, num_experts=E, progress=progress)
  assert files.read_manifest(tmp_path / "raced") == other
  assert [path.name for path in (tmp_path / "raced").iterdir()] == [files.MANIFEST]


def test_numbers_and_names_from_elsewhere_can_be_read(tmp_path):
  source = tmp_path / os.fsdecode(b"run \xff")
  write(source, [record(-(2**63), 10**6, [[0, 7]], block="\u00e9 "), record(1, 0, [])], 0)
  trace = import_megatron(source, tmp_path / "to", num_experts=E)
  assert trace.manifest.name == "run ?" and trace.load_NGE.sum(axis=(1, 2)).tolist() == [2, 0]
  assert trace.step_N.tolist() == [-(2**63), 1] and not trace.problems
  json.dumps(summarise(trace))


def test_wrong_folders_and_numbers(tmp_path):
  with pytest.raises(TraceError, match=r"expected router_trace_rank\*.jsonl, got no such file"):
    import_megatron(tmp_path, tmp_path / "to", num_experts=E)
  write_run(tmp_path / "from", steps=1)
  for arguments, message in (
    ({"num_experts": 6}, "num_experts: expected a multiple of 4 ranks, got 6"),
    ({"num_experts": E, "num_ranks": 3}, "num_ranks: expected a divisor of 4 files, got 3"),
    ({"num_experts": E, "config": BalanceConfig()}, 'expected objective="balance", got "time"'),
    (
      {"num_experts": E, "config": BalanceConfig(objective="balance", strategy="none")},
      "expected strategy=\"quota\", got 'none'",
    ),
    (
      {"num_experts": E, "config": BalanceConfig(objective="balance", domain_size=3)},
      "domain_size: expected a divisor of 4 ranks, got 3",
    ),
    ({"num_experts": 10**12}, "expected records of at most 536870912 bytes"),
    ({"num_experts": E, "expert_bytes": 2**40 + 1}, "expected at most 1099511627776, got 10995"),
    ({"num_experts": E, "expert_bytes": 10**400}, "expert_bytes: expected at most 1099511627776"),
  ):
    with pytest.raises(ValueError, match=message):
      import_megatron(tmp_path / "from", tmp_path / "to", **arguments)
    assert not (tmp_path / "to").exists()
  import_megatron(tmp_path / "from", tmp_path / "to", num_experts=E)
  with pytest.raises(TraceError, match="expected a folder without a trace, got one"):
    import_megatron(tmp_path / "from", tmp_path / "to", num_experts=E)
  (tmp_path / "from" / "router_trace_rank1.jsonl").unlink()
  with pytest.raises(TraceError, match=r"expected the ranks 0 to 3, got none of \[1\]"):
    import_megatron(tmp_path / "from", tmp_path / "other", num_experts=E)
