"""Prefill of whole models: requests per second, and time to the first token."""
