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
from vlora.learning.sample_store import AnsweredRequest, Corrector
from vlora.server.detokenizer import Piece
from vlora.server.images import RawImage
from vlora.server.prompts import TextRequest
from vlora.types import AdapterStatus, SamplingParams
from vlora.types.video import Video

ANN = Corrector("ann", False)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def serve(world: World, work: Callable[[Serving, World], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with world.serving() as serving:
            await work(serving, world)

    asyncio.run(asyncio.wait_for(main(), 120))


def in_a_server(test: Any) -> Callable[..., None]:
    """Run a test, a coroutine of a running front end (`serving`) and its files (`own`), which no other test uses."""
    names = list(inspect.signature(test).parameters)[2:]

    @functools.wraps(test)
    def run_it(world: World, tmp_path: Path, **given: Any) -> None:
        serve(world.copy(tmp_path), lambda *both: test(*both, **given))

    fixtures = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (*names, "world", "tmp_path")]
    run_it.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
    return run_it


def other_version(world: World) -> Path:
    """An adapter that also changes nothing, with other files."""
    other = world.folder / "other"
    other.mkdir()
    for file in world.initial.iterdir():
        (other / file.name).write_bytes(file.read_bytes().replace(b'"lora_alpha": 16.0', b'"lora_alpha": 15.0'))
    return other


@pytest.mark.exhaustive  # the drawn held-out part is rarely too small for a promotion
def test_the_promoted_adapter_is_the_one_that_was_evaluated(world: World, tmp_path: Path) -> None:
    async def work(serving: Serving, own: World) -> None:
        before = (await serving.ask(question(1000))).text
        await serving.teach(range(40), "w7")
        await serving.teach([40], "w7 " * 1200)  # beyond the model's context: set aside, wherever it is drawn to
        sampling = SamplingParams(max_tokens=200, ignore_eos=True)
        slow = serving.front.generate(TextRequest(question(1001), adapter=NAME, sampling=sampling))
        _, first = await anext(slow)  # it runs during the promotion
        await serving.settle()
        assert own.events() == ["imported", "training", "evaluated", "promoted", "training_ended"]
        _, training, evaluated, promoted, ended = own.audit_log()
        assert training["details"]["records"] + evaluated["details"]["live"]["count"] in (40, 41)
        assert ended["details"]["set_aside"] == 1 and evaluated["details"]["live"]["present"] == 0
        (status,) = await serving.front.adapters.list()
        assert status.version == promoted["version"] == evaluated["version"] == serving.learner.loaded
        assert (await serving.ask(question(1002))).text == "w7" != before
        assert status.name == NAME, "the candidate is gone"
        text = first.text + "".join([part.text async for _, part in slow if isinstance(part, Piece)])
        assert not text.startswith("w7"), "an answer ends with the version that it began with"

    async def after(serving: Serving, own: World) -> None:
        assert (await serving.ask(question(1002))).text == "w7", "after a restart"
        await serving.learner.roll_back("ann", None)
        assert (await serving.ask(question(1002))).text != "w7"

    own = world.copy(tmp_path, train_after=30)
    serve(own, work)
    serve(own, after)


def test_only_answers_that_can_be_learned_are_kept(world: World, tmp_path: Path) -> None:
    async def work(serving: Serving, own: World) -> None:
        async def asked(*images: Any, **settings: Any) -> Any:
            sampling = SamplingParams(**{"max_tokens": 2, **settings})
            asked = TextRequest("what is shown ?", images, adapter=NAME, sampling=sampling)
            *_, (_, answer) = [part async for part in serving.front.generate(asked)]
            return answer

        kept = await serving.ask("what is shown ?", picture(1), tenant="ann")
        raw = await serving.ask("what is shown ?", RawImage(bytes(16 * 16 * 3), 16, 16), tenant="ann")  # type: ignore[arg-type]
        base = await serving.ask("what is shown ?", tenant="ann", adapter=None)
        await serving.front.adapters.load("second", str(own.initial))
        second = await serving.ask("what is shown ?", tenant="ann", adapter="second")
        two, video = await asked(picture(1), picture(2)), Video((picture(1), picture(2)), (0.0, 1.0))
        for refused in (base, second, two, await asked(video)):
            with pytest.raises(BadRequest, match=r"no answer with id '\w{32}' is kept for this token; corrections are"):
                await serving.learning.correct(refused.request_id, "red", ADMIN)
        with pytest.raises(BadRequest, match="no answer with id"):
            await serving.learning.correct(kept.request_id, "red", Corrector("ben", False))
        for label in ("a <image> sign", "sign </s>"):  # one such record would fail each training that has it
            with pytest.raises(BadRequest, match="the label has the model's special token '<"):
                await serving.learning.correct(kept.request_id, label, ANN)
        await serving.learning.correct(kept.request_id, "a < b > c", ANN)
        await serving.learning.correct(kept.request_id, "red", ANN)
        done = await serving.learning.correct(raw.request_id, " black ", ANN)
        assert (done.adapter, done.label) == (NAME, "black")
        status = await serving.learner.status()
        assert (status.num_records, status.num_corrected) == (2, 2)
        # Sampled and cut answers are kept, and not held to be right.
        await asked(ignore_eos=True)
        await asked(temperature=1.0)
        await asked(max_tokens=100, stop=("w", "answer", "a", "i", "e", "s"))

    own = world.copy(tmp_path)
    serve(own, work)
    with sqlite3.connect(own.own / "live.sqlite") as database:
        rows = database.execute("SELECT question, label, repeatable, image FROM records ORDER BY id").fetchall()
    assert [row[:2] for row in rows[:2]] == [("what is shown ?", "red"), ("what is shown ?", "black")]
    assert rows[0][3] == picture(1) and rows[1][3].startswith(b"\x89PNG")
    assert [row[2] for row in rows[2:]] == [0, 0, 0]


@in_a_server
async def test_a_learning_adapter_is_changed_by_promotion_only(
    serving: Serving, own: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters, learner, first = serving.front.adapters, serving.learner, serving.learner.loaded
    with pytest.raises(BadRequest, match="adapter 'signs' learns, so `vlora train promote`"):
        await adapters.load(NAME, str(own.initial))
    with pytest.raises(BadRequest, match="adapter 'signs' learns"):
        await adapters.unload(NAME)
    await adapters.pin(NAME, True)

    async def full(name: str, path: str) -> AdapterStatus:
        raise OverCapacity("there is no room")

    other = str(other_version(own))
    with monkeypatch.context() as patched, pytest.raises(OverCapacity):
        patched.setattr(adapters, "replace", full)
        await learner.promote("ann", version=None, path=other, force=True)
    (status,) = await adapters.list()
    assert (status.version, status.pinned) == (first, True), "it remains pinned if a version cannot be loaded"
    await learner.promote("ann", version=None, path=other, force=True)
    (status,) = await adapters.list()
    assert status.pinned and status.version == learner.loaded != first, "a pinned one is replaced too"


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

    with monkeypatch.context() as patched, pytest.raises(OverCapacity):
        patched.setattr(adapters, "replace", unloaded)
        await model.load(NAME, other_version(own))
    assert calls == 1


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


def keep(
    serving: Serving, names: Iterable[str], num_bytes: int = 0, text: str = "what ?", encode: Any = lambda: None
) -> None:
    """Keep answers of the tenants that their names begin with."""
    for name in names:
        tenant = name.rstrip("0123456789")
        answer = AnsweredRequest(name, tenant, serving.learner.loaded, text, "old", None)
        serving.learning.keep(NAME, answer, num_bytes, encode)


def named(tenant: str, *numbers: int) -> list[str]:
    return [f"{tenant}{number}" for number in range(*numbers)]


@in_a_server
async def test_the_queue_has_room_for_answers_of_other_tenants(
    serving: Serving, own: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk is slow, one tenant's answers fill half of it, by number and by bytes."""
    monkeypatch.setattr("vlora.learning.learning.MAX_QUEUED", 20)
    monkeypatch.setattr("vlora.learning.learning.MAX_QUEUED_BYTES", 2000)
    learner, held = serving.learner, threading.Event()
    keep(serving, ["long1"], text="what " * 250)
    assert learner.num_dropped == 1, "texts count: it takes more than half of the room"
    add = learner.store.add

    def slow(answers: Iterable[AnsweredRequest]) -> int:
        held.wait(30)
        return add(answers)

    monkeypatch.setattr(learner.store, "add", slow)
    keep(serving, named("bad", 30), 1)
    keep(serving, named("good", 9), 1)
    assert learner.num_dropped == 21
    keep(serving, named("large", 3), 600)
    assert learner.num_dropped == 23, "two of them are more than half of the bytes"
    held.set()
    await learner.status()  # after the writes so far
    assert (await learner.status()).num_records == 20
    keep(serving, named("bad", 30, 40), 1)
    assert learner.num_dropped == 23, "the queue is empty again"


@in_a_server
async def test_answers_are_written_one_by_one_though_the_event_loop_is_busy(serving: Serving, own: World) -> None:
    """The thread has written the answers before, and the loop has not seen it yet."""
    learner = serving.learner
    keep(serving, ["a0"])
    await asyncio.sleep(0)
    while learner._executor.submit(learner.store.size).result().records == 0:  # noqa: SLF001
        pass
    keep(serving, ["a1"])
    for _ in range(2):
        await learner.status()
    assert (await learner.status()).num_records == 2

    def broken() -> bytes:
        raise ValueError("not enough image data")

    keep(serving, named("b", 4))
    keep(serving, ["b4"], encode=broken)
    keep(serving, named("b", 5, 9))
    await learner.status()
    status = await learner.status()
    assert (status.num_records, status.num_dropped) == (10, 1), "an answer that cannot be written drops no other"
