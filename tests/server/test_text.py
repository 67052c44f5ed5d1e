"""An answer's text on its way out: detokenized for any piece boundaries without any part of a stop string, merged with
other choices, and written in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vlora.client.values import StreamPart, open_reply
from vlora.models.processing import InputProcessor
from vlora.models.qwen_vl.tokenizer import build
from vlora.server.detokenizer import AnswerText, Detokenizer, Piece, StopFilter
from vlora.server.execution import interleave
from vlora.server.http.server import JoinedWrites
from vlora.server.http.text_completions import TextResponseBuilder
from vlora.server.rpyc.protocol import ReplyQueue, StreamedReply
from vlora.types import TokenScore


def decode(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode(errors="replace")


def name(token_id: int) -> str:
    return chr(token_id)


def cut(data: bytes, cuts: list[int]) -> list[list[int]]:
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in cuts)})
    return [list(data[a:b]) for a, b in itertools.pairwise(places)]


@given(st.text(), st.lists(st.integers(0, 100)))
def test_pieces_join_to_the_text_and_none_has_a_partial_character(text: str, cuts: list[int]) -> None:
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.feed(tokens) for tokens in cut(text.encode(), cuts)]
    # A replacement character in the text looks like an incomplete character until more text follows.
    assert "".join(pieces) + detokenizer.finish() == text
    assert not any(piece.endswith("\ufffd") for piece in pieces)


def test_a_partial_character_at_the_end_and_spaces_that_depend_on_the_token_before() -> None:
    detokenizer = Detokenizer(decode)
    assert detokenizer.feed(list("aé".encode()[:2])) == "" and detokenizer.finish() == "a\ufffd"
    words = ["<s>", "Hello", "there", "world"]

    def sentencepiece(token_ids: Sequence[int]) -> str:
        # Drops the space before the first word, as such tokenizers do.
        return " ".join(words[token] for token in token_ids if token)

    detokenizer = Detokenizer(sentencepiece)
    assert [detokenizer.feed([token]) for token in (0, 1, 0, 2, 3)] == ["", "Hello", "", " there", " world"]


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 50)),
)
def test_the_stop_string_completed_first_ends_the_text(text: str, stop: list[str], cuts: list[int]) -> None:
    ends = ((end, each) for end in range(len(text) + 1) for each in stop if text[:end].endswith(each))
    first = min(ends, key=lambda match: (match[0], -len(match[1])), default=None)
    expected = text if first is None else text[: first[0] - len(first[1])]
    stop_filter = StopFilter(stop)
    pieces = [stop_filter.feed(bytes(tokens).decode()) for tokens in cut(text.encode(), cuts)]
    assert "".join(pieces) + stop_filter.finish() == expected
    assert stop_filter.stopped == (first is not None)


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    stop_filter = StopFilter(["END"])
    held = [stop_filter.feed(piece) for piece in ("a", "E", "N", "x", "EN", "D", "more")]
    assert held == ["a", "", "", "ENx", "", "", ""] and stop_filter.stopped
    # A stop string across borders of tokens and inside of a character.
    text = AnswerText(decode, name, ["stöp"])
    pieces = [text.feed([byte]).text for byte in "go stöp on".encode()]
    assert "".join(pieces) + text.finish().text == text.text == "go "
    assert text.stopped and text.logprobs == ()


def test_scores_belong_to_the_text_and_not_to_the_token_that_ended_it() -> None:
    text = AnswerText(decode, name, ["END"])
    fed = "aüE bENDx".encode()
    pieces = [text.feed([byte], [TokenScore(-byte / 100, ((byte, -0.5),))]) for byte in fed]
    pieces.append(text.finish())
    shown = {piece.text: "".join(token.token for token in piece.logprobs) for piece in pieces if piece.text}
    assert shown == {"a": "a", "ü": "\u00c3\u00bc", "E ": "E ", "b": "b"}
    assert [token.logprob for token in text.logprobs] == [-byte / 100 for byte in "aüE b".encode()]
    assert text.logprobs[0].top == (("a", -0.5),)


@given(st.text("abE", max_size=12), st.lists(st.integers(0, 20)))
def test_scores_do_not_depend_on_piece_boundaries(answer: str, cuts: list[int]) -> None:
    text = AnswerText(decode, name, ["Ea"])
    for tokens in cut(answer.encode(), cuts):
        text.feed(tokens, [TokenScore(0.0, ())] * len(tokens))
    text.finish()
    assert "".join(token.token for token in text.logprobs) == text.text


@given(
    st.lists(st.sampled_from([b"a", b"end", "é".encode(), "€".encode(), "😀".encode(), b"\xc3", b"\xff"]), max_size=9),
    st.lists(st.text("aend é€😀\ufffd".replace(" ", ""), min_size=1, max_size=3), max_size=3),
    st.integers(0, 20),
    st.lists(st.integers(0, 40)),
    st.booleans(),
)
@example([b"end", "é".encode(), b"a"], ["end"], 4, [], False)
def test_min_tokens_and_the_count_up_to_a_stop_string_hold_for_any_chunks(
    parts: list[bytes], stop: list[str], min_tokens: int, cuts: list[int], scored: bool
) -> None:
    data = b"".join(parts)

    def read(chunks: Sequence[Sequence[int]], scored: bool) -> tuple[str, bool, int]:
        answer = AnswerText(decode, name, stop, min_tokens)
        for tokens in chunks:
            answer.feed(tokens, [TokenScore(-1.0, ())] * len(tokens) if scored else ())
        answer.finish()
        return answer.text, answer.stopped, answer.num_tokens

    assert read(cut(data, cuts), scored) == read([[token] for token in data], False)


def test_long_stop_strings_cost_little_per_token() -> None:
    """Each character is compared with few of the stop strings' 16,000."""
    compared = 0

    class Stop(str):
        def startswith(self, *args: Any) -> bool:
            nonlocal compared
            compared += 1
            return super().startswith(*args)

    held = StopFilter([Stop(f"{'x' * 990}{each}") for each in range(16)])
    assert held.feed("x" * 900) == "" and all(held.feed("x") == "" for _ in range(90))
    assert compared <= 91 * 16
    assert held.feed("y") == "x" * 990 + "y"


def byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({each: number for number, each in enumerate([*letters, "Ġthe"])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def sentence_pieces() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581\u2581", *"athe"]
    made = Tokenizer(
        models.BPE(
            {each: number for number, each in enumerate(dict.fromkeys(pieces))},
            [("\u2581", "\u2581")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def tiktoken() -> Tokenizer:
    return build({bytes([byte]): byte for byte in range(256)} | {b" t": 256, "日".encode()[:2]: 257})


@pytest.mark.parametrize("answer", ["日本😊", "the  é\n", " a", "\ufffd the", "a"])
@pytest.mark.parametrize("kind", [byte_level, sentence_pieces, tiktoken])
def test_the_bytes_of_the_tokens_are_those_of_the_text(kind: Callable[[], Tokenizer], answer: str) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=kind(), eos_token="<end>", additional_special_tokens=["<mark>"]
    )
    processor = object.__new__(InputProcessor)
    processor.tokenizer = tokenizer
    special = tokenizer.convert_tokens_to_ids("<mark>")
    ids = [special, *tokenizer(answer, add_special_tokens=False)["input_ids"], special, tokenizer.eos_token_id]
    text = AnswerText(processor.decode, processor.token_text, (), 0, processor.token_bytes)
    for token_id in ids:
        text.feed([token_id], [TokenScore(-1.0, ((token_id, -1.0),))])
    text.finish()
    assert text.text == answer == b"".join(token.data or b"" for token in text.logprobs).decode()
    assert text.logprobs[0].token == "<mark>" and text.logprobs[0].data is None is text.logprobs[0].top_data[0]
    builder = TextResponseBuilder({}, 1, [""], logprobs=True, counts=False)
    offsets = builder.piece(0, Piece(text.text, text.logprobs))
    ends = itertools.accumulate((len(token.data or b"") for token in text.logprobs[:-1]), initial=0)
    starts = [len(answer.encode()[:end].decode(errors="ignore")) for end in ends]
    assert json.loads(offsets.removeprefix(b"data: "))["choices"][0]["logprobs"]["text_offset"] == starts


class Streams:
    """Counts open streams."""

    def __init__(self) -> None:
        self.open = 0

    async def numbers(self, count: int, *, fails: bool = False) -> AsyncGenerator[int, None]:
        self.open += 1
        try:
            for number in range(count):
                await asyncio.sleep(0)
                yield number
            if fails:
                raise ValueError("the stream broke")
        finally:
            self.open -= 1


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_items_of_one_stream_stay_in_order_and_an_error_or_an_early_close_ends_all(num_streams: int) -> None:
    streams = Streams()
    came: dict[int, list[int]] = {place: [] for place in range(num_streams)}
    async for place, number in interleave([streams.numbers(5 + place) for place in range(num_streams)]):
        came[place].append(number)
    assert came == {place: list(range(5 + place)) for place in range(num_streams)} and streams.open == 0
    others = [streams.numbers(10**6) for _ in range(num_streams - 1)]
    with pytest.raises(ValueError, match="the stream broke"):
        async for _ in interleave([streams.numbers(3, fails=True), *others]):
            pass
    assert streams.open == 0
    async with contextlib.aclosing(interleave([streams.numbers(10**6) for _ in range(num_streams)])) as parts:
        assert (await anext(parts))[1] == 0
    assert streams.open == 0


def test_no_text_is_lost_between_two_threads() -> None:
    words = [f"{number} " for number in range(5_000)]
    reply = StreamedReply()
    replies: ReplyQueue = queue.SimpleQueue()
    written: list[str] = []

    def write() -> None:
        while replies.get() is not None:
            if (part := reply.take()) is not None:
                written.append(open_reply(part, StreamPart).text)

    writer = threading.Thread(target=write)
    writer.start()
    for number, word in enumerate(words):
        if number == 100:
            reply.attach(replies, 1)
        reply.put(word)
    replies.put(None)
    writer.join()
    assert "".join(written) == "".join(words) and len(written) <= len(words) - 99


class RecordingTransport(asyncio.Transport):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def write(self, data: Any) -> None:
        self.calls.append(data)

    def close(self) -> None:
        self.calls.append("closed")

    def abort(self) -> None:
        self.calls.append("aborted")


async def test_the_writes_of_a_loop_iteration_are_joined() -> None:
    for ends, calls in (
        (("", ""), [b"header body"] * 2),
        (("close",), [b"header body", "closed"]),
        (("abort",), ["aborted"]),
    ):
        transport = RecordingTransport()
        joined = JoinedWrites(transport)
        for end in ends:
            joined.write(b"header")
            joined.write(bytearray(b" body"))
            if end:
                getattr(joined, end)()
            await asyncio.sleep(0)
        assert transport.calls == calls
    # Much data is written at once; otherwise a slow reader would be noticed too late.
    transport = RecordingTransport()
    joined = JoinedWrites(transport)
    for count in range(1, 11):
        joined.write(b"x" * 30_000)
        assert 30_000 * count - len(b"".join(transport.calls)) <= 65_536
    await asyncio.sleep(0)
    assert len(b"".join(transport.calls)) == 300_000
