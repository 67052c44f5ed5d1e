"""Qwen-VL's tokenizer: the ids of tiktoken's algorithm, the published prompt formats, and broken vocabularies."""

from __future__ import annotations

import base64
import itertools
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.qwen_vl import checkpoint as small
from vlora.errors import BadConfig, BadRequest
from vlora.models.processing import InputProcessor, to_tensor
from vlora.models.qwen_vl.tokenizer import build, read_ranks
from vlora.models.vision.images import Region

# Of the published tokenizer.
PATTERN = regex.compile(
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"""
    r"""|\s+(?!\S)|\s+"""
)
RANKS = {bytes([byte]): byte for byte in range(256)} | {token: 256 + i for i, token in enumerate(small.MERGED)}
BUILT = build(RANKS)


def processor_of(folder: Path, **settings: Any) -> InputProcessor:
    small.write_checkpoint(folder / "model", **settings)
    return InputProcessor.from_pretrained(str(folder / "model"))


def literal_ids(text: str) -> list[int]:
    """tiktoken's algorithm: in each word, join the first adjacent pair of the lowest rank, until no pair is a token."""
    ids: list[int] = []
    for word in PATTERN.findall(unicodedata.normalize("NFC", text)):
        parts = [bytes([byte]) for byte in word.encode()]
        if word.encode() in RANKS:
            parts = [word.encode()]
        while joined := [(RANKS[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in RANKS]:
            place = min(joined)[1]
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        ids += [RANKS[part] for part in parts]
    return ids


@given(
    st.lists(
        st.sampled_from([*"aAehinotWP'1 \n\r.é\u0301中🙂", "the", " the", "What", "Picture", "'ll", "'LLama"])
    ).map("".join)
)
def test_ids_are_those_of_the_published_algorithm(text: str) -> None:
    ids = BUILT.encode(text, add_special_tokens=False).ids
    assert ids == literal_ids(text)
    assert BUILT.decode(ids) == unicodedata.normalize("NFC", text)


def test_special_tokens_have_the_published_ids(tmp_path: Path) -> None:
    """Relative to the number of ranks, which is 151,643 in the published vocabulary."""
    tokenizer = processor_of(tmp_path).tokenizer
    offsets = {
        "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|extra_0|>": 151646,
        "<|extra_204|>": 151850, "<ref>": 151851, "</ref>": 151852, "<box>": 151853, "</box>": 151854,
        "<quad>": 151855, "</quad>": 151856, "<img>": 151857, "</img>": 151858, "<imgpad>": 151859,
    }  # fmt: skip
    for token, published in offsets.items():
        assert tokenizer.convert_tokens_to_ids(token) == published - 151643 + small.NUM_RANKS
    assert len(read_ranks(tmp_path / "model" / "qwen.tiktoken")) == small.NUM_RANKS


class TestPrompts:
    """The formats of the published code, with 256 placeholders in the place of an image's path."""

    @pytest.fixture
    def chat(self, tmp_path: Path) -> InputProcessor:
        return processor_of(tmp_path)

    def test_one_question_about_two_images(self, chat: InputProcessor) -> None:
        prompt = chat.chat("What is this?", 2)
        assert chat.tokenizer.eos_token == "<|im_end|>"  # ends the answers that training adds to prompts
        assert prompt == (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\nPicture 1: <img><imgpad></img>\nPicture 2: <img><imgpad></img>\n"
            "What is this?<|im_end|>\n<|im_start|>assistant\n"
        )
        images = [Image.new("RGB", (40, 30), "red"), Image.new("RGB", (10, 90), "blue")]
        encoded = chat.encode(prompt, images)
        start = encoded.prompt_ids.index(small.IMAGE_START)
        assert encoded.prompt_ids[start + 1 : start + 257] == (small.IMAGE_PAD,) * 256
        assert encoded.prompt_ids[start + 257] == small.IMAGE_END
        assert encoded.prompt_ids.count(small.IMAGE_PAD) == 512
        assert encoded.shown == (Region(0, 0, 40, 30), Region(0, 0, 10, 90))

    def test_a_conversation_numbers_its_pictures_on(self, chat: InputProcessor) -> None:
        picture = {"type": "image"}
        prompt = chat.template(
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [picture, {"type": "text", "text": "What?"}]},
                {"role": "assistant", "content": "A <ref>dog</ref>."},
                {"role": "user", "content": [{"type": "text", "text": "And "}, picture]},
            ]
        )
        assert prompt == (
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nPicture 1: <img><imgpad></img>\nWhat?<|im_end|>\n"
            "<|im_start|>assistant\nA <ref>dog</ref>.<|im_end|>\n"
            "<|im_start|>user\nAnd Picture 2: <img><imgpad></img>\n<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_the_base_model_gets_the_text_alone(self, tmp_path: Path) -> None:
        base = processor_of(tmp_path, chat=False)
        assert base.tokenizer.eos_token == "<|endoftext|>"
        assert base.chat("What is this?", 1) == "Picture 1: <img><imgpad></img>\nWhat is this?"
        with pytest.raises(BadRequest, match="Qwen-VL is no chat model; send one user message"):
            base.template([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}])

    def test_a_template_of_the_checkpoint_is_used(self, tmp_path: Path) -> None:
        small.write_checkpoint(tmp_path / "model")
        part = "{% if part.type == 'image' %}<img><imgpad></img>{% else %}{{ part.text }}!{% endif %}"
        template = f"{{% for part in messages[0].content %}}{part}{{% endfor %}}"
        (tmp_path / "model" / "chat_template.jinja").write_text(template)
        assert InputProcessor.from_pretrained(str(tmp_path / "model")).chat("What?") == "What?!"

    def test_boxes_stay_in_an_answer(self, chat: InputProcessor) -> None:
        answer = "<ref>the dog</ref><box>(1,2),(3,4)</box><|im_end|>"
        assert chat.decode(BUILT.encode(answer).ids) == answer.removesuffix("<|im_end|>")


def test_images_are_resized_to_a_square_and_normalized(tmp_path: Path) -> None:
    processor = processor_of(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (31, 70, 3), dtype=np.uint8)
    encoded = processor.encode(processor.chat("What?", 1), [Image.fromarray(pixels)])
    side = small.IMAGE_SIZE
    resized = np.asarray(Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC), dtype=np.float64)
    mean, spread = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    wanted = ((resized / 255 - mean) / spread).transpose(2, 0, 1)
    np.testing.assert_allclose(to_tensor(encoded.vision[0].fields["pixel_values"])[0].numpy(), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2 + 3], r"qwen.tiktoken, line 1\d\d: expected a token in base64"),
        (lambda text: "\n".join(text.split("\n")[1:]), "283 tokens, which are not numbered from 0 on without gaps"),
        (lambda text: "<html>\n" + text, "qwen.tiktoken, line 1: expected a token in base64 and its rank"),
        # The image tokens would have other ids than the configuration's.
        (
            lambda text: text + f"{base64.b64encode(b'zz').decode()} {small.NUM_RANKS}\n",
            f"id {small.IMAGE_PAD + 1}, but .* gives it {small.IMAGE_PAD};",
        ),
    ],
    ids=["cut within a line", "a line lost", "another file", "a token more"],
)
def test_a_broken_vocabulary_is_refused_in_one_line(tmp_path: Path, change: Callable[[str], str], message: str) -> None:
    small.write_checkpoint(tmp_path / "model")
    file = tmp_path / "model" / "qwen.tiktoken"
    file.write_text(change(file.read_text()))
    with pytest.raises(BadConfig, match=message) as raised:
        InputProcessor.from_pretrained(str(tmp_path / "model"))
    assert "\n" not in str(raised.value)
