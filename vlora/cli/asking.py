"""Commands that ask a running server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vlora.cli.group import cli
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
@click.argument("video", type=click.Path())
@click.option("--adapter", required=True, help="Adapter that has the head.")
@click.option("--head", required=True, help="Task head that answers.")
@server_option
@json_option
def stream(video: str, adapter: str, head: str, client: Client, as_json: bool) -> None:
    """Ask a task head about every second of a video.

    \b
        vlora stream street.mp4 --adapter traffic --head jam
    """
    from apps.video_analytics import analyse

    with client:
        for result in analyse(client, video, adapter, head):
            if as_json:
                print_json(result)
            else:
                latency = f"{result.latency_s * 1e3:6.0f} ms"
                click.echo(f"{result.start_s:7.1f} s  {result.label:<20} {result.confidence:6.1%}  {latency}")


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
