"""Prompts and images become model inputs, with as many placeholders as the vision tower has embeddings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from tests.families import FAMILIES, IMAGE, VIDEO, build_model
from tests.processors import image_processor, tokenizer
from vlora.errors import BadConfig, BadRequest
from vlora.models.hf_model import HFModel
from vlora.models.processing import InputProcessor, to_tensor
from vlora.types import TensorValue

SIZES = ((40, 24), (20, 33), (64, 64), (17, 50))


def pictures(count: int) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [
        Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))
        for height, width in (SIZES[i % len(SIZES)] for i in range(count))
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[InputProcessor, HFModel]:
    model = build_model(request.param)
    return InputProcessor(model.config, tokenizer(), image_processor(request.param)), HFModel(model)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_as_many_placeholders_as_embeddings(pair: tuple[InputProcessor, HFModel], count: int) -> None:
    processor, hf_model = pair
    encoded = processor.encode(processor.chat("what is shown ?", count), pictures(count))
    assert len(encoded.vision) == count
    assert encoded.prompt_ids.count(IMAGE) == sum(item.num_tokens for item in encoded.vision)
    with torch.no_grad():
        for item in encoded.vision:
            fields = {name: to_tensor(value) for name, value in item.fields.items()}
            (features,) = hf_model.encode("image", [fields])
            assert len(features.rows) == item.num_tokens


def test_images_encoded_together_are_as_if_alone(pair: tuple[InputProcessor, HFModel]) -> None:
    processor, hf_model = pair
    encoded = processor.encode(processor.chat("what is shown ?", 4), pictures(4))
    fields = [{name: to_tensor(value) for name, value in item.fields.items()} for item in encoded.vision]
    with torch.no_grad():
        together = hf_model.encode("image", fields)
        for made, item in zip(together, fields, strict=True):
            (alone,) = hf_model.encode("image", [item])
            torch.testing.assert_close(made.rows, alone.rows, rtol=1e-4, atol=1e-5)


def test_the_hash_covers_the_content(pair: tuple[InputProcessor, HFModel]) -> None:
    processor, _ = pair
    first, second = pictures(2)
    prompt = processor.chat("what ?", 1)
    hashes = [processor.encode(prompt, [image]).vision[0].content_hash for image in (first, second, first)]
    assert hashes[0] == hashes[2] != hashes[1]
    several = processor.chat("what ?", 3)
    one_way, other_way = (processor.encode(several, shown) for shown in (pictures(3), pictures(3)[::-1]))
    order = [item.content_hash for item in one_way.vision]
    assert len(set(order)) == 3 and [item.content_hash for item in other_way.vision] == order[::-1]


def test_markers_and_images_must_match(pair: tuple[InputProcessor, HFModel]) -> None:
    processor, _ = pair
    with pytest.raises(BadRequest, match=r"2 image markers .* but 1 images"):
        processor.encode(processor.chat("what ?", 2), pictures(1))


@pytest.mark.parametrize("text", ["what <image> ?", "<image>", "<image><image>in", "is <video> in", "\U000f0000"])
def test_typed_markers_are_text_in_any_turn(pair: tuple[InputProcessor, HFModel], text: str) -> None:
    """With a picture, the template's own marker is the picture's. tests/hub compares the tokens with transformers."""
    processor, _ = pair
    typed = [{"role": role, "content": [{"type": "text", "text": text}]} for role in ("user", "assistant", "user")]
    markers = {IMAGE, VIDEO}
    assert not markers & set(processor.encode(processor.template(typed)).prompt_ids)
    assert not markers & set(processor.encode(processor.as_text(text)).prompt_ids)
    encoded = processor.encode(processor.chat(text, 1), pictures(1))
    assert encoded.prompt_ids.count(IMAGE) == encoded.vision[0].num_tokens


def test_markers_in_names_of_parameters_are_text() -> None:
    words = tokenizer()
    words.chat_template = "{{ tools[0] | tojson }}"
    processor = InputProcessor(build_model("llava").config, words, image_processor("llava"))
    tool = {"function": {"parameters": {"properties": {"<image>": {"type": "string"}}}}}
    turn = {"role": "user", "content": "what ?"}
    assert IMAGE not in processor.encode(processor.template([turn], [tool])).prompt_ids


def test_one_of_several_templates_is_for_tools() -> None:
    words = tokenizer()
    plain = words.chat_template
    processor = InputProcessor(build_model("llava").config, words, image_processor("llava"))
    assert not processor.takes_tools
    words.chat_template = {"default": plain, "tool_use": "{{ tools | tojson }}" + str(plain)}
    processor = InputProcessor(build_model("llava").config, words, image_processor("llava"))
    assert processor.takes_tools and "tools" not in processor.chat("what ?")


def test_one_beginning_of_text(pair: tuple[InputProcessor, HFModel]) -> None:
    processor, _ = pair
    assert processor.encode(processor.chat("what is shown ?")).prompt_ids.count(1) == 1


@pytest.mark.parametrize(
    "text", ["<s> what is shown", "what is <s> shown </s> ?", "", "what what " * 300, "unknown \U0001f600 words"]
)
def test_prompts_are_tokenized_as_by_the_tokenizers_own_call(pair: tuple[InputProcessor, HFModel], text: str) -> None:
    processor, _ = pair
    special = not text.startswith("<s>")
    expected = tuple(processor.tokenizer(text, add_special_tokens=special)["input_ids"])
    assert processor.encode(text).prompt_ids == expected


def test_truncation_and_padding_settings_of_a_tokenizer_are_ignored() -> None:
    words = tokenizer()
    words(["what", "what is"], padding="max_length", max_length=8, truncation=True)
    processor = InputProcessor(build_model("qwen2_vl").config, words, image_processor("qwen2_vl"))
    assert len(processor.encode("what " * 20).prompt_ids) == 20 and len(processor.encode("what").prompt_ids) == 1


def test_a_model_without_a_chat_template(pair: tuple[InputProcessor, HFModel]) -> None:
    processor, _ = pair
    bare = tokenizer()
    bare.chat_template = None
    with pytest.raises(BadConfig, match="chat_template"):
        InputProcessor(processor.config, bare, processor.image_processor).chat("what ?")


def test_tensors_are_serialized_or_refused_with_a_reason() -> None:
    tensor = torch.arange(6, dtype=torch.int64).reshape(2, 3)
    from vlora.models.processing import tensor_value

    assert torch.equal(to_tensor(tensor_value(tensor)), tensor)
    for bad in (
        TensorValue("float32", (3,), b"12"),
        TensorValue("nonsense", (1,), b"1"),
        TensorValue("float32", (-1, 7), b"1234"),
    ):
        with pytest.raises(BadRequest, match="cannot be read"):
            to_tensor(bad)
