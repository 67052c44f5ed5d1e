"""The scheduler without a model: real bookkeeping and policies, a simulated clock, and a model of step times.

Reading order: `arrivals.py` (requests), `workloads.py` (their sources), `machine.py` (the cost of a step),
`replica.py` (one simulated engine), `world.py` (the simulation), `measures.py`.
"""
