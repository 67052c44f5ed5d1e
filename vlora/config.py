"""User settings, validated once and frozen. Limits that depend on the hardware are computed later (see `Limits`)."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import math
import os
from collections.abc import Sequence
from typing import Literal, get_args

from vlora.errors import BadConfig
from vlora.types.composition import OTHER
from vlora.types.request import MAX_VISUALS

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
MIN_SECRET = 16
SHARDINGS = ("replicated", "slora", "auto")
Quantize = Literal["none", "fp8", "int8", "int4"]
DTYPES = ("auto", "float32", "bfloat16", "float16")
POLICY_NAMES = ("cost_based", "algorithm1", "dlora", "merged_only", "unmerged_only")
POLICY_ALIASES = {"vlora_cost": "cost_based", "vlora": "algorithm1"}
"""Former names, accepted until the next release."""

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """An API token of one caller.

    Args:
        admin: Whether the caller may also load, unload and pin adapters.
        expires: The time from which the token is rejected.

    Raises:
        BadConfig: A value is invalid. The message never contains the secret.
    """

    name: str
    secret: str = dataclasses.field(repr=False)
    admin: bool = False
    expires: datetime.datetime | None = None

    def __post_init__(self) -> None:
        if self.name == OTHER:
            raise BadConfig(f"token {self.name!r} has the label of all other tokens in metrics; give it another name")
        if len(self.secret) < MIN_SECRET or not all("!" <= letter <= "~" for letter in self.secret):
            raise BadConfig(
                f"token {self.name!r} cannot be used: a token has at least {MIN_SECRET} characters, ASCII and no "
                "spaces; generate one with 'openssl rand -hex 32'"
            )
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
    """Settings of one engine. Defaults are defined here only; the command line reads them from this class.

    Args:
        model: A folder or a hub name.
        load_format: "dummy" creates random weights with the shapes of the model's config.
        quantize: Format of the language model's linear layers. "fp8" rounds the loaded weights to eight-bit floats,
            "int8" to eight-bit integers, with a scale per output row; products round their inputs likewise, per token.
            "int4" rounds to four-bit integers with a scale per 32 inputs. Merged weights have the same format. "fp8" is
            for GPUs of compute capability 8.9 or higher, and slow on a CPU; "int8" and "int4" are for CPUs with
            AVX2 or AVX512-VNNI, and slow on others.
        quantize_head: Whether the output head has the format of `quantize`, too.
        policy: The scheduling policy, one of `POLICY_NAMES`. A former name (`POLICY_ALIASES`) is replaced.
        max_batch_size: Maximum number of requests in a step (MaxBS of V-LoRA's Algorithm 1).
        max_step_tokens: Maximum number of tokens in a step.
        max_context: Maximum length of prompt and answer together, in tokens. None uses the model's limit.
        block_size: Tokens per KV block.
        arena_bytes: Memory of the KV cache and the adapters together. None derives it from free memory.
        theta_s: Credit in seconds from which a request counts as starving.
        max_ttft_s: Bound on the first token (or the head's answer) for requests without their own bound, or None.
        weight: NAME=WEIGHT pairs that set the adapters' fair shares, in tokens served. The name "*" stands for all
            other adapters. Empty disables fair shares: requests are served in order of arrival.
        tenant_weight: The same for tenants, which are the names of API tokens. Requests are then admitted only when
            the next step has room, so that one tenant's backlog stays in the admission queue.
        merge_fidelity_floor: Adapters with a lower merge fidelity are never merged.
        switching: How merged weights are applied. "shadow" keeps a second copy of the language model's target weights.
            "in_place" overwrites them and restores W0 from the checkpoint's files. "auto" uses shadow if memory allows.
        vision_cache_bytes: Size of the cache of image embeddings. 0 disables it.
        encode_share: Time for encoding images in a step, as a share of the step's time for tokens.
        prefix_cache: Whether KV blocks of prompts and answers are kept, while their memory is not needed, for reuse by
            requests with the same prefix.
        cuda_graphs: Whether decode steps on a GPU run as CUDA graphs, which are captured at start. False launches each
            kernel of a step, for debugging and profiling. Steps on a CPU and on several ranks have no graphs.
        threads: Threads that compute a step. None uses the physical cores in a process of its own
            (`default_threads`), and torch's current setting in the caller's process.
        tensor_parallel: Number of ranks that share the language model, each with a part of every layer (on GPUs: one
            GPU per rank). arena_bytes and threads then apply to each rank.
        sharding: NAME=KIND pairs that set the sharding of adapters on several ranks (replicated, slora or auto). The
            name "*" stands for all other adapters. The default is auto: block-diagonal adapters as stored, all others
            replicated.
        train: Plan file of trainings that begin or continue at the start.
        train_slowdown: How many times as long requests may take beside trainings and calls of `serve_base` (their 99th
            percentile). Infinity lets both run at any time.
        serve_base: Serve the weights to clients of `vlora.split`, too. None: not.

    Raises:
        BadConfig: A value is invalid.
    """

    model: str
    load_format: Literal["auto", "dummy"] = "auto"
    device: str = "cpu"
    dtype: str = "auto"
    quantize: Quantize = "none"
    quantize_head: bool = False
    seed: int = 0
    policy: str = "cost_based"
    max_batch_size: int = 32
    max_step_tokens: int = 512
    max_context: int | None = None
    block_size: int = 16
    arena_bytes: int | None = None
    theta_s: float = 0.1
    max_ttft_s: float | None = None
    weight: tuple[str, ...] = ()
    tenant_weight: tuple[str, ...] = ()
    merge_fidelity_floor: float = 0.8
    switching: Literal["auto", "shadow", "in_place"] = "auto"
    vision_cache_bytes: int = 256 * 2**20
    encode_share: float = 0.5
    prefix_cache: bool = True
    cuda_graphs: bool = True
    threads: int | None = None
    tensor_parallel: int = 1
    sharding: tuple[str, ...] = ()
    train: str | None = None
    train_slowdown: float = 1.15
    serve_base: ServedBase | None = None

    def __post_init__(self) -> None:
        if self.load_format not in ("auto", "dummy"):
            raise BadConfig(f"load_format is {self.load_format!r}; choose auto or dummy")
        if self.dtype not in DTYPES:
            raise BadConfig(f"dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        object.__setattr__(self, "policy", policy_name(self.policy))
        if self.switching not in ("auto", "shadow", "in_place"):
            raise BadConfig(f"switching is {self.switching!r}; choose auto, shadow or in_place")
        if self.quantize not in get_args(Quantize):
            raise BadConfig(f"quantize is {self.quantize!r}; choose one of {', '.join(get_args(Quantize))}")
        if self.quantize_head and self.quantize == "none":
            raise BadConfig("quantize_head needs a format; set quantize too")
        if self.quantize != "none" and self.switching == "in_place":
            raise BadConfig(
                f"switching in_place is not possible with quantize {self.quantize}, because the quantized weights are "
                "in no file; choose switching shadow"
            )
        for field in ("max_batch_size", "max_step_tokens", "block_size", "tensor_parallel"):
            if getattr(self, field) < 1:
                raise BadConfig(f"{field} is {getattr(self, field)}; it must be at least 1")
        for field in ("max_context", "arena_bytes", "threads"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise BadConfig(f"{field} is {value}; it must be at least 1")
        if self.max_step_tokens < self.max_batch_size:
            raise BadConfig(
                f"max_step_tokens ({self.max_step_tokens}) is below max_batch_size ({self.max_batch_size}); "
                "a full batch of decoding requests needs one token each"
            )
        if not self.theta_s > 0:
            raise BadConfig(f"theta_s is {self.theta_s}; it must be above 0")
        if self.max_ttft_s is not None and not self.max_ttft_s > 0:
            raise BadConfig(f"max_ttft_s is {self.max_ttft_s}; it must be above 0, or omitted for no bound")
        _parse_weights("weight", self.weight)
        _parse_weights("tenant_weight", self.tenant_weight)
        _parse_sharding(self.sharding)
        if not 0 <= self.merge_fidelity_floor <= 1:
            raise BadConfig(f"merge_fidelity_floor is {self.merge_fidelity_floor}; it must be between 0 and 1")
        if not self.encode_share > 0:
            raise BadConfig(
                f"encode_share is {self.encode_share}; it must be above 0 (0.5: images may lengthen a step by 50 %)"
            )
        if not self.train_slowdown > 1:
            raise BadConfig(
                f"train_slowdown is {self.train_slowdown}; it must be above 1 (1.15: requests take 15 % longer at most)"
            )
        if self.vision_cache_bytes < 0:
            raise BadConfig(f"vision_cache_bytes is {self.vision_cache_bytes}; it must be 0 (off) or more")
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
    def tenant_weights(self) -> dict[str, float]:
        return _parse_weights("tenant_weight", self.tenant_weight)

    def sharding_of(self, adapter: str) -> str:
        """The `sharding` setting of an adapter: replicated, slora or auto."""
        kinds = _parse_sharding(self.sharding)
        return kinds.get(adapter, kinds.get("*", "auto"))


def policy_name(name: str) -> str:
    """The current name of a policy. A former name is accepted, with a warning in the log.

    Raises:
        BadConfig: The name is unknown; the message lists the known ones.
    """
    if name in POLICY_ALIASES:
        log.warning(
            "the policy name %r is deprecated and will be removed in the next release; use %r",
            name,
            POLICY_ALIASES[name],
        )
        return POLICY_ALIASES[name]
    if name not in POLICY_NAMES:
        raise BadConfig(f"policy is {name!r}; choose one of {', '.join(POLICY_NAMES)}")
    return name


def _parse_weights(field: str, pairs: Sequence[str]) -> dict[str, float]:
    """Raises BadConfig for an entry that is not a pair, a weight that is not above 0, and a duplicate name."""
    found: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.rpartition("=")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (name and math.isfinite(value) and value > 0):
            raise BadConfig(f"{field} is {pair!r}; use NAME=WEIGHT with a weight above 0, or *=WEIGHT for all others")
        if name in found:
            raise BadConfig(f"{field} sets {name!r} twice; remove one of the entries")
        found[name] = value
    return found


def _parse_sharding(pairs: Sequence[str]) -> dict[str, str]:
    """Raises BadConfig for an entry that is not a pair, an unknown kind, and a duplicate name."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, _, kind = pair.rpartition("=")
        if not name or kind not in SHARDINGS:
            raise BadConfig(
                f"sharding is {pair!r}; use NAME=KIND, or *=KIND for all others; kinds: {', '.join(SHARDINGS)}"
            )
        if name in found:
            raise BadConfig(f"sharding sets {name!r} twice; remove one of the entries")
        found[name] = kind
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the front end. Without tokens it binds to loopback only.

    Args:
        http_port: Port of the HTTP API. None disables HTTP.
        max_image_bytes: Maximum size of one encoded image.
        max_image_pixels: Maximum size of one decoded image.
        max_images: Maximum number of images in a request, at most MAX_VISUALS.
        max_request_pixels: Maximum size of all images of a request together.
        max_message_bytes: Maximum size of one message on the wire.
        max_held_bytes: Maximum total size of the messages of unfinished requests.
        max_prompt_chars: Maximum length of a request's text.
        max_requests: Maximum number of concurrent requests.
        request_timeout_s: Maximum duration of a request, from arrival to the last message.
        drain_s: How long running requests may continue after the server receives a stop signal.
        max_streams: Maximum number of open frame streams.
        stream_keep_s: How long a frame stream stays open after its connection is lost.
        tls_cert: PEM file of the certificate. With it, both APIs accept TLS connections only.
        tls_key: PEM file of the certificate's private key.
        tls_client_ca: PEM file of the authority that must have signed a client's certificate.
        image_hosts: Hosts from which HTTP requests may load images; "*" allows every public host.
        image_folder: Folder that file URLs may point into.
        file_folder: Folder of uploaded files and batches; "none" keeps none, None in the adapters' state.
        max_file_bytes: Maximum size of all of them together.
        keep_files_s: How long files, and batches after their end, are kept.
        tokens: API tokens of the permitted callers. They are secrets: read from a file or the environment, never from
            a flag.

    Raises:
        BadConfig: A value is invalid.
    """

    host: str = "127.0.0.1"
    rpyc_port: int = 18861
    http_port: int | None = None
    max_image_bytes: int = 20 * 2**20
    max_image_pixels: int = 40_000_000
    max_images: int = 64
    max_request_pixels: int = 160_000_000
    max_message_bytes: int = 256 * 2**20
    max_held_bytes: int = 2**30
    max_prompt_chars: int = 1_000_000
    max_requests: int = 1024
    request_timeout_s: float = 120.0
    drain_s: float = 5.0
    max_streams: int = 64
    stream_keep_s: float = 30.0
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    image_hosts: tuple[str, ...] = ()
    image_folder: str | None = None
    file_folder: str | None = None
    max_file_bytes: int = 4 * 2**30
    keep_files_s: float = 30 * 24 * 3600.0
    tokens: tuple[Token, ...] = ()

    @property
    def on_loopback(self) -> bool:
        return self.host in LOOPBACK_HOSTS

    def __post_init__(self) -> None:
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
        if self.image_folder is not None and not os.path.isdir(self.image_folder):
            raise BadConfig(f"image_folder is {self.image_folder!r}; there is no such folder")
        for field in ("rpyc_port", "http_port"):
            port = getattr(self, field)
            if port is not None and not 0 <= port <= 65535:
                raise BadConfig(f"{field} is {port}; it must be between 0 (any free port) and 65535")
        for field in (
            "max_image_bytes",
            "max_image_pixels",
            "max_images",
            "max_request_pixels",
            "max_message_bytes",
            "max_prompt_chars",
            "max_requests",
            "max_streams",
        ):
            if getattr(self, field) < 1:
                raise BadConfig(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.max_images > MAX_VISUALS:
            raise BadConfig(f"max_images is {self.max_images}; it must be at most {MAX_VISUALS}")
        if self.max_held_bytes < self.max_message_bytes:
            raise BadConfig(
                f"max_held_bytes is {self.max_held_bytes}, below max_message_bytes ({self.max_message_bytes}), so the "
                "largest message could never be accepted; raise max_held_bytes or lower max_message_bytes"
            )
        if not self.request_timeout_s > 0:
            raise BadConfig(f"request_timeout_s is {self.request_timeout_s}; it must be above 0")
        for field in ("drain_s", "stream_keep_s", "max_file_bytes", "keep_files_s"):
            if not getattr(self, field) >= 0:
                raise BadConfig(f"{field} is {getattr(self, field)}; it must be 0 or more")
