"""Mode decisions under typical camera loads. Steps take 0.1 s; theta is half a second."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from tests.orchestrator.checked_replica import CheckedReplica, CheckedReplicaConfig
from tests.orchestrator.sample_requests import make_request
from vlora.orchestrator import Costs
from vlora.types import Batch, Mode

CAMERAS = {"traffic": 2, "parking": 2, "gate": 2, "yard": 2}


def box(*, max_batch_size: int = 8, lossy: frozenset[str] = frozenset(), room: int = 8) -> CheckedReplica:
    """`room`: pages for adapters, two pages each."""
    return CheckedReplica(
        CheckedReplicaConfig(
            num_pages=1024,
            max_adapter_pages=room,
            max_batch_size=max_batch_size,
            max_step_tokens=256,
            theta_s=0.5,
            adapters=CAMERAS,
            lossy=lossy,
            costs=Costs(base_s=0.1, merge_s=0.02),
        )
    )


def ask(simulation: CheckedReplica, adapter: str | None, number: int, *, first: int = 0, max_tokens: int = 100) -> None:
    name = adapter or "base"
    simulation.add(*(make_request(f"{name}{i}", adapter, max_tokens=max_tokens) for i in range(first, first + number)))


def step(simulation: CheckedReplica) -> Batch:
    batch = simulation.step()
    assert batch is not None
    return batch


def cameras(batch: Batch) -> list[str | None]:
    return [item.adapter for item in batch.items]


def names(batch: Batch) -> set[str]:
    return {item.request_id for item in batch.items}


def modes(batches: Iterable[Batch]) -> list[Mode]:
    """The sequence of modes without repetitions."""
    found: list[Mode] = []
    for batch in batches:
        if found[-1:] != [batch.mode]:
            found.append(batch.mode)
    return found


def test_a_skewed_load_is_merged() -> None:
    simulation = box()
    ask(simulation, "parking", 2)
    ask(simulation, "traffic", 6)
    batch = step(simulation)
    assert (batch.mode, batch.merged_adapter) == (Mode.MERGED, "traffic")
    assert cameras(batch) == ["traffic"] * 6


def test_one_starving_request_is_mixed_in() -> None:
    simulation = box()
    ask(simulation, "parking", 1)
    ask(simulation, "traffic", 6)
    before = []
    while (batch := step(simulation)).mode is Mode.MERGED:
        before.append(batch)
    assert 1 <= len(before) <= 5, "half a second covers at most five steps"
    assert (batch.mode, batch.merged_adapter) == (Mode.MIXED, "traffic")
    assert batch.items[0].adapter == "parking", "starving requests run first"
    assert cameras(batch)[1:] == ["traffic"] * 6, "the merged adapter's requests fill the rest of the batch"
    assert step(simulation).mode is Mode.MERGED, "it no longer starves after running"


def test_many_starving_requests_end_merging() -> None:
    simulation = box()
    ask(simulation, "traffic", 6)
    step(simulation)
    for camera in ("parking", "gate", "yard"):
        ask(simulation, camera, 2)
    while (batch := step(simulation)).mode is Mode.MERGED:
        assert cameras(batch) == ["traffic"] * 6
    assert (batch.mode, batch.merged_adapter) == (Mode.UNMERGED, None)
    assert cameras(batch) == ["parking"] * 2 + ["gate"] * 2 + ["yard"] * 2 + ["traffic"] * 2


def test_a_single_camera_at_night_is_merged() -> None:
    simulation = box(max_batch_size=32)
    ask(simulation, "yard", 1)
    batch = step(simulation)
    assert (batch.mode, batch.merged_adapter) == (Mode.MERGED, "yard")


def test_many_cameras_alike_run_unmerged() -> None:
    simulation = box()
    for camera in CAMERAS:
        ask(simulation, camera, 2)
    batch = step(simulation)
    assert (batch.mode, batch.merged_adapter) == (Mode.UNMERGED, None)
    assert len(batch.items) == 8


def test_base_model_requests_alone_count_as_merged_without_a_switch() -> None:
    simulation = box()
    ask(simulation, None, 3)
    batch = step(simulation)
    assert (batch.mode, batch.merged_adapter) == (Mode.MERGED, None)
    assert simulation.scheduler.stats("simulated").num_switches == 0


def test_base_model_requests_are_mixed_in_after_waiting() -> None:
    simulation = box()
    ask(simulation, "traffic", 6)
    ask(simulation, None, 1)
    assert cameras(step(simulation)) == ["traffic"] * 6
    while (batch := step(simulation)).mode is Mode.MERGED:
        pass
    assert batch.mode is Mode.MIXED and cameras(batch)[0] is None


def test_an_adapter_with_low_merge_fidelity_is_served_unmerged() -> None:
    simulation = box(lossy=frozenset({"traffic"}))
    ask(simulation, "traffic", 6)
    batch = step(simulation)
    assert (batch.mode, batch.merged_adapter) == (Mode.UNMERGED, None)


def test_starving_requests_of_the_merged_adapter_stay_merged() -> None:
    simulation = box(max_batch_size=2)
    ask(simulation, "traffic", 3)
    batches = [step(simulation) for _ in range(12)]
    assert modes(batches) == [Mode.MERGED], "mixing the merged adapter with itself is merged"
    assert names(batches[0]) == {"traffic0", "traffic1"}
    assert any("traffic2" in names(batch) for batch in batches)


def test_two_groups_of_equal_size_cause_no_alternating_switches() -> None:
    simulation = box(max_batch_size=2)
    ask(simulation, "gate", 2)
    step(simulation)
    ask(simulation, "yard", 2)
    batches = [step(simulation) for _ in range(4)]
    assert [batch.merged_adapter for batch in batches] == ["gate"] * 4


def test_an_adapter_without_room_takes_turns_with_the_resident_one() -> None:
    simulation = box(room=2)
    ask(simulation, "traffic", 6, max_tokens=400)
    step(simulation)
    ask(simulation, "gate", 1, max_tokens=30)
    turns = ["".join(sorted({str(camera)[0] for camera in cameras(step(simulation))})) for _ in range(60)]
    assert "g" in turns[:7], "after half a second"
    assert 6 <= turns.count("g") <= 54 and turns.count("t") + turns.count("g") == 60, "both progress, one at a time"
    changes = sum(turn != before for before, turn in itertools.pairwise(turns))
    assert changes <= 2 * 60 / 5 + 2, "they alternate every half second, not every step"
    assert simulation.scheduler.stats("simulated").num_preemptions == 0, "waiting requests keep their KV"


def test_two_requests_finish_with_room_for_one_adapter_and_context() -> None:
    """A preempted request keeps its adapter until it yields a token; otherwise both preempt each other forever."""
    machine = CheckedReplicaConfig(
        num_pages=30,
        max_adapter_pages=2,
        block_size=1,
        max_batch_size=1,
        max_step_tokens=2,
        theta_s=0.001,
        adapters={"traffic": 2, "gate": 2},
    )
    simulation = CheckedReplica(machine)
    simulation.add(
        make_request("g", "gate", prompt=25, head="h"), make_request("t", "traffic", prompt=25, max_tokens=1)
    )
    simulation.run(max_steps=200)
    assert simulation.outputs["g"][-1].finish_reason == "head"
    assert simulation.outputs["t"][-1].finish_reason == "length"


def test_a_day_of_camera_traffic() -> None:
    """Night: one camera. Morning: more traffic, sometimes a gate. Noon: all cameras. Evening: traffic only."""
    simulation = box()
    ask(simulation, "yard", 1, max_tokens=4)
    simulation.run()
    ask(simulation, "traffic", 6, max_tokens=20)
    ask(simulation, "gate", 1, max_tokens=1)
    simulation.run()
    for camera in CAMERAS:
        ask(simulation, camera, 2, first=10, max_tokens=6)
    simulation.run()
    ask(simulation, "traffic", 3, first=20, max_tokens=6)
    simulation.run()
    assert modes(line.batch for line in simulation.log) == [
        Mode.MERGED,
        Mode.MIXED,
        Mode.MERGED,
        Mode.UNMERGED,
        Mode.MERGED,
    ]
    stats = simulation.scheduler.stats("simulated")
    assert stats.requests_by_mode == {"merged": 1 + 6 + 3, "mixed": 1 + 6, "unmerged": 8}
    assert stats.num_switches == 4, "to yard, to traffic, back to W0, to traffic"
    assert stats.num_finished == 19
