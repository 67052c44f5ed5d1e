"""What trainers put beside an adapter that changes its prompts: a copy of the base model's files is silent."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken

from tests.families import build_model
from tests.processors import image_processor, tokenizer
from tests.server.scripted import ScriptedInterface, write_adapter
from vlora.models.processing import InputProcessor
from vlora.server.adapter_catalog import AdapterCatalog, prompt_warnings
from vlora.server.metrics import Metrics

TEMPLATE, TOKENS, IMAGES = "another chat template", "other tokens", "image processor has another"
CONFIG = "tokenizer_config.json"
OWN = "{{ 'Q: ' + messages[0].content[0].text + ' A:' }}"


@pytest.fixture(scope="module")
def processor() -> InputProcessor:
    return InputProcessor(build_model("qwen2_vl").config, tokenizer(), image_processor("qwen2_vl"))


def text_of(name: str, text: Callable[[InputProcessor], str]) -> Callable[[InputProcessor, Path], Any]:
    return lambda base, folder: (folder / name).write_text(text(base))


def json_of(name: str, value: Callable[[InputProcessor], Any]) -> Callable[[InputProcessor, Path], Any]:
    return text_of(name, lambda base: json.dumps(value(base)))


def several(*templates: str | None) -> Callable[[InputProcessor, Path], Any]:
    """Names, each followed by its template; None for the base model's."""
    pairs = tuple(zip(templates[::2], templates[1::2], strict=True))
    return json_of(
        CONFIG,
        lambda base: {"chat_template": [{"name": name, "template": own or template(base)} for name, own in pairs]},
    )


def copied(base: InputProcessor, folder: Path) -> None:
    """As trainers save it."""
    base.tokenizer.save_pretrained(folder)
    base.image_processor.save_pretrained(folder)


def with_tokens(base: InputProcessor, folder: Path) -> None:
    copied(base, folder)
    tokens = type(base.tokenizer).from_pretrained(folder)
    tokens.add_tokens([AddedToken("<action>"), AddedToken("<stop>", special=True)])
    tokens.save_pretrained(folder)


def template(base: InputProcessor) -> str:
    return str(base.tokenizer.chat_template)


def pixels(base: InputProcessor) -> dict[str, Any]:
    fields = json.loads(base.image_processor.to_json_string())
    return fields | {"size": {"shortest_edge": 16, "longest_edge": 32 * 32}}


FOLDERS: dict[str, tuple[Callable[[InputProcessor, Path], Any], str | None]] = {
    "nothing": (lambda base, folder: None, None),
    "a copy": (copied, None),
    "a copy of the template": (text_of("chat_template.jinja", template), None),
    "with a line end": (text_of("chat_template.jinja", lambda base: template(base) + "\n"), None),
    "in the tokenizer's": (json_of(CONFIG, lambda base: {"chat_template": template(base)}), None),
    "among several": (several("tool_use", OWN, "default", None), None),
    "another template": (text_of("chat_template.jinja", lambda _: OWN), TEMPLATE),
    "another in the tokenizer's": (json_of(CONFIG, lambda _: {"chat_template": OWN}), TEMPLATE),
    "another in the processor's": (json_of("chat_template.json", lambda _: {"chat_template": OWN}), TEMPLATE),
    "another of several": (several("default", OWN), TEMPLATE),
    "further tokens": (with_tokens, f"{TOKENS} than the base model's: '<action>', '<stop>'"),
    "further tokens of before": (json_of("added_tokens.json", lambda _: {"<s>": 1, "<action>": 9}), "'<action>'"),
    "moved tokens": (
        json_of(CONFIG, lambda _: {"added_tokens_decoder": {"1": {"content": "</s>"}}}),
        f"{TOKENS} than the base model's: '</s>'",
    ),
    "other pictures": (json_of("preprocessor_config.json", pixels), f"{IMAGES} size"),
    "of a processor": (
        json_of("processor_config.json", lambda base: {"image_processor": pixels(base)}),
        f"{IMAGES} size",
    ),
    "no JSON": (text_of(CONFIG, lambda _: "{"), "cannot be compared with the base model's"),
    "no text": (lambda _, folder: (folder / "chat_template.jinja").write_bytes(b"\xff"), "cannot be compared"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_difference_is_reported_and_a_copy_is_not(
    name: str, processor: InputProcessor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, want = FOLDERS[name]
    make(processor, tmp_path)
    with caplog.at_level(logging.WARNING):
        found = prompt_warnings("signs", tmp_path, processor)
    assert len(found) == (want is not None) and all(want is not None and want in each for each in found)
    assert [record.getMessage() for record in caplog.records] == [f"adapter 'signs': {each}" for each in found]


def test_a_copy_of_the_tokenizer_s_template_is_silent_where_the_processor_has_another(
    processor: InputProcessor, tmp_path: Path
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tokens = tokenizer()
    for folder in (base, adapter):
        tokens.save_pretrained(folder)
    tokens = type(tokens).from_pretrained(base)
    tokens.chat_template = OWN  # the processor's
    used = InputProcessor(processor.config, tokens, processor.image_processor)
    assert prompt_warnings("signs", adapter, used) == ()
    (adapter / "chat_template.jinja").write_text("a third")
    assert len(prompt_warnings("signs", adapter, used)) == 1


async def test_answers_to_a_load_and_lists_have_the_warnings(processor: InputProcessor, tmp_path: Path) -> None:
    plain, own = tmp_path / "plain", tmp_path / "own"
    for folder in (plain, own):
        write_adapter(folder)
    (own / "chat_template.jinja").write_text(OWN)
    catalog = AdapterCatalog(ScriptedInterface(), Metrics(), "model", processor)  # type: ignore[arg-type]

    async def warned() -> list[str]:
        return [status.name for status in await catalog.list() if TEMPLATE in "".join(status.warnings)]

    await catalog.register({"a": str(own), "b": str(plain)})
    assert await warned() == ["a"]
    assert TEMPLATE in (await catalog.load("c", str(own))).warnings[0]
    assert TEMPLATE in (await catalog.pin("c", True)).warnings[0]
    assert await warned() == ["a", "c"]
    await catalog.unload("c")
    assert not (await catalog.load("c", str(plain))).warnings
    assert await warned() == ["a"]
