"""The viewer without a browser: its data, its HTML and its server."""

import base64
import hashlib
import html.parser
import http.client
import json
import re
import socket
import threading
import zlib

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
import traces

from ultraep_jax import testing, trace
from ultraep_jax.config import BalanceConfig
from ultraep_jax.planning.plan import plan_quotas
from ultraep_jax.types import Plan
from ultraep_jax.viewer import error_page, make_server, render
from ultraep_jax.viewer.links import token_links
from ultraep_jax.viewer.payload import payload

HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>&amp;"


class Parser(html.parser.HTMLParser):
  """The elements with their attributes, and the text of scripts, as a browser sees them."""

  def __init__(self, page: str):
    super().__init__()
    self.elements, self.scripts, self.text = [], [], ""
    self.inside = ""
    self.feed(page)

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))
    self.inside = tag
    if tag == "script":
      self.scripts.append("")

  def handle_endtag(self, tag):
    self.inside = ""

  def handle_data(self, data):
    if self.inside == "script":
      self.scripts[-1] += data
    else:
      self.text += data

  def attribute(self, tag: str, name: str) -> list[str]:
    return [attributes[name] for t, attributes in self.elements if t == tag and name in attributes]


def unpacked(run: dict) -> dict[str, np.ndarray]:
  raw = zlib.decompress(base64.b64decode(run["data"]))
  return {
    name: np.frombuffer(raw, f"<{c['type']}", int(np.prod(c["shape"])), c["start"]).reshape(
      c["shape"]
    )
    for name, c in run["columns"].items()
  }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return traces.write(tmp_path_factory.mktemp("trace") / "run", steps=6)


# --- traffic ---------------------------------------------------------------------------------


@hypothesis.given(st.integers(0, 2**31), st.sampled_from([1, 2, 4]), st.integers(0, 3))
@hypothesis.settings(max_examples=20)
def test_links_are_those_of_every_single_token(seed, ranks, slots):
  load_GE = testing.zipf_loads(seed, 8, ranks, tokens=24, top_k=2, ratio=min(ranks, 1.8))
  config = BalanceConfig(replica_slots=slots, objective="balance")
  plan = plan_quotas(jnp.asarray(load_GE), config)
  index = testing.expert_indices(seed, load_GE, 2)
  dest_GTK, _, _ = testing.brute_force_routes(jnp.asarray(index), plan)
  expected = np.stack([np.bincount(dest.ravel(), minlength=ranks) for dest in dest_GTK])
  host_plan = Plan(*map(np.asarray, plan))  # pyright: ignore[reportArgumentType]
  np.testing.assert_array_equal(token_links(load_GE, host_plan), expected)


# --- data ------------------------------------------------------------------------------------


def test_payload_is_the_trace(folder):
  run = trace.read(folder)
  data = payload(run)
  columns = unpacked(data)
  assert data["records"] == 12 and data["shownSteps"] == data["steps"] == 6
  assert [data["layers"][i] for i in columns["layer"]] == run.layer_N.tolist()
  for name, expected in {
    "step": run.step_N,
    "before": run.before_NG,
    "after": run.after_NG,
    "expertLoad": run.expert_load_NE,
    "replicaExpert": run.replica_expert_NGS,
    "replicaParent": run.replica_parent_NGS,
    "replicaLoad": run.replica_load_NGS,
    "allBefore": run.imbalance_before_N.astype(np.float32),
  }.items():
    np.testing.assert_array_equal(columns[name], expected, err_msg=name)
  assert set(columns["copyBytes"]) == {traces.EXPERT_BYTES}
  # What arrives at a rank is what it computes, what leaves it is what its tokens chose.
  np.testing.assert_array_equal(columns["links"].sum(axis=1), run.after_NG)
  np.testing.assert_array_equal(columns["links"].sum(axis=2), run.load_NGE.sum(axis=2))


def test_long_traces_are_shown_in_part_and_counted_whole(folder):
  run = trace.read(folder)
  each = 4 * 4 + 3 * 4 * 3 + 8 + 8
  data = payload(run, budget=4 * each)
  columns = unpacked(data)
  assert columns["step"].tolist() == [0, 0, 3, 3]  # whole steps, evenly chosen
  assert len(columns["allAfter"]) == 12 and data["shownSteps"] == 2 and data["steps"] == 6
  assert len(unpacked(payload(run, budget=1))["step"]) == 2


