"""The group that every command joins."""

from __future__ import annotations

import click


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, invoke_without_command=True
)
@click.version_option(package_name="vlora")
@click.pass_context
def cli(context: click.Context) -> None:
    """Serve one vision-language model with many LoRA adapters.

    \b
        vlora serve --adapters out/adapters
        vlora query photo.png "What is this?"
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
