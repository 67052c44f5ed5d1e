"""Trainings in the engine's process: equal to trainings alone, beside requests that are equal to those alone."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
import torch

from tests.training.beside import STEPS, Alone, Case, adapter_of, losses_of, request, settle, submit
from vlora.engine import Engine, LocalEngine
from vlora.errors import BadConfig, BadPlan, BadRequest
from vlora.types import RequestOutput

EACH_FAMILY = ("qwen2_vl", "llava")


@pytest.fixture(scope="module", params=EACH_FAMILY)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case.make(tmp_path_factory.mktemp(request.param) / "case", request.param)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case.make(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def served(case: Case) -> str:
    """An adapter to serve beside trainings."""
    case.run(case.plan("served", ["first"], name="served", steps=2))
    return str(case.folder / "served" / "served" / "adapter")


def tokens(engine: Engine, *, trains: bool) -> dict[str, list[int]]:
    """Answers of requests with and without an adapter that arrive one after the other, with pieces in between."""
    waiting = [request(f"r{place}", (None, "served")[place % 2 * (place > 3)]) for place in range(8)]
    waiting += [request(f"m{place}", "served", 12) for place in range(3)]
    found: dict[str, list[int]] = {}
    num_calls = 0
    while waiting or engine.has_work:
        if waiting and num_calls % 3 == 0:
            engine.add(waiting.pop(0))
        outputs: tuple[RequestOutput, ...] = engine.step()
        for output in outputs:
            assert output.error is None
            found.setdefault(output.request_id, []).extend(output.token_ids)
        if trains:
            engine.parts.trainings.advance()
        num_calls += 1
    return found


def test_a_training_beside_requests_equals_one_alone(case: Case, served: str, tmp_path: Path) -> None:
    """Losses and adapters bit for bit, and the tokens of requests in merged and unmerged steps."""
    alone, plain = Alone(case), case.engine()
    plain.load_adapter("served", served)
    expected = tokens(plain, trains=False)
    engine = case.engine(case.plan("beside"))
    engine.load_adapter("served", served)
    trainings = engine.parts.trainings
    settle(trainings, engine, until=lambda: trainings.statuses()[0].step == 1)
    assert tokens(engine, trains=True) == expected
    assert len(engine.stats().steps_by_mode) > 1, "nothing was merged"
    settle(trainings, engine)
    for status in trainings.statuses():
        folder = case.folder / "beside" / status.name
        assert status.state == "finished" and status.step == STEPS and status.path == str(folder / "adapter")
        assert losses_of(folder) == alone.losses[status.name]
        assert [status.held_out_before, status.held_out_after] == alone.held_out[status.name]
        found, wanted = adapter_of(folder), alone.adapter(status.name, tmp_path / status.name)
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
        assert not (folder / "checkpoint.pt").exists()
    # The result is served under its name, and changes answers.
    assert {"first", "second"} <= {status.name for status in engine.adapters()}
    engine.add(request("after", "first"))
    while engine.has_work:
        assert all(output.error is None for output in engine.step())
    engine.close()
    plain.close()


def test_an_engine_in_a_thread_trains_between_calls(one: Case) -> None:
    """`LocalEngine`, by its asyncio calls."""

    async def main() -> None:
        local = LocalEngine(one.config())
        plan = str(one.plan("local", ["first"]))
        (begun,) = await local.train(plan)
        assert begun.state == "running"
        outputs = [output async for output in local.generate(request("r", None))]
        assert sum(len(output.token_ids) for output in outputs) == 6
        while (await local.trainings())[0].state == "running":
            await asyncio.sleep(1e-3)
        assert (await local.trainings())[0].state == "finished"
        assert [status.name for status in await local.adapters()] == ["first"]
        with pytest.raises(BadRequest, match="no training named 'first' is running; running: none"):
            await local.cancel_training("first")
        with pytest.raises(BadPlan, match="cannot be read"):
            await local.train(str(one.folder / "absent.yaml"))
        await local.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert losses_of(one.folder / "local" / "first") == Alone(one, ["first"]).losses["first"]


def test_requests_differ_if_training_changed_the_weights(case: Case, served: str) -> None:
    """Negative control: the comparison of tokens finds weights that are not W0."""
    engine = case.engine()
    engine.load_adapter("served", served)
    expected = tokens(engine, trains=False)
    slabs = engine.parts.device.slabs
    with torch.no_grad():
        next(iter(slabs.base)).mul_(1.5)
    assert tokens(engine, trains=False) != expected
    engine.close()


def test_a_training_cut_at_any_piece_continues_equally(one: Case, tmp_path: Path) -> None:
    """The process ends after a number of pieces, without notice; at most one micro-step is computed again."""
    plan = one.plan("cut", ["first"])
    reached, lost, states = 0, [], []
    for most in (1, 7, 23, 11, 19, math.inf):
        engine = one.engine(plan)
        trainings = engine.parts.trainings
        lost.append(reached - trainings.statuses()[0].step)
        settle(trainings, engine, most=most)
        trainings.close()  # an ended process writes no more files
        reached = trainings.statuses()[0].step
        states.append(trainings.statuses()[0].state)
    assert states == ["running"] * 5 + ["finished"]
    assert max(lost) <= 1
    only = Alone(one, ["first"])
    folder = one.folder / "cut" / "first"
    assert losses_of(folder) == only.losses["first"]
    found, wanted = adapter_of(folder), only.adapter("first", tmp_path)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_short_micro_steps_change_nothing_but_rounding(one: Case, tmp_path: Path) -> None:
    """One record in each micro-step."""
    engine = one.engine(one.plan("short", ["first"], micro_batch_tokens=1))
    num_short = settle(engine.parts.trainings, engine)
    engine.close()
    only = Alone(one, ["first"])
    assert losses_of(one.folder / "short" / "first") == pytest.approx(only.losses["first"], abs=1e-6)
    found, wanted = adapter_of(one.folder / "short" / "first"), only.adapter("first", tmp_path)
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-3, atol=1e-6)
    engine = one.engine(one.plan("long", ["first"]))
    assert num_short > 1.5 * settle(engine.parts.trainings, engine)
    engine.close()


def test_a_cancelled_training_ends_and_others_go_on(one: Case) -> None:
    plan = one.plan("cancel")
    engine = one.engine(plan)
    trainings = engine.parts.trainings
    settle(trainings, engine, until=lambda: trainings.statuses()[0].step == 1)
    assert trainings.cancel("first").state == "cancelled"
    with pytest.raises(BadRequest, match="no training named 'first' is running; running: second"):
        trainings.cancel("first")
    settle(trainings, engine)
    states = {one.name: (one.state, one.step) for one in trainings.statuses()}
    assert states == {"first": ("cancelled", 1), "second": ("finished", STEPS)}
    assert losses_of(one.folder / "cancel" / "second") == pytest.approx(Alone(one).losses["second"], abs=1e-5)
    assert [status.name for status in engine.adapters()] == ["second"]
    engine.close()
    # It remains cancelled after a restart, and continues when its plan is submitted again.
    engine = one.engine(plan)
    trainings = engine.parts.trainings
    assert {one.name: one.state for one in trainings.statuses()} == {"first": "cancelled", "second": "finished"}
    assert [status.name for status in engine.adapters()] == ["second"]
    submit(engine, plan)
    settle(trainings, engine)
    assert {one.name: (one.state, one.step) for one in trainings.statuses()}["first"] == ("finished", STEPS)
    assert losses_of(one.folder / "cancel" / "first") == pytest.approx(Alone(one).losses["first"], abs=1e-5)
    engine.close()


def test_trainings_may_be_cancelled_and_submitted_again_at_any_piece(one: Case) -> None:
    """Each of two trainings in turn, after one more piece each time; both end with the right losses."""
    plan = one.plan("often")
    engine = one.engine(plan)
    trainings = engine.parts.trainings
    num_cancelled = 0
    for number in range(24):
        settle(trainings, engine, most=1 + number % 7)
        name = ("first", "second")[number % 2]
        if next(one for one in trainings.statuses() if one.name == name).state != "running":
            continue
        trainings.cancel(name)
        num_cancelled += 1
        settle(trainings, engine, most=number % 3)
        submit(engine, one.plan("often", [name]))
    settle(trainings, engine)
    assert {status.state for status in trainings.statuses()} == {"finished"} and num_cancelled > 10
    engine.close()
    for name, losses in Alone(one).losses.items():
        assert losses_of(one.folder / "often" / name) == pytest.approx(losses, abs=1e-5)


def test_a_loss_that_is_not_finite_ends_its_training_only(one: Case) -> None:
    engine = one.engine(one.plan("diverged"))
    trainings = engine.parts.trainings
    settle(trainings, engine, until=lambda: trainings.statuses()[0].step == 1)
    (found,) = [job for job in trainings.jobs if job.name == "first"]
    assert found.adapter is not None
    layer, (a, b) = next(iter(found.adapter.values().items()))
    found.adapter.load({layer: (a * math.nan, b)})
    settle(trainings, engine)
    first, second = trainings.statuses()
    assert first.state == "failed" and first.step == 1
    assert first.error == "the loss is nan in step 2; lower the learning rate"
    assert second.state == "finished"
    assert losses_of(one.folder / "diverged" / "second") == pytest.approx(Alone(one).losses["second"], abs=1e-5)
    engine.close()


def test_an_internal_error_ends_trainings_and_not_the_engine(one: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = one.plan("internal", ["first"])
    engine = one.engine(plan)
    trainings = engine.parts.trainings
    settle(trainings, engine, until=lambda: trainings.statuses()[0].step == 1)

    def broken() -> None:
        raise KeyError("missing")

    monkeypatch.setattr(trainings.jobs[0], "checkpoint", broken)
    settle(trainings, engine)
    (status,) = trainings.statuses()
    assert status.state == "failed" and status.error is not None and "(KeyError: 'missing')" in status.error
    engine.add(request("r", None))
    while engine.has_work:
        assert all(output.error is None for output in engine.step())
    # Another loop continues from the checkpoint.
    submit(engine, plan)
    settle(trainings, engine)
    assert trainings.statuses()[0].state == "finished"
    assert losses_of(one.folder / "internal" / "first") == Alone(one, ["first"]).losses["first"]
    engine.close()


def test_an_engine_with_a_broken_picture_in_its_plan_does_not_start(one: Case) -> None:
    broken = one.folder / "broken"
    broken.mkdir()
    (broken / "a.png").write_bytes(b"no picture")
    (broken / "questions.jsonl").write_text('{"question": "what ?", "answer": "w1", "image": "a.png"}\n')
    with pytest.raises(BadPlan, match=rf"^{broken}/questions\.jsonl, line 1: {broken}/a\.png is not a valid picture"):
        one.engine(one.plan("pictures", ["first"], data="broken"))


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"targets": ["nothing"]}, {}, "targets: no linear layer is named nothing; it has down_proj"),
        ({}, {"switching": "in_place"}, "start with --switching shadow"),
        ({}, {"quantize": "int8"}, "start without --quantize"),
    ],
    ids=["targets", "in place", "quantized"],
)
def test_an_engine_that_cannot_train_does_not_start(
    one: Case, changes: dict[str, object], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(BadConfig, match=message):
        one.engine(one.plan("refused", ["first"], **changes), **settings)


def test_names_in_use_and_other_settings_are_refused(one: Case) -> None:
    plan = one.plan("names", ["first"])
    engine = one.engine(plan)
    trainings = engine.parts.trainings

    with pytest.raises(BadRequest, match="training 'first' is running already"):
        submit(engine, plan)
    # An adapter that is registered while its name is in training is not replaced.
    other = one.engine(one.plan("taken", ["first"]))
    settle(other.parts.trainings, other)
    engine.load_adapter("first", str(one.folder / "taken" / "first" / "adapter"))
    settle(trainings, engine)
    (status,) = trainings.statuses()
    assert status.state == "failed" and status.error is not None and "was registered meanwhile" in status.error
    engine.unload_adapter("first")
    submit(engine, plan)
    settle(trainings, engine)
    other.close()
    with pytest.raises(BadPlan, match="has training 'first' with other settings or data; remove the folder"):
        submit(engine, one.plan("names", ["first"], steps=STEPS + 1))
    with pytest.raises(BadRequest, match="an adapter 'first' is registered already; unload it first"):
        submit(engine, one.plan("other", ["first"]))
    submit(engine, one.plan("names", ["first"]))  # it is finished
    engine.close()
