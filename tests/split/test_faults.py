"""Faults of clients and executors: others go on, one clear line each, nothing lost."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.split.running import Serving, serving, tiny
from tests.split.test_equality import WITHIN, apart, losses
from vlora.errors import BadConfig, BadRequest, Disconnected, OverCapacity
from vlora.split import Base, connect, transport
from vlora.split.addresses import Address, secured
from vlora.split.batching import Call, CallQueue
from vlora.split.connection import BaseConnection
from vlora.split.frames import (
    CALL_BYTES,
    DTYPES,
    MAX_WELCOME_BYTES,
    PROTOCOL,
    CallHead,
    Challenge,
    Direction,
    Hello,
    Proof,
    Welcome,
)
from vlora.split.greeting import Greeter, Limits

ROOT = Path(__file__).parents[2]
STALL_S = 0.5


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("qwen2_vl")


@pytest.fixture(scope="module")
def plain(model: Any) -> list[float]:
    return losses("lora", "qwen2_vl", copy.deepcopy(model))


@pytest.fixture
def served(model: Any, tmp_path: Path) -> Iterator[Serving]:
    with serving(model, tmp_path, limits=Limits(stall_s=STALL_S, greeting_s=STALL_S)) as found:
        yield found


@pytest.fixture
def steady(served: Serving, model: Any, plain: list[float]) -> Iterator[None]:
    """A client that trains during the test, with its losses checked after it."""
    found: list[float] = []

    def train() -> None:
        with connect(served.unix) as base:
            found.extend(losses("lora", "qwen2_vl", base.wrap(copy.deepcopy(model))))

    thread = threading.Thread(target=train)
    thread.start()
    yield
    thread.join()
    assert apart(found, plain) < WITHIN


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def admitted(address: str) -> tuple[socket.socket, Welcome]:
    """A raw connection over TCP after its greeting."""
    sock = transport.open_connection(Address.parse(address), None, 5.0)
    deadline = time.monotonic() + 5
    transport.send_message(sock, Hello(PROTOCOL, b"n" * 32, "", "raw", False))
    transport.receive_message(sock, Challenge, 4096, deadline)
    transport.send_message(sock, Proof(b""))
    welcome = transport.receive_message(sock, Welcome, MAX_WELCOME_BYTES, deadline)
    sock.settimeout(5.0)
    return sock, welcome


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


def test_nonsense_calls_end_their_connections_only(
    served: Serving, steady: None, caplog: pytest.LogCaptureFixture
) -> None:
    for wrong, (head, reason) in WRONG.items():
        caplog.clear()
        sock, _ = admitted(served.tcp)
        sock.sendall(head.pack() + bytes(min(head.num_bytes, 256)))
        answer = all_of(sock)
        assert reason in answer[16:].decode(), wrong
        until(lambda: lines(caplog))
        (line,) = lines(caplog)
        assert line.startswith("client 'raw' at 127.0.0.1: ") and reason in line


class Never(CallQueue[Any]):
    """No call is ever computed."""

    def next(self, now: float) -> Sequence[Call[Any]]:
        return ()

    def wait_s(self, now: float) -> float | None:
        return None


def test_a_second_call_before_the_answer_ends_the_connection(model: Any, tmp_path: Path) -> None:
    """The two calls arrive together, so that the first is in the queue, waiting, when the second is read."""
    with serving(model, tmp_path, queue=Never()) as served:
        sock, _ = admitted(served.tcp)
        sock.sendall(GOOD.pack() + bytes(256) + b"more")
        assert b"second call before the first" in all_of(sock)


def test_half_sent_calls_time_out(served: Serving, steady: None, caplog: pytest.LogCaptureFixture) -> None:
    for sent in (GOOD.pack()[:10], GOOD.pack() + bytes(100)):
        caplog.clear()
        sock, _ = admitted(served.tcp)
        with sock:
            sock.sendall(sent)
            assert sock.recv(1) == b""
        assert lines(caplog) == [
            f"client 'raw' at 127.0.0.1: a call or its reply was incomplete for {STALL_S:g} s; its connection is closed"
        ]


def test_a_half_sent_greeting_times_out(served: Serving, steady: None, caplog: pytest.LogCaptureFixture) -> None:
    for sent in (b"", b"\x01", b"GET / HTTP/1.1\r\n\r\n", b"\x05\0\0\0hello"):
        with transport.open_connection(Address.parse(served.tcp), None, 5.0) as sock:
            sock.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
    until(lambda: len(lines(caplog)) == 4)
    assert all(line.startswith("127.0.0.1 was not admitted: ") for line in lines(caplog))


def test_silent_peers_of_one_listener_do_not_block_the_others(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(model, tmp_path) as served, contextlib.ExitStack() as silent:
        for _ in range(33):
            sock = silent.enter_context(transport.open_connection(Address.parse(served.tcp), None, 5.0))
        assert sock.recv(1) == b"", "one more than 32 was accepted"
        connect(served.unix, patience_s=5.0).close()
        with pytest.raises(Disconnected):
            connect(served.tcp, patience_s=5.0)
        silent.close()
        until(lambda: len(lines(caplog)) == 2 + 32)
    assert lines(caplog)[0] == "a connection was closed: 32 others are not authenticated yet"


def test_a_peer_that_is_gone_before_its_greeting_is_one_line(served: Serving, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()  # with a reset
        sock, _ = listener.accept()
        greeter = Greeter(served.executor, Limits(), places=served.server.places)
        until(lambda: select.select([sock], [], [], 0)[0])
        assert greeter.greet(sock) is None and sock.fileno() == -1
    (line,) = lines(caplog)
    assert line.startswith("a client over TCP was not admitted: ")


def test_a_client_that_does_not_read_its_reply_times_out(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(model, tmp_path, limits=Limits(stall_s=STALL_S, max_rows=2**15)) as served:
        sock, welcome = admitted(served.tcp)
        index, group = next((i, g) for i, g in enumerate(welcome.groups) if g[0].name == "lm_head")
        rows = 2**15  # a reply of 26 MB, more than the kernel's buffers
        with sock:
            size = rows * group[0].d_in * 4
            sock.sendall(CallHead(1, Direction.FORWARD, 0, index, 1, rows, group[0].d_in, size).pack() + bytes(size))
            until(lambda: lines(caplog))
            (line,) = lines(caplog)
            assert "a call or its reply was incomplete" in line and served.server.num_clients == 0


def kill_during(direction: str) -> str:
    """A client process that ends at its 20th call of a direction, after it was sent."""
    return f"""
