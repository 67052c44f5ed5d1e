"""A camera over RTSP, by GStreamer's server, with a clock in its pictures. Run by the system's Python, which has `gi`:
`/usr/bin/python3 tests/apps/rtsp_camera.py h264|mjpeg PHASE ...`, each phase KIND:RATE:SECONDS.

Kinds: `send` sends pictures, `freeze` repeats the last one, `stall` sends nothing, `drop` closes all connections, after
which new ones are served. Phases begin with the first connection. Prints the address.

A picture has 40 blocks, dark or bright: the bits of the milliseconds of `time.monotonic` when it was taken.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from typing import Any

gi: Any = importlib.import_module("gi")  # of the system's Python only
gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
GLib: Any
Gst: Any
GstRtspServer: Any
GLib, Gst, GstRtspServer = (
    importlib.import_module(f"gi.repository.{name}") for name in ("GLib", "Gst", "GstRtspServer")
)

COLUMNS, ROWS, BLOCK = 8, 5, 16
WIDTH, HEIGHT = COLUMNS * BLOCK, ROWS * BLOCK
ENCODERS = {
    "h264": "x264enc tune=zerolatency speed-preset=ultrafast key-int-max=10 ! rtph264pay name=pay0 config-interval=1",
    "mjpeg": "jpegenc quality=90 ! rtpjpegpay name=pay0",
}


def picture(milliseconds: int) -> bytes:
    bits = [milliseconds >> place & 1 for place in range(COLUMNS * ROWS)]
    rows = [
        bytes(b"".join((b"\xe0" if bit else b"\x20") * BLOCK for bit in bits[first : first + COLUMNS]))
        for first in range(0, len(bits), COLUMNS)
    ]
    luma = b"".join(row * BLOCK for row in rows)
    return luma + b"\x80" * (WIDTH * HEIGHT // 2)  # I420 without color


class Camera:
    """The phases, in real time, into the source of whichever connection is open."""

    def __init__(self, server: Any, phases: list[tuple[str, float, float]]) -> None:
        self.server, self.phases = server, phases
        self.source: Any = None
        self.opened, self.started = 0.0, False

    def open(self, _factory: Any, media: Any) -> None:
        self.source = media.get_element().get_child_by_name("source")
        self.opened = time.monotonic()
        media.connect("unprepared", self.closed)
        if not self.started:
            self.started = True
            threading.Thread(target=self.run, daemon=True).start()

    def closed(self, _media: Any) -> None:
        self.source = None

    def close_connections(self) -> bool:
        self.server.client_filter(lambda *_: GstRtspServer.RTSPFilterResult.REMOVE)
        return False  # once

    def run(self) -> None:
        at, shown = time.monotonic(), b""
        for kind, rate, seconds in self.phases:
            if kind == "drop":
                GLib.idle_add(self.close_connections)
            ends = at + seconds
            while at < ends:
                at += 1 / rate
                time.sleep(max(0.0, at - time.monotonic()))
                if kind == "stall":
                    continue
                now = time.monotonic()
                if kind != "freeze":
                    shown = picture(int(now * 1e3))
                if (source := self.source) is not None:
                    buffer = Gst.Buffer.new_wrapped(shown)
                    buffer.pts = int((now - self.opened) * Gst.SECOND)
                    source.emit("push-buffer", buffer)


def main() -> None:
    Gst.init(None)
    server = GstRtspServer.RTSPServer(service="0")
    factory = GstRtspServer.RTSPMediaFactory(shared=True)
    factory.set_launch(
        f"( appsrc name=source is-live=true format=time caps=video/x-raw,format=I420,width={WIDTH},height={HEIGHT},"
        f"framerate=25/1 ! {ENCODERS[sys.argv[1]]} )"
    )
    phases = [(kind, float(rate), float(seconds)) for kind, rate, seconds in (one.split(":") for one in sys.argv[2:])]
    factory.connect("media-configure", Camera(server, phases).open)
    server.get_mount_points().add_factory("/camera", factory)
    server.attach(None)
    print(f"rtsp://127.0.0.1:{server.get_bound_port()}/camera", flush=True)
    GLib.MainLoop().run()


if __name__ == "__main__":
    main()
