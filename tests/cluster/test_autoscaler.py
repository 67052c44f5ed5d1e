"""Automatic scaling with a fake clock and scripted replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from vlora.cluster.autoscaler import Autoscaler
from vlora.errors import BadRequest
from vlora.routing.router import Advice
from vlora.routing.scaling import ScalingSettings

CALM, LIGHT = Advice(0, (), ()), Advice(0, ("idle",), ())


class Fake:
    """Replicas by place."""

    def __init__(self, *, automatic: bool = True) -> None:
        self.number = 1
        self.in_operation = False
        self.ready = {0}
        self.failures: dict[int, str] = {}
        self.now = 0.0
        self.wait_s = 0.0
        self.found = CALM
        self.busy: set[int] = set()  # of those that drain
        self.orders: list[int] = []
        settings = ScalingSettings(1, 3, up_after_s=2.0, down_after_s=5.0)
        self.scaler = Autoscaler(self, settings, lambda: self.now, automatic=automatic, start_s=100.0)

    def absent(self) -> Mapping[int, str]:
        return {place: self.failures.get(place, "") for place in range(self.number) if place not in self.ready}

    def serves(self, number: int) -> bool:
        return set(range(number)) <= self.ready

    def advice(self) -> Advice:
        return self.found

    def longest_wait_s(self) -> float:
        return self.wait_s

    async def advance(self, number: int) -> bool:
        if not self.serves(1):
            raise BadRequest("none would remain")
        self.orders.append(number)
        self.number = number
        if any(place >= number for place in self.busy):
            return False
        self.ready = {place for place in self.ready if place < number}
        return True

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            asyncio.run(self.scaler.tick())


def test_replicas_are_added_while_requests_wait_and_released_later() -> None:
    fake = Fake()
    fake.run(3)
    assert fake.number == 1 and not fake.orders
    fake.wait_s = 2.5
    fake.run(20)  # one start at a time
    assert fake.orders == [2]
    status = fake.scaler.status
    assert (status.number, status.automatic, status.decisions["waiting"]) == (2, True, 1)
    assert status.decision == "2 instead of 1: a request waited for 2.5 s" and status.decided_s == 19.0
    fake.ready.add(1)
    fake.wait_s, fake.found = 0.0, LIGHT
    fake.busy.add(1)
    fake.run(6)
    assert fake.orders == [2, 1] and fake.number == 1 and fake.ready == {0, 1}
    fake.run(4)
    assert fake.orders == [2] + 5 * [1]  # it drains
    fake.busy.clear()
    fake.run(4)
    assert fake.orders == [2] + 6 * [1] and fake.ready == {0}
    assert fake.scaler.status.decision == "1 instead of 2: the others had room for all requests for 5 s"


def test_load_that_returns_ends_a_drain() -> None:
    fake = Fake()
    fake.number, fake.ready, fake.found, fake.busy = 2, {0, 1}, LIGHT, {1}
    fake.scaler = Autoscaler(fake, ScalingSettings(1, 3, 2.0, 5.0), lambda: fake.now, automatic=True)
    fake.run(8)
    assert fake.number == 1
    fake.found, fake.wait_s = CALM, 3.0
    fake.run(1)
    assert fake.number == 2 and fake.ready == {0, 1} and not fake.scaler.status.problem
    fake.wait_s = 0.0
    fake.run(50)
    assert fake.number == 2 and fake.orders[-1] == 2


def test_a_start_that_fails_is_given_up_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake()
    fake.wait_s, fake.failures = 9.0, {1: "replica-1 does not start: no memory"}
    fake.run(4)
    assert fake.orders == [2, 1]
    status = fake.scaler.status
    assert status.problem == "a replica did not start; see the server log; none is added for 10 s"
    assert "automatic scaling: replica-1 does not start: no memory" in caplog.messages
    assert status.decision == f"1 instead of 2: {status.problem}" and status.decisions["failed"] == 1
    fake.run(7)
    assert fake.orders == [2, 1]
    fake.failures.clear()
    fake.run(3)
    assert fake.orders == [2, 1, 2] and fake.scaler.status.problem
    fake.ready.add(1)
    fake.run(1)
    assert not fake.scaler.status.problem


def test_a_start_without_an_end_fails_too() -> None:
    fake = Fake()
    fake.wait_s = 9.0
    fake.run(100)
    assert fake.orders == [2]
    fake.run(3)
    assert fake.orders == [2, 1]
    assert fake.scaler.status.problem.startswith("no start within 100 s; none is added for 10 s")


def test_a_failed_start_below_one_that_succeeded_ends_neither() -> None:
    fake = Fake()
    fake.found, fake.failures = Advice(2, (), ()), {1: "no memory"}
    fake.ready = {0, 2}
    fake.run(30)
    assert fake.orders == [3, 3] and fake.ready == {0, 2} and fake.scaler.status.problem


def test_a_failed_start_ends_no_other_replica_that_is_down() -> None:
    fake = Fake()
    fake.number, fake.ready = 2, {0, 1}
    fake.scaler = Autoscaler(fake, ScalingSettings(1, 3, 2.0, 5.0), lambda: fake.now, automatic=True)
    fake.wait_s, fake.failures = 9.0, {2: "no memory"}
    fake.run(1)
    fake.ready = {0}  # 1 has served, and is started again
    fake.run(1)
    assert fake.orders == [3, 2] and fake.number == 2


def test_a_failed_start_leaves_a_start_below_it() -> None:
    fake = Fake()
    fake.wait_s, fake.found, fake.failures = 9.0, Advice(2, (), ()), {2: "no memory"}
    fake.run(5)
    assert fake.orders == [3, 2] and fake.number == 2
    fake.ready.add(1)
    fake.run(1)
    assert not fake.scaler.status.problem


def test_a_failed_start_ends_a_start_above_it() -> None:
    fake = Fake()
    fake.wait_s, fake.found, fake.failures = 9.0, Advice(2, (), ()), {1: "no memory"}
    fake.run(5)
    assert fake.orders == [3, 1] and fake.number == 1


def test_a_replica_that_is_started_again_counts_as_one_that_starts() -> None:
    fake = Fake()
    fake.number, fake.wait_s, fake.found = 2, 9.0, Advice(1, (), ())
    fake.scaler = Autoscaler(fake, ScalingSettings(1, 3, 2.0, 5.0), lambda: fake.now, automatic=True)
    fake.run(20)
    assert not fake.orders
    fake.failures = {1: "no memory"}
    fake.run(1)
    assert fake.orders == [3]


def test_a_drain_goes_on_after_the_other_replicas_were_down(caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake()
    fake.number, fake.ready, fake.found, fake.busy = 2, {0, 1}, LIGHT, {1}
    fake.scaler = Autoscaler(fake, ScalingSettings(1, 3, 2.0, 5.0), lambda: fake.now, automatic=True)
    fake.run(8)
    assert fake.number == 1
    fake.ready = {1}
    fake.run(3)
    fake.ready = {0, 1}
    fake.busy.clear()
    fake.run(3)
    assert fake.number == 1 and fake.ready == {0} and not caplog.records


def test_an_operators_number_holds_until_automatic_scaling_is_turned_on() -> None:
    fake = Fake()
    fake.scaler.set_by_operator(2)
    fake.number, fake.ready, fake.wait_s = 2, {0, 1}, 9.0
    fake.run(20)
    status = fake.scaler.status
    assert not fake.orders and not status.automatic and status.decision == "2 instead of 1: set by an operator"
    fake.scaler.turn_on()
    fake.scaler.turn_on()
    assert fake.scaler.status.automatic
    fake.run(4)
    assert fake.orders[-1] == 3


def test_nothing_is_changed_during_an_operators_change() -> None:
    fake = Fake()
    fake.wait_s, fake.in_operation = 9.0, True
    fake.run(9)
    assert not fake.orders


def test_a_refused_change_and_an_error_are_survived() -> None:
    fake = Fake()
    fake.wait_s, fake.ready = 9.0, set()
    fake.run(3)
    assert not fake.orders and fake.number == 1
    fake.ready = {0}
    fake.run(4)
    assert fake.orders == [2]

    async def main() -> None:
        fake.in_operation = False
        del fake.found
        running = asyncio.create_task(fake.scaler.run(0.001))
        await asyncio.sleep(0.02)
        assert not running.done()
        fake.found, fake.now = CALM, fake.now + 1
        running.cancel()

    asyncio.run(main())
