"""The main of a rank other than 0: it runs the batches that rank 0 schedules on its shard of the model."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import signal
import sys
import threading
import traceback
import types
import typing
from collections.abc import Callable
from concurrent.futures import Executor, Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from transformers.utils import logging

import atmm
from vlora.engine.device_runtime import DeviceRuntime, facts_of, lay_out, set_threads, use_device
from vlora.engine.tensor_parallel import messages
from vlora.engine.tensor_parallel.messages import AdapterFolder
from vlora.errors import BadAdapter, EngineDead, VLoraError
from vlora.lora.adapter_pool import AdapterPool
from vlora.lora.composition import compose
from vlora.lora.host_adapter import HostAdapter, load_adapter
from vlora.lora.peft_format import read_header
from vlora.memory.adapter_cache import WorkerAdapterCache
from vlora.memory.host_to_device import Inline
from vlora.memory.page_allocator import PageRun
from vlora.models.hf_model import HFModel
from vlora.models.loading import device_of, load_model
from vlora.models.sharding import shard
from vlora.parallel.process_group import CollectiveFailed, ProcessGroup, RankDead, RankSockets
from vlora.threads import background_executor
from vlora.types import Batch, ErrorValue, Request

_STDOUT, _STDERR = 1, 2


def main(link: Connection, sockets: RankSockets) -> None:
    """Run as a rank in its own process.

    link: the pipe to rank 0; when its other end closes, rank 0 is dead and this process ends at once. sockets: this
    rank's ends of the sockets to all ranks.
    """
    os.dup2(_STDERR, _STDOUT)  # stdout belongs to the command's results
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 ends this process
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    reports = ReportPipe(link)
    try:
        start = messages.decode_start(link.recv_bytes())
    except EOFError:
        return  # rank 0 died before it sent StartRank
    threading.Thread(target=_exit_with_rank_0, args=(link, start.store_file), daemon=True).start()
    try:
        worker = TensorParallelWorker(start, sockets, reports)
        while True:
            for name, arguments in messages.decode_orders(worker.group.receive()):
                getattr(worker, name)(*_ARGUMENTS[name].decode(arguments))
    except CollectiveFailed as error:
        reports.send(messages.RankFailed(ErrorValue.of(EngineDead(str(error))), follows=isinstance(error, RankDead)))
    except VLoraError as error:
        reports.send(messages.RankFailed(ErrorValue.of(error)))
    except Exception as error:
        traceback.print_exc()
        reports.send(messages.RankFailed(ErrorValue.of(EngineDead(f"{type(error).__name__}: {error}"))))
    sys.stderr.flush()
    os._exit(1)


def _exit_with_rank_0(link: Connection, store_file: str) -> None:
    """End the process when rank 0 has ended, which makes the pipe readable: rank 0 sends nothing more over it.

    Also remove the store file, which remains if rank 0 was killed.
    """
    with contextlib.suppress(EOFError, OSError):
        link.recv_bytes()
    if store_file:
        Path(store_file).unlink(missing_ok=True)
    os._exit(0)


class ReportPipe:
    """Reports from this rank to rank 0, from any thread."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._lock = threading.Lock()

    def send(self, report: messages.Report) -> None:
        with self._lock, contextlib.suppress(OSError):  # a dead rank 0 needs no report
            self._link.send_bytes(messages.encode(report))


class ShardLoader:
    """Reads this rank's shards of adapters in the background, and copies them to its device between steps."""

    def __init__(
        self,
        pool: AdapterPool,
        adapter_cache: WorkerAdapterCache,
        report: Callable[[messages.AdapterRead], None],
        executor: Executor | None = None,
    ) -> None:
        """report: called with each outcome, from the executor's thread."""
        self._pool = pool
        self._adapter_cache = adapter_cache
        self._report = report
        self._executor = executor or background_executor("vlora-read")
        self._known: dict[str, HostAdapter] = {}
        self._reading: dict[str, tuple[PageRun, Future[HostAdapter]]] = {}

    def start(self, key: str, read: Callable[[], HostAdapter], run: PageRun) -> None:
        """Start to read an adapter, unless its content is known."""
        reading = self._executor.submit(lambda: self._known.get(key) or read())
        self._reading[key] = (run, reading)
        reading.add_done_callback(lambda done: self._report_read(key, done))

    def load_read(self) -> None:
        """Copy adapters that were read to the device. Rank 0 uses an adapter only when every rank has read it.

        Raises EngineDead if a copy failed.
        """
        for key in [key for key, (_, read) in self._reading.items() if read.done() and read.exception() is None]:
            run, read = self._reading.pop(key)
            self._known[key] = read.result()
            self._adapter_cache.place(key, run)
            self._pool.load(read.result())
            if key not in self._pool.resident:
                # A step without the adapter's factors would silently be wrong on this rank alone.
                raise EngineDead(f"adapter {key!r} was read, but could not be copied to this rank's device")

    def cancel(self, key: str) -> None:
        """Do not load an adapter that is being read; other keys are ignored."""
        self._reading.pop(key, None)

    def forget(self, key: str) -> None:
        """Drop an adapter's content."""
        self._known.pop(key, None)

    def _report_read(self, key: str, read: Future[HostAdapter]) -> None:
        error = read.exception()
        if error is not None and not isinstance(error, VLoraError):
            error = BadAdapter(f"it could not be read: {type(error).__name__}: {error}")
        self._report(messages.AdapterRead(key, None if error is None else ErrorValue.of(error)))


