"""The `vlora` command with a scripted engine, and with fusing that immediately writes canned results: `python -m
tests.server.scripted_vlora ...`.

As in the real one, a command imports only its own dependencies: guides run dozens of commands, and importing torch
takes seconds each time.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import vlora.cli


def fuse(plan: Path, out: Path, *, dry_run: bool, **options: object) -> None:
    """Write the small plan's adapter, some test pictures and its video."""
    if dry_run:
        return
    from tests.server.running import png
    from tests.server.scripted import write_adapter
    from tests.video_files import write_video

    adapter = write_adapter(out / "adapters" / "fused-1", {"digits": 1, "signs": 1, "actions": 4})
    Path(adapter, "adapter_model.safetensors").write_bytes(b"{}")
    for folder in ("signs", "actions"):
        (out / "test" / folder).mkdir(parents=True)
    for place, brightness in enumerate((20, 220, 20)):
        (out / "test" / "signs" / f"{place:04}-0.png").write_bytes(png(brightness, (36, 36)))
    write_video(out / "test" / "actions" / "stream.mp4", [20, 230, 20])


def main(fuse: Callable[..., None]) -> None:
    vlora.cli.cli.commands["fuse"].callback = fuse
    if "serve" in sys.argv:
        from tests.server.scripted import ENGINE_COMMAND, ByteProcessor
        from vlora.server import launch

        launch.serve = functools.partial(  # type: ignore[assignment]
            launch.serve,
            engine_command=ENGINE_COMMAND,
            load_processor=lambda model: ByteProcessor(),  # type: ignore[arg-type,return-value]
        )
    vlora.cli.main()


if __name__ == "__main__":
    main(fuse)
