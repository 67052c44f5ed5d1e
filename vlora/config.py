"""What the user chose, checked once and frozen. What the hardware allows is computed later, elsewhere (`Limits`)."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from collections.abc import Sequence
from typing import Literal

from vlora.errors import BadConfig

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
MIN_SECRET = 16
SHARDINGS = ("replicated", "slora", "auto")
DTYPES = ("auto", "float32", "bfloat16", "float16")
POLICY_NAMES = ("vlora_cost", "vlora", "dlora", "merged_only", "unmerged_only")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Defaults live here only; the command line reads them from this class.

    model: a folder or a hub name. load_format "dummy" gives random weights at the config's real shapes.
    max_batch_size: most requests in a step (MaxBS of V-LoRA's Algorithm 1). max_step_tokens: most tokens in a step.
    max_context: prompt and answer together, in tokens; None takes the model's own limit.
    block_size: tokens per KV block. arena_bytes: KV cache and adapters together; None sizes it from free memory.
    theta_s: how much credit (seconds) makes a request starve. merge_fidelity_floor: adapters below it are never merged.
    max_ttft_s: bound on the first token (or head's answer) of requests that come without one of their own, or None.
    weight: NAME=WEIGHT of adapters, for fair shares between them in tokens served; the name "*" is for all others.
    Empty keeps no shares: who comes first is served first.
    tenant_weight: the same between tenants, which are the names of tokens; then nobody is let in before the next step
    has room, so that a crowd of one tenant's requests waits outside.
    switching: how merged weights come into place; "shadow" keeps a second copy of the language model's target weights,
    "in_place" writes over them and goes back with the checkpoint's files; "auto" takes shadow where memory allows.
    encode_share: share of a step's time with tokens that images may be encoded in beside it. vision_cache_bytes: image
    embeddings kept for reuse. prefix_cache: KV blocks of prompts and answers are kept while their room is not needed,
    for requests that begin alike. threads: that a step computes with; None is the physical cores in a process of its
    own (`default_threads`), and torch's number in the caller's.
    tensor_parallel: how many processes share the language model, each with a part of every layer (on GPUs: one GPU
    each). arena_bytes and threads are then each one's. sharding: NAME=KIND of adapters on several ranks (replicated,
    slora or auto); the name "*" is for all others, and auto where nothing is said.

    Raises BadConfig when a value cannot work.
    """

    model: str
    load_format: Literal["auto", "dummy"] = "auto"
    device: str = "cpu"
    dtype: str = "auto"
    seed: int = 0
    policy: str = "vlora_cost"
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
    threads: int | None = None
    tensor_parallel: int = 1
    sharding: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.load_format not in ("auto", "dummy"):
            raise BadConfig(f"load_format is {self.load_format!r}; choose auto or dummy")
        if self.dtype not in DTYPES:
            raise BadConfig(f"dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        if self.policy not in POLICY_NAMES:
            raise BadConfig(f"policy is {self.policy!r}; choose one of {', '.join(POLICY_NAMES)}")
        if self.switching not in ("auto", "shadow", "in_place"):
            raise BadConfig(f"switching is {self.switching!r}; choose auto, shadow or in_place")
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
            raise BadConfig(f"max_ttft_s is {self.max_ttft_s}; it must be above 0, or left away for no bound")
        _parse_weights("weight", self.weight)
        _parse_weights("tenant_weight", self.tenant_weight)
        _parse_sharding(self.sharding)
        if not 0 <= self.merge_fidelity_floor <= 1:
            raise BadConfig(f"merge_fidelity_floor is {self.merge_fidelity_floor}; it must lie between 0 and 1")
        if not self.encode_share > 0:
            raise BadConfig(
                f"encode_share is {self.encode_share}; it must be above 0 (0.5: images may prolong a step by 50 %)"
            )
        if self.vision_cache_bytes < 0:
            raise BadConfig(f"vision_cache_bytes is {self.vision_cache_bytes}; it must be 0 (off) or more")

    @property
    def weights(self) -> dict[str, float]:
        """`weight` by adapter's name."""
        return _parse_weights("weight", self.weight)

    @property
    def tenant_weights(self) -> dict[str, float]:
        """`tenant_weight` by tenant's name."""
        return _parse_weights("tenant_weight", self.tenant_weight)

    def sharding_of(self, adapter: str) -> str:
        """What `sharding` says of an adapter: replicated, slora or auto."""
        kinds = _parse_sharding(self.sharding)
        return kinds.get(adapter, kinds.get("*", "auto"))


def _parse_weights(field: str, pairs: Sequence[str]) -> dict[str, float]:
    """Raises BadConfig for what is no pair, no number above 0, or given twice."""
    found: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.rpartition("=")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (name and math.isfinite(value) and value > 0):
            raise BadConfig(f"{field} is {pair!r}; write NAME=WEIGHT with a weight above 0, or *=WEIGHT for all others")
        if name in found:
            raise BadConfig(f"{field} gives {name!r} twice; one is enough")
        found[name] = value
    return found


def _parse_sharding(pairs: Sequence[str]) -> dict[str, str]:
    """Raises BadConfig for what is no pair, no kind, or given twice."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, _, kind = pair.rpartition("=")
        if not name or kind not in SHARDINGS:
            raise BadConfig(
                f"sharding is {pair!r}; write NAME=KIND, or *=KIND for all others; kinds are {', '.join(SHARDINGS)}"
            )
        if name in found:
            raise BadConfig(f"sharding gives {name!r} twice; one is enough")
        found[name] = kind
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """Who may call. admin: also load, unload and pin adapters. expires: from this moment on it is refused.

    Raises BadConfig when a value cannot work; no message carries the secret.
    """

    name: str
    secret: str = dataclasses.field(repr=False)
    admin: bool = False
    expires: datetime.datetime | None = None

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_SECRET or not all("!" <= letter <= "~" for letter in self.secret):
            raise BadConfig(
                f"token {self.name!r} cannot be used: a token has at least {MIN_SECRET} characters, ASCII and no "
                "spaces; openssl rand -hex 32 makes a good one"
            )
        if self.expires is not None and self.expires.tzinfo is None:
            raise BadConfig(f"token {self.name!r} expires at a time without a time zone; write 2027-01-31T00:00:00Z")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the front end. Without tokens it binds to loopback only. http_port None serves no HTTP.

    tls_cert and tls_key: PEM files; both surfaces then speak TLS only. tls_client_ca: callers must show a certificate
    of this authority as well.

    max_image_bytes and max_image_pixels bound one encoded image and one decoded image, max_request_pixels all images of
    one request together. max_message_bytes bounds one message on the wire, max_held_bytes all
    messages together whose requests have not ended, max_prompt_chars the text of one request.
    max_requests: how many may be under way at once. request_timeout_s bounds one request, from arrival to last word;
    drain_s is how long requests under way may still run after the server was told to stop.
    max_streams: how many streams of frames may be open at once; stream_keep_s is how long one outlasts its connection.
    image_hosts: hosts that HTTP requests may name images on, "*" for every public one; image_folder: where file URLs
    may point into. tokens: who may call; secrets, so they are read from a file or the environment and are never a flag.

    Raises BadConfig when a value cannot work.
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
    max_requests: int = 256
    request_timeout_s: float = 120.0
    drain_s: float = 5.0
    max_streams: int = 64
    stream_keep_s: float = 30.0
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    image_hosts: tuple[str, ...] = ()
    image_folder: str | None = None
    tokens: tuple[Token, ...] = ()

    @property
    def on_loopback(self) -> bool:
        return self.host in LOOPBACK_HOSTS

    def __post_init__(self) -> None:
        if not self.on_loopback and not self.tokens:
            raise BadConfig(
                f"host is {self.host!r}; without authentication the server binds to loopback only "
                f"({', '.join(LOOPBACK_HOSTS)}). Give it tokens with --token-file, VLORA_TOKEN or VLORA_ADMIN_TOKEN"
            )
        secrets = [token.secret for token in self.tokens]
        for token in self.tokens:
            if secrets.count(token.secret) > 1:
                raise BadConfig(f"token {token.name!r} is the same as another one; everyone gets a token of their own")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise BadConfig("tls_cert and tls_key belong together; give both, or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise BadConfig(
                "tls_client_ca asks callers for certificates, which takes TLS; give tls_cert and tls_key too"
            )
        for host in self.image_hosts:
            if host != "*" and (not host or host.count(":") == 1 or not set(host).isdisjoint("/@*[] ")):
                raise BadConfig(
                    f"image_hosts is {host!r}, which no URL's host will be; write its name alone (pictures.example), "
                    "or * for every public one"
                )
        if self.image_folder is not None and not os.path.isdir(self.image_folder):
            raise BadConfig(f"image_folder is {self.image_folder!r}; there is no such folder")
        for field in ("rpyc_port", "http_port"):
            port = getattr(self, field)
            if port is not None and not 0 <= port <= 65535:
                raise BadConfig(f"{field} is {port}; it must lie between 0 (any free port) and 65535")
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
        if self.max_held_bytes < self.max_message_bytes:
            raise BadConfig(
                f"max_held_bytes is {self.max_held_bytes}, below max_message_bytes ({self.max_message_bytes}): the "
                "largest message could never be taken; raise the one or lower the other"
            )
        if not self.request_timeout_s > 0:
            raise BadConfig(f"request_timeout_s is {self.request_timeout_s}; it must be above 0")
        for field in ("drain_s", "stream_keep_s"):
            if not getattr(self, field) >= 0:
                raise BadConfig(f"{field} is {getattr(self, field)}; it must be 0 or more")
