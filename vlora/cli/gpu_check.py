"""`vlora gpu-check`: checks and measurements of a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from vlora.cli.group import cli
from vlora.cli.interrupt import ends_with
from vlora.cli.server_flags import json_option, print_json
from vlora.errors import BadConfig


@cli.command("gpu-check")
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the results, a JSON file for each stage.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=9.5,
    show_default=True,
    help="Time limit. Stages that do not fit are left for the next call.",
)
@click.option("--stages", help="Names of stages, separated by commas. Default: all.")
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    show_default=True,
    help="cpu runs every stage with small shapes, to check the stages themselves.",
)
@json_option
def gpu_check(out: Path, minutes: float, stages: str | None, device: str, as_json: bool) -> None:
    """Check and measure the engine on a GPU, in stages in order of value. Exit code 1 if a stage fails or misses a
    goal.

    \b
        vlora gpu-check --out gpu                          # repeat until no stage is left
        vlora gpu-check --out gpu --stages step,profile
        vlora gpu-check --out gpu-cpu --device cpu         # the stages themselves, in minutes

    Each stage runs in a process of its own and writes its JSON as soon as it ends. Another call skips the stages that
    succeeded with the same source files. The command needs torch, transformers, peft and msgspec; the JSON of a stage
    names a package that is missing. docs/gpu.md lists the stages.
    """
    from vlora.bench.gpu.runner import check, chosen, print_table

    if device == "cuda":
        _check_gpu()
    names = [] if stages is None else [name.strip() for name in stages.split(",") if name.strip()]
    with ends_with(lambda: f"the results so far are in {out}; the same command continues"):
        checked = check(out, device, minutes, chosen(names), lambda line: click.echo(line, err=True))
    if as_json:
        print_json(checked.as_dict())
    else:
        print_table(checked)
    if not checked.succeeded:
        sys.exit(1)


def _check_gpu() -> None:
    """Raises BadConfig if torch finds no GPU. Without torch, each stage reports that it is missing."""
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        raise BadConfig("torch finds no CUDA device; --device cpu runs the stages themselves, with small shapes")
