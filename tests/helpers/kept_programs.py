"""Keeps the programs that tests compile in the user's cache folder, for the next run of tests.

JAX's persistent compilation cache, for all processes of a run and those that tests start.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
from typing import Any
from unittest import mock

MAX_BYTES = 1 << 30


def folder() -> pathlib.Path:
  """One per version of jaxlib and per processor, whose instructions the programs use."""
  cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
  cpuinfo = pathlib.Path("/proc/cpuinfo")
  text = cpuinfo.read_text() if cpuinfo.exists() else platform.processor()
  described = set(re.findall(r"^(?:model name|flags|Features)\b.*", text, re.MULTILINE)) or {text}
  processor = hashlib.sha256("".join(sorted(described)).encode()).hexdigest()[:8]
  version = importlib.metadata.version("jaxlib")
  return cache / "ultraep_jax" / "tests" / f"{version}-{platform.machine()}-{processor}"


def settings() -> dict[str, str]:
  """Environment variables under which JAX keeps every program."""
  return {
    "JAX_COMPILATION_CACHE_DIR": str(folder()),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }


def keep_in_every_process() -> None:
  """Also in those of a distributed program other than the first one, which JAX leaves out."""
  from jax._src import compiler, distributed  # not before the environment is set

  write = compiler._cache_write

  def write_as_first(*args: Any) -> None:
    with mock.patch.object(distributed.global_state, "process_id", 0):
      write(*args)

  compiler._cache_write = write_as_first


def trim(path: pathlib.Path, max_bytes: int = MAX_BYTES) -> None:
  """Deletes the programs used longest ago until the rest have ``max_bytes`` at most."""
  entries = []
  for entry in path.glob("*-cache"):
    with contextlib.suppress(FileNotFoundError):  # another run deletes it
      status = entry.stat()
      entries.append((max(status.st_atime, status.st_mtime), status.st_size, entry))
  kept = 0
  for _, size, entry in sorted(entries, reverse=True):
    kept += size
    if kept > max_bytes:
      entry.unlink(missing_ok=True)
