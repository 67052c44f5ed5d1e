"""An answer that begins on one engine and continues on another is the answer of one engine, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from tests import embedded_cases
from tests.embedded_cases import config, scores_of, tokens_of, write_adapters
from tests.queued_executor import QueuedExecutor
from vlora.engine import LocalEngine
from vlora.engine.ipc.client import EngineClient
from vlora.errors import error_from_code
from vlora.types import Request, RequestOutput, seed_of

pytestmark = pytest.mark.slow

CUTS = (1, 8, 25, -1)
"""Tokens that the first engine computes; 8 fills the last block of the prompt of 20 and one more token."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def cases() -> dict[str, Request]:
    return embedded_cases.cases()


@pytest.fixture(scope="module")
def whole(folders: dict[str, str], cases: dict[str, Request]) -> dict[str, list[RequestOutput]]:
    """The answers of one engine."""
    return started(folders).run(cases.values())


@pytest.fixture(scope="module")
def second(folders: dict[str, str]) -> LocalEngine:
    """The engine on which answers continue."""
    return started(folders)


def started(folders: Mapping[str, str], **settings: Any) -> LocalEngine:
    local = LocalEngine(config(**settings))
    local.engine.register_adapters(folders)
    return local


def resumed(request: Request, tokens: Sequence[int], cut: int, **fields: Any) -> Request:
    """The request as a router sends it after `cut` tokens."""
    return replace(
        request,
        request_id=f"{request.request_id}#{cut}",
        answered=tuple(tokens[:cut]),
        sampling=replace(request.sampling, seed=seed_of(request.request_id, request.sampling)),
        **fields,
    )


def check(request: Request, found: Sequence[RequestOutput], want: Sequence[RequestOutput], cut: int) -> None:
    tokens = tokens_of(want)
    assert tokens_of(found) == tokens[cut:], request.request_id
    assert found[-1].finish_reason == want[-1].finish_reason
    assert [score.logprob for score in scores_of(found)] == pytest.approx(
        [score.logprob for score in scores_of(want)[cut:]], abs=1e-4
    )
    assert found[-1].timings is not None and found[-1].timings.num_completion_tokens == len(tokens)


def test_answers_continue_as_on_one_engine(
    cases: dict[str, Request], whole: dict[str, list[RequestOutput]], second: LocalEngine
) -> None:
    for cut in CUTS:
        sent = {}
        for name, case in cases.items():
            tokens = tokens_of(whole[name])
            sent[name] = resumed(case, tokens, min(cut, len(tokens) - 1))
        found = second.run(sent.values())
        for name, request in sent.items():
            check(request, found[request.request_id], whole[name], len(request.answered))


def test_without_its_seed_or_its_answer_a_draw_differs(
    cases: dict[str, Request], whole: dict[str, list[RequestOutput]], second: LocalEngine
) -> None:
    """Otherwise the comparison above would show nothing."""
    tokens = tokens_of(whole["drawn by id"])
    request = resumed(cases["drawn by id"], tokens, 20)
    unseeded = replace(request, request_id="a", sampling=replace(request.sampling, seed=None))
    as_prompt = replace(request, request_id="b", prompt_ids=request.prompt_ids + request.answered, answered=())
    found = second.run([unseeded, as_prompt])
    assert tokens_of(found["a"]) != tokens[20:]
    assert tokens_of(found["b"])[: len(tokens) - 20] != tokens[20:]


def test_a_resumed_answer_survives_a_preemption(
    folders: dict[str, str], cases: dict[str, Request], whole: dict[str, list[RequestOutput]]
) -> None:
    # A policy that measures costs may run the requests one adapter after the other, which needs no preemption.
    local = started(folders, arena_bytes=2 << 20, policy="unmerged_only")
    scheduler = local.engine.parts.scheduler
    names = ("greedy", "drawn", "adapted", "scored", "penalized", "choice 0", "choice 1", "choice 2")
    sent = {name: resumed(cases[name], tokens_of(whole[name]), 5) for name in names}
    found = local.run(sent.values())
    for name, request in sent.items():
        check(request, found[request.request_id], whole[name], 5)
    assert scheduler.stats("").num_preemptions > 0


def test_bounds_of_a_resumed_answer(
    cases: dict[str, Request], whole: dict[str, list[RequestOutput]], second: LocalEngine
) -> None:
    """Its first token has been answered, so only the bound on the whole answer is left."""
    tokens = tokens_of(whole["greedy"])
    kept = resumed(cases["greedy"], tokens, 3, max_ttft_s=1e-6, max_latency_s=60.0)
    late = resumed(cases["greedy"], tokens, 4, max_latency_s=1e-6)
    new = replace(cases["greedy"], request_id="new", max_ttft_s=1e-6)
    found = second.run([replace(cases["drawn"], request_id="busy"), kept, late, new])
    check(kept, found[kept.request_id], whole["greedy"], 3)
    error = found[late.request_id][-1].error
    assert error is not None and error.code == "deadline_missed"
    error = found["new"][-1].error
    assert error is not None and error.code == "deadline_unreachable"  # a first token that is not there yet


