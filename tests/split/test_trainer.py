"""transformers' Trainer, PEFT's files and generation work unchanged on a wrapped model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

from tests.split.running import serving, tiny
from vlora.split import connect

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("gpt2")


def train(model: Any, folder: Path) -> tuple[list[float], Any]:
    """Losses, and the trained model; its adapter is saved in the folder."""
    torch.manual_seed(0)
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn", "c_fc"], task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 180, (16,), generator=generator) for _ in range(12)]
    arguments = TrainingArguments(
        str(folder / "checkpoints"),
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(peft, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train()
    peft.save_pretrained(str(folder / "adapter"))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], peft.eval()


def test_trainer_and_files_are_those_of_plain_peft(model: Any, tmp_path: Path) -> None:
    losses, plain = train(copy.deepcopy(model), tmp_path / "plain")
    ids = torch.tensor([[5, 6, 7, 8]])
    wanted = plain.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    with serving(model, tmp_path) as served, connect(served.unix) as base:
        ours, trained = train(base.wrap(copy.deepcopy(model)), tmp_path / "split")
        assert max(abs(a - b) for a, b in zip(losses, ours, strict=True)) < 1e-4  # Trainer rounds what it logs
        assert torch.equal(trained.generate(input_ids=ids, max_new_tokens=8, do_sample=False), wanted)
    assert losses[-1] < losses[0]
    # The adapter that was trained through the base works on a full copy, and the other way round.
    loaded = PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path / "split" / "adapter"))
    assert torch.equal(loaded.generate(input_ids=ids, max_new_tokens=8, do_sample=False), wanted)
    with serving(model, tmp_path) as served, connect(served.unix) as base:
        split = PeftModel.from_pretrained(base.wrap(copy.deepcopy(model)), str(tmp_path / "plain" / "adapter"))
        assert torch.equal(split.generate(input_ids=ids, max_new_tokens=8, do_sample=False), wanted)
    saved = (tmp_path / "split" / "checkpoints" / "checkpoint-6" / "adapter_model.safetensors").stat().st_size
    assert saved < 100_000
