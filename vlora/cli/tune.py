"""The command `tune`: measured choices of ATMM's strategies for this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import click

from vlora.cli.group import cli
from vlora.cli.options import command, flag, model_path, print_json
from vlora.cli.progress import waiting
from vlora.errors import BadConfig


@command(cli, needs="serve")
def tune(
    model: str | None = flag(
        None, "Folder or hub name of the model to tune for. Default: the shapes of the tables in the package."
    ),
    device: Literal["cpu", "cuda"] = flag("cpu", ""),
    dtypes: tuple[str, ...] = flag(
        ("bfloat16", "float32"), "May be repeated.", "--dtype", choices=("bfloat16", "float32", "float16")
    ),
    minutes: float | None = flag(None, "Time limit. Default: 5 on a CPU, 30 on a GPU.", least=0),
    threads: int | None = flag(None, "Threads to measure with on a CPU. Default: as `vlora serve`.", least=1),
    out: Path | None = flag(None, "The table's file. Default: in the user's data folder, where the engine reads it."),
    check: bool = flag(False, "Only verify the numerical results of every row of the table."),
    *,
    as_json: bool,
) -> None:
    """Find the fastest way to add LoRA deltas on this machine for each shape, and store the result in a table.

    \b
        vlora tune
        vlora tune --model Qwen/Qwen2-VL-7B-Instruct --device cuda --dtype bfloat16

    The table is written to $XDG_DATA_HOME/vlora/tables (default ~/.local/share), one per processor and number of
    threads; engines started later use it. An interrupted search resumes. --check without --out verifies the table in
    use.
    """
    import torch

    from atmm.tuning import tables
    from atmm.tuning.search import SHAPES
    from vlora import tune as tuning
    from vlora.engine.host_resources import default_threads

    if device == "cuda" and not torch.cuda.is_available():
        raise BadConfig("device 'cuda' was requested, but torch finds no CUDA device")
    torch.set_num_threads(threads or default_threads())
    if not check:
        found = tuning.tune(
            SHAPES if model is None else tuning.shapes_of(model_path(model)),
            device=device,
            dtypes=dtypes,
            minutes=minutes if minutes is not None else 30.0 if device == "cuda" else 5.0,
            out=out,
        )
        if as_json:
            print_json(found._asdict())
        else:
            click.echo(found)
        return
    messages: list[str] = []
    report: Callable[[str], None] = messages.append if as_json else click.echo
    with waiting("checking"):
        table = tables.choose_table(device, torch.get_num_threads()).table
        in_use = tables.path_for(device, torch.get_num_threads()) if table is None else table.path
        sound = tuning.check(out or in_use, device, report)
    if as_json:
        print_json({"sound": sound, "told": messages})
    if not sound:
        sys.exit(1)
