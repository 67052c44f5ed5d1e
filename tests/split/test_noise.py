"""Noise on activations: exact after removal, and what it is worth against an executor that watches."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.split.running import Serving, serving, tiny
from tests.split.test_faults import until
from vlora.errors import BadConfig
from vlora.split import Noise, connect
from vlora.split.connection import LayerCalls
from vlora.split.executor import BaseExecutor
from vlora.split.frames import Direction
from vlora.split.layers import frozen_layers
from vlora.split.noise import NoisyCalls

ATTEMPTS = 20
ROWS = 24


class Watching:
    """An executor that computes correctly and records all that it sees."""

    def __init__(self, executor: BaseExecutor) -> None:
        self.dtype, self.groups = executor.dtype, executor.groups
        self.seen: list[tuple[Direction, torch.Tensor]] = []
        self._executor = executor

    def call(
        self, direction: Direction, group: int, mask: int, inputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        self.seen.append((direction, inputs[0].clone()))
        return self._executor.compute(direction, group, mask, inputs)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("qwen2_vl")


@pytest.fixture(scope="module")
def executor(model: Any) -> BaseExecutor:
    return BaseExecutor(frozen_layers(model))


@pytest.fixture
def two(model: Any, tmp_path: Path) -> Iterator[tuple[Serving, Serving]]:
    (tmp_path / "second").mkdir()
    with serving(model, tmp_path) as first, serving(model, tmp_path / "second") as second:
        yield first, second


def activations(executor: BaseExecutor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    width = executor.groups[0][0].d_in
    return torch.randn(ROWS, width, generator=generator) * (1 + 3 * torch.rand(width, generator=generator))


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "pool"])
def test_noise_is_exact_after_removal(fresh: bool, direction: Direction, executor: BaseExecutor) -> None:
    noise = Noise(scale=10.0, second="other:1") if fresh else Noise(scale=10.0, pool=4)
    calls = NoisyCalls(Watching(executor), noise, Watching(executor) if fresh else None)
    for index, group in enumerate(executor.groups):
        mask = (1 << len(group)) - 1
        widths = [layer.width for layer in group] if direction == Direction.BACKWARD else [group[0].d_in]
        inputs = [torch.randn(ROWS, width) for width in widths]
        for plain, ours in zip(
            executor.compute(direction, index, mask, inputs), calls.call(direction, index, mask, inputs), strict=True
        ):
            assert (plain - ours).norm() < 2e-5 * plain.norm()


def test_training_with_noise_follows_plain_training(model: Any, two: tuple[Serving, Serving]) -> None:
    from tests.split.test_equality import losses

    plain = losses("lora", "qwen2_vl", copy.deepcopy(model), 6)
    with connect(two[0].unix, noise=Noise(scale=5.0, second=two[1].unix)) as base:
        noisy = losses("lora", "qwen2_vl", base.wrap(copy.deepcopy(model)), 6)
    assert max(abs(a - b) for a, b in zip(plain, noisy, strict=True)) < 1e-4
    assert two[0].server.num_calls == two[1].server.num_calls > 0, "there was no noise"


def attack(base: Watching, truth: torch.Tensor) -> float:
    """Error of the base's best guess: the last tensor that it received, minus each noise that it knows."""
    _, sent = base.seen[-1]
    noises = [seen for direction, seen in base.seen if direction == Direction.WITHOUT_BIAS] or [torch.zeros_like(sent)]
    guess = min((sent - noise for noise in noises), key=lambda rest: float(rest.norm()))
    return float((guess - truth).norm() / truth.norm())


@pytest.mark.parametrize("pool", [2, 16, 256])
def test_a_base_that_watches_recovers_activations_of_any_pool(pool: int, executor: BaseExecutor) -> None:
    """The negative result of section 3.8: the base has computed the effect of each noise, so it knows all of them."""
    base = Watching(executor)
    calls = NoisyCalls(base, Noise(scale=10.0, pool=pool), None)
    errors = []
    for attempt in range(ATTEMPTS):
        x = activations(executor, attempt)
        calls.call(Direction.FORWARD, 0, 1, [x])
        errors.append(attack(base, x))
    assert sum(error < 1e-5 for error in errors) == ATTEMPTS


def test_the_same_attack_fails_on_fresh_noise(executor: BaseExecutor) -> None:
    base, second = Watching(executor), Watching(executor)
    calls = NoisyCalls(base, Noise(scale=10.0, second="other:1"), second)
    for attempt in range(ATTEMPTS):
        x = activations(executor, attempt)
        calls.call(Direction.FORWARD, 0, 1, [x])
        assert attack(base, x) > 5
        seen = base.seen[-1][1]
        # The bound: with noise of 10 times the size, the best linear guess explains 1 / 101 of the variance.
        assert float(torch.corrcoef(torch.stack([seen.flatten(), x.flatten()]))[0, 1]) < 0.2
    assert all(direction == Direction.WITHOUT_BIAS for direction, _ in second.seen)
    assert len({float(noise.sum()) for _, noise in second.seen}) == ATTEMPTS, "a noise was used twice"


