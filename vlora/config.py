"""User settings, validated once and frozen. Limits that depend on the hardware are computed later (see `Limits`)."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import ipaddress
import math
import operator
import os
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from vlora.errors import BadConfig
from vlora.types.composition import OTHER
from vlora.types.request import MAX_VISUALS

STEP_TOKENS = 512, 2048  # of a step on a CPU and on a GPU
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
MIN_SECRET = 16
HUB = "hub:"
"""Prefix of an organisation of the hub, as a source of adapters."""
QUOTAS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "cameras")
SHARDINGS = ("replicated", "slora", "auto")
Quantize = Literal["none", "fp8", "int8", "int4"]
DTYPES = ("auto", "float32", "bfloat16", "float16")
POLICY_NAMES = {
    "cost_based": "the plan of least cost by measured costs",
    "algorithm1": "Algorithm 1 of the V-LoRA paper",
    "dlora": "merged or unmerged by dLoRA's rule",
    "merged_only": "one adapter at a time, merged",
    "unmerged_only": "all adapters together, never merged",
}
RULES = ("placed", "punica", "where_it_is", "least_loaded", "round_robin")
"""Of `vlora.routing`, which takes long to import."""
_POLICY = "Request order and inference mode of each step:\n\n\b\n" + "\n".join(
    f"{name:<15}{text}" for name, text in POLICY_NAMES.items()
)


def setting(default: Any, heading: str, text: str, **more: Any) -> Any:
    """A field of a configuration with what the command line shows and `check_settings` checks.

    Args:
        heading: Of the flag in the help.
        text: The help. It is the documentation of the field.
        more: `least`, `above` and `most` bound a value that is not None; `choices` has the values of a name;
            `short` is a short flag.
    """
    return dataclasses.field(default=default, metadata={"heading": heading, "text": text, **more})


@functools.cache
def types_of(config: type) -> dict[str, Any]:
    """The types of a configuration's fields."""
    return typing.get_type_hints(config)


def choices_of(kind: Any, metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """The values that a setting of a type may have; empty if it has no choices."""
    return tuple(metadata.get("choices", typing.get_args(kind) if typing.get_origin(kind) is Literal else ()))


_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "least": (operator.ge, "at least"),
    "above": (operator.gt, "above"),
    "most": (operator.le, "at most"),
}


