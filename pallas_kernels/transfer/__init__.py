"""Kernels that write into other GPUs' memory: tokens, copies of weights, their gradients."""
