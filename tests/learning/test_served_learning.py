"""A learning adapter in a front end with a real engine: kept answers, a training, a promotion, and visibility."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.learning.world import ADMIN, NAME, Serving, World, picture, question
from vlora.errors import BadRequest, OverCapacity, UnknownAdapter
from vlora.learning.live_store import AnsweredRequest, Corrector
from vlora.server.media.image_decoding import RawImage
from vlora.types import AdapterStatus, SamplingParams
from vlora.types.video import Video


def serve(world: World, work: Callable[[Serving], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with world.serving() as serving:
            await work(serving)

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def fresh(world: World, tmp_path: Path, **settings: Any) -> World:
    """The same model and adapter with another folder."""
    copy = object.__new__(World)
    copy.__dict__ |= world.__dict__ | {"folder": tmp_path}
    copy.plan_with(**settings)
    return copy


def in_a_server(test: Any) -> Callable[..., None]:
    """Run a test, a coroutine of a running front end (`serving`) and its files (`own`)."""
    parameters = dict(inspect.signature(test).parameters)

    @functools.wraps(test)
    def run_it(world: World, tmp_path: Path, **given: Any) -> None:
        files = fresh(world, tmp_path)
        own = {"own": files} if "own" in parameters else {}
        serve(files, lambda serving: test(serving=serving, **own, **given))

    fixtures = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("world", "tmp_path")]
    more = [one for name, one in parameters.items() if name not in ("serving", "own")]
    run_it.__signature__ = inspect.Signature([*more, *fixtures])  # type: ignore[attr-defined]
    return run_it


def other_version(world: World) -> Path:
    """An adapter that also changes nothing, with other files."""
    other = world.folder / "other"
    other.mkdir()
    for file in world.initial.iterdir():
        (other / file.name).write_bytes(file.read_bytes().replace(b'"lora_alpha": 16.0', b'"lora_alpha": 15.0'))
    return other


@pytest.mark.slow
def test_the_promoted_adapter_is_the_one_that_was_evaluated(world: World, tmp_path: Path) -> None:
    own = fresh(world, tmp_path, train_after=30)

    async def work(serving: Serving) -> None:
        before = (await serving.ask(question(1000))).text
        await serving.teach(range(40), "w7")
        await serving.teach([40], "w7 " * 1200)  # beyond the model's context: set aside, wherever it is drawn to
        slow = serving.front.generate(
            question(1001), adapter=NAME, sampling=SamplingParams(max_tokens=200, ignore_eos=True)
        )
        first = await anext(slow)  # it runs during the promotion
        await serving.settle()
        assert own.events() == ["imported", "training", "evaluated", "promoted", "training_ended"]
        _, training, evaluated, promoted, ended = own.trail()
        assert training["details"]["records"] + evaluated["details"]["live"]["count"] in (40, 41)
        assert ended["details"]["set_aside"] == 1
        assert evaluated["details"]["live"]["present"] == 0
        (status,) = await serving.front.adapters.list()
        assert status.version == promoted["version"] == evaluated["version"] == serving.learner.loaded
        assert (await serving.ask(question(1002))).text == "w7" != before
        assert status.name == NAME, "the candidate is gone"
        text = str(first) + "".join([part async for part in slow if isinstance(part, str)])
        assert not text.startswith("w7"), "an answer ends with the version that it began with"

    serve(own, work)

    async def after(serving: Serving) -> None:
        assert (await serving.ask(question(1002))).text == "w7", "after a restart"
        await serving.learner.roll_back("ann", None)
        assert (await serving.ask(question(1002))).text != "w7"

    serve(own, after)


def test_only_answers_that_can_be_learned_are_kept(world: World, tmp_path: Path) -> None:
    own = fresh(world, tmp_path)

    async def work(serving: Serving) -> None:
        front = serving.front
        kept = await serving.ask("what is shown ?", picture(1), tenant="ann")
        raw = await serving.ask("what is shown ?", RawImage(bytes(16 * 16 * 3), 16, 16), tenant="ann")  # type: ignore[arg-type]
        base = await serving.ask("what is shown ?", tenant="ann", adapter=None)
        parts = front.generate("what ?", [picture(1), picture(2)], adapter=NAME, sampling=SamplingParams(max_tokens=2))
        *_, two = [part async for part in parts]
        video = Video((picture(1), picture(2)), (0.0, 1.0))
        parts = front.generate("what ?", [video], adapter=NAME, sampling=SamplingParams(max_tokens=2))
        *_, moving = [part async for part in parts]
        for refused in (base, two, moving):
            with pytest.raises(BadRequest, match=r"no answer with id '\w{32}' is kept for this token; corrections are"):
                await serving.learning.correct(refused.request_id, "red", ADMIN)  # type: ignore[union-attr]
        with pytest.raises(BadRequest, match="no answer with id"):
            await serving.learning.correct(kept.request_id, "red", Corrector("ben", False))
        await serving.learning.correct(kept.request_id, "red", Corrector("ann", False))
        done = await serving.learning.correct(raw.request_id, " black ", Corrector("ann", False))
        assert (done.adapter, done.label) == (NAME, "black")
        status = await serving.learner.status()
        assert (status.num_records, status.num_corrected) == (2, 2)

    serve(own, work)
    with sqlite3.connect(own.own / "live.sqlite") as database:
        rows = database.execute("SELECT question, label, image FROM records ORDER BY id").fetchall()
    assert [row[:2] for row in rows] == [("what is shown ?", "red"), ("what is shown ?", "black")]
    assert rows[0][2] == picture(1) and rows[1][2].startswith(b"\x89PNG")


@in_a_server
async def test_an_adapter_without_the_setting_is_not_kept(serving: Serving, own: World) -> None:
    await serving.front.adapters.load("second", str(own.initial))
    answer = await serving.ask("what is shown ?", adapter="second")
    with pytest.raises(BadRequest, match="no answer with id"):
        await serving.learning.correct(answer.request_id, "red", ADMIN)
    assert (await serving.learner.status()).num_records == 0


@in_a_server
async def test_a_learning_adapter_is_changed_by_promotion_only(serving: Serving, own: World) -> None:
    adapters = serving.front.adapters
    with pytest.raises(BadRequest, match="adapter 'signs' learns, so `vlora train promote`"):
        await adapters.load(NAME, str(own.initial))
    with pytest.raises(BadRequest, match="adapter 'signs' learns"):
        await adapters.unload(NAME)
    await adapters.pin(NAME, True)
    await serving.learner.promote("ann", version=None, path=str(other_version(own)), force=True)
    (status,) = await adapters.list()
    assert status.pinned and status.version == serving.learner.loaded, "a pinned one is replaced too"


@in_a_server
async def test_a_version_under_evaluation_is_hidden(serving: Serving, own: World) -> None:
    await serving.teach(range(8), "w7")
    await serving.learner.promote("ann", version=None, path=str(other_version(own)), force=False)
    seen: list[str] = []

    async def watch() -> None:
        while True:
            seen.extend(one.name for one in await serving.front.adapters.list())
            with pytest.raises(UnknownAdapter):
                await serving.ask("what ?", adapter=f"{NAME}~candidate")
            with pytest.raises(UnknownAdapter):
                await serving.front.adapters.unload(f"{NAME}~candidate")

    watching = asyncio.create_task(watch())
    await serving.settle()
    watching.cancel()
    assert set(seen) == {NAME} and own.events() == ["imported", "evaluated"]


def test_a_label_that_no_training_can_have_is_refused(world: World, tmp_path: Path) -> None:
    """One such record would fail each training that has it."""

    async def work(serving: Serving) -> None:
        answer = await serving.ask(question(1))
        for label in ("a <image> sign", "sign </s>"):
            with pytest.raises(BadRequest, match="the label has the model's special token '<"):
                await serving.learning.correct(answer.request_id, label, ADMIN)
        await serving.learning.correct(answer.request_id, "a < b > c", ADMIN)

    serve(fresh(world, tmp_path), work)


def test_sampled_and_cut_answers_are_not_held_to_be_right(world: World, tmp_path: Path) -> None:
    own = fresh(world, tmp_path)

    async def work(serving: Serving) -> None:
        for sampling in (
            SamplingParams(max_tokens=3, ignore_eos=True),
            SamplingParams(max_tokens=3, temperature=1.0),
            SamplingParams(max_tokens=100, stop=("w", "answer", "a", "i", "e", "s")),
        ):
            parts = serving.front.generate("what is shown ?", adapter=NAME, sampling=sampling)
            assert [part async for part in parts]

    serve(own, work)
    with sqlite3.connect(own.own / "live.sqlite") as database:
        assert database.execute("SELECT repeatable FROM records").fetchall() == [(0,)] * 3


@in_a_server
async def test_the_queue_has_room_for_answers_of_other_tenants(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk is slow, one tenant's answers fill half of it, by number and by bytes."""
    monkeypatch.setattr("vlora.learning.learning.MAX_QUEUED", 20)
    monkeypatch.setattr("vlora.learning.learning.MAX_QUEUED_BYTES", 2000)
    learning, learner = serving.learning, serving.learner
    version, held = learner.loaded, threading.Event()
    add = learner.store.add

    def slow(answers: Iterable[AnsweredRequest]) -> int:
        held.wait(30)
        return add(answers)

    monkeypatch.setattr(learner.store, "add", slow)

    def keep(tenant: str, numbers: range, num_bytes: int) -> None:
        for number in numbers:
            answer = AnsweredRequest(f"{tenant}{number}", tenant, version, "what ?", "old", None)
            learning.keep(NAME, answer, num_bytes, lambda: None)

    keep("bad", range(30), 1)
    keep("good", range(9), 1)
    assert learner.num_dropped == 20
    keep("large", range(3), 600)
    assert learner.num_dropped == 22, "two of them are more than half of the bytes"
    held.set()
    await learner.status()  # after the writes so far
    assert (await learner.status()).num_records == 20
    keep("bad", range(30, 40), 1)
    assert learner.num_dropped == 22, "the queue is empty again"


