"""Adapters whose files the server gets itself: from the operator's sources at a first request, and by upload.

What is downloaded or uploaded lies in the server's folder by content, within the limits of `AdapterStore`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from vlora.adapter_files import ADAPTER_FILES, CONFIG_FILE, content_hash, unread_weights
from vlora.cluster.adapter_messages import Offer, ShippedFile
from vlora.cluster.adapter_sender import ShippingLimits
from vlora.cluster.adapter_store import AdapterStore, Busy
from vlora.config import HUB, ServerConfig
from vlora.errors import BadAdapter, BadRequest, OverCapacity, UnknownAdapter, VLoraError
from vlora.run_folder import UNFINISHED, writing
from vlora.server.adapter_catalog import AdapterCatalog
from vlora.types import AdapterStatus, ErrorValue
from vlora.types.composition import name_problem

T = TypeVar("T")

log = logging.getLogger(__name__)

NOT_FOUND_S = 10.0  # for which no source is asked again for an adapter that it refused or does not have
_MAX_NOT_FOUND = 1024  # such names
HUB_S = 10.0  # to wait for the hub's answer about a repository
_AT_ONCE = 4  # adapters that are received


class ReceivedAdapters:
    """One per server, used from its event loop."""

    def __init__(
        self,
        config: ServerConfig,
        limits: ShippingLimits,
        folder: Path | None,
        adapters: AdapterCatalog,
        given: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """From now on, load what requests name and a source has, and take uploads.

        Args:
            folder: Of the files, it need not exist; None for one that lasts until `close`.
            adapters: With those that are registered by now.
            given: Names of adapters that make no room for others, although their folders may be of a source.
        """
        self._config = config
        self._limits = limits
        self._clock = clock
        self._adapters = adapters
        self._sources = [each if each.startswith(HUB) else os.path.abspath(each) for each in config.adapter_source]
        self._closing = contextlib.ExitStack()
        if folder is None:  # a download that goes on at the end may still write there
            temporary = tempfile.TemporaryDirectory(prefix="vlora-adapters-", ignore_cleanup_errors=True)
            folder = Path(self._closing.enter_context(temporary))
        self._folder = folder
        self._stores = [AdapterStore(self._folder / kind) for kind in ("found", "uploaded")]
        self._storing = threading.Lock()
        self._executor = ThreadPoolExecutor(_AT_ONCE, "vlora-receive")
        self._loading: dict[str, asyncio.Task[ErrorValue | None]] = {}
        self._not_found: dict[str, tuple[float, ErrorValue]] = {}  # until when, and why
        of_sources = {*self._sources, str(self._stores[0].root)}
        found = {name: path for name, path in adapters.paths.items() if os.path.dirname(path) in of_sources}
        self._found = {name: path for name, path in found.items() if name not in given}
        if self._sources:
            adapters.find_unknown = self.find

    async def upload(self, name: str, files: Mapping[str, bytes]) -> AdapterStatus:
        """Load an adapter from the files of its folder, by name. Raises as `AdapterCatalog.load`."""
        self._adapters.check(name)

        def take() -> str:
            self._check(name, {each: len(data) for each, data in files.items()})
            with self._part() as part:
                for each in files.keys() & {*ADAPTER_FILES}:
                    (part / each).write_bytes(files[each])
                return self._put(self._stores[1], part)

        return await self._adapters.load(name, await self._in_thread(take))

    async def find(self, name: str) -> str | None:
        """Load an adapter that a source has. Many requests wait for one load.

        Returns:
            None if it is loaded, else where it was looked for, for an error.

        Raises:
            VLoraError: A source has it, and it cannot be loaded.
        """
        if name_problem(name) is not None:
            return ""
        until_s, refused = self._not_found.get(name, (-math.inf, None))
        if self._clock() >= until_s:
            if name not in self._loading:
                self._loading[name] = asyncio.create_task(self._load(name))
            try:
                async with asyncio.timeout(self._config.request_timeout_s):
                    refused = await asyncio.shield(self._loading[name])
            except TimeoutError:
                raise OverCapacity(f"adapter {name!r} is still being received; try again later") from None
        if refused is None:
            return None
        if refused.code == UnknownAdapter.code:
            return f"; {refused.message}"
        raise refused.to_exception()

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        for store in self._stores:
            store.close()
        self._closing.close()

    # -- internal -----------------------------------------------------------------------------------------------------

    async def _load(self, name: str) -> ErrorValue | None:
        """Load an adapter of a source, in the place of the one that was used longest ago if there are many."""
        try:
            path = None
            while path is None:
                try:
                    path = await self._in_thread(lambda: self._find(name))
                except OverCapacity:
                    if not await self._drop(self._stores[0].root):
                        raise
            await self._adapters.load(name, path)
            self._found[name] = path
            while len(self._found) > self._config.max_found_adapters and await self._drop():
                pass
            return None
        except VLoraError as error:
            refused = ErrorValue.of(error)
            if isinstance(error, BadRequest | BadAdapter):
                while len(self._not_found) >= _MAX_NOT_FOUND:
                    del self._not_found[next(iter(self._not_found))]
                self._not_found[name] = self._clock() + NOT_FOUND_S, refused
            return refused
        finally:
            del self._loading[name]

    async def _drop(self, inside: Path | None = None) -> bool:
        """Unload the source's adapter that was used longest ago; its requests finish. Returns whether there was one.

        inside: Only adapters whose files are in this folder.
        """
        pinned = {status.name for status in await self._adapters.list() if status.pinned}
        paths = self._adapters.paths
        self._found = {name: path for name, path in self._found.items() if paths.get(name) == path}
        droppable = (name for name in paths if name in self._found and name not in pinned)
        name = next((name for name in droppable if inside is None or Path(paths[name]).parent == inside), None)
        if name is not None:
            del self._found[name]
            with contextlib.suppress(UnknownAdapter):
                await self._adapters.unload(name, drain=True)
        return name is not None

    # -- in threads of its own ----------------------------------------------------------------------------------------

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def _find(self, name: str) -> str:
        looked = []
        for source in self._sources:
            is_hub = source.startswith(HUB)
            shown = source if is_hub else f"folder {os.path.basename(source)}"
            try:
                found = self._on_hub(source.removeprefix(HUB), name) if is_hub else self._in_folder(Path(source), name)
            except VLoraError:
                raise
            except Exception as error:  # many types of the hub's client
                log.warning("adapter %r cannot be looked for at %s: %s", name, source, error)
                found, shown = None, f"{shown} ({type(error).__name__})"
            if found is not None:
                return found
            looked.append(shown)
        raise UnknownAdapter(f"looked for at {', '.join(looked)}")

    def _in_folder(self, source: Path, name: str) -> str | None:
        folder = source / name
        if not (folder / CONFIG_FILE).exists():
            return None
        files = [folder / each for each in ADAPTER_FILES if (folder / each).exists()]
        if not all(file.resolve().is_relative_to(source.resolve()) for file in files):
            raise BadAdapter(f"adapter {name!r}: its folder links to files outside of that of `--adapter-source`")
        self._check(name, {file.name: file.stat().st_size for file in files})
        return str(folder)

    def _on_hub(self, owner: str, name: str) -> str | None:
        from huggingface_hub import HfApi, is_offline_mode, snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

        wanted: dict[str, Any] = {"repo_id": f"{owner}/{name}", "allow_patterns": [*ADAPTER_FILES]}
        try:
            if is_offline_mode():
                return self._put(self._stores[0], Path(snapshot_download(**wanted, local_files_only=True)))
            info = HfApi().model_info(f"{owner}/{name}", files_metadata=True, timeout=HUB_S)
            if info.id.rpartition("/")[0].lower() != owner.lower():
                return None  # it was moved to another owner
            self._check(name, {each.rfilename: each.size or 0 for each in info.siblings or ()})
            with self._part() as part:
                snapshot_download(**wanted, revision=info.sha, local_dir=part)
                return self._put(self._stores[0], part)
        except (RepositoryNotFoundError, LocalEntryNotFoundError, HFValidationError):
            return None

    def _check(self, name: str, sizes: Mapping[str, int]) -> None:
        """Raises BadAdapter for files that a load of their folder refuses, before they are received."""
        most, num_bytes = self._limits.adapter_bytes, sum(sizes.get(each, 0) for each in ADAPTER_FILES)
        problem = unread_weights(each for each in sizes if "/" not in each)
        if CONFIG_FILE not in sizes:
            problem = f"it has no {CONFIG_FILE}"
        elif num_bytes > most:
            problem = f"it has {num_bytes} bytes, over the limit of {most} (`--shipped-adapter-gib`)"
        if problem:
            raise BadAdapter(f"adapter {name!r}: {problem}")

    @contextlib.contextmanager
    def _part(self) -> Iterator[Path]:
        """A folder for files on their way to a store."""
        with writing(self._folder, only_disks=True):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=self._folder) as part:
                yield Path(part)

    def _put(self, store: AdapterStore, folder: Path) -> str:
        """Copy an adapter's files into a store, as far as there is room beside what is in use."""
        sizes = {each: (folder / each).stat().st_size for each in ADAPTER_FILES if (folder / each).exists()}
        files = tuple(ShippedFile(each, size) for each, size in sizes.items())
        limits = self._limits._asdict()
        offer = Offer(path=os.devnull, version=content_hash(folder), files=files, receive=True, **limits)
        with self._storing, writing(store.root):
            used = [Path(path) for path in tuple(self._adapters.paths.values())]
            store.hold([path.name for path in used if path.parent == store.root])
            try:
                return store.put(offer, folder)
            except Busy as error:
                raise OverCapacity("another process receives the adapter; try again later") from error
