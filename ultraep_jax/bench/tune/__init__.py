"""Layouts of kernels in turn: the fastest go into a table."""
