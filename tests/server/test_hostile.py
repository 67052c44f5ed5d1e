"""Hostile peers on the server's wires: malformed, huge, slow, silent and wrongly typed messages, and too many of them.

Each test ends with a served request, no running one, and no byte of a message in the budget.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import resource
import socket
import ssl
import struct
import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import rpyc
from hypothesis import given, settings
from hypothesis import strategies as st
from rpyc.core import brine, consts

from tests.example_counts import scaled
from tests.processes import PATIENCE_S, until
from tests.server.api import Api, image_part, running_api
from tests.server.conftest import Certificates
from tests.server.running import png, running_server
from tests.server.scripted import write_adapter
from tests.server.test_security import TOKENS, USER
from vlora.client import Client
from vlora.client.requests import ClientCall
from vlora.config import ServerConfig, Token
from vlora.errors import BadConfig, BadRequest, Unauthorized, VLoraError, error_from_code
from vlora.server.http import server as http_server
from vlora.server.rpyc import protocol
from vlora.server.rpyc import server as rpyc_server
from vlora.server.rpyc.protocol import MAX_READS, BoundedChannel
from vlora.server.security import limits as connection_limits
from vlora.server.security.limits import ByteBudget, ByteCharge

SETTINGS = settings(max_examples=scaled(200))
PNG, NAN = png(), float("nan")
ENDLESS = {"max_tokens": 90_000}
REQUEST = bytes([consts.MSG_REQUEST])


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with running_api(adapters={"cam": {"night": 1}}, max_message_bytes=2_000_000, max_requests=2000) as running:
        yield running


@pytest.fixture
def peer(api: Api) -> Iterator[Any]:
    """A stock RPyC connection, with everything allowed on its own side."""
    config = {"allow_all_attrs": True, "allow_pickle": True, "sync_request_timeout": PATIENCE_S}
    connection = rpyc.connect("127.0.0.1", api.port, config=config)
    yield connection
    connection.close()


@pytest.fixture(autouse=True)
def nothing_is_left(api: Api) -> Iterator[None]:
    yield
    with api.client() as client:
        assert client.generate("say:alive").text == "alive"
    until(lambda: not api.engine.engine.running and len(api.front_end.streams) == 0)
    until(lambda: api.front_end.message_budget.used == 0)


def sent(connection: Any, data: Any, method: str = "call") -> Any:
    """A message's reply."""
    return connection.sync_request(consts.HANDLE_CALLATTR, connection.root, f"exposed_{method}", (data,), ())


def call(connection: Any, kind: str, *, method: str = "call", **fields: Any) -> Any:
    return sent(connection, msgspec.msgpack.encode({"type": kind, **fields}), method)


def framed(payload: bytes, *, length: int | None = None, compressed: bool = False) -> bytes:
    payload = zlib.compress(payload) if compressed else payload
    return struct.pack("!LB", len(payload) if length is None else length, compressed) + payload + b"\n"


def request(*args: Any) -> bytes:
    return REQUEST + brine.dump(args)


def connect(port: int, data: bytes = b"", *, receive_buffer: int | None = None) -> socket.socket:
    made = socket.socket()
    if receive_buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.settimeout(PATIENCE_S)
    made.connect(("127.0.0.1", port))
    made.sendall(data)
    return made


def wait_ended(connection: socket.socket) -> None:
    """Until the server has ended a connection."""
    with connection, contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass


@contextlib.contextmanager
def silent(port: int, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connect(port)) for _ in range(count)]


def load(data: bytes) -> Any:
    return brine._load(protocol._Message(b"?" + data))  # noqa: SLF001


@given(st.binary(max_size=300))
@SETTINGS
def test_arbitrary_bytes_are_few_values_or_refused(data: bytes) -> None:
    with contextlib.suppress(Exception):
        load(data)
    with contextlib.suppress(msgspec.MsgspecError, BadRequest):
        msgspec.msgpack.decode(data, type=ClientCall)


