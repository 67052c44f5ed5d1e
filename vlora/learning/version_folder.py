"""The contents of one adapter on disk, in folders named by their hashes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from vlora.adapter_files import CONFIG_FILE, HEAD_FILES, WEIGHTS_FILE, content_hash, other_weights
from vlora.errors import BadAdapter
from vlora.learning.trail import sync_folder

_PART = "incoming.part"


class VersionFolder:
    """A bounded number of contents. A folder appears as a whole, with its files on disk, or not at all."""

    def __init__(self, folder: Path) -> None:
        """folder: It is created."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._remove(folder / _PART)

    @property
    def versions(self) -> list[str]:
        """The hashes, by time."""
        found = [one for one in self._folder.iterdir() if one.is_dir() and one.name != _PART]
        return [one.name for one in sorted(found, key=lambda one: one.stat().st_mtime_ns)]

    def path(self, version: str) -> Path:
        return self._folder / version

    def add(self, source: Path) -> str:
        """Copy an adapter's files. Returns the hash of what was copied.

        Raises:
            BadAdapter: The files cannot be copied, or there are task heads.
        """
        part = self._folder / _PART
        if missing := [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (source / name).is_file()]:
            raise BadAdapter(f"{source} has no {missing[0]}; an adapter is a folder in PEFT's format")
        if headed := [name for name in HEAD_FILES if (source / name).exists()]:
            raise BadAdapter(f"{source} has task heads ({headed[0]}), which later versions would lack; it cannot learn")
        if problem := other_weights(source):
            raise BadAdapter(f"{source}: {problem}")
        try:
            self._remove(part)
            part.mkdir()
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                shutil.copyfile(source / name, part / name)
                _sync_file(part / name)
            sync_folder(part)
            version = content_hash(part)
            if self.path(version).is_dir() and self.is_intact(version):
                os.utime(self.path(version))
                self._remove(part)
            else:
                self._remove(self.path(version))
                part.rename(self.path(version))
            sync_folder(self._folder)
        except OSError as error:
            raise BadAdapter(f"the adapter in {source} cannot be copied to {self._folder}: {error}") from error
        return version

    def is_intact(self, version: str) -> bool:
        """Whether the files have the content of their name."""
        try:
            return self.path(version).is_dir() and content_hash(self.path(version)) == version
        except OSError:
            return False

    def prune(self, kept: Collection[str], most: int) -> None:
        """Remove the oldest contents above `most`, but none of `kept`."""
        others = [one for one in self.versions if one not in kept]
        for version in others[: max(0, len(others) + len(kept) - most)]:
            self._remove(self.path(version))

    def _remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)


def _sync_file(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
