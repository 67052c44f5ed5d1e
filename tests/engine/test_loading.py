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

from tests.engine.asking import ask, tokens
from tests.engine.swapping import ANSWER, Story, make_engine
from tests.families import Prompt
from vlora.errors import Aborted, BadAdapter, BadRequest, OverCapacity, UnknownAdapter
from vlora.lora import peft_format
from vlora.memory.arena import PAGE_BYTES
from vlora.types import AdapterStatus


def settle(story: Story) -> None:
    """Read and step until no work is left."""
    story.finish()
    assert not story.background.waiting


def names(story: Story) -> set[str]:
    return {status.name for status in story.engine.adapters()}


def ended(call: Future[AdapterStatus], kind: type[Exception], text: str = "") -> bool:
    """Whether a call has ended with this error."""
    assert call.done(), "the call should have ended by now"
    return isinstance(call.exception(), kind) and text in str(call.exception())


def test_steps_continue_while_a_folder_is_read_and_the_name_keeps_its_content(story: Story) -> None:
    engine = story.engine
    engine.load_adapter("mine", story.folders["narrow4"])
    first = engine.load_in_background("mine", story.folders["wide8"])
    new = engine.load_in_background("new", story.folders["narrow4"])
    # Nothing is read yet: the name keeps its old content, and the other name is unknown.
    story.ask("base", None)
    story.steps(6)
    story.said("base", None)
    assert not first.done() and names(story) == {"mine"}
    with pytest.raises(UnknownAdapter):
        story.ask("early", "new")
    story.ask("before", "mine")
    assert len(story.background.waiting) == 1, "one folder is read at a time"
    story.run()  # the new content is registered here
    assert first.done() and first.result().loaded and not new.done()
    story.ask("after", "mine")
    story.finish()
    story.said("before", "narrow4")  # earlier requests keep the old content
    story.said("after", "wide8")
    assert new.result().name == "new" and names(story) == {"mine", "new"}
    first_status, second_status = engine.adapters()
    assert engine.adapters(most=1) == (first_status,) and engine.adapters(after="mine") == (second_status,)
    assert engine.parts.registry.num_known == 2, "the old content is dropped with its last request"


def test_loads_of_one_name_take_effect_in_call_order(story: Story) -> None:
    order = ("narrow4", "wide8", "wide8", "narrow4")
    calls = [story.engine.load_in_background("mine", story.folders[name]) for name in order]
    settle(story)
    versions = [call.result().version for call in calls]
    assert versions[0] == versions[3] != versions[1] == versions[2]
    assert [status.version for status in story.engine.adapters()] == [versions[3]]
    assert story.engine.parts.registry.num_known == 1


def test_unloading_ends_the_loads_and_pins_before_it_and_none_after(story: Story) -> None:
    engine, folders = story.engine, story.folders
    engine.load_adapter("old", folders["narrow4"])
    before = [engine.load_in_background("old", folders["wide8"]), engine.pin_in_background("old")]
    other = engine.load_in_background("second", folders["wide8"])
    engine.unload_adapter("old")
    assert all(ended(call, Aborted, "adapter 'old' was unloaded") for call in before)
    first = engine.load_in_background("fresh", folders["narrow4"])
    engine.unload_adapter("fresh")  # it had no content yet
    assert ended(first, Aborted)
    with pytest.raises(UnknownAdapter):
        engine.unload_adapter("fresh")
    after = engine.load_in_background("fresh", folders["wide8"])
    settle(story)
    assert other.result().loaded and after.result().loaded and names(story) == {"fresh", "second"}
    assert engine.parts.registry.num_known == 2 and engine.stats().adapter_bytes == 0


def test_pinning_waits_for_the_load_before_it(story: Story) -> None:
    engine, folders = story.engine, story.folders
    engine.register_adapters({"mine": folders["narrow4"]})
    loading, pinning = engine.load_in_background("mine", folders["wide8"]), engine.pin_in_background("mine")
    refused = engine.load_in_background("mine", folders["narrow4"])
    story.ask("base", None)
    story.steps(5)
    story.said("base", None)  # steps do not wait for it
    settle(story)
    assert loading.result().version == pinning.result().version
    assert pinning.result().pinned and pinning.result().resident
    assert ended(refused, BadRequest, "adapter 'mine' is pinned")
    story.ask("r", "mine")
    story.finish()
    story.said("r", "wide8")
    assert engine.pin_in_background("mine").result().pinned, "it is pinned already"


