"""The viewer in headless Chromium: it loads, draws, toggles, drills down and says what is wrong."""

import pathlib
import shutil
import threading

import numpy as np
import pytest
import traces
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from ultraep_jax import trace
from ultraep_jax.commands import view
from ultraep_jax.config import BalanceConfig
from ultraep_jax.trace import disk
from ultraep_jax.trace import format as files
from ultraep_jax.viewer import make_server, render

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
  pytest.mark.browser,
  pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium and chromedriver on the PATH, see .ci/run"
  ),
]
# In a container: no sandbox, no GPU, and nothing that calls out.
FLAGS = (
  "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run "
  "--disable-background-networking --disable-component-update --disable-sync "
  "--window-size=1280,1600"
)
HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1><b>bold</b>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
  options = webdriver.ChromeOptions()
  options.binary_location = CHROMIUM or ""
  for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
    options.add_argument(flag)
  options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
  driver = webdriver.Chrome(options=options, service=Service(DRIVER))
  yield Browser(driver)
  driver.quit()


class Browser:
  """Opens pages and asks them."""

  def __init__(self, driver: webdriver.Chrome):
    self.driver = driver

  def open(self, address: str) -> None:
    self.driver.get(address)

  def show(self, path: pathlib.Path) -> None:
    self.open(path.as_uri())
    self.wait("return document.body.dataset.ready === 'true'")

  def wait(self, condition: str) -> None:
    WebDriverWait(self.driver, 30).until(lambda driver: driver.execute_script(condition))

  def ask(self, expression: str):
    return self.driver.execute_script(f"return {expression}")

  def click(self, element: str) -> None:
    self.driver.find_element(By.ID, element).click()

  def press(self, *keys: str) -> None:
    self.driver.switch_to.active_element.send_keys(*keys)

  def text(self, element: str) -> str:
    return self.driver.find_element(By.ID, element).text

  def errors(self) -> list[str]:
    return [entry["message"] for entry in self.driver.get_log("browser")]


def write(folder: pathlib.Path, runs: list[trace.Trace]) -> pathlib.Path:
  path = folder / "page.html"
  path.write_text(render(runs), encoding="utf-8")
  return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  return trace.read(traces.write(tmp_path_factory.mktemp("runs") / "first run", steps=8))


@pytest.fixture(scope="module")
def written(run, tmp_path_factory):
  """One file for all tests: the browser opens a page that it knows in a third of the time."""
  return write(tmp_path_factory.mktemp("page"), [run])


@pytest.fixture
def page(browser, written):
  browser.show(written)
  return browser


def bars(page: Browser, chart: str, name: str) -> list[float]:
  """Heights of the bars that the chart has by this name."""
  return page.ask(
    f"Array.from(document.getElementById('{chart}').data.find(t => t.name === '{name}').y)"
  )


def test_draws_everything(page, run):
  assert page.text("title") == "first run"
  assert "4 ranks · 8 experts · 2 replica slots a rank · 16 records of 8 steps" in page.text(
    "facts"
  )
  for chart in ("histogram", "timeline", "ranks", "experts", "links"):
    assert page.ask(f"document.querySelectorAll('#{chart} svg.main-svg').length") > 0, chart
    drawn = "#{0} .bars path, #{0} .hm image, #{0} .heatmaplayer image, #{0} .point path"
    assert page.ask(f"document.querySelectorAll('{drawn.format(chart)}').length") > 0, chart
  worst = run.imbalance_before_N.max()
  assert f"{worst:.2f}×" in page.text("tiles") and f"{worst:.3f}×" in page.text("percentiles")
  assert not page.ask("document.getElementById('comparison').checkVisibility()")
  assert not page.ask("document.getElementById('problems').checkVisibility()")
  assert not page.errors()


def test_reaches_for_nothing_outside(page):
  assert page.ask("performance.getEntriesByType('resource').length") == 0
  buttons = page.ask("[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)")
  assert buttons and not [title for title in buttons if "hare" in title or "loud" in title]


def test_toggles_before_and_after(page, run):
  records = run.layer_N == "layer0"
  for side, loads in (("before", run.before_NG), ("after", run.after_NG)):
    page.click(f"side-{side}")
    assert page.ask(f"document.getElementById('side-{side}').ariaPressed") == "true"
    for rank in range(4):
      assert bars(page, "timeline", f"rank {rank}") == loads[records, rank].tolist()
  page.click("shape-heatmap")
  assert page.ask("document.getElementById('timeline').data[0].type") == "heatmap"
  page.click("shape-stacked")
  assert page.ask("document.getElementById('timeline').data[0].type") == "bar"


