"""An engine process without a model: `python -m tests.cluster.sleeping_engine DESCRIPTOR`.

A step sleeps, as a host does while a GPU computes, and then answers each request of the batch with a token that depends
on its seed, prompt, adapter content and place only. A prompt that begins with `KILLER` ends the process in the third
step.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

from msgspec.structs import replace

from vlora.adapter_files import content_hash
from vlora.config import EngineConfig
from vlora.engine.ipc.worker import run
from vlora.engine.snapshot import EngineLoad
from vlora.errors import Aborted, AdapterChanged, BadAdapter, BadRequest, DeadlineMissed, UnknownAdapter, VLoraError
from vlora.types import (
    AdapterStatus,
    EngineStats,
    ErrorValue,
    FinishReason,
    HeadAnswer,
    Request,
    RequestOutput,
    Timings,
    TokenScore,
)

COMMAND = (sys.executable, "-m", "tests.cluster.sleeping_engine")
STEP_VARIABLE = "VLORA_TEST_STEP_S"
KILLER = 499
VOCAB = 500


def expected(request: Request, seed: int, version: str | None = None) -> tuple[int, ...]:
    """The whole answer of a request."""
    return tuple(token_at(request, seed, version, place) for place in range(request.sampling.max_tokens))


def token_at(request: Request, seed: int, version: str | None, place: int) -> int:
    data = repr((seed, request.prompt_ids, version, place)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest()) % VOCAB


def version_of(text: str) -> str:
    """The version of an adapter with this text in its file."""
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


class _Running:
    def __init__(self, request: Request, version: str | None, began_s: float) -> None:
        self.request = request
        self.version = version
        self.tokens = list(request.answered)
        self.began_s = began_s
        self.first_s: float | None = None
        self.num_steps = 0


class SleepingEngine:
    """The interface of `Engine`."""

    alarm: int | None = None
    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, config: EngineConfig) -> None:
        self.limits = SimpleNamespace(max_context=100_000)
        no_work = SimpleNamespace(advance=lambda: False, retry_s=None)
        self.parts = SimpleNamespace(trainings=no_work, other_work=no_work)
        self._config = config
        self._step_s = float(os.environ.get(STEP_VARIABLE, "0.004"))
        self._running: dict[str, _Running] = {}
        self._adapters: dict[str, AdapterStatus] = {}
        self.kept: dict[tuple[str, str], AdapterStatus] = {}
        self._to_keep: Mapping[str, Collection[str]] = {}
        self._num_steps = self._num_finished = self._num_cancelled = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def check_ranks(self) -> None:
        pass

    def add(self, request: Request) -> None:
        version = None if request.adapter is None else self._version_for(request.adapter, request.adapter_version)
        assert request.request_id not in self._running
        self._running[request.request_id] = _Running(request, version, self.clock())

    def cancel(self, request_id: str) -> RequestOutput | None:
        if request_id not in self._running:
            return None
        self._num_cancelled += 1
        return self._end(request_id, "cancelled", error=Aborted(f"request {request_id!r} was cancelled"))

    def step(self) -> tuple[RequestOutput, ...]:
        time.sleep(self._step_s)
        self._num_steps += 1
        now = self.clock()
        outputs = []
        for request_id, running in list(self._running.items())[: self._config.max_batch_size]:
            request = running.request
            running.num_steps += 1
            if request.prompt_ids[0] == KILLER and running.num_steps > 2:
                self.die()
            running.first_s = running.first_s or now
            if request.max_latency_s is not None and now - running.began_s > request.max_latency_s:
                message = f"request {request_id!r} exceeded its max_latency_s of {request.max_latency_s:g} s"
                outputs.append(self._end(request_id, "error", error=DeadlineMissed(message)))
                continue
            if request.head is not None:
                answer = HeadAnswer(task="binary", label=str(sum(request.prompt_ids)), confidence=1.0, labels=())
                outputs.append(self._end(request_id, "head", head=answer))
                continue
            assert request.sampling.seed is not None  # fixed by the sender
            place = len(running.tokens)
            token = token_at(request, request.sampling.seed, running.version, place)
            running.tokens.append(token)
            scores = () if request.sampling.logprobs is None else (TokenScore(-float(place), ()),)
            if len(running.tokens) >= request.sampling.max_tokens:
                outputs.append(self._end(request_id, "length", tokens=(token,), scores=scores))
            else:
                outputs.append(RequestOutput(request_id=request_id, token_ids=(token,), scores=scores))
        return tuple(outputs)

    def die(self) -> None:
        os._exit(9)

    def version_of(self, request_id: str) -> str | None:
        running = self._running.get(request_id)
        return None if running is None else running.version

    def load(self) -> EngineLoad:
        resident = {name: status.version for name, status in self._adapters.items()}
        running = min(len(self._running), self._config.max_batch_size)
        return EngineLoad(
            free_blocks=1000 - sum(self._blocks(each) for each in self._running.values()),
            total_blocks=1000,
            num_running=running,
            num_waiting=len(self._running) - running,
            resident=resident,
        )

    def _version_for(self, name: str, wanted: str | None) -> str:
        """As `Compositions.get` and `check_version`: the present content, or a former one that is kept or in use."""
        used = {(each.request.adapter, each.version) for each in self._running.values()}
        if wanted is not None and ((name, wanted) in self.kept or (name, wanted) in used):
            return wanted
        if name not in self._adapters:
            raise UnknownAdapter(f"no adapter named {name!r}")
        version = self._adapters[name].version
        if wanted not in (None, version):
            raise AdapterChanged(f"adapter {name!r} has content {version!r}, but the answer needs {wanted!r}")
        return version

    def register_adapters(self, paths: Mapping[str, str], versions: Mapping[str, str] = {}) -> None:
        made = {}
        for name, path in paths.items():
            wanted = versions.get(name, "")
            present = self._adapters.get(name)
            former = present if present is not None and present.version == wanted else self.kept.get((name, wanted))
            made[name] = self._read(name, path, wanted) if former is None else former
        for name, status in made.items():
            self._set(name, status)

    def load_adapter(self, name: str, path: str, version: str = "") -> AdapterStatus:
        if name in self._adapters and self._adapters[name].pinned:
            raise BadRequest(f"adapter {name!r} is pinned")
        self._set(name, self._read(name, path, version))
        return self._adapters[name]

    def keep_adapters(self, versions: Mapping[str, Collection[str]]) -> dict[str, tuple[str, ...]]:
        self._to_keep = versions
        self.kept = {key: each for key, each in self.kept.items() if key[1] in versions.get(key[0], ())}
        here = {*self.kept, *((name, each.version) for name, each in self._adapters.items())}
        return {name: tuple(each for each in wanted if (name, each) in here) for name, wanted in versions.items()}

    def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        if name not in self._adapters:
            raise UnknownAdapter(f"no adapter named {name!r}")
        self._adapters[name] = replace(self._adapters[name], pinned=pinned)
        return self._adapters[name]

    def pin_in_background(self, name: str) -> Future[AdapterStatus]:
        return _done(lambda: self.pin_adapter(name, True))

    def text_of(self, name: str, path: str) -> str | None:
        """The content of an adapter's file; None if there is none."""
        file = Path(path)
        return file.read_text() if file.exists() else None

    def _set(self, name: str, status: AdapterStatus) -> None:
        self._replace(name)
        self._adapters[name] = status

    def _replace(self, name: str) -> None:
        before = self._adapters.pop(name, None)
        if before is not None and before.version in self._to_keep.get(name, ()):
            self.kept[name, before.version] = before

    def _read(self, name: str, path: str, wanted: str) -> AdapterStatus:
        if Path(path).is_dir():
            version = content_hash(Path(path))
        elif (text := self.text_of(name, path)) is not None:
            version = version_of(text)
        else:
            raise BadAdapter(f"{path}: there is no such file")
        if wanted not in ("", version):
            raise BadAdapter(f"{path}: its content is {version}, but {wanted} was registered")
        plain = {"rank": 8, "num_bytes": 1000, "merge_fidelity": 1.0, "touches_vision": False, "heads": ()}
        return AdapterStatus(name=name, version=version, resident=True, mergeable=True, **plain)  # type: ignore[arg-type]

    def load_in_background(self, name: str, path: str, version: str = "") -> Future[AdapterStatus]:
        return _done(lambda: self.load_adapter(name, path, version))

    def unload_adapter(self, name: str, drain: bool = False) -> tuple[RequestOutput, ...]:
        if name not in self._adapters:
            raise UnknownAdapter(f"no adapter named {name!r}")
        self._replace(name)
        mine = [key for key, running in self._running.items() if running.request.adapter == name and not drain]
        return tuple(self._end(key, "error", error=Aborted(f"adapter {name!r} was unloaded")) for key in mine)

    def adapters(self, after: str = "", most: int | None = None) -> tuple[AdapterStatus, ...]:
        return tuple(self._adapters[name] for name in sorted(self._adapters) if name > after)[:most]

    def stats(self) -> EngineStats:
        load = self.load()
        return EngineStats(
            model=self._config.model,
            num_steps=self._num_steps,
            steps_by_mode={"unmerged": self._num_steps},
            requests_by_mode={},
            num_switches=0,
            switch_s=0.0,
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            num_finished=self._num_finished,
            num_failed=0,
            num_cancelled=self._num_cancelled,
            num_preemptions=0,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
        )

    def close(self) -> tuple[RequestOutput, ...]:
        return tuple(output for key in tuple(self._running) if (output := self.cancel(key)) is not None)

    def _blocks(self, running: _Running) -> int:
        return (len(running.request.prompt_ids) + len(running.tokens)) // self._config.block_size + 1

    def _end(
        self,
        request_id: str,
        reason: FinishReason,
        *,
        tokens: tuple[int, ...] = (),
        scores: tuple[TokenScore, ...] = (),
        head: HeadAnswer | None = None,
        error: VLoraError | None = None,
    ) -> RequestOutput:
        running, now = self._running.pop(request_id), self.clock()
        self._num_finished += error is None
        timings = Timings(
            queue_s=0.0,
            ttft_s=None if running.first_s is None else running.first_s - running.began_s,
            latency_s=now - running.began_s,
            num_prompt_tokens=len(running.request.prompt_ids),
            num_completion_tokens=len(running.tokens),
            num_preemptions=0,
            steps_by_mode={"unmerged": running.num_steps},
        )
        return RequestOutput(
            request_id=request_id,
            token_ids=tokens,
            scores=scores,
            head=head,
            finish_reason=reason,
            error=None if error is None else ErrorValue.of(error),
            timings=timings,
        )


def _done(call: Callable[[], AdapterStatus]) -> Future[AdapterStatus]:
    future: Future[AdapterStatus] = Future()
    try:
        future.set_result(call())
    except VLoraError as error:
        future.set_exception(error)
    return future


if __name__ == "__main__":
    assert "torch" not in sys.modules  # an engine process does not import it by itself
    os._exit(run(int(sys.argv[1]), SleepingEngine))  # type: ignore[arg-type]
