"""The code of every page runs as pasted, in one go; links lead somewhere; sentences are short."""

import os
import pathlib
import re
from collections.abc import Iterator

import kept_programs
import make_figures
import make_site
import pytest
from forks import Forks, forks

ROOT = pathlib.Path(__file__).parents[2]
GUIDES = sorted(ROOT.glob("docs/*.md"))
MADE = {ROOT / "docs" / name for name in make_site.MADE}
WRITTEN = [ROOT / "README.md", *(page for page in GUIDES if page not in MADE)]
LINKED = [
  *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
  *(page for page in sorted(ROOT.glob("docs/**/*.md")) if page not in MADE),
]
# Blocks with a title, such as what they need, are not run.
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# A block right behind a block of code shows what that prints.
PRINTED = re.compile(r"^```python\n[^`]*?^```\n\n```(?:text)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
DEVICES = 'jax.config.update("jax_num_cpu_devices", 8)'
LONGEST = 35  # words of a sentence
LONGEST_PARAGRAPH = 80  # words


def code_of(page: pathlib.Path) -> str:
  return "\n".join(CODE.findall(page.read_text()))


# tests/examples/test_integration.py runs that page and looks at its values.
WITH_CODE = [page for page in WRITTEN if code_of(page) and page.name != "integration.md"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> pathlib.Path:
  """A folder that pages take for the root of a clone, and may write to."""
  folder = tmp_path_factory.mktemp("clone")
  for name in ("examples", "tests", "docs"):
    (folder / name).symlink_to(ROOT / name)
  return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Iterator[Forks]:
  """Where the code of each page runs as a program of its own."""
  environment = os.environ | kept_programs.settings()
  environment |= {
    "XLA_FLAGS": re.sub(r"--xla_force_host\S+", "", os.environ["XLA_FLAGS"]),  # pages say how many
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "PYTHONPATH": str(ROOT),
  }
  with forks(environment, tmp_path_factory.mktemp("printed")) as started:
    yield started


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_code_of_a_page_runs_as_pasted(page, pages, clone):
  code = code_of(page)
  if "make_mesh((8,)" in code:
    lines = [line for line in code.splitlines() if line]
    assert lines.index("import jax") + 1 == lines.index(DEVICES) and lines.count(DEVICES) == 1
  status, out, errors = pages.run(code, cwd=clone)
  assert status == 0, errors[-3000:]
  for shown in PRINTED.findall(page.read_text()):
    assert shown in out


def test_pages_are_programs_of_their_own(pages, clone):
  """One asks for devices and sets a mesh, of which the next one knows nothing; one fails."""
  define = "import jax\nname, mesh = 1, jax.set_mesh(jax.make_mesh((1,), ('a',)))\n"
  assert pages.run(define + "print(jax.device_count())", clone)[:2] == (0, "1\n")
  look = f"import jax, os\n{DEVICES}\n"
  look += "print(jax.device_count(), jax.sharding.get_mesh().empty, os.getcwd())\nname"
  status, out, errors = pages.run(look, clone)
  assert (status, out) == (1, f"8 True {clone}\n")
  assert errors.endswith("NameError: name 'name' is not defined\n")


# --- words -----------------------------------------------------------------------------------


def sentences(text: str) -> list[str]:
  """Of the prose: not of code, tables, pictures, links' targets and comments."""
  text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
  text = re.sub(r"!\[.*?\]\(.*?\)", "", text, flags=re.DOTALL)
  text = re.sub(r"\]\([^)]*\)", "]", text)
  text = re.sub(r"`[^`]*`", "code", text)
  found = []
  for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*>|]|\d+\.) )|\n(?=\|)", text):
    if not block.lstrip().startswith(("|", "#", ">", "---")):
      found += re.split(r"(?<=[.!?:;])[\s*)]+(?=\S)", " ".join(block.split()))
  return found


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_sentences_are_short(page):
  long = [s for s in sentences(page.read_text()) if len(s.split()) > LONGEST]
  assert not long, "\n\n".join(f"{len(s.split())} words: {s}" for s in long)


def test_long_sentences_are_found():
  words = "word " * 36
  assert [len(s.split()) for s in sentences(f"Short. {words}. A `long {words}` one.")] == [1, 37, 3]


