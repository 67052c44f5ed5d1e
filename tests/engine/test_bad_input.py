"""Bad input gets a clear, typed error, and all other requests are served normally."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, BitsAndBytesConfig, Qwen2VLConfig

from heads import HeadSpec, TaskHead, save_heads
from tests.engine.asking import ask, finish
from tests.families import IMAGE, build_model, make_prompt
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import (
    BadAdapter,
    BadConfig,
    BadRequest,
    PromptTooLong,
    UnknownAdapter,
    UnknownHead,
    UnsupportedModel,
    VLoraError,
)
from vlora.models.families import family_of
from vlora.models.stored_quantized import stored_format
from vlora.types import Request, RequestOutput, SamplingParams, TensorValue

FAMILY = "llava"
PROMPT = make_prompt(FAMILY, build_model(FAMILY), 0, num_images=1)


@pytest.fixture(scope="module")
def folders(adapter_folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapter folders; `wide8` has a head."""
    folder = shutil.copytree(adapter_folders["wide8"], tmp_path_factory.mktemp("adapters") / "wide8")
    spec = HeadSpec(
        name="kind", task="classification", labels=("cat", "dog"), prompt="what is it", num_frames=1, hidden_size=64
    )
    weight = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    save_heads(str(folder), {"kind": TaskHead(spec, weight, torch.zeros(2))})
    return {**adapter_folders, "wide8": str(folder)}


@pytest.fixture
def local(folders: dict[str, str], llava_engine: Callable[..., LocalEngine]) -> LocalEngine:
    return llava_engine(folders, arena_bytes=64 * 2**20)


def request(name: str = "good", adapter: str | None = "wide8", **changes: Any) -> Request:
    return ask(PROMPT, name, adapter, 8, **changes)


def image(**changes: Any) -> tuple[Any, ...]:
    return (msgspec.structs.replace(PROMPT.vision[0], **changes),)


SHORT = {"pixel_values": TensorValue("float32", (1, 3, 16, 16), b"\0" * 12)}
WRONG = {"pixel_values": TensorValue("float32", (1, 3, 5, 5), b"\0" * 300)}
BAD_REQUESTS: dict[str, tuple[dict[str, Any], type[VLoraError], str]] = {
    "unknown adapter": ({"adapter": "nobody"}, UnknownAdapter, "wide8"),
    "unknown head": ({"head": "color"}, UnknownHead, "kind"),
    "head of another adapter": ({"adapter": "everywhere64", "head": "kind"}, UnknownHead, "none"),
    "beyond context": ({"sampling": SamplingParams(max_tokens=10_000)}, PromptTooLong, "256"),
    "token out of range": ({"prompt_ids": (5, 4711), "vision": ()}, BadRequest, "4711"),
    "image without placeholder": ({"prompt_ids": (5, 6)}, BadRequest, "placeholder"),
    "placeholder without image": ({"vision": ()}, BadRequest, "placeholder"),
    "placeholder in a text": ({"prompt_ids": (5, IMAGE), "vision": ()}, BadRequest, "placeholder"),
    "pixels cut short": ({"vision": image(content_hash="s", fields=SHORT)}, BadRequest, "cannot be read"),
    "pixels of the wrong size": ({"vision": image(content_hash="w", fields=WRONG)}, BadRequest, "cannot be encoded"),
    "pixels left out": ({"vision": image(content_hash="n", fields={})}, BadRequest, "cannot be encoded: KeyError"),
    "empty prompt": ({"prompt_ids": (), "vision": ()}, BadRequest, "empty"),
    "used request id": ({"name": "good"}, BadRequest, "already in use"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_fails_alone_with_the_reason(case: str, local: LocalEngine) -> None:
    changes, error, text = BAD_REQUESTS[case]
    engine = local.engine
    alone = local.run([request()])["good"]
    engine.add(request())
    failed: list[RequestOutput] = []
    try:
        bad = request(**{"name": "x", **changes})
        engine.add(bad)
    except VLoraError as refused:
        found: Exception = refused
        outputs = finish(engine)
    else:
        outputs = finish(engine)
        failed = [output for output in outputs if output.request_id == bad.request_id]
        assert [output.finish_reason for output in failed] == ["error"] and failed[0].error is not None
        found = failed[0].error.to_exception()
    assert isinstance(found, error) and text in str(found)
    assert [o.token_ids for o in outputs if o not in failed] == [o.token_ids for o in alone]
    assert engine.stats().free_blocks > 0 and engine.stats().num_running == 0


def test_a_failing_batch_fails_only_its_requests(local: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(local.engine.parts.device.hf_model, "forward", broken)
        error = local.run([request("lost")])["lost"][-1].error
    assert error is not None and error.code == "step_failed" and "out of luck" in error.message
    assert local.run([request()])["good"][-1].finish_reason == "length"
    local.engine.check_integrity()


def stored(settings: object) -> Qwen2VLConfig:
    config = Qwen2VLConfig()
    config.quantization_config = settings
    return config


SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (AutoConfig.for_model("gemma3"), "both directions"),
        (Qwen2VLConfig(text_config=SLIDING), "sliding"),
        (stored({"quant_method": "hqq", "bits": 4}), "quant_method 'hqq'.*quantize fp8, int8 or int4 rounds"),
        (stored(BitsAndBytesConfig(load_in_8bit=True)), "quant_method 'bitsandbytes'.*quantize fp8, int8 or int4"),
    ],
    ids=["gemma3", "sliding", "a quantized checkpoint", "a quantized model"],
)
def test_other_models_are_refused_with_the_reason(config: Any, text: str) -> None:
    with pytest.raises(UnsupportedModel, match=text):
        family_of(config)
        stored_format(config)


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
def test_invalid_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    model = None if settings["model"] != FAMILY or "device" in settings else build_model(FAMILY)
    with pytest.raises(BadConfig, match=text):
        LocalEngine(EngineConfig(**settings), model=model)


def test_asyncio_calls_of_the_local_engine(local: LocalEngine) -> None:
    alone = [token for output in local.run([request()])["good"] for token in output.token_ids]
    long = SamplingParams(max_tokens=200, ignore_eos=True)

    async def collect(made: Request) -> list[int]:
        return [token async for output in local.generate(made) for token in output.token_ids]

    async def talk() -> None:
        assert await asyncio.gather(collect(request("a")), collect(request("b"))) == [alone, alone]
        refused = [o async for o in local.generate(request("c", adapter="nobody"))]
        assert refused[-1].error is not None and refused[-1].error.code == "unknown_adapter"
        # Closing a stream early cancels its request.
        stream = local.generate(request("d", sampling=long))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        # A timeout cancels its request too.
        with pytest.raises(TimeoutError):
            async for _ in local.generate(request("e", sampling=long), asyncio.get_running_loop().time() + 0.01):
                pass
        stats = await local.stats()
        assert stats.num_running == 0 and stats.num_waiting == 0
        with pytest.raises(BadAdapter):
            await local.load_adapter("bad", "/nowhere")
        await local.close()

    asyncio.run(talk())