def check_settings(config: Any, shown: Callable[[str], str] = str) -> None:
    """Check each value alone.

    Args:
        shown: A field's name in errors.

    Raises:
        BadConfig: Names the first field with an invalid value, the value and the valid ones.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if (choices := choices_of(types_of(config.__class__)[field.name], field.metadata)) and value not in choices:
            raise BadConfig(f"{shown(field.name)} is {value!r}; choose one of {', '.join(choices)}")
        for bound, (holds, words) in _BOUNDS.items():
            if value is not None and (limit := field.metadata.get(bound)) is not None and not holds(value, limit):
                raise BadConfig(f"{shown(field.name)} is {value}; it must be {words} {limit}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """An API token of one caller.

    Args:
        admin: Whether the caller may also load, unload and pin adapters.
        expires: The time from which the token is rejected.
        requests_per_minute, tokens_per_minute, tokens_per_day: Quotas, see `vlora.server.security.limits.Quotas`.
        cameras: Frame streams that it may have open, and cameras of the server that it may have added.

    Raises:
        BadConfig: A value is invalid. The message never contains the secret.
    """

    name: str
    secret: str = dataclasses.field(repr=False)
    admin: bool = False
    expires: datetime.datetime | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    cameras: int | None = None

    def __post_init__(self) -> None:
        if self.name == OTHER:
            raise BadConfig(f"token {self.name!r} has the label of all other tokens in metrics; give it another name")
        if len(self.secret) < MIN_SECRET or not all("!" <= letter <= "~" for letter in self.secret):
            raise BadConfig(
                f"token {self.name!r} cannot be used: a token has at least {MIN_SECRET} characters, ASCII and no "
                "spaces; generate one with 'openssl rand -hex 32'"
            )
        for quota in QUOTAS:
            if (limit := getattr(self, quota)) is not None and limit < 1:
                raise BadConfig(f"token {self.name!r}: {quota} is {limit}; it must be at least 1")
        if self.expires is not None and self.expires.tzinfo is None:
            raise BadConfig(f"expiry of token {self.name!r} has no time zone; use the form 2027-01-31T00:00:00Z")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedBase:
    """How an engine serves the base model's layers to clients of `vlora.split`.

    Args:
        addresses: HOST:PORT or unix:PATH of each listening socket.
        name: The model's name, for clients' messages.
        tokens: Tokens of the permitted clients. Without tokens only loopback and Unix sockets are possible.
        tls_cert: PEM file of the certificate. With it, TCP accepts TLS connections only.
        tls_key: PEM file of the certificate's private key.
        tls_client_ca: PEM file of the authority that must have signed a client's certificate.
    """

    addresses: tuple[str, ...]
    name: str = ""
    tokens: tuple[Token, ...] = ()
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine: a folder or a hub name, and flags of `vlora serve`. Their defaults are defined here only.

    tensor_parallel: arena_bytes and threads apply to each rank. threads: None uses the physical cores in a process of
    its own (`default_threads`), and torch's current setting in the caller's process. serve_base: None does not serve
    the weights to clients of `vlora.split`. cuda_graphs: not used on a CPU or several ranks.

    Raises:
        BadConfig: A value is invalid.
    """

    model: str
    load_format: Literal["auto", "dummy"] = setting(
        "auto", "Model", "Source of the weights; dummy: random weights of the model's shapes."
    )
    device: str = setting("cpu", "Model", "Device to run on: cpu or cuda.")
    dtype: str = setting("auto", "Model", "Precision of the weights; auto: the checkpoint's.", choices=DTYPES)
    quantize: Quantize = setting(
        "none",
        "Model",
        "Format of the text model's linear layers; fp8: for GPUs (docs/limits.md).",
    )
    quantize_head: bool = setting(False, "Model", "Also quantize the output head.")
    seed: int = setting(0, "Model", "Seed of dummy weights.")
    threads: int | None = setting(
        None, "Model", "Threads on each rank. Default: the physical cores, shared by the ranks.", least=1
    )
    tensor_parallel: int = setting(
        1, "Model", "Number of ranks (processes, or GPUs) that share the language model.", least=1
    )
    merge_fidelity_floor: float = setting(
        0.8, "Adapters", "Minimum fidelity of a merged adapter; adapters below it are never merged.", least=0, most=1
    )
    switching: Literal["auto", "shadow", "in_place"] = setting(
        "auto",
        "Adapters",
        "Source of merged weights: a shadow copy, in_place (slower, no copy), or by available memory.",
    )
    sharding: tuple[str, ...] = setting(
        (), "Adapters", "NAME=KIND, layout of an adapter on several ranks: replicated, slora, auto; * for all others."
    )
    policy: str = setting("cost_based", "Scheduling", _POLICY, choices=POLICY_NAMES)
    max_batch_size: int = setting(32, "Scheduling", "Maximum number of requests per step.", least=1)
    max_step_tokens: int | None = setting(None, "Scheduling", "Most tokens per step. Default: 512, GPU 2048.", least=1)
    cuda_graphs: bool = setting(True, "Scheduling", "Run steps on a GPU as CUDA graphs.")
    max_context: int | None = setting(
        None, "Scheduling", "Maximum tokens of prompt and answer together. Default: the model's own limit.", least=1
    )
    theta_s: float = setting(0.1, "Scheduling", "Seconds of credit after which a request starves.", above=0)
    max_ttft_s: float | None = setting(
        None,
        "Scheduling",
        "Maximum time to the first token of requests without their own bound. Default: none.",
        above=0,
    )
    weight: tuple[str, ...] = setting(
        (),
        "Scheduling",
        "NAME=WEIGHT of an adapter's fair share, * for all others; may be repeated. Default: no shares.",
    )
    tenant_weight: tuple[str, ...] = setting(
        (), "Scheduling", "NAME=WEIGHT of a tenant's (token's) fair share, * for all others; may be repeated."
    )
    encode_share: float = setting(
        0.5, "Scheduling", "Fraction by which image encoding may prolong a step of other requests.", above=0
    )
    train: str | None = setting(
        None, "Training", "Plan file (YAML, see docs/training.md) of adapters to train beside requests."
    )
    train_slowdown: float = setting(
        1.15,
        "Training",
        "How many times as long requests may take beside trainings and clients of --serve-base (99th percentile).",
        above=1,
    )
    arena_bytes: int | None = setting(
        None,
        "Memory",
        "Memory for KV cache and adapters together. Default: by the model's needs and free memory.",
        least=1,
    )
    block_size: int = setting(16, "Memory", "Tokens per KV block.", least=1)
    vision_cache_bytes: int = setting(256 * 2**20, "Memory", "Size of the image embedding cache; 0: none.", least=0)
    prefix_cache: bool = setting(True, "Memory", "Reuse KV across requests with a common prefix.")
    serve_base: ServedBase | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        if self.quantize_head and self.quantize == "none":
            raise BadConfig("quantize_head needs a format; set quantize too")
        if self.quantize != "none" and self.switching == "in_place":
            raise BadConfig(
                f"switching in_place is not possible with quantize {self.quantize}, because the quantized weights are "
                "in no file; choose switching shadow"
            )
        if self.step_tokens < self.max_batch_size:
            raise BadConfig(
                f"max_step_tokens ({self.step_tokens}) is below max_batch_size ({self.max_batch_size}); "
                "a full batch of decoding requests needs one token each"
            )
        _parse_weights("weight", self.weight)
        _parse_weights("tenant_weight", self.tenant_weight)
        _parse_sharding(self.sharding)
        if self.serve_base is not None:
            self._check_served_base()

    def _check_served_base(self) -> None:
        for field, needed in (("tensor_parallel", 1), ("quantize", "none")):
            if (value := getattr(self, field)) != needed:
                raise BadConfig(
                    f"serve_base needs whole layers in floating point: {field} {needed}, not {value}; or start "
                    "`vlora base serve` as well, which loads the model again"
                )
        if self.switching == "in_place":
            raise BadConfig(
                "serve_base needs W0 in memory while an adapter is merged; start with --switching shadow, which needs "
                "memory for a second copy of the weights"
            )

    @property
    def weights(self) -> dict[str, float]:
        return _parse_weights("weight", self.weight)

    @property
    def step_tokens(self) -> int:
        return self.max_step_tokens or STEP_TOKENS[self.device != "cpu"]

    @property
    def tenant_weights(self) -> dict[str, float]:
        return _parse_weights("tenant_weight", self.tenant_weight)

    def sharding_of(self, adapter: str) -> str:
        """The `sharding` setting of an adapter: replicated, slora or auto."""
        kinds = _parse_sharding(self.sharding)
        return kinds.get(adapter, kinds.get("*", "auto"))


