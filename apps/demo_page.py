"""The demonstration's page: fusion's own page, and the results of serving its adapters."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from apps.opencv import cv2

_END = "</main>"
_POSTER_S = 1.5  # seconds from the start of a video


def write_page(file: Path, fused: Path, result: Mapping[str, Any]) -> None:
    """Write fusion's page followed by the results of serving. fused: the folder of fusion's page, next to or below
    `file`'s folder; links are made relative to `file`. Videos are named in `result`, in the same folder as `file`.
    """
    environment = Environment(loader=PackageLoader("apps", "."), autoescape=True, undefined=StrictUndefined)
    posters = {
        domain["name"]: poster(file.parent / domain["stream"]["annotated"])
        for domain in result["domains"]
        if "stream" in domain
    }
    served = environment.get_template("demo.html.j2").render(result=result, posters=posters)
    page = (fused / "report.html").read_text()
    page = page.replace('href="adapters/', f'href="{fused.relative_to(file.parent).as_posix()}/adapters/')
    before, end, after = page.rpartition(_END)
    file.write_text(f"{before}{served}{end}{after}")


def poster(video: Path) -> str:
    """A frame of a video as a data URL (JPEG), which browsers show until playback."""
    capture = cv2.VideoCapture(str(video))
    try:
        wanted = int(_POSTER_S * (capture.get(cv2.CAP_PROP_FPS) or 1))
        shown = None
        for _ in range(wanted + 1):
            decoded, frame = capture.read()
            shown = frame if decoded else shown
    finally:
        capture.release()
    if shown is None:
        return ""
    encoded = cv2.imencode(".jpg", shown, [cv2.IMWRITE_JPEG_QUALITY, 85])[1].tobytes()
    return f"data:image/jpeg;base64,{base64.b64encode(encoded).decode()}"
