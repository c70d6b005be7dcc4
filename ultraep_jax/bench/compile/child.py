"""The process that compiles: of one GPU, one program after the other.

A compiler that aborts ends this process only. Each result is a line of JSON on standard output,
after a line that says what is tried.
"""

import json
import os
import pathlib
import sys

import jax

from ultraep_jax.bench.compile import programs, targets


def run() -> None:
  target, topology, folder, *names = sys.argv[1:]
  devices = targets.devices(target, topology)
  for name in names:
    reports = pathlib.Path(folder) / name.replace(" ", "_")
    reports.mkdir(parents=True)
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(reports)
    _say(tries=name)
    function, arguments = programs.build(name, devices)
    try:
      compiled = jax.jit(function).lower(*arguments).compile()
    except (NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as error:
      first = str(error).strip().splitlines()[0]
      _say(name=name, refused=f"{type(error).__name__}: {first}", memory=None)
    else:
      memory = compiled.memory_analysis()
      temporary = None if memory is None else memory.temp_size_in_bytes
      _say(name=name, refused=None, memory=temporary)


def _say(**fields: object) -> None:
  print(json.dumps(fields), flush=True)


if __name__ == "__main__":
  run()
