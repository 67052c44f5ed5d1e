"""Adapters sent to machines of replicas without the files: what is read, received, kept on disk, and served.

A machine is a working directory with caches of its own, of a sleeping engine in a process of its own. `/proc/self/cwd`
makes one path lead to the files of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from tests.cluster.running import SECRET, Running, asked, check, joined, outputs_of, real, running
from tests.processes import PATIENCE_S
from vlora.adapter_files import CONFIG_FILE, WEIGHTS_FILE, content_hash
from vlora.cluster import adapter_sender, replica_adapters
from vlora.cluster.adapter_messages import (
    Files,
    FilesOperation,
    Finish,
    Hold,
    Offer,
    Piece,
    ShippedFile,
)
from vlora.cluster.adapter_sender import AdapterContent, AdapterSender, ReplicaFiles, ShippingLimits
from vlora.cluster.adapter_state import DesiredAdapter
from vlora.cluster.adapter_store import AdapterStore, Busy, default_root
from vlora.cluster.cluster import Cluster
from vlora.cluster.peers import AdapterReceiver
from vlora.engine.ipc import messages
from vlora.engine.operations import LoadAdapter
from vlora.errors import Aborted, BadAdapter, BadRequest, OverCapacity
from vlora.routing import Router
from vlora.server.metrics import Families, cluster_families
from vlora.types.replicas import AdapterPlace

SIZE = 10_000


def write(folder: Path, seed: int = 0, size: int = SIZE, heads: bool = False) -> str:
    """Write an adapter's files. Returns the content's hash."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(f"{seed:4}")
    (folder / WEIGHTS_FILE).write_bytes(random.Random(seed).randbytes(size))
    if heads:
        (folder / "heads.json").write_text("{}")
        (folder / "heads.safetensors").write_bytes(b"")
    (folder / "README.md").write_text("not an adapter's file")
    return content_hash(folder)


def written(folder: Path, seed: int = 0, size: int = SIZE) -> Path:
    write(folder, seed, size)
    return folder


# -- the front end's reads and messages -------------------------------------------------------------------------------


async def read(sender: AdapterSender, folder: Path) -> AdapterContent:
    found = await sender.content_of(str(folder))
    assert found is not None
    return found


