"""Builds the documentation site: ``python tests/make_site.py`` writes it to ``site/``.

Pages that other files tell are written into ``docs`` first: the notebook with its outputs, the
changelog, and the help of every command. Then the generator runs, strictly, and every link and
anchor of the pages that it made is followed.
"""

import argparse
import base64
import contextlib
import html.parser
import importlib
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse

ROOT = pathlib.Path(__file__).parents[1]
DOCS, SITE = ROOT / "docs", ROOT / "site"
# Written here and ignored by git.
MADE = ("notebook.md", "notebook", "changelog.md", "reference/commands.md")


def main() -> int:
  """Writes the pages, builds the site and prints links that lead nowhere."""
  write_pages()
  shutil.rmtree(SITE, ignore_errors=True)
  command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)  # it colours every character
  if done.returncode or "griffe:" in said:  # which complains about docstrings
    print(said.partition("Traceback")[0])
    return 1
  broken = broken_links(SITE)
  print(*broken, sep="\n")
  print(f"{len(list(SITE.rglob('*.html')))} pages, {len(broken)} broken links")
  return bool(broken)


def write_pages() -> None:
  """The pages in ``MADE``."""
  (DOCS / "notebook.md").write_text(notebook_page(ROOT / "examples/balance_explorer.ipynb"))
  changelog = (ROOT / "CHANGELOG.md").read_text()
  (DOCS / "changelog.md").write_text(changelog.replace("](docs/", "]("))
  (DOCS / "reference/commands.md").write_text(commands_page())


# --- the notebook ----------------------------------------------------------------------------


def notebook_page(path: pathlib.Path) -> str:
  """A notebook as Markdown; its figures become files of ``docs/notebook``."""
  figures = DOCS / "notebook"
  figures.mkdir(exist_ok=True)
  parts = []
  for index, cell in enumerate(json.loads(path.read_text())["cells"]):
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
      parts.append(source.replace("](../docs/", "]("))
      continue
    parts.append(f"```python\n{source}\n```")
    for number, output in enumerate(cell["outputs"]):
      parts.append(_output(output, figures / f"{index}_{number}.png"))
  return "\n\n".join(part for part in parts if part) + "\n"


def _output(output: dict, figure: pathlib.Path) -> str:
  data = output.get("data", {})
  if "image/png" in data:
    figure.write_bytes(base64.b64decode(data["image/png"]))
    return f"![Output of the cell above](notebook/{figure.name})"
  if "text/html" in data:
    return "".join(data["text/html"])
  text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
  return f"```text\n{text}\n```" if text else ""


# --- the commands ----------------------------------------------------------------------------


def commands_page() -> str:
  """What ``--help`` of every command prints."""
  os.environ["COLUMNS"] = "90"
  sys.path.insert(0, str(ROOT))
  cli = importlib.import_module("ultraep_jax.cli")
  parts = ["# Commands", _help(cli, "--help")]
  for name in cli.COMMANDS:
    if name == "demo":  # passes --help on to the example, which would import all it needs
      parts.append("## demo\n\n`ultraep demo --help` prints the flags of the training example.")
    else:
      parts.append(f"## {name}\n\n{_help(cli, name, '--help')}")
  return "\n\n".join(parts) + "\n"


def _help(cli, *arguments: str) -> str:
  out = io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
    cli.main(list(arguments))
  return f"```text\n{out.getvalue().rstrip()}\n```"


# --- links -----------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
  """The anchors of a page and what it links to."""

  def __init__(self, path: pathlib.Path):
    super().__init__()
    self.anchors: set[str] = set()
    self.links: list[str] = []
    self.feed(path.read_text())

  def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
    for name, value in attrs:
      if value and (name == "id" or (tag == "a" and name == "name")):
        self.anchors.add(value)
      if value and (name == "src" or (tag == "a" and name == "href")):
        self.links.append(value)


def broken_links(site: pathlib.Path) -> list[str]:
  """``page: link`` for each relative link whose file or anchor is not in the site."""
  pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
  broken = []
  for path, page in pages.items():
    for link in page.links:
      parts = urllib.parse.urlsplit(link)
      if parts.scheme or parts.netloc:
        continue
      target = path
      if parts.path:
        target = (path.parent / urllib.parse.unquote(parts.path)).resolve()
        target = target / "index.html" if target.is_dir() else target
      anchor = urllib.parse.unquote(parts.fragment)
      known = pages[target].anchors | {""} if target in pages else {anchor}
      if not target.exists() or (anchor not in known and not anchor.startswith("__")):
        broken.append(f"{path.relative_to(site)}: {link}")
  return sorted(set(broken))


if __name__ == "__main__":
  argparse.ArgumentParser(description=__doc__).parse_args()
  sys.exit(main())
