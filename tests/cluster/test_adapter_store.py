"""Received adapters on disk: limits, several processes, crashes at any moment, full disks, and names of files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from vlora.adapter_files import CONFIG_FILE, WEIGHTS_FILE, content_hash
from vlora.cluster.adapter_incoming import digest_of
from vlora.cluster.adapter_messages import FilesReply, Offer, ShippedFile, decode_from_replica
from vlora.cluster.adapter_receiver import AdapterReceiver
from vlora.cluster.adapter_store import AdapterStore, Busy, default_root
from vlora.errors import BadAdapter, BadRequest, OverCapacity

SIZE = 10_000


def write(folder: Path, seed: int = 0, size: int = SIZE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(f"{seed:4}")
    (folder / WEIGHTS_FILE).write_bytes(random.Random(seed).randbytes(size))
    return folder


def offer_of(folder: Path, path: str = "/nowhere", **fields: Any) -> Offer:
    names = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if (folder / name).exists()]
    files = tuple(ShippedFile(name, (folder / name).stat().st_size, digest_of(folder / name)) for name in names)
    offer = Offer(
        call_id=0,
        path=path,
        version=content_hash(folder),
        files=files,
        receive=True,
        adapter_bytes=1 << 20,
        total_bytes=1 << 20,
    )
    return replace(offer, **fields)


def send(store: AdapterStore, folder: Path, offer: Offer, missing: tuple[str, ...]) -> str:
    for name in missing:
        data = (folder / name).read_bytes()
        for begin in range(0, len(data), 3000):
            store.write(offer.version, name, data[begin : begin + 3000])
    return store.finish(offer.version)


def received(store: AdapterStore, folder: Path, **fields: Any) -> str:
    """Receive a folder's content. Returns the folder in the store."""
    offer = offer_of(folder, **fields)
    assert store.find(offer) is None
    return send(store, folder, offer, store.begin(offer))


def contents(store: AdapterStore) -> set[str]:
    """All names in the store's folder."""
    return {path.name for path in store.root.iterdir()} if store.root.exists() else set()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    found = AdapterStore(tmp_path / "caches" / "adapters")
    yield found
    found.close()


def test_a_content_is_received_found_again_and_private(tmp_path: Path, store: AdapterStore) -> None:
    source = write(tmp_path / "source")
    folder = received(store, source)
    assert Path(folder).name == content_hash(Path(folder)) == content_hash(source)
    assert store.find(offer_of(source)) == folder
    assert store.find(offer_of(source, files=())) == folder  # a front end without the files
    assert store.find(offer_of(source, path=str(source))) == str(source)  # the machine's own files come first
    assert store.root.stat().st_mode & 0o777 == 0o700
    assert store.find(offer_of(write(tmp_path / "other", 1))) is None


def test_the_machines_files_with_other_content_are_not_used(tmp_path: Path, store: AdapterStore) -> None:
    source, local = write(tmp_path / "source"), write(tmp_path / "local", 1)
    assert store.find(offer_of(source, path=str(local))) is None
    assert store.find(offer_of(source, path=str(tmp_path / "absent"))) is None
    (local / WEIGHTS_FILE).unlink()
    assert store.find(offer_of(source, path=str(local))) is None