def test_no_slots_and_no_load(tmp_path):
  config = BalanceConfig(replica_slots=0, objective="balance")
  with trace.Recorder(tmp_path) as recorder:
    recorder.record(0, traces.stats_of(traces.loads(0), config), axes=())
    recorder.record(1, traces.stats_of(np.zeros((4, 8), np.int32), config), axes=())
  run = trace.read(tmp_path)
  assert run.imbalance_after_N[1] == 1 and run.replicas_N.tolist() == [0, 0]
  columns = unpacked(payload(run))
  assert columns["replicaLoad"].shape == (2, 4, 0) and not columns["links"][1].any()
  assert "data" in render([run])


# --- page ------------------------------------------------------------------------------------


def test_page_is_one_file_that_runs_only_its_own_scripts(folder):
  page = render([trace.read(folder)])
  parser = Parser(page)
  assert not parser.attribute("script", "src")
  assert set(parser.attribute("link", "href")) == {"data:,"}
  policy = next(v for v in parser.attribute("meta", "content") if "script-src" in v)
  assert "default-src 'none'" in policy and "form-action 'none'" in policy
  allowed = set(re.findall(r"'sha256-([^']+)'", policy))
  data, *scripts = parser.scripts
  hashes = {base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts}
  assert len(scripts) == 3 and hashes == allowed
  assert "unsafe" not in policy.partition("script-src")[2]
  (run,) = json.loads(data)["runs"]
  assert run["name"] == "run"


def test_names_cannot_bring_markup(tmp_path):
  with trace.Recorder(tmp_path, name=HOSTILE, metadata={"note": HOSTILE}) as recorder:
    recorder.record(0, {HOSTILE: traces.stats_of(traces.loads(0))}, axes=())
  run = trace.read(tmp_path)
  parser = Parser(render([run, run]))
  assert len(parser.scripts) == 4 and not parser.attribute("img", "src")
  first, _ = json.loads(parser.scripts[0])["runs"]
  assert first["name"] == HOSTILE and first["layers"] == [HOSTILE]
  parser = Parser(error_page(HOSTILE, HOSTILE))
  assert not parser.scripts and parser.text.count(HOSTILE) == 2


def test_pages_without_records(tmp_path, folder):
  run = trace.read(folder)
  page = render([run[:0]])
  assert "the trace has no records yet" in Parser(page).text and not Parser(page).scripts
  assert len(json.loads(Parser(render([run, run[:0]])).scripts[0])["runs"]) == 1
  with pytest.raises(ValueError, match="expected at least one, got none"):
    render([])


def test_every_element_that_the_script_uses_is_in_the_page(folder):
  parser = Parser(render([trace.read(folder)]))
  ids = {attributes["id"] for _, attributes in parser.elements if "id" in attributes}
  used = set(re.findall(r'(?:\$|(?<!\.)\bon|draw)\("([\w-]+)"', parser.scripts[-1]))
  assert used and used <= ids
  buttons = [a for tag, a in parser.elements if tag in ("button", "select", "input")]
  assert len(buttons) > 10  # native controls, which a keyboard reaches
  labels = Parser(render([trace.read(folder)])).elements
  charts = [a for _, a in labels if "chart" in a.get("class", "").split()]
  assert charts and all(a["role"] == "img" and a["aria-label"] for a in charts)


# --- server ----------------------------------------------------------------------------------


@pytest.fixture
def address():
  server = make_server(lambda: "<p>page</p>")
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  yield "127.0.0.1", server.server_port
  server.shutdown()
  thread.join()
  server.server_close()


def get(address, path="/", host=None):
  connection = http.client.HTTPConnection(*address, timeout=10)
  connection.request("GET", path, headers={} if host is None else {"Host": host})
  response = connection.getresponse()
  result = response.status, response.read().decode(), dict(response.getheaders())
  connection.close()
  return result


def test_server_has_one_page(address):
  status, text, headers = get(address)
  assert (status, text) == (200, "<p>page</p>")
  assert headers["Content-Type"] == "text/html; charset=utf-8"
  assert headers["X-Content-Type-Options"] == "nosniff"
  for path in ("/trace.json", "/../../etc/passwd", "/page.js"):
    assert get(address, path)[0] == 404


def test_server_answers_this_machine_only(address):
  for host in ("localhost:80", "127.0.0.1", "[::1]:80"):
    assert get(address, host=host)[0] == 200
  for host in ("example.com", "example.com:80", "127.0.0.1.example.com", ""):
    assert get(address, host=host)[0] == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_server_listens_on_loopback(host):
  if host == "::1" and not has_ipv6():
    pytest.skip("this machine has no IPv6")
  server = make_server(lambda: "", *([host] if host == "::1" else []))
  assert server.server_address[0] == host
  server.server_close()


def has_ipv6() -> bool:
  try:
    with socket.create_server(("::1", 0), family=socket.AF_INET6):
      return True
  except OSError:
    return False
