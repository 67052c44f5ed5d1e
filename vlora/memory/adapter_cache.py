"""Which adapters are on the device: least recently used first out, pinned ones never. Books only."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Set

from vlora.memory.books import ArenaBooks, Run
from vlora.memory.compaction import Plan, plan_room

_MOVED = 2  # what a page that moves counts beside one of an evicted adapter


class Residency:
    """Adapter runs in the arena, all of them below page `max_pages`.

    The share is a line in the arena, not a mere sum: runs scattered over the KV side could each spoil a whole block,
    and then nobody could promise a request how many blocks it finds.
    """

    def __init__(self, books: ArenaBooks, max_pages: int) -> None:
        assert 0 <= max_pages <= books.num_pages
        self.books = books
        self.max_pages = max_pages
        self._runs: OrderedDict[str, Run] = OrderedDict()  # least recently used first
        self._reserved: set[Run] = set()
        self._pins: Counter[str] = Counter()
        self._evicted: list[str] = []
        self._moved: list[str] = []
        self._room: int | None = None  # most pages in a row beside what stays, or more; None until somebody fails
        self._resident: frozenset[str] | None = frozenset()  # None when it is to be made anew

    @property
    def resident(self) -> frozenset[str]:
        """The same object as long as nothing comes or goes."""
        if self._resident is None:
            self._resident = frozenset(self._runs)
        return self._resident

    @property
    def num_pages(self) -> int:
        """Pages held, reserved ones included."""
        return sum(run.num_pages for run in (*self._runs.values(), *self._reserved))

    def run(self, name: str) -> Run:
        return self._runs[name]

    @property
    def runs(self) -> tuple[tuple[str | None, Run], ...]:
        """Every run and whose it is; None for reserved ones."""
        return (*self._runs.items(), *((None, run) for run in self._reserved))

    def bring(self, name: str, num_pages: int) -> Run | None:
        """Find room for an adapter, moving what is in the way and evicting cold ones as far as needed; None when it
        cannot fit now.

        Nothing is moved or evicted in vain: None leaves everything as it was. Names evicted are in `drain_evicted()`,
        those that lie elsewhere now in `drain_moved()`.
        """
        if name in self._runs:
            self.touch(name)
            return self._runs[name]
        first_page = self._make_room(num_pages)
        if first_page is None:
            return None
        run = self.books.take_run(Run(first_page, num_pages))
        self._runs[name] = run
        self._resident = None
        return run

    def drain_evicted(self) -> tuple[str, ...]:
        """Names evicted since the last call."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def drain_moved(self) -> tuple[str, ...]:
        """Names whose run is another one since the last call; their content lies there already."""
        moved, self._moved = tuple(self._moved), []
        return moved

    def yield_blocks(self, num_blocks: int, kept: Set[str | None]) -> None:
        """Free up to so many more KV blocks: adapters leave that are neither pinned nor kept, least recently used
        first. Names evicted are in `drain_evicted()`."""
        wanted = self.books.num_free_blocks + num_blocks
        for name in [name for name in self._runs if name not in kept and not self._pins[name]]:
            if self.books.num_free_blocks >= wanted:
                break
            self.drop(name)
            self._evicted.append(name)

    def reserve(self, num_pages: int) -> Run | None:
        """Pages of the adapters' share for something made from them, such as a packed copy. Never evicts."""
        run = self.books.allocate_run(num_pages, self.max_pages)
        if run is not None:
            self._reserved.add(run)
        return run

    def release(self, run: Run) -> None:
        """Give reserved pages back."""
        self._reserved.remove(run)
        self._room = None
        self.books.free_run(run)

    def room_beside(self, kept: Iterable[Run]) -> int:
        """Most pages in a row that an adapter finds once everything but these runs has left."""
        edges = [(0, 0), *sorted((run.first_page, run.end) for run in kept), (self.max_pages, self.max_pages)]
        return max(start - end for (_, end), (start, _) in itertools.pairwise(edges))

    def room_without(self, reserved: Run) -> int:
        """Most pages in a row that an adapter might find if these were given back; KV blocks may lie there."""
        return self.room_beside(self._staying - {reserved})

    def touch(self, name: str) -> None:
        """Mark as just used."""
        self._runs.move_to_end(name)

    def pin(self, name: str) -> None:
        """Keep a resident adapter from being evicted until unpinned as often as pinned."""
        assert name in self._runs, f"{name} is not resident"
        self._pins[name] += 1

    def unpin(self, name: str) -> None:
        assert self._pins[name] > 0, f"{name} is not pinned"
        self._pins[name] -= 1
        if not self._pins[name]:
            del self._pins[name]
            self._room = None

    def drop(self, name: str) -> None:
        """Free an adapter's pages. It must not be pinned."""
        assert not self._pins[name], f"{name} is pinned {self._pins[name]} times"
        self.books.free_run(self._runs.pop(name))
        self._resident = None

    @property
    def _staying(self) -> set[Run]:
        """Runs that may neither move nor leave."""
        return {*self._reserved, *(self._runs[name] for name in self._pins)}

    def _make_room(self, num_pages: int) -> int | None:
        """Free `num_pages` in a row: the first of them, or None, and nothing changed.

        By moving what is not pinned, by evicting, or both. Pages are counted: those that are copied now, and those of
        evicted adapters, which are copied if they come back, at half their number. The fewest win, and of two equal
        ways the one that evicts less.
        """
        if (gap := self.books.find_gap(num_pages, self.max_pages)) is not None:
            return gap
        if self._room is not None and self._room < num_pages:
            return None
        cold = [name for name in self._runs if not self._pins[name]]
        movable = [self._runs[name] for name in cold]
        if plan_room(self.books, num_pages, self.max_pages, movable, movable) is None:
            # Too few stay too few while more is pinned: in a step that has no room hundreds of adapters may ask.
            self._room = self.room_beside(self._staying)
            return None
        best: tuple[int, int, Plan] | None = None  # pages, number of evicted, how
        num_evicted = held = 0
        held_by_runs = sum(run.num_pages for run in self.books.runs)
        while best is None or num_evicted < best[0]:
            gone = movable[:held]
            if held_by_runs - num_evicted + num_pages <= self.max_pages:
                plan = plan_room(self.books, num_pages, self.max_pages, movable, gone)
                if plan is not None and (best is None or num_evicted + _MOVED * plan.num_pages < best[0]):
                    best = num_evicted + _MOVED * plan.num_pages, held, plan
            if held == len(cold):
                break
            num_evicted += movable[held].num_pages
            held += 1
        if best is None:
            return None
        _, held, plan = best
        for name in cold[:held]:
            self.drop(name)
            self._evicted.append(name)
        self._carry_out(plan)
        return plan.first_page

    def _carry_out(self, plan: Plan) -> None:
        names = {run: name for name, run in self._runs.items()}
        for block in plan.forgotten:
            self.books.displace(block)
        for run, first_page in plan.runs:
            self._runs[names[run]] = self.books.move_run(run, first_page)
            self._moved.append(names[run])
        for block, target in plan.blocks:
            self.books.move_block(block, target)

    def check_integrity(self) -> None:
        """Prove that the arena's runs are exactly the adapters' and the reserved ones, all within their share."""
        held = [*self._runs.values(), *self._reserved]
        assert len(held) == len(set(held)), "two adapters share a run"
        assert set(held) == self.books.runs, f"{len(held)} runs are held, the books list {len(self.books.runs)}"
        assert all(run.end <= self.max_pages for run in held), f"a run lies beyond page {self.max_pages}"
        assert all(count > 0 and name in self._runs for name, count in self._pins.items()), "a pin outlived its adapter"
        assert self._room is None or self._room >= self.room_beside(self._staying), "there is more room than was found"


class Appointed:
    """The same questions on a rank that keeps no books: rank 0 has said where an adapter lies, and when it leaves."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}

    def appoint(self, name: str, run: Run) -> None:
        self._runs[name] = run

    def bring(self, name: str, num_pages: int) -> Run:
        run = self._runs[name]
        assert run.num_pages == num_pages, f"{name} takes {num_pages} pages here and {run.num_pages} on rank 0"
        return run

    def run(self, name: str) -> Run:
        return self._runs[name]

    def drop(self, name: str) -> None:
        del self._runs[name]

    def drain_evicted(self) -> tuple[str, ...]:
        return ()

    def drain_moved(self) -> tuple[str, ...]:
        return ()

    def reserve(self, num_pages: int) -> Run | None:
        """Never: rank 0 says where packed copies lie."""
        return None

    def release(self, run: Run) -> None: ...

    def room_without(self, reserved: Run) -> int:
        raise AssertionError("nothing was reserved")

    def touch(self, name: str) -> None: ...

    def pin(self, name: str) -> None: ...

    def unpin(self, name: str) -> None: ...
