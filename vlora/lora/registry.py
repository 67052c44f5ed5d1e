"""The adapters that the engine knows by name. Their factors are read into host memory when first needed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import NamedTuple

import torch

from vlora.errors import BadAdapter, UnknownAdapter, listed
from vlora.lora.composition import ComposedHeader, check_composable, compose, composed_header
from vlora.lora.host_adapter import HostAdapter, Measure, load_adapter
from vlora.lora.layer_reading import BaseLayers
from vlora.lora.peft_format import AdapterHeader, read_again, read_header, split_over_ranks
from vlora.lora.peft_target import SiteShape
from vlora.parallel.adapter_sharding import ShardingKind
from vlora.threads import background_executor
from vlora.types.composition import MAX_NAME, name_problem

log = logging.getLogger(__name__)

_MAX_READS = 8  # running or queued: few, so that the order of reads follows the current demand


@dataclasses.dataclass(eq=False)
class Registration:
    """One content under one name. Its key is assigned when the header is read and is never reused.

    sharding: kind of sharding of its dense factors on several ranks. num_bytes: size of its factors in memory. adapter:
    its content, or None before it is read. error: why it cannot be served, after reading failed. parts: the adapters of
    a composition; empty for an adapter with a folder.
    """

    key: str
    name: str
    header: AdapterHeader | ComposedHeader
    sharding: ShardingKind
    num_bytes: int
    adapter: HostAdapter | None = None
    error: str | None = None
    parts: tuple[WeightedAdapter, ...] = ()

    @functools.cached_property
    def uses(self) -> tuple[str, ...]:
        """The keys of the registrations that its requests use: its own, then those of its parts."""
        return self.key, *(part.registration.key for part in self.parts)

    @property
    def content(self) -> HostAdapter:
        assert self.adapter is not None, "the adapter was not read yet"
        return self.adapter

    @property
    def folder_header(self) -> AdapterHeader:
        assert isinstance(self.header, AdapterHeader), "a composition has no folder"
        return self.header


class WeightedAdapter(NamedTuple):
    """An adapter of a composition, and the factor of its delta."""

    registration: Registration
    weight: float


Check = Callable[[str, int], None]
"""Called with a name and its adapter's bytes before the name is registered; an exception rejects the adapter."""

Choose = Callable[[str, AdapterHeader], ShardingKind]
"""Chooses the sharding of an adapter on several ranks, by name and header."""


def _accept(name: str, num_bytes: int) -> None:
    pass


def always_replicated(name: str, header: AdapterHeader) -> ShardingKind:
    """The choice for a single rank."""
    return "replicated"


