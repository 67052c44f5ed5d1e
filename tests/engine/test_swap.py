"""Adapters are read, loaded, pinned and unloaded while requests run: requests wait only for their own adapter, calls
keep their order, and unloading frees all memory.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import weakref
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import device
from tests.engine.asking import ask, tokens
from tests.engine.swapping import ANSWER, Story, ends, make_engine
from tests.families import Prompt
from vlora.errors import Aborted, BadAdapter, BadRequest, OverCapacity, UnknownAdapter
from vlora.lora import peft_format
from vlora.memory.arena import PAGE_BYTES
from vlora.types import AdapterStatus

# A GPU's last token comes with one more call.
NUM_CALLS = ANSWER + (device.name != "cpu")


def names(story: Story) -> set[str]:
    return {status.name for status in story.engine.adapters()}


def status_of(story: Story, name: str) -> AdapterStatus:
    (found,) = (status for status in story.engine.adapters() if status.name == name)
    return found


def ended(call: Future[AdapterStatus], kind: type[Exception], text: str = "") -> bool:
    """Whether a call has ended with this error."""
    assert call.done(), "the call should have ended by now"
    return isinstance(call.exception(), kind) and text in str(call.exception())


# -- requests for cold adapters ---------------------------------------------------------------------------------------


def test_a_cold_adapter_never_stalls_the_running_batch(story: Story) -> None:
    engine = story.engine
    engine.register_adapters(story.folders)
    status = status_of(story, "wide8")
    assert not status.loaded and not status.version and not status.mergeable and not story.background.waiting
    story.ask("cold", "wide8")
    story.ask("base", None)
    # Nothing is read yet: every step is the running request's.
    assert ends(story.steps(NUM_CALLS)) == {"base": "length"}
    story.said("base", None)
    story.ask("next", None)
    assert story.background.run(), "the adapter is queued for reading"
    story.steps(NUM_CALLS)
    story.said("next", None)
    assert not story.resident
    assert engine.stats().host_adapter_bytes == engine.parts.registry.get("wide8").num_bytes
    assert story.background.run(), "the adapter is queued for loading"
    assert not story.background.waiting
    story.finish()
    story.said("cold", "wide8")
    status = status_of(story, "wide8")
    assert status.loaded and status.version and status.resident


def test_adapters_of_unadmitted_requests_are_read_and_not_loaded(story: Story, plain_prompt: Prompt) -> None:
    story = Story(plain_prompt, story.folders, story.answers, max_batch_size=1)
    engine = story.engine
    engine.register_adapters(story.folders)
    story.ask("inside", None, max_ttft_s=1e6)
    story.steps(2)
    story.ask("outside", "wide8", max_ttft_s=1e6)
    story.ask("behind", "narrow4", max_ttft_s=1e6)
    story.steps(2)
    assert not ends(story.outputs) and not engine.parts.scheduler.demand.needed_adapters, "one at a time is admitted"
    assert story.background.run() and story.background.run() and not story.background.waiting, "only these are read"
    story.steps()
    assert {s.name for s in engine.adapters() if s.loaded} == {"narrow4", "wide8"}
    assert not story.resident and not engine.parts.device.pool.loading
    story.finish()
    story.said("outside", "wide8")
    story.said("behind", "narrow4")


def test_the_most_requested_adapters_are_read_first(story: Story, plain_prompt: Prompt) -> None:
    now = 0.0
    story = Story(plain_prompt, story.folders, story.answers, clock=lambda: now)
    every = [f"a{i}" for i in range(20)]
    story.engine.register_adapters(dict.fromkeys(every, story.folders["narrow4"]))
    for name in every[:10]:
        story.ask(name, name)
        now += 1.0
    story.engine.step()
    assert len(story.background.waiting) == 8, "few are read ahead of the others"
    first: list[str] = []
    while len(first) < 10:
        story.background.run()
        story.engine.step()
        first += [s.name for s in story.engine.adapters() if s.loaded and s.name not in first]
    assert first == every[:10]


def test_a_step_waits_for_a_load_without_spinning(story: Story) -> None:
    story.engine.register_adapters(story.folders)
    story.ask("cold", "wide8")
    assert story.steps(3) == []
    stats = story.engine.stats()
    assert stats.num_steps == 0 and stats.num_load_waits == 3 and stats.load_wait_s >= 3 * 0.004


@pytest.mark.parametrize("num_tasks", [0, 1, 2], ids=["nothing done", "read", "copied"])
def test_a_reload_while_the_old_content_is_loading(story: Story, num_tasks: int) -> None:
    engine = story.engine
    engine.register_adapters({"a": story.folders["wide8"]})
    story.ask("before", "a")
    story.steps()
    story.run(num_tasks)
    engine.load_adapter("a", story.folders["narrow4"])
    story.ask("after", "a")
    story.finish()
    story.said("before", "wide8")
    story.said("after", "narrow4")
    # The old registration holds no memory.
    assert len(story.resident) == 1 == engine.stats().num_adapters
    assert engine.stats().host_adapter_bytes == engine.parts.registry.get("a").num_bytes
    again = engine.load_adapter("a", story.folders["narrow4"])
    assert again.resident, "the same content stays on the device"


def test_registering_replaces_content_and_is_all_or_nothing(story: Story, tmp_path: Path) -> None:
    engine = story.engine
    with pytest.raises(BadAdapter, match=r"no adapter_config\.json"):
        engine.register_adapters({**story.folders, "bad": str(tmp_path)})
    with pytest.raises(OverCapacity, match="adapter 'everywhere64' needs"):
        make_engine(num_bytes=8 * PAGE_BYTES).engine.register_adapters(story.folders)
    assert engine.adapters() == ()
    for name, content in (("first", "wide8"), ("second", "narrow4")):
        engine.register_adapters({"a": story.folders[content]})
        story.ask(name, "a")
        story.finish()
        story.said(name, content)
    engine.pin_adapter("a", True)
    with pytest.raises(BadRequest, match="'a' is pinned"):
        engine.register_adapters({"b": story.folders["wide8"], "a": story.folders["wide8"]})
    assert names(story) == {"a"}


def test_an_invalid_adapter_fails_only_its_own_requests(story: Story, tmp_path: Path) -> None:
    """Its header is valid, and one of its values is not finite; another's files change after it was registered."""
    bad, changed = (shutil.copytree(story.folders["narrow4"], tmp_path / name) for name in ("bad", "changed"))
    factors = load_file(bad / "adapter_model.safetensors")
    factors[min(factors)][0, 0] = torch.inf
    save_file(factors, bad / "adapter_model.safetensors")
    story.engine.register_adapters({"bad": str(bad), "good": story.folders["wide8"], "changed": str(changed)})
    shutil.rmtree(changed)
    shutil.copytree(story.folders["everywhere64"], changed)
    for name, adapter in (("one", "bad"), ("two", "bad"), ("three", "changed"), ("other", "good")):
        story.ask(name, adapter)
    story.finish()
    assert ends(story.outputs) == {**dict.fromkeys(("one", "two", "three"), "bad_adapter"), "other": "length"}
    story.said("other", "wide8")
    errors = {o.request_id: o.error.message for o in story.outputs if o.error}
    assert errors["one"] == errors["two"] and "not finite" in errors["one"] and "model.safetensors" in errors["one"]
    assert "changed since it was registered as 'changed'" in errors["three"]
    # From now on the error is known; the files are not read again.
    with pytest.raises(BadAdapter, match="not finite"):
        story.ask("four", "bad")
    status = status_of(story, "bad")
    assert not status.loaded and status.error == errors["one"]
    story.engine.load_adapter("bad", story.folders["narrow4"])
    story.ask("healed", "bad")
    story.finish()
    story.said("healed", "narrow4")


