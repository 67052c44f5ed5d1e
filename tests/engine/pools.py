"""Counts the native threads of an engine's process after each stage; runs in its own process.

    python -m tests.engine.pools FOLDER bounded|unbounded

Prints JSON: the count after each stage. unbounded: the background threads have their own OpenMP pools, for comparison.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fusion.embedded import checkpoint_path
from tests.engine.asking import ask
from tests.families import Prompt, VisionInput, vision_input
from tests.harness import FixedModes
from vlora.bench.dummy import language_shapes, small_config, write_adapter
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.models.loading import dummy_model
from vlora.server.http.response_format import json_grammar
from vlora.types import Mode, Request, SamplingParams

NUM_THREADS = 2
_SIDE = 16  # patches
_RANK = 32


def num_native_threads() -> int:
    """Threads that belong to no `threading.Thread`: those of OpenMP pools and of other libraries."""
    counts = []
    for _ in range(20):  # an ended thread stays in the list briefly
        python = {thread.native_id for thread in threading.enumerate()}
        counts.append(len({int(task) for task in os.listdir("/proc/self/task")} - python))
        time.sleep(0.005)
    return min(counts)


def main(folder: Path, *, bounded: bool) -> None:
    torch.set_num_threads(NUM_THREADS)
    model = dummy_model(small_config(), "float32", torch.device("cpu"), seed=0)
    shapes = language_shapes(model)
    paths = {name: write_adapter(folder / name, shapes, _RANK, seed) for seed, name in enumerate("abc")}
    config = EngineConfig(
        # The folder has the tokenizer, for grammars.
        model=str(checkpoint_path()),
        max_context=512,
        arena_bytes=256 * 2**20,
        threads=NUM_THREADS,
    )
    executor = None if bounded else ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(NUM_THREADS,))
    local = LocalEngine(config, model=model, executor=executor)
    counts: dict[str, int] = {}

    def ask(stage: str, *requests: Request, merged: str | None = None) -> None:
        mode = Mode.UNMERGED if merged is None else Mode.MERGED
        local.engine.parts.scheduler.policy = FixedModes(mode, merged)
        outputs = local.run(requests)
        assert all(parts[-1].error is None for parts in outputs.values()), outputs
        counts[stage] = num_native_threads()

    ask("base model", request("base"))
    ask("images", request("image", image=True))
    local.engine.register_adapters({"a": paths["a"], "b": paths["b"]})
    ask("merged adapter", request("one", "a"), request("another", "a"), merged="a")
    ask("two adapters", request("two a", "a"), request("two b", "b"))
    loading = local.engine.load_in_background("c", paths["c"])
    ask("adapter loaded", request("beside"))
    while local.engine.has_work:
        local.engine.step()
    assert loading.result().loaded
    ask("pinned", request("pinned", "c"))
    ask("grammar", request("grammar", grammar=json_grammar("json_object", None)))
    modes = local.engine.stats().steps_by_mode
    assert modes.get("merged") and modes.get("unmerged"), modes
    print(json.dumps(counts))
    local.engine.close()


def request(name: str, adapter: str | None = None, *, image: bool = False, grammar: str | None = None) -> Request:
    vision: tuple[VisionInput, ...] = ()
    prompt = list(range(10, 138))
    if image:
        fields = {
            "pixel_values": torch.randn(_SIDE**2, 3 * 2 * 14 * 14),
            "image_grid_thw": torch.tensor([[1, _SIDE, _SIDE]]),
        }
        vision = (vision_input("image", fields, _SIDE**2 // 4),)
        prompt += [small_config().image_token_id] * (_SIDE**2 // 4)
    sampling = SamplingParams(max_tokens=4, ignore_eos=grammar is None, grammar=grammar)
    return ask(Prompt({}, tuple(prompt), vision), name, adapter, sampling=sampling)


if __name__ == "__main__":
    main(Path(sys.argv[1]), bounded=sys.argv[2] == "bounded")
