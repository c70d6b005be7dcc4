"""Eight virtual CPU devices, strict promotion, deterministic property tests and kept programs."""

import gc
import os
from collections.abc import Iterator

import kept_programs

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
  )
# XLA splits a program to compile its parts side by side, which costs more; each core has a worker.
if "xla_cpu_parallel_codegen_split_count" not in os.environ["XLA_FLAGS"]:
  os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
# XLA:CPU runs parts of a device's program side by side, and forgets the order of collectives in
# loops when it reads the program from the cache: ranks would wait for each other for ever.
if "xla_cpu_multi_thread_eigen" not in os.environ["XLA_FLAGS"]:
  os.environ["XLA_FLAGS"] += " --xla_cpu_multi_thread_eigen=false"
# The emitters that jaxlib 0.11 has besides compile in half the time; later versions ignore this.
if "xla_backend_extra_options" not in os.environ["XLA_FLAGS"]:
  os.environ["XLA_FLAGS"] += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
# As does NumPy a product: its threads wait for each other in loops while other workers compute.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Threads for the warpgroups of interpreted kernels (``mosaic_interpret``): XLA has one for each
# device or core otherwise, too few for four devices on two cores.
os.environ.setdefault("PJRT_NPROC", "64")
os.environ.update(kept_programs.settings())  # before JAX is imported

import gpu_tests
import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
  "deterministic", derandomize=True, deadline=None, max_examples=50, database=None
)
hypothesis.settings.load_profile("deterministic")


def pytest_configure(config: pytest.Config) -> None:
  if gpu_tests.only_gpu(config.option.markexpr):
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # workers share the GPUs
  else:  # for this process, and for those that tests start
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    # Most programs run once, in less time than they would take to optimize.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
    jax.config.update("jax_disable_most_optimizations", True)
  # Tracing makes millions of objects that live until a module ends. To look through them again and
  # again was a seventh of all time.
  gc.disable()
  if not hasattr(config, "workerinput"):  # once a run
    kept_programs.trim(kept_programs.folder())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Marks what is alike under every version of jax, so that ``.ci/run`` tests it under one.

  NumPy, the browser, and the lowering of kernels: a layer's lowering, which has all of them, is
  tested under all versions.
  """
  for item in items:
    folder = item.path.parent.name
    lowers = folder in ("kernels", "bench") and "_lower" in item.name
    if folder in ("simulate", "viewer") or lowers:
      item.add_marker(pytest.mark.any_jax)


def pytest_collection_finish() -> None:
  # What is imported stays. To look through it at the end of each module took 0.12 s.
  gc.collect()
  gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
  gpu_tests.skip_without_gpu(item)


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs() -> Iterator[None]:
  """Frees a module's programs after it.

  Each holds several of the 65,530 memory maps that Linux gives a process by default; a worker
  that kept those of the whole suite would crash in the compiler.
  """
  yield
  jax.clear_caches()
  gc.collect()


@pytest.fixture(scope="module")
def optimized() -> Iterator[None]:
  """Optimizes a module's programs; for modules that assert something about them, or about bits."""
  disabled = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", False)
  yield
  jax.config.update("jax_disable_most_optimizations", disabled)
