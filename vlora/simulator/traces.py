"""Recorded traffic: CSV files in the format of Microsoft's Azure LLM inference traces."""

from __future__ import annotations

import csv
import datetime
import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path

from vlora.errors import BadConfig
from vlora.simulator.arrivals import Arrival, adapter_name, power_law
from vlora.types import MAX_PRIORITY

TIME, PROMPT, ANSWER, ADAPTER = "TIMESTAMP", "ContextTokens", "GeneratedTokens", "Adapter"
BOUND, PRIORITY, TENANT = "MaxTTFT", "Priority", "Tenant"


def read_trace(path: Path, num_adapters: int, seed: int) -> Iterator[Arrival]:
    """Arrivals of a CSV file, lazily, with times relative to its first row.

    Required columns: TIMESTAMP (seconds, or a date and time), ContextTokens, GeneratedTokens (0: a task head). Optional
    columns: Adapter (empty: the base model), MaxTTFT (seconds; empty: no bound), Priority (empty: 0) and Tenant (empty:
    none). Without the column Adapter, adapters are drawn from a power law with exponent 1. Rows must be in order of
    time.

    Raises BadConfig with line and field for invalid input.
    """
    sums = list(itertools.accumulate(power_law(num_adapters, 1.0)))
    draws = random.Random(seed)
    try:
        file = path.open(newline="")
    except OSError as error:
        raise BadConfig(f"{path}: {error.strerror}") from None
    with file:
        rows = csv.DictReader(file)
        missing = [name for name in (TIME, PROMPT, ANSWER) if name not in (rows.fieldnames or ())]
        if missing:
            raise BadConfig(f"{path}, line 1: no column {', '.join(missing)}; found {', '.join(rows.fieldnames or ())}")
        named = ADAPTER in (rows.fieldnames or ())
        first: float | None = None
        last = -math.inf
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            now = _seconds(row[TIME], where)
            if now < last:
                raise BadConfig(
                    f"{where}, field {TIME}: {row[TIME]!r} is earlier than the previous row; sort the file by time"
                )
            first, last = now if first is None else first, now
            if named:
                adapter = row[ADAPTER] or None
            else:
                adapter = adapter_name(draws.choices(range(num_adapters), cum_weights=sums)[0])
            prompt, answer = _count(row[PROMPT], PROMPT, 1, where), _count(row[ANSWER], ANSWER, 0, where)
            if answer == 0 and adapter is None:
                raise BadConfig(f"{where}, field {ANSWER}: 0 requests a task head, but the base model has none")
            bound = _number(row.get(BOUND), BOUND, where) if row.get(BOUND) else None
            priority = _number(row.get(PRIORITY), PRIORITY, where) if row.get(PRIORITY) else 0
            if bound is not None and bound <= 0:
                raise BadConfig(f"{where}, field {BOUND}: {row[BOUND]!r} is not above 0; leave it empty for no bound")
            if priority != int(priority) or abs(priority) > MAX_PRIORITY:
                raise BadConfig(
                    f"{where}, field {PRIORITY}: {row[PRIORITY]!r} is not a whole number from {-MAX_PRIORITY} to "
                    f"{MAX_PRIORITY}"
                )
            yield Arrival(now - first, adapter, prompt, answer, bound, int(priority), row.get(TENANT) or None)


def _seconds(text: str | None, where: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        pass
    else:
        if math.isfinite(value):
            return value
    try:
        # The published traces have seven decimal digits of a second, one more than Python parses.
        whole, dot, fraction = (text or "").partition(".")
        moment = datetime.datetime.fromisoformat(whole + dot + fraction[:6])
    except ValueError:
        raise BadConfig(f"{where}, field {TIME}: {text!r} is neither seconds nor a date and time") from None
    return moment.replace(tzinfo=moment.tzinfo or datetime.UTC).timestamp()


def _number(text: str | None, field: str, where: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadConfig(f"{where}, field {field}: {text!r} is not a number")
    return value


def _count(text: str | None, field: str, least: int, where: str) -> int:
    if text is None or not text.strip().isdecimal() or int(text) < least:
        raise BadConfig(f"{where}, field {field}: {text!r} is not a whole number of {least} or more")
    return int(text)
