"""Many replicas behind one `EngineInterface`. Loads without torch.

`connection.py` is a front end's connection to a replica, `replica.py` a replica's process with its front ends
(`peers.py`), `in_flight_request.py` a request on its way across replicas, `cluster.py` the interface that a front end
holds.
"""
