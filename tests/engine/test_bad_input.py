"""Bad input gets a clear, typed error, and all other requests are served normally."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoConfig, BitsAndBytesConfig, Qwen2VLConfig

from heads import HeadSpec, TaskHead, save_heads
from tests.families import IMAGE, Prompt, build_model, make_prompt
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import (
    BadAdapter,
    BadConfig,
    BadRequest,
    OverCapacity,
    PromptTooLong,
    UnknownAdapter,
    UnknownHead,
    UnsupportedModel,
    VLoraError,
)
from vlora.models.families import family_of
from vlora.types import Request, RequestOutput, SamplingParams, TensorValue

FAMILY = "llava"


@pytest.fixture(scope="module")
def folders(adapter_folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapter folders; `wide8` has a head."""
    with_head = shutil.copytree(adapter_folders["wide8"], tmp_path_factory.mktemp("adapters") / "wide8")
    folders = {**adapter_folders, "wide8": str(with_head)}
    spec = HeadSpec(
        name="kind", task="classification", labels=("cat", "dog"), prompt="what is it", num_frames=1, hidden_size=64
    )
    generator = torch.Generator().manual_seed(0)
    head = TaskHead(spec, torch.randn(2, 64, generator=generator), torch.zeros(2))
    save_heads(folders["wide8"], {"kind": head})
    return folders


@pytest.fixture
def local(folders: dict[str, str]) -> LocalEngine:
    local = LocalEngine(EngineConfig(model=FAMILY, arena_bytes=64 * 2**20, max_context=256), model=build_model(FAMILY))
    for name in ("wide8", "everywhere64"):
        local.engine.load_adapter(name, folders[name])
    return local


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return make_prompt(FAMILY, build_model(FAMILY), 0, num_images=1)


def request(prompt: Prompt, name: str = "good", **changes: object) -> Request:
    base = Request(
        request_id=name,
        prompt_ids=prompt.prompt_ids,
        vision=prompt.vision,
        adapter="wide8",
        sampling=SamplingParams(max_tokens=8, ignore_eos=True),
    )
    return msgspec.structs.replace(base, **changes)  # type: ignore[return-value]


def bad_requests(prompt: Prompt) -> dict[str, tuple[Request, type[VLoraError], str]]:
    image = prompt.vision[0]
    short = TensorValue("float32", (1, 3, 16, 16), b"\0" * 12)
    wrong = TensorValue("float32", (1, 3, 5, 5), b"\0" * 300)
    return {
        "unknown adapter": (request(prompt, "x", adapter="nobody"), UnknownAdapter, "wide8"),
        "unknown head": (request(prompt, "x", head="color"), UnknownHead, "kind"),
        "head of another adapter": (request(prompt, "x", adapter="everywhere64", head="kind"), UnknownHead, "none"),
        "beyond context": (request(prompt, "x", sampling=SamplingParams(max_tokens=10_000)), PromptTooLong, "256"),
        "token out of range": (request(prompt, "x", prompt_ids=(5, 4711), vision=()), BadRequest, "4711"),
        "image without placeholder": (request(prompt, "x", prompt_ids=(5, 6)), BadRequest, "placeholder"),
        "placeholder without image": (request(prompt, "x", vision=()), BadRequest, "placeholder"),
        "pixels cut short": (
            request(
                prompt, "x", vision=(msgspec.structs.replace(image, content_hash="s", fields={"pixel_values": short}),)
            ),
            BadRequest,
            "cannot be read",
        ),
        "pixels of the wrong size": (
            request(
                prompt, "x", vision=(msgspec.structs.replace(image, content_hash="w", fields={"pixel_values": wrong}),)
            ),
            BadRequest,
            "cannot be encoded",
        ),
        "pixels left out": (
            request(prompt, "x", vision=(msgspec.structs.replace(image, content_hash="n", fields={}),)),
            BadRequest,
            "cannot be encoded: KeyError",
        ),
        "used request id": (request(prompt, "good"), BadRequest, "already in use"),
    }


