"""Options of `vlora bench serve`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_COUNT = click.IntRange(min=1)
_SECONDS = click.FloatRange(min=0, min_open=True)

OPTION_NAMES = {"surfaces": "surface", "cases": "case", "adapter_names": "adapter-name"}
"""Options that may be repeated, by the parameter that receives all their values."""

_OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("requests", _COUNT, "number of requests; default 8"),
    ("duration_s", _SECONDS, "send requests for this many seconds instead of a fixed number"),
    ("concurrency", _COUNT, "outstanding requests at any time; default 8"),
    ("rate", _SECONDS, "requests per second with Poisson arrivals (open loop)"),
    ("adapters", _COUNT, "number of adapters; default 4"),
    ("popularity", click.Choice(["uniform", "zipf", "hottest"]), "how requests choose adapters; default uniform"),
    ("skew", click.FloatRange(0, 1, min_open=True), "the hottest adapter's share; default 0.6"),
    ("prompt_tokens", _COUNT, "tokens per prompt with its pictures; default 256"),
    ("answer_tokens", _COUNT, "tokens per answer; default 32"),
    ("pictures", click.IntRange(min=0), "pictures per request; default 1"),
    ("picture_width", _COUNT, "pixels; default 224"),
    ("picture_height", _COUNT, "pixels; default 224"),
    ("rounds", _COUNT, "repetitions of server and baselines in turn; default 3"),
    ("dtype", click.Choice(["bfloat16", "float32"]), "dtype of the server; default bfloat16"),
    (
        "url",
        str,
        "measure this server instead: URL of its OpenAI API with the path; OPENAI_API_KEY is its token",
    ),
)
_REPEATED: tuple[tuple[str, Any, str], ...] = (
    ("surfaces", click.Choice(["http", "rpyc"]), "default http"),
    ("threads", _COUNT, "default: the server's default, then 1"),
    (
        "cases",
        click.Choice(["one", "base", "adapters"]),
        "one request, many of the base model, many of adapters; default all",
    ),
    ("adapter_names", str, "name of an adapter at --url"),
)


def serve_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `serve`. Each is None, or empty, unless given: the bench holds the defaults."""
    for name, kind, text in reversed(_REPEATED):
        flag = f"--{OPTION_NAMES.get(name, name)}"
        command = click.option(flag, name, type=kind, multiple=True, help=f"Of `serve`: {text}; may be repeated.")(
            command
        )
    for name, kind, text in reversed(_OPTIONS):
        command = click.option(f"--{name.replace('_', '-')}", type=kind, help=f"Of `serve`: {text}.")(command)
    return command
