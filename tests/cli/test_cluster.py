"""`vlora cluster`: the replicas of a running server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Vlora
from tests.cluster.running import outputs_of, run
from tests.cluster.serving import serving
from tests.server.running import running_server
from tests.server.scripted import ENGINE_COMMAND
from vlora.client import AsyncClient, Client
from vlora.config import Token
from vlora.errors import BadRequest, Forbidden
from vlora.types import Request, SamplingParams
from vlora.types.replicas import ClusterStatus, ScalingStatus

FOREVER = Request(
    request_id="r", prompt_ids=tuple(b"forever"), sampling=SamplingParams(max_tokens=50_000, ignore_eos=True, seed=0)
)


@pytest.mark.slow
def test_a_replica_is_drained_and_resumed_by_commands(vlora_command: Vlora) -> None:
    async def main() -> None:
        async with serving("a", "b") as (found, _, port):

            async def command(*args: str) -> tuple[int, str, str]:
                return await asyncio.to_thread(vlora_command, "cluster", *args, "--server", f"127.0.0.1:{port}")

            counts = "0 requests waiting; since the start 0 replicas lost, 0 resubmitted, {} moved\n"
            assert await command("status") == (
                0,
                "a  serving  0 requests\nb  serving  0 requests\n" + counts.format(0),
                "",
            )
            answering = asyncio.create_task(outputs_of(found.cluster, FOREVER))
            while (name := found.router.where("r")) is None:
                await asyncio.sleep(0.01)
            other = "b" if name == "a" else "a"
            assert await command("drain", name) == (0, f"{name}  drained\n", "")
            assert found.where("r") == other
            code, out, _ = await command("status")
            assert code == 0 and out.endswith(counts.format(1))
            assert set(out.splitlines()[:2]) == {f"{name}  draining  0 requests", f"{other}  serving  1 request"}
            message = f"error: no other replica than {other!r} serves; resume another one before this one is drained\n"
            assert await command("drain", other) == (2, "", message)
            assert await command("resume", name, "--json") == (0, f'{{"name":"{name}","done":"resumed"}}\n', "")
            status = json.loads((await command("status", "--json"))[1])
            assert [(each["name"], each["state"]) for each in status["replicas"]] == [
                ("a", "serving"),
                ("b", "serving"),
            ]
            assert (status["num_moves"], status["num_deaths"]) == (1, 0)
            for change in ("drain", "resume"):
                message = "error: there is no replica 'c'; the replicas are a, b\n"
                assert await command(change, "c") == (2, "", message)
            async with AsyncClient(port=port) as client:  # the other replica has requests now: none, or this one
                assert await client.drain_replica(name, wait_s=5.0)
                await client.resume_replica(name)
                assert (await client.cluster()).num_waiting == 0
            await found.cluster.cancel("r")
            assert (await answering)[-1].finish_reason == "cancelled"

    run(main())


@pytest.mark.slow
def test_where_each_adapter_is_and_why_it_cannot_be_used(vlora_command: Vlora, tmp_path: Path) -> None:
    for name in ("good", "gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(f'{{"name": "{name}"}}')

    async def main() -> None:
        async with serving("a", "b") as (found, _, port):

            async def command(*args: str) -> str:
                command = ("cluster", "status", *args, "--server", f"127.0.0.1:{port}")
                code, out, err = await asyncio.to_thread(vlora_command, *command)
                assert (code, err) == (0, "")
                return out

            assert await command("--adapters") == ""
            good = (await found.cluster.load_adapter("good", str(tmp_path / "good"))).version
            gone = (await found.cluster.load_adapter("gone", str(tmp_path / "gone"))).version
            await found.cluster.pin_adapter("good", True)
            (tmp_path / "gone" / "adapter_config.json").unlink()
            await found.add("c", command=ENGINE_COMMAND)
            cause = f"{tmp_path / 'gone'}: no adapter_config.json; an adapter is a folder in PEFT's format"
            assert (await command("--adapters")).splitlines() == [
                f"gone  a  host  {gone}",
                f"gone  b  host  {gone}",
                f"gone  c  failed  {cause}",
                *(f"good  {replica}  device  {good}  pinned" for replica in "abc"),
            ]
            [failed] = [each for each in json.loads(await command("--adapters", "--json")) if each["cause"]]
            assert failed == {
                "adapter": "gone",
                "replica": "c",
                "state": "failed",
                "version": "",
                "pinned": False,
                "cause": cause,
            }
            assert "c  serving  0 requests  1 adapter failed, see --adapters" in await command()
            async with AsyncClient(port=port) as client:
                assert len(await client.cluster_adapters()) == 6

    run(main())


def test_the_adapters_state_is_for_replicas(vlora_command: Vlora) -> None:
    message = "error: --adapter-state state is for replicas; start 2 or more with --replicas\n"
    assert vlora_command("serve", "--adapter-state", "state") == (2, "", message)


def test_a_server_with_one_engine_has_no_replicas(vlora_command: Vlora, address: str) -> None:
    message = "error: this server has one engine; start it with --replicas 2 or more to have replicas\n"
    for args in (("status",), ("status", "--adapters"), ("drain", "a"), ("resume", "a"), ("scale", "2")):
        assert vlora_command("cluster", *args, "--server", address) == (2, "", message)


def test_only_admins_drain_and_resume() -> None:
    user, admin = Token(name="user", secret="u" * 20), Token(name="ops", secret="a" * 20, admin=True)
    with running_server(tokens=(user, admin)) as server:
        for token, error in ((user, Forbidden), (admin, BadRequest)):
            with Client(port=server.port, token=token.secret) as client:
                changes: tuple[Any, ...] = (client.drain_replica, client.resume_replica)
                for change in changes:
                    with pytest.raises(error):
                        change("a")
                with pytest.raises(error):
                    client.scale(2)
                with pytest.raises(BadRequest, match="this server has one engine"):
                    client.cluster()


@pytest.mark.parametrize(
    ("automatic", "now"), [(False, "2 replicas, set by an operator"), (True, "2 replicas, set automatically")]
)
def test_a_number_that_another_call_replaces_is_not_set_again(
    automatic: bool, now: str, vlora_command: Vlora, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []
    scaling = ScalingStatus(
        automatic=automatic, number=2, least=1, most=3, decision="", decided_s=None, problem="", decisions={}
    )
    status = ClusterStatus(replicas=(), num_waiting=0, num_deaths=0, num_resubmitted=0, num_moves=0, scaling=scaling)

    def scale(_: Client, number: int, *, wait_s: float) -> bool:
        numbers.append(number)
        return len(numbers) > 5

    monkeypatch.setattr(Client, "scale", scale)
    monkeypatch.setattr(Client, "cluster", lambda _: status)
    message = f"error: the change to 3 replicas was replaced by another one: {now}\n"
    assert vlora_command("cluster", "scale", "3", "--server", address) == (2, "", message)
    assert numbers == [3]
    numbers.clear()
    if not automatic:
        assert vlora_command("cluster", "scale", "2", "--server", address) == (0, "2 replicas\n", "")
        assert numbers == [2] * 6
