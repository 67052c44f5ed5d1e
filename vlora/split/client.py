"""A client of a base executor: `connect`, then `Base.wrap` for any transformers model."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import TypeVar

import msgspec
import torch
from torch import nn

from vlora.errors import BadConfig, listed
from vlora.split import frames
from vlora.split.connection import BaseConnection, LayerCalls
from vlora.split.frames import Direction, Group
from vlora.split.layers import digest, frozen_layers, weight_of
from vlora.split.noise import Noise, NoisyCalls, require_another
from vlora.split.virtual_linear import VirtualGroup, make_virtual


class ShardedCalls:
    """Calls that all shards of a base (Symbiosis, section 3.3) compute at once: outputs are joined, gradients summed.

    The executors of the shards do not know of each other.
    """

    def __init__(self, shards: Sequence[BaseConnection]) -> None:
        """Order the shards. Raises BadConfig if they are not all shards of one base."""
        shards = sorted(shards, key=lambda each: each.welcome.shard)
        given = [each.welcome.shard for each in shards]
        if given != [(index, len(shards)) for index in range(len(shards))]:
            stated = ", ".join(f"{index + 1}/{number}" for index, number in given)
            raise BadConfig(f"these executors serve the shards {stated}; give the addresses of all shards, each once")
        shapes = {tuple((layer.name, layer.d_in, layer.d_out) for g in each.groups for layer in g) for each in shards}
        if len(shapes) > 1 or len({each.dtype for each in shards}) > 1:
            raise BadConfig("these executors serve different base models; give the shards of one")
        self.dtype = shards[0].dtype
        self.groups: Sequence[Group] = [
            tuple(msgspec.structs.replace(layer, first=0, last=layer.d_out, digest=b"") for layer in group)
            for group in shards[0].groups
        ]
        self._shards = shards
        self._lock = threading.Lock()

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def call(
        self, direction: Direction, group: int, mask: int, inputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        limit = min(shard.rows_per_call(direction, group, mask) for shard in self._shards)
        pieces = zip(*(each.split(limit) for each in inputs), strict=True)
        with self._lock:
            parts = [self._call(direction, group, mask, rows) for rows in pieces]
        return parts[0] if len(parts) == 1 else [torch.cat(each) for each in zip(*parts, strict=True)]

    def _call(
        self, direction: Direction, group: int, mask: int, inputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        given = [self._inputs_of(shard, direction, group, mask, inputs) for shard in self._shards]
        made = self._together(direction, group, mask, given)
        if direction != Direction.BACKWARD:
            return [torch.cat(parts, 1) for parts in zip(*made, strict=True)]
        total = made[0][0]
        for (part,) in made[1:]:
            total += part
        return [total]

    def _together(
        self, direction: Direction, group: int, mask: int, given: Sequence[Sequence[torch.Tensor]]
    ) -> list[Sequence[torch.Tensor]]:
        """Send to all shards, then receive from all; a call to a shard with a broken connection is repeated."""
        sent = []
        for shard, inputs in zip(self._shards, given, strict=True):
            try:
                shard.send(direction, group, mask, inputs)
                sent.append(True)
            except OSError:
                sent.append(False)
        made = []
        for shard, inputs, was_sent in zip(self._shards, given, sent, strict=True):
            try:
                if not was_sent:
                    raise ConnectionError
                made.append(shard.receive(direction, group, mask, len(inputs[0])))
            except OSError:
                shard.disconnect()
                made.append(shard.call(direction, group, mask, inputs))
        return made

    def _inputs_of(
        self, shard: BaseConnection, direction: int, group: int, mask: int, inputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """The part of a call's inputs that a shard needs: its outputs' gradients, or all of the inputs."""
        if direction != Direction.BACKWARD:
            return inputs
        layers = frames.selected(shard.groups[group], mask)
        return [dy[:, layer.first : layer.last].contiguous() for dy, layer in zip(inputs, layers, strict=True)]


_Model = TypeVar("_Model", bound=nn.Module)


def connect(
    *addresses: str,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    noise: Noise | None = None,
    patience_s: float = 60.0,
) -> Base:
    """Connect to a base executor (`vlora base serve`), or to all shards of one.

    Args:
        addresses: HOST:PORT, or unix:PATH on the same machine, where tensors travel in shared memory.
        token: The client's token. It is never sent; the executor and the client prove to each other that they know it.
            An executor that has no tokens, or does not know this one, is refused.
        tls: For an executor with a certificate, such as `ssl.create_default_context(cafile=...)`.
        noise: Noise that hides activations and gradients from the executor; see `Noise` for what it protects against.
        patience_s: How long a call waits for an executor that does not answer. Calls are repeated when it comes back.

    Raises:
        BadConfig: An address or a setting is invalid, or the addresses are not all shards of one base.
        Unauthorized: The token is missing, wrong or expired, or the executor does not prove that it knows it.
        OverCapacity: The executor has too many clients.
        Disconnected: There is no executor at an address.
    """
    if not addresses:
        raise BadConfig("connect needs the address of a base executor: HOST:PORT or unix:PATH")

    with contextlib.ExitStack() as opened:  # closed again if a later step fails

        def open_one(address: str) -> BaseConnection:
            connection = BaseConnection(address, token=token, tls=tls, patience_s=patience_s)
            opened.callback(connection.close)
            return connection

        executors = [open_one(address) for address in addresses]
        whole = len(executors) == 1 and executors[0].welcome.shard[1] == 1
        calls: LayerCalls = executors[0] if whole else ShardedCalls(executors)
        if noise is not None:
            second = None
            if noise.second is not None:
                second = open_one(noise.second)
                require_another(executors, second, noise.second)
                executors.append(second)
            calls = NoisyCalls(calls, noise, second)
        opened.pop_all()
    return Base(calls, executors)


class Base:
    """The base model behind one or several connections. A context manager that closes them."""

    def __init__(self, calls: LayerCalls, executors: Collection[BaseConnection]) -> None:
        """executors: all that `calls` uses, among them one that computes effects of noise."""
        self._calls = calls
        self._executors = executors

    def __enter__(self) -> Base:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Wrapped models cannot compute afterwards."""
        self._calls.close()

    @property
    def calls(self) -> LayerCalls:
        return self._calls

    @property
    def num_repeated(self) -> int:
        """Calls that were repeated because a connection broke."""
        return sum(executor.num_repeated for executor in self._executors)

    def wrap(self, model: _Model, *, keep: Collection[str] = ()) -> _Model:
        """Replace the frozen linear layers of a model by calls to the base, in place, and free their weights.

        Afterwards the model is used as before: adapt it with PEFT, train it with transformers' Trainer, generate.

        Args:
            model: A transformers model of the same checkpoint as the base. Its layers may be on the meta device.
            keep: Names, or last parts of names, of layers that stay with the client, for `modules_to_save` and for
                adapters that need the base's weights, such as DoRA.

        Returns:
            The model. Its remaining parameters are frozen.

        Raises:
            BadConfig: The model has other layers, shapes or weights than the base; it is unchanged then.
        """
        own = frozen_layers(model)
        kept = {name for name in own if name in keep or name.rpartition(".")[2] in keep}
        for group in self._calls.groups:
            for layer in group:
                if layer.name not in kept:
                    self._check(own.get(layer.name), layer.name, own)
        for index, group in enumerate(self._calls.groups):
            places = [place for place, layer in enumerate(group) if layer.name not in kept]
            shared = VirtualGroup(self._calls, index, places)
            for place in places:
                make_virtual(own[group[place].name], shared, place)
        model.requires_grad_(False)
        return model

    def _check(self, layer: nn.Module | None, name: str, own: Collection[str]) -> None:
        """Raise BadConfig unless the layer has the base's shape and values."""
        model = next(iter(self._executors)).welcome.model
        if layer is None:
            raise BadConfig(
                f"the base executor serves {model!r}, with a layer {name!r} that this model lacks; its own layers are "
                f"{listed(own)}: wrap a model of the base's checkpoint"
            )
        for executor in self._executors:
            info = next(each for group in executor.groups for each in group if each.name == name)
            shape = tuple(weight_of(layer).shape)
            if shape != (info.d_out, info.d_in):
                raise BadConfig(
                    f"the base executor serves {model!r} with a layer {name!r} of shape {[info.d_out, info.d_in]}; "
                    f"this model's has {list(shape)}: wrap a model of the base's checkpoint"
                )
            found = digest(layer, info.first, info.last, getattr(torch, executor.welcome.dtype))
            if found and found != info.digest:
                raise BadConfig(
                    f"the base executor serves {model!r}, and its layer {name!r} has other weights than this model's: "
                    "wrap a model of the base's checkpoint"
                )