def test_only_files_that_are_not_there_are_asked_for(tmp_path: Path, store: AdapterStore) -> None:
    source = write(tmp_path / "source")
    received(store, source)
    (source / CONFIG_FILE).write_text("with the same weights")
    offer = offer_of(source)
    missing = store.begin(offer)
    assert missing == (CONFIG_FILE,)
    folder = send(store, source, offer, missing)
    assert content_hash(Path(folder)) == offer.version
    assert (Path(folder) / WEIGHTS_FILE).stat().st_nlink == 2  # shared, so it takes no room twice
    local = write(tmp_path / "local", 3)
    (local / CONFIG_FILE).write_text("other settings")
    source = write(tmp_path / "third", 3)
    offer = offer_of(source, path=str(local))
    assert store.begin(offer) == (CONFIG_FILE,)
    (local / WEIGHTS_FILE).write_bytes(b"changed in place")  # it was copied
    assert send(store, source, offer, (CONFIG_FILE,))


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b", "..", "", "README.md", "adapter_model.bin", "digests.json"]
)
def test_no_other_names_than_an_adapters_are_accepted(tmp_path: Path, store: AdapterStore, name: str) -> None:
    offer = offer_of(write(tmp_path / "source"))
    with pytest.raises(BadRequest, match="is no file of an adapter"):
        store.find(replace(offer, files=(*offer.files, ShippedFile(name, 1, ""))))
    assert store.begin(offer)
    with pytest.raises(BadRequest, match="out of turn"):
        store.write(offer.version, name, b"x")
    assert contents(store) == {offer.version + ".part", offer.version + ".lock", "store.lock"}
    assert set(os.listdir(store.root / (offer.version + ".part"))) == {CONFIG_FILE, WEIGHTS_FILE}


@pytest.mark.parametrize("version", ["..", "../" + "0" * 29, "0" * 31, "0" * 33, "A" * 32, "", "0" * 32 + "\n"])
def test_no_other_folder_than_a_hash_is_made(tmp_path: Path, store: AdapterStore, version: str) -> None:
    offer = offer_of(write(tmp_path / "source"), version=version)
    with pytest.raises(BadRequest, match="is no hash"):
        store.find(offer)
    assert not store.root.exists()


def test_wrong_bytes_are_dropped(tmp_path: Path, store: AdapterStore) -> None:
    source = write(tmp_path / "source")
    offer = offer_of(source)
    data = bytearray((source / WEIGHTS_FILE).read_bytes())
    data[77] ^= 1
    assert store.begin(offer) == (CONFIG_FILE, WEIGHTS_FILE)
    store.write(offer.version, CONFIG_FILE, (source / CONFIG_FILE).read_bytes())
    with pytest.raises(BadAdapter, match="was changed while it was sent"):
        store.write(offer.version, WEIGHTS_FILE, bytes(data))
    store.abort(offer.version)
    assert contents(store) == {"store.lock"}
    # Files that fit their digests, but not the hash of all.
    other = replace(offer, version="0" * 32)
    with pytest.raises(BadAdapter, match="have content"):
        send(store, source, other, store.begin(other))
    store.abort(other.version)
    assert contents(store) == {"store.lock"}


def test_pieces_out_of_turn_and_too_many_are_refused(tmp_path: Path, store: AdapterStore) -> None:
    offer = offer_of(write(tmp_path / "source"))
    with pytest.raises(BadRequest, match="no content with this hash"):
        store.write(offer.version, CONFIG_FILE, b"x")
    store.begin(offer)
    with pytest.raises(BadRequest, match="out of turn"):
        store.write(offer.version, WEIGHTS_FILE, b"x")
    with pytest.raises(BadRequest, match="does not fit"):
        store.write(offer.version, CONFIG_FILE, b"12345")
    with pytest.raises(BadRequest, match="does not fit"):
        store.write(offer.version, CONFIG_FILE, b"")
    with pytest.raises(BadAdapter, match="not arrived in full"):
        store.finish(offer.version)


def test_limits_of_one_adapter_and_of_all(tmp_path: Path, store: AdapterStore) -> None:
    sources = [write(tmp_path / str(seed), seed) for seed in range(4)]
    with pytest.raises(BadAdapter, match=r"over the limit of 10003 .*`shipped_adapter_gib`"):
        received(store, sources[0], adapter_bytes=SIZE + 3)
    assert contents(store) == set()
    room = 2 * (SIZE + 600)
    first, second = (received(store, source, total_bytes=room) for source in sources[:2])
    with pytest.raises(OverCapacity, match=r"no room for .*`shipped_gib`"):
        received(store, sources[2], total_bytes=room)
    assert {Path(first).name, Path(second).name} == {name for name in contents(store) if "." not in name}
    store.hold([Path(first).name])
    third = received(store, sources[2], total_bytes=room)
    assert not Path(second).exists() and Path(first).exists() and Path(third).exists()
    assert store.find(offer_of(sources[1])) is None
    store.hold([])
    os.utime(first, (1, 1))
    os.utime(third, (2, 2))
    received(store, sources[3], total_bytes=room)  # the least recently used one goes
    assert not Path(first).exists() and Path(third).exists()
    assert not {name for name in contents(store) if name.removesuffix(".lock") == Path(first).name}


