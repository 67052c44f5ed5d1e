"""Scheduling of the vision tower, and the limit on embeddings that are held ahead of need."""

from __future__ import annotations

import pytest

from tests.orchestrator.checked_replica import SMALL_COSTS, CheckedReplica, CheckedReplicaConfig
from tests.orchestrator.sample_requests import IMAGE_TOKEN, expected_tokens, make_request
from vlora.orchestrator import POLICIES, make_policy
from vlora.orchestrator.encoder_budget import EncodeQueue
from vlora.orchestrator.request_state import TrackedRequest
from vlora.types import Encoded, Request, RequestStatus


def entered(queue: EncodeQueue, name: str, num_tokens: int, vision_key: str | None = None) -> TrackedRequest:
    prompt = (1, *[IMAGE_TOKEN] * num_tokens, 2)
    tracked = TrackedRequest(make_request(name, prompt=prompt, images=[(name, num_tokens)]), 0.0, None)
    queue.add(tracked, vision_key)
    tracked.enter(0.0)
    return tracked


def make_queue(max_step_tokens: int) -> EncodeQueue:
    return EncodeQueue({"image": IMAGE_TOKEN}, lambda key: False, max_step_tokens)


def test_embeddings_of_waiting_requests_block_others_beyond_the_limit() -> None:
    queue = make_queue(1)
    first, second = entered(queue, "first", 5), entered(queue, "second", 5)
    encode = queue.choose([first, second], frozenset(), 1.0, alone=True)
    assert encode is not None and encode.items == (("first", 0),)
    queue.record(encode, Encoded(num_patches=20, seconds=0.1, done=True))
    assert queue.is_ready(first) and queue.choose([second], frozenset(), 1.0, alone=True) is None
    queue.mark_started(first, 0)
    assert queue.choose([second], frozenset(), 1.0, alone=True) is not None


def test_embeddings_of_preempted_requests_block_no_others() -> None:
    """The request starts from the prefix cache while its image is encoded, and is preempted before the call ends."""
    queue = make_queue(1)
    first, second = entered(queue, "first", 5), entered(queue, "second", 5)
    encode = queue.choose([first], frozenset(), 1.0, alone=True)
    assert encode is not None
    queue.mark_started(first, 6)
    first.status = RequestStatus.RUNNING
    first.preempt()
    first.entered = False
    queue.record(encode, Encoded(num_patches=20, seconds=0.1, done=True))
    assert queue.choose([second], frozenset(), 1.0, alone=True) is not None


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
        request = make_request(f"r{name}", name, prompt=(1, *[IMAGE_TOKEN] * 9, 2), images=[(name, 9)], max_tokens=3)
        simulation.add(request, vision_key=name)
        simulation.add(make_request(f"t{name}", name, prompt=4, max_tokens=60))
    calls: list[int] = []
    for _ in range(400):
        if not simulation.scheduler.has_work:
            break
        batch = simulation.step()
        if batch is not None and batch.encode is not None:
            calls.append(batch.encode.number)
    assert not simulation.scheduler.has_work
    assert set(calls) == {1, 2} and len(calls) > 4, "each started call must finish"


def shown(name: str, num_tokens: int, content: str | None = None) -> Request:
    """A request with one image of `num_tokens` placeholders, 4 patches each."""
    prompt = (1, *[IMAGE_TOKEN] * num_tokens, 2)
    return make_request(name, prompt=prompt, images=[(content or name, num_tokens)], max_tokens=3)


def warm() -> CheckedReplica:
    """A machine with learned costs, so that a call covers images of several requests."""
    simulation = CheckedReplica(CheckedReplicaConfig())
    simulation.add(shown("first", 4))
    simulation.run()
    return simulation


def test_a_broken_image_fails_its_own_request_alone() -> None:
    simulation = warm()
    simulation.machine.broken.add("bad")
    simulation.add(shown("r1", 5), shown("r2", 5, "bad"), shown("r3", 5), shown("r4", 5, "bad"))
    batch = simulation.step()
    assert batch is not None and batch.encode is not None
    assert {name for name, _ in batch.encode.items} == {"r1", "r2", "r3", "r4"}, "the images share a call"
    simulation.run()
    reasons = {name: outputs[-1].finish_reason for name, outputs in simulation.outputs.items() if name != "first"}
    assert reasons == {"r1": "length", "r2": "error", "r3": "length", "r4": "error"}
    error = simulation.outputs["r2"][-1].error
    assert error is not None and error.code == "bad_image"
    answer = [token for output in simulation.outputs["r1"] for token in output.token_ids]
    assert answer == expected_tokens(simulation.machine.requests["r1"])


def test_cancelling_a_request_does_not_restart_its_shared_encoding() -> None:
    """Two requests show the same large image, which is encoded over many steps beside the answer of a third."""
    simulation = warm()
    simulation.add(make_request("text", max_tokens=400))
    simulation.step()
    simulation.add(shown("r1", 40, "same"), shown("r2", 40, "same"))
    batch = simulation.step()
    assert batch is not None and batch.encode is not None and len(batch.encode.items) == 2
    number = batch.encode.number
    simulation.cancel("r1")
    num_steps = 0
    while not simulation.outputs["r2"]:
        batch = simulation.step()
        assert batch is not None and (batch.encode is None or batch.encode.number == number), "no call is restarted"
        num_steps += batch.encode is not None
    assert num_steps > 1 and simulation.machine.num_encoded["same"] == 1


def test_encoding_stops_when_its_last_request_is_cancelled() -> None:
    simulation = warm()
    simulation.add(make_request("text", max_tokens=40))
    simulation.step()
    simulation.add(shown("r1", 100))
    batch = simulation.step()
    assert batch is not None and batch.encode is not None
    simulation.cancel("r1")
    simulation.add(shown("r2", 5))
    batch = simulation.step()
    assert batch is not None and batch.encode is not None and batch.encode.items == (("r2", 0),)


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
        ahead = {name for name, _ in simulation.machine.held if name not in started}
        most = max(most, 5 * len(ahead))
    assert 8 < most <= 4 * 8
    assert all(outputs[-1].finish_reason == "length" for outputs in simulation.outputs.values())


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
    requests = [
        make_request("r0", "a", prompt=(1, *[IMAGE_TOKEN] * 2, 2), images=[("small", 2)]),
        make_request("r1", "b", prompt=(1, *[IMAGE_TOKEN] * 9, 2), images=[("large", 9)]),
    ]
    simulation.add(*requests)
    simulation.run(max_steps=200)
    for request in requests:
        tokens = [token for output in simulation.outputs[request.request_id] for token in output.token_ids]
        assert tokens == expected_tokens(request)
