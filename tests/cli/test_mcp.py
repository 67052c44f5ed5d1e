"""`vlora mcp`, called by the client of the official package: in process, and over HTTP."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import mcp
import pytest
import uvicorn

from tests.cli.conftest import Vlora
from tests.processes import free_port
from tests.server.running import Running, png
from vlora.cli.mcp import make_server
from vlora.client import Client


def texts(result: Any) -> list[str]:
    return [part.text for part in result.content if part.type == "text"]


def test_tools_ask_about_pictures_and_search_recordings(server: Running, inputs: Path, asking: Vlora) -> None:
    index = inputs / "index.sqlite"
    assert asking("index", inputs / "video.mp4", inputs / "a.png", "-o", index, "-q", "say:night")[0] == 0
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    (secret := inputs.parent / "secret.png").write_bytes(png())

    async def session(agent: mcp.Client) -> None:
        offered = {tool.name: tool for tool in (await agent.list_tools()).tools}
        assert list(offered) == ["list_cameras", "ask_camera", "ask_picture", "search_recordings"]
        assert all(tool.annotations and tool.annotations.read_only_hint for tool in offered.values())
        assert not any("\n " in (tool.description or "\n ") for tool in offered.values())
        assert offered["ask_camera"].input_schema["required"] == ["camera", "question"]
        for picture in (url, "a.png"):
            found = await agent.call_tool("ask_picture", {"picture": picture, "question": "say:a light"})
            assert (found.is_error, texts(found)) == (False, ["a light"])
        found = await agent.call_tool("search_recordings", {"query": "night", "top": 2})
        hits = [json.loads(text) for text in texts(found)]
        assert [set(hit) for hit in hits] == [{"file", "start_s", "seconds", "score", "why"}] * 2
        assert {Path(hit["file"]).name for hit in hits} <= {"video.mp4", "a.png"} and "night" in hits[0]["why"]
        assert (await agent.call_tool("list_cameras")).structured_content == {"result": []}
        wrong: list[tuple[str, dict[str, Any], str]] = [
            ("ask_camera", {"camera": "gate", "question": "say:x"}, "this server reads no cameras"),
            ("ask_picture", {"picture": "../secret.png", "question": "say:x"}, "is not a data URL, nor a file in"),
            ("ask_picture", {"picture": str(secret), "question": "x"}, "is not a data URL, nor"),
            ("ask_picture", {"picture": "data:image/png;base64,%", "question": "x"}, "the data URL is not base64"),
            ("ask_picture", {"picture": "absent.png", "question": "x"}, "absent.png"),
            ("ask_picture", {"picture": url, "question": "say:x", "adapter": "absent"}, "no adapter named 'absent'"),
            ("ask_picture", {"question": "x"}, "picture"),
            ("search_recordings", {"query": ""}, "query"),
        ]
        for name, arguments, message in wrong:
            found = await agent.call_tool(name, arguments)
            assert found.is_error and message in texts(found)[0], (name, arguments, found)

    with Client(port=server.port) as client:
        asyncio.run(in_process(client, index, inputs, session))
        asyncio.run(over_http(client, index, inputs, session))


Session = Callable[[mcp.Client], Coroutine[Any, Any, None]]


async def in_process(client: Client, index: Path, pictures: Path, session: Session) -> None:
    async with mcp.Client(make_server(client, index, pictures)) as agent:
        await session(agent)


async def over_http(client: Client, index: Path, pictures: Path, session: Session) -> None:
    app = make_server(client, index, pictures).streamable_http_app()
    serving = uvicorn.Server(uvicorn.Config(app, port=(port := free_port()), log_level="error"))
    thread = threading.Thread(target=serving.run)
    thread.start()
    while not serving.started:
        time.sleep(0.01)
    try:
        async with mcp.Client(f"http://127.0.0.1:{port}/mcp") as agent:
            await session(agent)
    finally:
        serving.should_exit = True
        await asyncio.to_thread(thread.join)


def test_without_an_index_or_a_folder_there_is_no_search_and_no_file(server: Running, inputs: Path) -> None:
    async def session() -> None:
        with Client(port=server.port) as client:
            async with mcp.Client(make_server(client, None, None)) as agent:
                names = [tool.name for tool in (await agent.list_tools()).tools]
                assert names == ["list_cameras", "ask_camera", "ask_picture"]
                asked = {"picture": str(inputs / "a.png"), "question": "say:x"}
                assert (await agent.call_tool("ask_picture", asked)).is_error

    asyncio.run(session())


@pytest.mark.parametrize("value", ["0", "70000"])
def test_a_port_out_of_range_is_refused(value: str, vlora_command: Vlora) -> None:
    assert "--http-port" in vlora_command.refusal("mcp", "--http-port", value)