@contextlib.contextmanager
def within(num_bytes: int) -> Iterator[None]:
    """Assert that the block's values take no more memory at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


def test_the_number_and_the_depth_of_values_are_bounded() -> None:
    assert load(brine.dump((1, (None,) * 40, b"x" * 100_000))) == (1, (None,) * 40, b"x" * 100_000)
    for data in (
        brine.dump((None,) * MAX_READS),
        brine.dump(((None,),) * 1_000_000),
        brine.dump((frozenset((1.5,)),) * 100_000),
        b"\x15\xff\xff\xff\xff" + bytes(70_000),
        *(kind * 1_000_000 for kind in (b"\x10", b"\x1a", b"\x08")),
    ):
        with within(2 * len(data) + 100_000), pytest.raises(EOFError, match="more values than a call"):
            load(data)


MANY = b"\xdd" + struct.pack("!L", 900_000)
NO_BYTES = b"\xc4\x00" * 900_000
GENERATE = b"\x83\xa4type\xa8Generate\xa8question\xa1x\xa6images"
TIMES = b"\x92\x90\xdc\x10\x00" + b"\x02" * 4096  # of a video without frames
CROWDED = {
    "images": b"\x83\xa4type\xa7AskHead\xa7adapter\xa1x\xa6images" + MANY + NO_BYTES,
    "a video": GENERATE + b"\x91\x92" + MANY + NO_BYTES + b"\x90",
    "videos": GENERATE + b"\xdc\x10\x00" + TIMES * 200,
    "times of videos": GENERATE + b"\xdc\x00\xc8" + TIMES * 200,
    "stop": b"\x83\xa4type\xa8Generate\xa8question\xa1x\xa8sampling\x81\xa4stop" + MANY + b"\xa0" * 900_000,
    "heads": b"\x83\xa4type\xa8AskHeads\xa6images\x90\xa5heads" + MANY + b"\x92\xa0\xc0" * 900_000,
    "unknown field": b"\x82\xa4type\xa8GetStats\xa1x" + MANY + b"\x90" * 900_000,
}


def test_a_message_of_many_values_is_refused_before_they_are_made() -> None:
    for data in CROWDED.values():
        with within(100_000), pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(data, type=ClientCall)


BYTES_OF_NO_PROTOCOL = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": b"\0" * 100,
    "empty message": framed(b""),
    "garbage": framed(b"\x07garbage"),
    "no request": framed(request(1, 2, 3)),
    "root of a number": framed(request(1, (consts.HANDLE_GETROOT, (consts.LABEL_TUPLE, 5)))),
    "foreign object": framed(request(1, (consts.HANDLE_CALLATTR, (consts.LABEL_LOCAL_REF, ("x", 1, 2))))),
    "foreign object deleted": framed(request(1, (consts.HANDLE_DEL, (consts.LABEL_LOCAL_REF, ("x", 1, 2))))),
    "nested": framed(REQUEST + b"\x11" * 50_000),
    "a number of 65536 digits": framed(REQUEST + b"\x17\x00\x01\x00\x00" + b"9" * 65536),
    "reply": framed(bytes([consts.MSG_REPLY]) + brine.dump((77, (consts.LABEL_VALUE, 1)))),
    "exception": framed(bytes([consts.MSG_EXCEPTION]) + brine.dump((77, (("os", "system"), ("x",), (), "")))),
    "4 GB": framed(b"x", length=4_000_000_000),
    "bomb": framed(b"\0" * 100_000_000, compressed=True),
    "no zlib": struct.pack("!LB", 7, 1) + b"no zlib\n",
    "cut zlib": struct.pack("!LB", 500, 1) + zlib.compress(random.Random(0).randbytes(600))[:500] + b"\n",
    **{
        f"{name}{', compressed' * compressed}": framed(REQUEST + data, compressed=compressed)
        for compressed in (False, True)
        for name, data in {
            "tuples of one, 36 times as large": b"\x15" + struct.pack("!L", 900_000) + b"\x10\x00" * 900_000,
            "sets of one, 75 times": b"\x15" + struct.pack("!L", 600_000) + b"\x1a\x10\x00" * 600_000,
            "deep": b"\x10" * 1_000_000,
            "cut tuple": b"\x15\xff\xff\xff\xff",
            "no value": b"",
        }.items()
    },
}
ANSWERED = ("HTTP", "zeros", "empty message", "no request", "root of a number", "reply", "exception")


@pytest.mark.parametrize("name", BYTES_OF_NO_PROTOCOL)
def test_bytes_that_are_not_the_protocol_end_that_connection_only(api: Api, name: str) -> None:
    connection = connect(api.port)
    with contextlib.suppress(OSError):  # it may have ended already
        connection.sendall(BYTES_OF_NO_PROTOCOL[name])
        if name in ANSWERED or "foreign" in name:
            connection.shutdown(socket.SHUT_WR)
    wait_ended(connection)


def channel_of(data: bytes, budget: ByteBudget, max_bytes: int) -> BoundedChannel:
    class Wire(io.BytesIO):
        MAX_IO_CHUNK = 65_536

    unused: Any = None  # only a message that is large on the wire is timed and may end its caller
    return BoundedChannel(Wire(data), max_bytes, budget, unused)  # type: ignore[arg-type]


@pytest.mark.parametrize("around", [65_536, 100_000])
def test_a_compressed_message_of_any_length_is_received_whole(around: int) -> None:
    budget = ByteBudget(10_000_000)
    for length in (*range(around - 300, around + 300, 7), around):
        message = REQUEST + brine.dump(b"x" * length)
        received = channel_of(framed(message, compressed=True), budget, 110_000)
        assert received.recv() == message
        received.take_charge().release()
    assert budget.used == 0


def test_a_bomb_is_not_inflated_beyond_the_limit() -> None:
    bomb = framed(bytes(50_000_000), compressed=True)
    with within(2_000_000), pytest.raises(EOFError, match="limit of 110000 bytes"):
        channel_of(bomb, ByteBudget(10_000_000), 110_000).recv()


def test_a_limit_raised_during_inflation_counts_correctly() -> None:
    class AuthenticatingBudget(ByteBudget):
        def reserve(self, num_bytes: int, wait_s: float = 0.0) -> bool:
            received.max_bytes = 5_000_000  # as when the sender authenticates at this moment
            return super().reserve(num_bytes, wait_s)

    message = REQUEST + brine.dump(b"x" * 90_000)
    budget = AuthenticatingBudget(10_000_000)
    received = channel_of(framed(message, compressed=True), budget, 100_000)
    assert received.recv() == message and budget.used == len(message)
    received.take_charge().release()
    assert budget.used == 0


def test_a_compressed_message_counts_its_inflated_size(api: Api, peer: Any) -> None:
    picture = PNG + bytes(1_500_000)  # a few kilobytes on the wire
    asked = {"call_id": 1, "question": "forever", "images": [picture], "sampling": ENDLESS}
    assert call(peer, "Generate", method="stream", **asked)[0]
    assert 1_500_000 < api.front_end.message_budget.used < 1_510_000
    assert call(peer, "Cancel", call_id=1)[0]


NO_NAMES = ("_front_end", "_loop", "__class__", "__init__", "__dict__", "__doc__", "on_disconnect", "_connect")


def test_no_attribute_object_or_reference_can_be_reached(peer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals: list[Any] = []
    unbox = rpyc.Connection._unbox_exc  # noqa: SLF001

    def recorded(self: Any, raw: Any) -> Any:
        refusals.append(raw)
        return unbox(self, raw)

    monkeypatch.setattr(rpyc.Connection, "_unbox_exc", recorded)
    root = peer.root
    for name in (*NO_NAMES, "exposed_call"):
        for handler, more in ((consts.HANDLE_GETATTR, ()), (consts.HANDLE_SETATTR, (1,)), (consts.HANDLE_DELATTR, ())):
            with pytest.raises(ValueError, match="only exposed methods can be called"):
                peer.sync_request(handler, root, name, *more)
    others: list[tuple[Any, ...]] = [
        *((handler,) for handler in (consts.HANDLE_DIR, consts.HANDLE_REPR, consts.HANDLE_STR, consts.HANDLE_HASH, 99)),
        (consts.HANDLE_PICKLE, 2),
        (consts.HANDLE_CMP, 1, "__eq__"),
        (consts.HANDLE_CALL, (), ()),
        (consts.HANDLE_BUFFITER, 3),
        (consts.HANDLE_CTXEXIT, None),
        (consts.HANDLE_INSTANCECHECK, ("builtins.object", 1, 0)),
        (consts.HANDLE_OLDSLICING, "__getitem__", "__getslice__", 0, 1, ()),
    ]
    for other in others:
        with pytest.raises(ValueError) as caught:
            peer.sync_request(other[0], root, *other[1:])
        assert "File" not in str(caught.value) and "denied" in str(caught.value), "no traceback is shown"
    for unexposed in (*NO_NAMES, "_reply", "get_service_name.__func__", "", 7, "x" * 100_000):
        with pytest.raises((AttributeError, TypeError)):
            peer.sync_request(consts.HANDLE_CALLATTR, root, unexposed, (), ())
    for args, named in (((1, 2), ()), ((), (("data", b"x"),))):
        with pytest.raises((ValueError, TypeError)):
            peer.sync_request(consts.HANDLE_CALLATTR, root, "exposed_call", args, named)

    class Trap:
        def __len__(self) -> int:
            raise AssertionError("the server called back")

    for value in (Trap(), [b"a list"], {"a": 1}, lambda: 1, bytearray(b"x")):
        with pytest.raises(ValueError, match="only values can be sent"):
            sent(peer, value)
    for plain in ("text", 7, (b"x",), None):
        with pytest.raises(TypeError, match="this server uses protocol"):
            sent(peer, plain)
    for _, (message,), attributes, traceback in refusals:
        assert (attributes, traceback) == ((), "<traceback denied>"), "no details such as memory addresses"
        assert len(message) <= 200 and "0x" not in message
    names = {name for name, _ in peer.sync_request(consts.HANDLE_INSPECT, ("anything", 1, 2))}
    assert {"exposed_call", "exposed_stream"} <= names and all(name.startswith("exposed_") for name in names)


def test_a_ping_is_limited_in_size_and_a_call_id_is_used_once(peer: Any) -> None:
    assert peer.sync_request(consts.HANDLE_PING, b"x" * 4096) == b"x" * 4096
    for data in (b"x" * 4097, "x" * 100_000, 5, (b"x",)):
        with pytest.raises(ValueError, match="at most 4096"):
            peer.sync_request(consts.HANDLE_PING, data)
    asked = {"call_id": 3, "question": "forever", "sampling": ENDLESS}
    assert call(peer, "Generate", method="stream", **asked)[0]
    for method in ("stream", "call"):
        assert call(peer, "Generate", method=method, **asked)[:2] == (False, "bad_request")
    assert call(peer, "Cancel", call_id=3)[0]


def test_a_lost_connection_ends_its_requests_without_a_call_id(api: Api, peer: Any) -> None:
    assert call(peer, "Generate", method="stream", question="forever", sampling=ENDLESS)[0]
    until(lambda: len(api.engine.engine.running) == 1)
    peer.close()
    until(lambda: not api.engine.engine.running)


def test_images_are_counted_before_videos_are_checked(peer: Any) -> None:
    good, *error = call(peer, "Generate", question="say:x", images=[[[b""] * 40, []]] * 2)
    assert not good and error[0] == "too_large" and "the request has 80 images" in error[1]


CAM = [["cam", "night"]]
NUMBERS = [NAN, float("inf"), -float("inf"), 1e308, 5e-324, 2**64 - 1, -(2**63)]
LONG = "\U000e0001" * 20_000  # each takes ten characters in a repr
STREAM = "<stream>"  # stands for the id of an open stream
SAY: dict[str, Any] = {"type": "Generate", "call_id": 1, "question": "say:x"}
HEAD: dict[str, Any] = {"type": "AskHead", "images": [PNG], "adapter": "cam", "head": "night"}
HEADS: dict[str, Any] = {"type": "AskHeads", "images": [PNG], "heads": CAM}
SEND: dict[str, Any] = {"type": "SendFrame", "stream_id": STREAM, "number": 0, "images": [PNG], "wait_s": 0.0}
PULL: dict[str, Any] = {"type": "PullResults", "stream_id": STREAM, "acknowledged": -1, "wait_s": 0.0}


def opening(**options: Any) -> dict[str, Any]:
    return {"type": "OpenFrames", "options": options}


WRONG: list[Any] = [
    *(None, 7, [], {}, {"type": "Nothing"}, {"type": 7}, {"type": "Generate"}, {"type": "GetStats", "more": 1}),
    *({**SAY, "call_id": call_id} for call_id in (None, True, "1")),
    *({**SAY, "images": images} for images in ("no list", [1, 2], ["text"])),
    *({**SAY, "images": [video]} for video in ([[b"x"]], [["x"], [0.0]], [[b"x"], "0"])),
    *({**SAY, "question": question} for question in (b"bytes", None, ["a"])),
    {**SAY, "adapter": 7},
    *({**SAY, "sampling": options} for options in ("nonsense", {"max_tokens": "many"}, {"max_tokens": -1})),
    *({**SAY, "sampling": options} for options in ({"temperature": NAN}, {"__class__": 1}, {"stop": [1]})),
    *({**SAY, "max_latency_s": latency} for latency in (-1.0, "soon")),
    *({**SAY, "max_ttft_s": ttft} for ttft in (0.0, "soon")),
    *({**SAY, "priority": priority} for priority in (11, 0.5)),
    *({**SAY, "answer": answer} for answer in ("perhaps", 1)),
    {**HEAD, "head": "h", "adapter": 0},
    *({**HEADS, "heads": heads} for heads in ([], "cam", [["cam"]], CAM * 10_000)),
    {"type": "Cancel", "call_id": None},
    {"type": "LoadAdapter", "name": 1, "path": 2},
    *({"type": "UnloadAdapter", "name": name, "drain": drain} for name, drain in ((b"x", True), ("x", 1))),
    *(opening(heads=heads) for heads in ([], "cam", [["cam"]], CAM * 10_000)),
    *(opening(questions=asked) for asked in ([[1]], [["q", None, "8"]])),
    *(opening(heads=CAM, **{name: value}) for name in ("max_latency_s", "fps") for value in (-1.0, 0, "soon")),
    *(opening(heads=CAM, **wrong) for wrong in ({"priority": 11}, {"drop": "x" * 1000}, {"more": 1})),
    *({**SEND, "stream_id": stream} for stream in ("unknown", b"bytes")),
    *({**SEND, "images": frame} for frame in (PNG, ["text"], [], [[b"", 2**62, 2**62]])),
    *({**SEND, "images": [[b"abc", *size]]} for size in ((-1, -1), (1.5, True), (1,))),
    *({**SEND, "number": number} for number in (2**62, "0")),
    *({**SEND, "wait_s": wait_s} for wait_s in (NAN, -1.0)),
    *({**PULL, "acknowledged": number} for number in (2**62, -2, 0, None)),
    *({**PULL, "wait_s": wait_s} for wait_s in (NAN, float("inf"), -1.0, None)),
    {**PULL, "stream_id": STREAM * 1000},
    *({"type": kind, "stream_id": stream} for kind, stream in (("EndFrames", [STREAM]), ("CloseFrames", 7))),
]


def with_stream(value: Any, stream_id: str) -> bytes:
    here = {**value, "stream_id": stream_id} if isinstance(value, dict) and value.get("stream_id") == STREAM else value
    return msgspec.msgpack.encode(here)


@pytest.fixture
def stream_id(peer: Any) -> Iterator[str]:
    good, opened = sent(peer, msgspec.msgpack.encode(opening(heads=CAM, drop="none")))
    assert good
    found: str = msgspec.msgpack.decode(opened)
    yield found
    assert all(call(peer, "CloseFrames", stream_id=each)[0] for each in ("unknown", found))


def test_values_of_the_wrong_kind_are_typed_errors(peer: Any, stream_id: str) -> None:
    for value in WRONG:
        for method in ("call", "stream"):
            good, *error = sent(peer, with_stream(value, stream_id), method)
            assert not good and isinstance(error_from_code(*error), BadRequest), (value, error)
            assert "internal" not in error[1] and len(error[1]) < 400, (value, error)
    for data in (b"", b"\xc1", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", with_stream(SAY, "")[:-1]):
        assert sent(peer, data)[:2] == (False, "bad_request")
    for method in ("call", "stream"):
        assert sent(peer, b"\x82\xa1x" + b"\x91" * 100_000 + b"\x90\xa4type\xa8GetStats", method)[1] == "bad_request"
    assert sent(peer, with_stream(SEND, stream_id))[0]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: str(number)[:12])
def test_numbers_of_any_size_cause_typed_errors_or_none(peer: Any, stream_id: str, number: Any) -> None:
    typed = {"bad_request", "prompt_too_long", "too_large", "bad_image", "deadline_missed"}
    options = ("max_tokens", "temperature", "top_p", "top_k", "seed", "logprobs")
    calls: list[dict[str, Any]] = [
        *({**SAY, name: number} for name in ("call_id", "max_latency_s", "max_ttft_s", "priority")),
        *({**SAY, "sampling": {name: number}} for name in options),
        *({**asked, name: number} for asked in (HEAD, HEADS) for name in ("max_latency_s", "priority")),
        {"type": "Cancel", "call_id": number},
        opening(questions=[["q", None, number]]),
        *(opening(heads=CAM, **{name: number}) for name in ("max_latency_s", "fps", "priority")),
        *({**SEND, name: number} for name in ("number", "wait_s")),
        *({**SEND, "number": 1, "images": [[b"abc", *size]]} for size in ((number, 1), (1, number), (number, number))),
        *({**PULL, name: number} for name in ("acknowledged", "wait_s")),
    ]
    for asked in calls:
        good, *reply = sent(peer, with_stream(asked, stream_id))
        if good and asked["type"] == "OpenFrames":
            assert call(peer, "CloseFrames", stream_id=msgspec.msgpack.decode(reply[0]))[0]
        if not good:
            assert reply[0] in typed and "internal" not in reply[1], (asked, reply)


def test_error_messages_do_not_repeat_long_names(peer: Any) -> None:
    calls: list[dict[str, Any]] = [
        {"type": LONG},
        {"type": "GetStats", LONG: 1},
        {**SAY, "adapter": LONG},
        {**SAY, "sampling": {LONG: 1}},
        {**HEAD, "adapter": LONG},
        {**HEAD, "head": LONG},
        opening(heads=[[LONG, "night"]]),
        *(opening(heads=[["cam", LONG]] * number) for number in (1, 2)),
        *(opening(questions=[[LONG, LONG, 1]] * number) for number in (1, 2)),
        opening(heads=CAM, drop=LONG),
        {"type": "EndFrames", "stream_id": LONG},
    ]
    for asked in calls:
        good, *reply = sent(peer, msgspec.msgpack.encode(asked))
        assert not good and len(reply[1]) < 2000, (asked["type"], reply[0], len(reply[1]))


def test_file_names_that_are_not_text_do_not_end_the_engine(peer: Any, tmp_path: Path) -> None:
    folder = Path(write_adapter(tmp_path / "odd"))
    (folder / "extra\udcff.safetensors").write_bytes(b"?")
    good, *reply = call(peer, "LoadAdapter", name="odd", path=str(folder))
    assert good or reply[0] == "bad_adapter", reply


def test_unanswered_calls_of_a_connection_are_bounded(api: Api, peer: Any) -> None:
    """A further call waits, so that the peer's messages stay in its socket."""
    running, data = api.engine.engine.running, msgspec.msgpack.encode({"type": "Generate", "question": "never"})
    asked = (consts.HANDLE_CALLATTR, peer.root, "exposed_call", (data,), ())
    replies = [peer.async_request(*asked) for _ in range(1100)]
    until(lambda: len(running) == 1024)
    time.sleep(0.05)
    assert len(running) == 1024
    for request_id in tuple(running):
        api.on_loop(api.engine.cancel(request_id))
    until(lambda: len(running) == 76)
    assert sum(reply.ready for reply in replies) <= 1024