@in_a_server
async def test_an_answer_is_written_though_the_event_loop_is_busy(serving: Serving) -> None:
    """The thread has written the answers before, and the loop has not seen it yet."""
    learning, learner = serving.learning, serving.learner
    for number in range(2):
        answer = AnsweredRequest(f"r{number}", None, learner.loaded, "what ?", "old", None)
        learning.keep(NAME, answer, 0, lambda: None)
        if number == 0:
            await asyncio.sleep(0)
            while learner._executor.submit(learner.store.size).result().records == 0:  # noqa: SLF001
                pass
    for _ in range(2):
        await learner.status()
    assert (await learner.status()).num_records == 2


@in_a_server
async def test_one_answer_that_cannot_be_written_drops_no_other(serving: Serving) -> None:
    def broken() -> bytes:
        raise ValueError("not enough image data")

    learning, version = serving.learning, serving.learner.loaded
    for number in range(9):
        encode = broken if number == 4 else lambda: None
        learning.keep(NAME, AnsweredRequest(f"r{number}", None, version, "what ?", "old", None), 0, encode)
    await serving.learner.status()
    status = await serving.learner.status()
    assert (status.num_records, status.num_dropped) == (8, 1)


@in_a_server
async def test_the_queue_counts_the_bytes_of_texts(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlora.learning.learning.MAX_QUEUED_BYTES", 2000)
    question = "what " * 250  # more than half of the room
    answer = AnsweredRequest("r1", None, serving.learner.loaded, question, "old", None)
    serving.learning.keep(NAME, answer, 0, lambda: None)
    assert serving.learner.num_dropped == 1


@in_a_server
async def test_a_pinned_adapter_remains_pinned_if_a_version_cannot_be_loaded(
    serving: Serving, own: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, first = serving.front, serving.learner.loaded
    await front.adapters.pin(NAME, True)

    async def full(name: str, path: str) -> AdapterStatus:
        raise OverCapacity("there is no room")

    with monkeypatch.context() as patched:
        patched.setattr(front.adapters, "replace", full)
        with pytest.raises(OverCapacity):
            await serving.learner.promote("ann", version=None, path=str(other_version(own)), force=True)
    (status,) = await front.adapters.list()
    assert (status.version, status.pinned) == (first, True)


@in_a_server
async def test_a_pinned_adapter_that_is_unloaded_meanwhile_is_loaded_once(
    serving: Serving, own: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second load would succeed without a pin, or repeat a long one that has failed."""
    adapters, model, calls = serving.front.adapters, serving.learner._model, 0  # noqa: SLF001
    await adapters.pin(NAME, True)

    async def unloaded(name: str, path: str) -> AdapterStatus:
        nonlocal calls
        calls += 1
        await model.unload(name)
        raise OverCapacity("there is no room")

    with monkeypatch.context() as patched:
        patched.setattr(adapters, "replace", unloaded)
        with pytest.raises(OverCapacity):
            await model.load(NAME, other_version(own))
    assert calls == 1
