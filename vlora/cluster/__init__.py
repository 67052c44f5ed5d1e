"""Many replicas behind one `EngineInterface`. Loads without torch.

`door.py` is a line to a replica, `handshake.py` how its ends prove that they know the secret, `replica.py` a replica's
process, `flight.py` a request on its way across replicas, `cluster.py` the interface that a front end holds.
"""
