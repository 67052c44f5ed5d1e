"""Moves every page of an engine's arena between steps."""

from __future__ import annotations

import random

from tests.harness import RecordingEngine
from vlora.engine import Engine


def shuffle(engine: Engine, draws: random.Random) -> int:
    """Move each movable block and adapter to a random free place, if there is one, and fill free pages with NaN.
    Returns the number of moves.
    """
    allocator, cache, pool = engine.parts.block_manager.allocator, engine.parts.adapter_cache, engine.parts.device.pool
    moved = 0
    for block in sorted(allocator.taken_blocks | allocator.cached_blocks):
        pages = allocator.page_map()
        runs = [(target, allocator.pages_of(target)) for target in range(allocator.num_blocks)]
        if free := [target for target, run in runs if not any(pages[run.first_page : run.end])]:
            allocator.move_block(block, draws.choice(free))
            moved += 1
    for name in sorted(cache.resident):
        run = cache.run(name)
        pages = allocator.page_map()
        pages[run.first_page : run.end] = bytes(run.num_pages)
        places = range(cache.max_pages - run.num_pages + 1)
        target = draws.choice([first for first in places if not any(pages[first : first + run.num_pages])])
        if name not in cache.pinned and target != run.first_page:
            cache.move(name, target)
            moved += 1
    for name in cache.drain_moved():
        pool.relocate(name)
    for page, kind in enumerate(allocator.page_map()):
        if not kind:
            engine.parts.device.arena.buffer(page, 1).fill_(255)  # NaN in every dtype
    return moved


def shuffled(recorded: RecordingEngine) -> list[int]:
    """Shuffle before every step from now on; returns the list of the number of moves per step."""
    counts: list[int] = []
    draws = random.Random(0)
    inner = recorded.engine.step

    def step():  # type: ignore[no-untyped-def]
        counts.append(shuffle(recorded.engine, draws))
        recorded.engine.check_integrity()
        return inner()

    recorded.engine.step = step  # type: ignore[method-assign]
    return counts
