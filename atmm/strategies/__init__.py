"""CPU implementations of add-delta, and the registry of all strategies."""
