"""The engine's W0 as a base executor: a base server in a thread, with products between two steps."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from atmm.quantized import StoredLinear
from vlora.config import ServedBase, Token
from vlora.engine.device_runtime import DeviceRuntime
from vlora.errors import BadConfig
from vlora.orchestrator.latency_promise import QUIET_S, LatencyPromise, PiecePrices
from vlora.split import frames
from vlora.split.admission import Limits
from vlora.split.base_server import BaseServer, Stopped
from vlora.split.batching import FIXED_ROWS, CallQueue
from vlora.split.executor import BaseExecutor
from vlora.split.layers import frozen_layers
from vlora.split.serving import Listeners
from vlora.threads import compute_alone

_LONGEST_S = 0.2  # of a piece, for the request that arrives during it
_ATTEND_S = 0.2


class _Rows(NamedTuple):
    """Rows of one product. num_tokens: with `FIXED_ROWS`, the time of reading the weights."""

    kind: Hashable
    num_tokens: int


class _Product:
    """A product that the server's thread waits for.

    Attributes:
        first: The row with which its next piece begins.
        is_wanted: Whether a client still waits for it.
        waits_since_s: When there was first no room for its next piece; None if there was.
    """

    def __init__(
        self, direction: int, group: int, mask: int, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor]
    ) -> None:
        self.direction, self.group, self.mask = direction, group, mask
        self.inputs, self.out = inputs, out
        self.num_rows, self.first = len(inputs[0]), 0
        self.is_wanted = True
        self.waits_since_s: float | None = None
        self.error: Exception | None = None
        self.done = threading.Event()

    def end(self, error: Exception | None = None) -> None:
        """Let `compute` return, or raise."""
        self.error = error
        self.done.set()


class EngineExecutor(BaseExecutor):
    """`compute` is called by the base server's thread, which waits; `advance` computes, as `SharedWork` of the engine.

    The promise bounds pieces like those of trainings: rows are independent, so a product is cut where the room ends.

    Attributes:
        wake, waits, fits_later: See `SharedWork`.
        attend: Called by the server's thread while a product waits. Returns whether a client still waits for it.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], *, name: str, promise: LatencyPromise, clock: Callable[[], float]
    ) -> None:
        super().__init__(layers, name=name)
        self.wake: Callable[[], None] = lambda: None
        self.attend: Callable[[], bool] = lambda: True
        self.waits = False
        self.fits_later = False
        self.num_rows = 0
        self._promise = promise
        self._clock = clock
        self._prices = PiecePrices()
        self._handing = threading.Lock()
        self._product: _Product | None = None
        self._closed = False

    # -- the server's thread ------------------------------------------------------------------------------------------

    def compute(
        self,
        direction: int,
        group: int,
        mask: int,
        inputs: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor] | None = None,
    ) -> Sequence[torch.Tensor]:
        """As `BaseExecutor.compute`, with results in host memory. Raises Stopped when the engine closes."""
        if out is None:
            _, widths = frames.widths(self.groups[group], direction, mask)
            out = [torch.empty(len(inputs[0]), width, dtype=self.dtype) for width in widths]
        product = _Product(direction, group, mask, inputs, out)
        with self._handing:
            if self._closed:
                raise Stopped
            assert self._product is None, "the server computes one product at a time"
            self._product = product
        self.wake()
        while not product.done.wait(_ATTEND_S):
            if product.is_wanted and not self.attend():
                product.is_wanted = False
                self.wake()
        if product.error is not None:
            raise product.error
        return out

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        product = self._product
        self.waits = False
        if product is None:
            return False
        if not product.is_wanted:
            self._end(product, RuntimeError("no client waits for it"))
            return False
        kind = product.direction, self._shapes(product.group, product.mask)
        left = product.num_rows - product.first
        rows = self._rows_now(kind, left) or self._rows_to_measure(product, kind, left)
        if not rows:
            self.waits = True
            return False
        product.waits_since_s = None
        before = self._clock()
        error = self._compute_piece(product, slice(product.first, product.first + rows))
        seconds = self._clock() - before
        self._promise.spent(seconds)
        if error is None:
            self._prices.observe(_Rows(kind, rows + FIXED_ROWS), seconds)
            self.num_rows += rows
        product.first += rows
        if error is not None or product.first == product.num_rows:
            self._end(product, error)
        return True

    @property
    def retry_s(self) -> float | None:
        return self._promise.quiet_in_s if self.waits else None

    def close(self) -> None:
        """End the product that is waited for, and refuse further ones."""
        with self._handing:
            self._closed = True
            product, self._product = self._product, None
        if product is not None:
            product.end(Stopped())

    def _end(self, product: _Product, error: Exception | None) -> None:
        self._product = None
        product.end(error)

    def _compute_piece(self, product: _Product, rows: slice) -> Exception | None:
        """Compute rows of a product. Returns the error for its clients, which must not end the engine."""
        inputs, out = [x[rows] for x in product.inputs], [y[rows] for y in product.out]
        try:
            super().compute(product.direction, product.group, product.mask, inputs, out)
        except (RuntimeError, MemoryError) as error:
            return error
        except Exception as error:
            return RuntimeError(f"{type(error).__name__}: {error}")
        return None

    def _rows_now(self, kind: Hashable, left: int) -> int:
        """Rows of the next piece; 0 if the promise leaves no room for it."""
        room_s = self._promise.room_s
        least = min(left, FIXED_ROWS)  # with fewer, most of the time would be for reading the weights
        row_s = self._prices.expected_s(_Rows(kind, 1))
        if row_s == 0:  # not known yet
            self.fits_later = True
            return least if room_s > 0 else 0
        if math.isinf(room_s):
            return min(left, max(least, int(_LONGEST_S / row_s) - FIXED_ROWS))
        price_s = row_s * (least + FIXED_ROWS)
        if price_s > room_s:
            self.fits_later = price_s <= self._promise.longest_s
            return 0
        # As micro-steps: half of what an idle engine may spend, as prices vary, and at most what requests leave.
        usual_s = min(room_s, self._promise.usual_room_s / 2, self._promise.beside_room_s, _LONGEST_S)
        return min(left, max(least, int(usual_s / row_s) - FIXED_ROWS))

    def _rows_to_measure(self, product: _Product, kind: Hashable, left: int) -> int:
        """Rows of a piece without room that runs now and then nevertheless; 0 for none.

        A price that was measured once may be too high by far, and would then never be measured again.
        """
        now_s = self._clock()
        since_s = product.waits_since_s = now_s if product.waits_since_s is None else product.waits_since_s
        doubtful = self._prices.num_measured(kind) == 1 and self._promise.room_s > 0
        return min(left, FIXED_ROWS) if doubtful and now_s - since_s >= QUIET_S else 0

    def _shapes(self, group: int, mask: int) -> tuple[tuple[int, int], ...]:
        """Of the selected layers. Layers of one shape have one price."""
        return tuple((each.d_in, each.d_out) for place, each in enumerate(self.groups[group]) if mask >> place & 1)


