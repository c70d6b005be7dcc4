"""Load traces: what balanced layers did, step by step, on disk.

A training loop or a notebook hands each step's statistics to a ``Recorder``; ``read`` gives them
back as NumPy arrays; ``ultraep view`` draws them. ``import_megatron`` makes a trace
of the router choices that Megatron-LM wrote.

>>> import tempfile
>>> import jax, jax.numpy as jnp
>>> import ultraep_jax as uep
>>> weights = uep.ExpertWeights(jnp.ones((4, 4, 8)), jnp.ones((4, 4, 8)), jnp.ones((4, 8, 4)))
>>> index, config = jnp.array([[0], [1], [1], [2]]), uep.BalanceConfig(replica_slots=1)
>>> with jax.set_mesh(jax.make_mesh((1,), ("expert",))):
...   y, stats = uep.sharded_moe(
...     jnp.ones((4, 4)), index, jnp.ones((4, 1)), weights, config=config
...   )
>>> folder = tempfile.mkdtemp()
>>> with uep.trace.Recorder(folder, name="four tokens", config=config) as recorder:
...   recorder.record(0, {"layer0": stats})
>>> uep.trace.read(folder).expert_load_NE.tolist()
[[1, 2, 1, 0]]
"""

from ultraep_jax.trace.choices import read_choices as read_choices
from ultraep_jax.trace.format import TraceError as TraceError
from ultraep_jax.trace.megatron import import_megatron as import_megatron
from ultraep_jax.trace.reader import Trace as Trace
from ultraep_jax.trace.reader import read as read
from ultraep_jax.trace.recorder import Recorder as Recorder
