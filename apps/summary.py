"""A long video in words: a note about each of its parts, then a summary of the notes."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from apps.in_order import in_order
from apps.retrieval.contact_sheet import clock
from apps.retrieval.media import fit
from apps.video_analytics.sources import is_picture
from vlora.client import Client, Video
from vlora.errors import BadImage, PromptTooLong
from vlora.opencv import frame_times, frames_at
from vlora.types.video import shown_at

QUESTION = "Describe what happens in this part of a video."
SUMMARY_QUESTION = "Summarize the whole video in a few sentences, from these notes about its parts:"
_MAX_SIDE = 640  # pixels of a frame


class Note(msgspec.Struct, frozen=True):
    """What a model says about a part of a video, or as the last one about all of it."""

    kind: Literal["part", "summary"]
    start_s: float
    end_s: float
    text: str


def summarize(
    client: Client,
    video: str,
    *,
    question: str = QUESTION,
    summary_question: str = SUMMARY_QUESTION,
    adapter: str | None = None,
    part_s: float = 30.0,
    num_frames: int = 8,
    stop: threading.Event,
    **sampling: Any,
) -> Iterator[Note]:
    """A note for each part of a file, several asked at a time, then the summary.

    Args:
        adapter: That answers about the parts; the base model writes the summary.
        num_frames: Of each part, at equal distances of time.
        stop: When set, no more parts are read, and there is no summary.
        sampling: As for `Client.generate`.

    Raises:
        BadImage: The file cannot be read.
        PromptTooLong: The frames of a part, or two notes, do not fit the model's context.
    """

    def ask(part: Video[bytes]) -> str:
        return client.generate(question, [part], adapter, **sampling).text.strip()

    def summary(notes: Sequence[Note]) -> Note:
        """Notes that do not fit into a prompt together are first summarized by halves."""
        lines = (f"{clock(note.start_s)} to {clock(note.end_s)}: {note.text}" for note in notes)
        try:
            text = client.generate("\n".join([summary_question, *lines]), **sampling).text.strip()
        except PromptTooLong:
            if len(notes) <= 2:
                raise
            half = len(notes) // 2
            return summary([summary(notes[:half]), summary(notes[half:])])
        return Note("summary", notes[0].start_s, notes[-1].end_s, text)

    last_s, parts = _read(video, part_s, num_frames)
    notes: list[Note] = []
    for _, text in in_order(ask, itertools.takewhile(lambda _: not stop.is_set(), parts)):
        start_s = part_s * len(notes)
        notes.append(Note("part", start_s, min(start_s + part_s, last_s), text))
        yield notes[-1]
    if not stop.is_set():
        yield summary(notes)


def _read(path: str, part_s: float, num_frames: int) -> tuple[float, Iterator[Video[bytes]]]:
    """The time of a file's last frame, and for each part the frames that are shown at its moments."""
    try:
        if is_picture(Path(path)):
            raise BadImage("it is a picture; ask about it with `vlora query`")
        times = frame_times(path)
    except BadImage as error:
        raise BadImage(f"cannot read video {path!r}: {error if os.path.exists(path) else 'no such file'}") from error
    starts = [part_s * number for number in range(max(1, math.ceil(times[-1] / part_s)))]
    moments = ([start + part_s * place / num_frames for place in range(num_frames)] for start in starts)
    chosen = [sorted(set(shown_at(times, each))) for each in moments]

    def parts() -> Iterator[Video[bytes]]:
        frames = frames_at(path, [*itertools.chain(*chosen)])
        for wanted in chosen:
            found = [(fit(picture, _MAX_SIDE), time_s) for time_s, picture in itertools.islice(frames, len(wanted))]
            if not found:
                raise BadImage(f"cannot read video {path!r}: no frame can be decoded from second {wanted[0]:g} on")
            yield Video(*zip(*found, strict=True))

    return times[-1], parts()
