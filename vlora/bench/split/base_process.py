"""A base executor with one of three ways to batch: `python -m vlora.bench.split.base_process FOLDER ADDRESS ...`.

Prints "ready", and at the end the number of products and of the calls that they answered, as JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Sequence

import torch

from vlora.split import transport
from vlora.split.addresses import Address
from vlora.split.base_server import BaseServer
from vlora.split.batching import Call, CallQueue
from vlora.split.executor import BaseExecutor
from vlora.split.greeting import Greeter, Limits
from vlora.split.loading import load_base
from vlora.split.peer import Peer

POLICIES = ("opportunistic", "no lockstep", "lockstep")


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("address")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--policy", default="opportunistic", choices=POLICIES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    executor = BaseExecutor(load_base(args.folder, args.dtype), name=args.folder)
    queue: CallQueue[Peer] = (
        LockstepQueue() if args.policy == "lockstep" else CallQueue(max_wait_s=0.01 * (args.policy == "opportunistic"))
    )
    limits = Limits()
    server = BaseServer(executor, queue, limits)
    greeter = Greeter(executor, limits, places=server.places)
    server.listen(transport.listen(Address.parse(args.address)), greeter)
    print("ready", flush=True)
    server.run(lambda: bool(stopped))
    print(json.dumps({"batches": server.num_batches, "calls": server.num_calls}), flush=True)


if __name__ == "__main__":
    main()
