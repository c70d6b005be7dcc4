"""GPU kernels on plain arrays, written in Pallas Mosaic GPU for Hopper and Blackwell.

They import jax only and know nothing of ``ultraep_jax``, whose layer does not use them yet: it
runs in plain JAX (``implementation="portable"``). ``replicate`` and ``grouped_matmul`` have the
signatures of its portable operations on plain arrays, but leave unused rows and slots unwritten.
"""