def _parse_pairs(field: str, pairs: Sequence[str], read: Callable[[str], Any], form: str) -> dict[str, Any]:
    """The values by name. Raises BadConfig for an entry that is no pair, a value that is read as None, a second one."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, _, text = pair.rpartition("=")
        value = read(text)
        if not name or value is None:
            raise BadConfig(f"{field} is {pair!r}; use {form}")
        if name in found:
            raise BadConfig(f"{field} sets {name!r} twice; remove one of the entries")
        found[name] = value
    return found


def _parse_weights(field: str, pairs: Sequence[str]) -> dict[str, float]:
    def read(text: str) -> float | None:
        try:
            return value if 0 < (value := float(text)) < math.inf else None
        except ValueError:
            return None

    return _parse_pairs(field, pairs, read, "NAME=WEIGHT with a weight above 0, or *=WEIGHT for all others")


def _parse_sharding(pairs: Sequence[str]) -> dict[str, str]:
    form = f"NAME=KIND, or *=KIND for all others; kinds: {', '.join(SHARDINGS)}"
    return _parse_pairs("sharding", pairs, lambda text: text if text in SHARDINGS else None, form)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the front end, as flags of `vlora serve`. Without tokens it binds to loopback only.

    tokens: API tokens of the permitted callers. They are secrets: read from a file or the environment, never from a
    flag.

    Raises:
        BadConfig: A value is invalid.
    """

    host: str = setting("127.0.0.1", "Network", "Address to listen on; loopback only without tokens.")
    rpyc_port: int = setting(18861, "Network", "Port to listen on; 0 selects a free port.", least=0, most=65535)
    http_port: int | None = setting(
        None,
        "Network",
        "Port of the HTTP API; 0 selects a free port. Default: no HTTP API.",
        least=0,
        most=65535,
        short="-p",
    )
    tls_cert: str | None = setting(None, "Network", "Certificate chain (PEM); only TLS is then accepted.")
    tls_key: str | None = setting(None, "Network", "The certificate's private key (PEM).")
    tls_client_ca: str | None = setting(
        None, "Network", "CA certificate (PEM); clients must also present a certificate signed by it."
    )
    adapter_source: tuple[str, ...] = setting(
        (), "Adapters", "Folder, or hub:ORGANISATION, of adapters that a request may load by name; may be repeated."
    )
    max_found_adapters: int = setting(
        256, "Adapters", "Maximum number of adapters from --adapter-source; the one used last stays.", least=1
    )
    image_hosts: tuple[str, ...] = setting(
        (),
        "Network",
        "Host of image and video URLs of HTTP requests, * for every public host; may be repeated.",
    )
    image_folder: str | None = setting(None, "Network", "Folder of file URLs that HTTP requests may use.")
    file_folder: str | None = setting(
        None, "Network", "Folder of uploaded files and batches; none: keep none. Default: in the adapters' state."
    )
    camera_hosts: tuple[str, ...] = setting(
        (),
        "Network",
        "Host or network (10.1.0.0/16) of cameras that admins may add, * for every host; may be repeated.",
    )
    camera_paths: tuple[str, ...] = setting(
        (), "Network", "Folder or device (/dev/video0) of cameras that admins may add; may be repeated."
    )
    camera_sinks: bool = setting(
        False, "Network", "Let admins give cameras sinks, which send events and read secrets of this machine."
    )
    tracing: bool = setting(
        False, "Log", "Send OpenTelemetry traces of requests, as the variables OTEL_* say (docs/deployment.md)."
    )
    audit_log: str | None = setting(
        None, "Log", "File of a JSON line per operation that needs an admin token; 10 files of 16 MiB are kept."
    )
    max_image_bytes: int = setting(20 * 2**20, "Limits", "Maximum size of an encoded image.", least=1)
    max_image_pixels: int = setting(40_000_000, "Limits", "Maximum size of a decoded image.", least=1)
    max_images: int = setting(
        64, "Limits", f"Maximum number of images per request, at most {MAX_VISUALS}.", least=1, most=MAX_VISUALS
    )
    max_request_pixels: int = setting(160_000_000, "Limits", "Maximum pixels of all images of a request.", least=1)
    max_video_bytes: int = setting(64 * 2**20, "Limits", "Maximum size of an encoded video.", least=1)
    max_video_s: float = setting(600.0, "Limits", "Maximum duration of an encoded video.", above=0)
    max_message_bytes: int = setting(256 * 2**20, "Limits", "Maximum size of a message.", least=1)
    max_held_bytes: int = setting(2**30, "Limits", "Maximum bytes of buffered messages over all requests.")
    max_prompt_chars: int = setting(1_000_000, "Limits", "Maximum text length of a request.", least=1)
    max_requests: int = setting(1024, "Limits", "Maximum number of concurrent requests.", least=1)
    request_timeout_s: float = setting(120.0, "Limits", "Maximum duration of a request.", above=0)
    drain_s: float = setting(5.0, "Limits", "Time for running requests to finish at shutdown.", least=0)
    max_streams: int = setting(64, "Limits", "Maximum number of open frame streams.", least=1)
    max_cameras: int = setting(16, "Limits", "Maximum number of cameras that the server reads.", least=1)
    stream_keep_s: float = setting(
        30.0, "Limits", "Time that a frame stream is kept after its connection is lost.", least=0
    )
    max_file_bytes: int = setting(
        4 * 2**30, "Limits", "Maximum bytes of all uploaded files and results of batches.", least=0
    )
    tokens: tuple[Token, ...] = ()

    @property
    def on_loopback(self) -> bool:
        return self.host in LOOPBACK_HOSTS

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.on_loopback and not self.tokens:
            raise BadConfig(
                f"host is {self.host!r}; without authentication the server binds to loopback only "
                f"({', '.join(LOOPBACK_HOSTS)}). Set tokens with --token-file, VLORA_TOKEN or VLORA_ADMIN_TOKEN"
            )
        secrets = [token.secret for token in self.tokens]
        for token in self.tokens:
            if secrets.count(token.secret) > 1:
                raise BadConfig(f"token {token.name!r} has the same secret as another token; each token must be unique")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BadConfig("tls_cert and tls_key must be set together; set both, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise BadConfig("tls_client_ca requires TLS; set tls_cert and tls_key too")
        for host in self.image_hosts:
            if host != "*" and (not host or host.count(":") == 1 or not set(host).isdisjoint("/@*[] ")):
                raise BadConfig(
                    f"image_hosts is {host!r}, which is not a host name; use a name alone (pictures.example), or * "
                    "for every public host"
                )
        for host in self.camera_hosts:
            if not host or set(host) & set("@[] ") or ("/" in host and not _is_network(host)):
                raise BadConfig(
                    f"camera_hosts is {host!r}; use a name (camera-7.example, *.example), a network (10.1.0.0/16), or *"
                )
        if wrong := [path for path in self.camera_paths if not os.path.isabs(path)]:
            raise BadConfig(f"camera_paths is {wrong[0]!r}; use an absolute path of a folder or a device (/dev/video0)")
        for source in self.adapter_source:
            organisation = source.removeprefix(HUB) if source.startswith(HUB) else None
            if not (os.path.isdir(source) if organisation is None else re.fullmatch(r"\w[\w.-]*", organisation)):
                raise BadConfig(f"adapter_source is {source!r}; give a folder that exists, or {HUB}ORGANISATION")
        if self.image_folder is not None and not os.path.isdir(self.image_folder):
            raise BadConfig(f"image_folder is {self.image_folder!r}; there is no such folder")
        if self.max_held_bytes < self.max_message_bytes:
            raise BadConfig(
                f"max_held_bytes is {self.max_held_bytes}, below max_message_bytes ({self.max_message_bytes}), so the "
                "largest message could never be accepted; raise max_held_bytes or lower max_message_bytes"
            )


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True
