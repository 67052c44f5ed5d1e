"""Clients and executors that are hostile, die or do not know the token: others go on, one clear line each."""

from __future__ import annotations

import contextlib
import copy
import datetime
import errno
import logging
import os
import select
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trustme

from tests.processes import PATIENCE_S, until
from tests.split.running import Serving, serving, tiny
from tests.split.test_equality import WITHIN, apart, losses
from vlora.config import Token
from vlora.errors import BadConfig, BadRequest, Disconnected, OverCapacity, Unauthorized
from vlora.split import Base, connect, transport
from vlora.split.admission import Limits
from vlora.split.batching import Call, CallQueue
from vlora.split.frames import DTYPES, PROTOCOL, BaseInfo, CallHead, ClientInfo, Direction
from vlora.wire import framing, handshake
from vlora.wire.address import Address, secured

ROOT = Path(__file__).parents[2]
STALL_S = 0.5
IDS = torch.tensor([[5, 6, 7]])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("qwen2_vl")


@pytest.fixture(scope="module")
def plain(model: Any) -> list[float]:
    return losses("lora", "qwen2_vl", copy.deepcopy(model))


@pytest.fixture(scope="module")
def served(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(model, tmp_path_factory.mktemp("base"), limits=Limits(stall_s=STALL_S, handshake_s=STALL_S)) as found:
        yield found


@contextlib.contextmanager
def training(served: Serving, model: Any, plain: list[float]) -> Iterator[None]:
    """A client that trains during the block, with its losses checked after it."""
    found: list[float] = []

    def train() -> None:
        with connect(served.unix) as base:
            found.extend(losses("lora", "qwen2_vl", base.wrap(copy.deepcopy(model))))

    thread = threading.Thread(target=train)
    thread.start()
    yield
    thread.join()
    assert apart(found, plain) < WITHIN


def lines(caplog: pytest.LogCaptureFixture, number: int = 1) -> list[str]:
    """The warnings so far, once there are as many."""

    def found() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    until(lambda: len(found()) >= number)
    return found()


def forward(base: Base, rows: int = 1) -> torch.Tensor:
    layer = base.calls.groups[0][0]
    return base.calls.call(Direction.FORWARD, 0, 1, [torch.zeros(rows, layer.d_in)])[0]


def introduce(sock: socket.socket) -> BaseInfo:
    """The handshake of a client without a token."""
    deadline = time.monotonic() + PATIENCE_S
    about = msgspec.msgpack.encode(ClientInfo("", "raw", False))
    found = handshake.run(
        handshake.introduce(PROTOCOL, None, peer="", about=about),
        lambda data: framing.send(sock, data),
        lambda: framing.receive(sock, 1 << 20, deadline),
    )
    return msgspec.msgpack.decode(found, type=BaseInfo)


def admitted(address: str) -> tuple[socket.socket, BaseInfo]:
    """A raw connection over TCP after its handshake."""
    sock = transport.open_connection(Address.parse(address), None, PATIENCE_S)
    info = introduce(sock)
    sock.settimeout(PATIENCE_S)
    return sock, info


def all_of(sock: socket.socket) -> bytes:
    """All bytes until the other end closes the connection."""
    answer = b""
    with sock, contextlib.suppress(ConnectionResetError):
        while part := sock.recv(4096):
            answer += part
    return answer


# -- clients ----------------------------------------------------------------------------------------------------------

GOOD = CallHead(1, Direction.FORWARD, 0, 0, 1, 2, 32, 256)
WRONG = {
    "direction": (GOOD._replace(direction=9), "has direction 9"),
    "dtype": (GOOD._replace(dtype=DTYPES.index("bfloat16")), "dtype 1; the base has torch.float32"),
    "group": (GOOD._replace(group=999), "of group 999; the base has no such layers"),
    "mask": (GOOD._replace(mask=0), "the base has no such layers"),
    "no rows": (GOOD._replace(rows=0), "has 0 rows"),
    "many rows": (GOOD._replace(rows=2**31), "rows; it must have 1 to 4096"),
    "width": (GOOD._replace(width=31), "rows of 31 values; these layers take 32"),
    "size": (GOOD._replace(num_bytes=252), "do not have the size of its head"),
    "no tensor": (GOOD._replace(num_bytes=0), "do not have the size of its head"),
    "huge": (GOOD._replace(num_bytes=2**60), "bytes on the connection; the maximum is"),
}


def test_hostile_calls_end_their_connections_only(
    served: Serving, model: Any, plain: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with training(served, model, plain):
        for wrong, (head, reason) in WRONG.items():
            caplog.clear()
            sock, _ = admitted(served.tcp)
            sock.sendall(head.pack() + bytes(min(head.num_bytes, 256)))
            assert reason in all_of(sock)[16:].decode(), wrong
            (line,) = lines(caplog)
            assert line.startswith("client 'raw' at 127.0.0.1: ") and reason in line
        for sent in (GOOD.pack(), GOOD.pack() + bytes(256)):  # closed during a call
            sock, _ = admitted(served.tcp)
            sock.sendall(sent)
            sock.close()
        with connect(served.unix) as base:  # rows without numbers stay with their client
            rows = torch.full((3, base.calls.groups[0][0].d_in), torch.nan)
            for _ in range(50):
                assert base.calls.call(Direction.FORWARD, 0, 1, [rows])[0].isnan().all()
        with connect(served.tcp) as base, pytest.raises(BadRequest, match="refused a call: a call has direction 7"):
            base.calls.call(7, 0, 1, [torch.zeros(1, 32)])  # type: ignore[arg-type]
    until(lambda: served.server.num_clients == 0)


def test_half_sent_calls_and_unread_replies_time_out(
    model: Any, plain: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reason = f"a call or its reply was incomplete for {STALL_S:g} s; its connection is closed"
    rows = 2**15  # a reply of 26 MB, more than the kernel's buffers
    with (
        serving(model, tmp_path, limits=Limits(stall_s=STALL_S, max_rows=rows)) as served,
        training(served, model, plain),
    ):
        for sent in (GOOD.pack()[:10], GOOD.pack() + bytes(100)):
            sock, info = admitted(served.tcp)
            sock.sendall(sent)
            assert all_of(sock) == b""
        sock, info = admitted(served.tcp)
        index, group = next((i, g) for i, g in enumerate(info.groups) if g[0].name == "lm_head")
        with sock:
            size = rows * group[0].d_in * 4
            sock.sendall(CallHead(1, Direction.FORWARD, 0, index, 1, rows, group[0].d_in, size).pack() + bytes(size))
            assert lines(caplog, 3) == [f"client 'raw' at 127.0.0.1: {reason}"] * 3


class Never(CallQueue[Any]):
    """No call is ever computed."""

    def next(self, now: float) -> Sequence[Call[Any]]:
        return ()

    def wait_s(self, now: float) -> float | None:
        return None


def test_calls_that_are_not_answered(model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A second one ends the connection; a client that is gone is one line; closing ends one that a thread waits for."""
    with serving(model, tmp_path, queue=Never()) as served:
        sock, _ = admitted(served.tcp)
        sock.sendall(GOOD.pack() + bytes(256))
        sock.close()
        (line,) = lines(caplog)
        assert "during a call" in line or "the connection broke" in line
        sock, _ = admitted(served.tcp)
        sock.sendall(GOOD.pack() + bytes(256) + b"more")  # together, so that the first is in the queue by then
        assert b"second call before the first" in all_of(sock)
        for address in (served.unix, served.tcp):
            base = connect(address)
            failures: list[Exception] = []

            def call(base: Base = base, failures: list[Exception] = failures) -> None:
                try:
                    forward(base)
                except Disconnected as error:
                    failures.append(error)

            thread = threading.Thread(target=call)
            thread.start()
            time.sleep(0.1)  # the call is sent
            base.close()
            thread.join(PATIENCE_S)
            assert not thread.is_alive() and "is closed" in str(failures)


def test_silent_peers_of_one_listener_do_not_block_the_others(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(model, tmp_path) as served, contextlib.ExitStack() as silent:
        for _ in range(33):
            sock = silent.enter_context(transport.open_connection(Address.parse(served.tcp), None, PATIENCE_S))
        assert sock.recv(1) == b"", "one more than 32 was accepted"
        connect(served.unix, patience_s=PATIENCE_S).close()
        with pytest.raises(Disconnected):
            connect(served.tcp, patience_s=5.0)
        silent.close()
        assert lines(caplog, 2 + 32)[0] == "a connection was closed: 32 others are not authenticated yet"


def test_a_peer_that_is_gone_at_its_handshake_is_one_line(served: Serving, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()  # with a reset
        sock, _ = listener.accept()
        until(lambda: bool(select.select([sock], [], [], 0)[0]))
        assert served.server.admission.admit(sock) is None and sock.fileno() == -1
    (line,) = lines(caplog)
    assert line.startswith("a client over TCP was refused: ")


def test_a_product_that_fails_refuses_its_call_only(
    served: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compute = served.executor.compute

    def without_memory(direction: int, group: int, mask: int, inputs: Any, out: Any = None) -> Any:
        if len(inputs[0]) == 77:
            raise RuntimeError("not enough memory: you tried to allocate\nmore")
        return compute(direction, group, mask, inputs, out)

    monkeypatch.setattr(served.executor, "compute", without_memory)
    with connect(served.tcp) as base, connect(served.unix) as other:
        with pytest.raises(BadRequest, match="the product failed: not enough memory"):
            forward(base, 77)
        forward(other)
    assert len(lines(caplog)) == 1


def test_calls_and_clients_over_a_limit_are_refused(model: Any, tmp_path: Path) -> None:
    """A client of this version divides such a call; one of too many is refused until another one leaves."""
    with serving(model, tmp_path, limits=Limits(max_clients=2, half_bytes=8192)) as served:
        sock, _ = admitted(served.tcp)
        sock.sendall(GOOD._replace(rows=64, num_bytes=64 * 128).pack() + bytes(64 * 128))
        assert b"a call of 64 rows exceeds 8192 bytes" in all_of(sock)
        until(lambda: served.server.num_clients == 0)
        for _ in range(3):
            full = pytest.raises(OverCapacity, match="has 2 clients, its maximum")
            with connect(served.unix), connect(served.tcp), full:
                connect(served.unix)
            until(lambda: served.server.num_clients == 0)


def test_a_connection_is_used_by_one_call_at_a_time(served: Serving) -> None:
    base = connect(served.unix)
    width = base.calls.groups[0][0].d_in

    def product(value: int) -> torch.Tensor:
        return base.calls.call(Direction.FORWARD, 0, 1, [torch.full((2, width), float(value))])[0].clone()

    with ThreadPoolExecutor(4) as threads:
        expected = [product(value) for value in range(4)]
        for found in threads.map(lambda _: list(map(product, range(4))), range(50)):
            assert all(map(torch.equal, found, expected))
    base.close()


# -- executors --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def base_process(checkpoint: Path, address: str) -> Iterator[subprocess.Popen[str]]:
    """`vlora base serve` in a process of its own."""
    command = [sys.executable, "-m", "vlora.cli", "base", "serve", str(checkpoint), "--bind", address, "--threads", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        assert process.stdout.readline().startswith(f"ready: base model {checkpoint.name} on {address}"), (
            process.stderr.read() if process.poll() is not None else ""
        )
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_an_executor_killed_within_a_training_loses_nothing(
    checkpoint: Path, model: Any, plain: list[float], tmp_path: Path
) -> None:
    """The next one listens at the same address."""
    at, first_at = tmp_path / "at.sock", tmp_path / "first.sock"
    with serving(model, tmp_path) as following, base_process(checkpoint, f"unix:{first_at}") as first:
        at.symlink_to(first_at)
        with connect(f"unix:{at}") as base:
            wrapped = base.wrap(copy.deepcopy(model))
            calls = 0

            def restart(*_: object) -> None:
                nonlocal calls
                calls += 1
                if calls == 5:
                    first.kill()
                    at.unlink()
                    at.symlink_to(following.unix.removeprefix("unix:"))

            wrapped.model.language_model.layers[2].mlp.down_proj.register_full_backward_pre_hook(restart)
            found = losses("lora", "qwen2_vl", wrapped)
            assert base.num_repeated >= 1
    assert apart(found, plain) < WITHIN


def test_an_executor_without_free_descriptors_pauses_its_listener(
    served: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept = socket.socket.accept
    refusals: list[socket.socket] = []

    def without_descriptors(listener: socket.socket) -> Any:
        if not refusals:
            refusals.append(listener)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", without_descriptors)
    connect(served.unix, patience_s=PATIENCE_S).close()
    assert lines(caplog) == ["no connection can be accepted at present: Too many open files"] and refusals


def test_an_executor_that_is_gone_or_has_another_model_is_one_line(model: Any, tmp_path: Path) -> None:
    with serving(model, tmp_path) as served:
        gone, other = connect(served.tcp, patience_s=0.3), connect(served.unix, patience_s=PATIENCE_S)
        wrapped, replaced = (base.wrap(copy.deepcopy(model)) for base in (gone, other))
    with pytest.raises(Disconnected, match=r"does not answer for 0.3 s .* restart it, and run the step again"):
        wrapped(input_ids=IDS, mm_token_type_ids=torch.zeros_like(IDS))
    for address in (served.tcp, served.unix):
        with pytest.raises(Disconnected, match="start one with vlora base serve"):
            connect(address)
    with serving(tiny("gpt2"), tmp_path), pytest.raises(BadConfig, match="another base model is served here now"):
        replaced(input_ids=IDS, mm_token_type_ids=torch.zeros_like(IDS))
    gone.close()
    other.close()


class Dying(CallQueue[Any]):
    """Every call ends its connection, after a time."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.num_calls, self._delay_s = 0, delay_s

    def add(self, call: Call[Any]) -> None:
        self.num_calls += 1
        time.sleep(self._delay_s)
        raise ConnectionResetError


@pytest.mark.parametrize(
    ("delay_s", "patience_s", "reason", "least", "most"),
    [(0.0, 30.0, "failed 4 times during one call .* see its log", 4, 4), (0.3, 0.5, "does not answer for 0.5 s", 1, 2)],
)
def test_a_call_that_ends_every_connection_is_given_up(
    delay_s: float, patience_s: float, reason: str, least: int, most: int, model: Any, tmp_path: Path
) -> None:
    queue = Dying(delay_s)
    with serving(model, tmp_path, queue=queue) as dying, connect(dying.tcp, patience_s=patience_s) as base:
        with pytest.raises(Disconnected, match=reason) as failure:
            forward(base)
        assert least <= queue.num_calls <= most and "\n" not in str(failure.value)
        assert base.num_repeated == queue.num_calls - 1 or delay_s


def test_a_closed_base_is_not_opened_again_by_a_call(served: Serving, model: Any) -> None:
    for address in (served.unix, served.tcp):
        base = connect(address)
        wrapped = base.wrap(copy.deepcopy(model))
        base.close()
        before = served.server.num_calls
        with pytest.raises(Disconnected, match="is closed; connect and wrap the model again"):
            wrapped(input_ids=IDS, mm_token_type_ids=torch.zeros_like(IDS))
        assert served.server.num_calls == before
    until(lambda: served.server.num_clients == 0)


# -- tokens and TLS ---------------------------------------------------------------------------------------------------

SECRET, OTHER, UNKNOWN = "correct-horse-battery", "staple-staple-staple", "wrong-wrong-wrong-wrong"
_PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
TOKENS = (
    Token(name="a", secret=SECRET),
    Token(name="b", secret=OTHER),
    Token(name="old", secret="expired-expired-expired", expires=_PAST),
)


def ask(address: str, **settings: Any) -> None:
    with connect(address, patience_s=PATIENCE_S, **settings) as base:
        assert forward(base).shape == (1, base.calls.groups[0][0].d_out)


def test_only_a_right_token_is_admitted_and_none_is_sent(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(model, tmp_path, tokens=TOKENS) as served:
        for address in (served.unix, served.tcp):
            for secret in (SECRET, OTHER):
                ask(address, token=secret)
            for token, reason in (
                (None, r"requires a token; .*connect\(\.\.\., token=\.\.\.\)"),
                (UNKNOWN, "is not valid"),
                (TOKENS[2].secret, "expired at 2020"),
            ):
                with pytest.raises(Unauthorized, match=reason):
                    connect(address, token=token)
        assert served.server.num_clients <= 4
        refusals = [record.getMessage() for record in caplog.records if "was refused" in record.getMessage()]
        assert len(refusals) == 6 and not any(token.secret in caplog.text for token in TOKENS)
        with pytest.raises(OverCapacity, match="too many wrong tokens from 127"):  # which are limited
            for _ in range(50):
                with pytest.raises(Unauthorized):
                    connect(served.tcp, token=UNKNOWN)
        with pytest.raises(OverCapacity):
            connect(served.tcp, token=SECRET)


def test_wrong_proofs_are_limited_also_on_connections_opened_before(model: Any, tmp_path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    with serving(model, tmp_path, tokens=TOKENS) as served, contextlib.ExitStack() as opened:
        proofs: list[tuple[socket.socket, handshake.Exchange[bytes], bytes]] = []
        for _ in range(30):
            sock = transport.open_connection(Address.parse(served.tcp), None, PATIENCE_S)
            opened.callback(sock.close)
            exchange = handshake.introduce(PROTOCOL, UNKNOWN.encode(), peer="")
            framing.send(sock, next(exchange))
            proofs.append((sock, exchange, exchange.send(framing.receive(sock, 4096, deadline))))
        refused: list[type[Exception]] = []
        for sock, exchange, proof in proofs:
            framing.send(sock, proof)
            with pytest.raises((Unauthorized, OverCapacity)) as caught:
                exchange.send(framing.receive(sock, 4096, deadline))
            refused.append(caught.type)
        assert refused[-1] is OverCapacity and 20 <= refused.count(Unauthorized) < 25


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of the executor, and of its clients."""
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return server, client


def test_tls(served: Serving, model: Any, tmp_path: Path) -> None:
    server, client = contexts()
    with serving(model, tmp_path, tls=server, tokens=TOKENS) as secure:
        ask(secure.tcp, token=SECRET, tls=client)
        ask(secure.unix, token=SECRET)  # on one machine there is no network to protect
        for address, tls, reason in (
            (secure.tcp, contexts()[1], "no TLS connection"),
            (secure.tcp, None, "require TLS"),
            (served.tcp, client, "no TLS connection"),
        ):
            with pytest.raises(Disconnected, match=reason):
                connect(address, token=SECRET, patience_s=5.0, tls=tls)
        ask(secure.tcp, token=SECRET, tls=client)


# -- addresses and Unix sockets ---------------------------------------------------------------------------------------


@pytest.fixture
def at(tmp_path: Path) -> Address:
    return Address.parse(f"unix:{tmp_path / 'base.sock'}")


def listens(address: Address) -> bool:
    try:
        transport.open_connection(address, None, 1.0).close()
    except OSError:
        return False
    return True


def test_addresses_that_cannot_be_used(tmp_path: Path, at: Address, model: Any) -> None:
    with pytest.raises(BadConfig, match="needs the address"):
        connect()
    for address in ("nowhere", "host:x", "host:99999", "unix:", ":5"):
        with pytest.raises(BadConfig, match=r"write .*unix:PATH"):
            connect(address)
    with pytest.raises(BadConfig, match=r"'127\.0\.0\.1:7' is given twice"):
        secured(["127.0.0.1:7", f"unix:{tmp_path}/one", "127.0.0.1:7"], has_tokens=False)
    with serving(model, tmp_path) as served, pytest.raises(BadConfig, match="another process listens there"):
        transport.listen(Address.parse(served.unix))
    assert not os.path.exists(served.unix.removeprefix("unix:")), "the socket was left"
    Path(at.path).write_text("mine")
    with pytest.raises(BadConfig, match="there is another file"):
        transport.listen(at)
    assert Path(at.path).read_text() == "mine"


def test_of_two_servers_that_find_a_stale_socket_one_listens(at: Address) -> None:
    for _ in range(100):
        with socket.socket(socket.AF_UNIX) as dead:  # of a process that was killed
            dead.bind(at.path)
        both = threading.Barrier(2)
        listening: list[socket.socket] = []

        def start(both: threading.Barrier = both, listening: list[socket.socket] = listening) -> None:
            both.wait()
            try:
                listening.append(transport.listen(at))
            except BadConfig as error:
                assert "another process listens there" in str(error)

        threads = [threading.Thread(target=start) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(listening) == 1 and listens(at)
        transport.close_listener(listening[0])
        assert not os.path.exists(at.path)


def test_a_server_that_stops_leaves_its_successors_socket(at: Address) -> None:
    former = transport.listen(at)
    os.unlink(at.path)  # as by an operator
    successor = transport.listen(at)
    transport.close_listener(former)
    assert listens(at)
    transport.close_listener(successor)
    assert not os.path.exists(at.path)


def test_a_server_with_a_full_backlog_is_reported_at_once(at: Address) -> None:
    with socket.socket(socket.AF_UNIX) as busy, contextlib.ExitStack() as waiting:
        busy.bind(at.path)
        busy.listen(0)
        for _ in range(3):
            one = waiting.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            one.connect_ex(at.path)
        with pytest.raises(BadConfig, match="another process listens there"):
            transport.listen(at)
    assert os.path.exists(at.path)
