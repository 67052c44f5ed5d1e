"""Files beside an adapter that change the prompts it was trained with: chat template, tokens, processing of images.

Prompts are those of the base model for all adapters. Trainers copy its files beside each adapter; only a difference of
content is reported.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vlora.errors import listed

if TYPE_CHECKING:
    from vlora.models.processing import InputProcessor

log = logging.getLogger(__name__)


class _Token(msgspec.Struct):
    content: str
    id: int = -1


class _Tokenizer(msgspec.Struct):
    """The parts of `tokenizer.json` and `tokenizer_config.json`; the vocabulary is left out, which takes long."""

    added_tokens: list[_Token] = []
    added_tokens_decoder: dict[int, _Token] = {}
    chat_template: str | list[dict[str, str]] | None = None


def prompt_warnings(name: str, folder: Path, processor: InputProcessor) -> tuple[str, ...]:
    """How the prompts of an adapter's training differ from those that it is served with. They are logged, too."""
    try:
        found = tuple(_differences(folder, processor))
    except Exception as error:  # files may have any content
        found = (f"its files beside the weights cannot be compared with the base model's: {error}",)
    for warning in found:
        log.warning("adapter %r: %s", name, warning)
    return found


def _differences(folder: Path, processor: InputProcessor) -> Iterator[str]:
    read = {name: _read(folder / name, _Tokenizer) for name in ("tokenizer.json", "tokenizer_config.json")}
    config = read["tokenizer_config.json"]
    template = config.chat_template
    for name in ("chat_template.json", "processor_config.json"):
        template = _read(folder / name, _Tokenizer).chat_template or template
    if (own := folder / "chat_template.jinja").is_file():
        template = own.read_text(encoding="utf-8")
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}.get("default")
    if template is not None and _same_lines(template) not in _templates(processor):
        yield (
            "its folder has another chat template than the base model, whose template is used; an adapter that was "
            "trained with its own answers worse: train it with the base model's, or put its own into the model's folder"
        )
    tokens = {each.content: each.id for each in read["tokenizer.json"].added_tokens}
    tokens |= {each.content: number for number, each in config.added_tokens_decoder.items()}
    tokens |= _read(folder / "added_tokens.json", dict[str, int])
    changed = [token for token, number in tokens.items() if processor.tokenizer.convert_tokens_to_ids(token) != number]
    if changed:
        yield (
            f"its tokenizer has other tokens than the base model's: {listed(sorted(map(repr, changed)))}; prompts are "
            "tokenized as the base model's, so an adapter trained with them does not get them"
        )
    fields = _read(folder / "processor_config.json", dict[str, Any]).get("image_processor") or {}
    if fields := _read(folder / "preprocessor_config.json", dict[str, Any]) or fields:
        ours = processor.image_processor
        made, used = type(ours).from_dict(fields).to_dict(), ours.to_dict()
        if differing := [key for key in used if not key.endswith(("_type", "_class")) and made.get(key) != used[key]]:
            yield f"its image processor has another {listed(differing)} than the base model's, which is used"


def _templates(processor: InputProcessor) -> Iterator[str]:
    """The template that is used, then the tokenizer's own: trainers that save the tokenizer alone write that one."""
    yield _same_lines(processor.tokenizer.chat_template)
    if place := processor.tokenizer.name_or_path:
        kind: Any = type(processor.tokenizer)
        yield _same_lines(_template_of(kind, place))


@functools.cache
def _template_of(tokenizer: Any, place: str) -> Any:
    from vlora.models.pretrained import from_pretrained  # imports transformers, as the processor does

    return from_pretrained(tokenizer, place).chat_template


def _same_lines(template: Any) -> str:
    """A template without a line end at its end, which has no effect. Of several templates, that of ordinary chats."""
    return str(template.get("default") if isinstance(template, dict) else template).removesuffix("\n")


def _read(file: Path, kind: Any) -> Any:
    """A JSON file's content; an empty one if there is no file."""
    if not file.is_file():
        return kind() if isinstance(kind, type) else {}
    return msgspec.json.decode(file.read_bytes(), type=kind)
