"""Keys of first KV blocks are equal if and only if everything that determines the KV is."""

from __future__ import annotations

import pytest

from tests.cluster.in_process import LocalReplica, connecting, run_virtually
from tests.cluster.running import SECRET, outputs_of
from vlora.cluster import members
from vlora.cluster.cluster import Cluster
from vlora.cluster.door import Address
from vlora.cluster.prefix_keys import MAX_BLOCKS, prefix_keys
from vlora.errors import BadRequest
from vlora.routing import Router
from vlora.types import Request, VisionInput


def request(*tokens: int, images: tuple[str, ...] = ()) -> Request:
    vision = tuple(VisionInput(kind="image", content_hash=each, num_tokens=1, fields={}) for each in images)
    return Request(request_id="r", prompt_ids=tokens, vision=vision)


def test_equal_beginnings_have_equal_keys() -> None:
    first, second = (prefix_keys(request(1, 2, 3, 4, *rest), "a@1", 2) for rest in ((5, 6, 7), (5, 9)))
    assert len(first) == len(second) == 3  # full blocks only
    assert first[:2] == second[:2] and first[2] != second[2]


def test_anything_else_that_determines_the_kv_changes_all_keys() -> None:
    made = [
        prefix_keys(request(1, 2, 3, 4), "a@1", 2),
        prefix_keys(request(1, 2, 3, 4), "a@2", 2),
        prefix_keys(request(1, 2, 3, 4), "", 2),
        prefix_keys(request(1, 2, 3, 4, images=("x",)), "a@1", 2),
        prefix_keys(request(1, 2, 3, 4, images=("x", "y")), "a@1", 2),
        prefix_keys(request(7, 2, 3, 4), "a@1", 2),
    ]
    keys = [key for each in made for key in each]
    assert len(set(keys)) == len(keys)


def test_long_prompts_have_a_bounded_number_of_keys() -> None:
    assert len(prefix_keys(request(*range(10_000)), "", 16)) == MAX_BLOCKS
    assert prefix_keys(request(1), "", 16) == ()


@pytest.mark.parametrize("token", [1 << 63, 1 << 64, -(1 << 63) - 1])
def test_token_ids_beyond_all_bounds_have_no_keys(token: int) -> None:
    assert prefix_keys(request(1, 2, 3, token), "", 2) == ()


def test_a_cluster_refuses_such_a_request_as_an_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        replica = LocalReplica()
        monkeypatch.setattr(members, "connect", connecting({1: replica}))
        cluster = Cluster(Router("placed"), SECRET)
        await cluster.add("a", Address("127.0.0.1", 1))
        error = (await outputs_of(cluster, request(*range(15), 1 << 64)))[-1].error
        assert error is not None and error.code == BadRequest.code
        await cluster.close()
        replica.kill()

    run_virtually(main())
