"""The front end in process: limits, ends, metrics, logs, adapters and their names, tenants, and errors of callers."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import json
import logging
import os
import re
import tempfile
import threading
import unicodedata
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from transformers import AddedToken

from fusion.plan.schema import DomainPlan
from tests.families import build_model
from tests.orchestrator.sample_requests import make_request
from tests.processors import image_processor, tokenizer
from tests.server.api import Api, data_url, running_api
from tests.server.running import png
from tests.server.scripted import ByteProcessor, ScriptedEngine, ScriptedInterface, write_adapter
from tests.server.test_protocol import CAUSE, FAILURE
from tests.server.test_security import TOKENS
from tests.virtual_clock import VirtualClockLoop
from vlora import logging_format
from vlora.cli.serve import named_adapters
from vlora.client.values import Answer
from vlora.cluster.adapter_state import AdapterState
from vlora.cluster.summary import failed_status, merged_stats
from vlora.config import EngineConfig, ServerConfig, Token
from vlora.engine import LocalEngine
from vlora.engine.operations import Train
from vlora.errors import (
    BadAdapter,
    BadConfig,
    BadRequest,
    DeadlineMissed,
    EngineDead,
    OverCapacity,
    UnknownAdapter,
    UnknownHead,
    VLoraError,
)
from vlora.learning.plan import LearningSettings
from vlora.lora.peft_format import read_header
from vlora.lora.registry import AdapterRegistry
from vlora.models.processing import InputProcessor
from vlora.operations import ListTrainings, Operation
from vlora.plan_files.fields import PlanModel
from vlora.server import adapter_catalog
from vlora.server.adapter_catalog import AdapterCatalog
from vlora.server.frontend import FrontEnd
from vlora.server.launch import starting_adapters
from vlora.server.metrics import MAX_ADAPTERS, MAX_TENANTS, MAX_TRAININGS, LabelSlots, Metrics
from vlora.server.prompts import TextRequest, prompt_warnings
from vlora.server.security.public_errors import error_for, named, without_places
from vlora.training.plan import TrainingPlan
from vlora.types import (
    AdapterStatus,
    EngineStats,
    ErrorValue,
    Request,
    RequestOutput,
    SamplingParams,
    TrainingStatus,
)
from vlora.types.composition import OTHER, name_problem

PNG = png()


def front_end(
    engine: ScriptedInterface | None = None, processor: ByteProcessor | None = None, **settings: Any
) -> FrontEnd:
    read: Any = processor or ByteProcessor()
    return FrontEnd(engine or ScriptedInterface(), read, ServerConfig(**settings))


async def ask(front: FrontEnd, *args: Any, **kwargs: Any) -> tuple[list[str], Answer]:
    *parts, (_, answer) = [part async for part in front.generate(TextRequest(*args, **kwargs))]
    assert isinstance(answer, Answer)
    return [part.text for _, part in parts], answer


@pytest.mark.parametrize("prompt", ["never", "forever"])
@pytest.mark.parametrize("whole", [False, True])
async def test_every_request_has_a_time_limit(prompt: str, whole: bool) -> None:
    engine = ScriptedInterface()
    front = front_end(engine, request_timeout_s=0.2)
    with pytest.raises(DeadlineMissed, match=r"not answered within 0\.2 s"):
        await ask(front, prompt, sampling=SamplingParams(max_tokens=90_000), whole=whole)
    assert len(engine.engine.cancelled) == 1 and not engine.engine.running and front.num_active == 0


def test_a_reader_that_is_slower_than_the_engine_has_the_time_limit_too() -> None:
    class Ready(ScriptedInterface):  # its outputs need no wait
        async def generate(self, request: Request, until: float | None = None) -> AsyncIterator[RequestOutput]:
            while True:
                yield RequestOutput(request_id=request.request_id, token_ids=(ord("x"),))

    async def main() -> None:
        num_read = 0
        with pytest.raises(DeadlineMissed):
            async for _ in front_end(Ready(), request_timeout_s=10.0).generate(TextRequest("forever")):
                num_read += 1
                assert num_read < 100
                await asyncio.sleep(1)
        assert num_read == 11

    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(main())


async def test_requests_over_capacity_are_refused_until_others_end() -> None:
    front = front_end(max_requests=2)
    held = [front.generate(TextRequest("forever")) for _ in range(2)]
    for stream in held:
        await anext(stream)
    with pytest.raises(OverCapacity, match="2 requests are in progress"):
        await ask(front, "say:x")
    await held[0].aclose()
    assert (await ask(front, "say:x"))[1].text == "x"
    await held[1].aclose()
    with pytest.raises(BadRequest, match=r"1000000 heads are asked; the number must be from 1 to 2"):
        await front.ask_heads([PNG], [("cam", "night")] * 10**6)


async def test_a_load_completes_when_its_caller_is_cancelled(tmp_path: Path) -> None:
    engine, read = ScriptedInterface(), asyncio.Event()
    at_once = engine.load_adapter

    async def slowly(name: str, path: str, version: str = "") -> AdapterStatus:
        await read.wait()
        return await at_once(name, path, version)

    adapters = front_end(engine).adapters
    await adapters.load("cam", write_adapter(tmp_path / "cam", {"night": 1}))
    old = await adapters.resolve("cam")
    assert adapters.head_of(old, "night")
    engine.load_adapter = slowly  # type: ignore[method-assign]
    for path in (write_adapter(tmp_path / "cam2", {"rain": 1}), str(tmp_path / "nothing")):
        leaving = asyncio.create_task(adapters.load("cam", path))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
    assert adapters.head_of(await adapters.resolve("cam"), "night"), "the new adapter is not read yet"
    read.set()
    await asyncio.sleep(0.01)
    new = await adapters.resolve("cam")
    assert adapters.head_of(new, "rain"), "the old heads are no longer cached"
    with pytest.raises(UnknownHead):
        adapters.head_of(new, "night")


@pytest.mark.parametrize(("before", "after"), [(None, None), ("digit", None), ("digit", "number")])
async def test_a_request_is_answered_by_the_adapter_to_which_the_domain_moves_meanwhile(
    before: str | None, after: str | None, tmp_path: Path
) -> None:
    """While a picture is processed, another packing is loaded: the former adapter stays, without the domain."""
    entered, left = threading.Event(), threading.Event()

    class Slow(ByteProcessor):
        def process_images(self, images: Sequence[Any]) -> Any:
            entered.set()
            left.wait(10)
            return super().process_images(images)

    front = front_end(processor=Slow())

    def packed(folder: str, name: str, head: str | None) -> str:
        domain = {"name": name, "question": "say:it", "answer": "head" if head else "words", "head": head}
        return write_adapter(tmp_path / folder, {head: 1} if head else {}, [domain])

    await front.adapters.load("fused-1", packed("one", "digits", before))
    asked = asyncio.create_task(ask(front, "", [PNG], adapter="digits"))
    await asyncio.to_thread(entered.wait, 10)
    await front.adapters.load("fused-2", packed("two", "digits", after))
    await front.adapters.load("fused-1", packed("three", "scenes", None))
    left.set()
    _, answer = await asked
    assert (answer.adapter, answer.domain, answer.result and answer.result.head) == ("fused-2", "digits", after)
    assert after is not None or answer.text == "it"


@pytest.mark.parametrize(
    ("text", "placeholder", "inline"), [("q", "p", True), ("q" * 1001, "p", False), ("q", "p" * 1001, False)]
)
async def test_a_long_prompt_is_encoded_beside_the_event_loop(text: str, placeholder: str, inline: bool) -> None:
    """Also one that the tokens of its pictures make long."""
    threads = []

    class Noting(ByteProcessor):
        def process_images(self, images: Sequence[Any]) -> Any:
            return super().process_images(images)._replace(placeholders=(placeholder,) * len(images))

        def encode_processed(self, *args: Any) -> Any:
            threads.append(threading.current_thread() is threading.main_thread())
            return super().encode_processed(*args)

    await ask(front_end(processor=Noting()), text, [PNG])
    assert threads == [inline]


async def test_pictures_of_several_heads_are_processed_once(tmp_path: Path) -> None:
    front = front_end(processor=(processor := ByteProcessor()))
    for name in ("cam", "signs"):
        await front.adapters.load(name, write_adapter(tmp_path / name, {"kind": 2, "night": 2}))
    pairs = [(adapter, head) for adapter in ("cam", "signs") for head in ("kind", "night")] + [("no", "no")]
    outcomes = await front.ask_heads([png(20), png(30)], pairs)
    assert [each.error and each.error.code for each in outcomes] == [None] * 4 + ["unknown_adapter"]
    assert processor.num_processed == 2
    outcomes = await front.ask_heads([png(20), png(30, size=(1001, 5))], pairs[:2])
    rejected = "the image processor rejects the images: aspect ratio"
    assert [each.error and each.error.message for each in outcomes] == [rejected] * 2
    assert processor.num_processed == 4


async def test_long_lists_of_names_are_shortened(tmp_path: Path) -> None:
    front = front_end()
    await front.adapters.load("cam", write_adapter(tmp_path / "cam", {"night": 1}))
    folder = write_adapter(tmp_path / "signs", {"kind": 1})
    for number in range(101):
        await front.adapters.load(f"t{number:03}", folder)
    with pytest.raises(UnknownAdapter, match=r"registered: cam, t000, .*, t018 and 82 more; domains: kind, night$"):
        await front.ask_head([PNG], "zzz", "kind")
    with pytest.raises(UnknownHead, match=r"belongs to adapter 't000', .*, 't019' and 81 more$"):
        await front.ask_head([PNG], "cam", "kind")


async def test_labels_are_those_of_the_adapter_version_that_answered(tmp_path: Path) -> None:
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


def series(text: str) -> dict[str, float]:
    """The metrics in a scraper's view, by name and label values."""
    return {
        " ".join((sample.name.removeprefix("vlora_"), *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(api: Api) -> dict[str, float]:
    return series(api.call("GET", "/metrics")[1])


def within(found: Mapping[str, float], expected: Mapping[str, float]) -> bool:
    assert {name: found.get(name) for name in expected} == expected
    return True


def test_requests_tokens_and_times_are_counted_by_adapter_and_outcome() -> None:
    with running_api(adapters={"cam": {"night": 1}, "signs": {"night": 1}}) as api:
        # A series exists before its first event; otherwise the first event is no increase.
        assert within(
            scraped(api),
            {
                **dict.fromkeys(("engine_up", "server_info base 0.1.0"), 1),
                **dict.fromkeys(("requests_active", "requests_total base engine_dead", "frames_total dropped"), 0),
                **dict.fromkeys(("engine_steps_total mixed", "requests_total signs step_failed"), 0),
                "adapter_loads_total signs": 0,
            },
        )
        assert api.chat("say:four", n=2)[0] == 200 and api.chat("")[0] == 400
        api.chat("forever", stream=True, max_tokens=5)
        assert api.chat("say:four", model="cam")[0] == 200 and api.chat("fail", model="signs")[0] == 500
        assert api.chat("say:x", model="absent")[0] == 404
        for number in range(1, 2 * MAX_ADAPTERS):  # compositions have one series
            assert api.chat("say:x", model={"cam": 1 + number / 1000, "signs": 1})[0] == 200
        assert api.call("POST", "/v1/heads/cam/night", {"images": [data_url(png())]})[0] == 200
        with api.client() as client:
            assert "".join(client.stream("say:x", adapter="signs")) == "x"
        after = scraped(api)
        counts = {"time_to_first_token", "time_per_output_token", "request_queue"}
        assert within(
            after,
            {
                "requests_total base ok": 2,
                "requests_total base bad_request": 1,
                **{f"{name}_seconds_count base": 3 for name in counts},
                "tokens_total base completion": 2 * 5 + 5,
                **dict.fromkeys(("requests_active", "queue_requests running", "requests_total signs cancelled"), 0),
                "requests_total cam ok": 2,
                "tokens_total cam completion": 5,
                "request_seconds_count cam": 2,
                "requests_total signs step_failed": 1,
                "requests_total signs ok": 1,
                "request_seconds_count signs": 1,
                "requests_total unknown unknown_adapter": 1,
                "requests_total composed ok": 2 * MAX_ADAPTERS - 1,
            },
        )
        assert not any("absent" in name for name in after) and after["engine_steps_total unmerged"] > 0
        labels = {name.split()[1] for name in after if name.startswith("requests_total ")}
        assert labels == {"base", "unknown", "composed", "other", "cam", "signs"}
        for name in (
            *("switches_total", "arena_bytes kv", "arena_bytes adapters", "vision_cache_total hit", "streams_open"),
            *("encoded_patches_total", "encode_seconds_total", "adapter_requests_total hit", "frames_taken_total"),
            *("engine_prompt_tokens_total reused", "highest_credit_seconds", "engine_restarts_total"),
        ):
            assert name in after
        api.engine.dead = "killed"
        assert within(scraped(api), {"engine_up": 0, "requests_total base ok": 2})


def test_names_beyond_the_limit_count_as_other_until_they_are_busier() -> None:
    evicted: list[str] = []
    slots = LabelSlots(2, evicted.append)
    assert [slots.label(name) for name in ("a", "b", "c", "a")] == ["a", "b", OTHER, "a"]
    busy = [slots.label("c") for _ in range(10)]
    assert busy[0] == OTHER and busy[-1] == "c" and evicted == ["b"]
    assert slots.label("b") == OTHER == slots.current_label("b") and slots.current_label("a") == "a"
    alternating = LabelSlots(1, evicted.append)
    for name in "ab" * 10_000:
        alternating.label(name)
    assert len(evicted) <= 2, "two equally busy names do not alternate"
    slots = LabelSlots(1, evicted.append)
    labels = [slots.label(name) for name in ["old"] * 20_000 + ["new"] * 60_000]
    assert labels[20_000] == OTHER and labels[-1] == "new", "a name without recent requests loses its slot"


@given(st.lists(st.sampled_from("abcdef"), max_size=300), st.integers(1, 3))
def test_labels_are_bounded_and_counters_only_increase(names: list[str], limit: int) -> None:
    found: Counter[str] = Counter()

    def forget(name: str) -> None:
        found.pop(name)

    slots = LabelSlots(limit, forget)
    for name in names:
        before = dict(found)
        found[slots.label(name)] += 1
        assert all(found[label] >= count for label, count in before.items() if label in found)
        assert len(found.keys() - {OTHER}) <= limit


@pytest.mark.slow
def test_a_thousand_adapters_and_tenants_make_few_series() -> None:
    metrics = Metrics("base", "0")
    few = len(metrics.render(None).splitlines())
    metrics.expect(f"early{number}" for number in range(1000))
    for number in range(1000):
        for _ in range(1 + number // 100):
            request = make_request("r", f"adapter{number}", tenant=f"tenant{number}")
            metrics.answered(request, total_s=1.0, first_s=0.5, queue_s=0.1, num_completion=4)
            metrics.count("ok", f"adapter{number}", f"tenant{number}")
    text = metrics.render(None).decode()
    for label, most in (("adapter", MAX_ADAPTERS + 4), ("tenant", MAX_TENANTS + 1)):
        parts = (line.partition(f'{label}="')[2] for line in text.splitlines())
        assert len({part.partition('"')[0] for part in parts if part}) <= most
    assert len(text.splitlines()) < few + 150 * MAX_ADAPTERS


def stats_with(*trainings: TrainingStatus, **fields: Any) -> EngineStats:
    stats = ScriptedEngine(EngineConfig(model="scripted")).stats()
    return msgspec.structs.replace(stats, trainings=trainings, **fields)


RUNNING = TrainingStatus(name="signs", state="running", step=3, num_steps=9, num_tokens=70, loss=0.25, seconds=1.5)
NEW = TrainingStatus(name="cars", state="running", step=0, num_steps=9)


def test_trainings_and_clients_of_the_base_model_have_series() -> None:
    base = {"num_base_clients": 2, "num_base_calls": 30, "num_base_rows": 900, "base_s": 1.5}
    found = series(Metrics().render(stats_with(RUNNING, NEW, **base)).decode())
    training = {"training_steps_total": 3, "training_tokens_total": 70, "training_seconds_total": 1.5}
    assert within(
        found,
        {f"{name} signs": value for name, value in (training | {"training_loss": 0.25}).items()}
        | {"training_steps_total cars": 0, "trainings running": 2, "trainings failed": 0}
        | {"base_clients": 2, "base_calls_total": 30, "base_rows_total": 900, "base_seconds_total": 1.5},
    )
    assert "training_loss cars" not in found, "it has no loss yet"
    many = [TrainingStatus(name=f"t{n}", state="failed", step=0, num_steps=1) for n in range(MAX_TRAININGS + 9)]
    found = series(Metrics().render(stats_with(*many)).decode())
    assert found["trainings failed"] == MAX_TRAININGS + 9
    assert sum(name.startswith("training_steps_total ") for name in found) == MAX_TRAININGS
    assert merged_stats([stats_with(RUNNING), stats_with(), stats_with(NEW)]).trainings == (RUNNING, NEW)


FORM = "a name has 1 to 128 printable characters, no @, +, * or slash"
LABEL = "metrics count other requests under the label"
APART = "it has letters and accents as separate characters ("

LABELS = ("base", "other", "composed", "unknown")
NAMES: dict[str, str | None] = {
    **dict.fromkeys(LABELS, LABEL),
    **dict.fromkeys(("", " ", " a", "a ", "x" * 129, ".", "..", ".hidden", "..data", "a/b", "../a", "a\\b"), FORM),
    **dict.fromkeys(("a@b", "a+b", "0.5*a", "*", "a\nb", "a\x00", "a\ud800"), FORM),
    "a\u200bb": FORM,  # without width
    "\u202eab": FORM,  # written from right to left
    "a\u00a0b": FORM,  # a space that does not break
    "cafe\u0301": APART,  # as macOS writes names of files
    "\uff42ase": None,  # a wide b, as of Chinese keyboards
    "Base": None,  # labels of metrics have a case
    **dict.fromkeys(("x" * 128, "\u533b\u7597\uff08v2\uff09", "\u00b5-net", "caf\u00e9", "\u8eca", "default", "none")),
    **dict.fromkeys(("lost", "a b", "a:b", "a=b", "0.7", "-", "checkpoint-500")),
}


def test_each_name_is_accepted_or_refused_with_its_reason() -> None:
    for name, want in NAMES.items():
        problem = name_problem(name)
        assert (problem is None) == (want is None) and (want or "") in (problem or ""), ascii(name)
        if want == APART:
            assert problem is not None and ascii(unicodedata.normalize("NFC", name)) in problem
    with pytest.raises(BadConfig, match="token 'other' has the label of all other tokens in metrics"):
        Token(name="other", secret="0123456789abcdef")


def in_plans(name: str, folder: Path) -> None:
    plans: list[tuple[type[PlanModel], dict[str, Any]]]
    plans = [(plan, {"name": name}) for plan in (DomainPlan, TrainingPlan, LearningSettings)]
    reasons = []
    for plan, fields in plans:
        with pytest.raises(ValidationError) as caught:  # of this and of the missing fields
            plan.model_validate(fields)
        reasons += [str(error["msg"]) for error in caught.value.errors() if name in (*error["loc"], error["input"])]
    assert len(reasons) == len(plans) and len(set(reasons)) == 1
    raise BadAdapter(reasons[0])


ENTRIES: dict[str, Callable[[str, Path], object]] = {
    "catalog": lambda name, folder: asyncio.run(front_end().adapters.load(name, str(folder))),
    "registry": lambda name, folder: AdapterRegistry({}, None, 64).register({name: str(folder)}),  # type: ignore[arg-type]
    "command line": lambda name, folder: named_adapters((f"{name}={folder}",), None),
    "folder": lambda name, folder: named_adapters((), Path(write_adapter(folder / f"{name}s" / name)).parent),
    "plans": in_plans,
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_labels_of_metrics_are_refused_at_every_entry(entry: str, tmp_path: Path) -> None:
    for name in LABELS:
        with pytest.raises(BadAdapter, match=re.escape(f"{LABEL} {name!r}")):
            ENTRIES[entry](name, tmp_path)


async def test_requests_of_a_failed_adapter_do_not_list_all_adapters_each(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = mock.AsyncMock(return_value=(failed_status("signs", "broken"),))
    catalog = AdapterCatalog(SimpleNamespace(adapters=adapters), Metrics(), "base", None)  # type: ignore[arg-type]
    monkeypatch.setattr(adapter_catalog, "ERROR_S", 1000.0)
    for _ in range(100):
        assert (await catalog.resolve("signs")).statuses[0].error == "broken"
    assert adapters.await_count == 1
    monkeypatch.setattr(adapter_catalog, "ERROR_S", 0.0)
    adapters.return_value = (failed_status("signs", "other"),)
    assert (await catalog.resolve("signs")).statuses[0].error == "other"


# -- adapters after a restart ------------------------------------------------------------------------------------------


class Life(NamedTuple):
    """What a server does after its first start with `given`, of the folders one and two; then it is started again.

    Each adapter is NAME=FOLDER. said: part of a line at the second start. refused: it does not start.
    """

    changes: list[str]
    served: list[str]
    given: Sequence[str] = ("a=one",)
    said: str = ""
    refused: str = ""


LIVES = {
    "unchanged": Life([], ["a=one"]),
    "loaded": Life(["load b=two"], ["a=one", "b=two"], said="kept in {}: b"),
    "replaced": Life(["load a=two"], ["a=two"], said="served as loaded later, not from the given folder: a"),
    "replaced, then given": Life(["load a=two"], ["a=three"], given=["a=three"]),
    "unloaded": Life(["unload a"], [], said="unloaded later, and not served: a"),
    "pinned": Life(["load b=two", "pin b"], ["a=one", "b=two pinned"], said="kept in {}: b"),
    "not given": Life(["load b=two"], ["b=two"], given=[], said="not given any more, and not served: a"),
    "lost": Life(["load b=two", "lose two"], ["a=one"], said="kept in {}: b"),
    "given and lost": Life(["lose one"], [], refused="no adapter_config.json"),
    "loaded in vain": Life(["load b=nowhere"], ["a=one"]),
    "trained": Life(["train b=two"], ["a=one", "b=two"], said="kept in {}: b"),
    "trained and unloaded": Life(["train b=two", "unload b"], ["a=one"]),
    "trained, replaced, trained": Life(
        ["train b=two", "load b=three", "pin b", "train b=two"], ["a=one", "b=three pinned"]
    ),
    "just trained": Life(["finish b=two"], ["a=one", "b=two"]),
    "just trained and pinned": Life(["finish b=two", "pin b"], ["a=one", "b=two pinned"]),
    "just trained and unloaded": Life(["finish b=two", "unload b"], ["a=one"]),
    "just trained and replaced": Life(["finish b=two", "load b=three"], ["a=one", "b=three"]),
    "just trained and replaced in vain": Life(["finish b=two", "load b=nowhere"], ["a=one", "b=two"]),
}


class TrainingEngine(ScriptedInterface):
    """A plan is NAME=FOLDER, and its training is finished when it is looked at for the third time."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    async def call(self, operation: Operation) -> Any:
        if isinstance(operation, Train):
            if self.looks > 2:
                return await self.call(ListTrainings())
            self.plan = operation.plan
            return (TrainingStatus(name=self.plan.partition("=")[0], state="running", step=0, num_steps=1),)
        if not isinstance(operation, ListTrainings):
            return await super().call(operation)
        self.looks += 1
        name, _, path = self.plan.partition("=")
        if self.looks == 1:
            raise EngineDead("it is being restarted")
        if self.looks == 2:
            return (TrainingStatus(name=name, state="running", step=0, num_steps=1),)
        if self.looks == 3:
            await self.load_adapter(name, path)
        return (TrainingStatus(name=name, state="finished", step=1, num_steps=1, path=path),)


@pytest.mark.parametrize("case", LIVES)
async def test_adapters_changed_while_a_server_runs_outlive_it(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_catalog, "TRAINED_S", 0.01)
    life, said, folder = LIVES[case], list[str](), tmp_path / "state"
    for number, name in enumerate(("one", "two", "three"), 1):
        write_adapter(tmp_path / name, {"head": number})  # the frames of its head tell the folder

    async def start(given: Sequence[str]) -> tuple[AdapterCatalog, AdapterState, TrainingEngine]:
        named = {each.partition("=")[0]: str(tmp_path / each.partition("=")[2]) for each in given}
        state = AdapterState.open(folder)
        try:
            new = starting_adapters(state, named, [], "model", said.append)
            catalog = AdapterCatalog(engine := TrainingEngine(), Metrics(), "model", ByteProcessor())  # type: ignore[arg-type]
            await catalog.register(new)
            await catalog.keep_in(state, new)
        except VLoraError:
            state.close()
            raise
        return catalog, state, engine

    catalog, state, engine = await start(["a=one"])
    for change in life.changes:
        verb, name, _, path = re.fullmatch(r"(\w+) (\w+)(=(\w+))?", change).groups()  # type: ignore[union-attr]
        match verb:
            case "load":
                with contextlib.nullcontext() if path != "nowhere" else pytest.raises(BadAdapter):
                    await catalog.load(name, str(tmp_path / path))
            case "train":
                await catalog.train(f"{name}={tmp_path / path}")
                async with asyncio.timeout(10):
                    while name not in state:
                        await asyncio.sleep(0.01)
            case "finish":
                monkeypatch.setattr(adapter_catalog, "TRAINED_S", 1000.0)
                await catalog.train(f"{name}={tmp_path / path}")
                engine.looks = 2
                await engine.call(ListTrainings())
            case "unload":
                await catalog.unload(name)
            case "pin":
                await catalog.pin(name, True)
            case "lose":
                (tmp_path / name / "adapter_config.json").unlink()
    assert said == []
    await catalog.close()
    state.close()  # as at the end of the process
    if life.refused:
        with pytest.raises(BadAdapter, match=life.refused):
            await start(life.given)
        return
    catalog, state, _ = await start(life.given)
    folders = {1: "one", 2: "two", 3: "three"}
    served = [f"{a.name}={folders[a.heads[0].num_frames]}" + " pinned" * a.pinned for a in await catalog.list()]
    assert served == life.served
    assert life.said.format(folder) in "\n".join(said)
    assert case != "loaded in vain" or "b" not in state
    if case == "lost":
        assert "adapter 'b', loaded before the restart, is not served" in caplog.text
        await catalog.unload("b")
        assert "b" not in state
    state.close()


async def test_a_training_has_no_name_that_an_adapter_may_not_have(tmp_path: Path) -> None:
    engine, state = ScriptedInterface(), AdapterState.open(tmp_path / "state")
    catalog = AdapterCatalog(engine, Metrics(), "model", ByteProcessor())  # type: ignore[arg-type]
    await catalog.keep_in(state, {})
    catalog.learning = frozenset({"cam"})
    for name, error in (("model", "is the base model's name"), ("cam", "learns, so")):
        with pytest.raises((BadAdapter, BadRequest), match=error):
            await catalog.train(f"/plans/{name}")
    assert [one.state for one in await engine.call(ListTrainings())] == ["cancelled"] * 2
    await catalog.close()
    assert not state.adapters


async def test_a_change_that_cannot_be_kept_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = AdapterCatalog(TrainingEngine(), Metrics(), "model", ByteProcessor())  # type: ignore[arg-type]
    await catalog.keep_in(AdapterState.open(tmp_path / "state"), {})

    def full(path: Path, data: bytes, mode: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("vlora.cluster.adapter_state.write_whole", full)
    with pytest.raises(
        VLoraError, match=r"adapters.json cannot be written, so the adapters were not changed: No space"
    ):
        await catalog.load("a", str(write_adapter(tmp_path / "a")))
    assert await catalog.list() == ()
    monkeypatch.setattr(adapter_catalog, "TRAINED_S", 0.01)
    await catalog.train(f"b={write_adapter(tmp_path / 'b')}")
    await asyncio.sleep(0.1)
    assert caplog.text.count("trained adapters are not kept: ") == 1
    monkeypatch.undo()
    await catalog.close()
    assert (await catalog.pin("b", True)).pinned


TEMPLATE, MORE_TOKENS, IMAGES = "another chat template", "other tokens", "image processor has another"
JINJA, TOKENIZER = "chat_template.jinja", "tokenizer_config.json"
OWN = "{{ 'Q: ' + messages[0].content[0].text + ' A:' }}"


@pytest.fixture(scope="module")
def processor() -> InputProcessor:
    return InputProcessor(build_model("qwen2_vl").config, tokenizer(), image_processor("qwen2_vl"))


def template(base: InputProcessor) -> str:
    return str(base.tokenizer.chat_template)


def saved(*parts: Any) -> dict[str, bytes]:
    """The files of tokenizers and image processors, as trainers save them."""
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            part.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def several(**templates: str) -> dict[str, Any]:
    return {"chat_template": [{"name": name, "template": own} for name, own in templates.items()]}


def with_tokens(base: InputProcessor) -> Any:
    tokens = copy.deepcopy(base.tokenizer)
    tokens.add_tokens([AddedToken("<action>"), AddedToken("<stop>", special=True)])
    return tokens


def pixels(base: InputProcessor) -> dict[str, Any]:
    fields = json.loads(base.image_processor.to_json_string())
    return fields | {"size": {"shortest_edge": 16, "longest_edge": 32 * 32}}


MOVED = {"added_tokens_decoder": {"1": {"content": "</s>"}}}
# The files of a folder, and the warning.
FOLDERS: dict[str, tuple[Callable[[InputProcessor], Mapping[str, Any]], str | None]] = {
    "nothing": (lambda base: {}, None),
    "a copy": (lambda base: saved(base.tokenizer, base.image_processor), None),
    "a copy of the template": (lambda base: {JINJA: template(base)}, None),
    "with a line end": (lambda base: {JINJA: template(base) + "\n"}, None),
    "in the tokenizer's": (lambda base: {TOKENIZER: {"chat_template": template(base)}}, None),
    "among several": (lambda base: {TOKENIZER: several(tool_use=OWN, default=template(base))}, None),
    "another template": (lambda _: {JINJA: OWN}, TEMPLATE),
    "another in the tokenizer's": (lambda _: {TOKENIZER: {"chat_template": OWN}}, TEMPLATE),
    "another in the processor's": (lambda _: {"chat_template.json": {"chat_template": OWN}}, TEMPLATE),
    "another of several": (lambda _: {TOKENIZER: several(default=OWN)}, TEMPLATE),
    "further tokens": (
        lambda base: saved(with_tokens(base)),
        f"{MORE_TOKENS} than the base model's: '<action>', '<stop>'",
    ),
    "further tokens of before": (lambda _: {"added_tokens.json": {"<s>": 1, "<action>": 9}}, "'<action>'"),
    "moved tokens": (lambda _: {TOKENIZER: MOVED}, f"{MORE_TOKENS} than the base model's: '</s>'"),
    "other pictures": (lambda base: {"preprocessor_config.json": pixels(base)}, f"{IMAGES} size"),
    "of a processor": (lambda base: {"processor_config.json": {"image_processor": pixels(base)}}, f"{IMAGES} size"),
    "no JSON": (lambda _: {TOKENIZER: b"{"}, "cannot be compared with the base model's"),
    "no text": (lambda _: {JINJA: b"\xff"}, "cannot be compared"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_difference_is_reported_and_a_copy_is_not(
    name: str, processor: InputProcessor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, want = FOLDERS[name]
    for file, content in files(processor).items():
        data = (
            content
            if isinstance(content, bytes)
            else content.encode()
            if file == JINJA
            else json.dumps(content).encode()
        )
        (tmp_path / file).write_bytes(data)
    with caplog.at_level(logging.WARNING):
        found = prompt_warnings("signs", tmp_path, processor)
    assert len(found) == (want is not None) and all(want is not None and want in each for each in found)
    assert [record.getMessage() for record in caplog.records] == [f"adapter 'signs': {each}" for each in found]


def test_a_copy_of_the_tokenizer_s_template_is_silent_where_the_processor_has_another(
    processor: InputProcessor, tmp_path: Path
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tokens = tokenizer()
    for folder in (base, adapter):
        tokens.save_pretrained(folder)
    tokens = type(tokens).from_pretrained(base)
    tokens.chat_template = OWN  # the processor's
    used = InputProcessor(processor.config, tokens, processor.image_processor)
    assert prompt_warnings("signs", adapter, used) == ()
    (adapter / JINJA).write_text("a third")
    assert len(prompt_warnings("signs", adapter, used)) == 1


async def test_answers_to_a_load_and_lists_have_the_warnings(processor: InputProcessor, tmp_path: Path) -> None:
    plain, own = tmp_path / "plain", tmp_path / "own"
    for folder in (plain, own):
        write_adapter(folder)
    (own / JINJA).write_text(OWN)
    catalog = AdapterCatalog(ScriptedInterface(), Metrics(), "model", processor)  # type: ignore[arg-type]

    async def warned() -> list[str]:
        return [status.name for status in await catalog.list() if TEMPLATE in "".join(status.warnings)]

    await catalog.register({"a": str(own), "b": str(plain)})
    assert await warned() == ["a"]
    assert TEMPLATE in (await catalog.load("c", str(own))).warnings[0]
    assert TEMPLATE in (await catalog.pin("c", True)).warnings[0]
    assert await warned() == ["a", "c"]
    await catalog.unload("c")
    assert not (await catalog.load("c", str(plain))).warnings
    assert await warned() == ["a"]


@pytest.fixture
def loggers() -> Iterator[None]:
    """Put the loggers back."""
    found = [logging.getLogger(name) for name in ("vlora", "uvicorn", "asyncio")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in found]
    yield
    for logger, (handlers, level, propagate) in zip(found, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_nothing_is_logged_by_default(loggers: None, capsys: pytest.CaptureFixture[str]) -> None:
    logging_format.configure({})
    with running_api() as api:
        assert api.chat("say:x")[0] == 200
    assert capsys.readouterr().err == ""
    logging.getLogger("vlora.server").warning("odd %s", "thing")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 warning vlora\.server: odd thing\n", capsys.readouterr().err
    )
    logging_format.configure({logging_format.LEVEL_VARIABLE: "shouting"})
    assert logging.getLogger("vlora").level == logging.WARNING
    # A line for each request without its text, if asked for.
    logging_format.configure({logging_format.LEVEL_VARIABLE: "info"})
    token = "a-token-of-somebody"
    with running_api(tokens=(Token(name="u", secret=token),)) as api:
        mine = api._replace(token=token)
        assert mine.chat("say:private")[0] == 200
        assert mine.chat("")[0] == 400
    written = capsys.readouterr().err
    first, second = [line for line in written.splitlines() if "vlora.server.frontend" in line]
    assert re.search(r"info vlora\.server\.frontend: a request ended outcome=ok seconds=\d\S* choices=1$", first)
    assert "outcome=bad_request" in second
    assert "private" not in written and token not in written


def test_json_lines_carry_fields_and_tracebacks(
    loggers: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logging_format.configure({logging_format.LEVEL_VARIABLE: "info", logging_format.JSON_VARIABLE: "1"})
    log = logging.getLogger("vlora.engine")
    log.info("loaded", extra={"fields": {"adapter": 'a"b', "seconds": 0.5}})
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError:
        log.exception("failed")
    loaded, failed = map(json.loads, capsys.readouterr().err.splitlines())
    fields = {"level": "info", "logger": "vlora.engine", "message": "loaded", "adapter": 'a"b', "seconds": 0.5}
    assert {name: loaded[name] for name in fields} == fields
    assert failed["level"] == "error" and "RuntimeError: two\nlines" in failed["traceback"]
    logging_format.configure({logging_format.JSON_VARIABLE: "1"})
    with running_api() as api:
        monkeypatch.setattr(api.front_end, "read_metrics", None)
        status, answer = api.call("GET", "/metrics")
        assert status == 500 and answer["error"]["message"].startswith("internal server error (TypeError)")
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["level"], line["logger"]) == ("error", "uvicorn.error") and "TypeError" in line["traceback"]


ODD = ("plain", "with spaces", "a: b", "it's", 'quote"s', "(1); x", "ünï-code", "a b/c: d")


@pytest.mark.parametrize("folder", ODD)
def test_errors_of_files_show_no_folder(folder: str, tmp_path: Path) -> None:
    path = tmp_path / folder

    def error() -> str:
        with pytest.raises(BadAdapter) as caught:
            read_header(path, {}, 8)
        return str(caught.value)

    def check(cause: str) -> None:
        message = error()
        assert str(path) in message  # the control
        for prefix in ("", "adapter 'x': ", "replica 'replica-0': ", "replica 'it\\'s': adapter \"y's\": "):
            shown = without_places(prefix + message)
            assert shown.startswith(prefix) and shown.endswith(cause) and "/" not in shown.removeprefix(prefix)

    check("no adapter_config.json; there is no such folder")
    path.mkdir(parents=True)
    check("no adapter_config.json; an adapter is a folder in PEFT's format")
    (path / "adapter_config.json").write_text("{")
    check(error().rpartition(": is not JSON: ")[2])
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    check("no adapter_model.safetensors; pickled weights (.bin) are not supported, save as safetensors")


ENDED = "the engine ended with code -9: runner.cpp:123, rank 1:2"
SHAPES = "layer 'visual.blocks.0' has shapes (3, 4) and/or (4, 3)"
REFUSED = "[Errno 111] Connect call failed"
PLACES = {
    "rel/ative: no such file": "no such file",
    "gone: [Errno 2] No such file: '/srv/a b/c.json'": "gone: [Errno 2] No such file: 'c.json'",
    "reading failed (No such file: /srv/a b/c.json)": "reading failed (No such file: c.json)",
    SHAPES: SHAPES,
    "see https://a.example/b/c": "see https://a.example/b/c",
    "see https://a.example/b: no file '/srv/a b/c'": "see https://a.example/b: no file 'c'",
    "no file '/srv/a b/c'; see https://a.example/b/c": "no file 'c'; see https://a.example/b/c",
    "": "",
    f"no replica at 10.0.0.2:7001: {REFUSED} ('10.0.0.2', 7001)": f"no replica at [address]: {REFUSED} [address]",
    "a: [fe80::1%eth0]:7001 did not; b: gpu-a.example:7001 did not": "a: [address] did not; b: [address] did not",
    "Connect call failed ('::1', 7001, 0, 0)": "Connect call failed [address]",
    ENDED: ENDED,
    "adapter '10.0.0.2:7001': no such file": "adapter '10.0.0.2:7001': no such file",
}


def test_paths_and_addresses_within_a_message_are_for_admins() -> None:
    user, admin, _ = TOKENS
    for message, shown in PLACES.items():
        assert without_places(message) == shown
        dead = EngineDead(message)
        assert str(error_for(dead, user)) == shown and error_for(dead, admin) is error_for(dead, None) is dead

    # The caller's own words stay, and the adapter is named once.
    error = BadRequest("image 0: /home/me/a.png is no URL", field="images")
    assert not user.admin and error_for(error, user) is error
    internal = VLoraError("internal server error (OSError: /srv/x); see the server log")
    assert str(error_for(internal, user)) == "internal server error (OSError: x); see the server log"
    shown = f"adapter 'signs': {CAUSE}"
    assert str(named(FAILURE, "signs")) == f"adapter 'signs': {FAILURE.message}"
    assert str(named(ErrorValue("bad_adapter", shown), "signs")) == shown
    assert str(named(FAILURE, None)) == FAILURE.message


@pytest.mark.parametrize("tokens", [TOKENS, ()])
def test_health_checks_show_no_places_where_there_are_tokens(tokens: tuple[Token, ...]) -> None:
    """They need none. Without tokens the server is for its operator only."""

    async def stats() -> EngineStats:
        raise EngineDead("a: no connection to a replica at 10.0.0.2:7001; /srv/x: no such file")

    with running_api(tokens=tokens) as api:
        api.engine.stats = stats  # type: ignore[method-assign]
        for path in ("/health", "/ready"):
            status, answer = api._replace(token=None).call("GET", path)
            assert status == 503 and ("10.0.0.2" in str(answer) or "/srv" in str(answer)) == (not tokens)
            assert "no such file" in str(answer)


@pytest.mark.slow
def test_weights_of_tenants_are_checked_and_reach_the_scheduler() -> None:
    for pair in ("crowd", "crowd=0", "=2", "crowd=nan"):
        with pytest.raises(BadConfig, match="tenant_weight is "):
            EngineConfig(model="m", tenant_weight=(pair,))
    with pytest.raises(BadConfig, match="tenant_weight sets 'a' twice"):
        EngineConfig(model="m", tenant_weight=("a=1", "a=2"))
    config = EngineConfig(model="llava", arena_bytes=64 * 2**20, max_batch_size=1, tenant_weight=("*=1",), theta_s=1e3)
    engine = LocalEngine(config, model=build_model("llava")).engine
    for number in range(6):
        engine.add(make_request(f"crowd {number}", tenant="crowd"))
    engine.add(make_request("guest", tenant="guest"))
    finished: list[str] = []
    while engine.has_work:
        finished += [output.request_id for output in engine.step() if output.finished]
    assert finished.index("guest") <= 2, "without shares the guest is served last"
