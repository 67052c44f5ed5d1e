"""Calls over HTTP to a server of `running_server`, their parts, and events of their answers."""

from __future__ import annotations

import base64
import json
import re
from contextlib import AbstractContextManager
from typing import Any

from tests.server.running import Running, running_server

Api = Running


def running_api(
    engine: Any = None, processor: Any = None, model: str = "base", **settings: Any
) -> AbstractContextManager[Api]:
    """Serve both APIs until the end of the block, by default over a scripted engine. See `running_server`."""
    return running_server(engine=engine, processor=processor, model=model, http=True, **settings)


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def events(text: str) -> list[Any]:
    lines = [re.sub("^(event: .*\n)?data: ", "", line) for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
