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
from tests.server.scripted import ENGINE_COMMAND
from vlora.client import AsyncClient, Client
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
            idle = "a  serving  0 requests\nb  serving  0 requests\n"
            assert await command("status") == (0, idle + counts.format(0), "")
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
            assert {each["name"]: each["state"] for each in status["replicas"]} == {"a": "serving", "b": "serving"}
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

            async def status(*args: str) -> str:
                at = ("--server", f"127.0.0.1:{port}")
                return await asyncio.to_thread(vlora_command.out, "cluster", "status", *args, *at)

            assert await status("--adapters") == ""
            good = (await found.cluster.load_adapter("good", str(tmp_path / "good"))).version
            gone = (await found.cluster.load_adapter("gone", str(tmp_path / "gone"))).version
            await found.cluster.pin_adapter("good", True)
            (tmp_path / "gone" / "adapter_config.json").unlink()
            await found.add("c", command=ENGINE_COMMAND)
            cause = f"{tmp_path / 'gone'}: no adapter_config.json; an adapter is a folder in PEFT's format"
            assert (await status("--adapters")).splitlines() == [
                *(f"gone  {replica}  host  {gone}" for replica in "ab"),
                f"gone  c  failed  {cause}",
                *(f"good  {replica}  device  {good}  pinned" for replica in "abc"),
            ]
            [failed] = [each for each in json.loads(await status("--adapters", "--json")) if each["cause"]]
            place = {"adapter": "gone", "replica": "c", "state": "failed", "version": "", "pinned": False}
            assert failed == {**place, "cause": cause}
            assert "c  serving  0 requests  1 adapter failed, see --adapters" in await status()
            async with AsyncClient(port=port) as client:
                assert len(await client.cluster_adapters()) == 6

    run(main())


@pytest.mark.parametrize("automatic", [False, True])
def test_a_number_that_another_call_replaces_is_not_set_again(
    automatic: bool, asking: Vlora, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []
    limits = {"number": 2, "least": 1, "most": 3, "decided_s": None}
    scaling = ScalingStatus(automatic=automatic, decision="", problem="", decisions={}, **limits)  # type: ignore[arg-type]
    none: dict[str, Any] = dict.fromkeys(("num_waiting", "num_deaths", "num_resubmitted", "num_moves"), 0)
    status = ClusterStatus(replicas=(), scaling=scaling, **none)

    def scale(_: Client, number: int) -> bool:
        numbers.append(number)
        return len(numbers) > 5

    monkeypatch.setattr(Client, "scale", scale)
    monkeypatch.setattr(Client, "cluster", lambda _: status)
    now = "2 replicas, set automatically" if automatic else "2 replicas, set by an operator"
    message = f"the change to 3 replicas was replaced by another one: {now}"
    assert asking.refusal("cluster", "scale", "3") == message and numbers == [3]
    numbers.clear()
    if not automatic:
        assert asking.out("cluster", "scale", "2") == "2 replicas\n" and numbers == [2] * 6
