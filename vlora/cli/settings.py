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

from vlora.cli.options import RULES, headed
from vlora.config import DTYPES, POLICY_ALIASES, POLICY_NAMES
from vlora.errors import BadConfig

EMBEDDED = "embedded"

_POLICY = """Request order and inference mode of each step:

\b
cost_based     the plan of least cost by measured costs
algorithm1     Algorithm 1 of the V-LoRA paper
dlora          merged or unmerged by dLoRA's rule
merged_only    one adapter at a time, merged
unmerged_only  all adapters together, never merged"""

_SETTINGS = {
    "Model": {
        "load_format": "Source of the weights; dummy: random weights of the model's shapes.",
        "device": "Device to run on: cpu or cuda.",
        "dtype": "Precision of the weights; auto: the checkpoint's.",
        "quantize": "Format of the text model's linear layers; fp8: for GPUs, int8, int4: for CPUs (docs/limits.md).",
        "quantize_head": "Also quantize the output head.",
        "seed": "Seed of dummy weights.",
        "threads": "Threads of the engine on each rank. Default: the physical cores, shared by the ranks.",
        "tensor_parallel": "Number of ranks (processes, or GPUs) that share the language model.",
    },
    "Adapters": {
        "merge_fidelity_floor": "Minimum fidelity of a merged adapter; adapters below it are never merged.",
        "switching": "Source of merged weights: a shadow copy, in_place (slower, no copy), or by available memory.",
        "sharding": "NAME=KIND, layout of an adapter on several ranks: replicated, slora, auto; * for all others.",
    },
    "Scheduling": {
        "policy": _POLICY,
        "max_batch_size": "Maximum number of requests per step.",
        "max_step_tokens": "Maximum number of tokens per step.",
        "cuda_graphs": "Run decode steps on a GPU as CUDA graphs.",
        "max_context": "Maximum tokens of prompt and answer together. Default: the model's own limit.",
        "theta_s": "Seconds of credit after which a request starves.",
        "max_ttft_s": "Maximum time to the first token of requests without their own bound. Default: none.",
        "weight": "NAME=WEIGHT of an adapter's fair share, * for all others; may be repeated. Default: no shares.",
        "tenant_weight": "NAME=WEIGHT of a tenant's (token's) fair share, * for all others; may be repeated.",
        "encode_share": "Fraction by which image encoding may prolong a step of other requests.",
    },
    "Training": {
        "train": "Plan file (YAML, see docs/training.md) of adapters to train beside requests.",
        "train_slowdown": "How many times as long requests may take beside trainings and clients of --serve-base (99th "
        "percentile).",
    },
    "Memory": {
        "arena_bytes": "Memory for KV cache and adapters together. Default: by the model's needs and free memory.",
        "block_size": "Tokens per KV block.",
        "vision_cache_bytes": "Size of the image embedding cache.",
        "prefix_cache": "Reuse KV across requests with a common prefix.",
    },
    "Replicas": {
        "replicas": "Number of engines, or LEAST:MOST to add and release them by load; more than one needs Ray.",
        "scale_up_s": "Seconds that requests wait before a replica is added by load.",
        "scale_down_s": "Seconds that the others could carry the load before one is released.",
        "routing_rule": "Which replica gets the next request.",
        "routing_journal": "Record routing in this file, up to 256 MiB, for `vlora simulate --replay`.",
        "ray": "Address of your Ray's head (HOST:PORT), or auto. Default: RAY_ADDRESS, else a Ray that this starts.",
        "ray_namespace": "Ray namespace of this service.",
        "ray_wait_s": "Seconds that a replica may wait for room at the start.",
        "replica_cpus": "CPUs that each replica takes in Ray; with --ray, its threads.",
        "replica_memory_gib": "Memory in GiB that each replica takes in Ray.",
        "replica_resource": "NAME=NUMBER of a custom resource of Ray that each replica takes; may be repeated.",
        "replica_label": "NAME=VALUE of a label of Ray that a replica's node must have; may be repeated.",
        "placement": "spread: replicas on different nodes if possible; pack: as Ray fills nodes by default.",
        "runtime_env": "Runtime environment of the replicas in Ray: JSON, or a YAML file.",
        "shipped_gib": "With --ray: limit in GiB of adapters that were sent, on each node.",
        "shipped_adapter_gib": "With --ray: limit in GiB of one adapter that is sent.",
    },
    "Network": {
        "host": "Address to listen on; loopback only without tokens.",
        "rpyc_port": "Port to listen on; 0 selects a free port.",
        "http_port": "Port of the HTTP API; 0 selects a free port. Default: no HTTP API.",
        "tls_cert": "Certificate chain (PEM); both APIs then accept TLS only.",
        "tls_key": "The certificate's private key (PEM).",
        "tls_client_ca": "CA certificate (PEM); clients must also present a certificate signed by it.",
        "image_hosts": "Host of image URLs that HTTP requests may use, * for every public host; may be repeated.",
        "image_folder": "Folder of file URLs that HTTP requests may use.",
        "file_folder": "Folder of uploaded files and batches; none: keep none. Default: in the adapters' state.",
    },
    "Limits": {
        "max_image_bytes": "Maximum size of an encoded image.",
        "max_image_pixels": "Maximum size of a decoded image.",
        "max_images": "Maximum number of images per request, at most 256.",
        "max_request_pixels": "Maximum pixels of all images of a request.",
        "max_message_bytes": "Maximum size of a message.",
        "max_held_bytes": "Maximum bytes of buffered messages over all requests.",
        "max_prompt_chars": "Maximum text length of a request.",
        "max_requests": "Maximum number of concurrent requests.",
        "request_timeout_s": "Maximum duration of a request.",
        "drain_s": "Time for running requests to finish at shutdown.",
        "max_streams": "Maximum number of open frame streams.",
        "stream_keep_s": "Time that a frame stream is kept after its connection is lost.",
        "max_file_bytes": "Maximum bytes of all uploaded files and results of batches.",
        "keep_files_s": "Time that uploaded files, and batches after their end, are kept.",
    },
}
_HEADINGS = {name: heading for heading, settings in _SETTINGS.items() for name in settings}
_SHORT = {"http_port": "-p"}
_CHOICES = {"dtype": DTYPES, "policy": POLICY_NAMES, "routing_rule": RULES}
_ALIASES = {"policy": POLICY_ALIASES}


