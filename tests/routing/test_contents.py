"""An answer that began with one content of its adapter goes on only where that content is."""

from __future__ import annotations

import pytest

from tests.example_counts import scaled
from tests.routing.test_router import need, routed, send
from tests.routing.test_router_lives import Life
from vlora.routing import RULES, Need, Room
from vlora.routing.journal import RecordedRouter, replay_calls
from vlora.routing.router import Refusal

QUEUEING = [name for name, rule in RULES.items() if rule.queues]


@pytest.mark.parametrize("rule", list(RULES))
def test_only_replicas_with_the_content_get_an_answer(rule: str) -> None:
    router = routed(rule, "abc", Room(20, 1000))
    router.lack("a", "x", "1")
    router.lack("c", "x", "1")
    began = [need("x", version="1") for _ in range(5)]
    assert {send(router, each) for each in began} == {"b"}
    # Other contents of this adapter, and other adapters, are not concerned.
    router.lack("b", "x", "2")
    router.lack("b", "y", "1")
    assert {send(router, need("x", version="2")), send(router, need("y", version="1"))} <= {"a", "c"}
    router.lack("b", "x", "1")
    router.lack("a", "x", "1", False)
    assert send(router, need("x", version="1")) == "a"
    router.check_integrity()


@pytest.mark.parametrize("rule", QUEUEING)
def test_a_drained_answer_is_not_moved_to_other_content(rule: str) -> None:
    router = routed(rule, "ab")
    name = send(router, first := need("x"))
    other = "b" if name == "a" else "a"
    router.lack(other, "x", "1")
    router.began(first.request_id, "1")
    assert name is not None
    router.drain(name)
    assert router.consolidate() == []
    router.lack(other, "x", "1", False)
    assert [move[:] for move in router.consolidate()] == [(first.request_id, name, other)]


@pytest.mark.parametrize("rule", QUEUEING)
def test_a_drained_replica_takes_an_answer_that_no_other_can_continue(rule: str) -> None:
    router = routed(rule, "ab")
    router.drain("a")
    router.lack("b", "x", "1")
    returned = need("x", version="1", returned=True)
    assert send(router, returned) is None
    placed = router.refuse(0.0)
    assert placed.refusals == [] and placed.placed == [(returned, "a")]
    router.lack("a", "x", "1")
    lost = need("x", version="1", returned=True)
    assert send(router, lost) is None
    assert router.refuse(0.0).refusals == [Refusal(lost, "content")]
    large = need("x", blocks=1000, version="1")
    assert send(router, large) is None
    assert router.refuse(0.0).refusals == [Refusal(large, "room")]
    router.check_integrity()


class ContentLife(Life):
    """Answers begin with one of two contents of their adapter, and replicas lack some of them at times."""

    num_confined = 0

    def put(self, request_id: str, name: str) -> None:
        super().put(request_id, name)
        standing = self.router.replicas[name]
        assert standing.has_content(standing.holds[request_id])
        self.num_confined += bool(standing.holds[request_id].version and standing.lacks)

    def step(self) -> None:
        what = self.draws.random()
        if what < 0.1 and self.where:
            request_id = self.draws.choice(list(self.where))
            if self.alive[request_id].adapter is not None and self.alive[request_id].version is None:
                version = self.draws.choice("12")
                self.alive[request_id] = self.alive[request_id]._replace(version=version)
                self.router.began(request_id, version)
        elif what < 0.2 and self.router.replicas:
            name, lacks = self.draws.choice(list(self.router.replicas)), self.draws.random() < 0.6
            self.note(self.router.lack(name, self.draws.choice("abcd"), self.draws.choice("12"), lacks))
        else:
            super().step()


@pytest.mark.parametrize("rule", QUEUEING)
def test_random_lives_with_contents_lose_nothing(rule: str) -> None:
    num_confined = 0
    for seed in range(scaled(30)):
        life = ContentLife(rule, seed)
        for _ in range(150):
            life.step()
            life.check()
        num_confined += life.num_confined
    assert num_confined > 0


def test_contents_are_recorded_and_replayed() -> None:
    lines: list[bytes] = []
    router = RecordedRouter(lines.append, rule="placed")
    for name in "ab":
        router.join(name, Room(4, 100))
    [(_, name)] = router.submit(Need("1", "x", 1, 0))
    router.began("1", "v")
    router.lack("b" if name == "a" else "a", "x", "v")
    router.drain(name)
    router.consolidate()
    assert replay_calls(lines) == (len(lines) - 1, None)
    without = [line for line in lines if b'"lack"' not in line]
    assert replay_calls(without).difference is not None
