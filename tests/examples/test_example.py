"""The example program: its files, resuming, accumulation, strategies and messages."""

import functools
import json
import pathlib
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import traces
import train_tiny_moe
from tiny_moe import data, report
from tiny_moe.settings import Settings, flag
from tiny_moe.training import Training
from train_tiny_moe import main

import ultraep_jax as uep

# One layer and few ranks, because compilation takes most of the time.
# The auxiliary loss of a whole batch is not the mean of its parts'.
ALL_RANKS = shlex.split(
  "--layers 1 --width 16 --experts 4 --batch 8 --seq 8 --steps 4 --balance-loss 0"
)
TINY = [*ALL_RANKS, "--ranks", "2"]
EXPERT_SHAPES = {"wi_gate": (4, 16, 32), "wi_up": (4, 16, 32), "wo": (4, 32, 16)}


@pytest.fixture(scope="module", autouse=True)
def surroundings():
  """Compiles each setting once and quickly. Adam of optax takes the power of a float to an int."""

  def training_of(settings: Settings) -> Training:
    training = compiled(settings)  # a step takes the memory of the state
    return training._replace(state=jax.tree.map(jnp.copy, training.state))

  compiled = functools.cache(train_tiny_moe.make_training)
  with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
    patch.setattr(train_tiny_moe, "make_training", training_of)
    yield


def losses(results) -> list[float]:
  return [record["loss"] for record in results["history"]]


def read(path: pathlib.Path) -> list[dict[str, float]]:
  return [json.loads(line) for line in path.read_text().splitlines()]


def saved_state(folder: pathlib.Path, step: int):
  """Path and array of everything that a checkpoint holds, read without knowing its structure."""
  with ocp.CheckpointManager(folder) as manager:
    parts = ocp.args.Composite(state=ocp.args.StandardRestore())
    state = manager.restore(step, args=parts)["state"]
  leaves = jax.tree_util.tree_flatten_with_path(state)[0]
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """An uninterrupted run with checkpoints: its folder and results."""
  folder = tmp_path_factory.mktemp("finished")
  files = ["--out", str(folder), "--checkpoint-dir", str(folder / "state")]
  return folder, main([*TINY, *files, "--checkpoint-every", "2"])


def test_files_of_a_run(finished):
  folder, results = finished
  assert uep.trace.read(folder / "trace").step_N.tolist() == [0, 1, 2, 3]  # without a flag
  assert len(list(folder.glob("events.out.tfevents.*"))) == 1
  assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
  records = read(folder / "metrics.jsonl")
  assert records == results["history"]
  assert [record["step"] for record in records] == [0, 1, 2, 3]
  for record in records:
    assert record["imbalance_before"] == record["layer0/imbalance_before"] >= 1
    assert record["imbalance_after"] == record["layer0/imbalance_after"] == 1
    assert record["layer0/rounds"] == 1 and record["layer0/invalid_assignments"] == 0
  assert {"train_loss", "val_loss", "steps_per_second", "history"} < set(results)
  assert results["imbalance_after"] == 1
  assert 4 < results["val_loss"] < 6


def interrupt_at_step_3(command, monkeypatch):
  """Runs the example until the user presses Ctrl-C."""

  def interrupt(text, settings, step):
    if step == 3:
      raise KeyboardInterrupt
    return microbatches(text, settings, step)

  microbatches = train_tiny_moe.microbatches
  monkeypatch.setattr(train_tiny_moe, "microbatches", interrupt)
  with pytest.raises(KeyboardInterrupt):
    main(command)
  monkeypatch.undo()


def test_resumed_run_is_the_uninterrupted_one(finished, tmp_path, monkeypatch):
  folder, results = finished
  command = [*TINY, "--out", str(tmp_path), "--checkpoint-dir", str(tmp_path / "state")]
  command += ["--checkpoint-every", "2"]
  interrupt_at_step_3(command, monkeypatch)
  assert len(read(tmp_path / "metrics.jsonl")) == 3  # one of them behind the checkpoint
  resumed = main([*command, "--resume"])

  assert losses(resumed) == losses(results)
  assert resumed["val_loss"] == results["val_loss"]
  assert read(tmp_path / "metrics.jsonl") == resumed["history"]
  expected, got = saved_state(folder / "state", 4), saved_state(tmp_path / "state", 4)
  assert expected.keys() == got.keys()
  for name in expected:
    np.testing.assert_array_equal(got[name], expected[name], strict=True, err_msg=name)


