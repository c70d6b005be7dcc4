"""Runs a bench with programs that were compiled elsewhere, where there may be no GPU.

A layer's program with gradients takes minutes to compile and, once that is done, a second to load::

    python tests/compiled_elsewhere.py make programs --gpu h200 --topology 1x1x4 matrix --ratios 1
    python tests/compiled_elsewhere.py run programs matrix --ratios 1

The first needs what ``ultraep bench compile`` needs. A program is found by its text, which has
the paths and lines of the source in its kernels: so both need the same package at the same path
and the same jax. The lines are those of the first program that traced a kernel, so both also need
the same shapes, variants and passes in the same order. What is not found is compiled. Programs with
attention by cuDNN cannot be made.
Seen with jax 0.11.2, programs made for H200 on a machine without a GPU and run on four.
"""

import argparse
import contextlib
import hashlib
import os
import pathlib
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ultraep_jax import cli
from ultraep_jax.bench.compile import targets
from ultraep_jax.bench.layer import command as layer
from ultraep_jax.bench.layer import problem
from ultraep_jax.bench.matrix import command as matrix
from ultraep_jax.bench.stress import command as stress
from ultraep_jax.bench.stress import layer as stress_layer
from ultraep_jax.tools import processes

Compile = Callable[..., Any]
BENCHES = {"layer": layer, "matrix": matrix, "stress": stress}
COMPARISONS = tuple(stress._COMPARISONS)


class Abstract(jax.ShapeDtypeStruct):
  """An array of devices that are not here: it can be lowered with, and sliced."""

  def __getitem__(self, index: Any) -> "Abstract":
    shape = jax.eval_shape(lambda array: array[index], jax.ShapeDtypeStruct(self.shape, self.dtype))
    mesh, lost = self.sharding.mesh, self.ndim - shape.ndim  # leading axes
    kept = [
      tuple(name for name in jax.tree.leaves(names) if mesh.shape[name] > 1)
      for names in self.sharding.spec[lost:]
    ]
    return Abstract(shape.shape, shape.dtype, sharding=NamedSharding(mesh, P(*kept)))


class Made(Exception):
  """The programs of a group of cells, or of a comparison, are compiled; there is nothing to run."""


def main() -> int:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
  parser.add_argument("action", choices=["make", "run"])
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--gpu", default="h200", choices=list(targets.CHIPS))
  parser.add_argument("--topology", default="1x1x2", help="slices x processes x GPUs of each")
  parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
  parser.add_argument("bench", choices=list(BENCHES))
  args, rest = parser.parse_known_args()
  if args.action == "run":
    with loading(args.folder):
      return cli.main(["bench", args.bench, *rest])
  if not args.here:  # in a process that asks for no GPU
    command = [sys.executable, __file__, "make", "--here", *sys.argv[2:]]
    return subprocess.run(command, env=targets.environment(), check=False).returncode
  devices = targets.devices(args.gpu, args.topology)
  with saving(args.folder), pretending(devices):
    make(args.bench, rest)
  return 0


def make(bench: str, arguments: list[str]) -> None:
  """Compiles a bench's programs; of stress, those of comparisons, as transfers' take seconds."""
  comparisons = [part for part in COMPARISONS if part in arguments] or COMPARISONS
  for part in comparisons if bench == "stress" else [None]:
    with contextlib.suppress(Made):
      BENCHES[bench].main([*arguments, *(["--parts", part] if part else [])])


@contextlib.contextmanager
def saving(folder: pathlib.Path) -> Iterator[None]:
  """Whatever is compiled is written to the folder, unless it is there."""
  folder.mkdir(parents=True, exist_ok=True)

  def compile_and_save(name: str, compile_it: Compile) -> None:
    path = folder / name
    if not path.exists():
      part = path.with_suffix(f".{os.getpid()}")
      compiled = compile_it()
      devices = len(jax.tree.leaves(compiled.output_shardings)[0].device_set)
      part.write_bytes(pickle.dumps((devices, serialize_executable.serialize(compiled))))
      part.rename(path)

  with compiling(compile_and_save):
    yield


@contextlib.contextmanager
def loading(folder: pathlib.Path) -> Iterator[None]:
  """What would be compiled is read from the folder, if it is there."""

  def load(name: str, compile_it: Compile) -> Any:
    path = folder / name
    if not path.exists():
      return compile_it()
    devices, saved = pickle.loads(path.read_bytes())
    return serialize_executable.deserialize_and_load(
      *saved, execution_devices=jax.devices()[:devices]
    )

  with compiling(load):
    yield


def key(program: Any) -> str:
  """The name of a lowered program's file."""
  return hashlib.sha256(program.as_text().encode()).hexdigest()[:24]


@contextlib.contextmanager
def compiling(way: Callable[[str, Compile], Any]) -> Iterator[None]:
  """Programs are compiled in this way: a function of a program's key and of how JAX compiles it."""
  compiles = jax.stages.Lowered.compile

  def compile_it(self: Any, *args: Any, **options: Any) -> Any:
    start, name = time.perf_counter(), key(self)
    compiled = way(name, lambda: compiles(self, *args, **options))
    print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    return compiled

  with mock.patch.object(jax.stages.Lowered, "compile", compile_it):
    yield


@contextlib.contextmanager
def pretending(devices: list[Any]) -> Iterator[None]:
  """Benches lower for these devices, with arrays that are not there, and time nothing."""

  def put(tree: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(lambda leaf: Abstract(leaf.shape, leaf.dtype, sharding=sharding), tree)

  def normal(
    mesh: jax.sharding.Mesh, seed: int, scale: float, *sizes: int, spec: P | None = None
  ) -> Abstract:
    del seed, scale
    sharding = NamedSharding(mesh, spec or P(problem.AXIS))
    return Abstract(sizes, jnp.bfloat16, sharding=sharding)

  def make_mesh(
    sizes: Any, names: Any, axis_types: Any, *, devices: Any = devices
  ) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(devices).reshape(sizes), names, axis_types=axis_types)

  def only(compile_them: Compile) -> Compile:
    def compile_only(*args: Any) -> None:
      compile_them(*args)
      raise Made("compiled")

    return compile_only

  with contextlib.ExitStack() as stack:
    for owner, name, value in [
      (processes, "put", put),
      (problem, "random_normal", normal),
      (jax, "make_mesh", make_mesh),
      (matrix, "devices", lambda *_, **__: devices),
      (matrix, "compile_group", only(matrix.compile_group)),
      (layer, "devices", lambda *_, **__: devices),
      (layer, "measure", lambda *_: []),
      (stress, "devices", lambda **_: devices),
      (stress, "devices_for_kernels", lambda **_: devices),
      (stress_layer, "_compiled", only(stress_layer._compiled)),
      (jnp, "flip", lambda array, axis: array),  # it keeps the shape, which is all that there is
    ]:
      stack.enter_context(mock.patch.object(owner, name, value))
    yield


if __name__ == "__main__":
  raise SystemExit(main())
