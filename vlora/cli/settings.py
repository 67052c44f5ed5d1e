"""Flags that come from the configuration classes."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from vlora.cli.options import HeadedOption
from vlora.config import DTYPES, POLICY_NAMES
from vlora.errors import BadConfig

EMBEDDED = "embedded"

_POLICY = """Order and mode of each step:

\b
vlora_cost     the cheapest plan by costs measured here
vlora          Algorithm 1 of the V-LoRA paper
dlora          merged or not by dLoRA's rule
merged_only    one adapter at a time, merged
unmerged_only  all adapters together, never merged"""

_SETTINGS = {
    "Model": {
        "load_format": "How weights are read; dummy gives random weights at the model's real shapes.",
        "device": "Device to run on: cpu or cuda.",
        "dtype": "Precision of the weights; auto takes the checkpoint's.",
        "seed": "Seed of dummy weights.",
        "threads": "Threads of the engine, on each rank; the physical cores, shared by the ranks, if not given.",
        "tensor_parallel": "Processes (on GPUs: GPUs) that share the language model.",
    },
    "Adapters": {
        "merge_fidelity_floor": "Adapters that lose more than this when merged are never merged.",
        "switching": "Where merged weights come from: a shadow copy, in_place (slower, no copy), or as memory allows.",
        "sharding": "NAME=KIND, how an adapter lies on several ranks: replicated, slora, auto; * for all others.",
    },
    "Scheduling": {
        "policy": _POLICY,
        "max_batch_size": "Most requests in a step.",
        "max_step_tokens": "Most tokens in a step.",
        "max_context": "Prompt and answer together, in tokens; the model's own limit if not given.",
        "theta_s": "Seconds of credit after which a request starves.",
        "max_ttft_s": "Longest time to the first token of requests without a bound of their own; none if not given.",
        "weight": "NAME=WEIGHT of an adapter's fair share, * for all others; may be repeated. No shares if not given.",
        "tenant_weight": "NAME=WEIGHT of a tenant's (token's) fair share, * for all others; may be repeated.",
        "encode_share": "By how much of its time encoding images may prolong a step of others.",
    },
    "Memory": {
        "arena_bytes": "KV cache and adapters together; by what the model can use and what is free, if not given.",
        "block_size": "Tokens per KV block.",
        "vision_cache_bytes": "Image embeddings kept for reuse.",
        "prefix_cache": "Keep KV of prompts and answers for requests that begin alike.",
    },
    "Network": {
        "host": "Address to listen on; without tokens loopback only.",
        "rpyc_port": "Port to listen on; 0 takes any free one.",
        "http_port": "Port of the HTTP API; none if not given, 0 takes any free one.",
        "tls_cert": "Certificate chain (PEM): both surfaces then speak TLS only.",
        "tls_key": "The certificate's private key (PEM).",
        "tls_client_ca": "Callers must show a certificate of this authority (PEM), too.",
        "image_hosts": "Host that HTTP requests may name images on, * for every public one; may be repeated.",
        "image_folder": "Folder that file URLs of HTTP requests may point into.",
    },
    "Limits": {
        "max_image_bytes": "Largest encoded image.",
        "max_image_pixels": "Largest decoded image.",
        "max_images": "Most images in a request.",
        "max_request_pixels": "Most pixels in a request's images together.",
        "max_message_bytes": "Largest message on the wire.",
        "max_held_bytes": "Most bytes of messages held at once, over all requests.",
        "max_prompt_chars": "Longest text in a request.",
        "max_requests": "Most requests under way at once.",
        "request_timeout_s": "Longest time a request may take.",
        "drain_s": "How long requests may still run after the server was told to stop.",
        "max_streams": "Most streams of frames open at once.",
        "stream_keep_s": "How long a stream of frames outlasts its connection.",
    },
}
_HEADINGS = {name: heading for heading, settings in _SETTINGS.items() for name in settings}
_SHORT = {"http_port": "-p"}
_CHOICES = {"dtype": DTYPES, "policy": POLICY_NAMES}


def config_flags(config: type, *, skip: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """One flag per field of a config class (of those in `only`, if given), with the field's own default."""

    def decorate(command: Any) -> Any:
        hints = typing.get_type_hints(config)
        fields = [f for f in dataclasses.fields(config) if f.name not in skip and (not only or f.name in only)]
        for field in reversed(sorted(fields, key=lambda each: list(_HEADINGS).index(each.name))):
            flag = f"--{field.name.replace('_', '-')}"
            heading = _HEADINGS[field.name]
            command = click.option(
                *([_SHORT[field.name]] if field.name in _SHORT else []),
                f"{flag}/--no-{flag[2:]}" if hints[field.name] is bool else flag,
                cls=HeadedOption,
                heading=heading,
                type=_flag_type(field.name, hints[field.name]),
                multiple=typing.get_origin(hints[field.name]) is tuple,
                default=field.default,
                show_default=field.default not in (None, ()),
                help=_SETTINGS[heading][field.name],
            )(command)
        return command

    return decorate


def _flag_type(name: str, hint: Any) -> Any:
    if name in _CHOICES:
        return click.Choice(_CHOICES[name])
    if typing.get_origin(hint) is typing.Literal:
        return click.Choice(typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0]
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return hint


def make_config(kind: Any, settings: dict[str, Any], **more: Any) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in settings.items() if name in names}, **more)


def model_path(model: str) -> str:
    if model != EMBEDDED:
        if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
            raise BadConfig(f"--model is {model!r}; there is no such folder")
        return os.path.expanduser(model)
    from fusion.embedded import checkpoint_path

    return str(checkpoint_path())
