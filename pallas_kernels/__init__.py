"""GPU kernels on plain arrays, written in Pallas Mosaic GPU for Hopper and Blackwell.

This version contains none: ``ultraep_jax`` runs everything in plain JAX
(``implementation="portable"``). The package holds the place of the kernels, which will import
jax only and know nothing of ``ultraep_jax``.
"""
