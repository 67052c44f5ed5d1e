"""Tokenizers and image processors for the tiny models of `tests/families.py`."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.families import IMAGE, MROPE_FAMILIES, VISION_END, VISION_START

PINPOINTS = [[16, 32], [32, 16], [32, 32]]


def tokenizer() -> PreTrainedTokenizerFast:
    special = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "<image>": IMAGE, "<vs>": VISION_START, "<ve>": VISION_END}
    words = {word: 4 + index for index, word in enumerate(["what", "is", "shown", "in", "the", "picture", "?"])}
    inner = Tokenizer(models.WordLevel({**special, **words}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<image>", "<vs>", "<ve>"],
        chat_template=(
            "<s>{% for m in messages %}{% for c in m['content'] %}"
            "{% if c['type'] == 'image' %}<image>{% else %} {{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
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
