"""The client against a running server: answers, streams, errors, many threads, lost connections."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import vlora.client
from tests.server.running import Running, png, running_server
from tests.server.scripted import write_adapter
from vlora.client import Answer, AsyncClient, Client
from vlora.client.calls import Image
from vlora.client.values import DEFAULT_HOST, DEFAULT_PORT
from vlora.config import ServerConfig
from vlora.errors import (
    Aborted,
    BadAdapter,
    BadImage,
    BadRequest,
    DeadlineMissed,
    DeadlineUnreachable,
    Disconnected,
    TooLarge,
    UnknownAdapter,
    UnknownHead,
    VLoraError,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(max_image_bytes=100_000, max_message_bytes=1_000_000) as running:
        yield running


def idle(server: Running) -> bool:
    deadline = time.monotonic() + 5
    while server.engine.engine.running and time.monotonic() < deadline:
        time.sleep(0.01)
    return not server.engine.engine.running


def test_loads_no_model_libraries_and_takes_little_time() -> None:
    code = (
        "import sys, vlora.client; heavy = {'torch', 'numpy', 'transformers', 'PIL', 'cv2', 'zmq'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(vlora.client.__file__).parents[2])


def test_public_names_and_defaults() -> None:
    assert vlora.client.__all__ == sorted(vlora.client.__all__)
    assert (ServerConfig().host, ServerConfig().rpyc_port) == (DEFAULT_HOST, DEFAULT_PORT)


def test_generate_accepts_bytes_and_paths(client: Client, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    images: list[Image] = [png(), tmp_path / "a.png", str(tmp_path / "a.png"), bytearray(png()), memoryview(png())]
    answer = client.generate("say:fünf Bilder", images)
    assert (answer.text, answer.finish_reason) == ("fünf Bilder", "stop")
    assert answer.num_prompt_tokens == 21 and answer.timings.latency_s > 0 and answer.total_s > 0
    assert client.generate("forever", max_tokens=4).finish_reason == "length"
    assert client.generate("say:a.b", stop=".").text == client.generate("say:a.b", stop=["."]).text == "a"


def test_stream_yields_pieces_and_then_the_answer(client: Client) -> None:
    stream = client.stream("say:" + "word " * 20)
    pieces = list(stream)
    assert len(pieces) > 5 and "".join(pieces) == "word " * 20
    assert stream.answer is not None and stream.answer.text == "word " * 20


def test_a_complete_stream_counts_as_answered() -> None:
    with running_server({"cam": {}}) as server, Client(port=server.port) as client:
        assert "".join(client.stream("say:x", adapter="cam")) == "x"
        metrics = server.front_end.metrics.render(None).decode()
    assert 'vlora_requests_total{adapter="cam",outcome="ok"} 1.0' in metrics
    assert 'vlora_requests_total{adapter="cam",outcome="cancelled"} 0.0' in metrics


@pytest.mark.parametrize("leave", ["close", "with", "drop", "disconnect"])
def test_leaving_a_stream_cancels_its_request(server: Running, leave: str) -> None:
    client = Client(port=server.port)
    stream = client.stream("forever", max_tokens=90_000)
    assert next(stream).startswith("x")
    assert server.engine.engine.running
    if leave == "close":
        stream.close()
    elif leave == "with":
        with stream:
            pass
    elif leave == "drop":
        del stream
    else:
        client.close()
    assert idle(server)
    client.close()


def test_answers_of_every_task_reach_clients_and_streams(client: Client, tmp_path: Path) -> None:
    heads = {"binary": 1, "counting": 1, "multi_label": 1, "regression": 1, "detection": 1}
    client.load_adapter("tasks", write_adapter(tmp_path / "tasks", heads))
    answers = {head: client.ask_head([png(255, (80, 40))], "tasks", head) for head in heads}
    assert {head: answer.task for head, answer in answers.items()} == {head: head for head in heads}
    assert answers["binary"].label_id == 1 and answers["counting"].count == 1 and answers["multi_label"].chosen == (1,)
    assert answers["regression"].values == (1.0, 1.0) and answers["regression"].deviations == (0.1, 0.2)
    (box,) = answers["detection"].boxes
    assert (box.label, box.left, box.top, box.right, box.bottom) == ("bright", 0, 10, 40, 40)
    with client.open_stream(adapter="tasks", head="detection") as stream:
        stream.send(png(255, (20, 20)))
        stream.end()
        (result,) = stream
    assert result.answer is not None and [box.right for box in result.answer.boxes] == [10]
    client.unload_adapter("tasks")


def test_heads_and_adapters(client: Client, tmp_path: Path) -> None:
    status = client.load_adapter("cam", write_adapter(tmp_path / "cam", {"night": 1}))
    assert status.name == "cam" and [each.name for each in client.adapters()] == ["cam"]
    result = client.ask_head([png(10)], "cam", "night")
    assert (result.label, result.labels) == ("dark", ("dark", "bright")) and 0.9 < result.confidence <= 1
    assert client.generate("say:x", adapter="cam").adapter == "cam"
    assert client.stats().num_finished > 0
    both = client.ask_heads([png(10)], [("cam", "night"), ("cam", "day")])
    assert both[0].answer is not None and both[0].answer.label == "dark" and both[0].error is None
    assert both[1].error is not None and both[1].error.code == "unknown_head"
    with pytest.raises(UnknownHead, match="its heads: night"):
        client.ask_head([png()], "cam", "day")
    with pytest.raises(BadAdapter, match="no adapter_config"):
        client.load_adapter("bad", tmp_path)
    client.unload_adapter("cam")
    with pytest.raises(UnknownAdapter):
        client.unload_adapter("cam")


def test_errors_are_returned_as_typed_errors(client: Client) -> None:
    with pytest.raises(BadRequest, match="the prompt is empty"):
        client.generate("")
    with pytest.raises(BadImage, match="image 1"):
        client.generate("say:x", [b"broken"])
    with pytest.raises(BadImage, match=r"cannot read image 'nowhere.png': No such file"):
        client.generate("say:x", ["nowhere.png"])
    with pytest.raises(TooLarge, match="image 1 has 100001 bytes"):
        client.generate("say:x", [b"x" * 100_001])
    with pytest.raises(TooLarge, match="1200000 bytes of images; this server takes at most 9"):
        client.generate("say:x", [b"x" * 100_000] * 12)
    with pytest.raises(BadRequest, match="max_tokens is -1"):
        client.generate("say:x", max_tokens=-1)
    with pytest.raises(BadRequest, match="unknown sampling option 'max_token'; known: max_tokens"):
        client.generate("say:x", max_token=1)
    with pytest.raises(BadRequest, match="temperature is 'hot'; it must be a number"):
        client.generate("say:x", temperature="hot")
    with pytest.raises(BadRequest, match=r"the text cannot be sent: 'utf-8' codec"):
        client.generate("an unpaired surrogate: \ud800")
    with pytest.raises(BadRequest, match=r"refused the call 'generate': only values can be sent: .* tuples of them$"):
        client.generate(["a", "list"])  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="question is 7; it must be a string"):
        client.generate(7)  # type: ignore[arg-type]
    with pytest.raises(VLoraError, match=r"internal server error \(ValueError: tripped"):
        client.generate("trip")
    with pytest.raises(UnknownAdapter):
        next(client.stream("say:x", adapter="nobody"))
    assert client.generate("say:still here").text == "still here"


def test_many_threads_share_one_client(client: Client) -> None:
    def ask(i: int) -> str:
        if i % 3 == 0:
            return "".join(client.stream(f"say:thread {i}"))
        if i % 7 == 0:
            with pytest.raises(BadImage):
                client.generate("say:x", [b"broken"])
        return client.generate(f"say:thread {i}", [png(i)]).text

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(ask, range(64))) == [f"thread {i}" for i in range(64)]


def test_requests_of_one_client_run_concurrently(server: Running, client: Client) -> None:
    slow = [client.stream("forever", max_tokens=90_000) for _ in range(3)]
    for stream in slow:
        assert next(stream).startswith("x")
    assert client.generate("say:quick").text == "quick"
    assert len(server.engine.engine.running) == 3
    for stream in slow:
        stream.close()
    assert idle(server)


def test_service_levels_reach_the_engine(server: Running, client: Client, tmp_path: Path) -> None:
    client.load_adapter("levels", write_adapter(tmp_path, {"overloaded": 1}))
    with pytest.raises(DeadlineUnreachable, match=r"latency 9\.0 ttft 0\.5 -3"):
        client.generate("overloaded", max_latency_s=9, max_ttft_s=0.5, priority=-3)
    with pytest.raises(DeadlineMissed, match=r"latency None ttft 0\.5 \+10"):
        list(client.stream("overloaded", max_ttft_s=0.5, priority=10))
    with pytest.raises(DeadlineUnreachable, match=r"latency 2\.0 ttft None \+1"):
        client.ask_head([png()], "levels", "overloaded", max_latency_s=2.0, priority=1)
    with client.open_stream(adapter="levels", head="overloaded", priority=4) as stream:
        stream.send(png())
        result = next(iter(stream))
        assert result.error is not None and result.error.code == "deadline_unreachable"
        assert result.error.message == "latency None ttft None +4"
    with pytest.raises(BadRequest, match="priority is 11"):
        client.generate("say:x", priority=11)

    async def ask() -> None:
        async with AsyncClient(port=server.port) as other:
            with pytest.raises(DeadlineUnreachable, match=r"latency None ttft 1\.5 \+2"):
                await other.generate("overloaded", max_ttft_s=1.5, priority=2)
            with pytest.raises(DeadlineUnreachable, match=r"latency 2\.0 ttft None -2"):
                await other.ask_head([png()], "levels", "overloaded", max_latency_s=2.0, priority=-2)

    asyncio.run(ask())
    client.unload_adapter("levels")


def test_a_client_that_times_out_cancels_its_request(server: Running) -> None:
    with Client(port=server.port, timeout_s=0.2) as client:
        with pytest.raises(DeadlineMissed, match=r"within 0\.2 s"):
            client.generate("never")
        assert idle(server)


def test_an_unloaded_adapter_aborts_its_requests(client: Client, tmp_path: Path) -> None:
    client.load_adapter("going", write_adapter(tmp_path / "going"))
    stream = client.stream("forever", adapter="going", max_tokens=90_000)
    next(stream)
    client.unload_adapter("going")
    with pytest.raises(Aborted, match="adapter 'going' was unloaded"):
        list(stream)


def test_an_adapter_unloaded_with_drain_lets_its_requests_finish(client: Client, tmp_path: Path) -> None:
    client.load_adapter("going", write_adapter(tmp_path / "going"))
    stream = client.stream("forever", adapter="going", max_tokens=50)
    first = next(stream)
    client.unload_adapter("going", drain=True)
    with pytest.raises(UnknownAdapter):
        client.generate("say:x", adapter="going")
    assert len(first + "".join(stream)) == 50


@pytest.mark.slow
def test_a_missing_or_lost_server_is_reported_and_a_new_one_found() -> None:
    with pytest.raises(Disconnected, match=r"cannot reach a server at 127.0.0.1:1: .*vlora serve"):
        Client(port=1).stats()
    with running_server() as first:
        client = Client(port=first.port)
        waiting: list[BaseException] = []

        def wait() -> None:
            try:
                client.generate("never")
            except VLoraError as error:
                waiting.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        while not first.engine.engine.running:
            time.sleep(0.01)
    thread.join(5)
    assert len(waiting) == 1 and isinstance(waiting[0], Disconnected | Aborted)
    with pytest.raises(Disconnected):
        client.stats()
    with running_server(port=first.port):
        assert client.stats().model == "scripted"
        client.close()


def test_asyncio_client(server: Running, tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncClient(port=server.port) as client:
            await client.load_adapter("cam", write_adapter(tmp_path / "cam", {"night": 1}))
            requests = [client.generate(f"say:task {i}") for i in range(30)]
            heads = [client.ask_head([png(5)], "cam", "night") for _ in range(5)]
            answers = await asyncio.gather(*requests)
            assert [answer.text for answer in answers] == [f"task {i}" for i in range(30)]
            assert {result.label for result in await asyncio.gather(*heads)} == {"dark"}
            *pieces, last = [part async for part in client.stream("say:streamed")]
            assert isinstance(last, Answer) and "".join(map(str, pieces)) == last.text == "streamed"
            with pytest.raises(UnknownAdapter):
                await client.generate("say:x", adapter="nobody")
            # Cancelling a task, or leaving a stream, cancels the request on the server.
            task = asyncio.create_task(client.generate("never"))
            while not server.engine.engine.running:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stream = client.stream("forever", max_tokens=90_000)
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            assert await asyncio.to_thread(idle, server)
            assert (await client.stats()).num_running == 0
            await client.unload_adapter("cam")
            assert await client.adapters() == ()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_asyncio_client_times_out() -> None:
    async def main(port: int) -> None:
        async with AsyncClient(port=port, timeout_s=0.2) as client:
            with pytest.raises(DeadlineMissed):
                await client.generate("never")

    with running_server() as server:
        asyncio.run(main(server.port))
        assert idle(server)


def _answering(data: bytes) -> tuple[socket.socket, int]:
    """A listener that sends the same bytes to every client and closes the connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                with peer:
                    peer.sendall(data)
                    peer.recv(1000)

    threading.Thread(target=answer, daemon=True).start()
    return listener, listener.getsockname()[1]


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        struct.pack("!LB", 5, 0) + b"\xff" * 5 + b"\n",  # an unknown message type
        struct.pack("!LB", 5, 1) + b"\xff" * 5 + b"\n",  # a message that does not decompress
        struct.pack("!LB", 0, 0) + b"\n",
    ],
)
def test_any_other_kind_of_server_is_reported(data: bytes) -> None:
    listener, port = _answering(data)
    with listener, Client(port=port) as client, pytest.raises(Disconnected, match="cannot reach a server"):
        client.stats()


