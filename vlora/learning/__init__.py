"""Adapters that learn while they serve: answers and corrections on disk, trainings, promotion, and rollback.

One `Learner` per adapter. Its audit log decides which version is served; `Learning` has all of them. They run in the
server's process and use the engine through `Served`.
"""
