"""Adapters that are loaded and pinned while requests run: files are read in the background, and calls keep their
order.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.engine.test_swap import (  # noqa: F401  (fixtures)
    FAMILY,
    answers,
    ask,
    background,
    ends,
    finish,
    make_engine,
    prompt,
    steps,
    tokens,
)
from tests.families import Prompt
from tests.queued_executor import QueuedExecutor
from vlora.engine import Engine, LocalEngine
from vlora.errors import Aborted, BadAdapter, BadRequest, OverCapacity, UnknownAdapter
from vlora.lora import peft_format
from vlora.memory.arena import PAGE_BYTES
from vlora.types import AdapterStatus

Answers = dict[str | None, list[int]]


def settle(engine: Engine, background: QueuedExecutor) -> None:  # noqa: F811
    """Read and step until no work is left."""
    while engine.has_work:
        background.run()
        steps(engine, 1)
    assert not background.waiting


def names(engine: Engine) -> set[str]:
    return {status.name for status in engine.adapters()}


def error_of(call: Future[AdapterStatus]) -> BaseException | None:
    assert call.done(), "the call should have ended by now"
    return call.exception()


def test_steps_continue_while_a_folder_is_read_and_the_name_keeps_its_content(
    adapter_folders: dict[str, str],
    prompt: Prompt,  # noqa: F811
    answers: Answers,  # noqa: F811
    background: QueuedExecutor,  # noqa: F811
) -> None:
    engine = make_engine(background).engine
    engine.load_adapter("mine", adapter_folders["narrow4"])
    first = engine.load_in_background("mine", adapter_folders["wide8"])
    new = engine.load_in_background("new", adapter_folders["narrow4"])
    # Nothing is read yet: the name keeps its old content, and the other name is unknown.
    engine.add(ask(prompt, "base", None))
    outputs = steps(engine, 6)
    assert tokens(outputs, "base") == answers[None] and not first.done() and names(engine) == {"mine"}
    with pytest.raises(UnknownAdapter):
        engine.add(ask(prompt, "early", "new"))
    engine.add(ask(prompt, "before", "mine"))
    assert len(background.waiting) == 1, "one folder is read at a time"
    assert background.run()
    outputs = steps(engine, 1)  # the new content is registered here
    assert first.done() and first.result().loaded and not new.done()
    engine.add(ask(prompt, "after", "mine"))
    outputs += finish(engine, background)
    assert tokens(outputs, "before") == answers["narrow4"], "earlier requests keep the old content"
    assert tokens(outputs, "after") == answers["wide8"]
    assert new.result().name == "new" and names(engine) == {"mine", "new"}
    assert engine.parts.registry.num_known == 2, "the old content is dropped with its last request"


def test_loads_of_one_name_take_effect_in_call_order(
    adapter_folders: dict[str, str],
    background: QueuedExecutor,  # noqa: F811
) -> None:
    engine = make_engine(background).engine
    calls = [
        engine.load_in_background("mine", adapter_folders[name]) for name in ("narrow4", "wide8", "wide8", "narrow4")
    ]
    settle(engine, background)
    versions = [call.result().version for call in calls]
    assert versions[0] == versions[3] != versions[1] == versions[2]
    assert [status.version for status in engine.adapters()] == [versions[3]]
    assert engine.parts.registry.num_known == 1


def test_unloading_ends_the_loads_and_pins_before_it_and_none_after(
    adapter_folders: dict[str, str],
    background: QueuedExecutor,  # noqa: F811
) -> None:
    engine = make_engine(background).engine
    engine.load_adapter("old", adapter_folders["narrow4"])
    before = [engine.load_in_background("old", adapter_folders["wide8"]), engine.pin_in_background("old")]
    other = engine.load_in_background("second", adapter_folders["wide8"])
    engine.unload_adapter("old")
    for call in before:
        assert isinstance(error_of(call), Aborted) and "adapter 'old' was unloaded" in str(error_of(call))
    first = engine.load_in_background("fresh", adapter_folders["narrow4"])
    engine.unload_adapter("fresh")  # it had no content yet
    assert isinstance(error_of(first), Aborted)
    with pytest.raises(UnknownAdapter):
        engine.unload_adapter("fresh")
    after = engine.load_in_background("fresh", adapter_folders["wide8"])
    settle(engine, background)
    assert other.result().loaded and after.result().loaded and names(engine) == {"fresh", "second"}
    assert engine.parts.registry.num_known == 2 and engine.stats().adapter_bytes == 0


def test_pinning_waits_for_the_load_before_it(
    adapter_folders: dict[str, str],
    prompt: Prompt,  # noqa: F811
    answers: Answers,  # noqa: F811
    background: QueuedExecutor,  # noqa: F811
) -> None:
    engine = make_engine(background).engine
    engine.register_adapters({"mine": adapter_folders["narrow4"]})
    loading, pinning = engine.load_in_background("mine", adapter_folders["wide8"]), engine.pin_in_background("mine")
    refused = engine.load_in_background("mine", adapter_folders["narrow4"])
    engine.add(ask(prompt, "base", None))
    assert tokens(steps(engine, 5), "base") == answers[None], "steps do not wait for it"
    settle(engine, background)
    assert loading.result().version == pinning.result().version
    assert pinning.result().pinned and pinning.result().resident
    assert isinstance(error_of(refused), BadRequest) and "adapter 'mine' is pinned" in str(error_of(refused))
    engine.add(ask(prompt, "r", "mine"))
    assert tokens(finish(engine), "r") == answers["wide8"]
    assert engine.pin_in_background("mine").result().pinned, "it is pinned already"


def test_a_name_pinned_during_a_load_keeps_its_content(
    adapter_folders: dict[str, str],
    prompt: Prompt,  # noqa: F811
    background: QueuedExecutor,  # noqa: F811
) -> None:
    engine = make_engine(background).engine
    version = engine.load_adapter("mine", adapter_folders["narrow4"]).version
    engine.add(ask(prompt, "r", "mine"))
    finish(engine, background)
    loading = engine.load_in_background("mine", adapter_folders["wide8"])
    assert engine.pin_adapter("mine", True).pinned  # the synchronous call takes effect at once
    settle(engine, background)
    assert isinstance(error_of(loading), BadRequest) and "adapter 'mine' is pinned" in str(error_of(loading))
    (status,) = engine.adapters()
    assert status.pinned and status.version == version


def test_unpinning_ends_a_running_pin(
    adapter_folders: dict[str, str],
    background: QueuedExecutor,  # noqa: F811
) -> None:
    engine = make_engine(background).engine
    engine.register_adapters({"mine": adapter_folders["narrow4"]})
    pinning = engine.pin_in_background("mine")
    assert background.run()
    steps(engine, 1)
    assert engine.parts.device.pool.loading, "it is being loaded onto the device"
    assert not engine.pin_adapter("mine", False).pinned
    assert isinstance(error_of(pinning), Aborted) and "was unpinned" in str(error_of(pinning))
    assert background.run() and not background.waiting, "the copy finishes by itself"
    steps(engine, 1)
    (status,) = engine.adapters()
    assert status.resident and not status.pinned
    engine.unload_adapter("mine")
    engine.check_integrity()
    assert engine.stats().adapter_bytes == 0


def test_a_refused_load_changes_nothing(
    adapter_folders: dict[str, str],
    background: QueuedExecutor,  # noqa: F811
    tmp_path: Path,
) -> None:
    engine = make_engine(background).engine
    good = engine.load_adapter("mine", adapter_folders["narrow4"])
    broken = tmp_path / "broken"
    shutil.copytree(adapter_folders["wide8"], broken)
    (broken / "adapter_model.safetensors").write_bytes(b"nothing of the kind")
    calls = [
        engine.load_in_background("mine", str(broken)),
        engine.load_in_background("mine", str(tmp_path / "missing")),
        engine.load_in_background("a/b", adapter_folders["narrow4"]),
        engine.load_in_background("\0", "\0"),
    ]
    unknown = engine.pin_in_background("nobody")
    settle(engine, background)
    assert all(isinstance(error_of(call), BadAdapter) for call in calls)
    assert isinstance(error_of(unknown), UnknownAdapter)
    assert engine.adapters() == (good,)
    small = make_engine(background, num_bytes=8 * PAGE_BYTES).engine
    largest = max(adapter_folders.values(), key=lambda path: (Path(path) / "adapter_model.safetensors").stat().st_size)
    large = small.load_in_background("large", largest)
    settle(small, background)
    assert isinstance(error_of(large), OverCapacity) and not small.adapters()


def test_closing_ends_every_call(adapter_folders: dict[str, str], background: QueuedExecutor) -> None:  # noqa: F811
    engine = make_engine(background).engine
    calls = [engine.load_in_background("mine", adapter_folders["wide8"]), engine.pin_in_background("mine")]
    engine.close()
    assert all(isinstance(error_of(call), Aborted) for call in calls)
    assert not engine.has_work


def test_a_folder_that_hangs_delays_no_other_load(
    adapter_folders: dict[str, str],
    prompt: Prompt,  # noqa: F811
    answers: Answers,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its configuration is a pipe without a writer, like an unresponsive file system."""
    monkeypatch.setattr(peft_format, "check_file", lambda _: None)  # it refuses pipes
    slow = tmp_path / "slow"
    shutil.copytree(adapter_folders["wide8"], slow)
    config = (slow / "adapter_config.json").read_bytes()
    (slow / "adapter_config.json").unlink()
    os.mkfifo(slow / "adapter_config.json")

    async def answered(local: LocalEngine, name: str, adapter: str | None) -> list[int]:
        return tokens([output async for output in local.generate(ask(prompt, name, adapter))], name)

    async def main() -> None:
        local = make_engine()
        await local.load_adapter("old", adapter_folders["narrow4"])
        loading = asyncio.create_task(local.load_adapter("old", str(slow)))
        left = asyncio.create_task(local.pin_adapter("old", True))
        assert await answered(local, "one", "old") == answers["narrow4"]
        assert await answered(local, "two", None) == answers[None]
        assert (await local.stats()).num_adapters == 1 and not loading.done()
        left.cancel()  # its caller stops waiting; the call continues
        with (slow / "adapter_config.json").open("wb") as pipe:
            (tmp_path / "config").write_bytes(config)
            os.replace(tmp_path / "config", slow / "adapter_config.json")  # for later opens
            pipe.write(config)
        assert (await loading).version
        while not (await local.adapters())[0].pinned:
            await asyncio.sleep(0.01)
        assert await answered(local, "three", "old") == answers["wide8"]
        await local.close()

    asyncio.run(asyncio.wait_for(main(), 60))
