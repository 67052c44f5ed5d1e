"""Block-diagonal adapters, trained by a plan or converted, give the same answers on any number of ranks."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft.tuners.lora.config import BdLoraConfig

from fusion.block_diagonal.convert import convert
from fusion.plan.schema import LoraPlan
from tests.engine.forms import BLOCKS, lora
from tests.families import build_model, make_prompt
from tests.fusion.small import COLORS, color_splits, plan_of, trainer_of, write_base
from tests.harness import Answers, FixedModes, RecordingEngine
from tests.oracle import peft_answer, save_adapter
from vlora.types import Mode

NUM_TOKENS = 4
TOLERANCE = 1e-5  # of logits of size 10


def served(checkpoint: str, adapters: dict[str, str], cases: list[Any], size: int) -> tuple[Answers, dict[str, Any]]:
    """All cases at once, unmerged; and the sharding of each adapter."""
    recorded = RecordingEngine(
        SimpleNamespace(family="llava", adapters=adapters),
        FixedModes(Mode.UNMERGED),
        checkpoint=checkpoint,
        tensor_parallel=size,
        threads=1,
    )
    try:
        return recorded.answer(cases, NUM_TOKENS), {a.name: a.sharding for a in recorded.engine.adapters()}
    finally:
        recorded.engine.close()


def same(found: Answers, expected: Answers) -> bool:
    return all(
        tokens == other_tokens and float((logits - other).abs().max()) < TOLERANCE
        for (tokens, logits), (other_tokens, other) in zip(found, expected, strict=True)
    )


@pytest.mark.slow
def test_trained_and_converted_adapters_give_equal_answers_on_1_2_and_4_ranks(tmp_path: Path) -> None:
    """Four blocks trained by a plan, so that two ranks have two each; two blocks converted, so that four ranks share
    each of them.
    """
    base = write_base(tmp_path / "base")
    adapters: dict[str, str] = {}
    for name, blocks in (("trained", 4), ("dense", 1)):
        plan = plan_of(base, (name,), lora=LoraPlan(rank=8, alpha=8, rslora=True, blocks=blocks), steps=4)
        trainer = trainer_of(plan, {name: color_splits()})
        trainer.adapter.reset()
        trainer.train(name, ())
        adapters[name] = str(tmp_path / name)
        trainer.save(tmp_path / name, trainer.adapter.snapshot())
    convert(tmp_path / "dense", tmp_path / "converted", blocks=2)
    del adapters["dense"]
    adapters["converted"] = str(tmp_path / "converted")
    processor = trainer.adapter.base.processor
    prompts = [processor.encode(processor.chat(f"what {color} ?", 0), []) for color in COLORS]
    cases = [(name, prompt) for name in ("trained", "converted", None) for prompt in prompts[:2]]
    alone, _ = served(base, adapters, cases, 1)
    for case in range(4):
        assert (alone[case][1] - alone[4 + case % 2][1]).abs().max() > 0.02, "the adapter has no effect"
    for size in (2, 4):
        answers, kinds = served(base, adapters, cases, size)
        assert kinds == {"trained": "bd", "converted": "bd"}
        assert same(answers, alone), f"{size} ranks give a different answer"


@pytest.mark.slow
def test_blocks_cut_by_ranks_are_served_dense_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three blocks on four ranks: neither divides the other."""
    sizes = {"hidden_size": 48, "head_dim": 12, "num_key_value_heads": 4, "intermediate_size": 96}
    model = build_model("llava", text_settings=sizes)
    model.save_pretrained(tmp_path / "model")
    blocks = BdLoraConfig(BLOCKS.target_modules_bd_a, BLOCKS.target_modules_bd_b, nblocks=3)
    adapters = {"three": save_adapter(model, lora(6, use_bdlora=blocks), tmp_path / "three")}
    cases = [("three", make_prompt("llava", model, seed)) for seed in range(2)]
    with caplog.at_level(logging.WARNING, "vlora.engine.tensor_parallel.coordinator"):
        answers, kinds = served(str(tmp_path / "model"), adapters, cases, 4)
    assert [record.getMessage() for record in caplog.records] == [
        "adapter 'three' has 3 blocks, which 4 ranks do not divide evenly; it is served dense, including zeros"
    ]
    assert kinds == {"three": "replicated"}
    for (_, prompt), answer in zip(cases, answers, strict=True):
        expected, without = (peft_answer(model, path, prompt, NUM_TOKENS) for path in (adapters["three"], None))
        assert (expected[1][0] - without[1][0]).abs().max() > 0.1, "the adapter has no effect"
        assert same([answer], [expected])
