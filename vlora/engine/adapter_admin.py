"""Adapter management by name: register, load, unload, pin. Files are read in the background while steps run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from vlora.engine.adapter_loader import AdapterLoader
from vlora.engine.compositions import Compositions, FormerAdapters
from vlora.errors import Aborted, BadAdapter, BadRequest, OverCapacity
from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.registry import AdapterRegistry, Registration
from vlora.memory.adapter_cache import AdapterCache
from vlora.memory.arena import pages_for
from vlora.memory.page_allocator import PageRun
from vlora.orchestrator.adapter_prefetch import pin_in_use
from vlora.orchestrator.scheduler import Scheduler
from vlora.types import AdapterStatus, HeadSummary


@dataclasses.dataclass(eq=False)
class _Call:
    """A call that spans several steps.

    Attributes:
        path: The folder to load; None to pin.
        done: Set when the call has taken effect or failed; it cannot be cancelled.
        reading: The read of its folder, once started.
    """

    name: str
    path: str | None = None
    version: str = ""
    done: Future[AdapterStatus] = dataclasses.field(default_factory=Future)
    reading: Future[Registration] | None = None

    def __post_init__(self) -> None:
        self.done.set_running_or_notify_cancel()


@dataclasses.dataclass(kw_only=True, eq=False)
class AdapterAdmin:
    """Adapter management for an engine.

    Not thread-safe: it belongs to the engine's thread, which calls `poll` between two steps.

    Compositions of adapters are not managed: `compositions` makes them for requests.

    Calls that read files (`load_in_background`, `pin_in_background`) form one queue over all names and take effect one
    at a time, in call order. `unload` and `unpin` take effect at once and abort earlier calls on the same name.
    """

    registry: AdapterRegistry
    pool: AdapterPool
    adapter_cache: AdapterCache
    scheduler: Scheduler
    loader: AdapterLoader
    several_ranks: bool

    def __post_init__(self) -> None:
        self.pinned: dict[str, PageRun] = {}
        self.former = FormerAdapters(self.registry, self.loader)
        self.compositions = Compositions(self.registry, self.loader, self.former, lambda: self._room.num_pages)
        self._queue: deque[_Call] = deque()

    # -- in the caller's thread ---------------------------------------------------------------------------------------

    def register(self, paths: Mapping[str, str], versions: Mapping[str, str] = {}) -> None:
        """Register folders by name, all or none, reading only their headers: thousands in seconds.

        The factors are read in the background when a request first needs them; non-finite values then fail the
        adapter's requests with BadAdapter. So does content that differs from `versions`, content hashes by name. If the
        name has that content, or had it and it is kept, the folder is not read.

        Raises BadAdapter, OverCapacity, or BadRequest for a pinned name.
        """
        known = {name: self.former.with_content(name, path, versions.get(name, "")) for name, path in paths.items()}
        changed = [name for name in paths if (found := known[name]) is None or not self.registry.is_current(found.key)]
        before = [self._replaced_key(name) for name in changed]
        new = {name: path for name, path in paths.items() if known[name] is None}
        self.registry.register(new, self.check_room, versions)
        for name, registration in known.items():
            if registration is not None:
                # One that was not read yet fails with other content.
                registration.header = registration.folder_header.expecting(versions[name])
                self.registry.enter(registration)
        for key in before:
            self._retire(key)

    def load(self, name: str, path: str) -> AdapterStatus:
        """Read a folder synchronously and register it under the name.

        Raises BadAdapter, OverCapacity, or BadRequest for a pinned name; the previous content then stays.
        """
        self._replaced_key(name)
        return self._accept(self.registry.read_folder(name, path, self.check_room))

    def unload(self, name: str) -> str | None:
        """Free the name. Returns its key, or None if its first load is still queued. Raises UnknownAdapter.

        Queued and running calls on the name end with Aborted.
        """
        if self._abort(f"adapter {name!r} was unloaded", name) and name not in self.registry:
            return None
        key = self.registry.get(name).key
        self.unpin(name)
        self.registry.remove(name)
        self.compositions.drop(key)
        self.former.add(key)
        return key

    def keep(self, versions: Mapping[str, Collection[str]]) -> dict[str, tuple[str, ...]]:
        """Keep these contents by name when others replace them, and no others. Returns those that are here."""
        for key in self.former.keep(versions):
            self.compositions.drop(key)
            self.loader.retire(key)
        return self.former.held

    def pin(self, name: str) -> AdapterStatus:
        """Load an adapter onto the device before returning, and keep it resident.

        Raises UnknownAdapter, BadAdapter if reading it fails, and OverCapacity if there is no room for it or another
        adapter would no longer fit.
        """
        registration = self.registry.get(name)
        if name not in self.pinned:
            self.registry.read(registration.key)
            self._start_load(registration)
            if registration.key in self.pool.loading:
                self.pool.finish_load(registration.key)
            self._pin_resident(registration)
        return self.status(registration)

    def unpin(self, name: str) -> AdapterStatus:
        """Allow an adapter to be evicted again; abort a queued or running pin. Raises UnknownAdapter."""
        registration = self.registry.get(name)
        self._abort(f"adapter {name!r} was unpinned", name, pins_only=True)
        if name in self.pinned:
            self.adapter_cache.unpin(registration.key)
            del self.pinned[name]
        return self.status(registration)

    # -- in the background --------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `poll` has calls to process."""
        return bool(self._queue)

    @property
    def pending(self) -> tuple[Future[Any], ...]:
        if not self._queue:
            return ()
        reading = self._queue[0].reading
        return (*self.registry.pending, *self.pool.pending) if reading is None else (reading,)

    def load_in_background(self, name: str, path: str, version: str = "") -> Future[AdapterStatus]:
        """As `load`, but files are read in the background. `poll` sets the result or the exception.

        Until then the name keeps its previous content. Unloading the name in between ends the call with Aborted.
        Content with another hash than `version` is refused, unless that is empty.
        """
        return self._begin(_Call(name, path, version))

    def pin_in_background(self, name: str) -> Future[AdapterStatus]:
        """As `pin`, but files are read and copied in the background. `poll` sets the result or the exception.

        Unpinning or unloading the name in between ends the call with Aborted.
        """
        return self._begin(_Call(name))

    def _begin(self, call: _Call) -> Future[AdapterStatus]:
        self._queue.append(call)
        self.poll()
        return call.done

    def poll(self) -> None:
        """Advance the queued calls as far as their files have been read."""
        while self._queue:
            call = self._queue[0]
            try:
                status = self._advance_pin(call.name) if call.path is None else self._advance_load(call, call.path)
            except Exception as error:
                self._queue.popleft()
                call.done.set_exception(error)
                continue
            if status is None:
                return
            self._queue.popleft()
            call.done.set_result(status)

    def check_room(self, name: str, num_bytes: int) -> None:
        """Raises OverCapacity if the adapter can never be loaded next to the pinned ones."""
        _check_fits(self._room, name, num_bytes)

    def close(self) -> None:
        self._abort("the engine was closed")

    def _advance_load(self, call: _Call, path: str) -> AdapterStatus | None:
        """Start a read, or register what was read; None while the read is running."""
        if call.reading is None:
            self._replaced_key(call.name)
            # counted here: only this thread may read the arena's bookkeeping
            fits = functools.partial(_check_fits, self._room)
            call.reading = self.registry.read_folder_in_background(call.name, path, fits, call.version)
        if not call.reading.done():
            return None
        registration = call.reading.result()
        self.check_room(call.name, registration.num_bytes)  # other adapters may have been pinned meanwhile
        return self._accept(registration)

    def _advance_pin(self, name: str) -> AdapterStatus | None:
        """Advance a pin; None while the adapter is being read or copied."""
        registration = self.registry.get(name)
        key = registration.key
        if name in self.pinned:
            return self.status(registration)
        if key in self.pool.loading:
            if not self.pool.is_copied(key):
                return None
            self.pool.finish_load(key)
        if key not in self.pool.resident:
            if self.registry.fetch(key) is None:
                if registration.error is not None:
                    raise BadAdapter(registration.error)
                return None
            self._start_load(registration)
            if key in self.pool.loading:
                return None
        self._pin_resident(registration)
        return self.status(registration)

    # -- statuses -----------------------------------------------------------------------------------------------------

    def statuses(self, after: str = "", most: int | None = None) -> tuple[AdapterStatus, ...]:
        """Statuses in order of name: at most `most` of those after `after`."""
        names = (name for name in self.registry.names if name > after)
        return tuple(self.status(self.registry.get(name)) for name in itertools.islice(names, most))

    def status(self, registration: Registration) -> AdapterStatus:
        adapter, header = registration.adapter, registration.header
        sharding = "bd" if header.keeps_blocks else registration.sharding
        return AdapterStatus(
            name=registration.name,
            version=adapter.version if adapter else "",
            rank=header.rank,
            num_bytes=registration.num_bytes,
            resident=registration.key in self.pool.resident,
            mergeable=self.loader.is_mergeable(registration.key),
            merge_fidelity=adapter.merge_fidelity if adapter else 0.0,
            touches_vision=header.touches_vision,
            heads=tuple(
                HeadSummary(
                    name=head.spec.name,
                    task=head.spec.task,
                    labels=tuple(head.spec.labels),
                    prompt=head.spec.prompt,
                    num_frames=head.spec.num_frames,
                )
                for head in header.heads.values()
            ),
            pinned=registration.name in self.pinned,
            sharding=sharding if self.several_ranks else None,
            loaded=adapter is not None,
            error=registration.error,
            num_loads=self.pool.loads_of(registration.key),
            domains=registration.folder_header.domains,
        )

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _room(self) -> _Room:
        return _Room(self.adapter_cache.room_beside(self.pinned.values()), len(self.pinned))

    def _replaced_key(self, name: str) -> str | None:
        """The key a name maps to before it gets new content. Raises BadRequest for a pinned name."""
        if name in self.pinned:
            raise BadRequest(f"adapter {name!r} is pinned; unpin it before loading other content under its name")
        return self.registry.get(name).key if name in self.registry else None

    def _accept(self, registration: Registration) -> AdapterStatus:
        before = self._replaced_key(registration.name)
        current = self.registry.accept(registration)
        self._retire(before)
        return self.status(current)

    def _retire(self, key: str | None) -> None:
        """Drop the previous content of a name, and its compositions."""
        if key is not None and not self.registry.is_current(key):
            self.compositions.drop(key)
            self.former.add(key)
            self.loader.retire(key)

    def _start_load(self, registration: Registration) -> None:
        """Start to load an adapter that was read onto the device. Raises OverCapacity."""
        assert registration.adapter is not None
        in_use = pin_in_use(self.scheduler.demand, self.adapter_cache)
        fits = self.pool.load(registration.adapter)
        for other in in_use:
            self.adapter_cache.unpin(other)
        if not fits:
            raise OverCapacity(
                f"no room to load adapter {registration.name!r} now: other adapters are in use; try again later"
            )

    def _pin_resident(self, registration: Registration) -> None:
        """Pin a resident adapter. Raises OverCapacity if another registered adapter would no longer fit."""
        name, run = registration.name, self.adapter_cache.run(registration.key)
        room = self.adapter_cache.room_beside((*self.pinned.values(), run))
        named = map(self.registry.get, self.registry.names)
        for other in (*named, *map(self.registry.known, {*self.loader.users, *self.loader.kept})):
            needed = pages_for(other.num_bytes)
            if other.name != name and other.name not in self.pinned and needed > room:
                raise OverCapacity(
                    f"pinning adapter {name!r} would leave {room} contiguous pages of the arena, but adapter "
                    f"{other.name!r} needs {needed}; unpin another one or start with a larger arena_bytes"
                )
        self.adapter_cache.pin(registration.key)
        self.pinned[name] = run

    def _abort(self, reason: str, name: str | None = None, pins_only: bool = False) -> bool:
        ended = [c for c in self._queue if name in (None, c.name) and not (pins_only and c.path is not None)]
        for call in ended:
            self._queue.remove(call)
            if call.reading is not None:
                call.reading.cancel()  # a running read finishes by itself, and its result is dropped
            call.done.set_exception(Aborted(reason))
        return bool(ended)


class _Room(NamedTuple):
    """Contiguous pages available to an adapter next to the pinned ones, and the number of pinned ones."""

    num_pages: int
    num_pinned: int


def _check_fits(room: _Room, name: str, num_bytes: int) -> None:
    needed = pages_for(num_bytes)
    if needed > room.num_pages:
        raise OverCapacity(
            f"adapter {name!r} needs {needed} contiguous pages of the arena, but only {room.num_pages} are available "
            f"({room.num_pinned} adapters are pinned); unpin some or start with a larger arena_bytes"
        )
