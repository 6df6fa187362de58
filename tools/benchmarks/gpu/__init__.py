"""Benchmarks for a GPU machine that has the host importable and no package index."""
