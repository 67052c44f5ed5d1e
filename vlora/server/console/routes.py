"""Routes of the console page. They are private to the page, not an API, and may change with it."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from vlora.config import Token
from vlora.errors import UnknownStream
from vlora.server.console.feed import Feed
from vlora.server.console.files import CONSOLE_FILES, HEADERS, read_file
from vlora.server.frontend import FrontEnd
from vlora.server.security.access import Access
from vlora.server.streams.registry import WatchedStream

_PRIVATE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def add_console(app: FastAPI, front_end: FrontEnd, model: str, access: Access) -> None:
    """Add the page under / and /console, and its data routes. model: the base model's name."""
    feed = Feed(front_end.snapshot)

    def caller_of(request: Request) -> Token | None:
        """The request's token; None where the server has no tokens and every caller has full access."""
        caller: Token | None = request.state.caller if access.required else None
        return caller

    async def file(content: bytes, media_type: str) -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    for path, (name, media_type) in CONSOLE_FILES.items():
        app.get(path, include_in_schema=False)(functools.partial(file, read_file(name), media_type))

    @app.get("/console/state", include_in_schema=False)
    async def state(request: Request, since: int = 0) -> Response:
        """A snapshot, with the steps after number `since`."""
        snapshot, steps = await feed.read(since)
        caller = caller_of(request)
        streams = front_end.streams.watched()
        fields = msgspec.structs.asdict(snapshot)
        fields |= {
            "model": model,
            "stats": msgspec.structs.replace(snapshot.stats, model=model),  # the engine reports the model's folder
            "steps": steps,
            "num_streams": len(streams),
            "streams": [_stream(stream) for stream in streams if _may_see(caller, stream)],
            "admin": caller is None or caller.admin,
            "draining": front_end.draining,
        }
        return Response(msgspec.json.encode(fields), media_type="application/json", headers=_PRIVATE)

    @app.get("/console/adapters", include_in_schema=False)
    async def adapters() -> Response:
        """The name and heads of every adapter."""
        known = [
            {
                "name": status.name,
                "heads": [
                    {"name": head.name, "task": head.task, "num_frames": head.num_frames, "prompt": head.prompt}
                    for head in status.heads
                ],
            }
            for status in await front_end.known_adapters()
        ]
        return Response(msgspec.json.encode(known), media_type="application/json", headers=_PRIVATE)

    @app.get("/console/streams/{number}/frame", include_in_schema=False)
    async def frame(request: Request, number: int) -> Response:
        """The last answered frame with its answer below it; 204 while there is none."""
        caller = caller_of(request)
        for stream in front_end.streams.watched():
            if stream.number == number and _may_see(caller, stream):
                picture = stream.last_frame.look()
                if picture is None:
                    return Response(status_code=204, headers=_PRIVATE)
                return Response(picture[1], media_type="image/jpeg", headers=_PRIVATE)
        raise UnknownStream(f"no open stream {number} is visible to this token")


def _may_see(caller: Token | None, stream: WatchedStream) -> bool:
    """An admin sees every stream, other callers only their own."""
    return caller is None or caller.admin or stream.owner == caller.name


def _stream(watched: WatchedStream) -> dict[str, Any]:
    stream, last = watched.stream, watched.stream.last_result
    return {
        "number": watched.number,
        "owner": watched.owner,
        "adapter": stream.options.adapter,
        "head": stream.options.head,
        "fps": stream.options.fps,
        "drop": stream.options.drop,
        "max_latency_s": stream.options.max_latency_s,
        "num_waiting": stream.num_waiting,
        "num_running": stream.num_running,
        "num_answered": stream.num_answered,
        "num_dropped": stream.num_dropped,
        "num_failed": stream.num_failed,
        "last": None
        if last is None
        else {
            "number": last.number,
            "latency_s": last.latency_s,
            "label": None if last.answer is None else last.answer.label,
            "confidence": None if last.answer is None else last.answer.confidence,
            "problem": last.dropped or (None if last.error is None else last.error.message),
        },
    }