def post(body: bytes) -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_a_caller_that_does_not_read_frees_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    made = http_server.BoundedProtocol.connection_made

    def with_small_buffer(self: Any, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(http_server.BoundedProtocol, "connection_made", with_small_buffer)
    monkeypatch.setattr(http_server, "SEND_S", 0.3)
    with running_api(max_requests=4) as api:
        api.engine.engine.limits.max_context = 10**9
        messages = [{"role": "user", "content": "forever"}]
        fields: dict[str, Any] = {"model": "base", "n": 4, "stream": True, "max_tokens": 10**6, "messages": messages}
        with connect(api.http_port, post(json.dumps(fields).encode()), receive_buffer=2048):
            until(lambda: api.front_end.num_active == 4)
            assert api.chat("say:x")[0] == 429
            until(lambda: api.front_end.num_active == 0)
            assert api.chat("say:x")[0] == 200 and api.idle()


BEGUN = [
    b"",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he",
    post(b"")[:-5] + b"100\r\n\r\n{",
    post(b"").replace(b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n") + b"1\r\n{\r\n",
]


@pytest.mark.parametrize("tokens", [(), TOKENS], ids=["no tokens", "tokens"])
def test_silent_callers_have_a_time_limit(tokens: tuple[Token, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((http_server, "HEADER_S"), (http_server, "BODY_S"), (rpyc_server, "AUTHENTICATE_S")):
        monkeypatch.setattr(module, name, 0.3)
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 1)
    with running_api(tokens=tokens) as api, api._replace(token=USER).client() as known:
        known.stats()
        connections = [connect(api.http_port, data) for data in BEGUN]
        if tokens:
            connections.append(connect(api.port))  # does not authenticate
        for each in connections:
            wait_ended(each)
        assert api._replace(token=USER).chat("say:x")[0] == 200
        assert known.generate("say:still here").text == "still here"


@pytest.mark.slow
def test_a_body_may_take_long_while_data_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BODY_S", 0.3)
    monkeypatch.setattr(http_server, "LEAST_BYTES_PER_S", 10)
    body = json.dumps({"model": "base", "messages": [{"role": "user", "content": "say:x"}]}).encode()
    with running_api() as api, connect(api.http_port, post(body)[: -len(body)]) as connection:
        for place in range(0, len(body), 10):
            connection.sendall(body[place : place + 10])
            time.sleep(0.1)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_a_message_that_arrives_too_slowly_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "FRAME_S", 0.2)
    with running_server() as server:
        slow = connect(server.port, BoundedChannel.FRAME_HEADER.pack(100_000, 0) + b"x" * 1000)
        until(lambda: server.front_end.message_budget.used == 100_000)
        wait_ended(slow)
        until(lambda: server.front_end.message_budget.used == 0)


@pytest.mark.slow
def test_a_slow_handshake_has_a_deadline(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that arrive one at a time do not extend it."""
    for module in (rpyc_server, http_server):
        monkeypatch.setattr(module, "HANDSHAKE_S", 0.5)
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    hello = outgoing.read()
    with running_api(tls_cert=certificates.cert, tls_key=certificates.key) as api:
        for port in (api.port, api.http_port):
            with connect(port) as sock, pytest.raises(OSError):
                for byte in hello[:-1]:
                    sock.sendall(bytes([byte]))
                    time.sleep(0.02)
                raise AssertionError("all bytes but one were accepted")
        assert api._replace(tls=certificates.context()).call("GET", "/health")[0] == 200


def test_silent_connections_make_room_for_new_ones_and_busy_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "connection_share", lambda: 5)
    with running_api() as api, ThreadPoolExecutor(1) as threads:
        asking = threads.submit(api.chat, "forever", max_tokens=90_000)
        until(lambda: bool(api.engine.engine.running))
        with silent(api.http_port, 12) as connections:
            assert api.call("GET", "/health")[0] == 200
            for first in connections[:7]:
                wait_ended(first)
            (request_id,) = api.engine.engine.running
            api.on_loop(api.engine.cancel(request_id))
            assert asking.result()[1]["error"]["code"] == "aborted", "the caller received its answer"


def test_unauthenticated_connections_make_room_for_authenticated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpyc_server, "MAX_UNAUTHENTICATED", 5)
    with (
        running_server(tokens=TOKENS) as server,
        Client(port=server.port, token=USER) as old,
        silent(server.port, 20) as unauthenticated,
    ):
        for first in unauthenticated[:15]:
            assert first.recv(1) == b""
        with Client(port=server.port, token=USER) as new:
            assert new.generate("say:new").text == "new" and old.generate("say:old").text == "old"


def test_authenticated_connections_are_not_closed_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def connection(authenticated: bool) -> connection_limits.PeerSocket:
        made = connection_limits.PeerSocket(socket.socket())
        made.authenticated = authenticated
        return made

    limits = connection_limits.ConnectionLimits(2, 2)
    unauthenticated = connection(False)
    assert limits.admit(connection(True)) and limits.admit(unauthenticated) and limits.admit(connection(True))
    assert not limits.admit(connection(False))
    limits.remove(unauthenticated)
    assert not limits.admit(connection(False))
    for soft, share in ((1024, 298), (resource.RLIM_INFINITY, 2048), (10, 8)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert connection_limits.connection_share() == share


@pytest.mark.slow
def test_handshakes_count_as_connections(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (http_server, rpyc_server):
        monkeypatch.setattr(module, "connection_share", lambda: 4)
    with running_api(tls_cert=certificates.cert, tls_key=certificates.key) as api:
        for port in (api.http_port, api.port):
            with silent(port, 9) as connections:
                for oldest in connections[:5]:
                    wait_ended(oldest)
                for other in connections[5:]:
                    other.setblocking(False)
                    with pytest.raises(BlockingIOError):
                        other.recv(1)
        over = api._replace(tls=certificates.context())
        assert over.client().generate("say:x").text == "x" and over.call("GET", "/health")[0] == 200


def test_a_connection_displaced_as_its_handshake_begins_is_closed(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpyc_server, "connection_share", lambda: 1)
    displaced, wrap, end = threading.Event(), ssl.SSLContext.wrap_socket, connection_limits.PeerSocket.end

    def slow_wrap(self: ssl.SSLContext, *args: Any, **options: Any) -> ssl.SSLSocket:
        wrapped = wrap(self, *args, **options)  # from here the accepted socket has no descriptor
        assert displaced.wait(PATIENCE_S)
        return wrapped

    def noted_end(self: connection_limits.PeerSocket) -> None:
        end(self)
        displaced.set()

    monkeypatch.setattr(ssl.SSLContext, "wrap_socket", slow_wrap)
    monkeypatch.setattr(connection_limits.PeerSocket, "end", noted_end)
    with (
        running_api(tls_cert=certificates.cert, tls_key=certificates.key) as api,
        silent(api.port, 2) as (first, second),
    ):
        wait_ended(first)
        second.setblocking(False)
        with pytest.raises(BlockingIOError):
            second.recv(1)


@pytest.mark.parametrize("lack", ["descriptors", "threads"])
def test_rpyc_survives_a_lack_of_descriptors_and_threads(lack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[str] = []
    accept, start = socket.socket.accept, threading.Thread.start

    def failing_accept(self: socket.socket) -> Any:
        taken = accept(self)
        if len(failed) < 2:
            failed.append(lack)
            taken[0].close()
            raise OSError(24, "Too many open files")
        return taken

    def failing_start(self: threading.Thread) -> None:
        if self.name == "vlora-rpyc-reader" and not failed:
            failed.append(lack)
            raise RuntimeError("can't start new thread")
        start(self)

    with running_server() as server, Client(port=server.port) as old:
        old.stats()
        if lack == "descriptors":
            monkeypatch.setattr(socket.socket, "accept", failing_accept)
        else:
            monkeypatch.setattr(threading.Thread, "start", failing_start)
        with silent(server.port, 3) as (first, *_):
            until(lambda: len(failed) == (2 if lack == "descriptors" else 1))
            assert lack == "descriptors" or first.recv(1) == b""
        assert old.generate("say:old").text == "old"
        with Client(port=server.port) as new:
            assert new.generate("say:new").text == "new"


def test_unauthenticated_rpyc_peers_call_nothing_and_send_little() -> None:
    with running_server(tokens=TOKENS) as server:
        peer: Any = rpyc.connect("127.0.0.1", server.port)
        for asked in (SAY, HEAD, HEADS, SEND, {"type": "GetAdapters"}, {"type": "LoadAdapter"}, {"type": "Nothing"}):
            for method in ("call", "stream"):
                reply = sent(peer, msgspec.msgpack.encode(asked), method)
                assert reply[:2] == (False, "unauthorized"), (asked, reply)
        with pytest.raises(EOFError):
            call(peer, "Authenticate", token=b"x" * 100_000)
        with Client(port=server.port, token=USER) as client:
            assert client.generate("say:x").text == "x"
        with Client(port=server.port, token="x" * 20) as wrong, pytest.raises(Unauthorized):
            wrong.stats()


def test_http_bodies_share_one_limit() -> None:
    with running_api(max_message_bytes=200_000, max_held_bytes=400_000) as api:
        budget = api.front_end.message_budget
        slow = [connect(api.http_port, post(b" " * 190_000)[:-10_000]) for _ in range(2)]
        until(lambda: budget.used == 360_000)
        status, answer = api.chat([{"type": "text", "text": "say:x" + "y" * 60_000}])
        assert status == 429 and "400000 bytes" in json.dumps(answer)
        assert api.chat("say:x")[0] == 200
        for each in slow:
            each.close()
        until(lambda: budget.used == 0)
        assert api.chat([{"type": "text", "text": "say:x"}, image_part(PNG)])[0] == 200
        until(lambda: budget.used == 0)


def test_rpyc_messages_wait_for_the_end_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = PNG + b"\0" * 150_000
    with running_server(max_message_bytes=200_000, max_held_bytes=200_000) as server, ThreadPoolExecutor(1) as threads:
        budget = server.front_end.message_budget
        with Client(port=server.port) as one, Client(port=server.port) as two:
            stream = one.stream("forever", [picture], max_tokens=90_000)
            next(stream)
            assert budget.used > 150_000
            waiting = threads.submit(two.generate, "say:x", [picture])
            time.sleep(0.1)
            assert not waiting.done()
            stream.close()
            assert waiting.result(PATIENCE_S).text == "x"
        until(lambda: budget.used == 0)
        monkeypatch.setattr(protocol, "ROOM_S", 0.1)
        assert budget.reserve(200_000)
        with Client(port=server.port) as refused, pytest.raises(VLoraError):
            refused.generate("say:x", [picture])
        budget.release(200_000)
        until(lambda: budget.used == 0)


def test_a_frame_counts_until_it_is_answered() -> None:
    with running_server({"cam": {"never": 1}}) as server, Client(port=server.port) as client:
        budget = server.front_end.message_budget
        with client.open_stream(adapter="cam", head="never", drop="none") as stream:
            stream.send(PNG + b"\0" * 100_000)
            until(lambda: bool(server.engine.engine.running))
            assert budget.used > 100_000
            (request_id,) = server.engine.engine.running
            server.on_loop(server.engine.cancel(request_id))
            assert next(stream).error is not None
            until(lambda: budget.used == 0)


def test_a_budget_is_bounded_and_a_charge_is_released_once() -> None:
    budget = ByteBudget(10)
    assert budget.reserve(6) and not budget.reserve(5) and budget.reserve(4)
    budget.release(6)
    assert budget.reserve(5)
    charge = ByteCharge(budget)
    assert not charge.add(2, 0) and charge.add(1, 0) and budget.used == 10
    moved = charge.move()
    charge.release()
    assert budget.used == 10
    for _ in range(2):
        moved.release()
        assert budget.used == 9
    with pytest.raises(BadConfig, match="max_held_bytes is 5"):
        ServerConfig(max_held_bytes=5)
