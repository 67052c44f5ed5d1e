"""`vlora bench split` without its processes: lockstep, and the goals of measured rows."""

from __future__ import annotations

from typing import Any

from vlora.bench.split import split
from vlora.bench.split.base_process import POLICIES, LockstepQueue
from vlora.split.batching import Call


def test_lockstep_waits_for_every_client() -> None:
    queue: Any = LockstepQueue()
    for client in "abc":
        queue.join(client)
    queue.add(Call("a", 0, 1, 0.0))
    queue.add(Call("b", 0, 200, 0.0))
    assert queue.next(99.0) == () and queue.wait_s(99.0) is None
    queue.add(Call("c", 0, 1, 99.0))
    assert queue.wait_s(99.0) == 0.0 and [call.client for call in queue.next(99.0)] == ["a", "b", "c"]
    queue.add(Call("a", 1, 1, 100.0))
    queue.add(Call("b", 1, 1, 100.0))
    queue.leave("c")
    assert len(queue.next(100.0)) == 2


def measured(clients: int, ratio: float, mib: float, latency: float) -> list[dict[str, Any]]:
    rows = [split.row("memory", way, clients=clients, **{"all MiB": 100.0}) for way in split.WAYS]
    rows[2]["all MiB"] = mib
    for what in ("training, 128 tokens a step", "decoding, one row"):
        rows += [split.row(what, "own copy", ratio=1.0), split.row(what, "one client", ratio=ratio)]
    rows.append(split.row("decoding, one row each", "4 clients", ratio=ratio))
    rows += [split.row("table 5", policy, **{"latency ms": 10.0}) for policy in POLICIES]
    rows[-len(POLICIES)]["latency ms"] = latency
    return rows


def test_goals_are_those_of_the_rows() -> None:
    held = split.goals_of(measured(8, 0.7, 80.0, 9.0))
    assert len(held) == 5 and all(goal.holds for goal in held)
    missed = split.goals_of(measured(8, 1.6, 120.0, 11.0))
    assert not any(goal.holds for goal in missed)
    assert len(split.goals_of(measured(2, 0.7, 120.0, 9.0))) == 4, "memory of few clients is no goal"
