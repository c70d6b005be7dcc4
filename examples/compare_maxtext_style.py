"""Compares a sparse MoE block in MaxText's form with the same block on balanced experts.

Both have the parameters of MaxText's ``RoutedMoE``; a checkpoint of the one is restored into the
other. Prints how far outputs and gradients differ, and what balancing did.

  python examples/compare_maxtext_style.py     # 8 virtual CPU devices, or all GPUs
"""

import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
from flax import nnx
from maxtext_style.balanced import BalancedRoutedMoE
from maxtext_style.block import Array, Output, RoutedMoE
from maxtext_style.config import Config, make_mesh

try:
  import orbax.checkpoint as ocp
except ImportError as error:
  raise SystemExit("expected orbax, got none: pip install 'ultraep-jax[examples]'") from error

CPU_DEVICES = 8


def main() -> None:
  config, devices = Config(), jax.device_count()
  data = 2 if devices % 4 == 0 else 1
  with (
    jax.set_mesh(make_mesh(data=data, expert=devices // data)),
    tempfile.TemporaryDirectory() as folder,
  ):
    plain = RoutedMoE(config, rngs=nnx.Rngs(0))
    balanced = BalancedRoutedMoE(config, rngs=nnx.Rngs(1))
    copy_by_checkpoint(plain, balanced, pathlib.Path(folder) / "plain")
    x_BLD = skewed_input(jax.random.key(2), (devices, 32, config.base_emb_dim))
    expected = outputs_and_gradients(plain, x_BLD)
    output, *grads = outputs_and_gradients(balanced, x_BLD)
  assert output.stats is not None
  got = [output._replace(stats=None), *grads]
  for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
    difference = jnp.linalg.norm(a - b) / jnp.linalg.norm(b)
    print(f"{jax.tree_util.keystr(path):32} differs by {difference:.1e}")
  for name, value in output.stats.scalars().items():
    print(f"{name:32} {value:.3f}")


def skewed_input(key: Array, shape: tuple[int, ...]) -> Array:
  """Tokens that have something in common, so that the router has favourites."""
  common, own = jax.random.split(key)
  return jax.random.normal(own, shape) + 2 * jax.random.normal(common, (1, 1, shape[-1]))


@nnx.jit
def outputs_and_gradients(block: RoutedMoE, x_BLD: Array) -> tuple[Output, nnx.State, Array]:
  """The output, and the gradients of the parameters and the input of some loss."""

  def loss(block: RoutedMoE, x_BLD: Array) -> tuple[Array, Output]:
    output = block(x_BLD)
    return jnp.sum(jnp.sin(output.y_BLD)) + output.load_balance_loss, output

  wrt = (nnx.DiffState(0, nnx.Param), 1)
  (grads, grad_BLD), output = nnx.grad(loss, argnums=wrt, has_aux=True)(block, x_BLD)
  return output, grads, grad_BLD


def copy_by_checkpoint(source: RoutedMoE, target: RoutedMoE, folder: pathlib.Path) -> None:
  """Saves the parameters of one block in a new folder and restores them into another block."""
  state = nnx.state(target, nnx.Param)
  like = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(state))
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder, nnx.to_pure_dict(nnx.state(source, nnx.Param)))
    checkpointer.wait_until_finished()
    nnx.replace_by_pure_dict(state, checkpointer.restore(folder, like))
  nnx.update(target, state)


if __name__ == "__main__":
  if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    # Possible until JAX first looks for devices; without effect where it finds accelerators.
    jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
  main()
