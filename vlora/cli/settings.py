"""Flags generated from the configuration classes."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from vlora.cli.options import headed
from vlora.config import choices_of, types_of
from vlora.errors import BadConfig

EMBEDDED = "embedded"


def config_flags(config: type, *, only: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """A flag for each `setting` of a configuration (of those in `only`, if given)."""

    def decorate(command: Any) -> Any:
        hints = types_of(config)
        fields = [each for each in dataclasses.fields(config) if "heading" in each.metadata]
        for field in reversed([each for each in fields if not only or each.name in only]):
            flag = f"--{field.name.replace('_', '-')}"
            command = headed(
                field.metadata["heading"],
                *filter(None, [field.metadata.get("short")]),
                f"{flag}/--no-{flag[2:]}" if hints[field.name] is bool else flag,
                type=_flag_type(hints[field.name], choices_of(config, field)),
                multiple=typing.get_origin(hints[field.name]) is tuple,
                default=field.default,
                show_default=field.default not in (None, ()),
                help=field.metadata["text"],
            )(command)
        return command

    return decorate


def _flag_type(hint: Any, choices: tuple[str, ...]) -> Any:
    if choices:
        return click.Choice(choices)
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0]
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return hint


def make_config(kind: Any, settings: dict[str, Any], **more: Any) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in settings.items() if name in names}, **more)


def model_path(model: str, name: str = "--model") -> str:
    if model != EMBEDDED:
        if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
            raise BadConfig(f"{name} is {model!r}; there is no such folder")
        return os.path.expanduser(model)
    from fusion.embedded import checkpoint_path

    return str(checkpoint_path())
