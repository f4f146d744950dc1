"""Benchmarks of single operations, and what their kernels take of a GPU."""
