"""Adapters are read and loaded in the background: requests wait only for their own adapter, and unloading frees all
memory.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import device
from tests.families import Prompt, build_model, make_prompt
from tests.queued_executor import QueuedExecutor
from vlora.config import EngineConfig
from vlora.engine import Engine, LocalEngine
from vlora.errors import BadAdapter, BadRequest, OverCapacity, UnknownAdapter
from vlora.types import Request, RequestOutput, SamplingParams

FAMILY = "llava"
ANSWER = 5  # tokens


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    # Without images, which take extra steps: some tests count steps.
    return make_prompt(FAMILY, build_model(FAMILY), 0, num_images=0)


@pytest.fixture
def background() -> QueuedExecutor:
    return QueuedExecutor()


def make_engine(executor: QueuedExecutor | None = None, num_bytes: int = 64 * 2**20) -> LocalEngine:
    config = EngineConfig(model=FAMILY, device=device.name, arena_bytes=num_bytes, max_context=256, block_size=8)
    return LocalEngine(config, model=build_model(FAMILY).to(device.name), executor=executor)


def ask(prompt: Prompt, name: str, adapter: str | None, **changes: Any) -> Request:
    sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    return Request(
        request_id=name,
        prompt_ids=prompt.prompt_ids,
        vision=prompt.vision,
        adapter=adapter,
        sampling=sampling,
        **changes,
    )


def tokens(outputs: Iterable[RequestOutput], request_id: str) -> list[int]:
    return [token for output in outputs if output.request_id == request_id for token in output.token_ids]


def ends(outputs: Iterable[RequestOutput]) -> dict[str, str | None]:
    """The end of each request: its finish reason, or its error's code."""
    return {o.request_id: o.error.code if o.error else o.finish_reason for o in outputs if o.finished}


def steps(engine: Engine, number: int) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for _ in range(number):
        outputs += engine.step()
        engine.check_integrity()
    return outputs


def finish(engine: Engine, background: QueuedExecutor | None = None) -> list[RequestOutput]:
    """Step until all work is done, running one background task before each step."""
    outputs: list[RequestOutput] = []
    while engine.has_work:
        if background is not None:
            background.run()
        outputs += steps(engine, 1)
    return outputs


@pytest.fixture(scope="module")
def answers(adapter_folders: dict[str, str], prompt: Prompt) -> dict[str | None, list[int]]:
    """Every adapter's answer, loaded and run one at a time."""
    local = make_engine()
    for name, path in adapter_folders.items():
        local.engine.load_adapter(name, path)
    found: dict[str | None, list[int]] = {}
    for adapter in (None, *adapter_folders):
        found[adapter] = tokens(local.run([ask(prompt, "r", adapter)])["r"], "r")
    assert len({tuple(tokens) for tokens in found.values()}) == len(found), "equal answers would prove nothing"
    return found


def test_a_cold_adapter_never_stalls_the_running_batch(
    adapter_folders: dict[str, str], prompt: Prompt, answers: dict[str | None, list[int]], background: QueuedExecutor
) -> None:
    engine = make_engine(background).engine
    engine.register_adapters(adapter_folders)
    (status, *_) = engine.adapters()
    assert not status.loaded and not status.version and not status.mergeable and not background.waiting
    engine.add(ask(prompt, "cold", "wide8"))
    engine.add(ask(prompt, "base", None))
    # Nothing is read yet: every step is the running request's. A GPU's last token comes with one more call.
    num_calls = ANSWER + (device.name != "cpu")
    outputs = steps(engine, num_calls)
    assert tokens(outputs, "base") == answers[None] and ends(outputs) == {"base": "length"}
    engine.add(ask(prompt, "next", None))
    assert background.run(), "the adapter is queued for reading"
    outputs = steps(engine, num_calls)
    assert tokens(outputs, "next") == answers[None] and not engine.parts.device.pool.resident
    assert engine.stats().host_adapter_bytes == engine.parts.registry.get("wide8").num_bytes
    assert background.run(), "the adapter is queued for loading"
    assert not background.waiting
    outputs = finish(engine)
    assert tokens(outputs, "cold") == answers["wide8"]
    (status,) = (status for status in engine.adapters() if status.name == "wide8")
    assert status.loaded and status.version and status.resident


