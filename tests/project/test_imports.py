"""Imports and calls run downwards through the layers and in no circle; imports cost little."""

import graphlib
import os
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import pytest
from source_tree import BARE, FILES, ROOT, imported_modules, source_file

import pallas_kernels
import ultraep_jax as uep

# Folders and modules from the top down. A file belongs to the longest that begins its path; what
# stands on one line does not import each other.
LAYERS = """
tests
tests/helpers
examples
ultraep_jax/__main__
ultraep_jax/cli
ultraep_jax/commands
ultraep_jax/__init__
ultraep_jax/bench/compile ultraep_jax/bench/stress ultraep_jax/bench/tune
ultraep_jax/bench/kernels ultraep_jax/bench/matrix ultraep_jax/bench/prefill ultraep_jax/bench/train
ultraep_jax/bench/layer
ultraep_jax/bench/contest
ultraep_jax/bench
ultraep_jax/linen ultraep_jax/models ultraep_jax/nnx ultraep_jax/serve
ultraep_jax/block ultraep_jax/tools
ultraep_jax/sharded
ultraep_jax/moe
ultraep_jax/compute ultraep_jax/simulate ultraep_jax/viewer
ultraep_jax/stats ultraep_jax/strategies ultraep_jax/trace ultraep_jax/transport
ultraep_jax/advice
ultraep_jax/block_params ultraep_jax/doctor ultraep_jax/gating ultraep_jax/planning
ultraep_jax/checks ultraep_jax/testing ultraep_jax/top_k
ultraep_jax/implementation
ultraep_jax/nodes
ultraep_jax/activations ultraep_jax/config ultraep_jax/mesh ultraep_jax/packed ultraep_jax/show
ultraep_jax/differentiated
ultraep_jax/devices ultraep_jax/types ultraep_jax/workloads
ultraep_jax/figures ultraep_jax/files ultraep_jax/tables
pallas_kernels/__init__
pallas_kernels/tunings
pallas_kernels/matmul pallas_kernels/routing
pallas_kernels/planner pallas_kernels/transfer
pallas_kernels/launch
pallas_kernels/sums pallas_kernels/varying pallas_kernels/warp
pallas_kernels/support
"""
PLACES = {place: layer for layer, line in enumerate(LAYERS.split("\n")) for place in line.split()}


def place_of(path: str) -> str:
  names = path.removesuffix(".py").split("/")
  places = ("/".join(names[:length]) for length in range(len(names), 0, -1))
  place = next((place for place in places if place in PLACES), None)
  assert place, f"{path}: expected a place in LAYERS, got none"
  return place


def imported_files(path: str) -> set[str]:
  return {file for module in imported_modules(path) if (file := source_file(module))} - {path}


def test_tests_share_helpers_alone():
  """What pytest adds to the path, so that files are found by bare name; tests import no tests."""
  options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
  assert tuple(options["pythonpath"]) == BARE
  for path in FILES:
    imported = {module.rpartition(".")[2] for module in imported_modules(path)}
    assert not any(name.startswith("test_") for name in imported), path


@pytest.mark.parametrize("path", FILES)
def test_imports_point_down(path):
  place = place_of(path)
  for target in imported_files(path):
    below = place_of(target)
    assert place == below or PLACES[place] < PLACES[below], f"{path} imports {target}"


def test_nothing_imports_itself_through_others():
  """Not even for types, or within a function."""
  graph = graphlib.TopologicalSorter({path: imported_files(path) for path in FILES})
  graph.prepare()  # raises CycleError, which names the files


def test_calls_of_a_layer_point_down():
  """From ``sharded_moe`` on, gradients too; one function calls back what its callers give it."""
  weights = uep.ExpertWeights(*[jnp.ones((8, 4, 4))] * 3)
  arguments = jnp.ones((40, 4)), jnp.ones((40, 2), jnp.int32), jnp.ones((40, 2)), weights
  config = uep.BalanceConfig(replica_slots=1, capacity_factor=1.0)
  calls, back = set(), set()

  def file_of(frame):
    path = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
    return path if path.startswith(("ultraep_jax/", "pallas_kernels/")) else None

  def profile(frame, event, _):
    callee = file_of(frame) if event == "call" else None
    caller = frame.f_back if callee else None
    while caller and not file_of(caller):
      caller = caller.f_back  # through JAX
    if callee and caller and (above := file_of(caller)) != callee:
      calls.add((above, callee))
      if PLACES[place_of(above)] > PLACES[place_of(callee)]:
        back.add(caller.f_code.co_qualname)

  def loss(x, index, gate, weights):
    return jnp.sum(uep.sharded_moe(x, index, gate, weights, config=config)[0])

  with jax.set_mesh(jax.make_mesh((4,), ("expert",), devices=jax.devices()[:4])):
    sys.setprofile(profile)
    try:
      jax.make_jaxpr(jax.grad(loss, argnums=(0, 2, 3)))(*arguments)
    finally:
      sys.setprofile(None)
  assert {caller for caller, _ in calls} > {f"ultraep_jax/{n}.py" for n in ("sharded", "moe")}
  assert back == {"first_that_can"}


def test_every_place_is_there():
  assert set(map(place_of, FILES)) == set(PLACES)


def test_public_kernels_are_all_that_the_library_uses():
  for path in FILES:
    if path.startswith("ultraep_jax/"):
      used = {module for module in imported_modules(path) if module.startswith("pallas_kernels")}
      assert used <= {"pallas_kernels", "pallas_kernels.tunings"}, path


def test_kernels_and_nnx_are_imported_where_they_are_used():
  """Mosaic GPU takes longer to import than all of the library; a layer of plain JAX needs none."""
  code = """
import sys
import jax, jax.numpy as jnp
import ultraep_jax as uep

def loaded():
  pallas = "jax.experimental.pallas", "jax.experimental.mosaic.gpu"
  slow = *pallas, "flax.nnx", "pandas", "matplotlib"
  return [name for name in slow if name in sys.modules]

assert not loaded(), loaded()
config = uep.BalanceConfig(dispatch_dtype="float8_e4m3fn", device=uep.Device.load("h200"))
weights = uep.ExpertWeights(jnp.ones((2, 4, 8)), jnp.ones((2, 4, 8)), jnp.ones((2, 8, 4)))
with jax.set_mesh(jax.make_mesh((1,), ("expert",))):
  call = jnp.ones((3, 4)), jnp.array([[0], [1], [1]]), jnp.ones((3, 1)), weights
  uep.sharded_moe(*call, config=config)
assert not loaded(), loaded()
"""
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env=environment)


@pytest.mark.parametrize("name", pallas_kernels.__all__)
def test_a_public_kernel_is_described(name):
  assert getattr(pallas_kernels, name).__doc__


def test_import_changes_nothing():
  """Importing queries no device, and changes no flag of jax and no environment variable."""
  code = """
import os, jax, flax
flags, environment = dict(jax.config.values), dict(os.environ)
import ultraep_jax, ultraep_jax.cli, pallas_kernels
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "devices were queried"
assert dict(jax.config.values) == flags, "a flag changed"
assert dict(os.environ) == environment, "the environment changed"
"""
  subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
