"""The process of one stage: runs it and writes its JSON, which has the fields of a bench's report and more.

python -m vlora.bench.gpu.process STAGE DEVICE FOLDER SECONDS
"""

from __future__ import annotations

import datetime
import importlib
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from vlora.bench.gpu.runner import INSTALLED, STAGES, Code, Stage
from vlora.bench.gpu.runner import write as write_record

_TRACE_LINES = 30


def main(name: str, device: str, folder: str, seconds: str) -> int:
    """Run the stage with this name in this process."""
    (stage,) = (each for each in STAGES if each.name == name)
    return run(stage, device, Path(folder), float(seconds))


def run(stage: Stage, device: str, folder: Path, seconds: float) -> int:
    """Run a stage for at most `seconds`, which the caller enforces."""
    started = time.monotonic()
    code = Code.here()
    found: dict[str, Any] = {
        "bench": f"gpu-check {stage.name}",
        "stage": stage.name,
        "ok": False,
        "error": {"message": "the stage did not return"},
        "device": device,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": 0.0,
        **code._asdict(),
    }

    def write() -> None:
        found["seconds"] = round(time.monotonic() - started, 2)
        write_record(folder / stage.file_name, found)

    def keep(result: dict[str, Any]) -> None:
        found["goals"] = [goal.as_dict() for goal in result.get("goals", ())]
        found["result"] = {name: value for name, value in result.items() if name != "goals"}
        write()

    write()
    try:
        found["env"] = _prepare(device)
        write()
        keep(_stage_result(stage, device, folder, started + seconds, keep))
    except Exception as error:
        lines = traceback.format_exc().splitlines()
        found["error"] = {
            "type": type(error).__name__,
            "message": str(error)[:2000],
            "traceback": lines[-_TRACE_LINES:],
        }
        write()
        print("\n".join(lines), file=sys.stderr)
        return 1
    found["ok"] = True
    del found["error"]
    write()
    return 0


def _prepare(device: str) -> dict[str, Any]:
    """Apply the settings under which results are comparable."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    from vlora.bench.report import environment, version_of

    found = environment()
    found["versions"] |= {name: version_of(name) for name in ("triton", "numpy", "safetensors", "msgspec")}
    found["versions"]["cuda"] = torch.version.cuda
    return found


def _stage_result(stage: Stage, device: str, folder: Path, ends_s: float, keep: Any) -> dict[str, Any]:
    import torch

    from vlora.bench.gpu.context import Context

    package = "vlora.bench.gpu.stages" if stage.name in INSTALLED else "benchmarks.gpu"
    module = importlib.import_module(f"{package}.{stage.name}")
    result: dict[str, Any] = module.run(Context(torch.device(device), folder, ends_s, keep))
    return result


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
