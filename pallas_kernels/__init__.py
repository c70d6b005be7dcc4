"""GPU kernels on plain arrays, written in Pallas Mosaic GPU for Hopper.

They import jax only and know nothing of ``ultraep_jax``, whose operations use them where they run
(``implementation="mosaic_gpu"``). Each equals the portable form of its operation, bit for bit
where integers or copies are concerned, but leaves unused rows and slots unwritten.
"""
