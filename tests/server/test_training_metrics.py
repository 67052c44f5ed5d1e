"""The metrics of trainings, of one engine and of several together."""

from __future__ import annotations

import re

from tests.server.scripted import ScriptedEngine
from vlora.cluster.summary import merged_stats
from vlora.config import EngineConfig
from vlora.server.metrics import MAX_TRAININGS, Metrics
from vlora.types import EngineStats, TrainingStatus


def stats_with(*trainings: TrainingStatus) -> EngineStats:
    engine = ScriptedEngine(EngineConfig(model="scripted"))
    fields = {name: getattr(engine.stats(), name) for name in EngineStats.__struct_fields__}
    return EngineStats(**{**fields, "trainings": trainings})


def series(stats: EngineStats) -> dict[str, float]:
    text = Metrics().render(stats).decode()
    return {name: float(value) for name, value in re.findall(r"^(vlora_training\S*) (\S+)$", text, re.MULTILINE)}


RUNNING = TrainingStatus(name="signs", state="running", step=3, num_steps=9, num_tokens=70, loss=0.25, seconds=1.5)
NEW = TrainingStatus(name="cars", state="running", step=0, num_steps=9)


def test_steps_tokens_time_and_loss_of_each_training() -> None:
    found = series(stats_with(RUNNING, NEW))
    assert found['vlora_training_steps_total{training="signs"}'] == 3
    assert found['vlora_training_tokens_total{training="signs"}'] == 70
    assert found['vlora_training_seconds_total{training="signs"}'] == 1.5
    assert found['vlora_training_loss{training="signs"}'] == 0.25
    assert found['vlora_training_steps_total{training="cars"}'] == 0
    assert 'vlora_training_loss{training="cars"}' not in found, "it has no loss yet"
    assert found['vlora_trainings{state="running"}'] == 2 and found['vlora_trainings{state="failed"}'] == 0


def test_the_number_of_series_is_bounded() -> None:
    many = [TrainingStatus(name=f"t{n}", state="failed", step=0, num_steps=1) for n in range(MAX_TRAININGS + 9)]
    found = series(stats_with(*many))
    assert found['vlora_trainings{state="failed"}'] == MAX_TRAININGS + 9
    assert len([name for name in found if "steps_total" in name]) == MAX_TRAININGS


def test_trainings_of_several_engines_are_joined() -> None:
    assert merged_stats([stats_with(RUNNING), stats_with(), stats_with(NEW)]).trainings == (RUNNING, NEW)