def test_adapters_of_unadmitted_requests_are_read_and_not_loaded(
    adapter_folders: dict[str, str], prompt: Prompt, answers: dict[str | None, list[int]], background: QueuedExecutor
) -> None:
    config = EngineConfig(model=FAMILY, arena_bytes=64 * 2**20, max_context=256, block_size=8, max_batch_size=1)
    engine = Engine(config, model=build_model(FAMILY), executor=background)
    engine.register_adapters(adapter_folders)
    engine.add(ask(prompt, "inside", None, max_ttft_s=1e6))
    outputs = steps(engine, 2)
    engine.add(ask(prompt, "outside", "wide8", max_ttft_s=1e6))
    engine.add(ask(prompt, "behind", "narrow4", max_ttft_s=1e6))
    outputs += steps(engine, 2)
    assert not ends(outputs) and not engine.parts.scheduler.demand.needed_adapters, "one at a time is admitted here"
    assert background.run() and background.run() and not background.waiting, "only these two are queued for reading"
    outputs += steps(engine, 1)
    assert [s.loaded for s in engine.adapters() if s.name in ("narrow4", "wide8")] == [True, True]
    assert not engine.parts.device.pool.resident and not engine.parts.device.pool.loading
    outputs += finish(engine, background)
    assert tokens(outputs, "outside") == answers["wide8"] and tokens(outputs, "behind") == answers["narrow4"]


def test_the_most_requested_adapters_are_read_first(
    adapter_folders: dict[str, str], prompt: Prompt, background: QueuedExecutor
) -> None:
    now = 0.0
    config = EngineConfig(model=FAMILY, arena_bytes=64 * 2**20, max_context=256)
    engine = Engine(config, model=build_model(FAMILY), clock=lambda: now, executor=background)
    names = [f"a{i}" for i in range(20)]
    engine.register_adapters(dict.fromkeys(names, adapter_folders["narrow4"]))
    for name in names[:10]:
        engine.add(ask(prompt, name, name))
        now += 1.0
    engine.step()
    assert len(background.waiting) == 8, "few are read ahead of the others"
    first: list[str] = []
    while len(first) < 10:
        background.run()
        engine.step()
        first += [s.name for s in engine.adapters() if s.loaded and s.name not in first]
    assert first == names[:10]


def test_a_step_waits_for_a_load_without_spinning(
    adapter_folders: dict[str, str], prompt: Prompt, background: QueuedExecutor
) -> None:
    engine = make_engine(background).engine
    engine.register_adapters(adapter_folders)
    engine.add(ask(prompt, "cold", "wide8"))
    assert steps(engine, 3) == []
    stats = engine.stats()
    assert stats.num_steps == 0 and stats.num_load_waits == 3 and stats.load_wait_s >= 3 * 0.004


def test_many_at_once_over_threads_and_a_tiny_arena(
    adapter_folders: dict[str, str], prompt: Prompt, answers: dict[str | None, list[int]]
) -> None:
    local = make_engine(num_bytes=128 * 65536)
    engine = local.engine
    copies = {f"{name}-{i}": path for i in range(6) for name, path in adapter_folders.items()}
    engine.register_adapters(copies)
    outputs = local.run(ask(prompt, name, name) for name in copies)
    for name in copies:
        assert tokens(outputs[name], name) == answers[name.rpartition("-")[0]], name
    stats = engine.stats()
    assert stats.num_adapter_loads >= len(copies) > stats.num_resident_adapters
    engine.check_integrity()


# -- reloading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("done", ["nothing", "read", "copied"])
def test_a_reload_while_the_old_content_is_loading(
    done: str,
    adapter_folders: dict[str, str],
    prompt: Prompt,
    answers: dict[str | None, list[int]],
    background: QueuedExecutor,
) -> None:
    engine = make_engine(background).engine
    engine.register_adapters({"a": adapter_folders["wide8"]})
    engine.add(ask(prompt, "before", "a"))
    outputs = steps(engine, 1)
    for _ in range(["nothing", "read", "copied"].index(done)):
        background.run()
        outputs += steps(engine, 1)
    engine.load_adapter("a", adapter_folders["narrow4"])
    engine.add(ask(prompt, "after", "a"))
    outputs += finish(engine, background)
    assert tokens(outputs, "before") == answers["wide8"] and tokens(outputs, "after") == answers["narrow4"]
    # The old registration holds no memory.
    assert len(engine.parts.device.pool.resident) == 1 == engine.stats().num_adapters
    assert engine.stats().host_adapter_bytes == engine.parts.registry.get("a").num_bytes


def test_registering_a_name_again_serves_the_new_weights_at_once(
    adapter_folders: dict[str, str], prompt: Prompt, answers: dict[str | None, list[int]]
) -> None:
    local = make_engine()
    local.engine.load_adapter("a", adapter_folders["wide8"])
    assert tokens(local.run([ask(prompt, "r", "a")])["r"], "r") == answers["wide8"]
    local.engine.register_adapters({"a": adapter_folders["narrow4"]})
    assert tokens(local.run([ask(prompt, "r", "a")])["r"], "r") == answers["narrow4"]
    assert local.engine.stats().host_adapter_bytes == local.engine.parts.registry.get("a").num_bytes
    local.engine.pin_adapter("a", True)
    with pytest.raises(BadRequest, match="'a' is pinned"):
        local.engine.register_adapters({"b": adapter_folders["wide8"], "a": adapter_folders["wide8"]})
    assert [status.name for status in local.engine.adapters()] == ["a"]


