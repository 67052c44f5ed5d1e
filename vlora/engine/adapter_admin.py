"""Adapters by name, as an operator changes them: register, load, unload, pin. Files are read beside the steps."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from vlora.errors import Aborted, BadAdapter, BadRequest, OverCapacity
from vlora.lora import AdapterRegistry, Registration
from vlora.lora.adapter_pool import AdapterBank
from vlora.memory.adapter_cache import Residency
from vlora.memory.arena import pages_for
from vlora.memory.books import Run
from vlora.orchestrator import Scheduler, pin_in_use
from vlora.types import AdapterStatus, HeadSummary


class _Call:
    """A call that takes longer than a step. done: set once it has taken effect or has failed; it cannot be cancelled.
    reading: the folder that it reads, once it does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done: Future[AdapterStatus] = Future()
        self.done.set_running_or_notify_cancel()
        self.reading: Future[Registration] | None = None


class _Load(_Call):
    def __init__(self, name: str, path: str) -> None:
        super().__init__(name)
        self.path = path


class _Pin(_Call):
    pass


class AdapterAdmin:
    """Not thread-safe: belongs to the engine's thread, which calls `poll` between two steps.

    Calls that read files (`load_in_background`, `pin_in_background`) form one queue, over all names, and take effect in
    the order in which they came, one at a time. `unload`, and unpinning, take effect at once and end the calls on the
    name that came before.
    """

    def __init__(
        self,
        *,
        registry: AdapterRegistry,
        bank: AdapterBank,
        residency: Residency,
        scheduler: Scheduler,
        retire: Callable[[str | None], None],
        is_mergeable: Callable[[str], bool],
        several_ranks: bool,
    ) -> None:
        """Args:
        retire: Drops the registration of a key that neither a name stands for nor a request uses.
        is_mergeable: Whether the adapter of a key may be merged.
        several_ranks: Whether a status shows how factors lie on the ranks.
        """
        self.pinned: dict[str, Run] = {}
        self._registry = registry
        self._bank = bank
        self._residency = residency
        self._scheduler = scheduler
        self._retire = retire
        self._is_mergeable = is_mergeable
        self._several_ranks = several_ranks
        self._queue: deque[_Call] = deque()

    # -- in the caller's thread ---------------------------------------------------------------------------------------

    def register(self, paths: Mapping[str, str]) -> None:
        """Register folders by their headers, all or none. Raises BadAdapter, OverCapacity, BadRequest for a pinned
        name."""
        before = [self._key_before(name) for name in paths]
        self._registry.register(paths, self._check_room)
        for key in before:
            self._retire(key)

    def load(self, name: str, path: str) -> AdapterStatus:
        """Read a folder here and now, and put it under the name. Raises BadAdapter, OverCapacity, BadRequest for a
        pinned name; the old content then stays."""
        self._key_before(name)
        return self._accept(self._registry.read_folder(name, path, self._check_room))

    def unload(self, name: str) -> str | None:
        """Free the name; the key that it stood for, None where it was still to be loaded. Raises UnknownAdapter.

        Calls on the name that wait or are under way end with Aborted.
        """
        if self._abort(f"adapter {name!r} was unloaded", name) and name not in self._registry:
            return None
        key = self._registry.get(name).key
        self.unpin(name)
        self._registry.remove(name)
        return key

    def pin(self, name: str) -> AdapterStatus:
        """Bring an adapter to the device before this returns, and keep it there. Raises UnknownAdapter, BadAdapter,
        OverCapacity."""
        registration = self._registry.get(name)
        if name not in self.pinned:
            self._registry.read(registration.key)
            self._bring(registration)
            if registration.key in self._bank.arriving:
                self._bank.settle(registration.key)
            self._keep(registration)
        return self.status(registration)

    def unpin(self, name: str) -> AdapterStatus:
        """Let an adapter be evicted again. Raises UnknownAdapter. Pinning it that waits or is under way is aborted."""
        registration = self._registry.get(name)
        self._abort(f"adapter {name!r} was unpinned", name, _Pin)
        if name in self.pinned:
            self._residency.unpin(registration.key)
            del self.pinned[name]
        return self.status(registration)

    # -- beside the steps ---------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a call waits for `poll`."""
        return bool(self._queue)

    @property
    def pending(self) -> tuple[Future[Any], ...]:
        """What the call under way waits for."""
        if not self._queue:
            return ()
        reading = self._queue[0].reading
        return (*self._registry.pending, *self._bank.pending) if reading is None else (reading,)

    def load_in_background(self, name: str, path: str) -> Future[AdapterStatus]:
        """As `load`, but files are read beside the steps. The result, or what `load` raises, is set by `poll`."""
        call = _Load(name, path)
        self._queue.append(call)
        self.poll()
        return call.done

    def pin_in_background(self, name: str) -> Future[AdapterStatus]:
        """As `pin`, but files are read and copied beside the steps. The result, or what `pin` raises, is set by
        `poll`."""
        call = _Pin(name)
        self._queue.append(call)
        self.poll()
        return call.done

    def poll(self) -> None:
        """Go on with the calls as far as their files have been read."""
        while self._queue:
            call = self._queue[0]
            try:
                status = self._advance_load(call) if isinstance(call, _Load) else self._advance_pin(call.name)
            except Exception as error:
                self._queue.popleft()
                call.done.set_exception(error)
                continue
            if status is None:
                return
            self._queue.popleft()
            call.done.set_result(status)

    def close(self) -> None:
        """End all calls with Aborted."""
        self._abort("the engine was closed")

    def _advance_load(self, call: _Load) -> AdapterStatus | None:
        """Begin to read, or take in what was read; None while it is being read."""
        if call.reading is None:
            self._key_before(call.name)
            fits = functools.partial(_check_fits, self._room)  # counted here: the arena's books are this thread's
            call.reading = self._registry.read_folder_in_background(call.name, call.path, fits)
        if not call.reading.done():
            return None
        registration = call.reading.result()
        self._check_room(call.name, registration.num_bytes)  # others may have been pinned meanwhile
        return self._accept(registration)

    def _advance_pin(self, name: str) -> AdapterStatus | None:
        """Go on with pinning; None while the adapter is being read or brought."""
        registration = self._registry.get(name)
        key = registration.key
        if name in self.pinned:
            return self.status(registration)
        if key in self._bank.arriving:
            if not self._bank.has_arrived(key):
                return None
            self._bank.settle(key)
        if key not in self._bank.resident:
            if self._registry.fetch(key) is None:
                if registration.error is not None:
                    raise BadAdapter(registration.error)
                return None
            self._bring(registration)
            if key in self._bank.arriving:
                return None
        self._keep(registration)
        return self.status(registration)

    # -- statuses -----------------------------------------------------------------------------------------------------

    def statuses(self, after: str = "", most: int | None = None) -> tuple[AdapterStatus, ...]:
        """In order of their names: those that follow `after`, at most so many."""
        names = (name for name in self._registry.names if name > after)
        return tuple(self.status(self._registry.get(name)) for name in itertools.islice(names, most))

    def status(self, registration: Registration) -> AdapterStatus:
        adapter, header = registration.adapter, registration.header
        sharding = "bd" if header.keeps_blocks else registration.way
        return AdapterStatus(
            name=registration.name,
            version=adapter.version if adapter else "",
            rank=header.rank,
            num_bytes=registration.num_bytes,
            resident=registration.key in self._bank.resident,
            mergeable=self._is_mergeable(registration.key),
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
            sharding=sharding if self._several_ranks else None,
            loaded=adapter is not None,
            error=registration.error,
            num_loads=self._bank.loads_of(registration.key),
        )

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _room(self) -> _Room:
        return _Room(self._residency.room_beside(self.pinned.values()), len(self.pinned))

    def _check_room(self, name: str, num_bytes: int) -> None:
        """Raises OverCapacity when the adapter could never be brought beside those that are pinned."""
        _check_fits(self._room, name, num_bytes)

    def _key_before(self, name: str) -> str | None:
        """What a name stands for that is about to get new content. Raises BadRequest for a pinned one."""
        if name in self.pinned:
            raise BadRequest(f"adapter {name!r} is pinned; unpin it before other content is loaded under its name")
        return self._registry.get(name).key if name in self._registry else None

    def _accept(self, registration: Registration) -> AdapterStatus:
        before = self._key_before(registration.name)
        current = self._registry.accept(registration)
        self._retire(before)
        return self.status(current)

    def _bring(self, registration: Registration) -> None:
        """Start to bring an adapter that was read. Raises OverCapacity."""
        assert registration.adapter is not None
        in_use = pin_in_use(self._scheduler, self._residency)
        here = self._bank.bring(registration.adapter)
        for other in in_use:
            self._residency.unpin(other)
        if not here:
            raise OverCapacity(
                f"there is no room to bring adapter {registration.name!r} now: others are in use; try again later"
            )

    def _keep(self, registration: Registration) -> None:
        """Pin a resident adapter. Raises OverCapacity where another one would then find no room."""
        name, run = registration.name, self._residency.run(registration.key)
        room = self._residency.room_beside((*self.pinned.values(), run))
        for other in self._registry.names:
            needed = pages_for(self._registry.get(other).num_bytes)
            if other != name and other not in self.pinned and needed > room:
                raise OverCapacity(
                    f"pinning adapter {name!r} would leave {room} pages of the arena in a row, and adapter "
                    f"{other!r} needs {needed}; unpin another, or start with a larger arena_bytes"
                )
        self._residency.pin(registration.key)
        self.pinned[name] = run

    def _abort(self, reason: str, name: str | None = None, kind: type[_Call] = _Call) -> bool:
        """End the calls of a kind on a name, or on all names; whether there were any."""
        ended = [call for call in self._queue if isinstance(call, kind) and name in (None, call.name)]
        for call in ended:
            self._queue.remove(call)
            if call.reading is not None:
                call.reading.cancel()  # a read that is under way ends by itself, and its result is dropped
            call.done.set_exception(Aborted(reason))
        return bool(ended)


class _Room(NamedTuple):
    """Pages in a row that an adapter finds beside the pinned ones, and how many these are."""

    num_pages: int
    num_pinned: int


def _check_fits(room: _Room, name: str, num_bytes: int) -> None:
    needed = pages_for(num_bytes)
    if needed > room.num_pages:
        raise OverCapacity(
            f"adapter {name!r} needs {needed} pages of the arena in a row, but adapters find at most "
            f"{room.num_pages} beside {room.num_pinned} pinned ones; unpin some, or start with a larger arena_bytes"
        )
