"""The bench of a running server: its load, its statistics, its parsing of streams, its check of answers, and a whole
run.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import json
import statistics
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlora.bench import serve
from vlora.bench.dummy import small_served_config
from vlora.bench.harness import measured
from vlora.bench.serve import (
    CASES,
    NEAR_TIE,
    check_answers,
    compare,
    own_server,
    serving,
)
from vlora.bench.serve.baseline import Baseline, prepare
from vlora.bench.serve.load import (
    LoadRun,
    ObservedAnswer,
    WorkloadRequest,
    arrivals,
    drive,
    row,
    workload_requests,
)
from vlora.bench.serve.model_folder import ModelFiles, write_model_files
from vlora.bench.serve.surfaces import ChatCompletions, EventReader
from vlora.bench.workload import Workload
from vlora.errors import BadConfig
from vlora.models.processing import InputProcessor
from vlora.simulator.measures import percentile

TINY = Workload(requests=3, concurrency=3, adapters=2, answer_tokens=6, prompt_tokens=48, picture_width=56)
TINY = dataclasses.replace(TINY, picture_height=56)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return write_model_files(small_served_config(), tmp_path_factory.mktemp("served"), TINY.adapters)


# -- the workload -----------------------------------------------------------------------------------------------------


def adapters_of(count: int, **settings: Any) -> collections.Counter[int | None]:
    workload = Workload(pictures=0, prompt_tokens=20, **settings)
    return collections.Counter(
        request.adapter for request in itertools.islice(workload_requests(workload, adapted=True), count)
    )


def test_popularity_of_adapters() -> None:
    assert adapters_of(400) == {0: 100, 1: 100, 2: 100, 3: 100}
    zipf = adapters_of(4000, popularity="zipf")
    assert [zipf[i] / 4000 for i in range(4)] == pytest.approx([0.48, 0.24, 0.16, 0.12], abs=0.02)
    hottest = adapters_of(4000, popularity="hottest", skew=0.7)
    assert [hottest[i] / 4000 for i in range(4)] == pytest.approx([0.7, 0.1, 0.1, 0.1], abs=0.02)


def test_requests_are_reproducible_and_their_pictures_differ() -> None:
    workload = dataclasses.replace(TINY, pictures=2, prompt_tokens=64)
    first, again = (list(itertools.islice(workload_requests(workload, adapted=True), 5)) for _ in range(2))
    assert first == again
    other = itertools.islice(workload_requests(dataclasses.replace(workload, seed=1), adapted=True), 5)
    pictures = [picture for request in (*first, *other) for picture in request.pictures]
    assert len(set(pictures)) == len(pictures) == 20
    base = list(itertools.islice(workload_requests(workload, adapted=False), 5))
    assert [request._replace(adapter=None) for request in first] == base


@pytest.mark.parametrize(
    ("pictures", "width", "height", "tokens"),
    [(0, 224, 224, 20), (1, 224, 224, 256), (2, 112, 224, 100), (1, 420, 84, 90)],
)
def test_prompts_have_the_configured_length(
    files: ModelFiles, pictures: int, width: int, height: int, tokens: int
) -> None:
    workload = Workload(pictures=pictures, picture_width=width, picture_height=height, prompt_tokens=tokens)
    processor = InputProcessor.from_pretrained(files.model)
    prepared = prepare(processor, next(workload_requests(workload, adapted=False)))
    assert len(prepared.prompt_ids) == tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_tokens": 64}, "prompt_tokens is 64, of which pictures and template take 71; give at least 72"),
        ({"requests": None}, "either a number of requests or a duration"),
        ({"duration_s": 3.0}, "either a number of requests or a duration"),
        ({"rate": 0.0}, "rate is 0.0"),
        ({"adapters": 0}, "adapters is 0"),
        ({"popularity": "alike"}, "choose one of uniform, zipf, hottest"),
        ({"skew": 1.5}, "skew is 1.5"),
    ],
)
def test_invalid_workloads_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        Workload(**settings)


def test_arrivals_are_poisson() -> None:
    times = list(itertools.islice(arrivals(Workload(rate=5.0)), 4000))
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(1, abs=0.05)


# -- the load ---------------------------------------------------------------------------------------------------------


class Counting:
    """A server that counts requests. fails: the index of the request that fails."""

    def __init__(self, seconds: float = 0.0, fails: int | None = None) -> None:
        self.seconds, self.fails = seconds, fails
        self.seen: list[WorkloadRequest] = []
        self.under_way = self.most = 0

    async def __call__(self, request: WorkloadRequest, answer: ObservedAnswer) -> None:
        self.seen.append(request)
        number = len(self.seen)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(self.seconds)
        self.under_way -= 1
        if number == self.fails:
            raise ValueError("broken")
        answer.answer_tokens = request.answer_tokens


TEXT = Workload(pictures=0, prompt_tokens=20, requests=20, concurrency=3)


def test_a_closed_loop_keeps_the_number_of_outstanding_requests() -> None:
    server = Counting(0.001, fails=7)
    run = asyncio.run(drive(TEXT, workload_requests(TEXT, adapted=True), server))
    assert server.most == 3
    assert server.seen == list(itertools.islice(workload_requests(TEXT, adapted=True), 20))
    assert run.errors == ["ValueError: broken"] and len(run.completed) == 19
    assert run.answer_tokens == 19 * 32
    assert all(answer.end_s >= answer.due_s for answer in run.answers)


def test_a_closed_loop_ends_with_its_duration() -> None:
    timed = dataclasses.replace(TEXT, requests=None, duration_s=0.2)
    run = asyncio.run(drive(timed, workload_requests(timed, adapted=True), Counting(0.01)))
    assert len(run.answers) >= 3 and run.seconds > 0.19  # the clock of timers is coarser


def test_an_open_loop_does_not_wait_and_measures_from_due_times() -> None:
    fast = dataclasses.replace(TEXT, rate=1000.0)
    server = Counting(0.3)
    run = asyncio.run(drive(fast, workload_requests(fast, adapted=True), server))
    assert server.most == 20 > fast.concurrency
    due = [answer.due_s - run.started_s for answer in run.answers]
    expected = list(itertools.islice(arrivals(fast), 20))
    assert due == pytest.approx([at - expected[0] for at in expected], abs=1e-6)
    timed = dataclasses.replace(fast, requests=None, duration_s=0.05)
    count = sum(at <= 0.05 for at in itertools.islice(arrivals(timed), 1000))
    assert len(asyncio.run(drive(timed, workload_requests(timed, adapted=True), Counting())).answers) == count


# -- figures ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.floats(0.1, 100))
def test_percentiles_are_the_nearest_rank_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent, method="inverted_cdf"))


def test_statistics_of_a_run() -> None:
    first = ObservedAnswer(0.0, [1.0, 1.5, 1.75], 2.0, "a b c", prompt_tokens=10, answer_tokens=3)
    second = ObservedAnswer(1.0, [1.5], 4.0, "a", prompt_tokens=10, answer_tokens=1)
    failed = ObservedAnswer(1.0, [1.1], 9.0, "a", prompt_tokens=10, answer_tokens=1, error="ValueError: broken")
    found = row([LoadRun([first, second, failed], 0.0, 4.0)], case="adapters")
    assert found["case"] == "adapters" and (found["runs"], found["requests"], found["errors"]) == (1, 3, 1)
    assert found["answer tokens/s"] == 1.0 and found["all tokens/s"] == 6.0
    assert [found[f"TTFT p{p} s"] for p in (50, 95, 99)] == [0.5, 1.0, 1.0]
    assert [found[f"ITL p{p} s"] for p in (50, 95, 99)] == [0.25, 0.5, 0.5]
    assert [found[f"latency p{p} s"] for p in (50, 95, 99)] == [2.0, 3.0, 3.0]
    assert row([LoadRun([failed], 0.0, 4.0)])["TTFT p50 s"] is None


# -- streams ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 40), max_size=10))
def test_events_are_complete_for_any_split_of_their_bytes(cuts: list[int]) -> None:
    events = [{"text": "a\nb"}, {"text": "\u00fc"}, {}]
    body = b": a comment\n\n" + b"".join(b"data: %b\r\n\r\n" % json.dumps(each).encode() for each in events)
    body += b"data:[DONE]\n\n"
    reader = EventReader()
    found: list[dict[str, Any]] = []
    for end in sorted({*(min(cut, len(body)) for cut in itertools.accumulate(cuts)), len(body)}):
        found += reader.new_events(body[:end])
        assert reader.done == (b"[DONE]\n" in body[:end])
    assert found == events


def chunk(text: str) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"delta": {"content": text}}]}).encode()


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}\n\n'
END = b"data: [DONE]\n\n"


@asynccontextmanager
async def answering(*answers: tuple[int, list[bytes]]) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server with these answers (status, pieces of the body), and the requests it receives."""
    left, requests = iter(answers), []

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            length = int(next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))[15:])
            requests.append(head + await reader.readexactly(length))
            status, pieces = next(left)
            writer.write(b"HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n" % status)
            for piece in pieces:
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
                await asyncio.sleep(0.01)
            writer.write(b"0\r\n\r\n")

    async def serve_quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve_one(reader, writer)
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(serve_quietly, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", requests


def test_streamed_answers_over_http() -> None:
    whole = [chunk(""), chunk("a "), chunk("b"), USAGE, END]

    async def main() -> None:
        async with answering((200, whole), (200, whole)) as (url, requests):
            send = ChatCompletions(url, "base", ["one", "two"], token="secret-of-the-test")
            for adapter in (1, None):
                answer = ObservedAnswer(0.0)
                await send(WorkloadRequest(adapter, "what ?", (b"jpeg",), 5), answer)
                assert (answer.text, answer.prompt_tokens, answer.answer_tokens) == ("a b", 7, 2)
                assert len(answer.pieces_s) == 2 and answer.pieces_s[0] < answer.pieces_s[1]
            await send.close()
        heads, bodies = zip(*(each.split(b"\r\n\r\n", 1) for each in requests), strict=True)
        assert all(b"Bearer secret-of-the-test" in head and b"/v1/chat/completions" in head for head in heads)
        assert [json.loads(body)["model"] for body in bodies] == ["two", "base"]
        content = json.loads(bodies[0])["messages"][0]["content"]
        assert [part["type"] for part in content] == ["image_url", "text"] and json.loads(bodies[0])["max_tokens"] == 5

    asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "pieces", "message"),
    [
        (429, [b'{"error": "full"}'], "status 429.*full"),
        (200, [chunk("a"), b'data: {"error": {"code": "engine_dead"}}\n\n', END], "engine_dead"),
        (200, [chunk("a"), USAGE], "without .DONE. after 1 pieces"),
    ],
)
def test_broken_answers_are_errors(status: int, pieces: list[bytes], message: str) -> None:
    async def main() -> LoadRun:
        async with answering((status, pieces)) as (url, _):
            one = dataclasses.replace(TEXT, requests=1)
            return await drive(one, workload_requests(one, adapted=False), ChatCompletions(url, "base", []))

    with pytest.raises(ValueError, match=message):
        raise ValueError(*asyncio.run(main()).errors)


