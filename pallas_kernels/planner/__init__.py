"""Kernels that plan: probes in parallel, then the best of them and its trees."""
