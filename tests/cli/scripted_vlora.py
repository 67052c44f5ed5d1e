"""A `vlora` command that fuses by writing canned test data, and serves with a scripted engine, for the demo's test."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from tests.server.scripted import ENGINE_COMMAND, ByteProcessor, write_adapter
from vlora.config import EngineConfig, ServerConfig


def fuse(out: Path) -> None:
    """Two domains of bright and dark pictures; every fourth label of `day` is wrong, and it has a video. A third has
    no head, and half of its labels equal the engine's text.
    """
    import cv2
    import numpy as np

    from tests.server.running import png

    heads = {"night": 1, "day": 2}
    domains = [{"name": name, "question": f"is it {name}?", "answer": "head", "head": name} for name in heads] + [
        {"name": "words", "question": "is it words?"}
    ]
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
    video = cv2.VideoWriter(str(out / "test/day/stream.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 10, (64, 48))
    for place in range(30):
        video.write(np.full((48, 64, 3), 20 if place < 20 else 230, np.uint8))
    video.release()
    (out / "test/day/stream.json").write_text(
        json.dumps({"video": "stream.mp4", "labels": ["dark", "bright", "bright"]})
    )
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


def serve(adapters: Path) -> None:
    from vlora.server.launch import serve as serve_until_stopped

    asyncio.run(
        serve_until_stopped(
            EngineConfig(model="scripted"),
            ServerConfig(rpyc_port=0),
            {config.parent.name: str(config.parent) for config in adapters.glob("*/adapter_config.json")},
            announce=lambda line: print(line, flush=True),
            engine_command=ENGINE_COMMAND,
            load_processor=lambda model: ByteProcessor(),  # type: ignore[arg-type,return-value]
        )
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fuse", "broken", "--out", _, "--restart"]:
            sys.exit(7)
        case ["fuse", _, "--out", out, "--restart"]:
            fuse(Path(out))
        case ["serve", "--model", "scripted", "--adapters", folder, "--rpyc-port", "0", *policy]:
            assert policy in ([], ["--policy", "unmerged_only"]), policy
            serve(Path(folder))
        case other:
            sys.exit(f"unexpected: {other}")