def test_invalid_data_from_a_server_ends_the_connection(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    unheard: list[object] = []
    monkeypatch.setattr(threading, "excepthook", unheard.append)
    with socket.create_server(("127.0.0.1", 0)) as between:
        client = Client(port=between.getsockname()[1])
        asking = ThreadPoolExecutor(1).submit(client.generate, "never")
        near, _ = between.accept()
        far = socket.create_connection(("127.0.0.1", server.port))
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=_forward, args=(source, sink), daemon=True).start()
        while not server.engine.engine.running:
            time.sleep(0.01)
        near.sendall(struct.pack("!LB", 3, 0) + b"\xff" * 3 + b"\n")
        with pytest.raises(Disconnected):
            asking.result(5)
        for end in (near, far):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # close() alone ends no connection that a thread still reads from
            end.close()
    assert not unheard and idle(server)


def _forward(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def test_both_clients_have_the_same_calls_with_signatures_and_docstrings() -> None:
    calls = {name for name, value in vars(Client).items() if callable(value) and not name.startswith("_")}
    assert calls - {"connection"} == {name for name in vars(AsyncClient) if not name.startswith("_")}
    for name in calls - {"connection", "close"}:
        blocking, awaited = getattr(Client, name), getattr(AsyncClient, name)
        signature = inspect.signature(blocking)
        assert next(iter(signature.parameters)) == "self" and "Call[" not in signature.return_annotation
        assert signature.parameters == inspect.signature(awaited).parameters
        assert blocking.__doc__ and awaited.__doc__
        assert inspect.iscoroutinefunction(awaited) or (name == "stream" and inspect.isasyncgenfunction(awaited))
