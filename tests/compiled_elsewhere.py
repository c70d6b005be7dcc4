"""Runs a bench with programs that were compiled elsewhere, where there may be no GPU.

A layer's program with gradients takes a quarter of a minute to trace and minutes to compile. Once
that is done, it takes a second to load::

    python tests/compiled_elsewhere.py make programs --gpu h200 --topology 1x1x4 matrix --ratios 1
    python tests/compiled_elsewhere.py run programs matrix --ratios 1

The first needs what ``ultraep bench compile`` needs. A program's file is named by what it is for,
the GPUs and their nodes among that, by the sources of the package and by the version of jax: a
program of other code is not found. What is not found is compiled. Programs with attention by cuDNN
cannot be made.
Seen with jax 0.11.2, programs made for H200 and H100 on a machine without a GPU and run on four.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels
import ultraep_jax
from ultraep_jax import cli, nodes
from ultraep_jax.bench.compile import targets
from ultraep_jax.bench.layer import command as layer
from ultraep_jax.bench.layer import problem, times
from ultraep_jax.bench.matrix import cells, programs
from ultraep_jax.bench.matrix import command as matrix
from ultraep_jax.bench.stress import command as stress
from ultraep_jax.bench.stress import layer as stress_layer
from ultraep_jax.devices import known
from ultraep_jax.tools import processes

Tried = Callable[[pathlib.Path, Callable[[], Any]], Any]  # does it, and notes a failure
BENCHES = {"layer": layer, "matrix": matrix, "stress": stress}
COMPARISONS = tuple(stress._COMPARISONS)
# Arguments of the layer's bench that say which programs it runs or what becomes of the times. What
# else a program depends on is in its name.
_CHOOSING = {"shapes", "ratios", "passes", "variants", "repeats", "json", "plot", "statistics"}
_CHOOSING |= {"check", "profile", "bounds", "memory", "compile_workers", "processes", "ranks"}


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
    with using(Folder(args.folder, makes=False)):
      return cli.main(["bench", args.bench, *rest])
  if not args.here:  # in a process that asks for no GPU
    command = [sys.executable, __file__, "make", "--here", *sys.argv[2:]]
    return subprocess.run(command, env=targets.environment(), check=False).returncode
  devices = targets.devices(args.gpu, args.topology)
  with using(Folder(args.folder, makes=True)) as failed, pretending(devices):
    make(args.bench, rest)
  print("not compiled: " + (", ".join(failed) or "nothing"), flush=True)
  return 1 if failed else 0


def make(bench: str, arguments: list[str]) -> None:
  """Compiles a bench's programs; of stress, those of comparisons, as transfers' take seconds."""
  comparisons = [part for part in COMPARISONS if part in arguments] or COMPARISONS
  for part in comparisons if bench == "stress" else [None]:
    with contextlib.suppress(Made):
      BENCHES[bench].main([*arguments, *(["--parts", part] if part else [])])


@functools.cache
def code() -> str:
  """What changes with the package's sources and with jax."""
  digest = hashlib.sha256(f"{jax.__version__} {jaxlib.__version__}".encode())
  for package in (pallas_kernels, ultraep_jax):
    (root,) = map(pathlib.Path, package.__path__)
    for path in sorted(each for each in root.rglob("*") if each.suffix in (".py", ".json")):
      digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
  return digest.hexdigest()[:12]


def place(devices: Sequence[Any]) -> str:
  """What the layer asks of devices: how many there are, their description, and how many nodes."""
  known_as = known.find(devices[0].device_kind)
  name = devices[0].platform if known_as is None else known_as.name
  return f"{len(devices)}x{name}on{len(set(nodes.of_devices(devices).tolist()))}"


def digest_of(*values: Any) -> str:
  return hashlib.sha256(repr(values).encode()).hexdigest()[:12]


def failure(path: pathlib.Path) -> pathlib.Path:
  """Says why a program could not be compiled."""
  return path.with_name(f"{path.name}.failed")


