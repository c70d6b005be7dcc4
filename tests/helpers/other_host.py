"""A second host, as far as XLA can tell: a process that sees another boot id."""

import pathlib
import subprocess

import pytest

BOOT_ID = "/proc/sys/kernel/random/boot_id"  # by which XLA tells hosts apart


def other_host(tmp_path: pathlib.Path) -> tuple[str, ...]:
  """What makes a command believe that it is on another machine than its siblings."""
  boot_id = tmp_path / "boot_id"
  boot_id.write_text("11111111-2222-3333-4444-555555555555\n")
  mount = f'mount --bind {boot_id} {BOOT_ID} && exec "$@"'
  prefix = ("unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh")
  try:
    allowed = subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
  except OSError:
    allowed = False
  if not allowed:
    pytest.skip("expected the right to mount a file over the kernel's boot_id, got none")
  return prefix
