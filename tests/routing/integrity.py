"""What holds for a router between any two calls."""

from __future__ import annotations

from collections import Counter

from vlora.routing import Router


def check_integrity(router: Router) -> None:
    """Assert that each request is in one place, and that the indexes agree with the replicas."""
    fleet, queue = router._fleet, router._queue  # noqa: SLF001
    assert fleet.names == sorted(fleet.replicas)
    indexed = {name: size for size, names in fleet._by_size.items() for name in names}  # noqa: SLF001
    assert indexed == {name: s.size for name, s in fleet.replicas.items() if s.open}
    for replica in fleet.replicas.values():
        users = Counter(need.adapter for need in replica.holds.values() if need.adapter is not None)
        assert users == {adapter: count for adapter, count in replica.resident.items() if count}
        assert replica.num_used == len(users) and replica.size >= len(replica.holds)
    holders = {(adapter, name) for adapter, names in fleet._holders.items() for name in names}  # noqa: SLF001
    assert holders == {(adapter, name) for name, s in fleet.replicas.items() for adapter in s.resident}
    held = [request_id for s in fleet.replicas.values() for request_id in s.holds]
    assert len(held) == len(set(held)), "a request is on two replicas"
    assert {*held} == {request_id for request_id in held if router.where(request_id)} == {*router._place_of}  # noqa: SLF001
    assert all(request_id in router._place_of[request_id].holds for request_id in held)  # noqa: SLF001
    assert not any(request_id in queue for request_id in held), "a request waits and is on a replica"
