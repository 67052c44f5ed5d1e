"""A source read in a thread, slightly ahead of its heads."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from apps.video_analytics.sampling import Chunk, ClipShape
from apps.video_analytics.sources import Source, read_clips

_READ_AHEAD = 2  # clips of each head
_STOP_S = 2.0


class SourceReader:
    """Reads a source once for all heads. Each head takes its own clips. While one is behind, newer clips of a camera
    replace its older ones, and reading of a file waits. One clip with a `problem` stands for those replaced at once.

    Args:
        shapes: of the heads' clips.
        stop: when set, no more clips are read.
        shown, say, wait_s: see `read_clips`.

    Attributes:
        error: the error that ended reading for all heads; None while reading continues, and after the end of the
            source.
    """

    def __init__(
        self,
        source: Source,
        shapes: Sequence[ClipShape],
        *,
        stop: threading.Event,
        shown: bool = False,
        say: Callable[[str], None] = lambda text: None,
        wait_s: float = 0.0,
    ) -> None:
        self.error: Exception | None = None
        self._live = source.live
        self._stop = stop
        self._clips: list[queue.Queue[Chunk | Exception | None]] = [queue.Queue(_READ_AHEAD) for _ in shapes]
        self._next_index = [0] * len(shapes)
        self._behind_gap: list[Chunk | None] = [None] * len(shapes)  # clips to take after the problem before them
        self._left = [threading.Event() for _ in shapes]
        self._ended = [False] * len(shapes)
        clips = read_clips(source, shapes, stop=stop, shown=shown, say=say, wait_s=wait_s)
        self._thread = threading.Thread(target=self._read, args=(clips,), daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the source is still being read."""
        return self._thread.is_alive()

    def take(self, head: int, gone: threading.Event) -> Chunk | None:
        """The next clip of the head with this index; None at the end (also on repeated calls), and when `gone` is set.
        Raises the reader's error.
        """
        stopped_at: float | None = None
        while not (self._ended[head] or gone.is_set()):
            if (behind := self._behind_gap[head]) is not None:
                self._behind_gap[head] = None
                return behind
            try:
                clip = self._clips[head].get(timeout=0.1)
            except queue.Empty:
                # Reading ends after `stop` is set, unless a blocked camera holds the thread.
                if self._stop.is_set():
                    stopped_at = stopped_at or time.monotonic()
                    self._ended[head] = time.monotonic() - stopped_at > _STOP_S
                continue
            if isinstance(clip, Chunk):
                missing = clip.index - self._next_index[head]
                self._next_index[head] = clip.index + 1
                if not self._live or missing <= 0:
                    return clip
                self._behind_gap[head] = clip
                return _replaced(clip, missing)
            self._ended[head] = True
            if clip is not None:
                raise clip
        return None

    def leave(self, head: int) -> None:
        """Stop delivering clips to a head. Reading ends when the last head leaves."""
        self._left[head].set()
        if all(left.is_set() for left in self._left):
            self._thread.join(_STOP_S)  # a camera may block its reader for longer; the thread is a daemon

    def _read(self, clips: Iterator[tuple[int, Chunk]]) -> None:
        try:
            for head, clip in clips:
                self._put(head, clip, self._live)
                if all(left.is_set() for left in self._left):
                    return
        except Exception as error:
            self.error = error
        for head in range(len(self._left)):
            self._put(head, self.error, live=False)

    def _put(self, head: int, item: Chunk | Exception | None, live: bool) -> None:
        while not self._left[head].is_set():
            try:
                self._clips[head].put(item, timeout=0 if live else 0.1)
                return
            except queue.Full:
                if live:  # the head or the server is behind: only the newest clips are useful
                    with contextlib.suppress(queue.Empty):
                        self._clips[head].get_nowait()


def _replaced(clip: Chunk, missing: int) -> Chunk:
    """Stands for the clips before this one that are missing."""
    one = "a newer clip replaced this one before it could be sent"
    several = f"newer clips replaced {missing} clips before they could be sent"
    seconds = missing * clip.seconds
    return Chunk(
        clip.index - missing,
        max(0.0, clip.start_s - seconds),
        (),
        seconds=seconds,
        problem=one if missing == 1 else several,
        began=clip.began,
    )
