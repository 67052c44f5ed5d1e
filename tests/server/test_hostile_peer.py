"""A hostile RPyC peer cannot read attributes, pickle, pass references, or crash the server."""

from __future__ import annotations

import contextlib
import random
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
from rpyc.core import brine, consts

from tests.server.running import Running, png, running_server
from tests.server.scripted import write_adapter
from vlora.client import Client
from vlora.errors import VLoraError


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(max_message_bytes=2_000_000) as running:
        yield running


@pytest.fixture
def peer(server: Running) -> Iterator[Any]:
    """A stock RPyC connection, with everything allowed on its own side."""
    config = {"allow_all_attrs": True, "allow_pickle": True, "sync_request_timeout": 5}
    connection = rpyc.connect("127.0.0.1", server.port, config=config)
    yield connection
    connection.close()


def call(connection: Any, method: str, *args: Any) -> Any:
    return connection.sync_request(consts.HANDLE_CALLATTR, connection.root, f"exposed_{method}", args, ())


@pytest.fixture(autouse=True)
def still_serving(server: Running) -> Iterator[None]:
    yield
    with Client(port=server.port) as client:
        assert client.generate("say:alive").text == "alive"


@pytest.mark.parametrize(
    "name",
    [
        "_front_end",
        "_loop",
        "__class__",
        "__init__",
        "__dict__",
        "__doc__",
        "on_disconnect",
        "_connect",
        "exposed_stats",
    ],
)
def test_no_attribute_can_be_read_written_or_deleted(peer: Any, name: str) -> None:
    root = peer.root
    for handler, args in (
        (consts.HANDLE_GETATTR, (name,)),
        (consts.HANDLE_SETATTR, (name, 1)),
        (consts.HANDLE_DELATTR, (name,)),
    ):
        with pytest.raises(ValueError, match="only exposed methods can be called"):
            peer.sync_request(handler, root, *args)


@pytest.mark.parametrize(
    "name", ["_reply", "on_disconnect", "__init__", "__class__", "get_service_name.__func__", "", 7]
)
def test_only_exposed_methods_can_be_called(peer: Any, name: Any) -> None:
    with pytest.raises((AttributeError, TypeError)):
        peer.sync_request(consts.HANDLE_CALLATTR, peer.root, name, (), ())


def test_no_pickle_no_dir_no_repr_no_iteration(peer: Any) -> None:
    root = peer.root
    for handler, args in (
        (consts.HANDLE_PICKLE, (2,)),
        (consts.HANDLE_DIR, ()),
        (consts.HANDLE_REPR, ()),
        (consts.HANDLE_STR, ()),
        (consts.HANDLE_HASH, ()),
        (consts.HANDLE_CMP, (1, "__eq__")),
        (consts.HANDLE_CALL, ((), ())),
        (consts.HANDLE_BUFFITER, (3,)),
        (consts.HANDLE_CTXEXIT, (None,)),
        (consts.HANDLE_INSTANCECHECK, (("builtins.object", 1, 0),)),
        (consts.HANDLE_OLDSLICING, ("__getitem__", "__getslice__", 0, 1, ())),
        (99, ()),
    ):
        with pytest.raises(ValueError):
            peer.sync_request(handler, root, *args)


def test_references_to_the_peers_objects_are_refused(peer: Any) -> None:
    class Trap:
        def __len__(self) -> int:
            raise AssertionError("the server called back")

    for value in (Trap(), [b"a list"], {"a": 1}, lambda: 1, bytearray(b"x")):
        with pytest.raises(ValueError, match="only values can be sent"):
            call(peer, "ask_head", 1, value, "a", "b", None, 0)


def test_no_traceback_of_the_server_is_shown(peer: Any) -> None:
    with pytest.raises(ValueError) as caught:
        peer.sync_request(consts.HANDLE_DIR, peer.root)
    assert "File" not in str(caught.value) and "denied" in str(caught.value)


def test_inspection_shows_exposed_methods_only(peer: Any) -> None:
    names = {name for name, _ in peer.sync_request(consts.HANDLE_INSPECT, ("anything", 1, 2))}
    assert "exposed_generate" in names and all(name.startswith("exposed_") for name in names)


@pytest.mark.parametrize(
    "args",
    [
        (),
        (1,),
        (1, 2, 3, 4, 5, 6, 7, 8),
        (None, "say:x", (), None, (), None, None, 0),
        (1, "say:x", "not a tuple", None, (), None, None, 0),
        (1, "say:x", (1, 2), None, (), None, None, 0),
        (1, "say:x", ("text",), None, (), None, None, 0),
        (1, b"bytes", (), None, (), None, None, 0),
        (1, "say:x", (), 7, (), None, None, 0),
        (1, "say:x", (), None, "nonsense", None, None, 0),
        (1, "say:x", (), None, (("max_tokens", "many"),), None, None, 0),
        (1, "say:x", (), None, (("max_tokens", -1),), None, None, 0),
        (1, "say:x", (), None, (("temperature", float("nan")),), None, None, 0),
        (1, "say:x", (), None, (("__class__", 1),), None, None, 0),
        (1, "say:x", (), None, ((frozenset(), ...),), None, None, 0),
        (1, "say:x", (), None, (), -1.0, None, 0),
        (1, "say:x", (), None, (), 2j, None, 0),
        (True, "say:x", (), None, (), None, None, 0),
        (1, "say:x", (), None, (), None, 0.0, 0),
        (1, "say:x", (), None, (), None, "soon", 0),
        (1, "say:x", (), None, (), None, None, 11),
        (1, "say:x", (), None, (), None, None, 0.5),
    ],
)
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_values_of_the_wrong_kind_are_named(peer: Any, method: str, args: tuple[Any, ...]) -> None:
    reply = call(peer, method, *args)
    assert reply[0] is False and reply[1] == "bad_request", reply


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("ask_head", ()),
        ("ask_head", (1, (png(),), None, "h", None, 0)),
        ("ask_heads", (1, (png(),), (), None, 0)),
        ("ask_heads", (1, (png(),), "cam", None, 0)),
        ("ask_heads", (1, (png(),), (("cam",),), None, 0)),
        ("cancel", (None,)),
        ("load_adapter", (1, 2)),
        ("unload_adapter", (b"x",)),
        ("unload_adapter", ("x", 1)),
    ],
)
def test_every_call_checks_its_values(peer: Any, method: str, args: tuple[Any, ...]) -> None:
    assert call(peer, method, *args)[:2] == (False, "bad_request")


