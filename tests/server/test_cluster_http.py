"""The replicas of a server over HTTP: status, drain, resume and scale."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.cluster.in_process import LocalReplica, connecting
from tests.cluster.running import QUICK, SECRET, asked, check, outputs_of
from tests.server.api import running_api
from tests.server.scripted import ByteProcessor
from tests.server.test_security import ADMIN, TOKENS, USER
from vlora.cluster import members
from vlora.cluster.cluster import Cluster
from vlora.cluster.door import Address
from vlora.config import ServerConfig
from vlora.routing import Router
from vlora.server.frontend import FrontEnd
from vlora.server.http.routes import make_app
from vlora.server.security.access import Access
from vlora.types.replicas import DOWN, HIDDEN, AdapterPlace, ClusterStatus, ReplicaStatus

DRAIN_A = "/v1/cluster/replicas/a/drain"


class Caller:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        response = await self._client.request(method, path, json=body)
        return response.status_code, response.json()


def states(answer: Any) -> dict[str, str]:
    return {each["name"]: each["state"] for each in answer["replicas"]}


async def test_replicas_are_drained_and_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas: dict[int, LocalReplica] = {}
    monkeypatch.setattr(members, "connect", connecting(replicas))
    replicas.update({0: LocalReplica(), 1: LocalReplica()})
    cluster = Cluster(Router("round_robin"), SECRET, health=QUICK)
    for port, name in enumerate("ab"):
        await cluster.add(name, Address("127.0.0.1", port))
    front_end = FrontEnd(cluster, ByteProcessor(), ServerConfig(), "base")  # type: ignore[arg-type]
    transport = httpx.ASGITransport(make_app(front_end, "base", Access(())))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        call = Caller(client)
        answering = asyncio.create_task(outputs_of(cluster, asked("r", 100)))
        await asyncio.sleep(0.1)
        status, answer = await call("GET", "/v1/cluster")
        assert status == 200 and states(answer) == {"a": "serving", "b": "serving"}
        assert answer["num_waiting"] == 0 and answer["scaling"] is None
        assert cluster.where("r") == "a"
        status, answer = await call("PUT", f"{DRAIN_A}?wait_s=0")
        assert (status, answer["done"], states(answer)["a"]) == (202, False, "draining")
        status, answer = await call("PUT", f"{DRAIN_A}?wait_s=10")
        assert (status, answer["done"], answer["num_moves"]) == (200, True, 1)
        check(asked("r", 100), await answering)
        status, answer = await call("PUT", "/v1/cluster/replicas/b/drain")
        assert status == 400 and answer["error"]["message"].startswith("no other replica than 'b' serves")
        status, answer = await call("DELETE", DRAIN_A)
        assert (status, answer["done"], states(answer)["a"]) == (200, True, "serving")
        for method in ("PUT", "DELETE"):
            status, answer = await call(method, "/v1/cluster/replicas/c/drain")
            assert status == 404 and answer["error"] == {
                "message": "there is no replica 'c'; the replicas are a, b",
                "type": "invalid_request_error",
                "code": "unknown_replica",
                "param": None,
            }
        status, answer = await call("PUT", "/v1/cluster/scale", {"replicas": 3})
        assert status == 400 and answer["error"]["message"].endswith("their number cannot be changed here")
    await front_end.close()
    await cluster.close()
    for replica in replicas.values():
        replica.kill()


PLACE = AdapterPlace(
    adapter="signs", replica="a", state="failed", version="", pinned=False, cause="/srv/signs: no adapter_config.json"
)


async def places() -> tuple[AdapterPlace, ...]:
    return (PLACE,)


STATUS = ClusterStatus(
    replicas=(ReplicaStatus(name="a", state=DOWN, cause="/srv/model: no such folder", num_requests=0),),
    num_waiting=0,
    num_deaths=0,
    num_resubmitted=0,
    num_moves=0,
)


async def cluster_status() -> ClusterStatus:
    return STATUS


def test_user_tokens_see_no_causes_of_replicas_and_adapters() -> None:
    with running_api(adapters={"signs": {}}, tokens=TOKENS) as api:
        replicas = api.front_end.replicas
        replicas.status = cluster_status  # type: ignore[method-assign]
        replicas.adapters = places  # type: ignore[method-assign]
        replicas._cluster = object()  # type: ignore[assignment] # noqa: SLF001
        for token, cause, why in (
            (USER, HIDDEN, "an admin token shows the reason"),
            (ADMIN, "/srv/model: no such folder", PLACE.cause),
        ):
            mine = api._replace(token=token)
            (replica,) = mine.call("GET", "/v1/cluster")[1]["replicas"]
            assert (replica["state"], replica["cause"]) == (DOWN, cause)
            (listed,) = [each for named in mine.call("GET", "/v1/adapters")[1]["data"] for each in named["replicas"]]
            assert (listed["state"], listed["cause"]) == ("failed", why)
        with api._replace(token=USER).client() as user, api._replace(token=ADMIN).client() as admin:
            assert (admin.cluster(), user.cluster()) == (STATUS, STATUS.without_causes())
            assert (admin.cluster_adapters(), user.cluster_adapters()) == ((PLACE,), (PLACE.without_cause(),))
            assert "/srv" not in str(user.cluster_adapters())