def test_two_executors_that_collude_recover_everything(executor: BaseExecutor) -> None:
    base, second = Watching(executor), Watching(executor)
    calls = NoisyCalls(base, Noise(scale=10.0, second="other:1"), second)
    x = activations(executor, 0)
    calls.call(Direction.FORWARD, 0, 1, [x])
    assert (base.seen[-1][1] - second.seen[-1][1] - x).norm() < 1e-5 * x.norm()


def test_repeated_calls_average_fresh_noise_out(executor: BaseExecutor) -> None:
    """The limit of the bound: m calls with the same rows leave 1 / sqrt(m) of the noise."""
    base = Watching(executor)
    calls = NoisyCalls(base, Noise(scale=10.0, second="other:1"), Watching(executor))
    x = activations(executor, 0)
    for _ in range(400):
        calls.call(Direction.FORWARD, 0, 1, [x])
    mean = torch.stack([seen for _, seen in base.seen]).mean(0)
    assert float((mean - x).norm() / x.norm()) == pytest.approx(10 / 20, rel=0.1)


def test_noise_that_rounding_would_not_survive_is_refused(executor: BaseExecutor) -> None:
    narrow = Watching(executor)
    narrow.dtype = torch.bfloat16
    with pytest.raises(BadConfig, match="noise scale is 10; for a base in bfloat16 it is at most 1"):
        NoisyCalls(narrow, Noise(scale=10.0, second="other:1"), narrow)
    NoisyCalls(narrow, Noise(scale=1.0, second="other:1"), narrow)


@pytest.mark.parametrize(
    "settings", [{}, {"second": "a:1", "pool": 2}, {"pool": -1}, {"scale": 0.0, "pool": 2}, {"scale": 1e9, "pool": 2}]
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match="noise"):
        Noise(**settings)


def test_a_pool_is_logged_as_no_protection(executor: BaseExecutor, caplog: pytest.LogCaptureFixture) -> None:
    calls: LayerCalls = Watching(executor)
    with caplog.at_level(logging.WARNING):
        NoisyCalls(calls, Noise(pool=2), None)
    assert "does not hide activations from the base executor" in caplog.text


def test_the_second_executor_is_another_one_of_the_same_base(two: tuple[Serving, Serving], tmp_path: Path) -> None:
    port = two[0].tcp.rpartition(":")[2]
    for first, second in (
        (two[0].unix, two[0].unix),
        (two[0].unix, two[0].tcp),
        (two[0].tcp, two[0].unix),
        (two[0].tcp, f"localhost:{port}"),
    ):
        with pytest.raises(BadConfig, match=f"second executor '{second}' is the base itself"):
            connect(first, noise=Noise(second=second))
    until(lambda: two[0].server.num_clients == 0)  # a refusal leaves no connection
    (tmp_path / "third").mkdir()
    with serving(tiny("gpt2"), tmp_path / "third") as third, pytest.raises(BadConfig, match="another base model"):
        connect(two[0].unix, noise=Noise(second=third.unix))


def test_shards_can_have_a_second_executor(model: Any, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("shards", "second", "changed")]
    for folder in folders:
        folder.mkdir()
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.language_model.layers[0].self_attn.q_proj.weight[0] += 1
    with (
        serving(model, folders[0], shard=(0, 2)) as first,
        serving(model, folders[0], shard=(1, 2)) as last,
        serving(model, folders[1]) as second,
        serving(changed, folders[2]) as other,
    ):
        executor = BaseExecutor(frozen_layers(model))
        with connect(first.unix, last.unix, noise=Noise(scale=10.0, second=second.unix)) as base:
            for index, group in enumerate(base.calls.groups):
                mask, inputs = (1 << len(group)) - 1, [torch.randn(ROWS, group[0].d_in)]
                plain = executor.compute(Direction.FORWARD, index, mask, inputs)
                for expected, ours in zip(plain, base.calls.call(Direction.FORWARD, index, mask, inputs), strict=True):
                    assert (expected - ours).norm() < 2e-5 * expected.norm()
            assert second.server.num_calls == first.server.num_calls == len(base.calls.groups), "there was no noise"
            base.wrap(copy.deepcopy(model))
        for address in (first.unix, last.tcp):
            with pytest.raises(BadConfig, match="is the base itself"):
                connect(first.unix, last.unix, noise=Noise(second=address))
        # The shards' digests are of other rows than the second executor's; wrapping compares both with the model.
        with (
            connect(first.unix, last.unix, noise=Noise(second=other.unix)) as base,
            pytest.raises(BadConfig, match="q_proj' has other weights"),
        ):
            base.wrap(copy.deepcopy(model))
        with pytest.raises(BadConfig, match="serves another base model"):
            connect(second.unix, noise=Noise(second=other.unix))
        with pytest.raises(BadConfig, match="or one shard of it"):
            connect(second.unix, noise=Noise(second=first.unix))
