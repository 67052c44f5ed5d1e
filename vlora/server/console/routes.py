"""Routes of the console page. They are private to the page, not an API, and may change with it."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from vlora.config import Token
from vlora.engine.snapshot import EngineSnapshot, StepRecord
from vlora.errors import UnknownStream
from vlora.server.frontend import FrontEnd
from vlora.server.security.access import caller_of, is_admin
from vlora.server.security.public_errors import shown_to, value_for
from vlora.server.streams.registry import OpenStream

_FOLDER = Path(__file__).parent

CONSOLE_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/console": ("page.html", "text/html; charset=utf-8"),
    "/console/style.css": ("style.css", "text/css; charset=utf-8"),
    "/console/script.js": ("script.js", "text/javascript; charset=utf-8"),
}
"""URL path -> file in this folder and its media type."""

_HEADERS = {
    # No other origin, nothing inline, no framing: adapter names are untrusted text.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
"""Of the page's files, which contain no secret and need no token."""

_PRIVATE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

_COUNTS = ("waiting", "running", "answered", "dropped", "failed")  # of frames

INTERVAL_S = 0.5
MAX_STEPS = 2000  # kept for new viewers


class ConsoleRoutes:
    """The page under / and /console, and its data routes. model: the base model's name."""

    def __init__(self, front_end: FrontEnd, model: str) -> None:
        self._front_end = front_end
        self._model = model
        self._feed = SnapshotFeed(front_end.snapshot)

    def add_to(self, app: FastAPI) -> None:
        for path, (name, media_type) in CONSOLE_FILES.items():
            app.get(path, include_in_schema=False)(functools.partial(_file, (_FOLDER / name).read_bytes(), media_type))
        app.get("/console/state", include_in_schema=False)(self.state)
        app.get("/console/adapters", include_in_schema=False)(self.adapters)
        app.get("/console/streams/{number}/frame", include_in_schema=False)(self.frame)

    async def state(self, request: Request, since: int = 0) -> Response:
        """A snapshot, with the steps after number `since`."""
        snapshot, steps = await self._feed.read(since)
        caller = caller_of(request)
        streams, cluster = self._front_end.streams.watched(), self._front_end.cluster
        cameras = self._front_end.cameras
        fields = msgspec.structs.asdict(snapshot)
        fields |= {
            "model": self._model,
            "stats": shown_to(snapshot.stats, caller),
            "steps": steps,
            "replicas": () if cluster is None else shown_to(cluster.status().replicas, caller),
            "cameras": None if cameras is None else shown_to(cameras.statuses(), caller),
            "num_streams": len(streams),
            "streams": [_stream_json(stream, caller) for stream in streams if _may_see(caller, stream)],
            "admin": is_admin(caller),
            "draining": self._front_end.draining,
            "learns": self._front_end.learning is not None,
        }
        return Response(msgspec.json.encode(fields), media_type="application/json", headers=_PRIVATE)

    async def adapters(self, request: Request) -> Response:
        adapters = shown_to(await self._front_end.adapters.list_cached(), caller_of(request))
        return Response(msgspec.json.encode(adapters), media_type="application/json", headers=_PRIVATE)

    async def frame(self, request: Request, number: int) -> Response:
        """The last answered frame with its answer below it; 204 while there is none."""
        caller = caller_of(request)
        for stream in self._front_end.streams.watched():
            if stream.number == number and _may_see(caller, stream):
                picture = stream.preview.read()
                if picture is None:
                    return Response(status_code=204, headers=_PRIVATE)
                return Response(picture[1], media_type="image/jpeg", headers=_PRIVATE)
        raise UnknownStream(f"no open stream {number} is visible to this token")


async def _file(content: bytes, media_type: str) -> Response:
    return Response(content, media_type=media_type, headers=_HEADERS)


def _may_see(caller: Token | None, stream: OpenStream) -> bool:
    """An admin sees every stream, other callers only their own."""
    return is_admin(caller) or (caller is not None and stream.owner == caller.name)


def _stream_json(watched: OpenStream, caller: Token | None) -> dict[str, Any]:
    stream, last = watched.stream, watched.stream.last_result
    labels = [] if last is None else [each.label for each in last.answers if each.label is not None]
    return {
        "number": watched.number,
        "owner": watched.owner,
        **{name: getattr(stream.options, name) for name in ("name", "fps", "drop", "max_latency_s")},
        **{f"num_{name}": getattr(stream, f"num_{name}") for name in _COUNTS},
        "asks": [
            *(f"{head} / {adapter}" for adapter, head in stream.options.heads),  # cards cut the end of long texts
            *(f"{each.question} / {each.adapter or 'base model'}" for each in stream.options.questions),
        ],
        "last": None
        if last is None
        else {
            "number": last.number,
            "latency_s": last.latency_s,
            "label": "; ".join(labels) or None,
            "confidence": last.answer.confidence if last.answer is not None and len(labels) == 1 else None,
            "problem": last.dropped or (None if last.error is None else value_for(last.error, caller).message),
        },
    }


class SnapshotFeed:
    """Takes a snapshot, with the steps after a number, on request only."""

    def __init__(self, take: Callable[[int], Awaitable[EngineSnapshot]], interval_s: float = INTERVAL_S) -> None:
        self._take = take
        self._interval_s = interval_s
        self._taken_at = 0.0
        self._snapshot: EngineSnapshot | None = None
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._lock = asyncio.Lock()

    async def read(self, since: int) -> tuple[EngineSnapshot, list[StepRecord]]:
        """The last snapshot, refreshed when it is old, and the steps after number `since`. Raises EngineDead."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if self._snapshot is None or now - self._taken_at >= self._interval_s:
                self._taken_at, self._snapshot = now, None  # on failure, do not serve the old snapshot
                self._snapshot = await self._take(self._steps[-1].number if self._steps else 0)
                if self._steps and self._snapshot.stats.num_steps < self._steps[-1].number:
                    self._steps.clear()  # the engine restarted and counts from 1
                self._steps.extend(self._snapshot.steps)
            return self._snapshot, [step for step in self._steps if step.number > since]