def write(path: pathlib.Path, data: bytes) -> None:
  """Whole, or not at all."""
  part = path.parent / f"{path.name}.{os.getpid()}.{threading.get_ident()}"
  part.write_bytes(data)
  part.rename(path)


@dataclasses.dataclass(frozen=True)
class Folder:
  """Programs in files.

  Attributes:
    path: of the folder.
    makes: whether what is not there is compiled and written, and what is there left alone;
      otherwise what is there is loaded, and what is not is compiled and forgotten.
  """

  path: pathlib.Path
  makes: bool

  def __post_init__(self) -> None:
    self.path.mkdir(parents=True, exist_ok=True)

  def file(self, *name: Any) -> pathlib.Path:
    return self.path / "_".join(map(str, (*name, code())))

  def program(
    self, path: pathlib.Path, lower: Callable[[], Any], tried: "Tried" = lambda _, work: work()
  ) -> "Program":
    """In place of a lowered one, which is traced now if it is to be made."""
    if self.makes and not path.exists():
      lowered = lower()
      return Program(path, lambda: lowered, True, tried)
    return Program(path, lower, self.makes, tried)

  def group(
    self, group: cells.Group, devices: Sequence[Any], implementation: str, width: int, weights: str
  ) -> pathlib.Path:
    """The file of a group of the matrix, whose bench may have made it narrower."""
    return self.file("matrix", *group, place(devices), implementation, width, weights)


_lowering = threading.Lock()  # who traces hides warnings of the whole process


@dataclasses.dataclass(frozen=True)
class Program:
  """A program that is read from its file when it would be compiled."""

  path: pathlib.Path
  lower: Callable[[], Any]
  makes: bool
  tried: "Tried"

  def compile(self) -> Any:
    start, there = time.perf_counter(), self.path.exists()
    if there:
      compiled = None if self.makes else load(self.path)
    else:
      compiled = self.tried(self.path, self._compile)
    way = "there" if there else "compiled"
    print(f"{self.path.name}: {way}, {time.perf_counter() - start:.1f} s", flush=True)
    return compiled

  def _compile(self) -> Any:
    with _lowering:
      lowered = self.lower()
    compiled = lowered.compile()
    if self.makes:
      write(self.path, pickle.dumps(saved(compiled)))
    return compiled


def saved(compiled: Any) -> tuple[int, Any]:
  """How many devices a program is for, and its parts."""
  devices = len(jax.tree.leaves(compiled.output_shardings)[0].device_set)
  return devices, serialize_executable.serialize(compiled)


def load(path: pathlib.Path) -> Any:
  return loaded(pickle.loads(path.read_bytes()))


def loaded(parts: tuple[int, Any]) -> Any:
  devices, whole = parts
  return serialize_executable.deserialize_and_load(
    *whole, execution_devices=jax.devices()[:devices]
  )


def make_group(path: pathlib.Path, mesh: jax.sharding.Mesh, group: cells.Group, *rest: Any) -> None:
  """Compiles the programs of a group of the matrix into a file."""
  jax.clear_caches()
  made = programs.compile_group(mesh, group, *rest)
  named = {**made.variants, programs._SCALARS: made.scalars}
  write(path, pickle.dumps({name: saved(each) for name, each in named.items()}))


def load_group(path: pathlib.Path, group: cells.Group) -> programs.Programs:
  """The programs of a group of the matrix."""
  whole = pickle.loads(path.read_bytes())
  with futures.ThreadPoolExecutor() as pool:
    named = dict(zip(whole, pool.map(loaded, whole.values()), strict=True))
  scalars = named.pop(programs._SCALARS)
  return programs.Programs(named, scalars, programs.calls_of(group))


