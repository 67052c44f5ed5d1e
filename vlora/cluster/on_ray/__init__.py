"""Replicas of one machine on a Ray of their own. Ray places and restarts them; nothing of a request passes through it.

`settings.py` has every setting of Ray with its reason, `head.py` is the process that runs Ray, `driver.py` the only Ray
driver, `actor.py` what Ray starts for a replica, `processes.py` starts head and driver again, `cluster.py` is what a
front end holds.
"""
