"""Benchmarks of routing over many replicas, in the simulator."""