CASES = tuple(bad_requests(Prompt({}, (1,), make_prompt(FAMILY, build_model(FAMILY), 0, num_images=1).vision)))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_bad_request_fails_alone_with_the_reason(case: str, local: LocalEngine, prompt: Prompt) -> None:
    bad, error, text = bad_requests(prompt)[case]
    alone = local.run([request(prompt)])["good"]
    engine = local.engine
    engine.add(request(prompt))
    outputs: list[RequestOutput] = []
    try:
        engine.add(bad)
    except VLoraError as refused:
        assert isinstance(refused, error) and text in str(refused)
    else:
        failed: list[RequestOutput] = []
        while engine.has_work:
            for output in engine.step():
                (failed if output.request_id == bad.request_id else outputs).append(output)
        assert [output.finish_reason for output in failed] == ["error"]
        assert failed[0].error is not None
        assert isinstance(failed[0].error.to_exception(), error) and text in failed[0].error.message
    while engine.has_work:
        outputs += engine.step()
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone]
    engine.check_integrity()
    assert engine.stats().free_blocks > 0 and engine.stats().num_running == 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop": ("",)}, "stop"),
    ],
)
def test_sampling_values_out_of_range(settings: dict[str, object], text: str) -> None:
    with pytest.raises(BadRequest, match=text):
        SamplingParams(**settings)  # type: ignore[arg-type]


def test_an_empty_prompt() -> None:
    with pytest.raises(BadRequest, match="empty"):
        Request(request_id="x", prompt_ids=())


def test_a_failing_batch_fails_only_its_requests(
    local: LocalEngine, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(local.engine.parts.device.hf_model, "forward", broken)
        lost = local.run([request(prompt, "lost")])["lost"]
    assert (
        lost[-1].error is not None and lost[-1].error.code == "step_failed" and "out of luck" in lost[-1].error.message
    )
    assert local.run([request(prompt)])["good"][-1].finish_reason == "length"
    local.engine.check_integrity()


def test_a_head_answers_in_one_pass(local: LocalEngine, prompt: Prompt) -> None:
    outputs = local.run([request(prompt, "head", head="kind"), request(prompt, "text")])
    (answer,) = outputs["head"]
    assert answer.finish_reason == "head" and answer.head is not None
    assert answer.head.label in ("cat", "dog") and abs(sum(answer.head.scores) - 1) < 1e-6
    assert answer.timings is not None and sum(answer.timings.steps_by_mode.values()) == 1
    assert outputs["text"][-1].finish_reason == "length"


def test_an_adapter_larger_than_its_share_of_memory(folders: dict[str, str]) -> None:
    local = LocalEngine(EngineConfig(model=FAMILY, arena_bytes=8 * 65536), model=build_model(FAMILY))
    with pytest.raises(OverCapacity, match="arena_bytes"):
        local.engine.load_adapter("everywhere64", folders["everywhere64"])
    assert local.engine.adapters() == ()


def test_running_requests_finish_on_the_old_version_of_a_reloaded_name(
    local: LocalEngine, folders: dict[str, str], prompt: Prompt, tmp_path: Path
) -> None:
    old = [o.token_ids for o in local.run([request(prompt)])["good"]]
    new_folder = shutil.copytree(folders["narrow4"], tmp_path / "new")
    engine = local.engine
    engine.add(request(prompt))
    outputs = list(engine.step())
    engine.load_adapter("wide8", str(new_folder))
    engine.add(request(prompt, "after"))
    while engine.has_work:
        outputs += engine.step()
    assert [o.token_ids for o in outputs if o.request_id == "good"] == old
    assert [o.token_ids for o in outputs if o.request_id == "after"] != old
    first, second = engine.adapters()
    assert engine.adapters(most=1) == (first,) and engine.adapters(after=first.name) == (second,)
    assert len(engine.parts.device.pool.resident) <= 2
    engine.check_integrity()


def test_unloading_ends_its_requests_with_an_error(local: LocalEngine, prompt: Prompt) -> None:
    engine = local.engine
    engine.add(request(prompt))
    engine.add(request(prompt, "other", adapter="everywhere64"))
    engine.step()
    ended = engine.unload_adapter("wide8")
    assert [o.request_id for o in ended] == ["good"]
    assert ended[0].error is not None and "unloaded" in ended[0].error.message
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
    assert outputs[-1].request_id == "other" and outputs[-1].finish_reason == "length"
    with pytest.raises(UnknownAdapter):
        engine.unload_adapter("wide8")
    assert engine.parts.device.pool.resident == frozenset({engine.parts.registry.get("everywhere64").key})


def test_cancel_frees_everything(local: LocalEngine, prompt: Prompt) -> None:
    engine = local.engine
    free = engine.stats().free_blocks
    engine.add(request(prompt))
    engine.step()
    last = engine.cancel("good")
    assert last is not None and last.finish_reason == "cancelled"
    assert engine.cancel("good") is None
    assert not engine.has_work
    engine.unload_adapter("wide8")
    assert engine.stats().free_blocks >= free - 1
    engine.check_integrity()


def test_missed_deadline(local: LocalEngine, prompt: Prompt) -> None:
    outputs = local.run([request(prompt, max_latency_s=1e-6), request(prompt, "patient")])
    error = outputs["good"][-1].error
    assert error is not None and error.code == "deadline_missed"
    assert outputs["patient"][-1].finish_reason == "length"


def test_unsupported_families_are_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModel, match="both directions"):
        family_of(AutoConfig.for_model("gemma3"))
    sliding = Qwen2VLConfig(text_config={"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1})
    with pytest.raises(UnsupportedModel, match="sliding"):
        family_of(sliding)


@pytest.mark.parametrize(
    ("stored", "method"),
    [({"quant_method": "hqq", "bits": 4}, "hqq"), (BitsAndBytesConfig(load_in_8bit=True), "bitsandbytes")],
    ids=["a checkpoint's", "a model's"],
)
def test_weights_that_are_stored_quantized_are_refused_by_name(stored: object, method: str) -> None:
    config = Qwen2VLConfig()
    config.quantization_config = stored
    with pytest.raises(UnsupportedModel, match=f"quant_method '{method}'.*quantize fp8, int8 or int4 rounds"):
        family_of(config)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"model": FAMILY, "device": "warp"}, "warp"),
        ({"model": FAMILY, "policy": "best"}, "best.*algorithm1"),
        ({"model": FAMILY, "arena_bytes": 1}, "arena"),
        ({"model": FAMILY, "theta_s": 0}, "theta_s"),
        ({"model": FAMILY, "max_batch_size": 64, "max_step_tokens": 8}, "max_step_tokens"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, object], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = None if settings["model"] != FAMILY or "device" in settings else build_model(FAMILY)
    with pytest.raises(BadConfig, match=text):
        LocalEngine(EngineConfig(**settings), model=model)  # type: ignore[arg-type]


