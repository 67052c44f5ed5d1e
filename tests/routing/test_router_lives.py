"""Random lives of the router: nothing is lost or doubled, no replica is over its room, and records repeat."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.example_counts import scaled
from tests.routing.integrity import check_integrity
from vlora.routing import RULES, Need, Placed, Report, Room, Router
from vlora.routing.journal import RecordedRouter, replay_calls

QUEUEING = [name for name, rule in RULES.items() if rule.queues]


STEPS = 120


class Life:
    """A caller of the router, with its own account of where each request is."""

    def __init__(self, rule: str, seed: int, weights: dict[str, float] | None = None) -> None:
        self.draws = random.Random(seed)
        self.router = Router(rule, tenant_weights=weights)
        self.alive: dict[str, Need] = {}
        self.where: dict[str, str] = {}
        self.number = self.joined = 0
        self.taken: Counter[str] = Counter()  # requests that a replica has received, and those of them that have ended
        self.ended: Counter[str] = Counter()
        self.reports: dict[str, list[Report]] = {}  # made, but not delivered yet

    def note(self, placed: Iterable[Placed]) -> None:
        for need, name in placed:
            assert need.request_id in self.alive and need.request_id not in self.where, "doubled"
            assert self.router.where(need.request_id) == name
            self.put(need.request_id, name)

    def put(self, request_id: str, name: str) -> None:
        self.where[request_id] = name
        self.taken[name] += 1

    def take(self, request_id: str) -> None:
        self.ended[self.where.pop(request_id)] += 1

    def join(self) -> None:
        self.joined += 1
        draws = self.draws
        room = Room(draws.randint(1, 6), draws.randint(8, 40), draws.randint(1, 4))
        self.note(self.router.join(f"r{self.joined}", room))

    def leave(self) -> None:
        name = self.draws.choice(list(self.router.replicas))
        lost = self.router.leave(name)
        assert {need.request_id for need in lost} == {key for key, value in self.where.items() if value == name}
        assert [need.arrival for need in lost] == sorted(need.arrival for need in lost)
        self.reports.pop(name, None)
        for need in lost:
            self.take(need.request_id)
            self.alive[need.request_id] = need._replace(returned=True)
            self.note(self.router.submit(self.alive[need.request_id]))

    def submit(self) -> None:
        draws = self.draws
        need = Need(
            str(self.number),
            draws.choice((None, "a", "b", "c", "d")),
            draws.randint(1, 8),
            self.number,
            priority=draws.choice((0, 0, 0, 1)),
            tenant=draws.choice("xyz"),
            answer_by=draws.choice((None, None, 10.0)),
            prefix=tuple(bytes([draws.randrange(3), place]) for place in range(draws.randint(0, 3))),
        )
        self.number += 1
        self.alive[need.request_id] = need
        self.note(self.router.submit(need))

    def end(self) -> None:
        request_id = self.draws.choice(list(self.alive))
        del self.alive[request_id]
        if request_id in self.where:
            self.take(request_id)
        self.note(self.router.ended(request_id))

    def grow_and_evict(self) -> None:
        """An answer outgrows its replica, so the newest request there makes room."""
        name = self.draws.choice(list(self.router.replicas))
        replica = self.router.replicas[name]
        if len(replica.holds) < 2:
            assert self.router.evict(name) is None
            return
        newest = max(replica.holds.values(), key=lambda need: need.arrival)
        grower = next(need for need in replica.holds.values() if need is not newest)
        self.router.grew(grower.request_id, grower.blocks + replica.free_blocks + newest.blocks)
        assert replica.free_blocks < 0 or newest.blocks == 0
        eviction = self.router.evict(name)
        assert eviction is not None and eviction.need.request_id == newest.request_id
        self.take(newest.request_id)
        self.alive[newest.request_id] = eviction.need
        self.note(eviction.placed)
        assert self.where.get(newest.request_id) != name
        # It ends, since its size exceeds the room; earlier reports do not include its growth.
        self.reports.pop(name, None)
        del self.alive[grower.request_id]
        self.take(grower.request_id)
        self.note(self.router.ended(grower.request_id))

    def move(self) -> None:
        name = self.draws.choice(list(self.router.replicas))
        draining = self.draws.random() < 0.5
        self.note(self.router.drain(name, draining))
        for moved in self.router.consolidate():
            assert self.where[moved.request_id] == moved.source != moved.target
            self.take(moved.request_id)
            self.put(moved.request_id, moved.target)
        recalled = self.router.recall()
        assert len(recalled.needs) <= 2
        for need in recalled.needs:
            assert draining and self.where[need.request_id] == name and need.returned and need.answer_by is None
            self.take(need.request_id)
            self.alive[need.request_id] = need
        self.note(recalled.placed)
        self.note(self.router.drain(name, False))

    def report(self) -> None:
        """A replica makes a report, or an earlier one arrives, which must not change what the router knows exactly."""
        name = self.draws.choice(list(self.router.replicas))
        replica = self.router.replicas[name]
        made = self.reports.setdefault(name, [])
        if not made or self.draws.random() < 0.5:
            free = replica.room.blocks - sum(need.blocks for need in replica.holds.values())
            adapters = None if self.draws.random() < 0.3 else set(self.draws.sample("abcd", 2))
            made.append(Report(free, self.taken[name], self.ended[name], None, adapters))
            return
        report, before = made.pop(0), replica.free_blocks
        self.note(self.router.report(name, report))
        assert replica.free_blocks == before and replica.size == len(replica.holds)
        if report.adapters is not None:
            held = {need.adapter for need in replica.holds.values()} - {None}
            assert replica.resident.keys() == report.adapters | held

    def refuse(self) -> None:
        refused = self.router.refuse(self.draws.choice((5.0, 11.0)))
        for need, _ in refused.refusals:
            assert need.request_id not in self.where
            del self.alive[need.request_id]
        self.note(refused.placed)

    def step(self) -> None:
        what = self.draws.random()
        if what < 0.06 or not self.router.replicas:
            self.join()
        elif what < 0.09 and len(self.router.replicas) > 1:
            self.leave()
        elif what < 0.5 or not self.alive:
            self.submit()
        elif what < 0.75:
            self.end()
        elif what < 0.8:
            self.move()
        elif what < 0.92:
            self.report()
        elif what < 0.94:
            self.refuse()
        elif what < 0.96:
            self.router.replan()
        else:
            self.grow_and_evict()

    def check(self) -> None:
        router = self.router
        check_integrity(router)
        waiting = {request_id for request_id in self.alive if router.is_waiting(request_id)}
        assert waiting == self.alive.keys() - self.where.keys(), "lost"
        assert router.num_waiting == len(waiting)
        assert all(router.where(request_id) == name for request_id, name in self.where.items())
        for replica in router.replicas.values():
            assert replica.size <= replica.capacity
            assert replica.free_blocks == replica.room.blocks - sum(n.blocks for n in replica.holds.values()) >= 0


@pytest.mark.parametrize("rule", QUEUEING)
@settings(max_examples=scaled(60), deadline=None)
@given(seed=st.integers(0, 10**9), shares=st.booleans())
def test_nothing_is_lost_or_doubled_or_over_the_room(rule: str, seed: int, shares: bool) -> None:
    life = Life(rule, seed, {"x": 2.0} if shares else None)
    for _ in range(STEPS):
        life.step()
        life.check()


@pytest.mark.parametrize("rule", ["least_loaded", "round_robin"])
@settings(max_examples=scaled(30), deadline=None)
@given(seed=st.integers(0, 10**9))
def test_rules_without_a_queue_send_everything_at_once(rule: str, seed: int) -> None:
    life = Life(rule, seed)
    life.join()
    for _ in range(STEPS):
        life.draws.choice((life.submit, life.submit, life.join))()
        if life.alive and life.draws.random() < 0.3:
            life.end()
        check_integrity(life.router)
        assert life.router.num_waiting == 0 and life.where.keys() == life.alive.keys()


@pytest.mark.parametrize("rule", QUEUEING)
@settings(max_examples=scaled(60), deadline=None)
@given(seed=st.integers(0, 10**9))
def test_a_drained_replica_becomes_empty(rule: str, seed: int) -> None:
    life = Life(rule, seed)
    for _ in range(STEPS // 2):
        life.step()
    life.note(life.router.join("roomy", Room(1000, 10_000)))
    assert life.router.num_waiting == 0
    for name in list(life.router.replicas):
        if name != "roomy":
            life.router.drain(name)
    for _ in range(STEPS):
        for moved in life.router.consolidate():
            assert life.where[moved.request_id] == moved.source
            life.put(moved.request_id, moved.target)
    life.check()
    assert {name for name, s in life.router.replicas.items() if s.holds} <= {"roomy"}
    for name in list(life.router.replicas):
        if name != "roomy":
            assert life.router.leave(name) == []


@pytest.mark.parametrize("rule", QUEUEING)
@settings(max_examples=scaled(40), deadline=None)
@given(seed=st.integers(0, 10**9))
def test_no_request_waits_that_comes_first_and_finds_room(rule: str, seed: int) -> None:
    """Among alike requests the order is that of arrival, and the first one waits only without room anywhere."""
    draws = random.Random(seed)
    router = Router(rule)
    for number in range(draws.randint(1, 4)):
        router.join(f"r{number}", Room(draws.randint(1, 4), draws.randint(8, 20)))
    placed: list[Need] = []
    needs: list[Need] = []
    running: list[str] = []
    for number in range(STEPS):
        if running and draws.random() < 0.45:
            found = router.ended(running.pop(draws.randrange(len(running))))
        else:
            needs.append(Need(str(number), draws.choice("ab"), draws.randint(1, 8), number))
            found = router.submit(needs[-1])
        placed += [need for need, _ in found]
        running += [need.request_id for need, _ in found]
        assert placed == needs[: len(placed)]
        if router.num_waiting:
            assert not any(s.takes(needs[len(placed)]) for s in router.replicas.values())


DECISIONS = """
from tests.routing.test_router_lives import QUEUEING, Life
for rule in QUEUEING:
    life = Life(rule, 3)
    for _ in range(400):
        life.step()
    print(sorted(life.where.items()), [sorted(life.router.rule.homes(name)) for name in "abcd"])