def test_what_was_used_last_is_removed_last(tmp_path: Path, store: AdapterStore) -> None:
    room = 2 * (SIZE + 600)
    first, second = (received(store, write(tmp_path / str(seed), seed), total_bytes=room) for seed in range(2))
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    store.hold([Path(first).name])
    store.hold([])  # it was used until now
    os.utime(second, (2, 2))
    received(store, write(tmp_path / "2", 2), total_bytes=room)
    assert Path(first).exists() and not Path(second).exists()


def test_a_full_folder_is_counted_once(tmp_path: Path, store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [received(store, write(tmp_path / str(seed), seed, 1)) for seed in range(20)]
    store.hold([Path(folder).name for folder in folders[10:]])
    num_scanned = 0
    scan = os.scandir

    def counting(folder: Any) -> Any:
        nonlocal num_scanned
        num_scanned += isinstance(folder, Path) and len(folder.name) == 32
        return scan(folder)

    monkeypatch.setattr("vlora.cluster.adapter_store.os.scandir", counting)
    size = sum(path.stat().st_size for path in Path(folders[0]).iterdir())
    with pytest.raises(OverCapacity, match=f"adapters in use take {10 * size} of"):
        store.begin(offer_of(write(tmp_path / "next", 99), total_bytes=11 * size))
    assert {path.name for path in store.root.iterdir() if path.is_dir()} == {Path(path).name for path in folders[10:]}
    assert num_scanned == 20


def test_two_processes_receive_a_content_once(tmp_path: Path, store: AdapterStore) -> None:
    other = AdapterStore(store.root)
    source = write(tmp_path / "source")
    offer = offer_of(source)
    missing = store.begin(offer)
    with pytest.raises(Busy):
        other.find(offer)
    with pytest.raises(Busy):
        other.begin(offer)
    with pytest.raises(Busy):
        store.find(offer)  # nor twice in one process
    folder = send(store, source, offer, missing)
    assert other.find(offer) == folder
    store.close()
    with pytest.raises(OverCapacity):  # the other one uses it
        received(store, write(tmp_path / "next", 1), total_bytes=SIZE + 600)
    other.close()
    received(store, write(tmp_path / "next", 1), total_bytes=SIZE + 600)
    assert not Path(folder).exists()


def test_a_damaged_folder_is_received_again(tmp_path: Path, store: AdapterStore) -> None:
    source = write(tmp_path / "source")
    folder = Path(received(store, source))
    (folder / WEIGHTS_FILE).write_bytes(bytes(SIZE))
    offer = offer_of(source)
    assert store.find(offer) is None
    assert send(store, source, offer, store.begin(offer)) == str(folder)
    assert content_hash(folder) == offer.version


def test_a_damaged_file_is_not_shared_twice(tmp_path: Path, store: AdapterStore) -> None:
    source = write(tmp_path / "source")
    folder = Path(received(store, source))
    (folder / WEIGHTS_FILE).write_bytes(bytes(SIZE))
    (source / CONFIG_FILE).write_text("with the same weights")
    offer = offer_of(source)
    with pytest.raises(BadAdapter, match="they are dropped"):
        send(store, source, offer, store.begin(offer))
    store.abort(offer.version)
    missing = store.begin(offer)
    assert missing == (CONFIG_FILE, WEIGHTS_FILE)
    assert send(store, source, offer, missing)


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, store: AdapterStore) -> None:
    store.root.mkdir(parents=True)
    store.root.chmod(0o777)
    with pytest.raises(BadAdapter, match="belongs to another user there, or others may write to it"):
        received(store, write(tmp_path / "source"))
    assert contents(store) == set()
    store.root.chmod(0o700)
    received(store, write(tmp_path / "source"))
    store.root.chmod(0o777)  # they may have replaced a file after it was checked
    with pytest.raises(BadAdapter, match="or others may write to it"):
        store.find(offer_of(tmp_path / "source"))