class TensorParallelWorker:
    """Executes rank 0's orders, which are calls of the public methods."""

    def __init__(self, start: messages.StartRank, sockets: RankSockets, reports: ReportPipe) -> None:
        """Raises the same errors as building an engine."""
        config = start.config
        set_threads(config)
        use_device(device_of(config, start.rank))
        atmm.load_kernels()
        model = load_model(config, start.rank)
        reports.send(messages.ModelLoaded(facts_of(config, model)))
        hf_model = HFModel(model)
        self.group = ProcessGroup(start.rank, sockets, device_of(config, start.rank), start.store_file)
        shard(hf_model, self.group)
        layout = lay_out(config, hf_model, self.group, loaded=True)
        self._adapter_cache = WorkerAdapterCache()
        self._device = DeviceRuntime(config, layout, self._adapter_cache, executor=Inline(), group=self.group)
        self._sites = self._device.pool.sites
        self._shards = ShardLoader(self._device.pool, self._adapter_cache, reports.send)
        self.group.wait_for_all()

    def run(self, batch: Batch) -> None:
        self._shards.load_read()
        self._device.runner.run(batch)

    def take_tokens(self, tokens: dict[str, int]) -> None:
        """tokens: of the last step, by request."""
        self._device.runner.take_tokens(tokens)

    def add(self, request: Request, vision_key: str | None) -> None:
        self._device.runner.add(request, vision_key)

    def release(self, request_id: str) -> None:
        self._device.runner.release(request_id)

    def load(self, key: str, folders: tuple[AdapterFolder, ...], run: PageRun) -> None:
        """Read an adapter, report when it is read, and keep this rank's shard in these pages.

        folders: of the adapter, or of all parts of a composition.
        """
        self._shards.start(key, functools.partial(self._read, key, folders), run)

    def copy_pages(self, first_page: int, target: int, num_pages: int) -> None:
        self._shards.load_read()  # the source of the copy may have been read only now
        self._device.arena.copy(first_page, target, num_pages)

    def move(self, key: str, run: PageRun) -> None:
        self._adapter_cache.place(key, run)
        self._device.pool.relocate(key)

    def evict(self, key: str) -> None:
        self._shards.cancel(key)
        self._device.switcher.forget(key)
        self._device.pool.evict(key)

    def pack(self, keys: tuple[str, ...], run: PageRun) -> None:
        self._shards.load_read()
        self._device.pool.pack(keys, run)

    def unpack(self) -> None:
        self._device.pool.unpack()

    def forget(self, key: str) -> None:
        """No more requests for an adapter will arrive."""
        self._shards.forget(key)
        self._device.vision.forget(key)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _read(self, key: str, folders: tuple[AdapterFolder, ...]) -> HostAdapter:
        """Raises BadAdapter, also if the files differ from those that rank 0 has read."""
        parts = [(self._read_folder(folder), folder.weight) for folder in folders]
        if folders[0].key == key:
            return parts[0][0]
        return compose(key, parts, self._sites, lambda _: 1.0)

    def _read_folder(self, folder: AdapterFolder) -> HostAdapter:
        hf_model = self._device.hf_model
        header = read_header(Path(folder.path), self._sites, hf_model.hidden_size, folder.sharding)
        header = header.expecting(folder.version)
        return load_adapter(folder.key, header, hf_model.dtype, lambda _: 1.0, self._device.base_layers)


def _arguments(method: Callable[..., None]) -> msgspec.msgpack.Decoder[Any]:
    *kinds, _ = typing.get_type_hints(method).values()
    return msgspec.msgpack.Decoder(types.GenericAlias(tuple, tuple(kinds)))


_ARGUMENTS = {
    name: _arguments(method)
    for name, method in inspect.getmembers(TensorParallelWorker, inspect.isfunction)
    if not name.startswith("_")
}
"""Decoders of the arguments of the orders, by name."""
