"""Benches of policies, admission and the cost model, on the engine and in the simulator."""
