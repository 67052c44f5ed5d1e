"""The embedded model's training: what is stopped goes on to the same end, and what comes out loads like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from fusion.embedded import train as training
from fusion.embedded.evaluate import accuracy_by_skill
from fusion.embedded.train import Budget, Trainer, train

STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def small_batches() -> object:
    patch = pytest.MonkeyPatch()
    for name, size in (("STILLS", 4), ("CLIPS", 2), ("VISION_BATCH", 8)):
        patch.setattr(training, name, size)
    torch.set_num_threads(1)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    train(out, Budget(STEPS, None))
    return out


def test_a_stopped_run_goes_on_to_the_same_end(whole: Path, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, Budget(STEPS, None), torch.device("cpu"), 0)
    for _ in range(2):  # one step of each stage
        trainer.advance()
    trainer.save()
    train(tmp_path, Budget(STEPS, None))
    first, second = (torch.load(out / "training.pt", weights_only=True)["model"] for out in (whole, tmp_path))
    assert all(torch.equal(first[name], second[name]) for name in first)
    fresh = Trainer(tmp_path, Budget(STEPS, None), torch.device("cpu"), 0).model.state_dict()
    assert any(not torch.equal(fresh[name], first[name]) for name in first)


def test_the_checkpoint_loads_like_any_other(whole: Path) -> None:
    processor = AutoProcessor.from_pretrained(whole)
    model = AutoModelForImageTextToText.from_pretrained(whole)
    assert sum(file.stat().st_size for file in whole.glob("*.safetensors")) < 12e6
    assert model.config.model_type == "llava" and processor.tokenizer.chat_template
    found = accuracy_by_skill(whole, num_scenes=8, seed=1)
    assert found["overall"].num_questions > 30 and found["overall"].share < 0.5  # three steps teach nothing
