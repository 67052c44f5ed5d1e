"""Scheduling of the vision tower, and the limit on embeddings that are held ahead of need."""

from __future__ import annotations

import pytest

from tests.orchestrator.checked_replica import SMALL_COSTS, CheckedReplica, CheckedReplicaConfig
from tests.orchestrator.sample_requests import IMAGE_TOKEN, expected_tokens, make_request
from vlora.orchestrator.encoder_budget import EncodeQueue
from vlora.orchestrator.policies.registry import POLICIES, make_policy
from vlora.orchestrator.request_state import TrackedRequest
from vlora.types import Encode, Encoded, Request, RequestStatus


def shown(name: str, num_tokens: int, content: str | None = None, adapter: str | None = None) -> Request:
    """A request with one image of `num_tokens` placeholders, 4 patches each."""
    prompt = (1, *[IMAGE_TOKEN] * num_tokens, 2)
    return make_request(name, adapter, prompt=prompt, images=[(content or name, num_tokens)], max_tokens=3)


@pytest.mark.parametrize("preempted", [False, True])
def test_embeddings_of_waiting_requests_block_others_beyond_the_limit(preempted: bool) -> None:
    """One of two images of five tokens may be held ahead. Embeddings of a preempted request do not count: it started
    from the prefix cache while its image was encoded, and was preempted before the call ended."""
    queue = EncodeQueue({"image": IMAGE_TOKEN}, lambda key: False, 1)
    first, second = (TrackedRequest(shown(name, 5), 0.0, None) for name in ("first", "second"))
    for tracked in (first, second):
        queue.add(tracked, None)
        tracked.enter(0.0)

    def choose(*waiting: TrackedRequest) -> Encode | None:
        return queue.choose(waiting, frozenset(), 1.0, alone=True)

    encode = choose(first, second)
    assert encode is not None and encode.items == (("first", 0),)
    if preempted:
        queue.mark_started(first, 6)
        first.status = RequestStatus.RUNNING
        first.preempt()
        first.entered = False
    queue.record(encode, Encoded(num_patches=20, seconds=0.1, done=True))
    if not preempted:
        assert queue.is_ready(first) and choose(second) is None
        queue.mark_started(first, 0)
    assert choose(second) is not None


def test_an_adapter_stays_resident_while_its_images_are_encoded() -> None:
    """Memory holds one of two adapters, both are always needed, and a call takes many steps."""
    machine = CheckedReplicaConfig(
        num_pages=64,
        max_adapter_pages=6,
        theta_s=0.001,
        adapters={"a": 5, "b": 5},
        costs=SMALL_COSTS._replace(base_s=0.01, patch_s=0.01),
    )
    simulation = CheckedReplica(machine)
    for name in "ab":
        simulation.add(shown(f"r{name}", 9, adapter=name), vision_key=name)
        simulation.add(make_request(f"t{name}", name, prompt=4, max_tokens=60))
    calls: list[int] = []
    for _ in range(400):
        if simulation.scheduler.has_work and (batch := simulation.step()) is not None and batch.encode is not None:
            calls.append(batch.encode.number)
    assert not simulation.scheduler.has_work
    assert set(calls) == {1, 2} and len(calls) > 4, "each started call must finish"


def warm() -> CheckedReplica:
    """A machine with learned costs, so that a call covers images of several requests."""
    simulation = CheckedReplica(CheckedReplicaConfig())
    simulation.add(shown("first", 4))
    simulation.run()
    return simulation


def encoding(simulation: CheckedReplica) -> Encode:
    batch = simulation.step()
    assert batch is not None and batch.encode is not None
    return batch.encode


def test_a_broken_image_fails_its_own_request_alone() -> None:
    simulation = warm()
    simulation.machine.broken.add("bad")
    simulation.add(shown("r1", 5), shown("r2", 5, "bad"), shown("r3", 5), shown("r4", 5, "bad"))
    assert {name for name, _ in encoding(simulation).items} == {"r1", "r2", "r3", "r4"}, "the images share a call"
    simulation.run()
    assert [simulation.end(f"r{i}") for i in (1, 2, 3, 4)] == ["length", "bad_image", "length", "bad_image"]
    assert simulation.tokens("r1") == expected_tokens(simulation.machine.requests["r1"])


@pytest.mark.parametrize("shared", [True, False])
def test_encoding_continues_for_the_requests_that_are_left(shared: bool) -> None:
    """A large image is encoded over many steps beside an answer; one of the requests that show it is cancelled."""
    simulation = warm()
    simulation.add(make_request("text", max_tokens=400))
    simulation.step()
    simulation.add(shown("r1", 40, "same"), *([shown("r2", 40, "same")] if shared else []))
    encode = encoding(simulation)
    assert len(encode.items) == 1 + shared
    simulation.cancel("r1")
    if not shared:
        simulation.add(shown("r2", 5))
        assert encoding(simulation).items == (("r2", 0),)
        return
    num_steps = 0
    while not simulation.outputs["r2"]:
        batch = simulation.step()
        assert batch is not None and (batch.encode is None or batch.encode.number == encode.number), "it is restarted"
        num_steps += batch.encode is not None
    assert num_steps > 1 and simulation.machine.num_encoded["same"] == 1


def test_embeddings_held_ahead_of_need_are_limited() -> None:
    """Requests that encode ahead of need wait for a batch slot, since one long answer after another fills the batch."""
    simulation = CheckedReplica(CheckedReplicaConfig(max_batch_size=2, max_step_tokens=8))
    simulation.add(*(make_request(f"text{i}", max_tokens=60) for i in range(2)))
    simulation.step()
    simulation.add(*(shown(f"r{i}", 5) for i in range(20)))
    started: set[str] = set()
    most = 0
    while simulation.scheduler.has_work:
        batch = simulation.step()
        assert batch is not None
        started.update(item.request_id for item in batch.items)
        most = max(most, 5 * len({name for name, _ in simulation.machine.held if name not in started}))
    assert 8 < most <= 4 * 8
    assert {simulation.end(name) for name in simulation.outputs} == {"length"}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_embeddings_that_wait_for_an_adapter_do_not_deadlock(policy: str) -> None:
    """Memory holds one of two adapters, that of r0, and r0 needs its image encoded.

    r1 holds more embeddings than the limit for encoding ahead, and needs the other adapter, which cannot be loaded
    before r0 has run.
    """
    machine = CheckedReplicaConfig(
        num_pages=52,
        pages_per_block=2,
        block_size=1,
        max_adapter_pages=6,
        max_batch_size=1,
        max_step_tokens=1,
        adapters={"a": 2, "b": 5},
    )
    simulation = CheckedReplica(machine, policy=make_policy(policy))
    requests = [shown("r0", 2, adapter="a"), shown("r1", 9, adapter="b")]
    simulation.add(*requests)
    simulation.run(max_steps=200)
    assert all(simulation.tokens(request.request_id) == expected_tokens(request) for request in requests)
