"""The engine's W0 as a base executor: a base server in a thread, with products between two steps."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from atmm.stored_linear import StoredLinear
from vlora.auth_rate_limit import AuthRateLimit
from vlora.config import ServedBase, Token
from vlora.engine.base_executor import EngineExecutor
from vlora.engine.device_runtime import DeviceRuntime
from vlora.errors import BadConfig
from vlora.orchestrator.latency_promise import LatencyPromise
from vlora.split import transport
from vlora.split.addresses import secured, warn_of_no_tls
from vlora.split.base_server import BaseServer
from vlora.split.batching import CallQueue
from vlora.split.greeting import Greeter, Limits
from vlora.split.layers import frozen_layers
from vlora.split.peer import Peer
from vlora.threads import compute_alone
from vlora.tls import server_context

log = logging.getLogger(__name__)

LIMITS = Limits(max_clients=16)  # each may use 64 MiB of shared memory, beside the engine's arena
_STOP_S = 2.0  # the server's thread computes nothing that takes longer


class BaseService:
    """An `EngineExecutor` and its server. `start` may be called once, after the model was loaded.

    Attributes:
        executor: Set by `start`.
    """

    executor: EngineExecutor
    _greeter: Greeter

    def __init__(self, settings: ServedBase) -> None:
        """Bind the addresses, so that one in use is reported before the model loads.

        Raises:
            BadConfig: An address or the certificate cannot be used.
        """
        self._settings = settings
        self._tls = server_context(settings)
        self._stop = threading.Event()
        self._server: BaseServer | None = None
        self._thread: threading.Thread | None = None
        self._listeners: list[socket.socket] = []
        addresses = secured(settings.addresses, has_tokens=bool(settings.tokens))
        for address in addresses:
            if not address.path and address.port == 0:
                raise BadConfig(
                    f"address {str(address)!r} has no port; choose one: clients find a restarted engine at the address "
                    "of the former one"
                )
        if self._tls is None:
            warn_of_no_tls(addresses)
        try:
            self._listeners += map(transport.listen, addresses)
        except BaseException:
            self.close()
            raise

    def start(self, device: DeviceRuntime, promise: LatencyPromise, clock: Callable[[], float]) -> EngineExecutor:
        """Serve the model's layers. clock: the engine's. Raises BadConfig if clients cannot use them."""
        settings = self._settings
        self.executor = EngineExecutor(base_layers(device), name=settings.name, promise=promise, clock=clock)
        queue: CallQueue[Peer] = CallQueue()
        self._server = server = BaseServer(self.executor, queue, LIMITS)
        self.executor.attend = server.attend
        self._greeter = Greeter(
            self.executor,
            LIMITS,
            tokens=settings.tokens,
            tls=self._tls,
            rate_limit=AuthRateLimit(),
            places=server.places,
        )
        for sock in self._listeners:
            server.listen(sock, self._greeter)
        self._thread = threading.Thread(target=self._serve, args=(server,), name="vlora-base-server", daemon=True)
        self._thread.start()
        return self.executor

    def replace_tokens(self, tokens: tuple[Token, ...]) -> None:
        """Admit clients with these tokens from now on. The connections of others close."""
        self._greeter.tokens = tokens

    @property
    def stats(self) -> Mapping[str, Any]:
        assert self._server is not None
        return {
            "num_base_clients": self._server.num_clients,
            "num_base_calls": self._server.num_calls,
            "num_base_rows": self.executor.num_rows,
            "base_s": self.executor.busy_s,
        }

    def close(self) -> None:
        """Close all connections and sockets. Clients repeat their calls when another engine listens."""
        self._stop.set()
        if self._server is None or self._thread is None:
            for sock in self._listeners:
                transport.close_listener(sock)
            return
        self.executor.close()
        self._server.wake()
        self._thread.join(_STOP_S)

    def _serve(self, server: BaseServer) -> None:
        compute_alone()
        try:
            server.run(self._stop.is_set)
        except Exception:  # must not end the engine
            log.exception("the base model is not served any more")


@contextlib.contextmanager
def listening(settings: ServedBase) -> Iterator[BaseService]:
    """Listen for clients of the base model; an error in the block ends that. Raises BadConfig."""
    service = BaseService(settings)
    try:
        yield service
    except BaseException:
        service.close()
        raise


def base_layers(device: DeviceRuntime) -> dict[str, nn.Linear]:
    """The frozen linear layers of the loaded model with W0, whatever is merged: views, no copies.

    The names and their order are those of transformers' model, so that the base is that of `vlora base serve`.

    Raises:
        BadConfig: W0 is overwritten by merging, or the layers have other names in transformers' model.
    """
    hf_model, slabs = device.hf_model, device.slabs
    if device.switcher.in_place:
        raise BadConfig(
            "serve_base needs W0 in memory while an adapter is merged, and memory has no room for a second copy of the "
            "weights; force it with --switching shadow, or make room with a smaller --arena-bytes"
        )
    if hf_model.family.queries:
        raise BadConfig(
            f"serve_base is not possible with {hf_model.family.model_type}: this server has its own code for it, and a "
            "client's model names its layers otherwise"
        )
    layers = frozen_layers(hf_model.model, lambda module: isinstance(module, StoredLinear))
    found: dict[str, nn.Linear] = {}
    for name, layer in layers.items():
        assert isinstance(layer, StoredLinear)
        weight = slabs.entry(name) if name in slabs.slots else layer.weight.detach()
        assert isinstance(weight, torch.Tensor), "quantized weights are refused before"
        # Not the layer itself: its weight is a merged one at times.
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        plain.weight = nn.Parameter(weight, requires_grad=False)
        if layer.bias is not None:
            plain.bias = layer.bias
        found[name] = plain
    return found