@dataclasses.dataclass(eq=False)
class AdapterRegistry:
    """Maps names to registrations. Registering reads headers only; factors are read when an adapter is first needed.

    Registering a name again replaces its registration. The old one stays known by its key, for the requests that use
    it, until `forget`.

    Args:
        sites: The model's adaptable layers, in the order in which factors are laid out.
        executor: Reads adapters in the background. None creates threads, which launch work on `device`.
        measure: Computes an adapter's merge fidelity; called by the thread that reads the adapter.
        base_layers: The model's layers, on which DoRA's scales and trained biases depend. None if no adapter has them.
    """

    sites: Mapping[str, SiteShape]
    dtype: torch.dtype
    hidden_size: int
    _: dataclasses.KW_ONLY
    executor: dataclasses.InitVar[Executor | None] = None
    device: dataclasses.InitVar[torch.device | None] = None
    measure: Measure = lambda _: 1.0
    choose: Choose = always_replicated
    base_layers: BaseLayers | None = None

    def __post_init__(self, executor: Executor | None, device: torch.device | None) -> None:
        self._executor = executor or background_executor("vlora-read", device=device)
        self._loader = executor or background_executor("vlora-load", patient=True, device=device)
        self._numbers = itertools.count(1)
        self._current: dict[str, Registration] = {}
        self._composed: dict[str, Registration] = {}  # in order of last use
        self._known: dict[str, Registration] = {}  # by key
        self._reading: dict[str, Future[HostAdapter]] = {}
        self._failed: list[str] = []

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._current))

    @property
    def num_known(self) -> int:
        """Registrations that are current, or kept for requests."""
        return len(self._known)

    @property
    def num_bytes(self) -> int:
        """Host memory used by factors."""
        return sum(known.adapter.run.nbytes for known in self._known.values() if known.adapter is not None)

    def __contains__(self, name: str) -> bool:
        return name in self._current

    # -- names --------------------------------------------------------------------------------------------------------

    def register(self, paths: Mapping[str, str], check: Check = _accept, versions: Mapping[str, str] = {}) -> None:
        """Register folders under names by their headers: all of them, or none. versions: content hashes by name.

        Raises:
            BadAdapter: A folder cannot be served. Errors of `check` are raised too.
        """
        made = [self._registration(name, path, versions.get(name, "")) for name, path in paths.items()]
        for registration in made:
            check(registration.name, registration.num_bytes)
        for registration in made:
            self.enter(registration)

    def read_folder(self, name: str, path: str, check: Check = _accept, version: str = "") -> Registration:
        """Read a whole folder for a name without changing the name's current registration. Thread-safe.

        Raises:
            BadAdapter: The folder cannot be served, or has another version. Errors of `check` are raised too.
        """
        registration = self._registration(name, path, version)
        check(name, registration.num_bytes)
        registration.adapter = self._read(registration)
        return registration

    def read_folder_in_background(
        self, name: str, path: str, check: Check = _accept, version: str = ""
    ) -> Future[Registration]:
        """As `read_folder`, on a separate thread, so that it does not delay reads for requests."""
        return self._loader.submit(self.read_folder, name, path, check, version)

    def accept(self, registration: Registration) -> Registration:
        """Make content that was read for a name the name's registration.

        Returns:
            The name's current registration: the previous one if its content is equal, since it may be in use.
        """
        before = self._current.get(registration.name)
        if before is None or before.adapter is None or before.content.version != registration.content.version:
            self.enter(registration)
        return self._current[registration.name]

    def enter(self, registration: Registration) -> None:
        self._current[registration.name] = self._known[registration.key] = registration

    def get(self, name: str) -> Registration:
        """The current registration of a name. Raises UnknownAdapter."""
        if name not in self._current:
            raise UnknownAdapter(f"no adapter named {name[:MAX_NAME]!r}; registered: {listed(self.names)}")
        return self._current[name]

    def remove(self, name: str) -> None:
        """Remove a name; its registration stays known by its key. Raises UnknownAdapter."""
        del self._current[self.get(name).name]

    # -- compositions -------------------------------------------------------------------------------------------------

    @property
    def compositions(self) -> tuple[Registration, ...]:
        """The current compositions, the one used last at the end."""
        return tuple(self._composed.values())

    def composition(self, name: str, parts: tuple[WeightedAdapter, ...]) -> Registration:
        """The current registration of a composition, or one to `keep` if its parts have changed, or if it has failed.

        Raises BadRequest if an adapter cannot be composed.
        """
        current = self._composed.get(name)
        if current is not None and current.error is None and current.parts == parts:
            return current
        for part in parts:
            check_composable(part.registration.name, part.registration.folder_header)
        header = composed_header([part.registration.folder_header for part in parts], self.sites)
        key = f"{name}@{next(self._numbers)}"
        return Registration(key, name, header, "replicated", header.num_bytes(self.dtype), parts=parts)

    def keep(self, composition: Registration) -> str | None:
        """Make a composition the current one of its name, and the one used last. Returns the key that it replaces."""
        before = self._composed.pop(composition.name, None)
        self._composed[composition.name] = self._known[composition.key] = composition
        return None if before is None or before is composition else before.key

    def dissolve(self, composition: Registration) -> None:
        """Make a composition no longer current; it stays known by its key."""
        del self._composed[composition.name]

    # -- content ------------------------------------------------------------------------------------------------------

    def is_current(self, key: str) -> bool:
        known = self._known.get(key)
        return known is not None and (self._current.get(known.name) or self._composed.get(known.name)) is known

    def known(self, key: str) -> Registration:
        return self._known[key]

    def fetch(self, key: str) -> HostAdapter | None:
        """A known adapter's content, or None while its background read is running or pending.

        Call in order of priority, because few adapters are read at a time.
        """
        if key in self._reading:
            self._settle((key,))
        known = self._known[key]
        is_unread = known.adapter is None and known.error is None and key not in self._reading
        if is_unread and len(self._reading) < _MAX_READS and None not in [self.fetch(part) for part in known.uses[1:]]:
            self._reading[key] = self._executor.submit(self._read, known)
            self._settle((key,))
        return known.adapter

    def read(self, key: str) -> HostAdapter:
        """A known adapter's content, read synchronously if necessary. Raises BadAdapter."""
        known = self._known[key]
        if known.adapter is None and known.error is None:
            under_way = self._reading.pop(key, None)
            read_here = under_way is None or under_way.cancel()
            known.adapter = self._read(known) if read_here or under_way is None else under_way.result()
        if known.error is not None:
            raise BadAdapter(known.error)
        assert known.adapter is not None
        return known.adapter

    def collect(self) -> list[Registration]:
        """Collect finished reads. Returns the registrations that failed since the last call, with `error` set."""
        self._settle(tuple(self._reading))
        failed, self._failed = self._failed, []
        return [self._known[key] for key in failed if key in self._known]

    @property
    def pending(self) -> tuple[Future[HostAdapter], ...]:
        return tuple(self._reading.values())

    def forget(self, key: str) -> None:
        """Forget a registration that is neither current nor in use; unknown keys are ignored."""
        self._known.pop(key, None)
        if (reading := self._reading.pop(key, None)) is not None:
            reading.cancel()  # a running read completes, and its result is discarded

    def close(self) -> None:
        for executor in (self._executor, self._loader):
            executor.shutdown(wait=False, cancel_futures=True)

    # -- internal -----------------------------------------------------------------------------------------------------

    def _settle(self, keys: Iterable[str]) -> None:
        for key in keys:
            if self._reading[key].done():
                known, future = self._known[key], self._reading.pop(key)
                try:
                    known.adapter = future.result()
                except BadAdapter as error:
                    known.error = str(error)
                except Exception as error:
                    # An internal error or a lack of memory: only requests for this adapter fail.
                    log.exception("reading adapter %r failed", known.name)
                    known.error = f"adapter {known.name!r} could not be read: {type(error).__name__}: {error}"
                if known.error is not None:
                    self._failed.append(key)

    def _read(self, registration: Registration) -> HostAdapter:
        """Read the header again and the factors, and check that the header has not changed since registration.

        The parts of a composition are read before.
        """
        if registration.parts:
            parts = [(part.registration.content, part.weight) for part in registration.parts]
            return compose(registration.key, parts, self.sites, self.measure)
        name, before, sharding = registration.name, registration.folder_header, registration.sharding
        header = read_again(name, before, self.sites, self.hidden_size, sharding)
        return load_adapter(registration.key, header, self.dtype, self.measure, self.base_layers)

    def _registration(self, name: str, path: str, version: str) -> Registration:
        if (problem := name_problem(name)) is not None:
            raise BadAdapter(problem)
        if "\0" in path:
            raise BadAdapter(f"adapter {name!r}: a path cannot contain a null byte")
        header = read_header(Path(path), self.sites, self.hidden_size).expecting(version)
        sharding = self.choose(name, header)
        if sharding != "replicated":
            header = split_over_ranks(header, self.sites)
        return Registration(f"{name}@{next(self._numbers)}", name, header, sharding, header.num_bytes(self.dtype))
