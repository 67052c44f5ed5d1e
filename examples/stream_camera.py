"""Answer a camera's frames with a task head: one result per frame, in order.

    vlora serve --adapters out/adapters
    python examples/stream_camera.py rtsp://camera-7/main --adapter traffic --head jam

Needs the extra `video` (OpenCV) for the camera; `vlora stream` does the same, with reconnecting and result files.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator

import cv2

from vlora.client import Client, FrameStream


def frames(source: str) -> Iterator[bytes]:
    """The frames of a camera, an RTSP address or a file, as JPEG bytes."""
    capture = cv2.VideoCapture(int(source) if source.isdecimal() else source)
    if not capture.isOpened():
        raise SystemExit(f"error: {source} cannot be opened; give a camera number, an address or a video file")
    try:
        while True:
            found, frame = capture.read()
            if not found:
                return
            yield cv2.imencode(".jpg", frame)[1].tobytes()
    finally:
        capture.release()


def watch(stream: FrameStream, source: str) -> Iterator[str]:
    """Send all frames of the source; yield one line per frame."""

    def send() -> None:
        for frame in frames(source):
            stream.send(frame)
        stream.end()

    sender = threading.Thread(target=send)
    sender.start()
    for result in stream:
        if result.answer is not None:
            yield f"{result.number} {result.answer.label} {result.answer.confidence:.2f}"
        else:
            yield f"{result.number} {result.dropped or (result.error and result.error.message)}"
    sender.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a camera number, an RTSP address or a video file")
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=18861)
    args = parser.parse_args()
    with (
        Client(host=args.host, port=args.port) as client,
        client.open_stream(adapter=args.adapter, head=args.head, max_latency_s=1.0, drop="newest") as stream,
    ):
        for line in watch(stream, args.source):
            print(line, flush=True)


if __name__ == "__main__":
    main()
