"""The method of a product is chosen by its measured time on this machine, once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atmm import matmul, processor
from atmm.cpu.products import Weights
from atmm.tuning import matmul_choice
from atmm.tuning.matmul_choice import Contention


class Machine:
    """A clock that every method advances by its configured time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, int]] = []
        for method, taken in seconds.items():
            monkeypatch.setitem(matmul.METHODS, method, self._timed(method, taken))  # type: ignore[misc]

    def __call__(self) -> float:
        return self.now

    def _timed(self, method: str, taken: float):  # type: ignore[no-untyped-def]
        def call(x: Tensor, layers: Sequence[Weights]) -> Tensor:
            self.now += taken
            self.calls.append((method, len(x)))
            return x.new_empty(len(x), 0)

        return call


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A separate cache folder, no measured choices, and layers of all sizes measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(matmul, "measured", {})
    monkeypatch.setattr(matmul_choice, "LARGE", 1)
    monkeypatch.setattr(matmul, "multiplies", lambda weight: True)
    monkeypatch.setattr(matmul, "prefers_weight_left", lambda *given: False)
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(Contention, "disturbs", lambda self: False)
    yield


WEIGHTS = [torch.zeros(8, 4, dtype=torch.bfloat16) for _ in range(3)]


def chosen(num_rows: int) -> str:
    with torch.inference_mode():
        return matmul.choose(num_rows, WEIGHTS[0])


def test_the_fastest_method_is_chosen_and_cached_for_later_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {"rows": 4.0, "library": 3.0, "float32": 1.0})
    assert chosen(3) == "rows"
    matmul_choice.measure(WEIGHTS, machine)
    assert [chosen(rows) for rows in (1, 3, 20, 128, 300, 5000)] == ["float32"] * 6
    machine.calls.clear()
    monkeypatch.setattr(matmul, "measured", {})
    matmul_choice.measure(WEIGHTS, machine)
    assert not machine.calls and chosen(3) == "float32"


def test_disturbed_measurements_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {"rows": 4.0, "library": 3.0, "float32": 1.0})
    monkeypatch.setattr(Contention, "disturbs", lambda self: True)
    matmul_choice.measure(WEIGHTS, machine)
    assert machine.calls and chosen(3) == "rows"
    monkeypatch.setattr(Contention, "disturbs", lambda self: False)
    matmul_choice.measure(WEIGHTS, machine)
    assert chosen(3) == "float32", "the next start measures"


def test_a_small_difference_does_not_change_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {"rows": 1.0, "library": 0.98, "float32": 0.96})
    matmul_choice.measure(WEIGHTS, machine)
    assert chosen(8) == "rows" and chosen(64) == "float32"


def test_a_pause_during_one_measurement_does_not_change_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {"rows": 4.0, "library": 3.0, "float32": 2.0})
    num_paused = 0

    def pausing(x: Tensor, layers: Sequence[Weights]) -> Tensor:
        nonlocal num_paused
        paused = len(x) == 512 and num_paused < 3  # a slow method is not called more often
        num_paused += paused
        machine.now += 100.0 if paused else 2.0
        return x.new_empty(len(x), 0)

    monkeypatch.setitem(matmul.METHODS, "float32", pausing)  # type: ignore[misc]
    matmul_choice.measure(WEIGHTS, machine)
    assert num_paused == 3 and [chosen(rows) for rows in (8, 256, 512)] == ["float32"] * 3


def test_other_threads_are_measured_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {"rows": 4.0, "library": 3.0, "float32": 1.0})
    matmul_choice.measure(WEIGHTS, machine)
    machine.calls.clear()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    matmul_choice.measure(WEIGHTS, machine)
    assert machine.calls


@pytest.mark.parametrize(
    "content", ("{", "[[1, 8]]", '[["a", 8, 4, "torch.bfloat16", "rows"]]', '[[1, 8, 4, "no", "rows"]]')
)
def test_an_unreadable_file_is_measured_again(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(monkeypatch, {"rows": 4.0, "library": 3.0, "float32": 1.0})
    matmul_choice.measure(WEIGHTS, machine)
    (file,) = (tmp_path / "vlora").iterdir()
    file.write_text(content)
    monkeypatch.setattr(matmul, "measured", {})
    matmul_choice.measure(WEIGHTS, machine)
    assert chosen(3) == "float32" and "cannot be read" in caplog.text
    assert len(json.loads(file.read_text())) == 10


def test_small_models_keep_the_rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(matmul_choice, "LARGE", 10**9)
    machine = Machine(monkeypatch, {"rows": 4.0, "library": 3.0, "float32": 1.0})
    matmul_choice.measure(WEIGHTS, machine)
    assert not machine.calls and chosen(3) == "rows" and not (tmp_path / "vlora").exists()


def test_the_real_methods_are_measured_without_error() -> None:
    weights = [torch.randn(64, 48).bfloat16() for _ in range(2)] + [torch.randn(64, 48)]
    matmul_choice.measure(weights)
    assert {key[1:] for key in matmul.measured} == {(64, 48, torch.bfloat16), (64, 48, torch.float32)}
