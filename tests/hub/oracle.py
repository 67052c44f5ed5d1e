"""transformers and PEFT on a checkpoint: the prompt ids of its processor, and the tokens of its `generate`, in float32.

The processor is transformers' own class for the checkpoint. Without torchvision it has no video processor, so one with
transformers' division into patches takes its place, for frames that need no resizing.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer, BatchFeature
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.video_processing_utils import BaseVideoProcessor
from transformers.video_utils import VideoMetadata

from heads import HeadSpec, TaskHead, save_heads
from tests.hub import vocabularies
from tests.hub.checkpoints import CHECKPOINTS, QWEN_VL
from tests.processors import video_modules
from vlora.config import EngineConfig
from vlora.models.loading import load_model
from vlora.models.vision.images import Clip

HEAD = "kind"
Inputs = dict[str, Any]
"""Of transformers' `generate`."""


class _Videos:
    """Frames of a size that the checkpoint's video processor keeps, as transformers divides them into patches."""

    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def __init__(self, folder: Path, images: Any, *, qwen3: bool) -> None:
        try:
            settings, _ = BaseVideoProcessor.get_video_processor_dict(folder)
        except OSError:
            settings = {}
        modules = video_modules()
        self._kind = modules["qwen3_vl"].Qwen3VLVideoProcessor if qwen3 else modules["qwen2_vl"].Qwen2VLVideoProcessor
        self._mean, self._std = (
            torch.tensor(settings.get(name) or getattr(images, name))[:, None, None]
            for name in ("image_mean", "image_std")
        )
        self.patch_size, self.merge_size, self.temporal_patch_size = (
            settings.get(name) or getattr(images, name) for name in ("patch_size", "merge_size", "temporal_patch_size")
        )

    def __call__(self, videos: Any, video_metadata: Any, **_: Any) -> BatchFeature:
        patches, grids = [], []
        for video in videos:
            pixels = (torch.from_numpy(np.array(video)).permute(0, 3, 1, 2).float() / 255 - self._mean) / self._std
            made, *grid = self._kind.patchify(
                None, pixels[None], self.patch_size, self.merge_size, self.temporal_patch_size
            )
            patches.append(made[0])
            grids.append(grid)
        fields = {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
        return BatchFeature({**fields, "video_metadata": video_metadata})


def processor_of(name: str, folder: Path) -> Any:
    """transformers' processor of a checkpoint."""
    own: Any = getattr(transformers, CHECKPOINTS[name].processor)
    early = CHECKPOINTS[name].image == "qwen2.5-vl-early"  # its image processor has another name by now
    images = (Qwen2VLImageProcessorPil if early else AutoImageProcessor).from_pretrained(folder)
    parts = {
        "image_processor": images,
        "tokenizer": AutoTokenizer.from_pretrained(folder),
        "video_processor": _Videos(folder, images, qwen3=name.startswith("Qwen3")) if "Qwen" in name else object(),
    }
    changes = {"check_argument_for_proper_class": lambda *_: None, "__repr__": lambda self: type(self).__name__}
    unchecked: Any = type(own.__name__, (own,), changes)
    settings, _ = own.get_processor_dict(folder)
    return unchecked.from_args_and_dict([parts[name] for name in own.get_attributes()], settings)


class Oracle:
    """A checkpoint under transformers.

    Args:
        name: Of the checkpoint.
        folder: Its files.
        plain: The checkpoint with its weights not quantized; the folder if they are not.
    """

    def __init__(self, name: str, folder: Path, plain: Path) -> None:
        self._name, self.folder, self._plain = name, folder, plain

    @functools.cached_property
    def _processor(self) -> Any:
        return processor_of(self._name, self.folder)

    @functools.cached_property
    def model(self) -> Any:
        return self._load()

    def _load(self) -> Any:
        if self._name in QWEN_VL:  # transformers has no model of its own; tests/qwen_vl compares this one
            return load_model(EngineConfig(model=str(self.folder), dtype="float32"))
        return AutoModelForImageTextToText.from_pretrained(self._plain, dtype=torch.float32).eval()

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        visuals: Sequence[Image.Image | Clip],
        *,
        typed: bool = False,
    ) -> Inputs:
        """The inputs of a conversation.

        Args:
            visuals: Its images and videos, in order.
            typed: Whether its texts contain the names of special tokens, which are text there.
        """
        images = [one for one in visuals if not isinstance(one, Clip)]
        clips = [one for one in visuals if isinstance(one, Clip)]
        if self._name in QWEN_VL:
            return _qwen_vl_prompt(messages, images, chat=self._name.endswith("Chat"))
        common: dict[str, Any] = {"tools": tools, "add_generation_prompt": True}
        if not clips:
            tokenizer = self._processor.tokenizer
            adds = typed and tokenizer.bos_token is not None  # which transformers leaves out beside typed tokens
            made = self._processor.apply_chat_template(
                _with_images(messages, iter(images)),
                **common,
                tokenize=True,
                sanitize_control_tokens=typed,
                return_dict=True,
                return_tensors="pt",
                processor_kwargs={"add_special_tokens": False} if adds else {},
            )
            if adds:
                ids = torch.cat([torch.tensor([[tokenizer.bos_token_id]]), made["input_ids"]], 1)
                made |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            return dict(made)
        assert not images
        text = self._processor.apply_chat_template(list(messages), **common)
        if self._name.startswith("Qwen3"):
            # transformers 4.57, with which the model was published, replaces the tokens around the marker too.
            text = text.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
        details = [
            VideoMetadata(
                len(clip.frames), fps=1 / (clip.times[1] - clip.times[0]), frames_indices=[*range(len(clip.frames))]
            )
            for clip in clips
        ]
        frames = [[np.array(frame) for frame in clip.frames] for clip in clips]
        return dict(self._processor(text=[text], videos=frames, video_metadata=details, return_tensors="pt"))

    @property
    def takes_tools(self) -> bool:
        return self._name not in QWEN_VL and "tools" in str(self._processor.chat_template)

    @torch.no_grad()
    def generate(self, inputs: Inputs, num_tokens: int, *, adapted: bool) -> list[int]:
        model = self.adapted if adapted else self.model
        out = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        return [int(token) for token in out[0, inputs["input_ids"].shape[1] :]]

    @functools.cached_property
    def adapted(self) -> PeftModel:
        """The model with an adapter on all linear layers."""
        torch.manual_seed(0)
        peft = get_peft_model(self._load(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        return peft.eval()

    @functools.cached_property
    def _head(self) -> TaskHead:
        hidden = self.adapted.config.get_text_config().hidden_size
        spec = HeadSpec(
            name=HEAD, task="classification", labels=("a", "b", "c"), prompt="what ?", num_frames=1, hidden_size=hidden
        )
        return TaskHead(spec, torch.randn(3, hidden) / hidden**0.5, torch.zeros(3))

    def save_adapter(self, folder: Path) -> None:
        """The adapter, and a head of it."""
        self.adapted.save_pretrained(str(folder))
        save_heads(folder, {HEAD: self._head})

    @torch.no_grad()
    def scores(self, inputs: Inputs) -> list[float]:
        """Of the head's labels, from the last hidden state."""
        base: Any = self.adapted.get_base_model()
        states = base.model(**inputs).last_hidden_state[0, -1]
        found: list[float] = torch.softmax(states @ self._head.weight.T, 0).tolist()
        return found


def _with_images(messages: Sequence[Mapping[str, Any]], images: Iterator[Image.Image]) -> list[dict[str, Any]]:
    """Messages with the images in their entries, as transformers takes them."""
    return [
        {
            **turn,
            "content": [
                {**part, "image": next(images)} if part["type"] == "image" else part for part in turn["content"]
            ],
        }
        for turn in messages
    ]


@functools.cache
def _tiktoken() -> tiktoken.Encoding:
    """Of the published code of Qwen-VL."""
    lines = (line.split() for line in vocabularies.ranks_file().read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205))]
    names += ["<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>", "<img>", "</img>", "<imgpad>"]
    special = {name: len(ranks) + number for number, name in enumerate(names)}
    return tiktoken.Encoding("qwen", pat_str=PRETOKENIZE_REGEX, mergeable_ranks=ranks, special_tokens=special)


def _qwen_vl_prompt(messages: Sequence[Mapping[str, Any]], images: Sequence[Image.Image], *, chat: bool) -> Inputs:
    """ChatML with numbered pictures, or the text alone for the base model."""
    text, number = "", 0
    turns = list(messages)
    if chat and turns[0]["role"] != "system":
        text = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    for turn in turns:
        content = ""
        for part in turn["content"]:
            if part["type"] == "image":
                number += 1
                content += f"Picture {number}: <img>{'<imgpad>' * 256}</img>\n"
            else:
                content += part["text"]
        text += f"<|im_start|>{turn['role']}\n{content}<|im_end|>\n" if chat else content
    if chat:
        text += "<|im_start|>assistant\n"
    ids = torch.tensor([_tiktoken().encode(text, allowed_special="all")])
    found: Inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if images:
        resized = [np.array(image.resize((448, 448), Image.Resampling.BICUBIC)) for image in images]
        pixels = torch.stack([torch.from_numpy(one).permute(2, 0, 1).float() / 255 for one in resized])
        mean, std = (torch.tensor(values)[:, None, None] for values in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
        found["pixel_values"] = (pixels - mean) / std
    return found