import os, sys
from vlora.split import connect
from vlora.split.batching import Call, CallQueue
from vlora.split.connection import BaseConnection
from vlora.split.frames import Direction
from tests.split.running import tiny
from tests.split.test_equality import losses
send, count = BaseConnection.send, 0
def dying(self, direction, *rest):
    global count
    send(self, direction, *rest)
    count += direction == Direction.{direction}
    if count == 20:
        os.kill(os.getpid(), 9)
BaseConnection.send = dying
with connect(sys.argv[1]) as base:
    losses("lora", "qwen2_vl", base.wrap(tiny("qwen2_vl")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["FORWARD", "BACKWARD"])
def test_a_client_killed_within_a_call(
    direction: str, served: Serving, steady: None, caplog: pytest.LogCaptureFixture
) -> None:
    done = subprocess.run([sys.executable, "-c", kill_during(direction), served.unix], cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL
    until(lambda: served.server.num_clients <= 1)
    until(lambda: lines(caplog))
    (line,) = lines(caplog)
    assert "during a call" in line or "the connection broke" in line


def test_a_client_that_closes_its_connection_during_a_call(served: Serving, steady: None) -> None:
    for sent in (GOOD.pack(), GOOD.pack() + bytes(256)):
        sock, _ = admitted(served.tcp)
        sock.sendall(sent)
        sock.close()
    until(lambda: served.server.num_clients <= 1)


def test_rows_without_numbers_stay_with_their_client(served: Serving, steady: None, model: Any) -> None:
    with connect(served.unix) as base:
        rows = torch.full((3, base.calls.groups[0][0].d_in), torch.nan)
        for _ in range(50):
            assert base.calls.call(Direction.FORWARD, 0, 1, [rows])[0].isnan().all()


def test_a_refused_call_is_one_line_at_the_client(served: Serving, steady: None) -> None:
    with connect(served.tcp) as base, pytest.raises(BadRequest, match="refused a call: a call has direction 7"):
        base.calls.call(7, 0, 1, [torch.zeros(1, 32)])  # type: ignore[arg-type]


def test_a_product_that_fails_refuses_its_call_only(
    served: Serving, steady: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compute = served.executor.compute

    def without_memory(direction: int, group: int, mask: int, inputs: Any, out: Any = None) -> Any:
        if len(inputs[0]) == 77:
            raise RuntimeError("not enough memory: you tried to allocate\nmore")
        return compute(direction, group, mask, inputs, out)

    monkeypatch.setattr(served.executor, "compute", without_memory)
    with connect(served.tcp) as base, pytest.raises(BadRequest, match="the product failed: not enough memory"):
        base.calls.call(Direction.FORWARD, 0, 1, [torch.zeros(77, 32)])
    until(lambda: lines(caplog))
    assert len(lines(caplog)) == 1


def test_more_clients_than_allowed_are_refused(model: Any, tmp_path: Path) -> None:
    with (
        serving(model, tmp_path, limits=Limits(max_clients=2)) as served,
        connect(served.unix),
        connect(served.tcp),
        pytest.raises(OverCapacity, match="has 2 clients, its maximum"),
    ):
        connect(served.unix)


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
    address = f"unix:{tmp_path}/base.sock"
    with base_process(checkpoint, address) as first, connect(address) as base, contextlib.ExitStack() as later:
        wrapped = base.wrap(copy.deepcopy(model))
        calls = 0
        layer = wrapped.model.language_model.layers[2].mlp.down_proj

        def restart(*_: object) -> None:
            nonlocal calls
            calls += 1
            if calls == 5:
                first.kill()
                starting = threading.Thread(target=lambda: later.enter_context(base_process(checkpoint, address)))
                starting.start()
                later.callback(starting.join)

        layer.register_full_backward_pre_hook(restart)
        found = losses("lora", "qwen2_vl", wrapped)
        assert base.num_repeated >= 1
    assert apart(found, plain) < WITHIN


@pytest.mark.slow
def test_an_executor_without_free_descriptors_waits_for_some(checkpoint: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/base.sock"
    with base_process(checkpoint, address) as process, connect(address):
        open_files = len(os.listdir(f"/proc/{process.pid}/fd"))
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (open_files, hard))
        with transport.open_connection(Address.parse(address), None, 5.0) as waiting:
            time.sleep(0.2)
            before = cpu_seconds(process.pid)
            time.sleep(1.5)
            assert cpu_seconds(process.pid) - before < 0.5, "the server polls a connection that it cannot accept"
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (hard, hard))
            transport.send_message(waiting, Hello(PROTOCOL, b"n" * 32, "", "raw", False))
            transport.receive_message(waiting, Challenge, 4096, time.monotonic() + 5)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_executor_that_is_gone_is_one_line(model: Any, tmp_path: Path) -> None:
    with serving(model, tmp_path) as served:
        base = connect(served.tcp, patience_s=0.3)
        wrapped = base.wrap(copy.deepcopy(model))
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(Disconnected, match=r"does not answer for 0.3 s .* restart it, and run the step again"):
        wrapped(input_ids=ids, mm_token_type_ids=torch.zeros_like(ids))
    base.close()
    for address in (served.tcp, served.unix):
        with pytest.raises(Disconnected, match="start one with vlora base serve"):
            connect(address)


class DyingExecutor:
    """Admits clients, and closes the connection at each call. delay_s: before it does so."""

    def __init__(self, welcome: Welcome, delay_s: float = 0.0) -> None:
        self.num_calls = 0
        self._welcome = welcome
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> DyingExecutor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            deadline = time.monotonic() + 5
            with sock, contextlib.suppress(OSError):
                transport.receive_message(sock, Hello, 4096, deadline)
                transport.send_message(sock, Challenge(b"n" * 32, False))
                transport.receive_message(sock, Proof, 4096, deadline)
                transport.send_message(sock, self._welcome)
                transport.receive(sock, CALL_BYTES, deadline)
                self.num_calls += 1
                time.sleep(self._delay_s)


def test_a_call_that_ends_every_connection_is_given_up(served: Serving) -> None:
    sock, welcome = admitted(served.tcp)
    sock.close()
    with DyingExecutor(welcome) as dying, connect(dying.address, patience_s=30.0) as base:
        rows = torch.zeros(1, welcome.groups[0][0].d_in)
        with pytest.raises(Disconnected, match=r"failed 4 times during one call .* see its log") as failure:
            base.calls.call(Direction.FORWARD, 0, 1, [rows])
        assert dying.num_calls == 4 and base.num_repeated == 3 and "\n" not in str(failure.value)
    with DyingExecutor(welcome, delay_s=0.3) as slow, connect(slow.address, patience_s=0.5) as base:
        before = time.monotonic()
        with pytest.raises(Disconnected, match=r"does not answer for 0.5 s"):
            base.calls.call(Direction.FORWARD, 0, 1, [rows])
        assert 1 <= slow.num_calls <= 2 and time.monotonic() - before < 5


def test_a_closed_base_is_not_opened_again_by_a_call(served: Serving, model: Any) -> None:
    for address in (served.unix, served.tcp):
        base = connect(address)
        wrapped = base.wrap(copy.deepcopy(model))
        base.close()
        before = served.server.num_calls
        ids = torch.tensor([[5, 6, 7]])
        with pytest.raises(Disconnected, match="is closed; connect and wrap the model again"):
            wrapped(input_ids=ids, mm_token_type_ids=torch.zeros_like(ids))
        assert served.server.num_calls == before
    until(lambda: served.server.num_clients == 0)


def test_closing_ends_the_call_that_another_thread_waits_for(model: Any, tmp_path: Path) -> None:
    with serving(model, tmp_path, queue=Never()) as served:
        for address in (served.unix, served.tcp):
            base = connect(address)
            failures: list[Exception] = []

            def call(base: Base = base, failures: list[Exception] = failures) -> None:
                try:
                    base.calls.call(Direction.FORWARD, 0, 1, [torch.zeros(1, base.calls.groups[0][0].d_in)])
                except Disconnected as error:
                    failures.append(error)

            thread = threading.Thread(target=call)
            thread.start()
            time.sleep(0.1)  # the call is sent
            base.close()
            thread.join(5.0)
            assert not thread.is_alive() and "is closed" in str(failures)


def test_an_executor_that_comes_back_with_another_model(model: Any, tmp_path: Path) -> None:
    with serving(model, tmp_path) as served:
        base = connect(served.unix, patience_s=5.0)
        wrapped = base.wrap(copy.deepcopy(model))
    ids = torch.tensor([[5, 6, 7]])
    with serving(tiny("gpt2"), tmp_path), pytest.raises(BadConfig, match="another base model is served here now"):
        wrapped(input_ids=ids, mm_token_type_ids=torch.zeros_like(ids))
    base.close()


def test_addresses_that_cannot_be_used(tmp_path: Path, model: Any) -> None:
    for address in ("nowhere", "host:x", "host:99999", "unix:", ":5"):
        with pytest.raises(BadConfig, match=r"write .*unix:PATH"):
            connect(address)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadConfig, match=r"'127\.0\.0\.1:7' is given twice"):
        secured(["127.0.0.1:7", f"unix:{tmp_path}/one", "127.0.0.1:7"], has_tokens=False)
    with pytest.raises(BadConfig, match="another file"):
        transport.listen(Address.parse(f"unix:{tmp_path}/file"))
    with serving(model, tmp_path) as served, pytest.raises(BadConfig, match="another process listens there"):
        transport.listen(Address.parse(served.unix))
    assert not os.path.exists(served.unix.removeprefix("unix:")), "the socket was left"


def test_a_connection_is_used_by_one_call_at_a_time(served: Serving) -> None:
    connection = BaseConnection(served.unix)
    width = connection.groups[0][0].d_in
    expected = {
        value: connection.call(Direction.FORWARD, 0, 1, [torch.full((2, width), float(value))])[0] for value in range(4)
    }
    wrong: list[int] = []

    def call(value: int) -> None:
        for _ in range(50):
            if not torch.equal(
                connection.call(Direction.FORWARD, 0, 1, [torch.full((2, width), float(value))])[0], expected[value]
            ):
                wrong.append(value)

    threads = [threading.Thread(target=call, args=(value,)) for value in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    connection.close()
    assert not wrong
