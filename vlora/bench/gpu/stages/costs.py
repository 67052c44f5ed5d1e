"""The cost of a step on this machine, as `vlora bench costs`; `costs.json` in the folder of the results is an input of
`vlora simulate --costs`.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import torch

from vlora.bench.costs import costs_as_dict, fit
from vlora.bench.dummy import BenchModel, model_named, small_config
from vlora.bench.gpu.context import Context
from vlora.bench.report import Report
from vlora.run_folder import write_whole

_MODEL, _DECODE_STEPS = "qwen2-vl-7b", 3
_SMALL_BATCHES = ((1, 16), (2, 32), (4, 8))


def run(context: Context) -> dict[str, Any]:
    """Fit the costs of steps for the simulator."""
    import scipy  # noqa: F401  (before the steps are timed)

    if context.on_gpu:
        model = model_named(_MODEL)
        fitted = fit(model, context.device, _DECODE_STEPS)
    else:
        torch.set_num_threads(1)
        model = BenchModel("small", small_config, 2**27)
        fitted = fit(model, context.device, 1, _SMALL_BATCHES, sides=(4, 8))
    found = costs_as_dict(fitted, model.name)
    report = Report("costs", [], [], found=found)
    write_whole(context.out / "costs.json", json.dumps(report.as_dict()).encode() + b"\n", durable=False)
    errors = [abs(fitted.costs.step_s(size) / seconds - 1) for size, seconds in fitted.samples]
    return {
        "summary": f"{len(errors)} steps, median relative error {statistics.median(errors):.3f}",
        **found,
        "samples": [{**size._asdict(), "seconds": seconds} for size, seconds in fitted.samples],
    }
