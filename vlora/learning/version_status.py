"""Versions of an adapter for operators, from the audit trail."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vlora.learning.live_store import LiveStore
from vlora.learning.trail import Served, Trail
from vlora.types.learning import AdapterVersion, Comparison, VersionState


def describe(served: Served, trail: Trail, versions: Sequence[str], store: LiveStore) -> tuple[AdapterVersion, ...]:
    """The versions on disk, newest first. versions: oldest first."""
    return tuple(_describe(served, trail, one, store) for one in reversed(versions))


def origin_of(trail: Trail, version: str) -> str:
    """Where a version comes from: a training, or a folder."""
    for entry in trail.entries:
        if entry.version == version:
            return str(entry.details.get("origin") or entry.why)
    return "unknown"


def _describe(served: Served, trail: Trail, version: str, store: LiveStore) -> AdapterVersion:
    evaluated = trail.last(version, "evaluated")
    began = trail.last(version, "imported", "promoted", "rolled_back")
    state: VersionState = "kept"
    if version == served.version:
        state = "present"
    elif version in served.before[-1:]:
        state = "previous"
    elif began is None and evaluated is not None:
        state = "refused"
    details = {} if evaluated is None else evaluated.details
    counts = store.served(version)
    last = began or evaluated
    return AdapterVersion(
        version=version,
        state=state,
        since=0.0 if last is None else last.at,
        origin=origin_of(trail, version),
        live=_comparison(details.get("live")),
        trusted=_comparison(details.get("trusted")),
        num_answers=sum(one.answered for one in counts),
        num_wrong=sum(one.wrong for one in counts),
    )


def _comparison(fields: object) -> Comparison | None:
    return None if fields is None else msgspec.convert(fields, Comparison)
