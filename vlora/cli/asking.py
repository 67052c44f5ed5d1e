"""Commands that ask a running server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vlora.cli.group import cli
from vlora.cli.interrupt import INTERRUPTED, stopping
from vlora.cli.server_flags import json_option, print_json, server_option

if TYPE_CHECKING:
    from vlora.client import Client


@cli.command()
@click.argument("image", type=click.Path(path_type=Path))
@click.argument("question")
@click.option("--adapter", help="Adapter that answers; the base model if not given.")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Longest answer, in tokens.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 always takes the likeliest token.")
@click.option("--stop", multiple=True, help="End the answer before this text; may be repeated.")
@click.option("--max-ttft-s", type=float, help="Longest time to the first token; no bound if not given.")
@click.option("--priority", type=int, default=0, show_default=True, help="From -10 to 10; a higher one comes first.")
@server_option
@json_option
def query(
    image: Path,
    question: str,
    adapter: str | None,
    max_tokens: int,
    temperature: float,
    stop: tuple[str, ...],
    max_ttft_s: float | None,
    priority: int,
    client: Client,
    as_json: bool,
) -> None:
    """Ask a question about an image.

    \b
        vlora query photo.png "What is this?" --adapter signs
    """
    with client:
        options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stop": stop,
            "max_ttft_s": max_ttft_s,
            "priority": priority,
        }
        if as_json:
            print_json(client.generate(question, [image], adapter, **options))
            return
        for piece in client.stream(question, [image], adapter, **options):
            click.echo(piece, nl=False)
        click.echo()


@cli.command()
@click.argument("sources", nargs=-1, required=True)
@click.option("--adapter", required=True, help="Adapter that has the head.")
@click.option("--head", required=True, help="Task head that answers.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for NAME.jsonl, NAME.csv and NAME.webm."
)
@click.option("--max-latency-s", type=float, help="Longest time to an answer; no bound if not given.")
@server_option
@json_option
def stream(
    sources: tuple[str, ...],
    adapter: str,
    head: str,
    out: Path | None,
    max_latency_s: float | None,
    client: Client,
    as_json: bool,
) -> None:
    """Ask a task head about every second of videos and cameras, many at once.

    \b
        vlora stream street.mp4 --adapter traffic --head jam
        vlora stream rtsp://camera-7/main 0 videos/ --adapter traffic --head jam --out results

    A source is a file, a camera's number, a URL, or a folder of videos and pictures. A camera or a server that is gone
    is tried again. Ctrl-C lets what is under way finish and completes the files.
    """
    from apps.video_analytics import ChunkResult, find_sources, run

    found = find_sources(sources)

    def tell(result: ChunkResult) -> None:
        if as_json:
            print_json(result)
            return
        name = f"{result.source:<20.20} " if len(found) > 1 else ""
        said = f"{result.label:<20} {result.confidence:6.1%}" if result.problem is None else result.problem
        click.echo(f"{name}{result.start_s:7.1f} s  {said}  {result.latency_s * 1e3:6.0f} ms")

    with client, stopping() as stop:
        run(
            client,
            found,
            adapter,
            head,
            out=out,
            max_latency_s=max_latency_s,
            stop=stop,
            tell=tell,
            say=lambda text: click.echo(text, err=True),
        )
        if stop.is_set():
            sys.exit(INTERRUPTED)


@cli.command()
@server_option
@json_option
def adapters(client: Client, as_json: bool) -> None:
    """List the adapters of a server, with their heads.

    \b
        vlora adapters --json
    """
    with client:
        found = client.adapters()
    if as_json:
        for adapter in found:
            print_json(adapter)
        return
    if not found:
        click.echo("no adapters")
    for adapter in found:
        merge = "mergeable" if adapter.mergeable else "never merged"
        if not adapter.loaded:
            merge = f"cannot be served: {adapter.error}" if adapter.error else "read at first use"
        click.echo(f"{adapter.name}  rank {adapter.rank}  {adapter.num_bytes / 2**20:.1f} MiB  {merge}")
        for head in adapter.heads:
            frames = f"{head.num_frames} frame{'s' * (head.num_frames != 1)}"
            click.echo(f"  head {head.name}  {head.task} over {frames}: {', '.join(head.labels)}")