def test_a_call_with_invalid_arguments_fails_alone(peer: Any) -> None:
    with pytest.raises(TypeError):
        call(peer, "stats", 1, 2, 3)
    with pytest.raises(TypeError, match="by position"):
        peer.sync_request(consts.HANDLE_CALLATTR, peer.root, "exposed_cancel", (), (("call_id", 1),))


def frame(payload: bytes, *, length: int | None = None, compressed: int = 0) -> bytes:
    return struct.pack("!LB", len(payload) if length is None else length, compressed) + payload + b"\n"


def request(*args: Any) -> bytes:
    return bytes([consts.MSG_REQUEST]) + brine.dump(args)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 100,
        frame(b""),
        frame(b"\x07garbage"),
        frame(request(1, 2, 3)),
        frame(request(1, (consts.HANDLE_GETROOT, (consts.LABEL_TUPLE, 5)))),
        frame(request(1, (consts.HANDLE_CALLATTR, (consts.LABEL_LOCAL_REF, ("x", 1, 2))))),
        frame(request(1, (consts.HANDLE_DEL, (consts.LABEL_LOCAL_REF, ("x", 1, 2))))),
        frame(bytes([consts.MSG_REQUEST]) + b"\x11" * 50_000),  # tuples in tuples in tuples
        frame(bytes([consts.MSG_REQUEST]) + b"\x17\x00\x01\x00\x00" + b"9" * 65536),  # a number of 65536 digits
        frame(bytes([consts.MSG_REPLY]) + brine.dump((77, (consts.LABEL_VALUE, 1)))),
        frame(bytes([consts.MSG_EXCEPTION]) + brine.dump((77, (("os", "system"), ("x",), (), "")))),
        frame(b"x", length=4_000_000_000),
        frame(zlib.compress(b"\0" * 100_000_000), compressed=1),
        frame(b"no zlib", compressed=1),
    ],
)
def test_bytes_that_are_not_the_protocol_end_that_connection_only(server: Running, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw, contextlib.suppress(OSError):
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(65536):
            pass


@pytest.mark.slow
def test_a_peer_that_never_reads_blocks_no_other_connection(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=1) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # Compressible data would give replies so small that all fit into the system's buffers.
        noise = random.Random(0).randbytes(10_000)
        ping = frame(request(1, (consts.HANDLE_PING, (consts.LABEL_TUPLE, ((consts.LABEL_VALUE, noise),)))))
        with pytest.raises(TimeoutError):  # the server reads no more from this peer: back-pressure
            for _ in range(50_000):  # more than the buffers of both sides may grow to
                raw.sendall(ping)
        started = time.monotonic()
        with Client(port=server.port) as client:
            assert client.generate("say:others").text == "others"
        assert time.monotonic() - started < 5


def test_a_duplicate_call_id_is_refused(peer: Any) -> None:
    args = (3, "forever", (), None, (("max_tokens", 90_000),), None, None, 0)
    assert call(peer, "stream", *args)[0]
    assert call(peer, "stream", *args)[:2] == (False, "bad_request")
    assert call(peer, "generate", *args)[:2] == (False, "bad_request")
    assert call(peer, "cancel", 3)[0]


def test_a_broken_connection_cancels_its_requests(server: Running) -> None:
    stream = rpyc.SocketStream.connect("127.0.0.1", server.port)
    connection = rpyc.connect_stream(stream)
    for call_id in range(3):
        pairs = (("max_tokens", 90_000),)
        assert call(connection, "stream", call_id, "forever", (), None, pairs, None, None, 0)[0]
    deadline = time.monotonic() + 5
    while len(server.engine.engine.running) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(server.engine.engine.running) == 3
    stream.sock.shutdown(socket.SHUT_RDWR)
    while server.engine.engine.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not server.engine.engine.running


def test_errors_are_values_not_exceptions(peer: Any) -> None:
    reply = call(peer, "ask_head", 1, (), "absent", "h", None, 0)
    assert reply[:2] == (False, "unknown_adapter") and isinstance(reply[2], str)
    assert not isinstance(reply, VLoraError)


@pytest.mark.parametrize("wait_s", [float("nan"), float("inf"), -1.0, None])
def test_an_infinite_wait_is_refused(peer: Any, tmp_path: Path, wait_s: Any) -> None:
    assert call(peer, "load_adapter", "waiting", write_adapter(tmp_path, {"kind": 1}))[0]
    stream_id = msgspec.msgpack.decode(
        call(peer, "open_frames", (("waiting", "kind"),), (), None, None, "newest", 0, "")[1]
    )
    assert "wait_s" in call(peer, "pull_results", stream_id, -1, wait_s)[2]
    assert call(peer, "close_frames", stream_id)[0]
