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

from tests.example_counts import scaled
from tests.server.running import Running, png, running_server
from tests.server.scripted import write_adapter
from vlora.client import Client
from vlora.server.rpyc.channel import BoundedChannel
from vlora.server.rpyc.unpacked_size import MAX_DEPTH, MAX_VALUES, check_values
from vlora.server.security.message_budget import ByteBudget

SETTINGS = settings(max_examples=scaled(200))
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
def server() -> Iterator[Running]:
    with running_server({"cam": {"night": 1}}, max_message_bytes=2_000_000) as running:
        yield running


@pytest.fixture
def peer(server: Running) -> Iterator[Any]:
    connection = rpyc.connect("127.0.0.1", server.port, config={"sync_request_timeout": 5})
    yield connection
    connection.close()


@pytest.fixture(autouse=True)
def all_bytes_are_released(server: Running) -> Iterator[None]:
    yield
    with Client(port=server.port) as client:
        assert client.generate("say:alive").text == "alive"
    deadline = time.monotonic() + 5
    while server.front_end.message_budget.used and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.front_end.message_budget.used == 0


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
def test_a_serialized_value_is_checked_to_its_end(value: Any) -> None:
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
def test_arbitrary_bytes_are_bounded_values_or_refused(data: bytes) -> None:
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
def test_a_message_of_too_many_values_ends_its_connection(server: Running, values: bytes) -> None:
    for compressed in (False, True):
        assert ended(server.port, framed(bytes([consts.MSG_REQUEST]) + values, compressed=compressed))


@pytest.mark.slow
def test_a_compressed_message_counts_its_inflated_size(server: Running, peer: Any) -> None:
    budget = server.front_end.message_budget
    picture = png() + bytes(1_500_000)  # a few kilobytes on the wire
    pairs = (("max_tokens", 90_000),)
    assert call(peer, "stream", 1, "forever", (picture,), None, pairs, None, None, 0)[0]
    assert 1_500_000 < budget.used < 1_510_000
    assert call(peer, "cancel", 1)[0]
    for data in (zlib.compress(bytes(2_000_001)), zlib.compress(bytes(1_900_000))[:-20], b"none"):
        assert ended(server.port, struct.pack("!LB", len(data), 1) + data + b"\n")


def channel_of(data: bytes, budget: ByteBudget, max_bytes: int) -> BoundedChannel:
    class Wire(io.BytesIO):
        MAX_IO_CHUNK = 65_536

    unused: Any = None  # only a message that is large on the wire is timed and may end its caller
    return BoundedChannel(Wire(data), max_bytes, budget, unused)  # type: ignore[arg-type]


@pytest.mark.parametrize("around", [65_536, 100_000])
def test_a_compressed_message_of_any_length_is_received_whole(around: int) -> None:
    budget = ByteBudget(10_000_000)
    for length in (*range(around - 300, around + 300, 7), around):
        message = bytes([consts.MSG_REQUEST]) + brine.dump(b"x" * length)
        channel = channel_of(framed(message, compressed=True), budget, 110_000)
        assert channel.recv() == message
        channel.take_charge().release()
    assert budget.used == 0
    with pytest.raises(EOFError, match="limit of 110000 bytes"):
        channel_of(framed(bytes(110_001), compressed=True), budget, 110_000).recv()


def test_a_limit_raised_during_inflation_counts_correctly() -> None:
    class AuthenticatingBudget(ByteBudget):
        def reserve(self, num_bytes: int, wait_s: float = 0.0) -> bool:
            channel.max_bytes = 5_000_000  # as when the sender authenticates at this moment
            return super().reserve(num_bytes, wait_s)

    message = bytes([consts.MSG_REQUEST]) + brine.dump(b"x" * 90_000)
    budget = AuthenticatingBudget(10_000_000)
    channel = channel_of(framed(message, compressed=True), budget, 100_000)
    assert channel.recv() == message and budget.used == len(message)
    channel.take_charge().release()
    assert budget.used == 0


