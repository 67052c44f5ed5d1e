"""A scripted engine and a processor over bytes, to test the servers without a model.

The prompt contains the script: `say:TEXT` answers TEXT, one byte per step; `forever` never stops; `never` outputs
nothing; `crash` fails the step loop; `exit` ends the process; `trip` fails while the request is admitted; `fail` fails
only its request; `overloaded` refuses it with its service level; `grammar` answers with the request's grammar. Any
other prompt is answered with yes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
from PIL import Image

from vlora.config import EngineConfig
from vlora.engine.interface import EngineInterface
from vlora.engine.operations import GetSnapshot, perform
from vlora.engine.snapshot import (
    AdapterLoad,
    ArenaMap,
    ArenaRun,
    EngineLoad,
    EngineSnapshot,
    QueuedRequest,
    StepRecord,
)
from vlora.errors import (
    Aborted,
    BadAdapter,
    BadConfig,
    BadImage,
    BadPlan,
    BadRequest,
    DeadlineUnreachable,
    EngineDead,
    PromptTooLong,
    StepFailed,
    UnknownAdapter,
    UnknownHead,
    VLoraError,
)
from vlora.models.vision.images import Region
from vlora.operations import GetStats, Operation
from vlora.types import (
    AdapterStatus,
    EngineStats,
    ErrorValue,
    FoundBox,
    HeadAnswer,
    HeadSummary,
    Request,
    RequestOutput,
    TensorValue,
    Timings,
    TrainingStatus,
    VisionInput,
    composed_of,
)
from vlora.types.domain import DomainSummary

ENGINE_COMMAND = (sys.executable, "-m", "tests.server.scripted_process")
EOS = 256
IMAGE = 257
LABELS = ("dark", "bright")
TASKS = ("classification", "action", "binary", "counting", "multi_label", "regression", "detection")


def head_answer(task: str, vision: Sequence[VisionInput]) -> HeadAnswer:
    """A head answers by the first image's brightness; a head named after a task has that task's result form."""
    brightness = vision[0].fields["pixel_values"].data[0] / 255
    best = int(brightness > 0.5)
    scores = (1 - brightness, brightness)
    answer = HeadAnswer(task=task, label=LABELS[best], confidence=scores[best], labels=LABELS)
    match task:
        case "detection":
            named: dict[str, Any] = {"label": LABELS[best], "label_id": best, "score": scores[best]}
            box = FoundBox(**named, left=-0.1, top=0.25, right=0.5, bottom=1.5, image=len(vision) - 1)
            return msgspec.structs.replace(answer, boxes=(box,))
        case "counting":
            return msgspec.structs.replace(answer, count=best, scores=scores)
        case "multi_label":
            return msgspec.structs.replace(answer, chosen=(best,), scores=scores)
        case "regression":
            return msgspec.structs.replace(answer, values=(brightness, 1.0), deviations=(0.1, 0.2))
        case _:
            return msgspec.structs.replace(answer, label_id=best, scores=scores)


def embedding_of(request: Request) -> HeadAnswer:
    """The numbers of tokens and of images, and 1 for the mean of all tokens."""
    values = (float(len(request.prompt_ids)), float(len(request.vision)), float(request.pooling == "mean"))
    return HeadAnswer(task="embedding", label="", confidence=1.0, labels=(), values=values)


class Processed(NamedTuple):
    vision: tuple[VisionInput, ...]
    shown: tuple[Region, ...]
    placeholders: tuple[str, ...] = ()


class Encoded(NamedTuple):
    prompt_ids: tuple[int, ...]
    vision: tuple[VisionInput, ...]
    shown: tuple[Region, ...]


class ByteProcessor:
    """One token per byte; an image is one token with its mean brightness. num_processed: images, each time."""

    takes_tools = takes_videos = False
    special_tokens = ("<|image_pad|>",)
    num_processed = 0
    config = SimpleNamespace(text_config=SimpleNamespace(hidden_size=3, vocab_size=258))

    def ask(self, question: str, kinds: Sequence[str]) -> str:
        return "\0" * len(kinds) + question

    def as_text(self, text: str) -> str:
        return text

    def template(self, messages: Sequence[dict[str, Any]], tools: Any = (), begins_answer: bool = True) -> str:
        parts = [] if begins_answer else ["\n"]
        for message in messages:
            content = message["content"]
            parts += [content] if isinstance(content, str) else [part.get("text", "\0") for part in content]
        return "".join(parts)

    def process_images(self, images: Sequence[Image.Image]) -> Processed:
        self.num_processed += len(images)
        if any(image.width > 200 * image.height for image in images):
            raise BadImage("the image processor rejects the images: aspect ratio")
        shown = tuple(Region(0, 0, image.width, image.height) for image in images)
        return Processed(tuple(self._vision(image) for image in images), shown)

    def encode_processed(self, prompt: str, images: Processed, special: bool = True) -> Encoded:
        num_images = len(images.vision)
        if prompt.count("\0") != num_images:
            raise BadRequest(f"the prompt has {prompt.count(chr(0))} image markers but {num_images} images were sent")
        return Encoded(tuple(IMAGE if byte == 0 else byte for byte in prompt.encode()), images.vision, images.shown)

    def as_given(self, token_ids: Sequence[int]) -> Encoded:
        return Encoded(tuple(token_ids), (), ())

    def decode(self, token_ids: Sequence[int], special: bool = False) -> str:
        if special:
            return "".join(map(self.token_text, token_ids))
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return {EOS: "<eos>", IMAGE: "<image>"}.get(token_id) or bytes([token_id]).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < 256 else None

    def _vision(self, image: Image.Image) -> VisionInput:
        assert image.mode == "RGB"
        mean = image.convert("L").resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))
        assert isinstance(mean, int)
        field = TensorValue("uint8", (1,), bytes([mean]))
        digest = hashlib.blake2b(field.data, digest_size=16).hexdigest()
        return VisionInput(kind="image", content_hash=digest, num_tokens=1, fields={"pixel_values": field})


class ScriptedTrainings:
    """Trainings that run forever. A plan is the name of one; "spoiled" has records that were set aside.

    If it is an adapter's folder, the training is finished. load: serves it.
    """

    retry_s: float | None = None

    def __init__(self, load: Callable[[str, str], AdapterStatus]) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._load = load
        self._found: dict[str, TrainingStatus] = {}

    def advance(self) -> bool:
        return False

    def submit(self, plan: str, *, reopen: bool) -> Future[tuple[TrainingStatus, ...]]:
        done: Future[tuple[TrainingStatus, ...]] = Future()
        if plan.endswith("bad"):
            done.set_exception(BadPlan(f"{plan}: cannot be read: No such file or directory"))
        else:
            name = Path(plan).name
            bad = ("a.jsonl, line 2: bad", "a.jsonl, line 5: bad") if name == "spoiled" else ()
            self._found[name] = TrainingStatus(
                name=name, state="running", step=1, num_steps=2, loss=0.5, num_bad=len(bad) and 3, bad=bad
            )
            if Path(plan, "adapter_config.json").exists():
                path = os.path.realpath(plan)
                self._load(name, path)
                self._found[name] = msgspec.structs.replace(self._found[name], state="finished", path=path)
            done.set_result((self._found[name],))
        return done

    def statuses(self) -> tuple[TrainingStatus, ...]:
        return tuple(self._found.values())

    def cancel(self, name: str) -> TrainingStatus:
        if name not in self._found:
            raise BadRequest(f"no training named {name!r} is running; running: {', '.join(self._found) or 'none'}")
        self._found[name] = msgspec.structs.replace(self._found[name], state="cancelled")
        return self._found[name]


class ScriptedEngine:
    """Implements the interface of the synchronous engine."""

    step_s = 0.002
    alarm: int | None = None
    lost = False  # no other rank is lost

    def check_ranks(self) -> None:
        if self.lost:
            raise EngineDead("rank 1 was killed by SIGKILL")

    def _lose(self, bell: int) -> None:
        self.lost = True
        os.write(bell, b"!")

    def __init__(self, config: EngineConfig) -> None:
        """The model is scripted, too. `MODEL after FILE` is `scripted` at the first start, which creates the file."""
        model, _, file = config.model.partition(" after ")
        if file and not Path(file).exists():
            Path(file).touch()
            model = "scripted"
        if model == "broken":
            raise BadConfig("model 'broken' cannot be loaded: there is no such folder")
        if model == "buggy":
            raise RuntimeError("a mistake in the engine")
        if model == "gone":
            os._exit(3)
        if model == "slow":
            time.sleep(60)
        if model == "lonely":
            self.alarm, bell = os.pipe()
            threading.Timer(0.3, self._lose, (bell,)).start()
        self.config = config
        self.limits = SimpleNamespace(max_context=config.max_context or 100_000)
        self.running: dict[str, tuple[Request, list[int]]] = {}
        self.sampled: dict[str, int] = {}
        self.cancelled: list[str] = []
        trainings = ScriptedTrainings(self.load_adapter)
        self.parts = SimpleNamespace(trainings=trainings, other_work=trainings)
        self._adapters: dict[str, AdapterStatus] = {}
        self._paths: dict[str, str] = {}
        self.num_steps = 0
        self._num_finished = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, request: Request) -> None:
        text = bytes(token for token in request.prompt_ids if token < 256).decode()
        answer = 0 if request.in_one_pass else request.sampling.max_tokens
        if len(request.prompt_ids) + answer > self.limits.max_context:
            raise PromptTooLong(
                f"the prompt has {len(request.prompt_ids)} tokens and up to {answer} output tokens are requested, "
                f"over this model's context of {self.limits.max_context}"
            )
        for part in () if request.adapter is None else composed_of(request.adapter):
            if part.adapter not in self._adapters:
                raise UnknownAdapter(f"no adapter named {part.adapter!r}")
            if request.head not in (None, *(head.name for head in self._adapters[part.adapter].heads)):
                raise UnknownHead(f"adapter {part.adapter!r} has no head {request.head!r}")
        if "trip" in text:
            raise ValueError("tripped over the request")
        if "overloaded" in text:
            raise DeadlineUnreachable(f"latency {request.max_latency_s} ttft {request.max_ttft_s} {request.priority:+}")
        if text == "grammar":
            text = f"say:grammar:{request.sampling.grammar}"
        match = re.search(r"say:(.*)", text, re.DOTALL)
        silent = "forever" in text or "never" in text
        script = [] if silent else [*(match[1] if match else "yes").encode(), EOS]
        self.running[request.request_id] = (request, script)
        self.sampled[request.request_id] = 0

    def cancel(self, request_id: str) -> RequestOutput | None:
        if request_id not in self.running:
            return None
        self.cancelled.append(request_id)
        return self._end(request_id, "cancelled", error=Aborted(f"request {request_id!r} was cancelled"))

    def step(self) -> tuple[RequestOutput, ...]:
        time.sleep(self.step_s)
        self.num_steps += 1
        outputs = []
        for request_id in tuple(self.running):
            request, script = self.running[request_id]
            text = bytes(token for token in request.prompt_ids if token < 256).decode()
            if "exit" in text:
                os._exit(3)
            if "crash" in text:
                raise RuntimeError("the script says crash")
            if "fail" in text:
                outputs.append(self._end(request_id, "error", error=StepFailed("the script says fail")))
            elif request.head is not None and "never" not in text:
                assert request.adapter is not None
                summaries = {summary.name: summary for summary in self._adapters[request.adapter].heads}
                answer = head_answer(summaries[request.head].task, request.vision)
                outputs.append(self._end(request_id, "head", head=answer))
            elif request.pooling is not None and "never" not in text:
                outputs.append(self._end(request_id, "head", head=embedding_of(request)))
            elif "forever" in text or script:
                token = script.pop(0) if script else ord("x")
                self.sampled[request_id] += 1
                if token == EOS:
                    outputs.append(self._end(request_id, "stop", tokens=(token,)))
                elif self.sampled[request_id] >= request.sampling.max_tokens:
                    outputs.append(self._end(request_id, "length", tokens=(token,)))
                else:
                    outputs.append(RequestOutput(request_id=request_id, token_ids=(token,)))
        return tuple(outputs)

    def version_in(self, folder: Path) -> str:
        """The hash of an adapter's content."""
        return hashlib.blake2b((folder / "adapter_config.json").read_bytes(), digest_size=4).hexdigest()

    def register_adapters(self, paths: Mapping[str, str], versions: Mapping[str, str] = {}) -> None:
        for name, path in paths.items():
            status = self.load_adapter(name, path)
            self._adapters[name] = msgspec.structs.replace(status, version="", loaded=False, mergeable=False)

    def load_adapter(self, name: str, path: str) -> AdapterStatus:
        file = Path(path) / "adapter_config.json"
        if not file.exists():
            raise BadAdapter(f"{path}: no adapter_config.json; an adapter is a folder in PEFT's format")
        content = json.loads(file.read_text())
        heads = tuple(
            HeadSummary(
                name=head,
                task=head if head in TASKS else "classification",
                labels=LABELS,
                prompt=f"is it {head}?",
                num_frames=frames,
            )
            for head, frames in content.get("heads", {}).items()
        )
        declared = content.get("domains") or [
            {"name": head.name, "question": head.prompt, "head": head.name, "answer": "head"} for head in heads
        ]
        self._paths[name] = path
        flags: dict[str, Any] = {"resident": False, "mergeable": True, "merge_fidelity": 1.0, "touches_vision": False}
        version = self.version_in(Path(path))
        flags["domains"] = tuple(msgspec.convert(domain, DomainSummary) for domain in declared)
        self._adapters[name] = AdapterStatus(name=name, version=version, rank=8, num_bytes=1000, heads=heads, **flags)
        return self._adapters[name]

    def unload_adapter(self, name: str, drain: bool = False) -> tuple[RequestOutput, ...]:
        if self._adapters.pop(name, None) is None:
            raise UnknownAdapter(f"no adapter named {name!r}")
        if drain:
            return ()
        mine = [request_id for request_id, (request, _) in self.running.items() if request.adapter == name]
        return tuple(self._end(each, "error", error=Aborted(f"adapter {name!r} was unloaded")) for each in mine)

    def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        if name not in self._adapters:
            raise UnknownAdapter(f"no adapter named {name!r}")
        if pinned and not self._adapters[name].loaded:
            self.load_adapter(name, self._paths[name])
        self._adapters[name] = msgspec.structs.replace(self._adapters[name], pinned=pinned, resident=pinned)
        return self._adapters[name]

    def keep_adapters(self, versions: Mapping[str, Collection[str]]) -> dict[str, tuple[str, ...]]:
        return {}  # it has no former contents

    def load_in_background(self, name: str, path: str, version: str = "") -> Future[AdapterStatus]:
        if name.startswith("hangs"):
            return Future()
        return _ended(lambda: self.load_adapter(name, path))

    def pin_in_background(self, name: str) -> Future[AdapterStatus]:
        return _ended(lambda: self.pin_adapter(name, True))

    def adapters(self, after: str = "", most: int | None = None) -> tuple[AdapterStatus, ...]:
        return tuple(self._adapters[name] for name in sorted(self._adapters) if name > after)[:most]

    def stats(self) -> EngineStats:
        none = dict.fromkeys(("num_switches", "switch_s", "num_waiting", "num_failed", "num_preemptions"), 0)
        return EngineStats(
            model=self.config.model,
            num_steps=self.num_steps,
            steps_by_mode={"unmerged": self.num_steps},
            requests_by_mode={"unmerged": self._num_finished},
            num_running=len(self.running),
            num_finished=self._num_finished,
            num_cancelled=len(self.cancelled),
            free_blocks=10,
            total_blocks=10,
            arena_basis="arena_bytes",
            max_context=self.limits.max_context,
            cpu_kernels="plain torch",
            **none,  # type: ignore[arg-type]
        )

    def version_of(self, request_id: str) -> str | None:
        request, _ = self.running.get(request_id, (None, []))
        status = None if request is None or request.adapter is None else self._adapters.get(request.adapter)
        return None if status is None else status.version

    def load(self) -> EngineLoad:
        resident = {name: status.version for name, status in self._adapters.items() if status.resident}
        return EngineLoad(
            free_blocks=10, total_blocks=10, num_running=len(self.running), num_waiting=0, resident=resident
        )

    def snapshot(self, since: int = 0) -> EngineSnapshot:
        modes = ("merged", "mixed", "unmerged")
        steps = range(max(since, self.num_steps - 100) + 1, self.num_steps + 1)
        requests = [request for request, _ in self.running.values()]
        return EngineSnapshot(
            now_s=time.monotonic(),
            stats=msgspec.structs.replace(self.stats(), num_adapters=len(self._adapters)),
            theta_s=0.1,
            max_batch_size=4,
            steps=tuple(
                StepRecord(n, time.monotonic() - 0.02 * (self.num_steps - n), 0.01, 0.0, modes[n % 3], None, 1, 1, 0)
                for n in steps
            ),
            queue=tuple(
                QueuedRequest(
                    adapter=request.adapter,
                    head=request.head,
                    running=True,
                    waited_s=0.0,
                    credit_s=0.05 + place,
                    new_tokens=1,
                    num_sampled=self.sampled[request.request_id],
                )
                for place, request in enumerate(requests)
            ),
            arena=ArenaMap(
                num_pages=8, page_bytes=65536, pages_per_cell=1, cells="aapkkccf", runs=(ArenaRun("cam", 0, 2),)
            ),
            adapters=tuple(
                AdapterLoad(
                    name=status.name,
                    rank=status.rank,
                    num_bytes=status.num_bytes,
                    place="device" if status.resident else "disk",
                    pinned=status.pinned,
                    merged=False,
                    mergeable=status.mergeable,
                    rate=0.5,
                    num_under_way=sum(request.adapter == status.name for request in requests),
                )
                for status in self.adapters()
            ),
        )

    def close(self) -> tuple[RequestOutput, ...]:
        outputs = [self.cancel(request_id) for request_id in tuple(self.running)]
        return tuple(output for output in outputs if output is not None)

    def _end(
        self,
        request_id: str,
        reason: Any,
        *,
        tokens: tuple[int, ...] = (),
        head: HeadAnswer | None = None,
        error: VLoraError | None = None,
    ) -> RequestOutput:
        request, _ = self.running.pop(request_id)
        self._num_finished += error is None
        sampled = self.sampled[request_id]
        times: dict[str, Any] = {"queue_s": 0.0, "ttft_s": 0.001, "latency_s": 0.002, "num_preemptions": 0}
        times |= {"num_prompt_tokens": len(request.prompt_ids), "num_completion_tokens": sampled}
        timings = Timings(**times, steps_by_mode={"unmerged": sampled + 1})
        value = None if error is None else ErrorValue.of(error)
        return RequestOutput(
            request_id=request_id, token_ids=tokens, head=head, finish_reason=reason, error=value, timings=timings
        )


