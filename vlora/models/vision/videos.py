"""Videos as the Qwen families' own inputs: frames with their times, processed without torchvision.

The frames are those that the caller chose; none is left out. Frames are resized by Pillow, as images are, where
transformers' video processors use torchvision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vlora.errors import BadImage, BadRequest
from vlora.models.vision.images import Clip, upright_rgb

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SIDES = {"qwen2_vl": 28, "qwen2_5_vl": 28, "qwen3_vl": 32}  # of the tokens that transformers' default limits count
VIDEO_FAMILIES = frozenset(_SIDES)
_MIN_TOKENS, _MAX_TOKENS = 128, 768
_MAX_VIDEO_TOKENS = {"qwen2_vl": 128_000, "qwen2_5_vl": 128_000, "qwen3_vl": 768}
_MAX_RATIO = 200  # of the sides of a frame


class ProcessedClip(NamedTuple):
    """fields: the vision tower's inputs. num_tokens: of its placeholders. stamps: time of each of its steps, in
    seconds."""

    fields: dict[str, np.ndarray[Any, Any]]
    num_tokens: int
    stamps: list[float]


def video_settings(path: str) -> dict[str, Any]:
    """Settings of a checkpoint's video processor; empty if it has none. Raises OSError for a broken file."""
    # Imported here, because the module is slow to import.
    from transformers.utils import VIDEO_PROCESSOR_NAME, cached_file
    from transformers.video_processing_utils import BaseVideoProcessor

    try:
        settings, _ = BaseVideoProcessor.get_video_processor_dict(path)
    except OSError:
        if cached_file(path, VIDEO_PROCESSOR_NAME, _raise_exceptions_for_missing_entries=False) is not None:
            raise
        return {}
    return dict(settings)