@contextlib.contextmanager
def using(folder: Folder) -> Iterator[list[str]]:
  """Benches write programs to the folder, or read them from it. Gives names of what fails."""
  lower, compile_group = times.Programs._lower, matrix.compile_group
  failed: list[str] = []
  running: list[str] = []  # a comparison, and the implementation that it compares

  def tried[T](path: pathlib.Path, work: Callable[[], T]) -> T:
    try:
      return work()
    except Exception as error:  # which benches report, and go on
      failed.append(path.name)
      if folder.makes:
        write(failure(path), repr(error).encode())
      raise

  def lower_layer(self: Any, case: Any, problem: Any, variant: str) -> Program:
    arguments = {name: value for name, value in vars(self.args).items() if name not in _CHOOSING}
    sizes = digest_of(sorted(arguments.items()), self.mesh.shape_tuple)
    where = place(list(self.mesh.devices.flat))
    path = folder.file("layer", *self.key(case, problem, variant), where, sizes)
    lower_it = functools.partial(lower, self, case, problem, variant)
    return tried(path, lambda: folder.program(path, lower_it, tried))

  def group_of_matrix(mesh: Any, group: cells.Group, implementation: str, arguments: Any) -> Any:
    width, rest = arguments[0].shape[1], (implementation, arguments)
    weights = str(arguments[3].wo.dtype)
    path = folder.group(group, list(mesh.devices.flat), implementation, width, weights)
    if not folder.makes:
      return load_group(path, group) if path.exists() else compile_group(mesh, group, *rest)
    make_it = functools.partial(make_group, path, mesh, group, *rest)
    return None if path.exists() else tried(path, make_it)

  def compare(calls: Sequence[tuple[Any, tuple[Any, ...]]], say: stress_layer.Say) -> list[Any]:
    start, ready = time.perf_counter(), dict[Any, Program]()
    for function, arguments in calls:
      if function not in ready:
        leaves = jax.tree.leaves(arguments)
        sizes = digest_of([(leaf.shape, str(leaf.dtype)) for leaf in leaves])
        where = place(list(leaves[0].sharding.mesh.devices.flat))
        path = folder.file("stress", *running, len(ready), where, sizes)
        lower_it = functools.partial(function.lower, *arguments)
        ready[function] = tried(path, functools.partial(folder.program, path, lower_it, tried))
    with futures.ThreadPoolExecutor() as pool:
      compiled = dict(zip(ready, pool.map(Program.compile, ready.values()), strict=True))
    say(f"{len(compiled)} programs in {time.perf_counter() - start:.1f} s")
    return [compiled[function] for function, _ in calls]

  def noting(part: str, comparison: Callable[..., Any]) -> Callable[..., Any]:
    def run(devices: Any, scale: int, seed: int, implementation: str, say: Any) -> Any:
      running[:] = [part, implementation]
      return comparison(devices, scale, seed, implementation, say)

    return run

  noted = {part: noting(part, comparison) for part, comparison in stress._COMPARISONS.items()}
  with (
    mock.patch.object(times.Programs, "_lower", lower_layer),
    mock.patch.object(matrix, "compile_group", group_of_matrix),
    mock.patch.object(stress_layer, "_compiled", compare),
    mock.patch.dict(stress._COMPARISONS, noted),
  ):
    yield failed


@contextlib.contextmanager
def pretending(devices: list[Any]) -> Iterator[None]:
  """Benches lower for these devices, with arrays that are not there, and time nothing."""

  def put(tree: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(lambda leaf: Abstract(leaf.shape, leaf.dtype, sharding=sharding), tree)

  def normal(
    mesh: jax.sharding.Mesh,
    seed: int,
    scale: float,
    *sizes: int,
    spec: P | None = None,
    dtype: Any = jnp.bfloat16,
  ) -> Abstract:
    del seed, scale
    sharding = NamedSharding(mesh, spec or P(problem.AXIS))
    return Abstract(sizes, jnp.dtype(dtype), sharding=sharding)

  def make_mesh(
    sizes: Any, names: Any, axis_types: Any, *, devices: Any = devices
  ) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(devices).reshape(sizes), names, axis_types=axis_types)

  def only(compile_them: Callable[..., Any]) -> Callable[..., Any]:
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