def test_asyncio_calls_of_the_local_engine(local: LocalEngine, prompt: Prompt) -> None:
    alone = [o.token_ids for o in local.run([request(prompt)])["good"]]

    async def talk() -> None:
        async def collect(made: Request) -> list[tuple[int, ...]]:
            return [o.token_ids async for o in local.generate(made)]

        both = await asyncio.gather(collect(request(prompt, "a")), collect(request(prompt, "b")))
        assert both == [alone, alone]
        refused = [o async for o in local.generate(request(prompt, "c", adapter="nobody"))]
        assert refused[-1].error is not None and refused[-1].error.code == "unknown_adapter"
        # Closing a stream early cancels its request.
        stream = local.generate(request(prompt, "d", sampling=SamplingParams(max_tokens=200, ignore_eos=True)))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        # A timeout cancels its request too.
        with pytest.raises(TimeoutError):
            long = request(prompt, "e", sampling=SamplingParams(max_tokens=200, ignore_eos=True))
            async for _ in local.generate(long, asyncio.get_running_loop().time() + 0.01):
                pass
        stats = await local.stats()
        assert stats.num_running == 0 and stats.num_waiting == 0
        with pytest.raises(BadAdapter):
            await local.load_adapter("bad", "/nowhere")
        await local.close()

    asyncio.run(talk())


def test_image_token_in_prompt_ids_needs_an_image(local: LocalEngine) -> None:
    outputs = local.run([Request(request_id="x", prompt_ids=(5, IMAGE))])
    assert outputs["x"][-1].error is not None and "placeholder" in outputs["x"][-1].error.message
