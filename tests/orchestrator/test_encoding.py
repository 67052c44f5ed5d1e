"""What the vision tower encodes, and for whom embeddings may be held."""

from __future__ import annotations

from tests.orchestrator.simulation import IMAGE, Machine, Simulation, Speed, make_request
from vlora.orchestrator.encoding import EncodeQueue
from vlora.orchestrator.tracked import Tracked
from vlora.types import Encoded, RequestStatus


def entered(queue: EncodeQueue, name: str, num_tokens: int, vision_key: str | None = None) -> Tracked:
    prompt = (1, *[IMAGE] * num_tokens, 2)
    tracked = Tracked(make_request(name, prompt=prompt, images=[(name, num_tokens)]), 0.0, None)
    queue.add(tracked, vision_key)
    tracked.enter(0.0)
    return tracked


def make_queue(max_step_tokens: int) -> EncodeQueue:
    return EncodeQueue({"image": IMAGE}, lambda key: False, max_step_tokens)


def test_embeddings_of_a_request_that_has_not_started_keep_others_out() -> None:
    queue = make_queue(1)
    first, second = entered(queue, "first", 5), entered(queue, "second", 5)
    encode = queue.choose([first, second], frozenset(), 1.0, alone=True)
    assert encode is not None and encode.items == (("first", 0),)
    queue.record(encode, Encoded(num_patches=20, seconds=0.1, done=True))
    assert queue.is_ready(first) and queue.choose([second], frozenset(), 1.0, alone=True) is None
    queue.started(first, 0)
    assert queue.choose([second], frozenset(), 1.0, alone=True) is not None


def test_embeddings_of_a_request_that_was_preempted_keep_nobody_out() -> None:
    """The prefix cache got its image while that was being encoded: it started, and was preempted before the call's
    end."""
    queue = make_queue(1)
    first, second = entered(queue, "first", 5), entered(queue, "second", 5)
    encode = queue.choose([first], frozenset(), 1.0, alone=True)
    assert encode is not None
    queue.started(first, 6)
    first.status = RequestStatus.RUNNING
    first.preempt()
    first.entered = False
    queue.record(encode, Encoded(num_patches=20, seconds=0.1, done=True))
    assert queue.choose([second], frozenset(), 1.0, alone=True) is not None


def test_an_adapter_stays_while_images_are_encoded_with_its_deltas() -> None:
    """There is room for one of two adapters, both are wanted all the time, and a call takes many steps."""
    machine = Machine(
        num_pages=64, max_adapter_pages=6, theta_s=0.001, adapters={"a": 5, "b": 5}, speed=Speed(step=0.01, patch=0.01)
    )
    simulation = Simulation(machine)
    for name in "ab":
        request = make_request(f"r{name}", name, prompt=(1, *[IMAGE] * 9, 2), images=[(name, 9)], max_tokens=3)
        simulation.scheduler.add(request, vision_key=name)
        simulation.runner.add(request)
        simulation.outputs[request.request_id] = []
        simulation.add(make_request(f"t{name}", name, prompt=4, max_tokens=60))
    calls: list[int] = []
    for _ in range(400):
        if not simulation.scheduler.has_work:
            break
        batch = simulation.step()
        if batch is not None and batch.encode is not None:
            calls.append(batch.encode.number)
    assert not simulation.scheduler.has_work
    assert set(calls) == {1, 2} and len(calls) > 4, "each call was finished once begun"
