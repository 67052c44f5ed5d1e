"""One camera of a server in a process of its own, which `vlora.server.streams.cameras` starts.

The first line of stdin is the camera's description in JSON, a second one starts it, and the end of stdin stops it. Each
line of stdout is a `CameraReport`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from apps.video_analytics.answers import ChunkResult
from apps.video_analytics.plan.plan_file import PlanFile, check_server, plan_of
from apps.video_analytics.plan.run_plan import run_plan
from apps.video_analytics.plan.schema import is_path
from apps.video_analytics.sink_plan import EventResult
from apps.video_analytics.sources import SourceHealth
from vlora.client import Client
from vlora.errors import BadPlan, VLoraError
from vlora.opencv import clock
from vlora.types import ErrorValue
from vlora.types.camera import CameraEvent, CameraHealth, CameraReport

_INTERVAL_S, _RATE_S = 1.0, 5.0  # between reports, and over which frames are counted
_HUNG_S = 120.0  # without a frame or an error, which OpenCV reports after 30 s, and pauses take as long
_STOP_S = 3.0
_SINKS = "VLORA_CAMERA_SINKS"  # variable with the folder of the sinks of all cameras


class CameraProcess:
    """Reads the camera and reports what happens to it."""

    def __init__(self, reports: BinaryIO) -> None:
        self._reports = reports
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._health = SourceHealth()
        self._num_answers = self._num_problems = 0

    def run(self, file: PlanFile, client: Client) -> None:
        """Read until the source ends, or stdin."""
        (camera,) = file.plan.cameras
        reading = threading.Thread(target=self._read, args=(file, client, camera.name), daemon=True)
        reading.start()
        threading.Thread(target=self._wait_for_end, daemon=True).start()
        found = self._health
        counted = deque([(clock(), 0)], round(_RATE_S / _INTERVAL_S) + 1)
        while reading.is_alive():
            reading.join(_INTERVAL_S)
            counted.append((now := clock(), found.num_frames))
            health = CameraHealth(
                connected=found.num_frames > 0 and not found.lost,
                fps=(found.num_frames - counted[0][1]) / (now - counted[0][0]),
                age_s=None if found.last_s is None else now - found.last_s,
                num_frames=found.num_frames,
                num_answers=self._num_answers,
                num_problems=self._num_problems,
                num_reconnects=found.num_reconnects,
                error=without_urls(found.error) or None,
            )
            self.report(health=health)
            if not is_path(camera.source) and now - found.noted_s > _HUNG_S:
                self.report(ended=f"the camera hung: no frame and no error for {_HUNG_S:.0f} s")
                os._exit(1)  # OpenCV holds the thread

    def report(self, **fields: Any) -> None:
        with self._lock:
            self._reports.write(msgspec.json.encode(CameraReport(**fields)) + b"\n")

    def _read(self, file: PlanFile, client: Client, name: str) -> None:
        own: dict[str, Any] = {"on_result": self._on_result, "on_event": self._on_event, "stop": self._stop}
        try:
            sinks = Path(os.environ[_SINKS]) / name if _SINKS in os.environ else None
            run_plan(client, file, wait_s=float("inf"), health={name: self._health}, sinks=sinks, **own)
            self.report(ended="")
        except Exception as error:
            self.report(ended=value_of(error).message)

    def _wait_for_end(self) -> None:
        while os.read(0, 4096):
            pass
        self._stop.set()
        threading.Event().wait(_STOP_S)
        os._exit(0)

    def _on_result(self, result: ChunkResult) -> None:
        self._num_answers += result.problem is None
        self._num_problems += result.problem is not None
        self._health.error = result.problem or self._health.error

    def _on_event(self, event: EventResult) -> None:
        about = {name: getattr(event, name) for name in ("event", "time", "label", "confidence", "problem")}
        self.report(event=CameraEvent(text=None if event.text is None else event.text.text, **about))


def without_urls(text: str) -> str:
    """A message with the scheme only of each URL in it: any other part may be a credential."""
    return re.sub(r"(\w+://)[^\s'\"]*", r"\1...", text)


def value_of(error: Exception) -> ErrorValue:
    if not isinstance(error, VLoraError):
        error = VLoraError(f"internal error ({type(error).__name__}: {error})")
    return ErrorValue(error.code, without_urls(str(error)).replace("`cameras[0].", "`"))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the server, which ends this process
    process = CameraProcess(os.fdopen(os.dup(1), "wb", buffering=0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries may print
    with Client() as client:
        try:
            file = plan_of(json.loads(sys.stdin.readline()))
            if file.plan.cameras[0].clips is not None:
                raise BadPlan("field `clips`: a server keeps none; run the plan with `vlora stream`")
            if file.plan.cameras[0].sinks and _SINKS not in os.environ:
                raise BadPlan("field `sinks`: not allowed; have the operator of this server set --camera-sinks")
            check_server(file, client.adapters())
        except Exception as error:
            process.report(refused=value_of(error))
            return
        process.report(tasks=tuple(task.name for task in file.plan.cameras[0].tasks))
        if sys.stdin.readline():
            process.run(file, client)


if __name__ == "__main__":
    main()
