"""Tokenizers and image processors for the tiny models of `tests/families.py`."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.families import IMAGE, MROPE_FAMILIES, VIDEO, VISION_END, VISION_START, build_model

_NUM_WORDS = 170  # that fit beside the words of the questions
VIDEO_SETTINGS = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 6 * 48 * 48},
}
PINPOINTS = [[16, 32], [32, 16], [32, 32]]


def tokenizer(*words: str) -> PreTrainedTokenizerFast:
    """Words of the questions here, and more if a test needs them. Others are unknown."""
    special = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "<image>": IMAGE}
    special |= {"<video>": VIDEO, "<vs>": VISION_START, "<ve>": VISION_END}
    known = dict.fromkeys(("what", "is", "shown", "in", "the", "picture", "?", *words))
    assert len(known) <= IMAGE - 4
    vocabulary = {word: 4 + index for index, word in enumerate(known)}
    inner = Tokenizer(models.WordLevel({**special, **vocabulary}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<image>", "<video>", "<vs>", "<ve>"],
        chat_template=(
            "<s>{% for m in messages %}{% for c in m['content'] %}"
            "{% if c['type'] == 'image' %}<image>{% elif c['type'] == 'video' %}<video>{% else %} {{ c['text'] }}"
            "{% endif %}{% endfor %}{% endfor %}"
        ),
    )


def image_processor(family: str) -> Any:
    if family in MROPE_FAMILIES:
        size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
        return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size)
    crop = {"height": 16, "width": 16}
    if family == "qwen_vl":
        return CLIPImageProcessorPil(size=crop, do_center_crop=False)
    if family == "llava":
        return CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=crop)
    if family == "llava_next":
        return LlavaNextImageProcessorPil(size={"shortest_edge": 16}, crop_size=crop, image_grid_pinpoints=PINPOINTS)
    return LlavaOnevisionImageProcessorPil(size=crop, image_grid_pinpoints=PINPOINTS)


@functools.cache
def video_modules() -> dict[str, Any]:
    """The modules of transformers' video processors by family, which need torchvision only for resizing."""
    found = {}
    for name in ("qwen2_vl", "qwen3_vl"):
        spec = importlib.util.find_spec(f"transformers.models.{name}")
        assert spec is not None and spec.submodule_search_locations is not None
        file = Path(spec.submodule_search_locations[0]) / f"video_processing_{name}.py"
        code = "\n".join(line for line in file.read_text().splitlines() if "import torchvision" not in line)
        module: Any = types.ModuleType(f"{spec.name}.without_torchvision")
        module.__package__, module.__file__ = spec.name, str(file)
        sys.modules[module.__name__] = module
        exec(compile(code, str(file), "exec"), module.__dict__)
        del sys.modules[module.__name__]
        found[name] = module
    return {**found, "qwen2_5_vl": found["qwen2_vl"]}


def write_checkpoint(folder: Path, family: str, *words: str) -> str:
    """A checkpoint as users have it: model, tokenizer and image processor. words: of the tokenizer; all others of its
    vocabulary are filled, so that every token has a text."""
    model = build_model(family)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(str(folder))
    more = ("answer", *words)
    tokens = tokenizer(*more, *(f"w{number}" for number in range(_NUM_WORDS - len(more))))
    template = str(tokens.chat_template)
    if family.startswith("qwen"):  # these tokens separate the positions of two pictures
        template = template.replace("<image>", "<vs><image><ve>").replace("<video>", "<vs><video><ve>")
        (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEO_SETTINGS))
    tokens.chat_template = template + "{% if add_generation_prompt %} answer{% endif %}"
    tokens.save_pretrained(str(folder))
    image_processor(family).save_pretrained(str(folder))
    return str(folder)