def test_loading_the_same_content_again_changes_nothing(adapter_folders: dict[str, str], prompt: Prompt) -> None:
    local = make_engine()
    first = local.engine.load_adapter("a", adapter_folders["wide8"])
    local.run([ask(prompt, "r", "a")])
    again = local.engine.load_adapter("a", adapter_folders["wide8"])
    assert again.version == first.version and again.resident, "it stays on the device"


def test_registering_is_all_or_nothing(adapter_folders: dict[str, str], tmp_path: Path) -> None:
    engine = make_engine().engine
    with pytest.raises(BadAdapter, match=r"no adapter_config\.json"):
        engine.register_adapters({**adapter_folders, "bad": str(tmp_path)})
    with pytest.raises(OverCapacity, match="adapter 'everywhere64' needs"):
        make_engine(num_bytes=8 * 65536).engine.register_adapters(adapter_folders)
    assert engine.adapters() == ()


# -- errors -----------------------------------------------------------------------------------------------------------


def spoiled(adapter_folders: dict[str, str], folder: Path) -> str:
    """An adapter with a valid header and a non-finite value."""
    shutil.copytree(adapter_folders["narrow4"], folder)
    tensors = load_file(str(folder / "adapter_model.safetensors"))
    tensors[min(tensors)][0, 0] = torch.inf
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    return str(folder)


def test_an_invalid_adapter_fails_only_its_own_requests(
    adapter_folders: dict[str, str],
    prompt: Prompt,
    answers: dict[str | None, list[int]],
    background: QueuedExecutor,
    tmp_path: Path,
) -> None:
    engine = make_engine(background).engine
    engine.register_adapters({"bad": spoiled(adapter_folders, tmp_path / "bad"), "good": adapter_folders["wide8"]})
    for name, adapter in (("one", "bad"), ("two", "bad"), ("other", "good")):
        engine.add(ask(prompt, name, adapter))
    outputs = finish(engine, background)
    assert ends(outputs) == {"one": "bad_adapter", "two": "bad_adapter", "other": "length"}
    assert tokens(outputs, "other") == answers["wide8"]
    (error,) = {o.error.message for o in outputs if o.error}
    assert "not finite" in error and "adapter_model.safetensors" in error
    # From now on the error is known; the files are not read again.
    with pytest.raises(BadAdapter, match="not finite"):
        engine.add(ask(prompt, "three", "bad"))
    (status,) = (status for status in engine.adapters() if status.name == "bad")
    assert not status.loaded and status.error == error
    engine.load_adapter("bad", adapter_folders["narrow4"])
    engine.add(ask(prompt, "healed", "bad"))
    assert tokens(finish(engine, background), "healed") == answers["narrow4"]


def test_files_that_changed_after_registration_are_refused(
    adapter_folders: dict[str, str], prompt: Prompt, background: QueuedExecutor, tmp_path: Path
) -> None:
    """The served content must match the registered header (heads, vision side, size)."""
    engine = make_engine(background).engine
    path = shutil.copytree(adapter_folders["narrow4"], tmp_path / "a")
    engine.register_adapters({"a": str(path)})
    shutil.rmtree(path)
    shutil.copytree(adapter_folders["everywhere64"], path)
    engine.add(ask(prompt, "r", "a"))
    (last,) = (output for output in finish(engine, background) if output.finished)
    assert last.error is not None and "changed since it was registered as 'a'" in last.error.message


def test_a_failed_copy_fails_only_its_requests(
    adapter_folders: dict[str, str], prompt: Prompt, answers: dict[str | None, list[int]], background: QueuedExecutor
) -> None:
    engine = make_engine(background).engine
    engine.register_adapters(adapter_folders)
    engine.add(ask(prompt, "lost", "wide8"))
    engine.add(ask(prompt, "base", None))
    outputs = steps(engine, 1)
    background.run()
    outputs += steps(engine, 1)
    future, _ = background.waiting.popleft()
    assert engine.stats().adapter_bytes > 0
    future.set_exception(RuntimeError("the bus is down"))
    outputs += finish(engine)
    assert ends(outputs) == {"lost": "step_failed", "base": "length"} and tokens(outputs, "base") == answers[None]
    assert engine.stats().adapter_bytes == 0
    engine.add(ask(prompt, "again", "wide8"))
    assert tokens(finish(engine, background), "again") == answers["wide8"]


# -- unloading --------------------------------------------------------------------------------------------------------