def test_a_new_run_replaces_files_of_the_default_folder_alone(tmp_path, monkeypatch, capsys):
  """And says so. Where a folder is named, it may be of a run that somebody wants to keep."""
  monkeypatch.chdir(tmp_path)
  command = [*TINY, "--steps", "2"]
  for _ in range(2):
    main(command)
  folder = pathlib.Path("runs/tiny_moe")
  assert uep.trace.read(folder / "trace").step_N.tolist() == [0, 1]
  assert len(list(folder.glob("events.out.tfevents.*"))) == 1
  out = capsys.readouterr().out
  replaced = "replaces the last run's metrics.jsonl, training.png, events.out.tfevents."
  assert out.count(replaced) == 1 and out.count(", trace in runs/tiny_moe") == 1
  *_, wrote, following = out.splitlines()
  assert wrote.startswith(f"wrote {folder}/training.png")
  assert following == f"next: ultraep view {folder}/trace --open"

  before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
  with pytest.raises(SystemExit, match="2"):
    main([*command, "--out", str(folder), "--checkpoint-dir", "state"])
  said = capsys.readouterr().err
  assert "--out: expected a folder without the files of a run, got metrics.jsonl, training" in said
  assert said.count("\n") == 1 and "name another folder" in said
  assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
  assert not pathlib.Path("state").exists()


def test_a_resumed_run_says_that_it_replaces_a_trace_of_other_ranks(tmp_path, capsys):
  folder = traces.write(tmp_path / "trace", steps=1)
  report.open_trace(folder, Settings(ranks=4), resume=True, replace=True).close()
  assert len(uep.trace.read(folder)) == 2 and not capsys.readouterr().out
  report.open_trace(folder, Settings(ranks=2), resume=True, replace=True).close()
  said = f"replaces the trace in {folder}, which is of other ranks or slots\n"
  assert capsys.readouterr().out == said and not list(folder.iterdir())


def test_the_next_command_can_be_pasted():
  folder = pathlib.Path("my runs/trace")
  following = report.what_next(folder.parent, folder).splitlines()[-1]
  assert shlex.split(following.removeprefix("next: ")) == ["ultraep", "view", str(folder), "--open"]


def test_a_run_goes_on_with_another_strategy(tmp_path, monkeypatch):
  command = [*TINY, "--out", str(tmp_path), "--checkpoint-dir", str(tmp_path / "state")]
  command += ["--checkpoint-every", "2"]
  interrupt_at_step_3(command, monkeypatch)
  results = main([*command, "--resume", "--strategy", "dense", "--ranks", "1"])
  assert ["imbalance_before" in record for record in results["history"]] == [
    True,
    True,
    False,
    False,
  ]
  assert results["imbalance_after"] == 1 and (tmp_path / "training.png").stat().st_size > 1000


def test_checkpoint_holds_no_replicas(finished):
  folder, _ = finished
  state = saved_state(folder / "state", 4)
  experts = {name: leaf.shape for name, leaf in state.items() if leaf.ndim == 3}
  # The parameter and Adam's two moments of each expert matrix, of the experts and no more.
  assert len(experts) == 3 * len(EXPERT_SHAPES)
  for name, shape in experts.items():
    assert [shape] == [s for key, s in EXPERT_SHAPES.items() if f"['{key}']" in name], name
  other = {leaf.shape for leaf in state.values() if leaf.ndim != 3}
  assert other == {(), (16,), (16, 4), (16, 16), (16, 48), (256, 16)}


def test_other_settings_and_finished_runs_cannot_be_resumed(finished, tmp_path, capsys):
  folder, _ = finished
  state = ["--out", str(tmp_path), "--checkpoint-dir", str(folder / "state")]
  for flags, message in (
    (["--resume", "--seed", "1"], "--seed: expected 0 as in the checkpoint, got 1"),
    (["--resume"], "--resume: expected steps left to run, got all 4 done"),
    ([], "expected no checkpoint in"),
  ):
    with pytest.raises(SystemExit, match="2"):
      main([*TINY, *state, *flags])
    assert message in capsys.readouterr().err
  assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
def test_microbatches_and_groups_of_ranks_change_no_loss(finished, tmp_path):
  _, results = finished
  parts = main([*TINY, "--accumulate", "2", "--data", "2", "--out", str(tmp_path)])
  np.testing.assert_allclose(losses(parts), losses(results), rtol=2e-5)
  assert parts["val_loss"] == pytest.approx(results["val_loss"], rel=2e-5)
  assert parts["imbalance_after"] == 1


def test_dense_run_has_the_same_losses(finished, tmp_path):
  _, results = finished
  dense = main([*ALL_RANKS, "--strategy", "dense", "--out", str(tmp_path)])
  np.testing.assert_allclose(losses(dense), losses(results), rtol=2e-5)
  assert "imbalance_before" not in dense
  assert (tmp_path / "training.png").exists()


