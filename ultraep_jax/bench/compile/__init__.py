"""Compiling every kernel for GPUs that are not here."""