log = logging.getLogger(__name__)

LIMITS = Limits(max_clients=16)  # each may use 64 MiB of shared memory, beside the engine's arena
_STOP_S = 2.0  # the server's thread computes nothing that takes longer


class BaseService:
    """An `EngineExecutor` and its server. `start` may be called once, after the model was loaded."""

    executor: EngineExecutor

    def __init__(self, settings: ServedBase) -> None:
        """Bind the addresses, so that one in use is reported before the model loads.

        Raises:
            BadConfig: An address or the certificate cannot be used.
        """
        for address in settings.addresses:
            if address.endswith(":0") and not address.startswith("unix:"):
                raise BadConfig(
                    f"address {address!r} has no port; choose one: clients find a restarted engine at the address of "
                    "the former one"
                )
        self._name = settings.name
        self._listeners = Listeners(settings)
        self._stop = threading.Event()
        self._server: BaseServer | None = None
        self._thread: threading.Thread | None = None

    def start(self, device: DeviceRuntime, promise: LatencyPromise, clock: Callable[[], float]) -> EngineExecutor:
        """Serve the model's layers. clock: the engine's. Raises BadConfig if clients cannot use them."""
        self.executor = EngineExecutor(base_layers(device), name=self._name, promise=promise, clock=clock)
        self._server = server = self._listeners.server(self.executor, CallQueue(), LIMITS)
        self.executor.attend = server.attend
        self._thread = threading.Thread(target=self._serve, args=(server,), name="vlora-base-server", daemon=True)
        self._thread.start()
        return self.executor

    def replace_tokens(self, tokens: tuple[Token, ...]) -> None:
        """Admit clients with these tokens from now on. The connections of others close."""
        assert self._server is not None
        self._server.admission.tokens = tokens

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
            self._listeners.close()
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
