"""Videos as frames with times become the Qwen families' own inputs, as transformers' video processors make them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from tests.families import build_model
from tests.processors import VIDEO_SETTINGS, image_processor, tokenizer, video_modules, write_checkpoint
from vlora.errors import BadImage, BadRequest
from vlora.models.processing import InputProcessor
from vlora.models.vision.images import Clip
from vlora.models.vision.videos import VideoProcessor

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def transformers_code() -> dict[str, Any]:
    return video_modules()


def clip(num_frames: int, size: tuple[int, int] = (40, 56), fps: float = 2.0) -> Clip:
    rng = np.random.default_rng(num_frames)
    frames = [Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)) for _ in range(num_frames)]
    return Clip(frames, [place / fps for place in range(num_frames)])


def processor_of(family: str, **settings: Any) -> VideoProcessor:
    config = build_model(family).config
    return VideoProcessor(config, tokenizer(), image_processor(family), {**VIDEO_SETTINGS, **settings})


@pytest.mark.parametrize("num_frames", [1, 2, 5, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_patches_are_those_of_transformers(family: str, num_frames: int, transformers_code: dict[str, Any]) -> None:
    shown, processor = clip(num_frames), processor_of(family)
    made = processor.process(shown)
    height, width = processor.size_of(num_frames, 40, 56)
    images = image_processor(family)
    resized = [frame.resize((width, height), Image.Resampling.BICUBIC) for frame in shown.frames]
    pixels = torch.stack([torch.from_numpy(np.array(frame)).permute(2, 0, 1) for frame in resized]).float() / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (images.image_mean, images.image_std))
    module = transformers_code[family]
    kind = module.Qwen3VLVideoProcessor if family == "qwen3_vl" else module.Qwen2VLVideoProcessor
    patches, *grid = kind.patchify(None, ((pixels - mean) / std)[None], 4, 2, 2)
    assert made.fields["video_grid_thw"].tolist() == [grid]
    torch.testing.assert_close(torch.from_numpy(made.fields["pixel_values_videos"]), patches[0], atol=1e-5, rtol=0)
    assert made.num_tokens == len(patches[0]) // 4
    timestamps: Any = Qwen3VLProcessor._calculate_timestamps  # noqa: SLF001
    assert made.stamps == timestamps(None, list(range(num_frames)), 2.0)
    if family == "qwen2_5_vl" and num_frames > 1:
        assert made.fields["second_per_grid_ts"].tolist() == [2 / 2.0]
    else:
        assert family == "qwen2_5_vl" or "second_per_grid_ts" not in made.fields


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_of_transformers(family: str, capped: bool, transformers_code: dict[str, Any]) -> None:
    """As `resize` of transformers computes them, which calls torchvision with the result."""
    module = transformers_code[family]
    kind = module.Qwen3VLVideoProcessor if family == "qwen3_vl" else module.Qwen2VLVideoProcessor
    seen: list[tuple[int, int]] = []

    class Sizes(kind):  # type: ignore[misc, valid-type]
        max_video_tokens = 40

        def __init__(self) -> None:
            """Without the defaults that need torchvision."""

    sizes = module.SizeDict(**VIDEO_SETTINGS["size"])  # type: ignore[arg-type]
    base = kind.__mro__[1]
    original = base.resize
    base.resize = lambda self, image, size, resample: seen.append((size.height, size.width))
    try:
        for num_frames in (2, 3, 4, 8, 30):
            for height, width in ((40, 56), (8, 90), (300, 200), (16, 16), (5, 7)):
                Sizes().resize(
                    torch.zeros(1, num_frames, 3, height, width), sizes, None, 8, 2, cap_pixels_per_frame=capped
                )
                own = processor_of(family, cap_pixels_per_frame=capped, max_video_tokens=40)
                assert own.size_of(num_frames, height, width) == seen[-1], (num_frames, height, width)
    finally:
        base.resize = original
    assert len(set(seen)) >= 5


def test_qwen3_has_the_time_of_each_step_in_words() -> None:
    processor = processor_of("qwen3_vl")
    made = processor.process(Clip(clip(3).frames, (0.5, 1.0, 4.0)))
    each = made.num_tokens // 2
    expected = "".join(f"<{time} seconds><vs>{'<video>' * each}<ve>" for time in ("0.8", "4.0"))
    assert processor.placeholders(made) == expected
    assert processor.bare("a <vs><video><ve> b") == "a <video> b"


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(folder, request.param)
    return folder


def test_bad_videos_are_refused(folder: Path) -> None:
    processor = InputProcessor.from_pretrained(str(folder))
    prompt = processor.ask("what is shown ?", ["video"])
    with pytest.raises(BadRequest, match=r"2 video markers .* but 1 videos were sent"):
        processor.encode(processor.ask("what is shown ?", ["video", "video"]), [clip(2)])
    with pytest.raises(BadRequest, match=r"0 image markers .* but 1 images were sent"):
        processor.encode(prompt, [clip(2), clip(1).frames[0]])
    mixed = Clip([clip(1).frames[0], clip(1, (8, 8)).frames[0]], (0, 1))
    with pytest.raises(BadImage, match=r"different sizes: 8x8, 56x40"):
        processor.encode(prompt, [mixed])
    with pytest.raises(BadImage, match="over 200 times"):
        processor.encode(prompt, [clip(2, (1, 300))])


def test_a_family_without_videos_refuses_them() -> None:
    config = build_model("llava").config
    processor = InputProcessor(config, tokenizer(), image_processor("llava"))
    with pytest.raises(BadRequest, match="llava model takes no videos here; send their frames as images"):
        processor.encode("what <video> ?", [clip(2)])
