"""Clients for a run: streamed chat completions of any OpenAI-compatible server, or vlora's RPyC.

HTTP is h11's and a socket: with a full library, hundreds of clients in one process would wait mainly for their own
process.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import h11

from vlora.bench.serve.load import ObservedAnswer, WorkloadRequest
from vlora.errors import BadConfig

_READ_BYTES = 65_536  # bytes


class HttpProtocol:
    """The protocol state of one persistent connection, without I/O: posts JSON, one request after another.

    Args:
        headers: Sent with each request, including Host; this machine's name by default.
    """

    status = 0
    body = b""
    """The body of the current answer received so far."""

    def __init__(self, headers: Mapping[str, str] = MappingProxyType({"Host": "127.0.0.1"})) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._headers = tuple(headers.items())

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        """The bytes of a request."""
        if self._http.our_state is h11.MUST_CLOSE:
            raise EOFError("the server's last answer was the connection's last")
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        self.status, self.body = 0, b""
        data = json.dumps(body).encode()
        headers = [*self._headers, ("Content-Type", "application/json"), ("Content-Length", str(len(data)))]
        request = h11.Request(method="POST", target=path, headers=headers)
        return b"".join(self._http.send(each) or b"" for each in (request, h11.Data(data), h11.EndOfMessage()))

    def receive(self, data: bytes) -> bool:
        """Whether the answer is complete after these bytes."""
        if not data:
            raise EOFError(f"the server ended in the middle of {self.body!r}")
        self._http.receive_data(data)
        parts = [self.body]
        try:
            while (event := self._http.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Response):
                    self.status = event.status_code
                elif isinstance(event, h11.Data):
                    parts.append(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    return True
        except h11.RemoteProtocolError as error:
            raise ValueError(f"no HTTP: {error}") from error
        finally:
            self.body = b"".join(parts)
        return False


class HttpConnection:
    """One persistent connection; one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: HttpProtocol) -> None:
        self.protocol = protocol
        self._reader, self._writer = reader, writer

    def send(self, path: str, body: dict[str, Any]) -> None:
        """Post JSON without reading the response."""
        self._writer.write(self.protocol.post(path, body))

    async def receive(self, on_part: Callable[[], None] = lambda: None) -> tuple[int, bytes]:
        """Status and body of the answer. on_part: called after each part of it."""
        complete = False
        while not complete:
            complete = self.protocol.receive(await self._reader.read(_READ_BYTES))
            on_part()
        return self.protocol.status, self.protocol.body

    def abort(self) -> None:
        self._writer.transport.abort()


class EventReader:
    """Server-sent events from a body that arrives in parts: the JSON of each, until `[DONE]`."""

    def __init__(self) -> None:
        self._taken = 0
        self.done = False

    def new_events(self, body: bytes) -> Iterator[dict[str, Any]]:
        while (end := body.find(b"\n", self._taken)) >= 0:
            line = body[self._taken : end].strip()
            self._taken = end + 1
            if not line.startswith(b"data:"):
                continue  # empty lines, comments, unused fields
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                self.done = True
            else:
                yield json.loads(data)


class ChatCompletions:
    """Streamed chat completions over HTTP, one persistent connection per concurrent request.

    Args:
        url: Of the API, with its path: http://127.0.0.1:8000/v1.
        base: Name of the base model there.
        adapters: Names of the adapters there, by index.
        token: Sent as a bearer token, or None.

    Raises:
        BadConfig: The URL is invalid.
    """

    def __init__(self, url: str, base: str, adapters: Sequence[str], token: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadConfig(f"url is {url!r}; write http://HOST:PORT/v1 or https://...")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = f"{parts.path.rstrip('/')}/chat/completions"
        self._headers = {"Host": parts.netloc.rpartition("@")[2]}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._base, self._adapters = base, adapters
        self._idle: list[HttpConnection] = []

    async def __call__(self, request: WorkloadRequest, answer: ObservedAnswer) -> None:
        body, events = self._body(request), EventReader()
        connection = self._idle.pop() if self._idle else await self._connect()

        def note() -> None:
            now = time.perf_counter()
            if connection.protocol.status == 200:
                for event in events.new_events(connection.protocol.body):
                    _note(event, answer, now)

        try:
            try:
                connection.send(self._path, body)
            except EOFError:  # the server closes a connection after a number of answers
                connection.abort()
                connection = await self._connect()
                connection.send(self._path, body)
            status, whole = await connection.receive(note)
            if status != 200:
                raise ValueError(f"status {status}: {whole[:200].decode(errors='replace')}")
            if not events.done:
                raise ValueError(f"the stream ended without [DONE] after {len(answer.pieces_s)} pieces")
        except BaseException:
            connection.abort()
            raise
        self._idle.append(connection)

    async def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _connect(self) -> HttpConnection:
        opened = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        return HttpConnection(*opened, HttpProtocol(self._headers))

    def _body(self, request: WorkloadRequest) -> dict[str, Any]:
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{base64.b64encode(each).decode()}"}}
            for each in request.pictures
        ]
        content.append({"type": "text", "text": request.text})
        return {
            "model": self._base if request.adapter is None else self._adapters[request.adapter],
            "messages": [{"role": "user", "content": content}],
            "max_tokens": request.answer_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def _note(event: dict[str, Any], answer: ObservedAnswer, now: float) -> None:
    if "error" in event:
        raise ValueError(f"error in the stream: {str(event['error'])[:200]}")
    if usage := event.get("usage"):
        answer.prompt_tokens, answer.answer_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in event.get("choices", ()):
        if text := choice.get("delta", {}).get("content"):
            answer.text += text
            answer.pieces_s.append(now)


class RpycClient:
    """Text streams of vlora's RPyC service on this machine."""

    def __init__(self, port: int, adapters: Sequence[str]) -> None:
        from vlora.client import AsyncClient  # needs rpyc, the client over HTTP does not

        self._client = AsyncClient(port=port, timeout_s=600.0)
        self._adapters = adapters

    async def __call__(self, request: WorkloadRequest, answer: ObservedAnswer) -> None:
        adapter = None if request.adapter is None else self._adapters[request.adapter]
        async for part in self._client.stream(
            request.text, request.pictures, adapter, max_tokens=request.answer_tokens
        ):
            if not isinstance(part, str):
                answer.prompt_tokens, answer.answer_tokens = part.num_prompt_tokens, part.num_completion_tokens
            elif part:
                answer.text += part
                answer.pieces_s.append(time.perf_counter())

    async def close(self) -> None:
        await self._client.close()


def token_from_environment() -> str | None:
    """The API key, from the variable that OpenAI's clients read."""
    return os.environ.get("OPENAI_API_KEY")
