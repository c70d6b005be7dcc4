"""The commands that read traces: what they print, write and serve, and what they refuse."""

import json
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
import router_traces
import traces
from command_line import command, run
from source_tree import ROOT

from ultraep_jax import cli
from ultraep_jax.commands import view
from ultraep_jax.trace import disk
from ultraep_jax.trace import format as files

# --- trace -----------------------------------------------------------------------------------


def test_trace_show_and_import(tmp_path, capsys):
  router_traces.write_run(tmp_path / "from")
  arguments = ("import", tmp_path / "from", tmp_path / "to", "--experts", router_traces.E)
  status, text, _ = run(capsys, "trace", *arguments)
  assert status == 0 and "6 records, steps 0 to 2" in text
  assert "after: as planned on import, not measured" in text
  status, shown, _ = run(capsys, "trace", "show", tmp_path / "to")
  assert status == 0 and shown == text
  _, out, _ = run(capsys, "trace", "show", tmp_path / "to", "--json")
  summary = json.loads(out)
  assert summary["records"] == 6 and f"{summary['before']['100']:.3f}" in text
  status, _, err = run(capsys, "trace", *arguments)
  assert status == 1 and "expected a folder without a trace" in err
  status, _, err = run(capsys, "trace", "show", tmp_path / "from")
  assert status == 1 and "for Megatron's router traces see" in err


def test_trace_import_tells_what_was_lost(tmp_path, capsys):
  router_traces.write_run(tmp_path / "from")
  *_, last = sorted((tmp_path / "from").glob("*.jsonl"))
  last.write_text(last.read_text()[:-20])
  arguments = (tmp_path / "from", tmp_path / "to", "--experts", router_traces.E, "--json")
  status, out, _ = run(capsys, "trace", "import", *arguments)
  summary = json.loads(out)
  assert status == 0 and summary["records"] == 5
  assert summary["metadata"]["damaged_lines"] == summary["metadata"]["incomplete_records"] == 1


def test_trace_import_refuses_and_writes_nothing(tmp_path, capsys):
  router_traces.write_run(tmp_path / "from")
  arguments = ("trace", "import", tmp_path / "from", tmp_path / "to", "--experts")
  status, _, err = run(capsys, *arguments, 4)
  assert status == 1 and "below 4 (num_experts, --experts), got 7, the largest" in err
  for size in (2**63, 10**30):
    status, _, err = run(capsys, *arguments, router_traces.E, "--expert-bytes", size)
    expected = f"--expert-bytes: expected an integer from 0 to {2**40}, got '{size}'"
    assert status == 2 and expected in err
  assert not (tmp_path / "to").exists()
  (tmp_path / "file").write_text("")
  for path in (tmp_path / "file", tmp_path / "file" / "to"):
    command = "trace", "import", tmp_path / "from", path, "--experts", router_traces.E
    status, _, err = run(capsys, *command)
    assert status == 1 and f"{path}: expected a folder to write in, got a file" in err


# --- view ------------------------------------------------------------------------------------


def test_view_writes_a_page(tmp_path, capsys):
  first = traces.write(tmp_path / "first")
  second = traces.write(tmp_path / "second", steps=3)
  page = tmp_path / "page.html"
  status, out, _ = run(capsys, "view", first, second, "--html", page, "--steps", "2:")
  assert status == 0 and "first: 8 records" in out and "second: 2 records" in out
  data = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
  assert data is not None
  runs = json.loads(data[1])["runs"]
  assert [(r["name"], r["steps"]) for r in runs] == [("first", 4), ("second", 1)]


@pytest.mark.parametrize("steps", ["100:200", "6:", ":0"])
def test_view_says_which_steps_there_are(steps, tmp_path, capsys):
  folder, page = traces.write(tmp_path / "first", steps=6), tmp_path / "page.html"
  status, _, err = run(capsys, "view", folder, "--html", page, "--steps", steps)
  assert status == 1 and not page.exists()
  assert f"{folder}: expected --steps among its steps, 0 to 5, got {steps}" in err
  served = view.page_of([str(folder)], slice(100, 200))
  assert "expected --steps among its steps, 0 to 5, got 100:200" in served