def test_invalid_urls_are_rejected() -> None:
    with pytest.raises(BadConfig, match="url is 'localhost:8000'"):
        ChatCompletions("localhost:8000", "base", [])


def test_another_server_by_its_url() -> None:
    """No baseline, model names unchanged; failures are counted."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    whole = (200, [chunk("a"), USAGE, END])
    server = answering(whole, whole, (500, [b"no"]))
    url, requests = asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
    settings: dict[str, Any] = {"requests": 2, "concurrency": 1, "pictures": 0, "prompt_tokens": 20, "rounds": 1}
    cases = ["one", "adapters"]
    report = measured(serve.BENCH, False, url=url, model="llava", adapter_names=["signs"], cases=cases, **settings)
    loop.call_soon_threadsafe(loop.stop)
    models = [json.loads(each.split(b"\r\n\r\n", 1)[1])["model"] for each in requests]
    assert models == ["llava", "signs", "signs"]
    counts = [(found["case"], found["requests"], found["errors"]) for found in report.rows]
    assert counts == [("one", 1, 0), ("adapters", 2, 1)]
    assert [goal.holds for goal in report.goals] == [False]
    with pytest.raises(BadConfig, match="needs the name of the base model"):
        measured(serve.BENCH, False, url=url)
    with pytest.raises(BadConfig, match="give its --url"):
        measured(serve.BENCH, False, model="llava")


# -- answers ----------------------------------------------------------------------------------------------------------


def test_answers_are_compared_up_to_a_tie() -> None:
    words, sure = ["a", "", "b", "c"], [1.0, 1.0, 1.0, 1.0]
    assert compare(words, sure, "a b c") == (3, None, False)
    assert "word 1 is 'x' instead of 'b'" in (compare(words, sure, "a x c").wrong or "")
    assert "word 2 is the end" in (compare(words, sure, "a b").wrong or "")
    assert "4 words instead of 3" in (compare(words, sure, "a b c d").wrong or "")
    assert compare(words, [1.0, 1.0, NEAR_TIE / 2, 1.0], "a x y z") == (1, None, True)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_batch_of_the_baseline_equals_single_requests(files: ModelFiles) -> None:
    """Prompts of several lengths, padded on the left; adapters and the base model in one batch."""
    baseline = Baseline.load(files.model, list(files.adapters.values()), "float32")
    processor = InputProcessor.from_pretrained(files.model)
    requests = [
        prepare(
            processor,
            next(workload_requests(dataclasses.replace(TINY, prompt_tokens=length, seed=length), adapted=False)),
        )
        for length in (20, 48, 31)
    ]
    requests = [each._replace(adapter=adapter) for each, adapter in zip(requests, (1, None, 0), strict=True)]
    alone = [baseline.greedy(each).token_ids for each in requests]
    assert baseline.generate(requests).sequences.tolist() == alone
    run = baseline.run(requests, batch=2)
    assert run.answer_tokens == 18 and run.prompt_tokens == 99 and len({answer.end_s for answer in run.answers}) == 3
    others = [baseline.greedy(requests[0]._replace(adapter=adapter)).token_ids for adapter in (None, 0)]
    assert alone[0] not in others and len(set(alone[0])) > 1


@pytest.fixture(scope="module")
def server(files: ModelFiles) -> Iterator[Any]:
    with serving(files, "float32", 1) as found:
        yield found


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("surface", ["http", "rpyc"])
def test_answers_of_another_adapter_are_detected_as_wrong(files: ModelFiles, server: Any, surface: str) -> None:
    paths, connect = list(files.adapters.values()), own_server(server, surface, files)
    found = check_answers(connect, files, TINY, Baseline.load(files.model, paths, "float32"))
    assert found["wrong"] == [] and found["ties"] < found["answers"] == 12
    assert found["distinct"] >= 9 and found["words"] > 50
    swapped = check_answers(connect, files, TINY, Baseline.load(files.model, paths[::-1], "float32"))
    assert len(swapped["wrong"]) >= 4


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_complete_quick_run() -> None:
    settings = dataclasses.asdict(TINY) | {"answer_tokens": 4}
    del settings["duration_s"], settings["rate"]
    report = measured(serve.BENCH, True, rounds=1, threads=[1], dtype="float32", **settings)
    assert all(goal.holds for goal in report.goals), report.as_dict()
    names = [(found["case"], found["by"], found["dtype"]) for found in report.rows]
    assert names == [
        (case.name, *by)
        for case in CASES.values()
        for by in (("vlora http", "float32"), (case.baseline, "float32"), (case.baseline, "bfloat16"))
    ]
    for found in report.rows:
        count = 1 if found["case"] == "one" else 3
        assert (found["requests"], found["errors"]) == (count, 0)
        assert (found["ours / it"] is None) == found["by"].startswith("vlora")
        assert found["all tokens/s"] == pytest.approx(found["answer tokens/s"] * 52 / 4)
    assert len({tuple(found) for found in report.rows}) == 1