def test_a_ping_is_limited_in_size(peer: Any) -> None:
    peer.ping(timeout=5)
    assert peer.sync_request(consts.HANDLE_PING, b"x" * 4096) == b"x" * 4096
    for data in (b"x" * 4097, "x" * 100_000, 5, (b"x",)):
        with pytest.raises(ValueError, match="at most 4096"):
            peer.sync_request(consts.HANDLE_PING, data)


# -- invalid values ---------------------------------------------------------------------------------------------------


NUMBERS = [HUGE, -HUGE, float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, 2**64, 2j]
TYPED = {"bad_request", "prompt_too_long", "too_large", "bad_image", "deadline_missed"}


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: str(number)[:12])
def test_numbers_of_any_size_cause_typed_errors_or_none(peer: Any, number: Any) -> None:
    good, opened = call(peer, "open_frames", (("cam", "night"),), (), None, None, "none", 0, "")
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
        ("ask_heads", 1, (png(),), (("cam", "night"),), number, 0),
        ("ask_heads", 1, (png(),), (("cam", "night"),), None, number),
        ("cancel", number),
        ("open_frames", (("cam", "night"),), (), number, None, "newest", 0, ""),
        ("open_frames", (), (("q", None, number),), None, None, "newest", 0, ""),
        ("open_frames", (("cam", "night"),), (), None, number, "newest", 0, ""),
        ("open_frames", (("cam", "night"),), (), None, None, "newest", number, ""),
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


def test_error_messages_do_not_repeat_long_names(server: Running, peer: Any) -> None:
    name = "\U000e0001" * 20_000  # each takes ten characters in a repr
    for method, *args in (
        ("generate", 1, "say:x", (), name, (), None, None, 0),
        ("generate", 1, "say:x", (), None, ((name, 1),), None, None, 0),
        ("ask_head", 1, (png(),), name, "night", None, 0),
        ("ask_head", 1, (png(),), "cam", name, None, 0),
        ("ask_heads", 1, (png(),), ((name,),), None, 0),
        ("open_frames", ((name, "night"),), (), None, None, "newest", 0, ""),
        ("open_frames", (("cam", name),), (), None, None, "newest", 0, ""),
        ("open_frames", (("cam", name),) * 2, (), None, None, "newest", 0, ""),
        ("open_frames", (), ((name, name, 1),), None, None, "newest", 0, ""),
        ("open_frames", (), ((name, name, 1),) * 2, None, None, "newest", 0, ""),
        ("open_frames", (("cam", "night"),), (), None, None, name, 0),
        ("end_frames", name),
    ):
        good, *reply = call(peer, method, *args)
        assert not good and len(reply[1]) < 2000, (method, reply[0], len(reply[1]))


def test_a_refusal_contains_no_details_of_the_server(peer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals: list[Any] = []

    def unbox(self: Any, raw: Any) -> Exception:
        refusals.append(raw)
        return RuntimeError("refused")

    monkeypatch.setattr(rpyc.Connection, "_unbox_exc", unbox)
    for name in ("nothing", "_reply", "x" * 100_000, "exposed_stats"):
        with pytest.raises(RuntimeError, match="refused"):
            peer.sync_request(consts.HANDLE_CALLATTR, peer.root, name, (1, 2), ())
    for _, (message,), attributes, traceback in refusals:
        assert (attributes, traceback) == ((), "<traceback denied>"), "no details such as memory addresses"
        assert len(message) <= 200 and "0x" not in message
    assert len(refusals) == 4


def test_file_names_that_are_not_text_do_not_end_the_engine(peer: Any, tmp_path: Path) -> None:
    folder = Path(write_adapter(tmp_path / "odd"))
    (folder / "extra\udcff.safetensors").write_bytes(b"?")
    good, *reply = call(peer, "load_adapter", "odd", str(folder))
    assert good or reply[0] == "bad_adapter", reply