def test_a_failed_copy_fails_only_its_requests(story: Story) -> None:
    engine = story.engine
    engine.register_adapters(story.folders)
    story.ask("lost", "wide8")
    story.ask("base", None)
    story.steps()
    story.run()
    future, _ = story.background.waiting.popleft()
    assert engine.stats().adapter_bytes > 0
    future.set_exception(RuntimeError("the bus is down"))
    story.finish()
    assert ends(story.outputs) == {"lost": "step_failed", "base": "length"}
    story.said("base", None)
    assert engine.stats().adapter_bytes == 0
    story.ask("again", "wide8")
    story.finish()
    story.said("again", "wide8")


# -- unloading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("moment", ["registered", "reading", "read", "copying", "running"])
def test_unloading_at_any_time_frees_every_byte(story: Story, moment: str, drain: bool) -> None:
    engine = story.engine
    engine.register_adapters({"a": story.folders["everywhere64"]})
    number = ["registered", "reading", "read", "copying", "running"].index(moment)
    if number:
        story.ask("one", "a")
        story.ask("two", "a")
        story.steps()
    for _ in range(number // 2):
        story.background.run()
        if moment != "read":
            story.steps()
    story.outputs += engine.unload_adapter("a", drain)
    engine.check_integrity()
    assert engine.adapters() == ()
    with pytest.raises(UnknownAdapter):
        story.ask("late", "a")
    if not drain:
        *adapters, kv = story.held()
        assert adapters == [0, 0, 0], "freed before the call returns"
        assert not kv or device.name != "cpu", "only a GPU's step may be in flight, whose blocks are kept"
    story.finish()
    ended = dict.fromkeys(("one", "two"), "length" if drain else "aborted") if number else {}
    assert ends(story.outputs) == ended
    if drain and number:
        story.said("one", "everywhere64")
        story.said("two", "everywhere64")
    assert story.held() == (0, 0, 0, 0)
    assert not engine.parts.registry.num_known and not engine.parts.loader.users and not engine.close()


def test_unloading_frees_host_memory(story: Story) -> None:
    engine = story.engine
    engine.register_adapters(story.folders)
    for name in story.folders:
        story.ask(name, name)
    story.finish()
    runs = [weakref.ref(engine.parts.registry.known(key).adapter) for key in story.resident]
    assert len(runs) == 4 and all(run() is not None for run in runs)
    for name in story.folders:
        engine.unload_adapter(name)
    gc.collect()
    assert not any(run() is not None for run in runs)


def test_a_name_serves_new_content_while_the_old_one_drains(story: Story) -> None:
    engine = story.engine
    engine.register_adapters({"a": story.folders["wide8"]})
    story.ask("old", "a")
    story.steps()
    assert engine.unload_adapter("a", drain=True) == ()
    engine.load_adapter("a", story.folders["narrow4"])
    story.ask("new", "a")
    story.finish()
    story.said("old", "wide8")
    story.said("new", "narrow4")
    assert engine.stats().num_resident_adapters == 1


def test_cancelling_a_request_does_not_cancel_the_load_of_its_adapter(story: Story) -> None:
    engine = story.engine
    engine.register_adapters(story.folders)
    story.ask("gone", "wide8")
    story.steps()
    story.run()
    last = engine.cancel("gone")
    assert last is not None and last.finish_reason == "cancelled" and not engine.has_work
    assert engine.cancel("gone") is None
    engine.check_integrity()
    story.ask("next", "wide8")
    story.finish()
    story.said("next", "wide8")


# -- calls in the background ------------------------------------------------------------------------------------------


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
    story.finish()
    versions = [call.result().version for call in calls]
    assert versions[0] == versions[3] != versions[1] == versions[2]
    assert status_of(story, "mine").version == versions[3] and story.engine.parts.registry.num_known == 1


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
    story.finish()
    assert other.result().loaded and after.result().loaded and names(story) == {"fresh", "second"}
    assert engine.parts.registry.num_known == 2 and engine.stats().adapter_bytes == 0
    closing = [engine.load_in_background("mine", folders["wide8"]), engine.pin_in_background("mine")]
    engine.close()
    assert all(ended(call, Aborted) for call in closing) and not engine.has_work


def test_pinning_waits_for_the_load_before_it(story: Story) -> None:
    engine, folders = story.engine, story.folders
    engine.register_adapters({"mine": folders["narrow4"]})
    loading, pinning = engine.load_in_background("mine", folders["wide8"]), engine.pin_in_background("mine")
    refused = engine.load_in_background("mine", folders["narrow4"])
    story.ask("base", None)
    story.steps(6)  # the last one collects what a GPU has in flight
    story.said("base", None)  # steps do not wait for it
    story.finish()
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
    story.finish()
    assert ended(loading, BadRequest, "adapter 'mine' is pinned")
    status = status_of(story, "mine")
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
    status = status_of(story, "mine")
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
    story.finish()
    assert all(ended(call, BadAdapter) for call in calls) and ended(unknown, UnknownAdapter)
    assert engine.adapters() == (good,)
    small = Story(plain_prompt, folders, story.answers, num_bytes=8 * PAGE_BYTES)
    large = small.engine.load_in_background("large", folders["everywhere64"])
    small.finish()
    assert ended(large, OverCapacity) and not small.engine.adapters()


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
        await local.unload_adapter("old", drain=True)
        with pytest.raises(UnknownAdapter):
            await local.pin_adapter("old", True)
        await local.close()

    asyncio.run(asyncio.wait_for(main(), 60))
