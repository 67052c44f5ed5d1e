"""The scheduler: selects the requests of each step and the inference mode.

Pure Python, deterministic under a fake clock; uses no tensors.

Reading order: `scheduler.py` (`schedule` and `record`), `policies/base.py` (the interface of policies),
`policies/algorithm1.py` (the paper's policy), `request_state.py` (per-request lengths), `credits.py` (starvation),
`budgets.py` (token and block budgets), `cost_model.py`, `admission/` (from arrival to the first step).
"""
