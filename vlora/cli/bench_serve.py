"""Options of `vlora bench serve`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_COUNT = click.IntRange(min=1)
_SECONDS = click.FloatRange(min=0, min_open=True)

OPTION_NAMES = {"surfaces": "surface", "cases": "case", "adapter_names": "adapter-name"}
"""Of options that may be repeated, by the parameter that gets all of their values."""

_OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("requests", _COUNT, "how many; 8 if not given"),
    ("duration_s", _SECONDS, "send requests for so many seconds instead of a number of them"),
    ("concurrency", _COUNT, "requests outstanding at any time; 8 if not given"),
    ("rate", _SECONDS, "requests a second at Poisson arrivals, whatever is outstanding"),
    ("adapters", _COUNT, "how many; 4 if not given"),
    ("popularity", click.Choice(["uniform", "zipf", "hottest"]), "how requests choose adapters; uniform if not given"),
    ("skew", click.FloatRange(0, 1, min_open=True), "the hottest adapter's share; 0.6 if not given"),
    ("prompt_tokens", _COUNT, "of a prompt with its pictures; 256 if not given"),
    ("answer_tokens", _COUNT, "of an answer; 32 if not given"),
    ("pictures", click.IntRange(min=0), "of a request; 1 if not given"),
    ("picture_width", _COUNT, "pixels; 224 if not given"),
    ("picture_height", _COUNT, "pixels; 224 if not given"),
    ("rounds", _COUNT, "server and baselines in turn so many times; 3 if not given"),
    ("dtype", click.Choice(["bfloat16", "float32"]), "the server's; bfloat16 if not given"),
    (
        "url",
        str,
        "measure this server instead: the address of its OpenAI API, with its path; OPENAI_API_KEY is its token",
    ),
)
_REPEATED: tuple[tuple[str, Any, str], ...] = (
    ("surfaces", click.Choice(["http", "rpyc"]), "http if not given"),
    ("threads", _COUNT, "the server's default, then 1, if not given"),
    ("cases", click.Choice(["one", "base", "adapters"]), "one request, many of the base model, many of adapters; all"),
    ("adapter_names", str, "an adapter's name at --url"),
)


def serve_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Each is None, or empty, unless given: defaults belong to the bench."""
    for name, kind, text in reversed(_REPEATED):
        flag = f"--{OPTION_NAMES.get(name, name)}"
        command = click.option(flag, name, type=kind, multiple=True, help=f"Of `serve`: {text}; may be repeated.")(
            command
        )
    for name, kind, text in reversed(_OPTIONS):
        command = click.option(f"--{name.replace('_', '-')}", type=kind, help=f"Of `serve`: {text}.")(command)
    return command
