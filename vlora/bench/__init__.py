"""Benchmarks that a user runs on his machine, and the harness of all of them. Only the command line imports it."""
