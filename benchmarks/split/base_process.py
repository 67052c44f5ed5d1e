"""A base executor with one of four ways to batch: `python -m benchmarks.split.base_process FOLDER ADDRESS ...`.

Prints "ready", and at the end the number of products and of the calls that they answered, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Sequence

import torch

from vlora.split import transport
from vlora.split.admission import Limits
from vlora.split.base_server import BaseServer
from vlora.split.batching import C, Call, CallQueue
from vlora.split.executor import BaseExecutor
from vlora.split.layers import frozen_layers
from vlora.split.peer import Peer
from vlora.split.serving import load_base
from vlora.wire.address import Address

POLICIES = ("opportunistic", "no lockstep", "lockstep")
"""Those of the paper's table 5."""
WHOLE_CALLS = "opportunistic, whole calls"


class LockstepQueue(CallQueue[Peer]):
    """Waits for a call of every client, and computes all of them together."""

    def __init__(self) -> None:
        super().__init__()
        self._clients: set[Peer] = set()
        self._waiting: dict[Peer, Call[Peer]] = {}

    def join(self, client: Peer) -> None:
        self._clients.add(client)

    def leave(self, client: Peer) -> None:
        self._clients.discard(client)
        self._waiting.pop(client, None)

    def add(self, call: Call[Peer]) -> None:
        self._waiting[call.client] = call

    def next(self, now: float) -> Sequence[Call[Peer]]:
        if not self._waiting or len(self._waiting) < len(self._clients):
            return ()
        key = next(iter(self._waiting.values())).key  # the same of all, unless they are out of step
        batch = [call for call in self._waiting.values() if call.key == key]
        for call in batch:
            del self._waiting[call.client]
        return batch

    def wait_s(self, now: float) -> float | None:
        return 0.0 if self._waiting and len(self._waiting) == len(self._clients) else None

    def computed(self, batch: Sequence[Call[Peer]], took_s: float, now: float) -> None:
        pass


class WholeCallQueue(CallQueue[C]):
    """Large calls are neither cut into pieces nor followed by pauses."""

    def _take_piece(self, call: Call[C], now: float) -> Call[C]:
        return self._calls.pop(call.client)

    def _begin_pause(self, now: float) -> None:
        pass


def _queue(policy: str) -> CallQueue[Peer]:
    if policy == "lockstep":
        return LockstepQueue()
    if policy == WHOLE_CALLS:
        return WholeCallQueue()
    return CallQueue(max_wait_s=0.01 * (policy == "opportunistic"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("address")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--policy", default="opportunistic", choices=(*POLICIES, WHOLE_CALLS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    executor = BaseExecutor(frozen_layers(load_base(args.folder, args.dtype)), name=args.folder)
    server = BaseServer(executor, _queue(args.policy), Limits())
    server.listen(transport.listen(Address.parse(args.address)))
    print("ready", flush=True)
    parent = os.getppid()  # without the bench, nothing else would end this process
    server.run(lambda: bool(stopped) or os.getppid() != parent)
    print(json.dumps({"batches": server.num_batches, "calls": server.num_calls}), flush=True)


if __name__ == "__main__":
    main()
