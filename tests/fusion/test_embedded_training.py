"""The embedded model's training: a resumed run gives the same result, and the checkpoint loads in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from fusion.embedded import contact_sheet, unlearned_words
from fusion.embedded import train as training
from fusion.embedded.evaluate import accuracy_by_skill
from fusion.embedded.probes import Probes
from fusion.embedded.train import Budget, Trainer, train

pytestmark = pytest.mark.slow

STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def small_batches() -> object:
    patch = pytest.MonkeyPatch()
    for name, size in (("STILLS", 4), ("CLIPS", 2), ("VISION_BATCH", 8)):
        patch.setattr(training, name, size)
    patch.setattr(unlearned_words, "NUM_SCENES", 50)  # enough for the words of a checkpoint that is not used
    torch.set_num_threads(1)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    train(out, Budget(STEPS, None))
    return out


@pytest.mark.exhaustive
@pytest.mark.timeout(900)  # for a busy machine
def test_a_resumed_run_gives_the_same_weights(whole: Path, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, Budget(STEPS, None), torch.device("cpu"), 0)
    for _ in range(2):  # one step of each stage
        trainer.advance()
    trainer.save()
    train(tmp_path, Budget(STEPS, None))
    first, second = (torch.load(out / "training.pt", weights_only=True)["model"] for out in (whole, tmp_path))
    assert all(torch.equal(first[name], second[name]) for name in first)
    fresh = Trainer(tmp_path, Budget(STEPS, None), torch.device("cpu"), 0).model.state_dict()
    assert any(not torch.equal(fresh[name], first[name]) for name in first)


@pytest.mark.exhaustive
def test_the_checkpoint_loads_in_transformers(whole: Path) -> None:
    processor = AutoProcessor.from_pretrained(whole)
    model = AutoModelForImageTextToText.from_pretrained(whole)
    assert sum(file.stat().st_size for file in whole.glob("*.safetensors")) < 12e6
    assert model.config.model_type == "llava" and processor.tokenizer.chat_template
    found = accuracy_by_skill(whole, num_scenes=8, seed=1)
    assert found["overall"].num_questions > 30 and found["overall"].share < 0.5  # three steps are not enough to learn


def test_each_part_learns_until_its_own_end(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, Budget(1000, None), torch.device("cpu"), 0)
    rates: dict[str, list[float]] = {"vision": [], "rest": []}
    for step in (0, 100, 149, 150, 200, 599, 600, 999):
        trainer.step = step
        trainer.set_rates()
        for part, found in rates.items():
            groups = [group for o in trainer.optimizers for group in o.param_groups if group["part"] == part]
            shares = {round(group["lr"] / group["base"], 9) for group in groups}
            assert len(shares) == 1
            found += shares
    warm, early, _, joined, _, last, fixed, end = rates["vision"]
    assert warm < 0.03 and early > 0.9 and joined > 0.8 and last < 1e-4 and fixed == end == 0
    assert rates["rest"][:4] == [0, 0, 0, 0] and rates["rest"][4] > 0.9 and rates["rest"][-1] < 1e-4
    counted = {id(p) for o in trainer.optimizers for group in o.param_groups for p in group["params"]}
    assert counted == {id(p) for p in (*trainer.model.parameters(), *trainer.probes.parameters())}
    vision = {id(p) for o in trainer.optimizers for g in o.param_groups if g["part"] == "vision" for p in g["params"]}
    assert vision >= {id(p) for p in trainer.vision.parameters()} and id(trainer.probes.kind.bias) in vision


def test_information_lost_by_the_projector_costs_loss() -> None:
    torch.manual_seed(0)
    probes = Probes(4, 6)
    with torch.no_grad():
        probes.kept.weight.copy_(torch.eye(4, 6))
        probes.kept.bias.zero_()
    states = torch.randn(2, 36, 4)
    # Vector norms do not count, since the language model's first layer normalises its input.
    given = torch.cat([states * 7, torch.zeros(2, 36, 2)], -1)
    scale = (4 / 6) ** 0.5  # the norms are over six values here and over four there
    with torch.no_grad():
        assert probes.kept_loss(given, states).item() == pytest.approx((1 - 1 / scale) ** 2, abs=1e-4)
        assert probes.kept_loss(given * torch.tensor([1, 1, 1, 0, 0, 0]), states).item() > 0.2


@pytest.mark.parametrize(
    "arguments, message",
    (
        (["--steps", "-3"], "-3 was given; it must be finite and above 0"),
        (["--minutes", "nan"], "nan was given"),
        (["--minutes", "soon"], "invalid float value: 'soon'"),
        (["--workers", "0"], "0 was given"),
        (["--device", "cuda:9"], "'cuda:9' was requested"),
    ),
)
def test_bad_arguments_are_refused_before_anything_is_written(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(training.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["train", "--out", str(tmp_path / "run"), *arguments])
    with pytest.raises(SystemExit, match="2"):
        training.main()
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name, message", (("nowhere/page.jpg", "check that its folder exists"), ("page.txt", "no supported picture suffix"))
)
def test_a_contact_sheet_that_cannot_be_written_is_an_error(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["contact_sheet", str(tmp_path / name)])
    with pytest.raises(SystemExit, match="2"):
        contact_sheet.main()
    assert message in capsys.readouterr().err
