"""Replicas on several machines: a head that others join, their Ray, and the front end's cluster over them.

`plan.py` reads the plan, `head.py` is run by `vlora cluster up`, `node.py` by `vlora cluster join` and by a front end,
`join.py` is the exchange of head and machines, `cluster.py` the front end's cluster.
"""
