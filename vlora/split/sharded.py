"""Several executors that share every layer by its outputs (Symbiosis, section 3.3). They do not know of each other."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import torch

from vlora.errors import BadConfig
from vlora.split import frames
from vlora.split.connection import BaseConnection
from vlora.split.frames import Direction, Group


class ShardedCalls:
    """Calls that all shards of a base compute at once: outputs are joined, gradients are summed."""

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
        """See LayerCalls."""
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
