"""The values of docs/tour.md: three requests on the real parts, from the HTTP body to the answer.

    python examples/tour.py

Runs the packaged model in float32 with two adapters under a fake clock, records what the functions of the page's eight
stops receive and return, and writes these values into the page. They are equal on every CPU: the adapters' factors are
so small that each token keeps the base model's large margin.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import itertools
import json
import re
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import httpx
from PIL import Image, ImageDraw

import atmm
from atmm.strategies.hybrid import SHORT
from fusion.embedded import checkpoint_path
from vlora.bench.dummy import write_adapter
from vlora.config import EngineConfig, ServerConfig
from vlora.engine import Engine, EngineInterface
from vlora.engine.request_checks import RequestChecks
from vlora.memory.arena import PAGE_BYTES
from vlora.memory.host_to_device import Inline
from vlora.models.forward_batch import ForwardBatch
from vlora.models.processing import InputProcessor
from vlora.models.runner import ModelRunner
from vlora.orchestrator.cost_model import CostModel, Costs
from vlora.orchestrator.scheduler import Scheduler
from vlora.server.detokenizer import AnswerText
from vlora.server.frontend import FrontEnd
from vlora.server.http.routes import make_app
from vlora.server.security.access import Access
from vlora.types import AdapterStatus, Batch, Request, RequestOutput, StepResult

PAGE = Path(__file__).parents[1] / "docs" / "tour.md"
BLOCK = re.compile(r"(<!-- values: (\w+) -->\n```\n).*?(?=```)", re.DOTALL)
STEP_MS = 40
RANKS = {"signs": 4, "digits": 8}
REQUESTS = {
    "A": ("signs", "describe the image."),
    "B": ("digits", "what is at the left?"),
    "C": ("signs", "what color is the circle?"),
}
"""Adapter and question by the request's letter on the page."""


# -- the run ----------------------------------------------------------------------------------------------------------


class PatchCosts(CostModel):
    """Predicts 0.1 ms per image patch and nothing else: measured times would differ between machines."""

    @property
    def costs(self) -> Costs:
        return Costs(patch_s=1e-4)


class TourEngine:
    """The part of `EngineInterface` that the tour uses, in one thread: steps start when all requests have arrived."""

    def __init__(self) -> None:
        self.now_ms = 0
        config = EngineConfig(
            model=checkpoint_path(),
            dtype="float32",
            policy="algorithm1",
            switching="shadow",
            arena_bytes=256 * PAGE_BYTES,
        )
        self.engine = Engine(config, clock=lambda: self.now_ms / 1000, executor=Inline(), cost=PatchCosts())
        self.arrived: asyncio.Queue[str] = asyncio.Queue()
        self._outputs: dict[str, asyncio.Queue[RequestOutput]] = {}

    async def adapters(self) -> tuple[AdapterStatus, ...]:
        return self.engine.adapters()

    async def generate(self, request: Request, until: float | None = None) -> AsyncIterator[RequestOutput]:
        outputs = self._outputs[request.request_id] = asyncio.Queue()
        self.engine.add(request)
        self.arrived.put_nowait(request.request_id)
        finished = False
        while not finished:
            output = await outputs.get()
            finished = output.finished
            yield output

    def run(self) -> None:
        while self.engine.has_work:
            for output in self.engine.step():
                self._outputs[output.request_id].put_nowait(output)
            self.now_ms += STEP_MS


class Call(NamedTuple):
    args: tuple[Any, ...]
    result: Any