def test_a_head_is_read_again(folders: dict[str, str], second: LocalEngine) -> None:
    request = embedded_cases.head()
    want = started(folders).run([request])[request.request_id][-1]
    found = second.run([replace(request, request_id="head#2")])["head#2"][-1]
    assert want.head is not None and found.head is not None and found.head.label == want.head.label
    assert found.head.scores == pytest.approx(want.head.scores, abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"answered": (5, 100_000)}, "bad_request", "they contain token id 100000"),
        ({"answered": (5, -1)}, "bad_request", "they contain token id -1"),
        ({"answered": (5,) * 48}, "bad_request", "48 answered tokens cannot be continued: max_tokens is 48"),
        ({"answered": (5,) * 60}, "bad_request", "max_tokens is 48"),
        ({"answered": (5,), "head": "kind", "adapter": "north"}, "bad_request", "head 'kind' answers in one pass"),
        ({"adapter_version": "beef"}, "bad_request", "adapter_version is 'beef', but the request has no adapter"),
        ({"adapter_version": "beef", "adapter": "north"}, "adapter_changed", "computed with content 'beef'"),
        ({"adapter_version": "beef", "adapter": "north+east"}, "adapter_changed", "computed with content 'beef'"),
    ],
)
def test_what_cannot_continue_is_refused(second: LocalEngine, fields: Any, code: str, message: str) -> None:
    request = embedded_cases.text("refused", **fields)
    last = second.run([request])["refused"][-1]
    assert last.error is not None and last.error.code == code
    assert message in last.error.message and "\n" not in last.error.message
    assert not second.engine.has_work


def test_tokens_that_cannot_be_an_answer_so_far_are_refused(
    second: LocalEngine, whole: dict[str, list[RequestOutput]]
) -> None:
    """Of one that has ended, and of one outside its grammar."""
    (eos, *_) = second.engine.parts.device.hf_model.eos_ids
    ended = embedded_cases.text("ended", answered=(7, eos, 7), ignore_eos=False)
    colours = tokens_of(whole["in a grammar"])
    other = next(token for token in tokens_of(whole["greedy"]) if token not in colours)
    outside = resumed(embedded_cases.cases()["in a grammar"], (*colours[:3], other, colours[4]), 5)
    for request, reason in (
        (ended, "the token at index 1 ends the answer"),
        (outside, "the token at index 3 does not match the request's grammar"),
    ):
        error = second.run([request])[request.request_id][-1].error
        assert error is not None and error.code == "bad_request" and reason in error.message
        assert not second.engine.has_work


def test_an_answer_outside_its_grammar_is_refused_in_the_step_that_reads_its_adapter(
    folders: dict[str, str], whole: dict[str, list[RequestOutput]], second: LocalEngine
) -> None:
    version = second.engine.load_adapter("north", folders["north"]).version
    executor = QueuedExecutor()
    engine = LocalEngine(config(), executor=executor).engine
    engine.register_adapters({"north": folders["north"]})
    engine.parts.registry.fetch(engine.parts.admin.compositions.get("north", None).key)
    case = replace(embedded_cases.cases()["in a grammar"], adapter="north", adapter_version=version)
    colours = tokens_of(whole["in a grammar"])
    engine.add(resumed(case, [token for token in tokens_of(whole["greedy"]) if token not in colours], 5))
    while executor.run():
        pass
    error = engine.step()[-1].error
    assert error is not None and "does not match the request's grammar" in error.message
    assert not engine.has_work


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("in_a_grammar", [True, False])
def test_an_answer_continues_on_the_content_it_began_with(
    folders: dict[str, str],
    cases: dict[str, Request],
    whole: dict[str, list[RequestOutput]],
    second: LocalEngine,
    read: bool,
    in_a_grammar: bool,
) -> None:
    """Whether the adapter was read before, or is read for this request."""
    name = "adapted"
    version = next(each.version for each in second.engine.adapters() if each.name == "north")
    request = resumed(cases[name], tokens_of(whole[name]), 9, adapter_version=version)
    if in_a_grammar:
        sampling = replace(request.sampling, grammar=embedded_cases.GRAMMAR, ignore_eos=False)
        request = replace(request, sampling=sampling, answered=())
    for path, same in ((folders["north"], True), (folders["south"], False)):
        local = LocalEngine(config())
        if read:
            local.engine.load_adapter("north", path)
        else:
            local.engine.register_adapters({"north": path})
        last = local.run([request])[request.request_id][-1]
        if same:
            assert last.error is None and version
        else:
            assert last.error is not None
            assert type(error_from_code(last.error.code, "")).__name__ == "AdapterChanged"
            assert not last.token_ids and not local.engine.has_work
            local.engine.check_integrity()


@pytest.mark.exhaustive
def test_answers_continue_over_the_wire(
    folders: dict[str, str], cases: dict[str, Request], whole: dict[str, list[RequestOutput]]
) -> None:
    """The first message of a process has the version, and a cancelled whole answer its tokens so far."""

    async def main() -> None:
        engine = await EngineClient.start(config())
        try:
            await engine.register_adapters(folders)
            for name in ("adapted", "drawn by id", "in a grammar", "pictured"):
                request = resumed(cases[name], tokens_of(whole[name]), 11)
                found = [output async for output in engine.generate(request)]
                check(request, found, whole[name], 11)
                versions = [output.adapter_version for output in found]
                assert bool(versions[0]) == (request.adapter is not None) and not any(versions[1:-1])
            request = replace(cases["whole"], sampling=replace(cases["whole"].sampling, max_tokens=400))
            request = replace(request, sampling=replace(request.sampling, seed=seed_of("whole", request.sampling)))
            ended: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()
            engine.submit(request, ended.set_result)
            await asyncio.sleep(0.3)
            await engine.cancel("whole")
            part = await ended
            assert part.finish_reason == "cancelled" and len(part.token_ids) > 1 and part.adapter_version
            shared = min(len(part.token_ids), embedded_cases.NUM_TOKENS)
            assert part.token_ids[:shared] == tokens_of(whole["whole"])[:shared]
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), 120))