def paragraphs(text: str) -> list[str]:
  """Of the prose, each item of a list by itself: not of code and tables."""
  text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
  blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
  return [block for block in blocks if block and not block.lstrip().startswith(("|", "#"))]


def test_pages_are_no_longer_than_readers_read():
  for name, most in (("README.md", 120), ("docs/results.md", 280)):
    text = (ROOT / name).read_text()
    assert len(text.splitlines()) <= most, name
    long = [block for block in paragraphs(text) if len(block.split()) > LONGEST_PARAGRAPH]
    assert not long, "\n\n".join(long)


def test_long_paragraphs_are_found():
  text = "# A\n\nb b b\nb\n\n- c\n- d d\n\n| e | e |\n\n```\nf\n```\n"
  assert [len(block.split()) for block in paragraphs(text)] == [4, 2, 3]


# --- links -----------------------------------------------------------------------------------


def missing_links(page: pathlib.Path) -> list[str]:
  """Those to files that a clone does not have; what is made for the site alone is none of it."""
  prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
  links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", prose) if "://" not in link]
  targets = {link: (page.parent / link).resolve() for link in links}
  return [link for link, path in targets.items() if path in MADE or not path.exists()]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_exist_in_a_clone(page):
  assert not missing_links(page)


def test_missing_links_are_found(tmp_path):
  made = os.path.relpath(ROOT / "docs/changelog.md", tmp_path)
  page = tmp_path / "page.md"
  page.write_text(f"[1](page.md#a) [2](none.md) [3]({made}) [4](https://a.b/c) `[5](none.md)`")
  assert missing_links(page) == ["none.md", made]


# --- the site --------------------------------------------------------------------------------


def test_broken_links_are_found(tmp_path):
  (tmp_path / "folder").mkdir()
  (tmp_path / "folder/index.html").write_text('<h1 id="top">x</h1>')
  (tmp_path / "index.html").write_text(
    '<a href="folder/#top">right</a><a href="folder/#none">1</a><a href="none/">2</a>'
    '<img src="none.png"><a href="https://example.org/none">elsewhere</a><a href="#none">3</a>'
  )
  broken = ["index.html: " + link for link in ("#none", "folder/#none", "none.png", "none/")]
  assert make_site.broken_links(tmp_path) == broken


def test_the_chart_of_many_models_is_its_table():
  text = (ROOT / "docs/results.md").read_text()
  rows = make_figures.many_models(text)
  assert len(rows) == 14 and rows[0][:2] == ("Qwen3-30B-A3B", "independent")
  first = next(line for line in text.splitlines() if line.startswith("| Qwen3-30B-A3B | "))
  assert [f"{x:.2f}" for x in rows[0][2]] == re.findall(r"\d+\.\d{2}(?= /|\*\*| \|)", first)[:3]
  figure = make_figures.draw(rows)
  for ax in figure.axes:
    assert [text.get_text() for text in ax.get_xticklabels()][1] == "OLMoE"
    assert len(ax.patches) == 3 * 7


def test_the_chart_of_a_layer_is_its_table():
  rows = make_figures.layer_times((ROOT / "docs/lab/layer.md").read_text())
  assert len(rows) == 6 * 4 * 3 and {row["ratio"] for row in rows} == {1.0, 1.3, 2.0, 3.0}
  (worst,) = (
    row["of_ideal"]
    for row in rows
    if (row["shape"], row["pass"], row["ratio"], row["variant"])
    == ("Qwen3-235B", "forward", 3.0, "none")
  )
  assert abs(worst - 5.07 / 11.77) < 1e-9


def test_sources_of_constants_are_sections_of_the_laboratory():
  pointers = set()
  for path in (ROOT / "ultraep_jax").rglob("*.json"):
    pointers |= set(re.findall(r"(docs/lab/\w+\.md), ([^\"]+)", path.read_text()))
  assert len(pointers) > 8
  for page, rest in pointers:
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert any(rest.startswith(h) or h.startswith(rest.split(":")[0]) for h in headings), rest


def test_pages_made_from_other_files(tmp_path):
  notebook = make_site.notebook_page(ROOT / "examples/balance_explorer.ipynb")
  assert "```python" in notebook and "](notebook/" in notebook and "../docs/" not in notebook
