"""Streamed text over RPyC: complete, in order, and joined when the reader is slow."""

from __future__ import annotations

import queue
import threading

from vlora.server.rpyc.protocol import ReplyQueue, StreamedReply


class PlainReply(StreamedReply):
    """Replies with the text itself."""

    def encode(self, text: str) -> str:
        return text


def test_text_that_arrives_before_a_write_is_joined() -> None:
    reply = PlainReply()
    replies: ReplyQueue = queue.SimpleQueue()
    reply.put("before the ")
    reply.put("writer")
    reply.attach(replies, 1)
    assert replies.qsize() == 1 and reply.take() == "before the writer" and reply.take() is None
    for word in ("one ", "two ", "three"):
        reply.put(word)
    assert replies.qsize() == 2 and reply.take() == "one two three"
    reply.put("four")
    assert replies.qsize() == 3 and reply.take() == "four"


def test_no_text_is_lost_between_two_threads() -> None:
    words = [f"{number} " for number in range(20_000)]
    reply = PlainReply()
    replies: ReplyQueue = queue.SimpleQueue()
    written: list[str] = []

    def write() -> None:
        while replies.get() is not None:
            if (text := reply.take()) is not None:
                written.append(text)

    writer = threading.Thread(target=write)
    writer.start()
    for number, word in enumerate(words):
        if number == 100:
            reply.attach(replies, 1)
        reply.put(word)
    replies.put(None)
    writer.join()
    assert "".join(written) == "".join(words) and len(written) <= len(words) - 99