@pytest.mark.parametrize("damage", ["nothing there", "another program", "no right", "damaged"])
def test_view_says_what_is_wrong(damage, tmp_path, capsys):
  folder, page = tmp_path / "trace", tmp_path / "page.html"
  message = damage
  if damage == "another program":
    folder.mkdir()
    (folder / files.MANIFEST).write_text("{}")
  elif damage == "no right":
    traces.write(folder)
    page = tmp_path / "none" / "page.html"
    message = "expected a folder to write in, got none"
  elif damage == "damaged":
    for path in disk.chunks(traces.write(folder)):
      path.write_bytes(b"PK\x03\x04")
  status, out, err = run(capsys, "view", folder, "--html", page)
  assert status == 1 and message in err and "Traceback" not in err
  assert not page.exists() and "wrote" not in out


def test_view_writes_over_no_part_of_a_trace(tmp_path, capsys):
  folder = traces.write(tmp_path / "trace")
  before = (folder / files.MANIFEST).read_bytes()
  status, _, err = run(capsys, "view", folder, "--html", folder / files.MANIFEST)
  assert status == 1 and "--html: expected a file that is no part of a trace" in err
  assert (folder / files.MANIFEST).read_bytes() == before


@pytest.mark.parametrize("given", [("--port", "80"), ("--host", "::1")])
def test_view_writes_or_serves(given, tmp_path, capsys):
  folder, page = traces.write(tmp_path / "trace"), tmp_path / "page.html"
  status, _, err = run(capsys, "view", folder, "--html", page, *given)
  assert status == 2 and not page.exists()
  assert f"{given[0]}: expected no --html with it, which serves nothing, got {given[1]}" in err


@pytest.mark.parametrize("damaged", [{"target": -3}, {"domain_size": 3}, {"objective": 5}])
def test_a_damaged_configuration_is_named(damaged, tmp_path, capsys):
  path = traces.write(tmp_path / "trace") / files.MANIFEST
  values = json.loads(path.read_text())
  values["config"] |= damaged
  path.write_text(json.dumps(values))
  status, _, err = run(capsys, "trace", "show", tmp_path / "trace")
  assert status == 1 and f"trace.json: config: {next(iter(damaged))}: expected" in err


def test_view_reports_what_it_leaves_out(tmp_path, capsys):
  folder = traces.write(tmp_path / "trace")
  last = disk.chunks(folder)[-1]
  last.write_bytes(last.read_bytes()[:-10])
  status, out, _ = run(capsys, "view", folder, "--html", tmp_path / "page.html")
  assert status == 0 and f"left out: {last.name}" in out


def test_view_needs_its_extra(tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, "plotly.offline", None)
  status, _, err = run(capsys, "view", traces.write(tmp_path), "--html", tmp_path / "page.html")
  assert status == 1 and "pip install -e '.[viewer]'" in err


@pytest.fixture
def interruptible():
  """Programs started here heed SIGINT, also where a shell that started the tests ignores it."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


def test_view_serves_until_it_is_stopped(tmp_path, interruptible):
  folder = traces.write(tmp_path / "a run", steps=2)
  child = subprocess.Popen(command("view", folder), cwd=ROOT, stdout=subprocess.PIPE, text=True)
  try:
    assert child.stdout is not None
    with child.stdout as lines:
      address = re.search(r"http://127\.0\.0\.1:\d+/", lines.readline())
      assert address is not None
      with urllib.request.urlopen(address[0], timeout=60) as answer:
        assert "a run" in answer.read().decode()
      port = address[0].rpartition(":")[2].strip("/")
      second = subprocess.run(
        command("view", folder, "--port", port), cwd=ROOT, capture_output=True, text=True
      )
      assert second.returncode == 1
      assert f"cannot serve on 127.0.0.1, port {port}: Address already in use" in second.stderr
      child.send_signal(signal.SIGINT)
      assert child.wait(30) == 130
  finally:
    child.kill()
    child.wait()


@pytest.mark.parametrize("steps", ["3", "a:b", "1:2:3"])
def test_view_refuses_other_steps(steps, tmp_path, capsys):
  with pytest.raises(SystemExit, match="2"):
    cli.main(["view", str(tmp_path), "--steps", steps])
  assert f"expected A:B, got '{steps}'" in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["10:5", "5:5"])
def test_view_refuses_steps_that_are_none(steps, tmp_path, capsys):
  with pytest.raises(SystemExit, match="2"):
    cli.main(["view", str(tmp_path), "--steps", steps])
  assert f"expected A:B with A below B, got '{steps}'" in capsys.readouterr().err
