"""Samples of different lengths are read in separate forwards, which changes only the run time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.data.samples import Sample, Splits
from fusion.training import collator
from fusion.training.collator import group_by_length
from fusion.training.trainer import LoraTrainer
from tests.fusion.small import COLORS, color_splits, picture, plan_of, trainer_of, write_base

pytestmark = pytest.mark.slow


def clips(count: int, seed: int) -> list[Sample]:
    """Three frames of one colour, then one of another."""
    rng = np.random.default_rng(seed)
    pairs = rng.permutation(list(itertools.permutations(range(3), 2)) * count)[:count]
    return [
        Sample((*(picture(first, rng) for _ in range(3)), picture(last, rng)), int(last))
        for first, last in pairs.tolist()
    ]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> LoraTrainer:
    """Pictures and clips in one adapter, in float32."""
    torch.set_num_threads(1)
    moving = Splits("action", COLORS, clips(12, 0), clips(6, 1), clips(6, 2), real=False)
    plan = plan_of(write_base(tmp_path_factory.mktemp("base")), ("colors", "clips"), bfloat16=False, steps=3)
    trainer = trainer_of(plan, {"colors": color_splits(), "clips": moving})
    trainer.adapter.reset()
    trainer.train_together(("colors", "clips"))
    return trainer


def gradients(trainer: LoraTrainer) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The outputs for each sample of a mixed batch, and the gradients of its loss."""
    rng = np.random.default_rng(0)
    batch = [pair for _ in range(4) for name in ("clips", "colors") for pair in trainer.draw(rng, name, 1)]
    parameters = trainer.adapter.parameters
    for parameter in parameters.values():
        parameter.requires_grad_(True)
        parameter.grad = None
    outputs = trainer.adapter.forward(batch)
    trainer.adapter.loss(batch, outputs).backward()
    each = torch.cat([outputs.last.sum(1), outputs.words, *(image.sum(1) for image in outputs.images)])
    return each.tolist(), {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}


def test_grouping_by_length_changes_no_gradient(mixed: LoraTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards: list[tuple[int, ...]] = []
    hook = mixed.adapter.base.hf_model.text_model.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(kwargs["inputs_embeds"].shape[:2]), with_kwargs=True
    )
    outputs, grouped = gradients(mixed)
    (few, short), (many, long) = forwards
    assert few == many == 4 and long > 2 * short
    monkeypatch.setattr(collator, "group_by_length", lambda lengths: [list(range(len(lengths)))])
    padded_outputs, whole = gradients(mixed)
    hook.remove()
    assert forwards[2:] == [(8, long)]
    assert outputs == pytest.approx(padded_outputs, rel=1e-4, abs=1e-4)
    assert grouped.keys() == whole.keys() and len(whole) > 25
    for name, wanted in whole.items():
        assert torch.allclose(grouped[name], wanted, rtol=1e-3, atol=1e-6 * max(1.0, float(wanted.abs().max()))), name


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40))
def test_each_row_is_grouped_once_with_rows_of_similar_length(lengths: list[int]) -> None:
    groups = group_by_length(lengths)
    assert sorted(row for rows in groups for row in rows) == list(range(len(lengths)))
    for rows in groups:
        assert max(lengths[row] for row in rows) <= 1.25 * min(lengths[row] for row in rows)
    shortest = sorted(min(lengths[row] for row in rows) for rows in groups)
    assert all(other > 1.25 * one for one, other in itertools.pairwise(shortest))


def test_one_group_is_left_in_its_order() -> None:
    assert group_by_length([81, 80, 82]) == [[0, 1, 2]] and group_by_length([300, 80, 81]) == [[1, 2], [0]]
