"""Measurements that choose between ways to do a thing; see docs/results.md and docs/lab."""
