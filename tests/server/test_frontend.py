"""The front end: checks, preparation, text, limits, and cleanup."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.running import png
from tests.server.scripted import ByteProcessor, ScriptedInterface, write_adapter
from vlora.client.values import Answer
from vlora.config import EngineConfig, ServerConfig
from vlora.errors import (
    BadImage,
    BadRequest,
    DeadlineMissed,
    EngineDead,
    OverCapacity,
    PromptTooLong,
    StepFailed,
    TooLarge,
    UnknownAdapter,
    UnknownHead,
    VLoraError,
)
from vlora.server.frontend import FrontEnd
from vlora.types import AdapterStatus, SamplingParams

REJECTED = "the image processor rejects the images: aspect ratio"


def front_end(engine: ScriptedInterface | None = None, **settings: Any) -> FrontEnd:
    return FrontEnd(engine or ScriptedInterface(), ByteProcessor(), ServerConfig(**settings))  # type: ignore[arg-type]


async def ask(front: FrontEnd, *args: Any, **kwargs: Any) -> tuple[list[str], Answer]:
    *parts, answer = [part async for part in front.generate(*args, **kwargs)]
    pieces = [part for part in parts if isinstance(part, str)]
    assert isinstance(answer, Answer) and len(pieces) == len(parts) and "".join(pieces) == answer.text
    return pieces, answer


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 20))


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(**fields)


def test_text_streams_in_whole_characters_and_ends_with_the_answer() -> None:
    async def main() -> None:
        pieces, answer = await ask(front_end(), "say:grün", [png(), png()])
        assert pieces == ["g", "r", "ü", "n"]
        assert (answer.finish_reason, answer.num_prompt_tokens, answer.num_completion_tokens) == ("stop", 11, 6)
        _, answer = await ask(front_end(), "forever", sampling=sampling(max_tokens=5))
        assert (answer.text, answer.finish_reason) == ("xxxxx", "length")
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "say:yes"}]}]
        assert (await ask(front_end(), messages, [png()]))[1].text == "yes"

    run(main())


def test_a_stop_string_ends_the_answer_and_frees_the_request() -> None:
    async def main() -> None:
        engine = ScriptedInterface()
        front = front_end(engine)
        pieces, answer = await ask(front, "say:one, two END three", sampling=sampling(stop=("END", "zzz")))
        assert (answer.text, answer.finish_reason) == ("one, two ", "stop")
        assert not any("E" in piece for piece in pieces)
        assert len(engine.engine.cancelled) == 1 and not engine.engine.running
        # The last token completes the stop string, so there is nothing to cancel.
        _, answer = await ask(front, "say:abEND", sampling=sampling(stop=("END",)))
        assert answer.text == "ab"
        # The stop string never completes, so the held text is released.
        _, answer = await ask(front, "say:abEN", sampling=sampling(stop=("END",)))
        assert answer.text == "abEN"

    run(main())


@pytest.mark.parametrize(
    ("prompt", "images", "fields", "error", "message"),
    [
        ("", [], {}, BadRequest, "the prompt is empty"),
        (" \n", [png()], {}, BadRequest, "images but no text, and the base model has no default question; send"),
        ("", [png()], {"adapter": "cam"}, BadRequest, "and adapter 'cam' has no default question"),
        ("", [b"broken"], {}, BadImage, r"image 1 \(6 bytes\) is broken or not one of JPEG"),
        ("x" * 101, [], {}, TooLarge, "101 characters; this server takes at most 100"),
        ("x" * 40, [], {}, PromptTooLong, "40 tokens and up to 128 output tokens .* context of 160"),
        ("say:x", [b"broken"], {}, BadImage, r"image 1 \(6 bytes\) is broken or not one of JPEG"),
        ("say:x", [png(size=(900, 1))], {}, BadImage, "aspect ratio"),
        ("say:x", [png()] * 5, {}, TooLarge, "5 images; this server takes at most 4"),
        ("say:x", [], {"adapter": "nope"}, UnknownAdapter, "no adapter named 'nope'; registered: cam, signs"),
        ("say:x", [], {"sampling": sampling(stop=("s",) * 17)}, BadRequest, "stop has 17 strings"),
        ("fail", [], {"sampling": sampling(max_tokens=9)}, StepFailed, "the script says fail"),
    ],
)
def test_an_invalid_request_gets_its_error_and_the_next_is_served(
    tmp_path: Path, prompt: str, images: list[bytes], fields: dict[str, Any], error: type[VLoraError], message: str
) -> None:
    async def main() -> None:
        engine = ScriptedInterface(EngineConfig(model="scripted", max_context=160))
        front = front_end(engine, max_images=4, max_prompt_chars=100)
        for name in ("signs", "cam"):
            await front.adapters.load(name, write_adapter(tmp_path / name))
        with pytest.raises(error, match=message):
            await ask(front, prompt, images, **fields)
        assert not engine.engine.running
        assert (await ask(front, "say:fine", adapter="cam", sampling=sampling(max_tokens=9)))[1].text == "fine"

    run(main())


def test_a_load_completes_when_its_caller_is_cancelled(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ScriptedInterface()
        read = asyncio.Event()
        at_once = engine.load_adapter

        async def slowly(name: str, path: str) -> AdapterStatus:
            await read.wait()
            return await at_once(name, path)

        front = front_end(engine)
        await front.adapters.load("cam", write_adapter(tmp_path / "cam", {"night": 1}))
        await front.adapters.find_head("cam", "night")
        engine.load_adapter = slowly  # type: ignore[method-assign]
        good = asyncio.create_task(front.adapters.load("cam", write_adapter(tmp_path / "cam2", {"rain": 1})))
        bad = asyncio.create_task(front.adapters.load("cam", str(tmp_path / "nothing")))
        await asyncio.sleep(0)
        for leaving in (good, bad):
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
        assert await front.adapters.find_head("cam", "night"), "the new adapter is not read yet"
        read.set()
        await asyncio.sleep(0.01)
        assert await front.adapters.find_head("cam", "rain"), "the old heads are no longer cached"
        with pytest.raises(UnknownHead):
            await front.adapters.find_head("cam", "night")

    run(main())


def test_pictures_of_several_heads_are_processed_once(tmp_path: Path) -> None:
    async def main() -> None:
        processor = ByteProcessor()
        front = FrontEnd(ScriptedInterface(), processor, ServerConfig())  # type: ignore[arg-type]
        for name in ("cam", "signs"):
            await front.adapters.load(name, write_adapter(tmp_path / name, {"kind": 2, "night": 2, "one": 1}))
        pairs = [(adapter, head) for adapter in ("cam", "signs") for head in ("kind", "night", "one")] + [("no", "no")]
        outcomes = await front.ask_heads([png(20), png(30)], pairs)
        codes = [each.error and each.error.code for each in outcomes]
        assert codes == [None, None, "bad_request"] * 2 + ["unknown_adapter"]
        assert processor.num_processed == 2
        outcomes = await front.ask_heads([png(20), png(30, size=(1001, 5))], pairs[:2])
        assert [each.error and each.error.message for each in outcomes] == [REJECTED] * 2
        assert processor.num_processed == 4

    run(main())


def test_heads_answer_and_unknown_names_list_the_known_ones(tmp_path: Path) -> None:
    async def main() -> None:
        front = front_end()
        await front.adapters.load("cam", write_adapter(tmp_path / "cam", {"night": 1, "motion": 4}))
        await front.adapters.load("signs", write_adapter(tmp_path / "signs", {"kind": 1}))
        dark = await front.ask_head([png(20)], "cam", "night")
        assert (dark.label, dark.labels, dark.adapter, dark.head) == ("dark", ("dark", "bright"), "cam", "night")
        assert dark.confidence == max(dark.scores)
        assert (await front.ask_head([png(250)] * 4, "cam", "motion")).label == "bright"
        with pytest.raises(BadRequest, match="head 'motion' of adapter 'cam' reads 4 images per request; got 1"):
            await front.ask_head([png()], "cam", "motion")
        with pytest.raises(UnknownHead, match="its heads: night, motion; head 'kind' belongs to adapter 'signs'"):
            await front.ask_head([png()], "cam", "kind")
        with pytest.raises(UnknownHead, match=r"adapter 'cam' has no head 'zzz'; its heads: night, motion$"):
            await front.ask_head([png()], "cam", "zzz")
        with pytest.raises(UnknownAdapter, match="registered: cam, signs"):
            await front.ask_head([png()], "zzz", "kind")
        both = await front.ask_heads(
            [png(20)], [("cam", "night"), ("cam", "motion"), ("signs", "kind"), ("zzz", "kind")]
        )
        assert [each.answer and each.answer.label for each in both] == ["dark", None, "dark", None]
        assert [each.error and each.error.code for each in both] == [None, "bad_request", None, "unknown_adapter"]
        with pytest.raises(BadRequest, match="0 heads are asked; the number must be from 1 to "):
            await front.ask_heads([png(20)], [])
        with pytest.raises(BadRequest, match=r"1000000 heads are asked"):
            await front.ask_heads([png(20)], [("cam", "night")] * 10**6)
        for number in range(100):
            await front.adapters.load(f"t{number:02}", str(tmp_path / "signs"))
        with pytest.raises(UnknownAdapter, match=r"registered: cam, signs, t00, .*, t17 and 82 more$"):
            await front.ask_head([png()], "zzz", "kind")
        with pytest.raises(UnknownHead, match=r"belongs to adapter 'signs', 't00', .*, 't18' and 81 more$"):
            await front.ask_head([png()], "cam", "kind")
        # A reload under the same name replaces the heads; an unload removes them.
        await front.adapters.load("cam", write_adapter(tmp_path / "cam2", {"rain": 1}))
        with pytest.raises(UnknownHead, match="its heads: rain"):
            await front.ask_head([png()], "cam", "night")
        await front.adapters.unload("cam")
        with pytest.raises(UnknownAdapter):
            await front.ask_head([png()], "cam", "rain")

    run(main())


def test_closing_a_stream_cancels_its_request() -> None:
    async def main() -> None:
        engine = ScriptedInterface()
        stream = front_end(engine).generate("forever")
        assert await anext(stream) == "x"
        await stream.aclose()  # type: ignore[attr-defined]
        assert len(engine.engine.cancelled) == 1 and not engine.engine.running

    run(main())


def test_every_request_has_a_time_limit() -> None:
    async def main() -> None:
        engine = ScriptedInterface()
        front = front_end(engine, request_timeout_s=0.2)
        with pytest.raises(DeadlineMissed, match=r"not answered within 0\.2 s"):
            await ask(front, "never")
        assert len(engine.engine.cancelled) == 1
        with pytest.raises(DeadlineMissed):
            await ask(front, "forever", sampling=sampling(max_tokens=90_000))
        assert not engine.engine.running

    run(main())


def test_requests_over_capacity_are_refused_until_others_end() -> None:
    async def main() -> None:
        front = front_end(max_requests=2)
        held = [front.generate("forever") for _ in range(2)]
        for stream in held:
            await anext(stream)
        with pytest.raises(OverCapacity, match="2 requests are in progress"):
            await ask(front, "say:x")
        await held[0].aclose()  # type: ignore[attr-defined]
        assert (await ask(front, "say:x"))[1].text == "x"
        await held[1].aclose()  # type: ignore[attr-defined]

    run(main())


def test_draining_refuses_new_requests_and_waits_for_old_ones() -> None:
    async def main() -> None:
        front = front_end()
        under_way = asyncio.create_task(ask(front, "say:" + "long " * 20))
        await asyncio.sleep(0.02)
        draining = asyncio.create_task(front.drain())
        await asyncio.sleep(0)
        with pytest.raises(OverCapacity, match="shutting down"):
            await ask(front, "say:x")
        await draining
        assert under_way.done() and (await under_way)[1].text == "long " * 20

    run(main())


def test_a_dead_engine_is_reported_with_its_cause() -> None:
    async def main() -> None:
        engine = ScriptedInterface()
        engine.dead = "the engine process was killed by SIGKILL"
        with pytest.raises(EngineDead, match="SIGKILL"):
            await ask(front_end(engine), "say:x")

    run(main())


def test_failed_requests_do_not_affect_others() -> None:
    async def main() -> None:
        front = front_end()
        good = [ask(front, f"say:number {i}", [png(i)]) for i in range(20)]
        bad = [ask(front, "say:x", [b"broken"]), ask(front, "fail"), ask(front, ""), ask(front, "trip")]
        outcomes = await asyncio.gather(*good[:10], *bad, *good[10:], return_exceptions=True)
        texts = [outcome[1].text for outcome in outcomes if not isinstance(outcome, BaseException)]
        assert texts == [f"number {i}" for i in range(20)]

    run(main())


def test_labels_are_those_of_the_adapter_version_that_answered(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ScriptedInterface()
        front = front_end(engine)
        status = await front.adapters.load("cam", write_adapter(tmp_path / "cam", {"night": 1}))
        old = msgspec.structs.replace(status.heads[0], labels=("cat", "dog", "bird"))
        current = engine.adapters

        async def adapters() -> tuple[AdapterStatus, ...]:
            engine.adapters = current  # type: ignore[method-assign]
            return (msgspec.structs.replace(status, heads=(old,)),)  # the state before a reload

        engine.adapters = adapters  # type: ignore[method-assign]
        result = await front.ask_head([png(20)], "cam", "night")
        assert (result.label, result.labels, len(result.scores)) == ("dark", ("dark", "bright"), 2)

    run(main())


def test_stats_name_the_model_and_not_its_folder() -> None:
    async def main() -> None:
        engine = ScriptedInterface(EngineConfig(model="/folders/of/the/operator"))
        front = FrontEnd(engine, ByteProcessor(), ServerConfig(), "embedded")  # type: ignore[arg-type]
        assert (await front.stats()).model == (await front.snapshot()).stats.model == "embedded"

    run(main())
