"""RPyC messages that are small on the wire and large in memory, and values that only a hostile client sends."""

from __future__ import annotations

import io
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import rpyc
from hypothesis import given, settings
from hypothesis import strategies as st
from rpyc.core import brine, consts

from tests.server.running import Running, png, running_server
from tests.server.scripted import write_adapter
from vlora.client import Client
from vlora.server.rpyc.protocol import BoundedChannel
from vlora.server.rpyc.unpacked_size import MAX_DEPTH, MAX_VALUES, check_values
from vlora.server.security.message_budget import ByteBudget

SETTINGS = settings(max_examples=200)
SIMPLE = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.binary(max_size=300) | st.text()
)
VALUES = st.recursive(
    SIMPLE | st.just(...) | st.just(NotImplemented),
    lambda inner: st.lists(inner, max_size=6).map(tuple) | st.frozensets(SIMPLE, max_size=4),
    max_leaves=30,
)
HUGE = 10**4000  # close to the limit of RPyC's serializer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = write_adapter(tmp_path_factory.mktemp("cam"), {"night": 1})
    with running_server(max_message_bytes=2_000_000) as running:
        running.on_loop(running.front_end.load_adapter("cam", folder))
        yield running


@pytest.fixture
def peer(server: Running) -> Iterator[Any]:
    connection = rpyc.connect("127.0.0.1", server.port, config={"sync_request_timeout": 5})
    yield connection
    connection.close()


@pytest.fixture(autouse=True)
def nothing_is_left(server: Running) -> Iterator[None]:
    yield
    with Client(port=server.port) as client:
        assert client.generate("say:alive").text == "alive"
    deadline = time.monotonic() + 5
    while server.front_end.held._held and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.front_end.held._held == 0


def call(connection: Any, method: str, *args: Any) -> Any:
    return connection.sync_request(consts.HANDLE_CALLATTR, connection.root, f"exposed_{method}", args, ())


def framed(payload: bytes, *, compressed: bool = False) -> bytes:
    payload = zlib.compress(payload) if compressed else payload
    return struct.pack("!LB", len(payload), compressed) + payload + b"\n"