@real
async def test_files_are_read_whole_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the time and size of others; not while they change; and by replicas that join at once."""
    sender, folder, other = AdapterSender(ShippingLimits()), written(tmp_path / "signs"), written(tmp_path / "other")
    file = folder / WEIGHTS_FILE
    before = file.stat()
    assert (await read(sender, folder)).version == content_hash(folder)
    with file.open("r+b") as stream:
        stream.write(b"new")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as `cp --preserve` of an archive's files does
    assert (await read(sender, folder)).version == content_hash(folder)

    def changing(path: Path) -> str:
        found = content_hash(path)
        file.write_bytes(b"longer")
        return found

    file.write_bytes(b"another")
    with monkeypatch.context() as patched:
        patched.setattr(adapter_sender, "content_hash", changing)
        with pytest.raises(BadAdapter, match="was changed while it was read"):
            await sender.content_of(str(folder))
    assert (await read(sender, folder)).version == content_hash(folder)

    num_read, go_on = 0, threading.Event()

    def slow(path: Path) -> str:
        nonlocal num_read
        if path == folder:
            num_read += 1
            assert go_on.wait(PATIENCE_S)
        return content_hash(path)

    file.write_bytes(b"once more")
    monkeypatch.setattr(adapter_sender, "content_hash", slow)
    reading = [asyncio.create_task(read(sender, folder)) for _ in range(3)]
    await read(sender, other)  # a slow disk delays no other folder
    go_on.set()
    assert {found.version for found in await asyncio.gather(*reading)} == {content_hash(folder)}
    assert num_read == 1


class ScriptedClient:
    """A replica that lacks files, and puts what it gets into a folder."""

    def __init__(self, *, lacks: bool = False) -> None:
        self.calls: list[FilesOperation] = []
        self._lacks = lacks

    def post(self, call: FilesOperation) -> asyncio.Future[messages.Reply[msgspec.Raw]]:
        self.calls.append(call)
        found: asyncio.Future[messages.Reply[msgspec.Raw]] = asyncio.get_running_loop().create_future()
        path = "/store/x" if isinstance(call, Finish) or (isinstance(call, Offer) and not self._lacks) else ""
        found.set_result(messages.Reply(len(self.calls), msgspec.Raw(messages.encode(Files(path)))))
        return found


@real
async def test_what_is_sent_to_a_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "signs", size=100)
    wanted = DesiredAdapter(str(folder), content_hash(folder))

    def files_of(client: Any) -> ReplicaFiles:
        return ReplicaFiles(AdapterSender(ShippingLimits()), client)

    # Contents in use are named whenever others may be held.
    client = ScriptedClient()
    files, kept = files_of(client), "f" * 32  # received before the line was opened again
    await files.hold({kept})
    assert await files.send(wanted) == "/store/x"
    await files.hold({kept})  # the engine has refused it, so the replica need not hold it
    await files.hold({kept})
    assert [call.versions for call in client.calls if isinstance(call, Hold)] == [(kept,), (kept,)]
    # A content that is not wanted any more is not sent on.
    monkeypatch.setattr(adapter_sender, "PIECE_BYTES", 10)
    client = ScriptedClient(lacks=True)
    files = files_of(client)
    with pytest.raises(Aborted, match="not wanted"):
        await files.send(wanted, lambda: len(client.calls) < 4)
    assert [type(call) for call in client.calls] == [Offer, Piece, Piece, Piece, Finish]
    assert files.num_bytes_sent == 24 and not files.progress
    assert await files.send(wanted) == "/store/x" and files.num_bytes_sent == 128
    # One that returns while it is looked for is sent.
    files, away = files_of(ScriptedClient(lacks=True)), tmp_path / "away"
    folder.rename(away)
    find = files.find

    async def returning(wanted: DesiredAdapter) -> str | None:
        shutil.copytree(away, folder)
        return await find(wanted)

    monkeypatch.setattr(files, "find", returning)
    assert await files.send(wanted) == "/store/x"


# -- the replica's folder of received adapters ------------------------------------------------------------------------


def offer_of(folder: Path, path: str = "/nowhere", **fields: Any) -> Offer:
    names = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if (folder / name).exists()]
    files = tuple(ShippedFile(name, (folder / name).stat().st_size) for name in names)
    plain: dict[str, Any] = {
        "files": files,
        "version": content_hash(folder),
        "adapter_bytes": 1 << 20,
        "total_bytes": 1 << 20,
    }
    return Offer(path=path, receive=True, **(plain | fields))


def send(store: AdapterStore, folder: Path, offer: Offer) -> str:
    """Send what `begin` has begun to receive."""
    for file in offer.files:
        data = (folder / file.name).read_bytes()
        for begin in range(0, len(data), 3000):
            store.write(offer.version, file.name, data[begin : begin + 3000])
    return store.finish(offer.version)


def received(store: AdapterStore, folder: Path, **fields: Any) -> str:
    """Receive a folder's content. Returns the folder in the store."""
    offer = offer_of(folder, **fields)
    assert store.find(offer) is None and store.begin(offer)
    return send(store, folder, offer)


def contents(store: AdapterStore) -> set[str]:
    """All names in the store's folder."""
    return {path.name for path in store.root.iterdir()} if store.root.exists() else set()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    found = AdapterStore(tmp_path / "caches" / "adapters")
    yield found
    found.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return written(tmp_path / "source")


