"""A `vlora` command that fuses by writing canned test data, and serves with a scripted engine, for the demo's test."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.server import scripted_vlora
from tests.server.scripted import write_adapter


def fuse(plan: Path, out: Path, **options: object) -> None:
    """Two domains of bright and dark pictures; every fourth label of `day` is wrong, and it has a video. A third has
    no head, and half of its labels equal the engine's text. The plan `broken` fails.
    """
    if plan.name == "broken":
        sys.exit(7)
    from tests.server.running import png
    from tests.video_files import write_video

    heads = {"night": 1, "day": 2}
    domains = [{"name": name, "question": f"is it {name}?", "answer": "head", "head": name} for name in heads]
    domains.append({"name": "words", "question": "is it words?"})
    write_adapter(out / "adapters" / "fused-1", heads, domains)
    for name, frames in (("night", 1), ("day", 2), ("words", 1)):
        folder = out / "test" / name
        folder.mkdir(parents=True)
        entries = []
        for i in range(12):
            files = [f"{i}-{place}.png" for place in range(frames)]
            for file in files:
                (folder / file).write_bytes(png(220 if i % 2 else 20))
            wrong = name == "day" and i % 4 == 0
            label = "bright" if bool(i % 2) != wrong else "dark"
            if name == "words":
                label = "Yes" if i % 2 else "no"
            entries.append({"frames": files, "question": f"is it {name}?", "label": label})
        (folder / "labels.json").write_text(json.dumps(entries))
    write_video(out / "test/day/stream.mp4", [20, 20, 230])
    stream = {"video": "stream.mp4", "labels": ["dark", "bright", "bright"]}
    (out / "test/day/stream.json").write_text(json.dumps(stream))
    domain = {"task": "classification", "real_or_synthetic": "synthetic", "metric": "accuracy", "threshold": 0.7}
    numbers = {"before": 0.1, "after": 0.9, "adapter": "fused-1"}
    report = {
        "base": "scripted",
        "domains": [{"name": name, **domain, **numbers} for name in ("night", "day", "words")],
        "adapters": [{"name": "fused-1", "domains": ["night", "day", "words"]}],
        "rollbacks": [],
    }
    (out / "report.json").write_text(json.dumps(report))
    (out / "report.html").write_text('<main><a href="adapters/fused-1/">fused-1</a></main>\n')


if __name__ == "__main__":
    scripted_vlora.main(fuse)
