"""Programs in forks of one process that has imported JAX and Flax, which takes longer than most."""

import contextlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping

# Imports alone start no threads, so forks are whole. A child leaves the loop and runs its program.
PARENT = """
import json, os, sys
import flax.nnx, jax, ultraep_jax
for line in sys.stdin:
  code, folder, out, errors = json.loads(line)
  child = os.fork()
  if child == 0:
    break
  print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
  sys.exit()
os.chdir(folder)
for number, path, mode in ((0, os.devnull, "r"), (1, out, "w"), (2, errors, "w")):
  with open(path, mode) as file:
    os.dup2(file.fileno(), number)
exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
"""


class Forks:
  """Runs programs, one at a time, as ``python -c`` would in a process of its own."""

  def __init__(self, parent: subprocess.Popen, folder: pathlib.Path):
    self.parent, self.folder = parent, folder

  def run(self, code: str, cwd: pathlib.Path) -> tuple[int, str, str]:
    """Status, and what it printed to standard output and error."""
    assert self.parent.stdin is not None and self.parent.stdout is not None
    paths = [self.folder / name for name in ("out", "errors")]
    print(json.dumps([code, *map(str, (cwd, *paths))]), file=self.parent.stdin, flush=True)
    status = int(self.parent.stdout.readline())
    out, errors = (path.read_text() for path in paths)
    return status, out, errors


@contextlib.contextmanager
def forks(environment: Mapping[str, str], folder: pathlib.Path) -> Iterator[Forks]:
  """The parent, with this environment; ``folder`` is for what its children print."""
  with subprocess.Popen(
    [sys.executable, "-c", PARENT],
    env=environment,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as parent:
    yield Forks(parent, folder)
    assert parent.stdin is not None
    parent.stdin.close()
