"""The main of a rank other than 0: it runs the batches that rank 0 schedules on its shard of the model."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path

from transformers.utils import logging

import atmm
from vlora.engine.device_runtime import DeviceSide, facts_of, lay_out, set_threads
from vlora.engine.tensor_parallel import messages
from vlora.errors import BadAdapter, EngineDead, VLoraError
from vlora.lora import HostAdapter
from vlora.lora.host_adapter import load_adapter
from vlora.lora.peft_format import read_header
from vlora.memory.adapter_cache import Appointed
from vlora.memory.books import Run
from vlora.memory.host_to_device import Inline
from vlora.models.hf_adapter import Seam
from vlora.models.loading import device_of, load_model
from vlora.models.sharding import shard
from vlora.parallel import Ends, Group, RankGone, RanksApart
from vlora.threads import background_executor
from vlora.types import ErrorValue

_STDOUT, _STDERR = 1, 2


def main(link: Connection, ends: Ends) -> None:
    """Run as a rank in its own process.

    link: the pipe to rank 0; when its other end closes, rank 0 is dead and this process ends at once. ends: of the
    sockets to all ranks.
    """
    os.dup2(_STDERR, _STDOUT)  # stdout belongs to the command's results
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 ends this process
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    words = Words(link)
    try:
        start = messages.decode_start(link.recv_bytes())
    except EOFError:
        return  # rank 0 died before it sent Start
    threading.Thread(target=_end_with, args=(link, start.store_file), daemon=True).start()
    try:
        Follower(start, ends, words).loop()
    except RanksApart as error:
        words.say(messages.Failed(ErrorValue.of(EngineDead(str(error))), follows=isinstance(error, RankGone)))
    except VLoraError as error:
        words.say(messages.Failed(ErrorValue.of(error)))
    except Exception as error:
        traceback.print_exc()
        words.say(messages.Failed(ErrorValue.of(EngineDead(f"{type(error).__name__}: {error}"))))
    sys.stderr.flush()
    os._exit(1)


def _end_with(link: Connection, store_file: str) -> None:
    """End the process when rank 0 has ended, which makes the pipe readable: rank 0 sends nothing more over it.

    Also remove the store file, which remains if rank 0 was killed.
    """
    with contextlib.suppress(EOFError, OSError):
        link.recv_bytes()
    if store_file:
        Path(store_file).unlink(missing_ok=True)
    os._exit(0)


class Words:
    """Replies from this rank to rank 0, from any thread."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._lock = threading.Lock()

    def say(self, word: messages.Word) -> None:
        with self._lock, contextlib.suppress(OSError):  # a dead rank 0 needs no reply
            self._link.send_bytes(messages.encode(word))


class Follower:
    """Executes rank 0's orders, one message after the other."""

    def __init__(self, start: messages.Start, ends: Ends, words: Words) -> None:
        """Raises the same errors as building an engine."""
        config = start.config
        set_threads(config)
        atmm.load_kernels()
        model = load_model(config, start.rank)
        words.say(messages.Loaded(facts_of(config, model)))
        seam = Seam(model)
        self._group = Group(start.rank, ends, device_of(config, start.rank), start.store_file)
        shard(seam, self._group)
        layout = lay_out(config, seam, self._group, loaded=True)
        self._dtype, self._hidden_size = seam.dtype, seam.hidden_size
        self._arena = layout.arena
        self._appointed = Appointed()
        self._side = DeviceSide(config, layout, self._appointed, executor=Inline(), group=self._group)
        self._sites = self._side.bank.sites
        self._words = words
        self._reader = background_executor("vlora-read")
        self._known: dict[str, HostAdapter] = {}
        self._coming: dict[str, tuple[messages.Bring, Future[HostAdapter]]] = {}
        self._group.wait_for_all()

    def loop(self) -> None:
        """Run until rank 0 is dead or an error occurs here, which is raised."""
        while True:
            for order in messages.decode_orders(self._group.receive()):
                self._obey(order)

    def _obey(self, order: messages.Order) -> None:
        side = self._side
        match order:
            case messages.Run():
                self._settle()
                side.runner.run(order.batch)
            case messages.Sampled():
                side.runner.take_tokens(order.tokens)
            case messages.Add():
                side.runner.add(order.request, order.vision_key)
            case messages.Release():
                side.runner.release(order.request_id)
            case messages.Bring():
                self._bring(order)
            case messages.Copy():
                self._settle()  # the source of the copy may have been read only now
                self._arena.copy(order.first_page, order.target, order.num_pages)
            case messages.Move():
                self._appointed.appoint(order.key, Run(order.first_page, order.num_pages))
                side.bank.follow(order.key)
            case messages.Drop():
                self._coming.pop(order.key, None)
                side.switcher.forget(order.key)
                side.bank.drop(order.key)
            case messages.Pack():
                self._settle()
                side.bank.pack(order.keys, Run(order.first_page, order.num_pages))
            case messages.Unpack():
                side.bank.unpack()
            case messages.Forget():
                self._known.pop(order.key, None)
                side.vision.forget(order.key)

    def _bring(self, order: messages.Bring) -> None:
        read = self._reader.submit(self._read, order)
        self._coming[order.key] = (order, read)
        read.add_done_callback(lambda done: self._tell(order.key, done))

    def _tell(self, key: str, read: Future[HostAdapter]) -> None:
        error = read.exception()
        if error is not None and not isinstance(error, VLoraError):
            error = BadAdapter(f"it could not be read: {type(error).__name__}: {error}")
        self._words.say(messages.Brought(key, None if error is None else ErrorValue.of(error)))

    def _read(self, order: messages.Bring) -> HostAdapter:
        """Read the adapter. Raises BadAdapter, also if the files differ from those that rank 0 has read."""
        if order.key in self._known:
            return self._known[order.key]
        header = read_header(Path(order.path), self._sites, self._hidden_size, order.way)
        adapter = load_adapter(order.key, header, self._dtype, lambda _: 1.0)
        if adapter.version != order.version:
            raise BadAdapter(f"{order.path}: the files changed while they were read; load the adapter again")
        return adapter

    def _settle(self) -> None:
        """Copy adapters that were read to the device. Rank 0 uses an adapter only when every rank has read it."""
        for key in [key for key, (_, read) in self._coming.items() if read.done() and read.exception() is None]:
            order, read = self._coming.pop(key)
            self._known[key] = read.result()
            self._appointed.appoint(key, Run(order.first_page, order.num_pages))
            self._side.bank.bring(read.result())
            if key not in self._side.bank.resident:
                # A step without the adapter's factors would silently be wrong on this rank alone.
                raise EngineDead(f"adapter {key!r} was read, but could not be copied to this rank's device")
