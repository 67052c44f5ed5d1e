"""Adapters are read and loaded in the background: requests wait only for their own adapter, and unloading frees all
memory.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import device
from tests.engine.asking import ask, tokens
from tests.engine.swapping import ANSWER, SMALL, Story, ends, make_engine
from tests.families import Prompt
from vlora.errors import BadAdapter, BadRequest, OverCapacity, UnknownAdapter
from vlora.types import RequestOutput

# A GPU's last token comes with one more call.
NUM_CALLS = ANSWER + (device.name != "cpu")


def test_a_cold_adapter_never_stalls_the_running_batch(story: Story) -> None:
    engine = story.engine
    engine.register_adapters(story.folders)
    (status, *_) = engine.adapters()
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
    (status,) = (status for status in engine.adapters() if status.name == "wide8")
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
    names = [f"a{i}" for i in range(20)]
    story.engine.register_adapters(dict.fromkeys(names, story.folders["narrow4"]))
    for name in names[:10]:
        story.ask(name, name)
        now += 1.0
    story.engine.step()
    assert len(story.background.waiting) == 8, "few are read ahead of the others"
    first: list[str] = []
    while len(first) < 10:
        story.background.run()
        story.engine.step()
        first += [s.name for s in story.engine.adapters() if s.loaded and s.name not in first]
    assert first == names[:10]


def test_a_step_waits_for_a_load_without_spinning(story: Story) -> None:
    story.engine.register_adapters(story.folders)
    story.ask("cold", "wide8")
    assert story.steps(3) == []
    stats = story.engine.stats()
    assert stats.num_steps == 0 and stats.num_load_waits == 3 and stats.load_wait_s >= 3 * 0.004


def test_many_at_once_over_threads_and_a_tiny_arena(story: Story, plain_prompt: Prompt) -> None:
    local = make_engine(num_bytes=SMALL)
    copies = {f"{name}-{i}": path for i in range(6) for name, path in story.folders.items()}
    local.engine.register_adapters(copies)
    outputs = local.run(ask(plain_prompt, name, name, ANSWER) for name in copies)
    for name in copies:
        assert tokens(outputs[name]) == story.answers[name.rpartition("-")[0]], name
    stats = local.engine.stats()
    assert stats.num_adapter_loads >= len(copies) > stats.num_resident_adapters
    local.engine.check_integrity()


# -- reloading --------------------------------------------------------------------------------------------------------


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


def test_registering_a_name_again_serves_the_new_weights_at_once(story: Story) -> None:
    engine = story.engine
    for name, content in (("first", "wide8"), ("second", "narrow4")):
        engine.register_adapters({"a": story.folders[content]})
        story.ask(name, "a")
        story.finish()
        story.said(name, content)
    assert engine.stats().host_adapter_bytes == engine.parts.registry.get("a").num_bytes
    engine.pin_adapter("a", True)
    with pytest.raises(BadRequest, match="'a' is pinned"):
        engine.register_adapters({"b": story.folders["wide8"], "a": story.folders["wide8"]})
    assert [status.name for status in engine.adapters()] == ["a"]


def test_loading_the_same_content_again_changes_nothing(story: Story) -> None:
    first = story.engine.load_adapter("a", story.folders["wide8"])
    story.ask("r", "a")
    story.finish()
    again = story.engine.load_adapter("a", story.folders["wide8"])
    assert again.version == first.version and again.resident, "it stays on the device"


def test_registering_is_all_or_nothing(story: Story, tmp_path: Path) -> None:
    with pytest.raises(BadAdapter, match=r"no adapter_config\.json"):
        story.engine.register_adapters({**story.folders, "bad": str(tmp_path)})
    with pytest.raises(OverCapacity, match="adapter 'everywhere64' needs"):
        make_engine(num_bytes=8 * 65536).engine.register_adapters(story.folders)
    assert story.engine.adapters() == ()


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_invalid_adapter_fails_only_its_own_requests(story: Story, tmp_path: Path) -> None:
    """Its header is valid, and one of its values is not finite."""
    bad = shutil.copytree(story.folders["narrow4"], tmp_path / "bad")
    factors = load_file(bad / "adapter_model.safetensors")
    factors[min(factors)][0, 0] = torch.inf
    save_file(factors, bad / "adapter_model.safetensors")
    story.engine.register_adapters({"bad": str(bad), "good": story.folders["wide8"]})
    for name, adapter in (("one", "bad"), ("two", "bad"), ("other", "good")):
        story.ask(name, adapter)
    story.finish()
    assert ends(story.outputs) == {"one": "bad_adapter", "two": "bad_adapter", "other": "length"}
    story.said("other", "wide8")
    (error,) = {o.error.message for o in story.outputs if o.error}
    assert "not finite" in error and "adapter_model.safetensors" in error
    # From now on the error is known; the files are not read again.
    with pytest.raises(BadAdapter, match="not finite"):
        story.ask("three", "bad")
    (status,) = (status for status in story.engine.adapters() if status.name == "bad")
    assert not status.loaded and status.error == error
    story.engine.load_adapter("bad", story.folders["narrow4"])
    story.ask("healed", "bad")
    story.finish()
    story.said("healed", "narrow4")


def test_files_that_changed_after_registration_are_refused(story: Story, tmp_path: Path) -> None:
    """The served content must match the registered header (heads, vision side, size)."""
    path = shutil.copytree(story.folders["narrow4"], tmp_path / "a")
    story.engine.register_adapters({"a": str(path)})
    shutil.rmtree(path)
    shutil.copytree(story.folders["everywhere64"], path)
    story.ask("r", "a")
    story.finish()
    (last,) = (output for output in story.outputs if output.finished)
    assert last.error is not None and "changed since it was registered as 'a'" in last.error.message


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
        assert story.held() == (0, 0, 0, 0), "freed before the call returns"
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
    arena, host, _, kv = story.held()  # the image's base-model embeddings stay in the vision cache
    assert arena == host == kv == 0


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
    engine.check_integrity()
    story.ask("next", "wide8")
    story.finish()
    story.said("next", "wide8")


def test_pinning_and_draining_through_the_engine_thread(story: Story, plain_prompt: Prompt) -> None:
    local = make_engine()

    async def main() -> list[RequestOutput]:
        await local.register_adapters({"a": story.folders["wide8"]})
        status = await local.pin_adapter("a", True)
        assert status.loaded and status.resident and status.pinned, "read and loaded before the call returns"
        stream = local.generate(ask(plain_prompt, "r", "a", ANSWER))
        outputs = [await anext(stream)]
        await local.unload_adapter("a", drain=True)
        with pytest.raises(UnknownAdapter):
            await local.pin_adapter("a", True)
        outputs += [output async for output in stream]
        assert (await local.stats()).adapter_bytes == 0
        await local.close()
        return outputs

    assert tokens(asyncio.run(main())) == story.answers["wide8"]
