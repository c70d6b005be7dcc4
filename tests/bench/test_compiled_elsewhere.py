"""Programs that were compiled elsewhere are found by their texts, and loaded."""

import contextlib

import compiled_elsewhere
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P


def lowered():
  mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
  double = jax.shard_map(
    lambda x: jax.lax.psum(2 * x, "expert"), mesh=mesh, in_specs=P("expert"), out_specs=P()
  )
  return jax.jit(double).lower(jnp.arange(8.0))


def test_a_saved_program_is_loaded_and_not_compiled(tmp_path, monkeypatch):
  with compiled_elsewhere.saving(tmp_path):
    lowered().compile()
  (path,) = tmp_path.iterdir()
  assert path.name == compiled_elsewhere.key(lowered())

  def refuse(*_, **__):
    raise AssertionError("compiled")

  monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
  with compiled_elsewhere.loading(tmp_path):
    # Not run: XLA:CPU of jax 0.12.0.1 does not find its functions in a loaded program.
    loaded = lowered().compile()
    assert loaded.out_tree == lowered().out_tree and len(loaded.output_shardings.device_set) == 4
    with pytest.raises(AssertionError, match="compiled"):
      jax.jit(jnp.sin).lower(1.0).compile()


@pytest.mark.parametrize("bench", ["layer", "matrix", "stress"])
def test_programs_of_a_bench_are_made_without_its_devices(bench):
  """Their texts are those of the bench with real arrays."""
  shared = "--scale 32 --ratios 1 --passes forward --shapes olmoe --repeats 1"
  arguments = {
    "layer": f"{shared} --ranks 4 --data 2 --variants none --tokens 16 --no-statistics",
    "matrix": f"{shared} --ranks 2 --all --tokens 32 --loads zipf",
    "stress": "--scale 64 --parts scan --implementation portable",
  }[bench].split()
  main = compiled_elsewhere.BENCHES[bench].main
  ranks = {"layer": 4, "matrix": 2, "stress": jax.device_count()}[bench]
  with compiled_elsewhere.pretending(jax.devices()[:ranks]):
    made = keys_of(lambda: compiled_elsewhere.make(bench, arguments))
  assert made and made == keys_of(lambda: main(arguments))


def keys_of(run):
  """Of the programs that it would compile."""
  keys = set()

  def note(key, _):
    keys.add(key)
    raise RuntimeError("not compiled")

  with compiled_elsewhere.compiling(note), contextlib.suppress(RuntimeError):
    run()
  return keys
