"""The last layer computes only rows that are read; decode steps that recur repeat calls. Results do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import atmm
from atmm import Lane
from tests import device
from tests.families import FAMILIES, Prompt, make_prompt
from tests.harness import FixedModes, RecordingEngine
from tests.references import Reference
from vlora.errors import UnsupportedModel
from vlora.lora import adapted_linear
from vlora.lora.adapted_linear import LaneScope
from vlora.models import fused_layers
from vlora.models.last_layer import LastLayer, lanes_of_rows
from vlora.types import Mode

NUM_TOKENS = 5
ADAPTERS = ("wide8", None, "everywhere64", "patterned16", "wide8")
PLANS: dict[str, list[tuple[Mode, str | None]]] = {
    "unmerged": [(Mode.UNMERGED, None)],
    "mixed": [(Mode.MIXED, "wide8")],
    "changing": [(Mode.MIXED, "wide8"), (Mode.UNMERGED, None)],
}


ROWS = [
    pytest.param(family, mode, tokens, marks=() if (place + turn) % 6 == 0 else pytest.mark.exhaustive)
    for place, family in enumerate(FAMILIES)
    for turn, (mode, tokens) in enumerate((mode, tokens) for tokens in (512, 13) for mode in PLANS)
]
"""Each family in one mode, with prompts whole or in chunks."""


def rows_of(
    reference: Reference,
    cases: list[tuple[str | None, Prompt]],
    mode: str,
    step_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[int], ...]:
    """The rows that k_proj, gate_proj and down_proj compute in the last layer by call, each by its own product.

    The answers are the oracle's.
    """
    monkeypatch.setattr(adapted_linear, "joins", lambda *_: False)
    monkeypatch.setattr(fused_layers, "MOST_TAPED", 0)
    policy = FixedModes(Mode.UNMERGED, plan=PLANS[mode])  # each run starts with its first mode
    recorded = RecordingEngine(reference, policy, max_step_tokens=step_tokens, prefix_cache=False)
    layer: Any = recorded.engine.parts.device.hf_model.text_model.layers[-1]
    counted: tuple[list[int], ...] = ([], [], [])
    for module, calls in zip((layer.self_attn.k_proj, layer.mlp.gate_proj, layer.mlp.down_proj), counted, strict=True):
        module.register_forward_hook(lambda _, given, __, calls=calls: calls.append(given[0].shape[-2]))
    for (tokens, _), case in zip(recorded.answer(cases, NUM_TOKENS), cases, strict=True):
        assert tokens == reference.oracle.generate(case[1], case[0], NUM_TOKENS)[0]
    return counted


@pytest.mark.parametrize(("family", "mode", "step_tokens"), ROWS)
def test_the_last_layer_computes_what_is_read(
    references: Callable[[str], Reference], family: str, mode: str, step_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of all tokens, and everything else of those with an answer."""
    reference = references(family)
    cases = [
        (adapter, make_prompt(reference.family, reference.model, seed, num_images=seed % 2))
        for seed, adapter in enumerate(ADAPTERS)
    ]
    keys, gates, downs = rows_of(reference, cases, mode, step_tokens, monkeypatch)
    assert sum(keys) == sum(len(prompt.prompt_ids) + NUM_TOKENS - 1 for _, prompt in cases)
    assert sum(gates) == sum(downs) == len(cases) * NUM_TOKENS
    prompt = make_prompt(reference.family, reference.model, 1, num_images=1)
    keys, gates, _ = rows_of(reference, [("wide8", prompt)], mode, 13, monkeypatch)
    assert len(keys) >= 2 + NUM_TOKENS - 1 and gates == [1] * NUM_TOKENS


@pytest.mark.skipif(
    not atmm.serves_attention(torch.device(device.name), torch.float32), reason="needs the compiled kernels of a CPU"
)
def test_decode_steps_that_recur_repeat_their_calls(
    references: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the base model's weights and over merged ones, while contexts outgrow the room for their rows."""
    reference = references("qwen3_vl")
    repeated: list[atmm.Tape] = []
    repeat = atmm.Tape.repeat

    def counted(tape: atmm.Tape) -> None:
        repeated.append(tape)
        repeat(tape)

    monkeypatch.setattr(atmm.Tape, "repeat", counted)
    recorded = RecordingEngine(reference, FixedModes(Mode.MERGED, "wide8"), prefix_cache=False)
    for adapter in (None, "wide8", None):
        repeated.clear()
        cases = [(adapter, make_prompt(reference.family, reference.model, seed, num_images=seed)) for seed in range(2)]
        for (tokens, _), case in zip(recorded.answer(cases, 24), cases, strict=True):
            assert tokens == reference.oracle.generate(case[1], case[0], 24)[0]
        assert len(repeated) >= 12 and len(set(map(id, repeated))) <= 3


@pytest.mark.skipif(
    not atmm.serves_attention(torch.device(device.name), torch.float32), reason="needs the compiled kernels of a CPU"
)
def test_decode_steps_with_the_same_lanes_repeat_their_calls(
    references: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the lanes or the factors at their addresses change: an adapter is loaded again under the same name."""
    reference = references("qwen2_vl")
    repeated: list[atmm.Tape] = []
    repeat = atmm.Tape.repeat
    monkeypatch.setattr(atmm.Tape, "repeat", lambda tape: repeated.append(tape) or repeat(tape))  # type: ignore[func-returns-value]
    recorded = RecordingEngine(reference, FixedModes(Mode.UNMERGED), prefix_cache=False)
    linears = recorded.engine.parts.device.hf_model.language_linears.values()
    for adapters in (("wide8", "wide8"), ("wide8", "patterned16"), (None, "wide8"), ("wide8", "wide8")):
        repeated.clear()
        cases = [
            (adapter, make_prompt(reference.family, reference.model, seed, num_images=seed))
            for seed, adapter in enumerate(adapters)
        ]
        for (tokens, _), case in zip(recorded.answer(cases, 24), cases, strict=True):
            assert tokens == reference.oracle.generate(case[1], case[0], 24)[0]
        assert len(repeated) >= 8 and len(set(map(id, repeated))) <= 4
        for linear in linears:  # as if moved: equal values elsewhere, and nothing at the addresses before
            for key, own in list(linear.site.factors.items()):
                linear.site.factors[key] = atmm.Factors(*(part.clone() for part in own))
                for part in own:
                    part.fill_(torch.nan)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(4, 4)


def test_a_layer_of_another_shape_is_refused() -> None:
    layer = nn.Module()
    layer.self_attn, layer.mlp = Attention(), nn.Linear(4, 4)
    with pytest.raises(UnsupportedModel, match="no self_attn with q_proj"):
        LastLayer(layer, LaneScope())


@given(st.data())
def test_lanes_of_selected_rows_keep_the_adapter_of_each_row(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 12))
    lanes = []
    for number in range(data.draw(st.integers(0, 4))):
        start = data.draw(st.integers(0, num_rows))
        sign = data.draw(st.sampled_from([1.0, -1.0]))
        lanes.append(Lane(str(number), start, data.draw(st.integers(start, num_rows)), sign))
    rows = sorted(data.draw(st.sets(st.integers(0, num_rows - 1))))
    kept = lanes_of_rows(lanes, np.array(rows, dtype=np.int64))
    for place, row in enumerate(rows):
        before = {(lane.key, lane.sign) for lane in lanes if lane.start <= row < lane.stop}
        assert {(lane.key, lane.sign) for lane in kept if lane.start <= place < lane.stop} == before
