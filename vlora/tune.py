"""`vlora tune`: measure ATMM on this machine, and check a table's numerics."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoConfig

from atmm.tuning import tables
from atmm.tuning.search import Case, Finding, Shape, cases, error, read, search
from atmm.tuning.tables import Bucket
from vlora.errors import BadConfig
from vlora.lora.adapter_pool import site_groups
from vlora.models.hf_model import HFModel
from vlora.models.loading import dummy_model
from vlora.models.pretrained import from_pretrained
from vlora.run_folder import writing

_TOLERANCE = 1.05  # the rule's choice may be this much slower than the best before a row is written
_COLUMNS = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
LARGEST_ERROR = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
"""By type, the largest accepted error of a strategy relative to the largest delta, against float64."""


def shapes_of(model: str) -> list[Shape]:
    """The distinct shapes of site groups in a model's language model, without reading weights.

    Raises:
        BadConfig: The model's config cannot be loaded.
        UnsupportedModel: The model's family is not supported.
    """
    try:
        config = from_pretrained(AutoConfig, model)
    except (OSError, ValueError) as error:
        raise BadConfig(f"cannot load model {model!r}: {error}") from error
    hf_model = HFModel(dummy_model(config, "bfloat16", torch.device("meta"), seed=0))
    groups = site_groups(hf_model.language_linears)
    return sorted({Shape(group.sites[0].d_in, tuple(site.d_out for site in group.sites)) for group in groups})


class TuneResult(NamedTuple):
    """Result of a search.

    num_measured: buckets measured so far. num_rows: rows of the table, one per bucket in which the rule's choice is too
    slow. num_done of num_cases: progress of this search.
    """

    table: str
    num_measured: int
    num_rows: int
    num_done: int
    num_cases: int

    def __str__(self) -> str:
        summary = f"{self.num_measured} buckets measured; the table has rows for {self.num_rows} of them: {self.table}"
        if self.num_done == self.num_cases:
            return summary
        return f"{summary}; {self.num_done} of {self.num_cases} cases are done; run the same command to continue"


def tune(
    shapes: Sequence[Shape], *, device: str, dtypes: Sequence[str], minutes: float, out: Path | None
) -> TuneResult:
    """Search, or resume an interrupted search, and write the table.

    The search uses torch's current number of threads. An existing table keeps its rows for buckets that this search
    did not measure.

    Args:
        shapes: The layers' shapes, such as those of `shapes_of`, or `atmm.tuning.search.SHAPES`.
        minutes: Time limit of the search.
        out: The table's file. None uses the user's folder, from which the engine reads tables.

    Raises:
        BadConfig: The table cannot be written, or `out` is for another processor or number of threads.
    """
    threads = torch.get_num_threads()
    if out is None:
        try:
            out = tables.path_for(device, threads)
        except OSError as error:
            raise BadConfig(f"no folder for the table: {error}; set --out") from error
    journal = out.with_suffix(f".t{threads}.partial")
    existing = _existing_rows(out, device, threads)
    todo = cases(shapes, dtypes)
    done = 0
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with Progress(*_COLUMNS, console=Console(stderr=True)) as progress:
            task = progress.add_task("searching", total=len(todo))
            for _ in search(todo, device, journal, 60 * minutes):
                done += 1
                progress.update(task, completed=done)
        findings = read(journal)
        rows = [(finding.bucket, finding.best) for finding in findings if _slow(finding)]
        measured = {finding.bucket for finding in findings}
        kept = [row for row in existing if row[0] not in measured]
        ordered = sorted([*kept, *rows], key=lambda row: row[0].row)
        tables.write(out, device, datetime.date.today().isoformat(), ordered)
        if done == len(todo):
            journal.unlink()
    return TuneResult(str(out), len(findings), len(rows), done, len(todo))


def _existing_rows(path: Path, device: str, threads: int) -> Sequence[tuple[Bucket, str]]:
    """The rows of an existing table; none if the file is not a table of this version, which a search replaces."""
    try:
        table = tables.read_table(path, device)
    except (OSError, ValueError):
        return []
    here = tables.device_name(device)
    if table.device != here or (device == "cpu" and table.threads != threads):
        raise BadConfig(
            f"{path} was measured on {table.device} with threads {table.threads}, but this search is for {here} with "
            f"threads {threads}; set another --out"
        )
    return table.rows


def _slow(finding: Finding) -> bool:
    return finding.seconds[finding.ruled] > _TOLERANCE * finding.seconds[finding.best]


def check(table: Path, device: str, say: Callable[[str], None]) -> bool:
    """Compute one case per row and compare it with float64. Returns whether all agree; `say` gets the deviations."""
    try:
        rows = tables.read_table(table, device).rows
    except (OSError, ValueError) as problem:
        raise BadConfig(f"cannot read the table {table}: {problem}") from problem
    wrong = 0
    torch.manual_seed(0)
    with torch.inference_mode():
        for bucket, strategy in rows:
            case = Case.of(bucket)
            found, allowed = error(case, strategy, device), LARGEST_ERROR[case.dtype]
            if not found <= allowed:
                wrong += 1
                say(f"{strategy}: {bucket}: relative error {found:.1e}, maximum {allowed:.0e}")
    say(f"{len(rows) - wrong} of {len(rows)} rows of {table} agree with float64")
    return not wrong
