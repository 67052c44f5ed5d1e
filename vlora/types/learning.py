"""Adapters that learn while they serve, as operators see them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from vlora.types.visibility import admin_only

VersionState = Literal["present", "previous", "kept", "refused"]


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """A correction that is on disk.

    Attributes:
        request_id: Of the corrected answer.
        adapter: That answered.
        label: The right answer.
    """

    request_id: str
    adapter: str
    label: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of a candidate and of the present version to the same questions.

    Attributes:
        count: Number of questions.
        present: Right answers of the present version.
        candidate: Right answers of the candidate.
        lower: The candidate's share of right answers has this lower confidence bound.
        gained: Right answers of the candidate to questions that the present version has wrong.
    """

    count: int
    present: int
    candidate: int
    lower: float
    gained: int = 0

    @property
    def lost(self) -> int:
        """Wrong answers of the candidate to questions that the present version has right."""
        return self.present - self.candidate + self.gained

    @property
    def present_share(self) -> float:
        """The accuracy of the present version; 0 without questions."""
        return self.present / self.count if self.count else 0.0

    @property
    def candidate_share(self) -> float:
        """The accuracy of the candidate; 0 without questions."""
        return self.candidate / self.count if self.count else 0.0


class AdapterVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One content of a learning adapter.

    Attributes:
        version: Hash of the content.
        state: Kept: on disk, but neither served nor the one before. Refused: it was evaluated and not promoted.
        since: When it was last promoted, in seconds since 1970; when it was evaluated, if it never was.
        origin: A training, or a folder.
        live: The comparison with the version that it was to replace, on held-out live records.
        trusted: The same on the operator's records.
        num_answers: Answers to requests since it was promoted first.
        num_wrong: Those that were corrected to another answer.
    """

    version: str
    state: VersionState
    since: float
    origin: Annotated[str, admin_only("")]
    live: Comparison | None = None
    trusted: Comparison | None = None
    num_answers: int = 0
    num_wrong: int = 0


class LearningStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A learning adapter.

    Attributes:
        name: Of the adapter.
        doing: The present activity.
        present: The version that is served.
        versions: Newest first.
        num_records: Answers on disk, with their questions and pictures.
        num_corrected: Those with a label.
        num_bytes: Of all records.
        num_dropped: Answers that were not kept since the start, because the disk was too slow or full.
        until_training: Corrections until the next training; None: it is started by hand.
        training: Name of the training under way.
    """

    name: str
    doing: str
    present: str
    versions: tuple[AdapterVersion, ...]
    num_records: int = 0
    num_corrected: int = 0
    num_bytes: int = 0
    num_dropped: int = 0
    until_training: int | None = None
    training: str | None = None
