"""The same calls over each way to a server: in process, RPyC with both clients, and HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from tests.server.api import Api, data_url, events, image_part
from vlora.client import AsyncClient
from vlora.client.values import Answer
from vlora.engine.operations import Train
from vlora.errors import error_from_code
from vlora.operations import CancelTraining, ListTrainings
from vlora.server.prompts import Level, TextRequest
from vlora.server.security.public_errors import to_vlora_error
from vlora.types import SamplingParams

LEVELS = ("max_latency_s", "max_ttft_s", "priority")


class Answered(NamedTuple):
    """num_tokens: of the prompt, and of the answer. adapter: of HTTP's answers in words, the name that was asked."""

    text: str
    finish_reason: str
    adapter: str | None
    num_tokens: tuple[int, int]
    by: str = "words"

    @classmethod
    def of(cls, answer: Answer) -> Answered:
        assert answer.result is None or answer.result.label == answer.text
        counts = answer.num_prompt_tokens, answer.num_completion_tokens
        return cls(answer.text, answer.finish_reason, answer.adapter, counts, answer.answered_by)


class Wire:
    """One way to a server. `ask` raises the typed error in each of them."""

    def __init__(self, api: Api) -> None:
        self.api = api

    def ask(self, prompt: Any, images: Sequence[bytes] = (), *, stream: bool = False, **fields: Any) -> Answered:
        raise NotImplementedError

    def heads(self, images: Sequence[bytes], pairs: Sequence[tuple[str, str]], **levels: Any) -> list[tuple[str, str]]:
        """The task and label, or the error's code and message, of each pair."""
        raise NotImplementedError

    def do(self, name: str, *args: Any, **options: Any) -> Any:
        """A call of administration, by its name in `Client`: plain values of JSON."""
        raise NotImplementedError


class InProcess(Wire):
    def ask(self, prompt: Any, images: Sequence[bytes] = (), *, stream: bool = False, **fields: Any) -> Answered:
        options = {name: fields.pop(name) for name in ("adapter", "answer") if name in fields}
        level = Level(**{name: fields.pop(name) for name in LEVELS if name in fields})
        if isinstance(fields.get("stop"), str):
            fields["stop"] = (fields["stop"],)

        async def parts() -> list[Any]:
            sampling = SamplingParams(**fields)
            asked = TextRequest(prompt, images, sampling=sampling, level=level, whole=not stream, **options)
            return [part async for _, part in self.api.front_end.generate(asked)]

        *pieces, answer = self._run(parts())
        assert "".join(piece.text for piece in pieces) == answer.text
        return Answered.of(answer)

    def heads(self, images: Sequence[bytes], pairs: Sequence[tuple[str, str]], **levels: Any) -> list[tuple[str, str]]:
        return _outcomes(self._run(self.api.front_end.ask_heads(images, pairs, Level(**levels))))

    def do(self, name: str, *args: Any, **options: Any) -> Any:
        catalog, engine = self.api.front_end.adapters, self.api.front_end.engine
        calls: dict[str, Callable[..., Awaitable[Any]]] = {
            "load_adapter": catalog.load,
            "unload_adapter": catalog.unload,
            "pin_adapter": catalog.pin,
            "adapters": catalog.list,
            "train": lambda plan: engine.call(Train(plan)),
            "trainings": lambda: engine.call(ListTrainings()),
            "cancel_training": lambda name: engine.call(CancelTraining(name)),
        }
        return _plain(self._run(calls[name](*args, **options)))

    def _run(self, coroutine: Any) -> Any:
        try:
            return self.api.on_loop(coroutine)
        except Exception as error:
            raise to_vlora_error(error) from error


class Rpyc(Wire):
    def ask(self, prompt: Any, images: Sequence[bytes] = (), *, stream: bool = False, **fields: Any) -> Answered:
        with self.api.client() as client:
            if not stream:
                return Answered.of(client.generate(prompt, images, **fields))
            streamed = client.stream(prompt, images, **fields)
            text = "".join(streamed)
            assert streamed.answer is not None and streamed.answer.text == text
            return Answered.of(streamed.answer)

    def heads(self, images: Sequence[bytes], pairs: Sequence[tuple[str, str]], **levels: Any) -> list[tuple[str, str]]:
        with self.api.client() as client:
            return _outcomes(client.ask_heads(images, pairs, **levels))

    def do(self, name: str, *args: Any, **options: Any) -> Any:
        with self.api.client() as client:
            return _plain(getattr(client, name)(*args, **options))


