"""Tokenizers of the size and form that published checkpoints have: Qwen's whole vocabulary, and one of Llama's form.

Qwen's ranks are those that the `dashscope` package ships. The pieces of the other are Qwen's that are whole characters,
as SentencePiece writes them.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import itertools
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers.convert_slow_tokenizer import bytes_to_unicode

PUBLISHED: Mapping[str, Mapping[str, Any]] = json.loads((Path(__file__).parent / "published.json").read_text())
"""What the repositories have: configurations, tokens, the parts of tokenizers, and the rows of `checkpoints`."""

LLAMA_SIZE = 32_000
SPACE = "\u2581"


class Vocabulary(NamedTuple):
    """vocab: piece -> id. merges: pairs of pieces, first merge first."""

    vocab: dict[str, int]
    merges: list[tuple[str, str]]


def ranks_file() -> Path:
    """qwen.tiktoken of the installed dashscope, which is not imported."""
    spec = importlib.util.find_spec("dashscope")
    assert spec is not None and spec.submodule_search_locations is not None, "pip install dashscope"
    return Path(spec.submodule_search_locations[0]) / "resources" / "qwen.tiktoken"


@functools.cache
def _ranks() -> dict[bytes, int]:
    lines = (line.split() for line in ranks_file().read_bytes().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


@functools.cache
def _pairs() -> list[tuple[bytes, bytes]]:
    """The two tokens of which byte pair encoding makes each token, by its rank."""
    ranks = _ranks()
    found = []
    for token, rank in ranks.items():
        if len(token) == 1:
            continue
        halves = [(token[:place], token[place:]) for place in range(1, len(token))]
        able = [pair for pair in halves if max(ranks.get(pair[0], rank), ranks.get(pair[1], rank)) < rank]
        found.append(able[0] if len(able) == 1 else _last_pair(token, rank))
    return found


def _last_pair(token: bytes, rank: int) -> tuple[bytes, bytes]:
    """The tokens of a text after all merges before `rank`."""
    ranks, parts = _ranks(), [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
        at = joined.index(min(joined))
        assert joined[at] < rank, token
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


@functools.cache
def qwen() -> Vocabulary:
    letters = bytes_to_unicode()

    def shown(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    return Vocabulary(
        {shown(token): rank for token, rank in _ranks().items()}, [(shown(a), shown(b)) for a, b in _pairs()]
    )


@functools.cache
def llama() -> Vocabulary:
    """Three control tokens, 256 bytes, merged pieces, and last the characters of which they are made."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    characters = dict.fromkeys([SPACE, *map(chr, range(33, 127))])
    merged: dict[str, None] = {}
    merges = []
    for left, right in _pairs():
        try:
            a, b = (part.decode().replace(" ", SPACE) for part in (left, right))
        except UnicodeDecodeError:
            continue
        letters = [part for part in (a, b) if len(part) == 1 and part.isprintable()]
        if all(part in merged or part in characters or part in letters for part in (a, b)) and a + b not in merged:
            characters.update(dict.fromkeys(letters))
            merged[a + b] = None
            merges.append((a, b))
        if len(special) + len(merged) + len(characters) >= LLAMA_SIZE:
            break
    pieces = [*special, *merged, *characters][:LLAMA_SIZE]
    assert len(set(pieces)) == LLAMA_SIZE
    return Vocabulary({piece: place for place, piece in enumerate(pieces)}, merges)


def added_token(number: int, content: str, *, special: bool, **fields: Any) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {"id": number, "content": content, **flags, **fields}


def _tokenizer_json(kind: str, vocabulary: Vocabulary, added: Sequence[Mapping[str, Any]]) -> str:
    parts = PUBLISHED["tokenizer"][kind]
    model = {**parts["model"], "vocab": vocabulary.vocab, "merges": [f"{a} {b}" for a, b in vocabulary.merges]}
    return json.dumps({**parts, "added_tokens": list(added), "model": model}, ensure_ascii=False)


def qwen_files(added: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """tokenizer.json, vocab.json and merges.txt."""
    vocabulary = qwen()
    return {
        "tokenizer.json": _tokenizer_json("qwen", vocabulary, added),
        "vocab.json": json.dumps(vocabulary.vocab, ensure_ascii=False),
        "merges.txt": "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in vocabulary.merges),
    }


def llama_files(added: Sequence[Mapping[str, Any]]) -> dict[str, str | bytes]:
    """tokenizer.json and tokenizer.model."""
    vocabulary = llama()
    return {
        "tokenizer.json": _tokenizer_json("llama", vocabulary, added),
        "tokenizer.model": _sentencepiece(vocabulary.vocab),
    }


def _sentencepiece(vocab: Mapping[str, int]) -> bytes:
    """A vocabulary as SentencePiece's ModelProto: pieces with score and type, and the settings of a Llama's."""
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}

    def varint(value: int) -> bytes:
        out = bytearray()
        while value >= 128:
            out.append(value & 127 | 128)
            value >>= 7
        return bytes([*out, value])

    def message(number: int, body: bytes) -> bytes:
        return varint(number << 3 | 2) + varint(len(body)) + body

    def flag(number: int, value: int) -> bytes:
        return varint(number << 3) + varint(value)

    pieces = []
    for piece, place in vocab.items():
        kind = kinds.get(piece, 6 if place < 259 else 1)
        score = struct.pack("<f", float(259 - place) if place >= 259 else 0.0)
        pieces.append(message(1, message(1, piece.encode()) + varint(2 << 3 | 5) + score + flag(3, kind)))
    # model_type BPE, vocab_size, byte_fallback; no other normalization than spaces
    trainer = flag(3, 2) + flag(4, len(vocab)) + flag(35, 1)
    normalizer = message(1, b"identity") + flag(3, 1) + flag(4, 0) + flag(5, 1)
    return b"".join(pieces) + message(2, trainer) + message(3, normalizer)
