"""Domains of adapters, as clients name them and as their folders declare them."""

from __future__ import annotations

from typing import Literal

import msgspec

Way = Literal["head", "words"]


class DomainSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A domain that an adapter serves; requests may name it in place of the adapter.

    question: that it was trained with. head: None if only words answer. answer: the way that answers requests that
    choose none. head_accuracy, words_accuracy: shares of validation samples that each way answers right, or the
    domain's metric if one way alone can answer. threshold: what fusion had to reach.
    """

    name: str
    question: str
    head: str | None = None
    answer: Way = "words"
    head_accuracy: float | None = None
    words_accuracy: float | None = None
    threshold: float | None = None