class VideoProcessor:
    """Frames to patches and placeholders, as the families' processors in transformers, for frames that are sampled.

    token: the marker of a video in a prompt, and its placeholder.

    Args:
        tokenizer, image_processor: of the same checkpoint; the latter normalizes frames and divides them into patches.
        settings: of the checkpoint's video processor; values that are missing are transformers' defaults.

    Raises:
        BadRequest: the family takes no videos.
    """

    def __init__(
        self, config: Any, tokenizer: PreTrainedTokenizerBase, image_processor: Any, settings: Mapping[str, Any]
    ) -> None:
        model_type = config.model_type
        if model_type not in VIDEO_FAMILIES:
            raise BadRequest(f"a {model_type} model takes no videos here; send their frames as images")
        ids = [config.video_token_id, config.vision_start_token_id, config.vision_end_token_id]
        tokens: list[str] = list(tokenizer.convert_ids_to_tokens(ids))
        self.token, self._start, self._end = tokens
        self._model_type = model_type
        self._image_processor = image_processor
        self._merge = settings.get("merge_size") or image_processor.merge_size
        self._temporal = settings.get("temporal_patch_size") or image_processor.temporal_patch_size
        self._factor = (settings.get("patch_size") or image_processor.patch_size) * self._merge
        size = settings.get("size") or {}
        area = _SIDES[model_type] ** 2
        self._min = settings.get("min_pixels") or size.get("shortest_edge") or _MIN_TOKENS * area
        self._max = settings.get("max_pixels") or size.get("longest_edge") or _MAX_TOKENS * area
        self._capped = bool(settings.get("cap_pixels_per_frame"))
        self._max_tokens = settings.get("max_video_tokens") or _MAX_VIDEO_TOKENS[model_type]
        self._resizes = settings.get("do_resize", True)
        self._normalization = {name: settings[name] for name in ("image_mean", "image_std") if settings.get(name)}

    def process(self, clip: Clip) -> ProcessedClip:
        """Raises BadImage if the frames have different sizes or a side is too long."""
        sizes = {frame.size for frame in clip.frames}
        if len(sizes) > 1:
            raise BadImage(
                f"the frames of a video have different sizes: {', '.join(f'{w}x{h}' for w, h in sorted(sizes))}"
            )
        ((width, height),) = sizes
        if self._resizes:
            rows, columns = self.size_of(len(clip.frames), height, width)
            frames = [
                upright_rgb(frame).resize((columns, rows), self._image_processor.resample) for frame in clip.frames
            ]
        else:
            frames = [upright_rgb(frame) for frame in clip.frames]
        made = [
            self._image_processor(frame, do_resize=False, return_tensors="np", **self._normalization)
            for frame in frames
        ]
        patches = np.stack([self._of_one_frame(one["pixel_values"]) for one in made])  # [frames, n, channels, p * p]
        missing = -len(patches) % self._temporal
        patches = np.concatenate([patches, patches[-1:].repeat(missing, 0)])
        steps = len(patches) // self._temporal
        joined = patches.reshape(steps, self._temporal, *patches.shape[1:]).transpose(0, 2, 3, 1, 4)
        times = [*clip.times, *[clip.times[-1]] * missing]
        _, grid_rows, grid_columns = made[0]["image_grid_thw"][0].tolist()
        fields = {
            "pixel_values_videos": joined.reshape(steps * patches.shape[1], -1),
            "video_grid_thw": np.array([[steps, grid_rows, grid_columns]]),
        }
        if self._model_type == "qwen2_5_vl":
            gap = (clip.times[-1] - clip.times[0]) / (len(clip.times) - 1) if len(clip.times) > 1 else 1.0
            fields["second_per_grid_ts"] = np.array([self._temporal * gap], np.float32)
        first, last = times[:: self._temporal], times[self._temporal - 1 :: self._temporal]
        num_tokens = steps * grid_rows * grid_columns // self._merge**2
        return ProcessedClip(fields, num_tokens, [(begin + end) / 2 for begin, end in zip(first, last, strict=True)])

    def bare(self, prompt: str) -> str:
        """A prompt with markers that placeholders replace: Qwen3-VL's replace the tokens around the marker too."""
        if self._model_type != "qwen3_vl":
            return prompt
        return prompt.replace(f"{self._start}{self.token}{self._end}", self.token)

    def placeholders(self, clip: ProcessedClip) -> str:
        """The text that replaces the marker. Qwen3-VL's has the time of each step in words."""
        if self._model_type != "qwen3_vl":
            return self.token * clip.num_tokens
        step = f"{self._start}{self.token * (clip.num_tokens // len(clip.stamps))}{self._end}"
        return "".join(f"<{stamp:.1f} seconds>{step}" for stamp in clip.stamps)

    def size_of(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """The size [height, width] to which frames are resized. Raises BadImage if a side is too long."""
        if max(height, width) > _MAX_RATIO * min(height, width):
            raise BadImage(f"a frame of {width}x{height} pixels: one side is over {_MAX_RATIO} times the other")
        if self._model_type == "qwen3_vl":
            return self._size_of_volume(num_frames, height, width)
        most = self._max
        if self._capped:
            budget = int(self._max_tokens * self._factor**2 * 0.9)
            most = max(min(most, budget * self._temporal // num_frames), int(self._min * 1.05))
        return _within(height, width, 1, 1, self._factor, self._min, most)

    def _size_of_volume(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Qwen3-VL's limits are for all frames together."""
        num_frames = max(num_frames, self._temporal)  # a shorter clip repeats its last frame
        most = self._max
        if self._capped:
            share = min(self._max_tokens * self._factor**2, self._max // num_frames)
            most = max(share, int(self._min * 1.05)) * num_frames
        scale = max(1.0, self._factor / height, self._factor / width)
        height, width = int(height * scale), int(width * scale)
        rounded = round(num_frames / self._temporal) * self._temporal
        return _within(height, width, num_frames, rounded, self._factor, self._min, most)

    def _of_one_frame(self, patches: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Patches of one image, which repeat it over time, as [patches, channels, pixels]."""
        return patches.reshape(len(patches), 3, self._temporal, -1)[:, :, 0]


def _within(
    height: int, width: int, num_frames: int, rounded: int, factor: int, least: int, most: int
) -> tuple[int, int]:
    """Sides that are multiples of `factor`, with a number of pixels between two limits: transformers' `smart_resize`.

    Args:
        num_frames: that the limits count; `rounded` to whole time steps.
    """
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    volume = num_frames * height * width
    if rounded * rows * columns > most:
        beta = math.sqrt(volume / most)
        rows = max(factor, math.floor(height / beta / factor) * factor)
        columns = max(factor, math.floor(width / beta / factor) * factor)
    elif rounded * rows * columns < least:
        beta = math.sqrt(least / volume)
        rows, columns = math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
    return rows, columns