class _Choice(click.Choice):  # type: ignore[type-arg]
    """A choice that also accepts former names, which the config class replaces. Help and completion omit them."""

    def __init__(self, name: str) -> None:
        super().__init__(_CHOICES[name])
        self._aliases = _ALIASES.get(name, {})

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value in self._aliases else super().convert(value, param, ctx)


def config_flags(config: type, *, skip: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """One flag per field of a config class (of those in `only`, if given), with the field's own default."""

    def decorate(command: Any) -> Any:
        hints = typing.get_type_hints(config)
        fields = [f for f in dataclasses.fields(config) if f.name not in skip and (not only or f.name in only)]
        for field in reversed(sorted(fields, key=lambda each: list(_HEADINGS).index(each.name))):
            flag = f"--{field.name.replace('_', '-')}"
            heading = _HEADINGS[field.name]
            command = headed(
                heading,
                *([_SHORT[field.name]] if field.name in _SHORT else []),
                f"{flag}/--no-{flag[2:]}" if hints[field.name] is bool else flag,
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
        return _Choice(name)
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


def model_path(model: str, name: str = "--model") -> str:
    if model != EMBEDDED:
        if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
            raise BadConfig(f"{name} is {model!r}; there is no such folder")
        return os.path.expanduser(model)
    from fusion.embedded import checkpoint_path

    return str(checkpoint_path())
