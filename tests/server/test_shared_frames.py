"""A frame with many questions: its picture is encoded once, and activated adapters share the prompt before theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from heads import HeadSpec, TaskHead, save_heads
from tests.server.running import png
from tools.embedded_model.model import build_model
from tools.embedded_model.processor import build_processor
from vlora.client.values import FrameResult, StreamOptions, TextQuestion
from vlora.config import EngineConfig, ServerConfig
from vlora.engine import LocalEngine
from vlora.models import InputProcessor
from vlora.server.frontend import FrontEnd
from vlora.server.metrics import Metrics
from vlora.server.security.limits import ByteBudget, ByteCharge
from vlora.server.streams.frame_questions import images_per_frame
from vlora.server.streams.frame_stream import StreamSession

pytestmark = pytest.mark.slow

QUESTION = "what digit is shown ?"
NUM_ADAPTERS = 3
BLOCK = 16  # tokens


def write(folder: Path, *, activated: bool) -> dict[str, str]:
    """The model, and adapters with a head each, invoked by the first two words of the question. Paths by name."""
    build_model(0).save_pretrained(folder / "model")
    build_processor().save_pretrained(folder / "model")
    invocation = list(build_processor().tokenizer("what digit", add_special_tokens=False)["input_ids"])
    for number in range(NUM_ADAPTERS):
        config = LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=r".*language_model.*\.(q|k|v|o|gate|up|down)_proj",
            init_lora_weights=False,
            task_type="CAUSAL_LM",
            alora_invocation_tokens=invocation if activated else None,
        )
        torch.manual_seed(number)
        get_peft_model(build_model(0), config).save_pretrained(str(folder / f"a{number}"))
        spec = HeadSpec(
            name="letter", task="classification", labels=("a", "b"), prompt=QUESTION, num_frames=1, hidden_size=256
        )
        save_heads(folder / f"a{number}", {"letter": TaskHead(spec, torch.randn(2, 256), torch.zeros(2))})
    return {f"a{number}": str(folder / f"a{number}") for number in range(NUM_ADAPTERS)}


async def answered(front: FrontEnd, frames: list[bytes], **options: Any) -> list[FrameResult]:
    stream_options = StreamOptions(drop="none", **options)
    num_images = await images_per_frame(stream_options, front.adapters, front.config)
    stream = StreamSession(front, stream_options, num_images, Metrics())
    results: list[FrameResult] = []
    for number, frame in enumerate(frames):
        assert await stream.send(number, (frame,), 10, ByteCharge(ByteBudget(1)))
        results += (await stream.pull(number - 1, 60)).results
    return results


def make_front_end(folder: Path) -> FrontEnd:
    engine = LocalEngine(EngineConfig(model=str(folder / "model"), dtype="float32", arena_bytes=2**28))
    return FrontEnd(engine, InputProcessor.from_pretrained(str(folder / "model")), ServerConfig())


@pytest.mark.parametrize("activated", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
async def test_a_frame_is_encoded_once_and_its_kv_shared(tmp_path: Path, activated: bool) -> None:
    paths = write(tmp_path, activated=activated)
    heads = tuple((name, "letter") for name in paths)
    questions = tuple(TextQuestion(QUESTION, name, 4) for name in paths)
    frames = [png(brightness, (96, 64)) for brightness in (40, 200)]
    front, separate = make_front_end(tmp_path), make_front_end(tmp_path)
    for name, path in paths.items():
        await front.adapters.load(name, path)
        await separate.adapters.load(name, path)
    results = await answered(front, frames, heads=heads, questions=questions)
    stats = await front.stats()
    assert stats.num_vision_encoded == len(frames)
    assert results[0].answers[-1].text is not None
    prompt = results[0].answers[-1].text.num_prompt_tokens
    shared = prompt // BLOCK * BLOCK  # the invocation is in the last block
    # An ordinary adapter shares only between its own head and question.
    per_frame = prompt + 5 * (prompt - shared) if activated else NUM_ADAPTERS * (2 * prompt - shared)
    assert stats.num_computed_tokens == len(frames) * per_frame
    assert stats.num_computed_tokens + stats.num_reused_tokens == len(frames) * 2 * NUM_ADAPTERS * prompt

    for place, (name, head) in enumerate(heads):
        alone = await answered(separate, frames, heads=((name, head),), questions=(questions[place],))
        for together, single in zip(results, alone, strict=True):
            expected, got = single.answer, together.answers[place].answer
            assert got is not None and expected is not None
            assert got.scores == pytest.approx(expected.scores, abs=1e-4)
            assert together.answers[NUM_ADAPTERS + place].label == single.answers[1].label
    await front.close()
    await separate.close()
