"""`vlora summarize`: a long video in words, part by part."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from vlora.cli.extras import needs
from vlora.cli.group import cli
from vlora.cli.interrupt import until_stopped
from vlora.cli.options import print_json, server_options
from vlora.cli.progress import waiting
from vlora.errors import BadRequest

if TYPE_CHECKING:
    from vlora.client import Client


@cli.command()
@click.argument("video")
@click.option("-q", "--question", help="Question about each part. Default: what happens in it.")
@click.option(
    "--summary-question", help="Question about the notes of all parts. Default: a summary in a few sentences."
)
@click.option("-a", "--adapter", help="Adapter that answers about the parts. Default: the base model.")
@click.option("--part-s", type=float, default=30.0, show_default=True, help="Length of a part, in seconds.")
@click.option(
    "--frames", "num_frames", type=click.IntRange(1, 256), default=8, show_default=True, help="Frames of a part."
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens of an answer.")
@server_options
@needs("video")
def summarize(video: str, part_s: float, client: Client, as_json: bool, **options: Any) -> None:
    """Describe a video part by part, with times, and then summarize these notes.

    \b
        vlora summarize day.mp4
        vlora summarize day.mp4 --part-s 60 --frames 16 --question "Who comes and goes?"

    The last line is the summary, by the base model. Notes that do not fit its context together are summarized by
    halves first.
    """
    from apps.retrieval import clock
    from apps.summary import summarize as notes_of

    if not 0.1 <= part_s < math.inf:
        raise BadRequest(f"--part-s is {part_s}; it must be a number, at least 0.1")
    asked = {name: value for name, value in options.items() if value is not None}
    with client, until_stopped() as stop, waiting("asking"):
        for note in notes_of(client, video, part_s=part_s, stop=stop, **asked):
            if as_json:
                print_json(note)
            else:
                name = "summary  " * (note.kind == "summary")
                click.echo(f"{name}{clock(note.start_s)} to {clock(note.end_s)}  {note.text}")
