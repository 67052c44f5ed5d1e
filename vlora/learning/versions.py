"""Which version of one adapter is served: by the audit trail, with the files, in the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

from vlora.errors import AdapterChanged, BadAdapter, BadConfig, BadRequest, VLoraError
from vlora.learning.evaluation import ServedModel
from vlora.learning.trail import SERVER, Event, Served, Trail
from vlora.learning.version_folder import VersionFolder

log = logging.getLogger(__name__)
T = TypeVar("T")


class Versions:
    """Used from one event loop. Files are read and written by the executor's only thread.

    A change is written to the trail before it takes effect. A process that dies between the two is followed by one that
    serves the trail's version.

    Attributes:
        name: Of the adapter.
        trail: What was decided.
        files: The contents.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        initial: Path | None,
        model: ServedModel,
        executor: Executor,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the folder, which is locked. Arguments and exceptions are those of `Learner`."""
        self.name = name
        self._model = model
        self._executor = executor
        self.trail = Trail(folder / "trail.jsonl", clock)
        self.files = VersionFolder(folder / "versions")
        self._loaded = self._begin_with(folder, initial)
        self._changing = asyncio.Lock()

    @property
    def served(self) -> Served:
        """The version by the trail; during a change, the next one."""
        served = self.trail.served()
        assert served is not None, "a version is imported before anything else"
        return served

    @property
    def present(self) -> str:
        return self.served.version

    @property
    def loaded(self) -> str:
        """The version that the engine has for new requests; empty during a change."""
        return "" if self._changing.locked() else self._loaded

    def _begin_with(self, folder: Path, initial: Path | None) -> str:
        """The version to serve: by the trail, else the initial one."""
        served = self.trail.served()
        if served is None:
            if initial is None:
                raise BadConfig(
                    f"adapter {self.name!r} learns, but there is none yet; give --adapter {self.name}=FOLDER, "
                    "which is copied at the first start"
                )
            version = self.files.add(initial)
            self.trail.append("imported", SERVER, version=version, why=f"from {initial}")
            return version
        for version in reversed((*served.before, served.version)):
            if self.files.is_intact(version):
                break
            log.warning("version %s of adapter %r is damaged", version, self.name)
        else:
            raise BadConfig(
                f"{folder} has no intact version of adapter {self.name!r}; remove the folder, and give "
                f"--adapter {self.name}=FOLDER"
            )
        if version != served.version:
            why = "its files are damaged or missing"
            self.trail.append("rolled_back", SERVER, version=version, before=served.version, why=why)
        return version

    async def promote(self, version: str, before: str, by: str, why: str, details: dict[str, Any]) -> None:
        """Serve another version. before: that is served now.

        Raises:
            AdapterChanged: Another one is served by now.
            BadAdapter, OverCapacity, BadRequest: It cannot be loaded; the version before is still served.
            OSError: The trail cannot be written; the version before is still served.
        """
        async with self._changing:
            await self._check(version, before)
            await self.append("promoted", by, version=version, before=before, why=why, details=details)
            try:
                await self._load()
            except VLoraError as error:
                reason = f"it cannot be loaded: {error}"
                fields = {"why": reason, "details": {"taken_back": True}}
                await self.append("rolled_back", SERVER, version=before, before=version, **fields)
                raise

    async def return_to(self, version: str, before: str, by: str, why: str) -> None:
        """Serve an earlier version again. before: that is served now. Raises as `promote`."""
        async with self._changing:
            await self._check(version, before)
            await self.append("rolled_back", by, version=version, before=before, why=why)
            await self._load()

    async def restore(self) -> None:
        """Load the served version if the engine has another one, because a change could not be completed."""
        if self._loaded != self.present and not self._changing.locked():
            async with self._changing:
                await self._load()

    async def append(self, event: Event, by: str, **fields: Any) -> None:
        """Add to the trail. Raises OSError."""
        await asyncio.get_running_loop().run_in_executor(self._executor, lambda: self.trail.append(event, by, **fields))

    def chosen(self, version: str | None) -> str:
        """The version on disk that begins so; None: the last one that was evaluated and not promoted.

        Raises BadRequest if there is none, or several.
        """
        known = self.files.versions
        if version is not None:
            found = [one for one in known if one.startswith(version)] if version else []
            if len(found) != 1:
                shown = ", ".join(one[:12] for one in known)
                what = "no version begins" if not found else "several versions begin"
                raise BadRequest(f"{what} with {version[:40]!r} in adapter {self.name!r}; on disk: {shown}")
            return found[0]
        for entry in reversed(self.trail.entries):
            if entry.event == "evaluated" and entry.version in known and entry.version != self.present:
                return entry.version
        raise BadRequest(f"adapter {self.name!r} has no version that was evaluated and not promoted; name one")

    def prune(self, kept: Collection[str], most: int) -> None:
        """Remove the oldest contents above `most`, but not these, the present one, and the one before."""
        served = self.served
        self.files.prune({served.version, *served.before[-1:], *kept}, most)

    async def _load(self) -> None:
        """Give the name its present version. Requests that run keep theirs.

        Raises:
            BadAdapter: The engine has read other content.
        """
        version = self.present
        self._loaded = await self._model.load(self.name, self.files.path(version))
        if self._loaded != version:
            raise BadAdapter(f"the engine has read content {self._loaded}, not {version}, of adapter {self.name!r}")

    async def _check(self, version: str, before: str) -> None:
        if self.present != before:
            raise AdapterChanged(f"adapter {self.name!r} serves another version by now; try again")
        loop = asyncio.get_running_loop()
        if not await loop.run_in_executor(self._executor, self.files.is_intact, version):
            raise BadRequest(f"version {version[:12]} of adapter {self.name!r} is damaged; choose another one")