def test_trace_is_that_of_the_metrics(tmp_path, monkeypatch):
  """Of an interrupted and resumed run: a step that was repeated is there once."""
  command = [*TINY, "--out", str(tmp_path), "--checkpoint-dir", str(tmp_path / "state")]
  command += ["--checkpoint-every", "2", "--trace", str(tmp_path / "trace")]
  interrupt_at_step_3(command, monkeypatch)
  assert uep.trace.read(tmp_path / "trace").step_N.tolist() == [0, 1, 2]
  with pytest.raises(SystemExit, match="2"):  # does not mix runs
    main([*TINY, "--out", str(tmp_path), "--trace", str(tmp_path / "trace")])
  results = main([*command, "--resume"])

  run = uep.trace.read(tmp_path / "trace")
  assert run.step_N.tolist() == [0, 1, 2, 3] and run.layers == ["layer0"]
  for i, record in enumerate(results["history"]):
    assert run.imbalance_before_N[i] == pytest.approx(record["layer0/imbalance_before"])
    assert run.imbalance_after_N[i] == pytest.approx(record["layer0/imbalance_after"])
    assert run.replica_bytes_N[i] == pytest.approx(record["layer0/replica_megabytes"] * 1e6)
  np.testing.assert_array_equal(run.after_NG, run.planned_NG)


@pytest.mark.slow
def test_strategies_without_replicas(finished, tmp_path):
  _, results = finished
  none = main([*TINY, "--strategy", "none", "--out", str(tmp_path / "none")])
  np.testing.assert_allclose(losses(none), losses(results), rtol=2e-5)
  assert none["imbalance_after"] == none["imbalance_before"] == results["imbalance_before"] > 1
  with pytest.warns(UserWarning, match="overrides the router"):
    ideal = main(
      [*TINY, "--strategy", "ideal", "--dtype", "bfloat16", "--out", str(tmp_path / "ideal")]
    )
  assert ideal["imbalance_after"] == 1 and np.isfinite(losses(ideal)).all()


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ("--ranks 3", "--experts: expected a positive multiple of 3 (--ranks), got 16"),
    ("--ranks 16", "--ranks x --data: expected at most 8 devices, got 16"),
    ("--data 0", "--data: expected at least 1, got 0"),
    ("--batch 12", "--batch: expected a positive multiple of 8"),
    ("--accumulate 4", "--batch: expected a positive multiple of 32"),
    ("--width 40", "--width: expected a positive multiple of 16"),
    ("--replica-slots -1", "--replica-slots: expected at least 0, got -1"),
    ("--learning-rate nan", "--learning-rate: expected at least 0, got nan"),
    ("--strategy dense --ranks 2", "--ranks: expected one device for 'dense', got 2"),
    (
      "--strategy dense --trace {folder}",
      "--trace: expected a strategy that distributes experts, got 'dense'",
    ),
    ("--strategy best", "invalid choice: 'best'"),
    ("--resume", "--resume: expected --checkpoint-dir with it, got none"),
    ("--checkpoint-every 0", "--checkpoint-every: expected at least 1, got 0"),
    (
      "--checkpoint-dir {folder} --resume",
      "--checkpoint-dir: expected a checkpoint in {folder}, got none",
    ),
    (
      f"--checkpoint-dir {__file__}",
      f"--checkpoint-dir: expected a folder, got another file at {__file__}",
    ),
  ],
)
def test_bad_flags_are_named(flags, message, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit, match="2"):
    main(flags.format(folder=tmp_path).split())
  assert message.format(folder=tmp_path) in capsys.readouterr().err
  assert not pathlib.Path("runs").exists()


@pytest.mark.parametrize("option", ["--out", "--trace"])
def test_a_folder_that_cannot_be_written_is_named(option, capsys):
  with pytest.raises(SystemExit, match="2"):
    main([*TINY, option, "/proc/none"])
  said = capsys.readouterr().err
  assert f"{option}: " in said and "/proc/none" in said and said.count("\n") == 1


def test_help_names_every_setting_and_its_default(capsys):
  with pytest.raises(SystemExit, match="0"):
    main(["--help"])
  text = capsys.readouterr().out
  for name, field in Settings.__dataclass_fields__.items():
    assert flag(name) in text, name
    assert name == "ranks" or f"(default: {field.default})" in text, name


def test_batches_depend_on_seed_and_step_alone():
  text, held_out = data.load_text()
  assert len(text) > 10 * len(held_out) > 100_000
  first = data.batch_at(text, seed=0, step=5, batch=3, seq=8)
  assert first.shape == (3, 9) and first.dtype == np.int32
  assert bytes(first[0].astype(np.uint8)) in text.tobytes()
  np.testing.assert_array_equal(data.batch_at(text, seed=0, step=5, batch=3, seq=8), first)
  for seed, step in ((0, 6), (1, 5)):
    assert (data.batch_at(text, seed, step, batch=3, seq=8) != first).any()
