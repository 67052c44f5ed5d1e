"""Implementations of add-delta on the CPU, and the registry of all strategies."""