def test_a_name_pinned_during_a_load_keeps_its_content(story: Story) -> None:
    engine = story.engine
    version = engine.load_adapter("mine", story.folders["narrow4"]).version
    story.ask("r", "mine")
    story.finish()
    loading = engine.load_in_background("mine", story.folders["wide8"])
    assert engine.pin_adapter("mine", True).pinned  # the synchronous call takes effect at once
    settle(story)
    assert ended(loading, BadRequest, "adapter 'mine' is pinned")
    (status,) = engine.adapters()
    assert status.pinned and status.version == version


def test_unpinning_ends_a_running_pin(story: Story) -> None:
    engine = story.engine
    engine.register_adapters({"mine": story.folders["narrow4"]})
    pinning = engine.pin_in_background("mine")
    story.run()
    assert engine.parts.device.pool.loading, "it is being loaded onto the device"
    assert not engine.pin_adapter("mine", False).pinned
    assert ended(pinning, Aborted, "was unpinned")
    story.run()
    assert not story.background.waiting, "the copy finishes by itself"
    (status,) = engine.adapters()
    assert status.resident and not status.pinned
    engine.unload_adapter("mine")
    engine.check_integrity()
    assert engine.stats().adapter_bytes == 0


def test_a_refused_load_changes_nothing(story: Story, plain_prompt: Prompt, tmp_path: Path) -> None:
    engine, folders = story.engine, story.folders
    good = engine.load_adapter("mine", folders["narrow4"])
    broken = tmp_path / "broken"
    shutil.copytree(folders["wide8"], broken)
    (broken / "adapter_model.safetensors").write_bytes(b"nothing of the kind")
    bad = (("mine", str(broken)), ("mine", str(tmp_path / "missing")), ("a/b", folders["narrow4"]), ("\0", "\0"))
    calls = [engine.load_in_background(name, path) for name, path in bad]
    unknown = engine.pin_in_background("nobody")
    settle(story)
    assert all(ended(call, BadAdapter) for call in calls) and ended(unknown, UnknownAdapter)
    assert engine.adapters() == (good,)
    small = Story(plain_prompt, folders, story.answers, num_bytes=8 * PAGE_BYTES)
    large = small.engine.load_in_background("large", folders["everywhere64"])
    settle(small)
    assert ended(large, OverCapacity) and not small.engine.adapters()


def test_closing_ends_every_call(story: Story) -> None:
    engine = story.engine
    calls = [engine.load_in_background("mine", story.folders["wide8"]), engine.pin_in_background("mine")]
    engine.close()
    assert all(ended(call, Aborted) for call in calls) and not engine.has_work


def test_a_folder_that_hangs_delays_no_other_load(
    story: Story, plain_prompt: Prompt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its configuration is a pipe without a writer, like an unresponsive file system."""
    monkeypatch.setattr(peft_format, "check_file", lambda _: None)  # it refuses pipes
    slow = tmp_path / "slow"
    shutil.copytree(story.folders["wide8"], slow)
    config = (slow / "adapter_config.json").read_bytes()
    (slow / "adapter_config.json").unlink()
    os.mkfifo(slow / "adapter_config.json")
    local = make_engine()

    async def said(name: str, adapter: str | None, content: str | None) -> None:
        outputs = [output async for output in local.generate(ask(plain_prompt, name, adapter, ANSWER))]
        assert tokens(outputs) == story.answers[content]

    async def main() -> None:
        await local.load_adapter("old", story.folders["narrow4"])
        loading = asyncio.create_task(local.load_adapter("old", str(slow)))
        left = asyncio.create_task(local.pin_adapter("old", True))
        await said("one", "old", "narrow4")
        await said("two", None, None)
        assert (await local.stats()).num_adapters == 1 and not loading.done()
        left.cancel()  # its caller stops waiting; the call continues
        with (slow / "adapter_config.json").open("wb") as pipe:
            (tmp_path / "config").write_bytes(config)
            os.replace(tmp_path / "config", slow / "adapter_config.json")  # for later opens
            pipe.write(config)
        assert (await loading).version
        while not (await local.adapters())[0].pinned:
            await asyncio.sleep(0.01)
        await said("three", "old", "wide8")
        await local.close()

    asyncio.run(asyncio.wait_for(main(), 60))