def record(stack: contextlib.ExitStack, owner: type, name: str) -> list[Call]:
    """The calls of a method, in order, until the stack closes."""
    function, calls = getattr(owner, name), []

    @functools.wraps(function)
    def recording(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        calls.append(Call((*args, *kwargs.values()), result))
        return result

    setattr(owner, name, recording)
    stack.callback(setattr, owner, name, function)
    return calls


def picture() -> bytes:
    """A PNG of a red circle and a blue square."""
    image = Image.new("RGB", (96, 96), (60, 60, 60))
    draw = ImageDraw.Draw(image)
    draw.ellipse((6, 32, 38, 64), fill=(220, 40, 40))
    draw.rectangle((58, 32, 88, 62), fill=(40, 80, 220))
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def body(adapter: str, question: str, url: str) -> dict[str, Any]:
    content = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": url}}]
    messages = [{"role": "user", "content": content}]
    return {"model": adapter, "messages": messages, "max_tokens": 16, "temperature": 0}


async def serve(engine: TourEngine, processor: InputProcessor) -> tuple[dict[str, str], dict[str, Any]]:
    """Answer the requests over HTTP. Returns their letters by request id, and the responses by letter."""
    front_end = FrontEnd(cast(EngineInterface, engine), processor, ServerConfig(), "embedded")
    app = make_app(front_end, "embedded", Access(()))
    url = "data:image/png;base64," + base64.b64encode(picture()).decode()
    letters, tasks = {}, {}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        for letter, (adapter, question) in REQUESTS.items():
            json_body = body(adapter, question, url)
            tasks[letter] = asyncio.create_task(client.post("/v1/chat/completions", json=json_body))
            letters[await asyncio.wait_for(engine.arrived.get(), 60)] = letter
        engine.run()
        responses = {letter: (await task).raise_for_status().json() for letter, task in tasks.items()}
    await front_end.close()
    return letters, responses


def collect() -> dict[str, str]:
    """Run the requests. Returns the values of each block of the page, by the block's name."""
    processor = InputProcessor.from_pretrained(checkpoint_path())
    engine = TourEngine()
    parts = engine.engine.parts
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        shapes = {name: (site.d_out, site.d_in) for name, site in parts.device.pool.sites.items() if not site.vision}
        paths = {name: write_adapter(Path(folder) / name, shapes, rank, rank) for name, rank in RANKS.items()}
        engine.engine.register_adapters(paths)
        encoded = record(stack, InputProcessor, "encode_processed")
        checked = record(stack, RequestChecks, "check")
        scheduled = record(stack, Scheduler, "schedule")
        laned = record(stack, ForwardBatch, "lanes")
        ran = record(stack, ModelRunner, "run")
        recorded = record(stack, Scheduler, "record")
        texts = record(stack, AnswerText, "feed")
        letters, responses = asyncio.run(serve(engine, processor))
    batches = [call.result for call in scheduled]
    values = {
        "http": http_values(),
        "request": request_values(processor, encoded[0].args[1], checked[0].args[1]),
        "checks": check_values(checked, letters),
        "steps": step_values(batches, letters),
        "memory": memory_values(parts, batches, laned, letters),
        "lanes": lane_values(batches, laned, letters),
        "tokens": token_values(processor, [call.result for call in ran], letters),
        "outputs": output_values(recorded, texts, letters),
        "end": end_values(parts, responses),
    }
    engine.engine.close()
    return {name: f"{text}\n" for name, text in values.items()}


# -- the values of each stop ------------------------------------------------------------------------------------------


def http_values() -> str:
    adapter, question = REQUESTS["A"]
    return "POST /v1/chat/completions\n" + json.dumps(body(adapter, question, "data:image/png;base64,..."), indent=2)


def request_values(processor: InputProcessor, prompt: str, request: Request) -> str:
    (item,) = request.vision
    config = processor.config.vision_config
    side = config.image_size // config.patch_size
    ids = [(token, len(list(group))) for token, group in itertools.groupby(request.prompt_ids)]
    fields = {name: f"{value.dtype} {list(value.shape)}" for name, value in item.fields.items()}
    return lines(
        ("prompt", prompt),
        ("prompt_ids", ", ".join(f"{token} x {count}" if count > 1 else f"{token}" for token, count in ids)),
        ("", f"{len(request.prompt_ids)} tokens; {processor.image_token_id} is {processor.image_token}"),
        ("vision", f"1 {item.kind}, {fields}"),
        ("", f"{side} x {side} patches of {config.patch_size} pixels, num_tokens={item.num_tokens}"),
        ("adapter", repr(request.adapter)),
        ("head", request.head),
        ("sampling", f"max_tokens={request.sampling.max_tokens}, temperature={request.sampling.temperature:g}"),
        ("whole", request.whole),
    )


def check_values(calls: Sequence[Call], letters: dict[str, str]) -> str:
    rows = []
    for call in calls:
        request, vision_key, num_holds = call.result
        (item,) = request.vision
        rows.append(
            (letters[request.request_id], request.adapter, request.read_from, item.num_patches, vision_key, num_holds)
        )
    return table(("request", "adapter", "read_from", "num_patches", "vision_key", "num_holds"), rows)


def step_values(batches: Sequence[Batch], letters: dict[str, str]) -> str:
    rows = []
    for number, batch in enumerate(batches, 1):
        items = [f"{letters[item.request_id]} [{item.start}, {item.start + item.num_tokens})" for item in batch.items]
        images = () if batch.encode is None else batch.encode.items
        encode = ", ".join(f"{letters[request_id]}'s image {index}" for request_id, index in images)
        rows.append(
            (number, (number - 1) * STEP_MS, batch.mode, batch.merged_adapter, ", ".join(items) or "-", encode or "-")
        )
    return table(("step", "ms", "mode", "merged_adapter", "items", "encode"), rows)


def memory_values(parts: Any, batches: Sequence[Batch], laned: Sequence[Call], letters: dict[str, str]) -> str:
    limits, block_size = parts.device.limits, parts.block_manager.block_size
    runs = {key: run for key, run in parts.adapter_cache.runs if key is not None}
    first = laned[0].args[0]
    rows = [
        (
            "arena",
            f"{limits.num_pages} pages of {PAGE_BYTES // 1024} KiB, adapters below page {limits.max_adapter_pages}",
        ),
        ("KV block", f"{block_size} tokens, {limits.block_pages} pages, {parts.block_manager.total_blocks} blocks fit"),
        *((key, f"pages [{run.first_page}, {run.end})") for key, run in sorted(runs.items(), key=lambda pair: pair[1])),
    ]
    tables: dict[str, tuple[int, ...]] = {}
    for number, batch in enumerate(batches, 1):
        for item in batch.items:
            if tables.get(item.request_id) != item.block_table:
                tables[item.request_id] = item.block_table
                rows.append((f"step {number}", f"{letters[item.request_id]}: blocks {list(item.block_table)}"))
    written = [first.write_rows[start : start + block_size] for start in range(0, first.num_tokens, block_size)]
    spans = ", ".join(f"[{block[0]}, {block[-1] + 1})" for block in written)
    return lines(*rows, ("step 2", f"A writes the keys of layer 0 to rows {spans} of the arena's KV matrix"))


def lane_values(batches: Sequence[Batch], laned: Sequence[Call], letters: dict[str, str]) -> str:
    rows = []
    numbers = [number for number, batch in enumerate(batches, 1) if batch.items]
    for number, call in zip(numbers, laned, strict=True):
        packed, mode, _ = call.args
        packed_rows = [f"{letters[row.state.request.request_id]} [{row.start}, {row.stop})" for row in packed.rows]
        rows.append((number, mode, ", ".join(packed_rows), ", ".join(map(lane_text, call.result)) or "-"))
    return table(("step", "mode", "rows", "lanes"), rows)


def lane_text(lane: atmm.Lane) -> str:
    length = "short" if lane.stop - lane.start <= SHORT else "long"
    rank = RANKS[lane.key.partition("@")[0]]
    return f"{lane.sign:+.0f} {lane.key} [{lane.start}, {lane.stop}) rank {rank} {length}"


def token_values(processor: InputProcessor, results: Sequence[StepResult], letters: dict[str, str]) -> str:
    rows = []
    for number, result in enumerate(results, 1):
        tokens = {letters[request_id]: token for request_id, token in result.tokens.items()}
        rows.append((number, *(token_text(processor, tokens.get(letter)) for letter in REQUESTS)))
    return table(("step", *REQUESTS), rows)


def token_text(processor: InputProcessor, token: int | None) -> str:
    return "-" if token is None else f"{token} {processor.token_text(token)!r}"


def output_values(recorded: Sequence[Call], texts: Sequence[Call], letters: dict[str, str]) -> str:
    """The outputs of request A, and the text that each adds."""
    outputs = [output for call in recorded for output in call.result if letters[output.request_id] == "A"]
    answer = texts[0].args[0]
    pieces = [call.result.text for call in texts if call.args[0] is answer]
    rows = [
        (list(output.token_ids), output.finish_reason, repr(piece))
        for output, piece in zip(outputs, pieces, strict=True)
    ]
    return table(("token_ids", "finish_reason", "text"), rows)


def end_values(parts: Any, responses: dict[str, Any]) -> str:
    rows = []
    for letter, response in responses.items():
        (choice,), usage = response["choices"], response["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        rows.append((letter, text, reason, usage["prompt_tokens"], cached, usage["completion_tokens"]))
    head = ("request", "content", "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens")
    manager = parts.block_manager
    blocks = f"KV blocks: {manager.num_taken_blocks} taken, {manager.num_cached_blocks} cached"
    return f"{table(head, rows)}\n\n{blocks}"


# -- the page ---------------------------------------------------------------------------------------------------------


def lines(*rows: tuple[str, Any]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    texts = [head, *([str(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join(
        "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in texts
    )


def with_values(page: str, values: dict[str, str]) -> str:
    """The page with the code block after each `<!-- values: NAME -->` replaced."""
    return re.sub(
        r"(<!-- values: (\w+) -->\n```\w*\n).*?(?=```)",
        lambda found: found[1] + values[found[2]],
        page,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    PAGE.write_text(with_values(PAGE.read_text(), collect()))