class ScriptedInterface(EngineInterface):
    """A ScriptedEngine behind EngineInterface, stepped by a task of the event loop."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.engine = ScriptedEngine(config or EngineConfig(model="scripted"))
        self.engine.step_s = 0.0
        self.dead: str | None = None
        self._streams: dict[str, asyncio.Queue[RequestOutput]] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def generate(self, request: Request, until: float | None = None) -> AsyncIterator[RequestOutput]:
        if self.dead is not None:
            raise EngineDead(self.dead)
        try:
            self.engine.add(request)
        except VLoraError as error:
            yield RequestOutput(request_id=request.request_id, finish_reason="error", error=ErrorValue.of(error))
            return
        stream = self._streams[request.request_id] = asyncio.Queue()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        finished = False
        try:
            while not finished:
                async with asyncio.timeout_at(until):
                    output = await stream.get()
                finished = output.finished
                yield output
        finally:
            del self._streams[request.request_id]
            if not finished:
                self.engine.cancel(request.request_id)

    async def cancel(self, request_id: str) -> None:
        if (output := self.engine.cancel(request_id)) is not None:
            self.deliver(output)

    async def call(self, operation: Operation) -> Any:
        if self.dead is not None and isinstance(operation, GetStats | GetSnapshot):
            raise EngineDead(self.dead)
        engine: Any = self.engine
        found = perform(engine, operation, self._deliver_all)
        return found.result() if isinstance(found, Future) else found

    async def close(self) -> None:
        self._deliver_all(self.engine.close())

    def deliver(self, output: RequestOutput) -> None:
        if output.request_id in self._streams:
            self._streams[output.request_id].put_nowait(output)

    def _deliver_all(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            self.deliver(output)

    async def _step(self) -> None:
        while self.engine.has_work:
            self._deliver_all(self.engine.step())
            await asyncio.sleep(0.001)


def write_adapter(folder: Path, heads: dict[str, int] | None = None, domains: Sequence[Mapping[str, Any]] = ()) -> str:
    """Write an adapter folder for the scripted engine. heads: name -> number of frames. domains: fields of
    each; without any, the heads are the domains.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {"heads": heads or {}, **({"domains": list(domains)} if domains else {})}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return str(folder)


def _ended(work: Callable[[], AdapterStatus]) -> Future[AdapterStatus]:
    future: Future[AdapterStatus] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future
