"""Recorded calls of a router repeat their decisions."""

from __future__ import annotations

import math
from typing import cast

import pytest

from tests.routing.test_router_lives import Life
from vlora.routing import RULES, Need, Room, Router
from vlora.routing.journal import RecordedRouter, replay_calls


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


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.queues])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_record_repeats_all_decisions(rule: str, seed: int) -> None:
    lines = recorded(rule, seed)
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


def test_properties_are_those_of_the_router() -> None:
    router = RecordedRouter(lambda line: None, rule="placed")
    assert router.num_waiting == 0 and router.where("1") is None and router.replicas == {}
    with pytest.raises(AttributeError):
        _ = router.nothing