"""


def test_decisions_do_not_depend_on_the_order_of_sets() -> None:
    """A recorded run can be replayed in another process, where the same strings have other hashes."""
    found = {
        subprocess.run(
            [sys.executable, "-c", DECISIONS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1 and len(found.pop()) > 200


class ContentLife(Life):
    """Answers begin with one of two contents of their adapter, and replicas lack some of them at times."""

    num_confined = 0

    def put(self, request_id: str, name: str) -> None:
        super().put(request_id, name)
        replica = self.router.replicas[name]
        assert replica.has_content(replica.holds[request_id])
        self.num_confined += bool(replica.holds[request_id].version and replica.lacks)

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


def recorded(rule: str, seed: int, number: int = 300) -> list[bytes]:
    """The record of a random life."""
    lines: list[bytes] = []
    life = Life(rule, seed)
    settings = {"rule": rule, "tenant_weights": {"x": 2.0} if seed % 2 else None}
    life.router = cast(Router, RecordedRouter(lines.append, **settings))
    for _ in range(number):
        life.step()
    life.router.advice()
    return lines


@pytest.mark.parametrize("rule", QUEUEING)
def test_a_record_repeats_all_decisions(rule: str) -> None:
    lines = recorded(rule, QUEUEING.index(rule))
    found = replay_calls(lines)
    assert found.difference is None and found.num_calls == len(lines) - 1 > 300


def test_an_unlimited_number_of_requests_is_recorded() -> None:
    lines: list[bytes] = []
    router = RecordedRouter(lines.append, rule="placed", over=math.inf)
    router.join("a", Room(1, 100))
    for number in range(3):
        assert router.submit(Need(f"{number}", None, 1, number))
    assert replay_calls(lines) == (4, None)


def test_another_router_decides_otherwise() -> None:
    lines = recorded("punica", 1)
    other = [lines[0].replace(b"punica", b"placed"), *lines[1:]]
    found = replay_calls(other)
    assert found.difference is not None and found.num_calls < len(lines) - 1
