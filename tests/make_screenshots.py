"""Takes the pictures of the documentation: ``python tests/make_screenshots.py TRACE``.

The viewer's page of a trace, such as the demo's, in headless Chromium: light, dark and as narrow as
a telephone. With ``--site`` the front page of the site too, which ``tests/make_site.py`` made.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile

from ultraep_jax import trace
from ultraep_jax.viewer import render

ROOT = pathlib.Path(__file__).parents[1]
IMAGES = ROOT / "docs/images"
FLAGS = (
  "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars "
  "--virtual-time-budget=12000 --run-all-compositor-stages-before-draw"
)
SIZES = {"": (1280, 1560), "_narrow": (500, 1560)}


def main() -> int:
  """Writes PNG files into ``docs/images``, or where ``--out`` says."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("trace", help="folder of a trace")
  parser.add_argument("--out", type=pathlib.Path, default=IMAGES, help="folder of the pictures")
  parser.add_argument("--site", action="store_true", help="the site's front page too")
  args = parser.parse_args()
  chromium = shutil.which("chromium")
  if chromium is None:
    parser.exit(1, "chromium: expected it on the PATH, got none\n")
  args.out.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory() as folder:
    page = pathlib.Path(folder) / "viewer.html"
    page.write_text(render([trace.read(args.trace)]), encoding="utf-8")
    shots = [("viewer", page), ("site", ROOT / "site/index.html")][: 1 + args.site]
    for name, path in shots:
      for suffix, size in SIZES.items():
        for theme in ("light", "dark"):
          target = args.out / f"{name}{suffix}{'_dark' * (theme == 'dark')}.png"
          _shoot(chromium, path, target, size, theme, folder)
          print(f"wrote {target} ({target.stat().st_size / 1e3:.0f} kB)")
  return 0


def _shoot(
  chromium: str,
  page: pathlib.Path,
  target: pathlib.Path,
  size: tuple[int, int],
  theme: str,
  profile: str,
) -> None:
  width, height = size
  command = [
    chromium,
    *FLAGS.split(),
    f"--user-data-dir={profile}/{theme}",
    f"--window-size={width},{height}",
    f"--screenshot={target}",
    # What prefers-color-scheme is.
    f"--blink-settings=preferredColorScheme={0 if theme == 'dark' else 1}",
    page.as_uri(),
  ]
  subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=120)


if __name__ == "__main__":
  sys.exit(main())