def test_an_unexpected_error_is_the_answer_of_one_call(tmp_path: Path) -> None:
    async def main() -> None:
        receiver = AdapterReceiver(tmp_path / "adapters")
        answers: asyncio.Queue[bytes] = asyncio.Queue()
        offer = offer_of(write(tmp_path / "source"))
        receiver.receive(replace(offer, path="a null \0 character"), answers.put_nowait)
        receiver.receive(offer, answers.put_nowait)
        async with asyncio.timeout(5):
            first, second = [decode_from_replica(await answers.get()) for _ in range(2)]
        assert isinstance(first, FilesReply) and first.error is not None and "ValueError" in first.error.message
        assert isinstance(second, FilesReply) and second.missing == (CONFIG_FILE, WEIGHTS_FILE)
        await receiver.close()

    asyncio.run(main())


def test_the_folder_is_that_of_other_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_root({"XDG_CACHE_HOME": "/caches"}) == Path("/caches/vlora/adapters")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_root({}) == Path("/home/someone/.cache/vlora/adapters")


KILLED = """
import shutil, sys
from pathlib import Path
from tests.cluster.test_adapter_store import AdapterStore, offer_of, received
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


@pytest.mark.slow
def test_a_process_killed_at_any_moment_leaves_nothing_in_part(tmp_path: Path, store: AdapterStore) -> None:
    sources = [write(tmp_path / str(seed), seed, 200_000) for seed in range(3)]
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
from tests.cluster.test_adapter_store import AdapterStore, Busy, OverCapacity, content_hash, offer_of, send
root, seed, *sources = sys.argv[1:]
store, draws, outcomes = AdapterStore(Path(root)), random.Random(int(seed)), dict.fromkeys(("used", "busy", "full"), 0)
ends_s = time.monotonic() + 1.0
while time.monotonic() < ends_s:
    source = Path(draws.choice(sources))
    offer = offer_of(source, total_bytes=150_000)
    try:
        folder = store.find(offer) or send(store, source, offer, store.begin(offer))
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


@pytest.mark.slow
def test_processes_at_once_never_see_a_part_nor_exceed_the_limit(tmp_path: Path, store: AdapterStore) -> None:
    sources = [write(tmp_path / str(seed), seed, 40_000 + seed) for seed in range(6)]
    commands = [[sys.executable, "-c", RECEIVING, str(store.root), str(seed), *map(str, sources)] for seed in range(3)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    found = [process.communicate()[0].split() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    used, busy, full = (sum(int(words[place]) for words in found) for place in range(3))
    assert used > 100 and busy and full, found


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", folder], capture_output=True
    )
    if done.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, store: AdapterStore) -> None:
    source = write(tmp_path / "source", size=100_000)
    with small_disk(store.root, "256k"):
        with pytest.raises(OverCapacity, match=r"no room for 100516 bytes.* are free on the disk"):
            (store.root / "other").write_bytes(bytes(200_000))
            received(store, source)
        (store.root / "other").unlink()
        offer = offer_of(source)
        missing = store.begin(offer)
        with contextlib.suppress(OSError), (store.root / "other").open("wb") as other:  # another program is faster
            while other.write(bytes(4096)):
                other.flush()
        with pytest.raises(OSError, match="No space left"):
            send(store, source, offer, missing)
        store.abort(offer.version)
        (store.root / "other").unlink()
        assert contents(store) == {"store.lock"}
        assert received(store, source)
        store.close()