def test_drills_down_into_a_microbatch(page, run):
  """By a click in the timeline; then what is shown is that record's plan."""
  target = int(run.before_NG[run.layer_N == "layer0"].max(axis=1).argmin())
  page.driver.execute_script(
    "arguments[0].emit('plotly_click', {points: [{x: arguments[1]}]})",
    page.driver.find_element(By.ID, "timeline"),
    target,
  )
  index = 2 * target  # two layers a step
  assert page.text("position") == f"{target + 1} of 8"
  assert f"step {target}, layer0" in page.text("story")
  copies = run.replica_load_NGS[index].sum(axis=1)
  assert bars(page, "ranks", "copies") == copies.tolist()
  assert bars(page, "ranks", "home experts") == (run.after_NG[index] - copies).tolist()
  assert bars(page, "ranks", "before") == run.before_NG[index].tolist()
  rows = page.driver.find_elements(By.CSS_SELECTOR, "#copies tbody tr")
  table = sorted(tuple(cell.text for cell in row.find_elements(By.TAG_NAME, "td")) for row in rows)
  expected = []
  for (rank, slot), expert in np.ndenumerate(run.replica_expert_NGS[index]):
    if expert >= 0:
      parent = run.replica_parent_NGS[index, rank, slot]
      sender = f"{'' if parent == expert // 2 else 'relay '}{parent}"
      tokens = run.replica_load_NGS[index, rank, slot]
      expected.append((str(expert), str(expert // 2), sender, str(rank), str(tokens), "1.00 kB"))
  assert table == sorted(expected) and table
  links = page.ask("Array.from(document.getElementById('links').data[0].z, row => Array.from(row))")
  assert sum(map(sum, links)) == run.replica_bytes_N[index]
  page.click("link-tokens")
  links = page.ask("Array.from(document.getElementById('links').data[0].z, row => Array.from(row))")
  assert sum(map(sum, links)) == run.remote_N[index]


def test_a_real_click_chooses_a_record(page):
  page.press(*[Keys.ARROW_LEFT] * 8)
  assert page.text("position") == "1 of 8"
  page.driver.execute_script("document.getElementById('timeline').scrollIntoView()")
  area = page.driver.find_element(By.CSS_SELECTOR, "#timeline .nsewdrag")
  actions = webdriver.ActionChains(page.driver)
  actions.move_to_element_with_offset(area, area.size["width"] // 2 - 40, 20).pause(0.2)
  actions.move_by_offset(2, 2).pause(0.2).click().perform()
  page.wait("return document.getElementById('position').textContent === '8 of 8'")


def test_keys_do_what_buttons_do(page):
  first = page.text("position")
  page.press("b")
  assert page.ask("document.getElementById('side-after').ariaPressed") == "true"
  page.press("h", "l")
  assert page.ask("document.getElementById('timeline').data[0].type") == "heatmap"
  assert page.ask("document.getElementById('link-tokens').ariaPressed") == "true"
  page.press(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
  page.press(Keys.ARROW_RIGHT)
  assert page.text("position") != first or first.startswith("1 ")
  page.press(Keys.ARROW_DOWN)
  assert "layer1" in page.text("story")
  page.press(Keys.ARROW_UP)
  assert "layer0" in page.text("story")
  whole = page.ask("document.getElementById('timeline').layout.xaxis.range.map(Number)")
  page.press("+")
  low, high = page.ask("document.getElementById('timeline').layout.xaxis.range.map(Number)")
  assert high - low == pytest.approx((whole[1] - whole[0]) / 2)
  page.press("b")  # a redraw keeps the zoom
  kept = page.ask("document.getElementById('timeline').layout.xaxis.range.map(Number)")
  assert kept == pytest.approx([low, high])
  page.press("0")
  again = page.ask("document.getElementById('timeline').layout.xaxis.range.map(Number)")
  assert again == pytest.approx(whole)


def test_every_control_is_reached_by_tab(page):
  reached = []
  page.driver.execute_script("document.activeElement.blur()")
  for _ in range(40):
    page.press(Keys.TAB)
    reached.append(page.ask("document.activeElement.id"))
  visible = (
    "[...document.querySelectorAll('button, select, input')].filter(e => e.checkVisibility())"
  )
  assert set(page.ask(f"{visible}.map(e => e.id)")) <= set(reached)
  assert page.ask("getComputedStyle(document.activeElement).outlineStyle") is not None


def test_light_and_dark(page):
  def background() -> tuple[str, str]:
    style = "getComputedStyle(document.body).backgroundColor"
    return page.ask(style), page.ask("document.getElementById('ranks').layout.paper_bgcolor")

  light = background()
  page.click("theme")
  dark = background()
  assert light[0] != dark[0] and light[1] != dark[1]
  page.press("t")
  assert background() == light
  page.driver.execute_cdp_cmd(
    "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
  )
  page.wait("return document.documentElement.dataset.theme === 'dark'")
  assert background() == dark
  page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_compares_two_runs(browser, run, tmp_path):
  other = trace.read(traces.write(tmp_path / "second run", steps=4, ratio=1.4))
  browser.show(write(tmp_path, [run, other]))
  assert browser.ask("document.getElementById('comparison').checkVisibility()")
  table = browser.text("runs")
  assert "first run" in table and "second run" in table and "(−" in table
  names = browser.ask("document.getElementById('ecdf').data.map(t => t.name)")
  assert names == [
    "first run, before",
    "first run, after",
    "second run, before",
    "second run, after",
  ]
  browser.press("r")
  assert browser.text("title") == "second run" and "of 4" in browser.text("position")
  assert not browser.errors()


def test_one_record_and_no_copies(browser, tmp_path):
  config = BalanceConfig(replica_slots=0, objective="balance")
  with trace.Recorder(tmp_path / "run") as recorder:
    recorder.record(5, traces.stats_of(traces.loads(0), config), axes=())
  browser.show(write(tmp_path, [trace.read(tmp_path / "run")]))
  assert "No copy was made." in browser.text("story") and browser.text("position") == "1 of 1"
  assert not browser.errors()


def test_names_are_text(browser, tmp_path):
  with trace.Recorder(tmp_path / "run", name=HOSTILE, metadata={"note": HOSTILE}) as recorder:
    recorder.record(0, {HOSTILE: traces.stats_of(traces.loads(0))}, axes=())
  run = trace.read(tmp_path / "run")
  browser.show(write(tmp_path, [run, run]))
  assert browser.text("title") == HOSTILE and HOSTILE in browser.text("story")
  assert browser.ask("window.pwned === undefined")
  assert browser.ask("document.querySelectorAll('main img, main b b, .gtitle b').length") == 0
  assert "<b>bold</b>" in browser.ask("document.querySelector('#ecdf .legendtext').textContent")
  assert not browser.errors()


@pytest.fixture
def served(tmp_path):
  """The page as ``view --serve`` makes it, of a folder that a test fills."""
  folder = tmp_path / "trace"
  server = make_server(lambda: view.page_of([str(folder)], None))
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  yield folder, f"http://127.0.0.1:{server.server_port}/"
  server.shutdown()
  thread.join()
  server.server_close()


def test_says_what_is_wrong_and_recovers(browser, served):
  folder, address = served
  browser.open(address)
  alert = "document.querySelector('[role=alert]').textContent"
  assert "got nothing there" in browser.ask(alert)
  folder.mkdir()
  browser.open(address)
  assert "expected a trace (a folder with trace.json), got none" in browser.ask(alert)
  (folder / files.MANIFEST).write_text('{"format": "<img src=x onerror=window.pwned=1>"}')
  browser.open(address)
  assert "it is of another program" in browser.ask(alert) and browser.ask("!window.pwned")
  (folder / files.MANIFEST).unlink()
  traces.write(folder)
  browser.open(address)
  browser.wait("return document.body.dataset.ready === 'true'")
  chunk = disk.chunks(folder)[-1]
  chunk.write_bytes(chunk.read_bytes()[:100])
  browser.open(address)
  browser.wait("return document.body.dataset.ready === 'true'")
  assert f"Left out: {chunk.name}: expected a whole chunk" in browser.text("problems")
  assert browser.text("position").endswith("of 4")
  for path in disk.chunks(folder):
    path.write_bytes(b"PK")
  browser.open(address)
  assert "expected readable chunks, got none" in browser.ask(alert)