def held(engine: Engine) -> tuple[int, int, int, int]:
    """Bytes that an engine without requests holds for adapters: arena, host memory, vision cache; and KV."""
    stats = engine.stats()
    return stats.adapter_bytes, stats.host_adapter_bytes, stats.vision_cache_bytes, stats.kv_bytes


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("moment", ["registered", "reading", "read", "copying", "running"])
def test_unloading_at_any_time_frees_every_byte(
    moment: str,
    drain: bool,
    adapter_folders: dict[str, str],
    prompt: Prompt,
    answers: dict[str | None, list[int]],
    background: QueuedExecutor,
) -> None:
    engine = make_engine(background).engine
    engine.register_adapters({"a": adapter_folders["everywhere64"]})
    number = ["registered", "reading", "read", "copying", "running"].index(moment)
    outputs: list[RequestOutput] = []
    if number:
        engine.add(ask(prompt, "one", "a"))
        engine.add(ask(prompt, "two", "a"))
        outputs += steps(engine, 1)
    for _ in range(number // 2):
        background.run()
        if moment != "read":
            outputs += steps(engine, 1)
    outputs += engine.unload_adapter("a", drain)
    engine.check_integrity()
    assert engine.adapters() == ()
    with pytest.raises(UnknownAdapter):
        engine.add(ask(prompt, "late", "a"))
    if not drain:
        assert held(engine) == (0, 0, 0, 0), "freed before the call returns"
    outputs += finish(engine, background)
    assert ends(outputs) == ({} if not number else dict.fromkeys(("one", "two"), "length" if drain else "aborted"))
    if drain and number:
        assert tokens(outputs, "one") == tokens(outputs, "two") == answers["everywhere64"]
    assert held(engine) == (0, 0, 0, 0)
    assert not engine.parts.registry.num_known and not engine.parts.loader.users and not engine.close()


def test_unloading_frees_host_memory(adapter_folders: dict[str, str], prompt: Prompt) -> None:
    local = make_engine()
    local.engine.register_adapters(adapter_folders)
    local.run(ask(prompt, name, name) for name in adapter_folders)
    runs = [
        weakref.ref(local.engine.parts.registry.known(key).adapter) for key in local.engine.parts.device.pool.resident
    ]
    assert len(runs) == 4 and all(run() is not None for run in runs)
    for name in adapter_folders:
        local.engine.unload_adapter(name)
    gc.collect()
    assert not any(run() is not None for run in runs)
    arena, host, _, kv = held(local.engine)  # the image's base-model embeddings stay in the vision cache
    assert arena == host == kv == 0


def test_a_name_serves_new_content_while_the_old_one_drains(
    adapter_folders: dict[str, str], prompt: Prompt, answers: dict[str | None, list[int]], background: QueuedExecutor
) -> None:
    engine = make_engine(background).engine
    engine.register_adapters({"a": adapter_folders["wide8"]})
    engine.add(ask(prompt, "old", "a"))
    outputs = steps(engine, 1)
    assert engine.unload_adapter("a", drain=True) == ()
    engine.load_adapter("a", adapter_folders["narrow4"])
    engine.add(ask(prompt, "new", "a"))
    outputs += finish(engine, background)
    assert tokens(outputs, "old") == answers["wide8"] and tokens(outputs, "new") == answers["narrow4"]
    assert engine.stats().num_resident_adapters == 1


def test_cancelling_a_request_does_not_cancel_the_load_of_its_adapter(
    adapter_folders: dict[str, str], prompt: Prompt, answers: dict[str | None, list[int]], background: QueuedExecutor
) -> None:
    engine = make_engine(background).engine
    engine.register_adapters(adapter_folders)
    engine.add(ask(prompt, "gone", "wide8"))
    steps(engine, 1)
    background.run()
    steps(engine, 1)
    last = engine.cancel("gone")
    assert last is not None and last.finish_reason == "cancelled" and not engine.has_work
    engine.check_integrity()
    engine.add(ask(prompt, "next", "wide8"))
    assert tokens(finish(engine, background), "next") == answers["wide8"]


def test_pinning_reads_and_loads_before_it_returns(adapter_folders: dict[str, str], prompt: Prompt) -> None:
    local = make_engine()
    local.engine.register_adapters(adapter_folders)
    status = local.engine.pin_adapter("wide8", True)
    assert status.loaded and status.resident and status.pinned
    local.engine.check_integrity()


def test_draining_through_the_engine_thread(
    adapter_folders: dict[str, str], prompt: Prompt, answers: dict[str | None, list[int]]
) -> None:
    local = make_engine()

    async def story() -> list[RequestOutput]:
        await local.register_adapters({"a": adapter_folders["wide8"]})
        stream = local.generate(ask(prompt, "r", "a"))
        outputs = [await anext(stream)]
        await local.unload_adapter("a", drain=True)
        with pytest.raises(UnknownAdapter):
            await local.pin_adapter("a", True)
        outputs += [output async for output in stream]
        assert (await local.stats()).adapter_bytes == 0
        await local.close()
        return outputs

    assert tokens(asyncio.run(story()), "r") == answers["wide8"]