def test_a_content_is_received_found_again_and_private(
    tmp_path: Path, store: AdapterStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = received(store, source)
    assert Path(folder).name == content_hash(Path(folder)) == content_hash(source)
    assert store.find(offer_of(source)) == folder
    assert store.find(offer_of(source, files=())) == folder  # a front end without the files
    assert store.find(offer_of(source, path=str(source))) == str(source)  # the machine's own files come first
    assert store.root.stat().st_mode & 0o777 == 0o700
    # The machine's files with other content are not used.
    other, local = written(tmp_path / "other", 1), written(tmp_path / "local", 2)
    for path in (local, tmp_path / "absent"):
        assert store.find(offer_of(other, path=str(path))) is None
    (local / WEIGHTS_FILE).unlink()
    assert store.find(offer_of(other, path=str(local))) is None
    # The folder is that of other caches.
    assert default_root({"XDG_CACHE_HOME": "/caches"}) == Path("/caches/vlora/adapters")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_root({}) == Path("/home/someone/.cache/vlora/adapters")


NAMES = ("../x", "/etc/passwd", "a/b", "..", "", "README.md", "adapter_model.bin", "digests.json")
VERSIONS = ("..", "../" + "0" * 29, "0" * 31, "0" * 33, "A" * 32, "", "0" * 32 + "\n")


def test_a_hostile_front_end_writes_nothing_but_an_adapters_files(store: AdapterStore, source: Path) -> None:
    offer = offer_of(source)
    for version in VERSIONS:
        with pytest.raises(BadRequest, match="is no hash"):
            store.find(replace(offer, version=version))
    for name in NAMES:
        with pytest.raises(BadRequest, match="is no file of an adapter"):
            store.find(replace(offer, files=(*offer.files, ShippedFile(name, 1))))
    assert not store.root.exists()
    with pytest.raises(BadRequest, match="no content with this hash"):
        store.write(offer.version, CONFIG_FILE, b"x")
    assert store.begin(offer)
    for name, data, reason in (
        *((name, b"x", "out of turn") for name in (*NAMES, WEIGHTS_FILE)),
        (CONFIG_FILE, b"12345", "does not fit"),
        (CONFIG_FILE, b"", "does not fit"),
    ):
        with pytest.raises(BadRequest, match=reason):
            store.write(offer.version, name, data)
    assert contents(store) == {offer.version + ".part", offer.version + ".lock", "store.lock"}
    assert set(os.listdir(store.root / (offer.version + ".part"))) == {CONFIG_FILE, WEIGHTS_FILE}
    with pytest.raises(BadAdapter, match="not arrived in full"):
        store.finish(offer.version)
    store.abort(offer.version)
    # Wrong bytes are dropped.
    other = replace(offer, version="0" * 32)
    assert store.begin(other)
    with pytest.raises(BadAdapter, match=r"have content .* they were changed while they were sent, or on the way"):
        send(store, source, other)
    store.abort(other.version)
    assert contents(store) == {"store.lock"}


def test_limits_of_one_adapter_and_of_all(tmp_path: Path, store: AdapterStore) -> None:
    sources = [written(tmp_path / str(seed), seed) for seed in range(5)]
    with pytest.raises(BadAdapter, match=r"over the limit of 10003 .*`--shipped-adapter-gib`"):
        received(store, sources[0], adapter_bytes=SIZE + 3)
    assert contents(store) == set()
    room = 2 * (SIZE + 600)
    first, second = (received(store, source, total_bytes=room) for source in sources[:2])
    with pytest.raises(OverCapacity, match=r"no room for .*`--shipped-gib`"):
        received(store, sources[2], total_bytes=room)
    assert {Path(first).name, Path(second).name} == {name for name in contents(store) if "." not in name}
    store.hold([Path(first).name])
    third = received(store, sources[2], total_bytes=room)
    assert not Path(second).exists() and Path(first).exists() and Path(third).exists()
    assert store.find(offer_of(sources[1])) is None
    store.hold([])
    os.utime(first, (1, 1))
    os.utime(third, (2, 2))
    fourth = received(store, sources[3], total_bytes=room)  # the least recently used one goes
    assert not Path(first).exists() and Path(third).exists()
    assert not {name for name in contents(store) if name.removesuffix(".lock") == Path(first).name}
    assert store.find(offer_of(sources[2])) == third
    os.utime(third, (1, 1))
    store.hold([])  # it was used until now
    os.utime(fourth, (2, 2))
    received(store, sources[4], total_bytes=room)
    assert Path(third).exists() and not Path(fourth).exists()


def test_a_full_folder_is_counted_once(tmp_path: Path, store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [received(store, written(tmp_path / str(seed), seed, 1)) for seed in range(20)]
    store.hold([Path(folder).name for folder in folders[10:]])
    num_scanned, scan = 0, os.scandir

    def counting(folder: Any) -> Any:
        nonlocal num_scanned
        num_scanned += isinstance(folder, Path) and len(folder.name) == 32
        return scan(folder)

    monkeypatch.setattr("vlora.cluster.adapter_store.os.scandir", counting)
    size = sum(path.stat().st_size for path in Path(folders[0]).iterdir())
    with pytest.raises(OverCapacity, match=f"adapters in use take {10 * size} of"):
        store.begin(offer_of(written(tmp_path / "next", 99), total_bytes=11 * size))
    assert {path.name for path in store.root.iterdir() if path.is_dir()} == {Path(path).name for path in folders[10:]}
    assert num_scanned == 20


def test_two_processes_receive_a_content_once(tmp_path: Path, store: AdapterStore, source: Path) -> None:
    other = AdapterStore(store.root)
    offer = offer_of(source)
    assert store.begin(offer)
    for call in (other.find, other.begin, store.find):  # nor twice in one process
        with pytest.raises(Busy):
            call(offer)
    folder = send(store, source, offer)
    assert other.find(offer) == folder
    store.close()
    following = written(tmp_path / "next", 1)
    with pytest.raises(OverCapacity):  # the other one uses it
        received(store, following, total_bytes=SIZE + 600)
    other.close()
    received(store, following, total_bytes=SIZE + 600)
    assert not Path(folder).exists()


def test_damaged_files_are_received_again(store: AdapterStore, source: Path) -> None:
    folder = Path(received(store, source))
    (folder / WEIGHTS_FILE).write_bytes(bytes(SIZE))
    offer = offer_of(source)
    assert store.find(offer) is None and store.begin(offer)
    assert send(store, source, offer) == str(folder)
    assert content_hash(folder) == offer.version


def test_a_folder_that_others_can_write_to_is_refused(store: AdapterStore, source: Path) -> None:
    store.root.mkdir(parents=True)
    store.root.chmod(0o777)
    with pytest.raises(BadAdapter, match="belongs to another user there, or others may write to it"):
        received(store, source)
    assert contents(store) == set()
    store.root.chmod(0o700)
    received(store, source)
    store.root.chmod(0o777)  # they may have replaced a file after it was checked
    with pytest.raises(BadAdapter, match="or others may write to it"):
        store.find(offer_of(source))


class Sender:
    """A front end, as a receiver sees it."""

    def __init__(self, receiver: AdapterReceiver) -> None:
        self.receiver = receiver
        self.answers: asyncio.Queue[bytes] = asyncio.Queue()
        self.send = self.answers.put_nowait

    async def ask(self, call: FilesOperation) -> Files:
        """Raises the error of the answer."""
        self.receiver.receive(1, call, self.send)
        found = messages.decode_from_engine(await asyncio.wait_for(self.answers.get(), PATIENCE_S))
        assert isinstance(found, messages.Reply)
        if found.error is not None:
            raise found.error.to_exception()
        return msgspec.msgpack.decode(found.value, type=Files)


@real
async def test_errors_are_answers_and_a_front_end_that_leaves_ends_only_what_it_sends(
    tmp_path: Path, source: Path
) -> None:
    receiver = AdapterReceiver(tmp_path / "adapters")
    own, other = Sender(receiver), Sender(receiver)
    offer = offer_of(source)
    version = offer.version
    escaping = replace(offer, version="0" * 32, files=(ShippedFile("../../escaped", 1),))
    piece = Piece("../" + "0" * 29, "../../escaped", b"x")
    named = "'../../escaped' is no file of an adapter"
    for call, reason in ((escaping, named), (piece, ""), (Hold(("..",)), "")):
        with pytest.raises(BadRequest, match=reason):
            await own.ask(call)
    assert not list(tmp_path.rglob("*escaped*")) and not (tmp_path / "adapters").exists()
    pieces = [Piece(version, file.name, (source / file.name).read_bytes()) for file in offer.files]
    found = await own.ask(offer)
    assert not found.path and not found.busy
    await own.ask(pieces[0])
    assert (await other.ask(offer)).busy
    for foreign in (pieces[1], Finish(version), replace(offer, files=(ShippedFile("other", 1),))):
        with pytest.raises(BadRequest):
            await other.ask(foreign)
    receiver.peer_left(other.send)
    await own.ask(pieces[1])
    assert (await own.ask(Finish(version))).path.endswith(version)
    unfinished = offer_of(written(tmp_path / "second", 2))
    await own.ask(unfinished)
    receiver.peer_left(own.send)
    assert not (await other.ask(unfinished)).busy
    await receiver.close()


KILLED = """
import shutil, sys
from pathlib import Path
from tests.cluster.test_shipping import AdapterStore, offer_of, received
store = AdapterStore(Path(sys.argv[1]))
print("begun", flush=True)
while True:
    for source in map(Path, sys.argv[2:]):
        received(store, source, total_bytes=1 << 19)
        store.hold([])
        folder = store.root / offer_of(source).version
        folder.rename(folder.with_suffix(".part"))
        shutil.rmtree(folder.with_suffix(".part"))
"""


@pytest.mark.exhaustive
def test_a_process_killed_at_any_moment_leaves_nothing_in_part(tmp_path: Path, store: AdapterStore) -> None:
    sources = [written(tmp_path / str(seed), seed, 200_000) for seed in range(3)]
    draws = random.Random(0)
    left = set()
    for _ in range(8):
        command = [sys.executable, "-c", KILLED, str(store.root), *map(str, sources)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
            time.sleep(draws.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
        left |= {Path(name).suffix for name in contents(store)}
        for path in store.root.iterdir():
            if path.is_dir() and path.suffix != ".part":
                assert content_hash(path) == path.name
        for source in sources:  # and the next process can use all of them
            offer = offer_of(source)
            assert (store.find(offer) or received(store, source)) == str(store.root / offer.version)
        store.hold([])
        assert not any(name.endswith(".part") for name in contents(store))
        for source in sources:
            shutil.rmtree(store.root / content_hash(source))
    assert ".part" in left  # otherwise the test shows nothing


RECEIVING = """
import contextlib, fcntl, os, random, sys, time
from pathlib import Path
from tests.cluster.test_shipping import AdapterStore, Busy, OverCapacity, content_hash, offer_of, send
root, seed, *sources = sys.argv[1:]
store, draws, outcomes = AdapterStore(Path(root)), random.Random(int(seed)), dict.fromkeys(("used", "busy", "full"), 0)
ends_s = time.monotonic() + 1.0
while time.monotonic() < ends_s:
    source = Path(draws.choice(sources))
    offer = offer_of(source, total_bytes=150_000)
    try:
        folder = store.find(offer) or (store.begin(offer) and send(store, source, offer))
    except Busy:
        outcomes["busy"] += 1
        continue
    except OverCapacity:
        outcomes["full"] += 1
        store.hold([])
        continue
    assert content_hash(Path(folder)) == offer.version
    sizes = {}
    with (store.root / "store.lock").open() as lock:  # nothing is begun meanwhile
        fcntl.flock(lock, fcntl.LOCK_EX)
        for at, _, files in os.walk(root):
            for name in files:
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(os.path.join(at, name))
                    sizes[status.st_ino] = status.st_size
    assert sum(sizes.values()) <= 150_000, sizes
    outcomes["used"] += 1
    if draws.random() < 0.3:
        store.hold([offer.version])
    assert content_hash(Path(folder)) == offer.version
print(*outcomes.values())
"""


@pytest.mark.exhaustive
def test_processes_at_once_never_see_a_part_nor_exceed_the_limit(tmp_path: Path, store: AdapterStore) -> None:
    sources = [written(tmp_path / str(seed), seed, 40_000 + seed) for seed in range(6)]
    commands = [[sys.executable, "-c", RECEIVING, str(store.root), str(seed), *map(str, sources)] for seed in range(3)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    found = [process.communicate()[0].split() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    used, busy, full = (sum(int(words[place]) for words in found) for place in range(3))
    assert used > 100 and busy and full, found


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, store: AdapterStore) -> None:
    source = written(tmp_path / "source", size=100_000)
    with small_disk(store.root, "256k"):
        with pytest.raises(OverCapacity, match=r"no room for 100004 bytes.* are free on the disk"):
            (store.root / "other").write_bytes(bytes(200_000))
            received(store, source)
        (store.root / "other").unlink()
        offer = offer_of(source)
        assert store.begin(offer)
        with contextlib.suppress(OSError), (store.root / "other").open("wb") as other:  # another program is faster
            while other.write(bytes(4096)):
                other.flush()
        with pytest.raises(OSError, match="No space left"):
            send(store, source, offer)
        store.abort(offer.version)
        (store.root / "other").unlink()
        assert contents(store) == {"store.lock"}
        assert received(store, source)
        store.close()


# -- machines ---------------------------------------------------------------------------------------------------------

HERE = "/proc/self/cwd"
LIMITS = ShippingLimits(adapter_bytes=64 << 20, total_bytes=256 << 20)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


class Machines(Running):
    """A cluster with replicas on machines; the front end is on one of its own."""

    folder: Path

    async def start(self, *names: str) -> None:
        for name in names:
            (self.folder / name).mkdir(exist_ok=True)
            await self.add(name, machine=self.folder / name)

    def store(self, name: str) -> Path:
        return self.folder / name / "cache" / "vlora" / "adapters"

    def received(self, name: str) -> set[str]:
        return {path.name for path in self.store(name).iterdir() if path.is_dir()}

    async def register(self, *names: str) -> None:
        await self.cluster.register_adapters({name: f"{HERE}/{name}" for name in names})

    async def load(self, name: str, folder: str = "") -> str:
        return (await self.cluster.load_adapter(name, f"{HERE}/{folder or name}")).version

    async def place(self, adapter: str, replica: str) -> AdapterPlace:
        [found] = [
            each for each in await self.cluster.adapter_places() if (each.adapter, each.replica) == (adapter, replica)
        ]
        return found

    async def settled(self, adapter: str, state: str, replica: str) -> AdapterPlace:
        """The adapter's place on a replica once it has this state."""
        async with asyncio.timeout(PATIENCE_S):
            while (found := await self.place(adapter, replica)).state != state:
                await asyncio.sleep(0.05)
        return found

    async def answers(self, adapter: str, version: str, *names: str) -> None:
        """Check that each of these replicas answers with this content."""
        for name in names or tuple(self.replicas):
            for other in self.replicas:
                self.router.drain(other, other != name)
            request = asked(f"{adapter} on {name} {time.monotonic()}", 10, adapter=adapter)
            check(request, await outputs_of(self.cluster, request), version)
        for name in self.replicas:
            self.router.drain(name, False)


Make = Callable[..., contextlib.AbstractAsyncContextManager[Machines]]


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    (tmp_path / "front").mkdir()
    monkeypatch.chdir(tmp_path / "front")

    @contextlib.asynccontextmanager
    async def made(*names: str, shipping: ShippingLimits | None = LIMITS) -> AsyncIterator[Machines]:
        async with running(shipping=shipping) as plain:
            here = Machines(plain.cluster, plain.router)
            here.replicas, here.folder = plain.replicas, tmp_path
            await here.start(*names)
            yield here

    return made


class Sent:
    """The pieces that the front end has sent.

    pause_s: between two of them. stopped: none is sent meanwhile. spoil: changes the bytes of each.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.num_bytes = 0
        self.pause_s = 0.0
        self.stopped = self.spoil = False
        pieces_of = adapter_sender.pieces_of

        async def pieces(path: Path, size: int) -> AsyncIterator[bytes]:
            self.names.append(path.name)
            async for data in pieces_of(path, size):
                self.num_bytes += len(data)
                await asyncio.sleep(self.pause_s)
                while self.stopped:
                    await asyncio.sleep(0.01)
                yield bytes(len(data)) if self.spoil else data

        monkeypatch.setattr(adapter_sender, "pieces_of", pieces)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    return Sent(monkeypatch)


@on_linux
@pytest.mark.slow
@real
async def test_replicas_without_the_files_get_them_once_for_a_machine(
    machines: Make, tmp_path: Path, sent: Sent
) -> None:
    version = write(tmp_path / "front" / "signs", heads=True)
    write(tmp_path / "b" / "signs", seed=1)  # other content at the path
    write(tmp_path / "c" / "signs", heads=True)  # the same content
    async with machines("a", "b", "c") as here:
        await here.add("d", machine=tmp_path / "a")  # a second replica of the same machine
        sent.pause_s = 0.1
        await here.register("signs")
        await here.answers("signs", version)
        assert sent.names.count(WEIGHTS_FILE) == 2
        for name in "ab":
            [folder] = (path for path in here.store(name).iterdir() if path.is_dir())
            assert folder.name == version == content_hash(folder) and "README.md" not in os.listdir(folder)
            assert here.store(name).stat().st_mode & 0o777 == 0o700
        assert not here.store("c").exists()
        status = here.cluster.status()
        size = sum(file.stat().st_size for file in (tmp_path / "front" / "signs").iterdir() if file.suffix != ".md")
        found = {each.name: each.num_shipped_bytes for each in status.replicas}
        assert found["a"] + found["d"] == found["b"] == size and not found["c"]
        metrics = CollectorRegistry()
        metrics.register(Families(lambda: cluster_families(status)))
        assert metrics.get_sample_value("vlora_shipped_bytes_total", {"replica": "b"}) == size


@on_linux
@pytest.mark.slow
@real
async def test_the_files_of_a_change_may_be_on_the_machine_of_another_front_end(
    machines: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which sends them before the one that makes the change asks the replicas for them. A full replica refuses none."""
    version = write(tmp_path / "front" / "signs")
    async with machines("a", "b") as here:
        other = Cluster(Router("placed"), SECRET, shipping=LIMITS)
        try:
            other._adapters.follow({}, {})  # noqa: SLF001
            for name, replica in here.replicas.items():
                await joined(other, name, replica.address)
            offered = await other._adapters.offer({"signs": f"{HERE}/signs"})  # noqa: SLF001
            assert offered["signs"].version == version and here.received("a") == here.received("b") == {version}
            await here.cluster.call(LoadAdapter("signs", "/only/there", version))
            other._adapters.follow(here.cluster.desired_adapters, {})  # noqa: SLF001
        finally:
            await other.close()
        await here.answers("signs", version)

        async def full(wanted: DesiredAdapter, is_wanted: object = None) -> str:
            raise OverCapacity("no room")

        write(tmp_path / "front" / "other", seed=1)
        monkeypatch.setattr(here.cluster._adapters.homes["a"].files, "send", full)  # noqa: SLF001
        assert (await here.cluster.load_adapter("other", f"{HERE}/other")).error == "replica 'a': no room"


@on_linux
@pytest.mark.slow
@real
async def test_what_cannot_be_sent_is_named(machines: Make, tmp_path: Path) -> None:
    """Not without shipping, nor a content that the front end has no more, nor over the limits."""
    version = write(tmp_path / "front" / "signs")
    write(tmp_path / "a" / "signs")
    async with machines("a", shipping=None) as here:
        await here.register("signs")
        await here.start("b")
        assert "there is no such file" in (await here.settled("signs", "failed", "b")).cause
        status = await here.cluster.load_adapter("other", f"{HERE}/signs")
        assert "replica 'b': " in (status.error or "") and "there is no such file" in (status.error or "")
        assert not here.store("b").exists()
    small = ShippingLimits(adapter_bytes=400_000, total_bytes=700_000)
    versions = [write(tmp_path / "front" / f"x{number}", number, 300_000) for number in range(3)]
    write(tmp_path / "front" / "large", size=500_000)
    async with machines("a", shipping=small) as here:
        with pytest.raises(BadAdapter, match="replica 'a': its files have 500004 bytes, over the limit of 400000"):
            await here.load("large")
        await here.register("x0", "x1")
        with pytest.raises(OverCapacity, match=r"replica 'a': the folder of .* has no room for 300004 bytes"):
            await here.load("x2")
        await here.answers("x1", versions[1])
        await here.cluster.unload_adapter("x0")  # its files may go now
        await here.load("x2")
        assert here.received("a") == {*versions[1:]}
        await here.answers("x2", versions[2])
        with pytest.raises(BadAdapter, match="there is no such file"):  # on no machine
            await here.load("none")
        await here.register("signs")
        write(tmp_path / "front" / "signs", seed=1)  # changed in place
        await here.start("b")
        found = await here.settled("signs", "failed", "b")
        assert f"content {version} is not on the replica's machine, and cannot be sent" in found.cause
        await here.cluster.remove("a")
        error = (await outputs_of(here.cluster, asked("r", 10, adapter="signs")))[-1].error
        assert error is not None and "cannot be sent" in error.message  # so the request waits for nothing


@on_linux
@pytest.mark.slow
@real
async def test_a_replica_that_joins_serves_before_it_has_all_files(machines: Make, tmp_path: Path, sent: Sent) -> None:
    version = write(tmp_path / "front" / "signs", size=600_000)
    other = write(tmp_path / "front" / "other", seed=1)
    async with machines("a") as here:
        await here.register("signs")
        write(tmp_path / "b" / "other", seed=1)
        await here.register("other")
        sent.stopped = True
        await here.start("b")
        await here.answers("other", other, "b")
        found = await here.settled("signs", "pending", "b")
        assert "of its files" in found.cause or "are to be sent" in found.cause
        assert [each.num_failed_adapters for each in here.cluster.status().replicas] == [0, 0]
        await here.cluster.remove("a")  # the only one that has the files
        del here.replicas["a"]
        waiting = [asked(f"early {number}", 10, adapter="signs") for number in range(3)]
        answers = [asyncio.create_task(outputs_of(here.cluster, request)) for request in waiting]
        request = replace(asked("impatient", 10, adapter="signs"), max_ttft_s=0.3)
        error = (await outputs_of(here.cluster, request))[-1].error
        assert error is not None and error.code == "deadline_unreachable"
        await here.answers("other", other, "b")  # another adapter is not held up
        assert (await here.place("signs", "b")).state == "pending"
        await here.cluster.cancel("early 2")
        assert (await answers.pop())[-1].finish_reason == "cancelled"
        assert not any(answer.done() for answer in answers)
        sent.stopped = False
        for request, outputs in zip(waiting[:2], await asyncio.gather(*answers), strict=True):
            check(request, outputs, version)
        await here.settled("signs", "device", "b")
        await here.answers("signs", version, "b")


@on_linux
@pytest.mark.slow
@real
async def test_wrong_bytes_and_ends_in_the_middle_leave_nothing_in_part(
    machines: Make, tmp_path: Path, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_adapters, "FIRST_PAUSE_S", 0.2)
    version = write(tmp_path / "front" / "signs", size=3_000_000)
    write(tmp_path / "a" / "signs", size=3_000_000)
    async with machines("a") as here:
        await here.register("signs")
        sent.spoil = True
        await here.start("b")
        found = await here.settled("signs", "failed", "b")
        assert "the files that arrived have content" in found.cause
        assert os.listdir(here.store("b")) == ["store.lock"]
        status = await here.cluster.load_adapter("second", f"{HERE}/signs")  # `a` has the files
        assert (status.error or "").startswith("replica 'b': the files that arrived have content")
        sent.spoil, sent.pause_s, sent.num_bytes = False, 0.02, 0
        async with asyncio.timeout(PATIENCE_S):  # it is sent again
            while sent.num_bytes < 1_000_000:
                await asyncio.sleep(0.02)
        here.replicas["b"].signal(signal.SIGKILL)
        await here.replicas["b"].wait_ended()
        assert here.received("b") == {version + ".part"}
        sent.pause_s = 0.0
        await here.cluster.remove("b")
        await here.start("b")
        await here.settled("signs", "device", "b")
        await here.answers("signs", version)
        # A front end that ends leaves no part either.
        write(tmp_path / "front" / "next", seed=1, size=3_000_000)
        sent.pause_s = 0.05
        loading = asyncio.create_task(here.load("next"))
        await asyncio.sleep(0.5)
        loading.cancel()
        await asyncio.wait({loading})
        for name in "ab":
            await here.cluster.remove(name)
        async with asyncio.timeout(PATIENCE_S):
            while any(path.suffix == ".part" for name in "ab" for path in here.store(name).glob("*")):
                await asyncio.sleep(0.02)


@on_linux
@pytest.mark.slow
@real
async def test_tokens_and_other_changes_go_on_while_files_are_sent(machines: Make, tmp_path: Path, sent: Sent) -> None:
    write(tmp_path / "front" / "signs", size=4_000_000)
    write(tmp_path / "front" / "other", seed=1, size=1000)
    async with machines("a", "b") as here:
        await here.register("other")
        sent.stopped = True
        loading = asyncio.create_task(here.load("signs"))
        async with asyncio.timeout(PATIENCE_S):
            while sent.names.count(CONFIG_FILE) < 4:  # to both replicas at once
                await asyncio.sleep(0.01)
            await here.cluster.pin_adapter("other", True)
            await here.cluster.unload_adapter("other")
        assert not loading.done()
        loading.cancel()
        await asyncio.wait({loading})
        sent.stopped, sent.pause_s = False, 0.01
        tasks: list[asyncio.Task[str]] = []
        request = asked("r", 300)
        found = await outputs_of(
            here.cluster, request, 5, lambda: tasks.append(asyncio.create_task(here.load("signs")))
        )
        check(request, found)
        assert tasks[0].done()  # all of it within the answer