def ended(port: int, data: bytes) -> bool:
    """Whether the server ends a connection immediately after it sends this."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
        try:
            raw.sendall(data)
            while raw.recv(65536):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
    return True


# -- unpacked size of messages ----------------------------------------------------------------------------------------


def count(value: Any) -> int:
    """Values of a message in serialized form: a text as its bytes, a set as its tuple."""
    if isinstance(value, str):
        return 2
    if isinstance(value, frozenset):
        return 1 + count(tuple(value))
    return 1 + sum(map(count, value)) if isinstance(value, tuple) else 1


@given(VALUES)
@SETTINGS
def test_every_value_is_walked_over_to_its_end(value: Any) -> None:
    data = brine.dump(value)
    check_values(b"?" + data, 1)
    if len(data) > 1:
        for cut in {1, len(data) // 2}:
            try:
                brine.load(data[:cut])
            except Exception:
                continue
            check_values(data[:cut], 0)  # valid data is not refused


@given(st.binary(max_size=40))
@SETTINGS
def test_bytes_of_any_kind_are_bounded_values_or_refused(data: bytes) -> None:
    try:
        check_values(data, 0)
    except ValueError:
        return
    try:
        value = brine.load(data)
    except Exception:
        return  # for example a text that is not UTF-8
    assert count(value) <= MAX_VALUES


def test_the_number_of_values_is_bounded() -> None:
    within: tuple[Any, ...] = ((None,),) * ((MAX_VALUES - 2) // 2)
    check_values(brine.dump(within), 0)
    assert count(within) <= MAX_VALUES < count((*within, (None,)))
    for large in ((*within, (None,)), (frozenset((1.5,)),) * 100_000, ("ab",) * 100_000):
        with pytest.raises(ValueError, match="over 65536 values"):
            check_values(brine.dump(large), 0)
    with pytest.raises(ValueError, match="over 65536 values"):
        check_values(b"\x15\xff\xff\xff\xff" + bytes(70_000), 0)
    with pytest.raises(ValueError, match="truncated"):
        check_values(b"\x15\xff\xff\xff\xff", 0)


def test_the_depth_is_bounded() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH - 1):
        value = (value,)
    check_values(brine.dump(value), 0)
    for deep in (brine.dump((value, (value,))), b"\x10" * 1_000_000, b"\x1a" * 1_000_000, b"\x08" * 1_000_000):
        with pytest.raises(ValueError, match="32 deep"):
            check_values(deep, 0)


@pytest.mark.parametrize(
    "values",
    [
        b"\x15" + struct.pack("!L", 900_000) + b"\x10\x00" * 900_000,  # a tuple of tuples of one: 36 times as large
        b"\x15" + struct.pack("!L", 600_000) + b"\x1a\x10\x00" * 600_000,  # of sets: 75 times
        b"\x10" * 1_000_000,
        b"",
        b"\x07",
        b"\x15\xff\xff\xff\xff",
    ],
)
def test_a_message_of_too_many_values_ends_its_connection_before_it_is_unpacked(server: Running, values: bytes) -> None:
    for compressed in (False, True):
        assert ended(server.port, framed(bytes([consts.MSG_REQUEST]) + values, compressed=compressed))


def test_what_inflates_is_counted_as_what_it_becomes(server: Running, peer: Any) -> None:
    held = server.front_end.held
    picture = png() + bytes(1_500_000)  # a few kilobytes on the wire
    pairs = (("max_tokens", 90_000),)
    assert call(peer, "stream", 1, "forever", (picture,), None, pairs, None, None, 0)[0]
    assert 1_500_000 < held._held < 1_510_000
    assert call(peer, "cancel", 1)[0]
    for data in (zlib.compress(bytes(2_000_001)), zlib.compress(bytes(1_900_000))[:-20], b"none"):
        assert ended(server.port, struct.pack("!LB", len(data), 1) + data + b"\n")


def channel_of(data: bytes, held: ByteBudget, max_bytes: int) -> BoundedChannel:
    class Wire(io.BytesIO):
        MAX_IO_CHUNK = 65_536

    unused: Any = None  # only a message that is large on the wire is timed and may end its caller
    return BoundedChannel(Wire(data), max_bytes, held, unused)  # type: ignore[arg-type]


@pytest.mark.parametrize("around", [65_536, 100_000])
def test_a_compressed_message_comes_whole_whatever_its_length(around: int) -> None:
    held = ByteBudget(10_000_000)
    for length in (*range(around - 300, around + 300, 7), around):
        said = bytes([consts.MSG_REQUEST]) + brine.dump(b"x" * length)
        channel = channel_of(framed(said, compressed=True), held, 110_000)
        assert channel.recv() == said
        channel.take_charge()()
    assert held._held == 0
    with pytest.raises(EOFError, match="limit of 110000 bytes"):
        channel_of(framed(bytes(110_001), compressed=True), held, 110_000).recv()


def test_a_limit_that_rises_while_a_message_inflates_counts_it_right() -> None:
    class Held(ByteBudget):
        def take(self, count: int, wait_s: float = 0.0) -> bool:
            channel.max_bytes = 5_000_000  # as when the sender authenticates at this moment
            return super().take(count, wait_s)

    said = bytes([consts.MSG_REQUEST]) + brine.dump(b"x" * 90_000)
    held = Held(10_000_000)
    channel = channel_of(framed(said, compressed=True), held, 100_000)
    assert channel.recv() == said and held._held == len(said)
    channel.take_charge()()
    assert held._held == 0


def test_a_ping_carries_little(peer: Any) -> None:
    peer.ping(timeout=5)
    assert peer.sync_request(consts.HANDLE_PING, b"x" * 4096) == b"x" * 4096
    for data in (b"x" * 4097, "x" * 100_000, 5, (b"x",)):
        with pytest.raises(ValueError, match="at most 4096"):
            peer.sync_request(consts.HANDLE_PING, data)


# -- invalid values ---------------------------------------------------------------------------------------------------


NUMBERS = [HUGE, -HUGE, float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, 2**64, 2j]
TYPED = {"bad_request", "prompt_too_long", "too_large", "bad_image", "deadline_missed"}


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: str(number)[:12])
def test_numbers_of_any_size_are_typed_errors_or_fine(peer: Any, number: Any) -> None:
    good, opened = call(peer, "open_frames", "cam", "night", None, None, "none", 0)
    assert good
    stream_id = msgspec.msgpack.decode(opened)
    ask = ("say:x", (), None)
    calls: list[tuple[Any, ...]] = [
        ("generate", number, *ask, (), None, None, 0),
        ("generate", 1, *ask, (), number, None, 0),
        ("generate", 1, *ask, (), None, number, 0),
        ("generate", 1, *ask, (), None, None, number),
        *(
            ("generate", 1, *ask, ((name, number),), None, None, 0)
            for name in ("max_tokens", "temperature", "top_p", "top_k", "seed", "logprobs")
        ),
        ("ask_head", 1, (png(),), "cam", "night", number, 0),
        ("ask_head", 1, (png(),), "cam", "night", None, number),
        ("cancel", number),
        ("open_frames", "cam", "night", number, None, "newest", 0),
        ("open_frames", "cam", "night", None, number, "newest", 0),
        ("open_frames", "cam", "night", None, None, "newest", number),
        ("send_frame", stream_id, number, (png(),), 0.0),
        ("send_frame", stream_id, 0, (png(),), number),
        ("send_frame", stream_id, 1, ((b"abc", number, 1),), 0.0),
        ("send_frame", stream_id, 1, ((b"abc", 1, number),), 0.0),
        ("send_frame", stream_id, 1, ((b"abc", number, number),), 0.0),
        ("pull_results", stream_id, number, 0.0),
        ("pull_results", stream_id, -1, number),
    ]
    for method, *args in calls:
        good, *reply = call(peer, method, *args)
        if not good:
            assert reply[0] in TYPED, (method, args, reply)
            assert "mistake" not in reply[1], (method, args, reply)
    assert call(peer, "close_frames", stream_id)[0]


def test_names_of_any_length_are_not_repeated(server: Running, peer: Any) -> None:
    name = "\U000e0001" * 20_000  # each takes ten characters in a repr
    for method, *args in (
        ("generate", 1, "say:x", (), name, (), None, None, 0),
        ("generate", 1, "say:x", (), None, ((name, 1),), None, None, 0),
        ("ask_head", 1, (png(),), name, "night", None, 0),
        ("ask_head", 1, (png(),), "cam", name, None, 0),
        ("open_frames", name, "night", None, None, "newest", 0),
        ("open_frames", "cam", name, None, None, "newest", 0),
        ("open_frames", "cam", "night", None, None, name, 0),
        ("end_frames", name),
    ):
        good, *reply = call(peer, method, *args)
        assert not good and len(reply[1]) < 2000, (method, reply[0], len(reply[1]))


def test_a_refusal_tells_nothing_of_the_server(peer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def unbox(self: Any, raw: Any) -> Exception:
        told.append(raw)
        return RuntimeError("refused")

    monkeypatch.setattr(rpyc.Connection, "_unbox_exc", unbox)
    for name in ("nothing", "_reply", "x" * 100_000, "exposed_stats"):
        with pytest.raises(RuntimeError, match="refused"):
            peer.sync_request(consts.HANDLE_CALLATTR, peer.root, name, (1, 2), ())
    for _, (message,), attributes, traceback in told:
        assert (attributes, traceback) == ((), "<traceback denied>"), "no details such as memory addresses"
        assert len(message) <= 200 and "0x" not in message
    assert len(told) == 4


def test_files_with_names_that_are_no_text_end_no_engine(peer: Any, tmp_path: Path) -> None:
    folder = Path(write_adapter(tmp_path / "odd"))
    (folder / "extra\udcff.safetensors").write_bytes(b"?")
    good, *reply = call(peer, "load_adapter", "odd", str(folder))
    assert good or reply[0] == "bad_adapter", reply
