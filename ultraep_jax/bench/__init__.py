"""Measurements that choose between ways to do a thing; see docs/benchmarks.md."""
