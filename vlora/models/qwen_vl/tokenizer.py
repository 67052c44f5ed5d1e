"""Qwen-VL's tokenizer, read from qwen.tiktoken into the `tokenizers` library.

The file has a token's bytes and its rank in each line. tiktoken joins two adjacent tokens if their bytes together are a
token, lowest rank first, so every such pair is a merge here, in the order of ranks.
"""

from __future__ import annotations

import base64
import binascii
import functools
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.utils import cached_file

from vlora.errors import BadConfig
from vlora.models.qwen_vl.config import QwenVLConfig

VOCABULARY_FILE = "qwen.tiktoken"

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IMAGE_START, IMAGE_END, IMAGE_PAD = "<img>", "</img>", "<imgpad>"
# Ids in this order, from the number of ranks on. The names of objects and their boxes are text of an answer.
_CONTROL = (END_OF_TEXT, TURN_START, TURN_END, *(f"<|extra_{i}|>" for i in range(205)))
_TEXT = ("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>")
_IMAGE = (IMAGE_START, IMAGE_END, IMAGE_PAD)

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_PICTURE = (
    "{%- set count.pictures = count.pictures + 1 -%}"
    f"{{{{- 'Picture ' ~ count.pictures ~ ': {IMAGE_START}{IMAGE_PAD}{IMAGE_END}\\n' -}}}}"
)
_CONTENT = (
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] -%}"
    f"{{%- if part['type'] == 'image' -%}}{_PICTURE}{{%- else -%}}{{{{- part['text'] -}}}}{{%- endif -%}}"
    "{%- endfor -%}{%- endif -%}"
)
_COUNT = "{%- set count = namespace(pictures=0) -%}"
# Pictures are numbered over the whole conversation, as in the published demonstration.
CHAT_TEMPLATE = (
    f"{_COUNT}"
    "{%- if messages[0]['role'] != 'system' -%}"
    f"{{{{- '{TURN_START}system\\nYou are a helpful assistant.{TURN_END}\\n' -}}}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    f"{{{{- '{TURN_START}' ~ message['role'] ~ '\\n' -}}}}{_CONTENT}{{{{- '{TURN_END}\\n' -}}}}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{{{{- '{TURN_START}assistant\\n' -}}}}{{%- endif -%}}"
)
# The base model continues a text.
RAW_TEMPLATE = (
    f"{_COUNT}"
    "{%- if messages | length > 1 or messages[0]['role'] != 'user' -%}"
    "{{- raise_exception('Qwen-VL is no chat model; send one user message, or use Qwen-VL-Chat') -}}"
    "{%- endif -%}"
    f"{{%- for message in messages -%}}{_CONTENT}{{%- endfor -%}}"
)


class QwenVLTokenizer:
    """Reads the tokenizer of a checkpoint; the instances are transformers' fast tokenizers."""

    @classmethod
    def from_pretrained(cls, model: str | os.PathLike[str], **options: Any) -> PreTrainedTokenizerFast:
        """Read a tokenizer from a folder or hub name, with the chat template of its model.

        options: have no effect.

        Raises:
            BadConfig: The vocabulary is malformed.
            OSError: There is none.
        """
        file = cached_file(str(model), VOCABULARY_FILE)
        assert file is not None
        tokenizer = build(read_ranks(Path(file)))
        found, expected = tokenizer.token_to_id(IMAGE_PAD), QwenVLConfig.get_config_dict(model)[0]["image_token_id"]
        if found != expected:
            raise BadConfig(
                f"{file} gives {IMAGE_PAD} the id {found}, but visual.image_start_id of config.json gives it "
                f"{expected}; they belong to different checkpoints, or the vocabulary is truncated"
            )
        try:
            raw = json.loads(_read_text(model, "generation_config.json") or "{}").get("chat_format") == "raw"
        except (ValueError, AttributeError) as error:
            raise BadConfig(f"cannot read generation_config.json of {str(model)!r}: {error}; copy it again") from error
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=END_OF_TEXT if raw else TURN_END,
            pad_token=END_OF_TEXT,
            clean_up_tokenization_spaces=False,
            chat_template=RAW_TEMPLATE if raw else CHAT_TEMPLATE,
        )


def read_ranks(file: Path) -> dict[bytes, int]:
    """The tokens of a file in tiktoken's format, by their bytes. Raises BadConfig."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise BadConfig(
                f"{file}, line {number}: expected a token in base64 and its rank; the file may be truncated; download "
                "it again"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise BadConfig(
            f"{file}: {len(ranks)} tokens, which are not numbered from 0 on without gaps or lack a byte; the file may "
            "be truncated; download it again"
        )
    return ranks


def build(ranks: dict[bytes, int]) -> Tokenizer:
    """The tokenizer of a vocabulary without its special tokens."""
    letters = list(byte_letters())

    def shown(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [(shown(left), shown(right)) for left, right in _pairs(ranks)]
    vocabulary = {shown(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for names, special in ((_CONTROL, True), (_TEXT, False), (_IMAGE, True)):
        added = [AddedToken(name, special=special, normalized=False) for name in names]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return tokenizer


def _pairs(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = ((token[:place], token[place:]) for place in range(1, len(token)))
        found = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(found, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


@functools.cache
def byte_letters() -> dict[str, int]:
    """The letters that stand for bytes in a vocabulary of `ByteLevel`: themselves, or others from 256 on. In order."""
    kept = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = itertools.count(256)
    return {chr(byte if byte in kept else next(others)): byte for byte in range(256)}


def _read_text(model: str | os.PathLike[str], name: str) -> str | None:
    file = cached_file(
        str(model), name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if file is None else Path(file).read_text()
