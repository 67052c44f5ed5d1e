"""Draining while requests wait: those of the draining replica get the next places."""

from __future__ import annotations

from vlora.routing import Need, Room, Router


def full(*, over: float = 1.0) -> Router:
    """Replica a has requests 0 to 3, replica b 4 to 7; 8 and 9 wait. a drains."""
    router = Router("placed", over=over)
    router.join("a", Room(4, 100))
    for number in range(4):
        router.submit(Need(str(number), None, 5, number, answer_by=1.0))
    router.join("b", Room(4, 100))
    for number in range(4, 10):
        router.submit(Need(str(number), None, 5, number, priority=5))
    assert router.num_waiting == 2
    router.drain("a")
    return router


def test_requests_of_a_draining_replica_get_the_next_places() -> None:
    router = full()
    assert router.consolidate() == []
    recalled = router.recall()
    assert [need.request_id for need in recalled.needs] == ["3", "2"]  # the newest
    assert recalled.placed == [] and router.recall().needs == []  # two at a time
    router.refuse(2.0)  # after the bound on their first answer
    assert [place.need.request_id for place in router.ended("4")] == ["2"]
    assert [need.request_id for need in router.recall().needs] == ["1"]
    for number in (5, 6, 7):
        router.ended(str(number))
        router.recall()
    assert [router.where(str(number)) for number in range(4)] == ["b"] * 4
    assert not router.replicas["a"].holds and router.num_waiting == 2  # 8 and 9, in spite of their priority
    router.check_integrity()


def test_a_request_that_fits_nowhere_else_stays() -> None:
    router = full()
    router.bar("b", "x")
    router.drain("a", False)
    router.ended("2")
    router.ended("8")
    router.ended("9")
    (place,) = router.submit(Need("barred", "x", 1, 20))
    assert place.replica == "a"
    router.grew("3", 101)
    router.submit(Need("waits", None, 5, 21))
    router.drain("a")
    assert [need.request_id for need in router.recall(9).needs] == ["1", "0"]
    assert {router.where(name) for name in ("3", "barred")} == {"a"}


def test_nothing_is_recalled_unless_requests_wait_and_others_serve() -> None:
    router = full()
    router.drain("b")
    assert router.recall().needs == []
    router.drain("b", False)
    router.ended("8")
    router.ended("9")
    assert router.num_waiting == 0 and router.recall().needs == []
    router.ended("4")
    assert [move.request_id for move in router.consolidate()] == ["0"]
