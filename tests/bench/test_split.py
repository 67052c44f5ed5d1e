"""The figures of Symbiosis without their processes: lockstep, rows, figures, and a tiny run of clients in threads."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.paper import FIGURES, find
from benchmarks.paper.benches import executor_rows
from benchmarks.paper.figure import Measuring, Setting
from benchmarks.split import base_process, mixed, split
from benchmarks.split.base_process import POLICIES, LockstepQueue
from benchmarks.split.mixed import Event, Window
from benchmarks.split.processes import Mix, row
from benchmarks.split.split import WAYS
from benchmarks.split.worker import Client
from tests.split.running import serving, tiny
from vlora.bench.dummy import MODELS
from vlora.bench.harness import Store
from vlora.split.batching import Call

MIX = Mix(layers=1, inference=8, training=2, prompt=64, answer=4, requests=1, rounds=1)
LATENCIES = {
    mixed.ALL: (1.0, 2.0, 1.5),
    mixed.FEWER: (0.8, 1.6, 1.2),
    mixed.MIXED: (1.1, 2.0, 1.5),
    mixed.WHOLE: (3, 4, 5),
}


def of_all_parts(clients: int, mib: float, latency: float) -> list[dict[str, Any]]:
    """Rows of all parts but mixed."""
    rows = [row("memory", way, clients=clients, **{"all MiB": 100.0, "clients MiB": 100.0}) for way in WAYS]
    for each in rows:
        each["executor MiB"] = 40.0 if each["way"].startswith("executor") else 0
    rows[2]["all MiB"], rows[2]["clients MiB"] = mib, mib - 40.0
    table = {"latency ms": 10.0, "tokens a second": 5.0, "calls a product": 2.0}
    rows += [row("table 5", policy, clients=4, **table) for policy in POLICIES]
    rows[-len(POLICIES)]["latency ms"] = latency
    return rows


def windows(latencies: Mapping[str, Sequence[float]], trained: int) -> dict[str, list[Window]]:
    """A window of each way and round: decoded tokens of a latency, in seconds, and training steps of 128 tokens."""
    found: dict[str, list[Window]] = {}
    for way in mixed.WAYS:
        steps = [Event("train", number, number + 1.0, 128) for number in range(trained)] if "training" in way else []
        prefill = Event("prefill", 0.0, 0.5, 128)
        found[way] = [
            Window(6.0, [prefill, *(Event("decode", 0.5, 0.5 + each, 2) for _ in range(4)), *steps], 0.9)
            for each in latencies[way]
        ]
    return found


def drawable() -> list[dict[str, Any]]:
    rows = of_all_parts(2, 80.0, 9.0) + mixed.rows_of(windows(LATENCIES, trained=3), MIX)
    sizes = {"executor MiB": 3.0, "clients MiB": 20.0, "all MiB": 23.0}
    return [*rows, *(row("peak of training steps", way, clients=1, **sizes) for way in ("own copy", "one client"))]


def test_lockstep_waits_for_every_client() -> None:
    queue: Any = LockstepQueue()
    for client in "abc":
        queue.join(client)
    queue.add(Call("a", 0, 1, 0.0))
    queue.add(Call("b", 0, 200, 0.0))
    assert queue.next(99.0) == () and queue.wait_s(99.0) is None
    queue.add(Call("c", 0, 1, 99.0))
    assert queue.wait_s(99.0) == 0.0 and [call.client for call in queue.next(99.0)] == ["a", "b", "c"]
    queue.add(Call("a", 1, 1, 100.0))
    queue.add(Call("b", 1, 1, 100.0))
    queue.leave("c")
    assert len(queue.next(100.0)) == 2


def test_parts_that_were_not_measured_have_no_goals() -> None:
    assert [goal.holds for goal in split.goals_of(of_all_parts(8, 80.0, 9.0))] == [True, True]
    assert [goal.holds for goal in split.goals_of(of_all_parts(8, 101.0, 11.0))] == [False, False]
    assert len(split.goals_of(of_all_parts(2, 120.0, 9.0))) == 1, "memory of few clients is no goal"
    assert split.goals_of([]) == []


def test_rates_and_curves_spread_tokens_over_their_time() -> None:
    events = [Event("prefill", -0.5, 0.5, 64), Event("decode", 0.5, 1.0, 2), Event("train", 0.0, 2.0, 128)]
    window = Window(2.0, events, 0.5)
    assert window.rate() == pytest.approx((32 + 2 + 128) / 2)
    assert window.rate(("train",)) == pytest.approx(64)
    assert window.curve("decode") == [0, 0, 4, 4, 0, 0, 0, 0]
    assert window.curve("prefill") == [64, 64, 0, 0, 0, 0, 0, 0]
    assert sum(window.curve("train")) * mixed.BIN_S == pytest.approx(128)


def test_phases_are_told_apart_by_any_client_in_prefill() -> None:
    events = [
        Event("prefill", 0.0, 1.0, 64),
        Event("prefill", 0.5, 1.5, 64),
        Event("decode", 1.0, 2.0, 2),
        Event("decode", 2.0, 3.0, 2),
        Event("train", 0.0, 4.0, 1000),
        Event("prefill", 3.5, 4.5, 64),
    ]
    prefill, generation = Window(4.0, events, 0.5).phases()
    assert prefill == pytest.approx((128 + 1 + 32) / 2.0)
    assert generation == pytest.approx((1 + 2) / 2.0)
    assert Window(4.0, [Event("decode", 0.0, 4.0, 2)], 0.5).phases() == (0.0, pytest.approx(0.5))


def test_a_window_ends_with_the_first_client_that_is_done() -> None:
    quick = {"events": [["prefill", 10.0, 11.0, 128], ["decode", 11.0, 14.0, 2]]}
    slow = {"events": [["prefill", 10.0, 13.0, 128], ["decode", 13.0, 15.0, 2]]}
    training = {"events": [["train", 10.0, 13.0, 64], ["train", 13.0, 13.9, 64], ["train", 13.9, 14.1, 64]]}
    window = mixed.window_of([slow, quick], [training], begin=10.0, busy=0.75)
    assert window.seconds == pytest.approx(4) and window.busy == 0.75
    assert window.rate(("train",)) == pytest.approx(128 / 4), "a pass that ends after the window counts"
    assert window.rate(("decode",)) == pytest.approx((2 + 1) / 4)
    assert window.latency_ms() == pytest.approx(3000) and window.latency_ms("prefill") == pytest.approx(2000)


def test_ratios_are_those_of_a_round() -> None:
    rows = {each["way"]: each for each in mixed.rows_of(windows(LATENCIES, trained=3), MIX)}
    assert rows[mixed.ALL]["latency ms"] == pytest.approx(1500) and rows[mixed.ALL]["ratio"] == 1
    assert rows[mixed.FEWER]["ratio"] == pytest.approx(0.8) and rows[mixed.FEWER]["clients"] == 6
    assert rows[mixed.MIXED]["ratio"] == pytest.approx(1.0) and rows[mixed.MIXED]["first token ms"] == 500
    assert rows[mixed.MIXED]["training"] == pytest.approx(64) and rows[mixed.ALL]["training"] == 0
    assert rows[mixed.MIXED]["tokens a second"] == pytest.approx(rows[mixed.ALL]["tokens a second"] + 64)


def test_the_mix_must_have_the_throughput_and_the_latency() -> None:
    fewer = windows(LATENCIES, trained=0)
    fewer[mixed.MIXED] = [
        window._replace(events=[window.events[0]._replace(tokens=64), *window.events[1:]])
        for window in fewer[mixed.MIXED]
    ]
    for shown, holds in (
        (windows(LATENCIES, trained=3), [True, True, True]),
        (windows(LATENCIES | {mixed.MIXED: (1.5, 3.0, 2.0)}, trained=3), [True, False, True]),
        (windows(LATENCIES | {mixed.MIXED: (4.1, 4.2, 5.2)}, trained=3), [True, False, False]),
        (fewer, [False, True, True]),
    ):
        assert [goal.holds for goal in split.goals_of(mixed.rows_of(shown, MIX))] == holds


@pytest.mark.parametrize(
    "figure", [each for each in FIGURES if each.paper == "symbiosis"], ids=lambda each: each.number
)
def test_figures_of_the_paper_are_drawn_beside_its_numbers(
    figure: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setting = Setting(True, torch.device("cpu"), MODELS["qwen2-0.5b"])
    monkeypatch.setattr(split, "one", lambda part, size: drawable())
    found = find(Measuring(setting, Store(tmp_path, {})), **figure.measure)
    assert set(figure.here(found)) == {fact.quantity for fact in figure.facts}
    figure.picture(found, setting).save(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    if figure.number == "fig10":
        assert list(figure.here(found).values()) == [None], "two copies are not compared with the paper's"
        # Eight copies take 100 MiB; an executor of 40 leaves room for twelve clients of 5.
        of_eight = {"rows": executor_rows(of_all_parts(8, 80.0, 9.0))}
        assert list(figure.here(of_eight).values()) == [pytest.approx(1.5)]
    if figure.number == "table5":
        assert figure.here(found)["latency to lockstep's"] == pytest.approx(0.9)


def test_clients_decode_and_train_in_a_window(tmp_path: Path) -> None:
    model = tiny("qwen2_vl")
    model.save_pretrained(tmp_path / "model")
    with serving(model, tmp_path) as server:
        clients = [Client(str(tmp_path / "model"), "float32", server.unix, seed) for seed in range(3)]
        begin, stop = time.monotonic() + 0.05, tmp_path / "stop"
        with ThreadPoolExecutor(3) as pool:
            training = pool.submit(clients[2].finetune, begin, str(stop), 2, 64)
            for job in [pool.submit(client.infer, begin, 3, 2, 8, 4) for client in clients[:2]]:
                job.result()
            stop.touch()
            training.result()
    first, second, trained = ({"events": client.events} for client in clients)
    window = mixed.window_of([first, second], [trained], begin, 0.4)
    assert all(event.start_s >= 0 for event in window.events)
    assert window.rate() > window.rate(("decode", "prefill")) > 0 and window.latency_ms() > 0
    kinds = [kind for kind, *_ in first["events"]]
    assert kinds == ["prefill", *["decode"] * 4] * 3 and {kind for kind, *_ in trained["events"]} == {"train"}
    assert [tokens for *_, tokens in first["events"][:2]] == [16, 2]
    assert sum(tokens for *_, tokens in trained["events"]) % 128 == 0


def test_an_executor_ends_with_its_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny("qwen2_vl").save_pretrained(tmp_path / "model")
    parents = itertools.chain([7, 7, 7], itertools.repeat(1))
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(sys, "argv", ["base_process", str(tmp_path / "model"), f"unix:{tmp_path}/base.sock"])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    base_process.main()
    assert next(parents) == 1
