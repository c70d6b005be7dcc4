"""Programs kept for the next run of tests."""

import os

import jax
import kept_programs


def test_those_used_longest_ago_go_first(tmp_path):
  for age, name in enumerate(["new", "old", "older"]):
    path = tmp_path / f"{name}-cache"
    path.write_bytes(bytes(10))
    os.utime(path, (1e9 - age, 1e9 - age))
  kept_programs.trim(tmp_path, 30)
  assert len(list(tmp_path.iterdir())) == 3
  kept_programs.trim(tmp_path, 25)
  assert sorted(path.name for path in tmp_path.iterdir()) == ["new-cache", "old-cache"]
  kept_programs.trim(tmp_path, 0)
  assert not list(tmp_path.iterdir())


def test_jax_keeps_every_program_of_this_run():
  assert jax.config.jax_compilation_cache_dir == str(kept_programs.folder())
  assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
