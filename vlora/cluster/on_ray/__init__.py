"""Replicas that are actors on Ray, which places and restarts them; nothing of a request passes through it.

`cluster.py` is what a front end holds, with `replicas.py` and, beside other front ends, `front_ends.py`. `processes.py`
starts the processes that use Ray: `driver.py`, the only Ray driver, with `connecting.py`, and `local_ray.py`, a Ray of
this machine. `actor.py` is what Ray starts for a replica, `settings.py` has every setting of Ray with its reason,
`reports.py` what these exchange.
"""