class Asyncio(Wire):
    def ask(self, prompt: Any, images: Sequence[bytes] = (), *, stream: bool = False, **fields: Any) -> Answered:
        async def asked(client: AsyncClient) -> Answer:
            if not stream:
                return await client.generate(prompt, images, **fields)
            *pieces, answer = [part async for part in client.stream(prompt, images, **fields)]
            assert isinstance(answer, Answer) and "".join(map(str, pieces)) == answer.text
            return answer

        return Answered.of(self._run(asked))

    def heads(self, images: Sequence[bytes], pairs: Sequence[tuple[str, str]], **levels: Any) -> list[tuple[str, str]]:
        return _outcomes(self._run(lambda client: client.ask_heads(images, pairs, **levels)))

    def do(self, name: str, *args: Any, **options: Any) -> Any:
        return _plain(self._run(lambda client: getattr(client, name)(*args, **options)))

    def _run(self, call: Callable[[AsyncClient], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            async with AsyncClient(port=self.api.port, token=self.api.token) as client:
                return await call(client)

        return asyncio.run(main())


class Http(Wire):
    def ask(self, prompt: Any, images: Sequence[bytes] = (), *, stream: bool = False, **fields: Any) -> Answered:
        model = fields.pop("adapter", None) or "base"
        content = [{"type": "text", "text": prompt}, *map(image_part, images)] if images else prompt
        if not stream:
            answer = self._checked(self.api.chat(content, model=model, **fields))
            (choice,), usage = answer["choices"], answer["usage"]
            text = choice["message"]["content"]
        else:
            fields["stream_options"] = {"include_usage": True}
            answer = self._checked(self.api.chat(content, model=model, stream=True, **fields))
            chunks = events(answer)
            self._checked((200, chunks[-1]))
            choice, usage = chunks[-2]["choices"][0], chunks[-1]["usage"]
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
        counts = usage["prompt_tokens"], usage["completion_tokens"]
        adapter = choice["head"]["adapter"] if choice["answered_by"] == "head" else None if model == "base" else model
        return Answered(text, choice["finish_reason"], adapter, counts, choice["answered_by"])

    def heads(self, images: Sequence[bytes], pairs: Sequence[tuple[str, str]], **levels: Any) -> list[tuple[str, str]]:
        heads = [{"adapter": adapter, "head": head} for adapter, head in pairs]
        body = {"images": list(map(data_url, images)), "heads": heads, **levels}
        found = self._checked(self.api.call("POST", "/v1/heads", body))["data"]
        return [
            (each["error"]["code"], each["error"]["message"]) if "error" in each else (each["task"], each["label"])
            for each in found
        ]

    def do(self, name: str, *args: Any, **options: Any) -> Any:
        calls: dict[str, Callable[..., tuple[str, str, Any]]] = {
            "adapters": lambda: ("GET", "/v1/adapters", None),
            "load_adapter": lambda name, path: ("POST", "/v1/adapters", {"name": name, "path": path}),
            "unload_adapter": lambda name, drain=False: ("DELETE", f"/v1/adapters/{name}?drain={drain}", None),
            "pin_adapter": lambda name, pinned: ("PUT" if pinned else "DELETE", f"/v1/adapters/{name}/pin", None),
            "train": lambda plan: ("POST", "/v1/trainings", {"plan": plan}),
            "trainings": lambda: ("GET", "/v1/trainings", None),
            "cancel_training": lambda name: ("DELETE", f"/v1/trainings/{name}", None),
            "cluster": lambda: ("GET", "/v1/cluster", None),
            "drain_replica": lambda name: ("PUT", f"/v1/cluster/replicas/{name}/drain", None),
            "resume_replica": lambda name: ("DELETE", f"/v1/cluster/replicas/{name}/drain", None),
            "scale": lambda number: ("PUT", "/v1/cluster/scale", {"replicas": number}),
            "promote": lambda name: ("POST", f"/v1/learning/{name}/promote", {}),
            "roll_back": lambda name: ("POST", f"/v1/learning/{name}/rollback", {}),
        }
        method, path, body = calls[name](*args, **options)
        found = self._checked(self.api.call(method, path, body))
        return found["data"] if isinstance(found, dict) and "data" in found else found or None

    def _checked(self, reply: tuple[int, Any]) -> Any:
        status, answer = reply
        if isinstance(answer, dict) and answer.get("error"):
            error = error_from_code(answer["error"]["code"], answer["error"]["message"])
            assert status in (error.http_status, 200), answer  # 200: in the middle of a stream
            raise error
        assert 200 <= status < 300, answer
        return answer


WIRES: dict[str, type[Wire]] = {"in process": InProcess, "rpyc": Rpyc, "asyncio": Asyncio, "http": Http}


def _outcomes(found: Any) -> list[tuple[str, str]]:
    return [
        (each.error.code, each.error.message) if each.error is not None else (each.answer.task, each.answer.label)
        for each in found
    ]


def _plain(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))
