"""The token of a request decides which tenant's share it uses."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest

from tests.families import build_model
from tests.processes import until
from tests.server.api import Api, running_api
from tests.server.scripted import ByteProcessor, Encoded, Processed
from vlora.config import EngineConfig, Token
from vlora.engine import LocalEngine
from vlora.errors import BadConfig

CROWD, GUEST = "c" * 20, "g" * 20
TOKENS = (Token(name="crowd", secret=CROWD), Token(name="guest", secret=GUEST))


class SmallVocabulary(ByteProcessor):
    """Bytes as token ids, valid for any model."""

    def encode_processed(self, prompt: str, images: Processed) -> Encoded:
        return Encoded(tuple(3 + byte % 32 for byte in prompt.encode()), (), ())


def finished_by_the_crowd_when_the_guest_is_answered(tenant_weight: tuple[str, ...]) -> int:
    """One tenant requests 16 answers of 40 tokens at once, then a guest requests one."""
    config = EngineConfig(
        model="llava",
        arena_bytes=64 * 2**20,
        max_context=128,
        max_batch_size=2,
        max_step_tokens=64,
        theta_s=100.0,  # so that a long wait does not override shares
        tenant_weight=tenant_weight,
    )
    engine = LocalEngine(config, model=build_model("llava"))

    def stats(api: Api) -> Any:
        return api.on_loop(api.front_end.stats())

    with running_api(engine, SmallVocabulary(), tokens=TOKENS, max_requests=64) as api:
        crowd, guest = api._replace(token=CROWD), api._replace(token=GUEST)
        answers: list[Any] = []
        flood = threading.Thread(target=lambda: answers.append(crowd.chat("many", n=16, max_tokens=40)))
        flood.start()
        until(lambda: stats(api).num_waiting >= 12)
        status, answer = guest.chat("one", max_tokens=4)
        finished = stats(api).num_finished - 1
        assert status == 200 and answer["usage"]["completion_tokens"] >= 1
        flood.join()
        status, answer = answers[0]
        assert status == 200 and len(answer["choices"]) == 16, "no request of the first tenant is refused"
        assert answer["usage"]["completion_tokens"] >= 320, "the answers are not short"
    return finished


@pytest.mark.slow
def test_many_requests_of_one_token_do_not_delay_another() -> None:
    assert finished_by_the_crowd_when_the_guest_is_answered(("*=1",)) <= 7


@pytest.mark.exhaustive
def test_without_shares_the_guest_is_served_last() -> None:
    """The control of the test above."""
    assert finished_by_the_crowd_when_the_guest_is_answered(()) >= 10


@pytest.mark.parametrize("pair", ["crowd", "crowd=0", "=2", "crowd=nan"])
def test_an_invalid_weight_is_refused(pair: str) -> None:
    with pytest.raises(BadConfig, match="tenant_weight is "):
        EngineConfig(model="m", tenant_weight=(pair,))
    with pytest.raises(BadConfig, match="tenant_weight sets 'a' twice"):
        EngineConfig(model="m", tenant_weight=("a=1", "a=2"))
    assert dataclasses.replace(EngineConfig(model="m"), tenant_weight=("a=2",)).tenant_weights == {"a": 2.0}
