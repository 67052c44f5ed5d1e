"""Several ranks give the answers of plain transformers + PEFT, in every mode and for every sharding of adapters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from heads import HeadSpec, TaskHead, save_heads
from tests.engine.asking import ask
from tests.engine.forms import BLOCKS, FORMS, Form, FormReference, lora
from tests.engine.moves import shuffled
from tests.families import HIDDEN, LAYERS, make_prompt
from tests.harness import FixedModes, RecordingEngine
from tests.oracle import adapter_configs
from tests.references import TOLERANCE
from vlora.types import Mode

NUM_TOKENS = 5
HEAD_ROWS = (10, 20)
# Adapters of every kind: the others are replicated; in patterned16, layer 1's q has rank 5, which no number of ranks
# divides.
SHARDING = ("wide8=slora", "everywhere64=slora", "patterned16=slora", "*=replicated")
FORM = Form(
    lambda family: {**adapter_configs(family), "blocks4": lora(8, lora_alpha=16, use_rslora=True, use_bdlora=BLOCKS)},
    (
        *(("everywhere64", 1), (None, 0), ("wide8", 1), ("blocks4", 1), ("narrow4", 2), ("patterned16", 0)),
        *(("blocks4", 0), (None, 1)),
    ),
    ("wide8", "blocks4", "patterned16"),
    {},
)


class Family(FormReference):
    """A family's adapters of every sharding, one with a head whose rows are two of the output head's."""

    def __init__(self, family: str, folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(FORMS, "ranks", FORM)
            super().__init__("ranks", family, folder)
        spec = HeadSpec(
            name="kind", task="classification", labels=("a", "b"), prompt="which", num_frames=1, hidden_size=HIDDEN
        )
        rows = self.model.get_output_embeddings().weight[list(HEAD_ROWS)].detach().clone()
        save_heads(self.adapters["wide8"], {"kind": TaskHead(spec, rows, torch.zeros(2))})


class TensorParallelEngine:
    """A family's model on several ranks."""

    def __init__(self, family: Family, size: int, **settings: Any) -> None:
        self.reference, self.size = family, size
        fields = {"tensor_parallel": size, "sharding": SHARDING, "threads": 1, **settings}
        self.recorded = RecordingEngine(family, None, checkpoint=family.checkpoint, **fields)

    def check(self, mode: Mode, merged: str | None = None) -> None:
        self.recorded.modes.clear()
        self.recorded.engine.parts.scheduler.policy = FixedModes(mode, merged)
        own = self.reference.of(merged) if mode is Mode.MERGED else self.reference.cases
        self.reference.expect(self.recorded.answer(own, NUM_TOKENS), own)
        assert mode in self.recorded.modes


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def replica(request: pytest.FixtureRequest, family: Family) -> Iterator[TensorParallelEngine]:
    made = TensorParallelEngine(family, request.param)
    yield made
    made.recorded.engine.close()


FURTHER = (("qwen2_5_vl", 2), ("qwen2_5_vl", 4), ("qwen3_vl", 4), ("llava", 4))
"""Replicas that only `make test-all` starts."""


def on(*replicas: tuple[str, int]) -> pytest.MarkDecorator:
    """Families and numbers of ranks; a family's reference is computed once for consecutive tests."""
    params = []
    for family, size in replicas:
        marks = [pytest.mark.slow] if size == 4 else []
        marks += [pytest.mark.exhaustive] if (family, size) in FURTHER else []
        params.append(pytest.param(family, size, id=f"{family}-{size}", marks=marks))
    return pytest.mark.parametrize(("family", "replica"), params, indirect=True, scope="module")


EVERY_REPLICA = on(
    ("qwen2_vl", 1),
    *((family, size) for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava") for size in (2, 4)),
)


@EVERY_REPLICA
def test_unmerged_mixed_and_merged(replica: TensorParallelEngine) -> None:
    replica.check(Mode.UNMERGED)
    for merged in ("wide8", "blocks4", "patterned16") if replica.size < 4 else ("blocks4", "wide8"):
        replica.check(Mode.MIXED, merged)
        replica.check(Mode.MERGED, merged)
    replica.check(Mode.MERGED, None)


@on(("qwen2_vl", 2))
def test_collectives_match_the_formulas(replica: TensorParallelEngine) -> None:
    """Base model: two sums per layer. Replicated and block-diagonal adapters: nothing more. S-LoRA: two gathers and
    two sums per layer, for any number of adapters. And one broadcast per step.
    """
    group = replica.recorded.engine.parts.group
    assert group is not None
    ledger = group.ledger
    for case, (adapters, ranks) in enumerate(
        [((None,), ()), (("narrow4", "blocks4", None), ()), (("wide8",), (8,)), (("wide8", "everywhere64"), (8, 64))]
    ):
        family, model = replica.reference.family, replica.reference.model
        cases = [(name, make_prompt(family, model, 50 + 10 * case + i)) for i, name in enumerate(adapters)]
        replica.recorded.engine.parts.scheduler.policy = FixedModes(Mode.UNMERGED)
        replica.recorded.answer([(None, make_prompt(family, model, 99 + case))], 1)  # flushes pending orders
        for name, _ in cases:
            if name is not None:
                replica.recorded.engine.pin_adapter(name, True)
        ledger.take()
        replica.recorded.answer(cases, NUM_TOKENS)
        totals = {key: (entry.calls, entry.num_bytes) for key, entry in ledger.take().items()}
        num_tokens = [len(prompt.prompt_ids) + NUM_TOKENS - 1 for _, prompt in cases]
        # The last layer computes keys and values of all tokens, and everything else only for tokens with
        # hidden states that are read.
        num_rows = [(LAYERS - 1) * count + NUM_TOKENS for count in num_tokens]
        expected = {
            ("all_reduce", "base"): (2 * LAYERS * NUM_TOKENS, 2 * 4 * HIDDEN * sum(num_rows)),
            ("broadcast", "orders"): (NUM_TOKENS, totals["broadcast", "orders"][1]),
        }
        if ranks:
            hidden = sum(rank * count for rank, count in zip(ranks, num_rows, strict=True))
            # Its q reads other rows of a prompt than its k and v, so hidden values for all three are gathered twice.
            prompts = sum(rank * len(prompt.prompt_ids) for rank, (_, prompt) in zip(ranks, cases, strict=True))
            expected["all_gather", "slora"] = (
                2 * LAYERS * NUM_TOKENS + 1,
                4 * (5 * hidden + 3 * prompts) // replica.size,
            )
            expected["all_reduce", "slora"] = (2 * LAYERS * NUM_TOKENS, 4 * 2 * hidden)
        assert totals == expected


@on(("qwen2_vl", 2))
def test_packed_copies_on_all_ranks(replica: TensorParallelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if decoding could not read adapters in place: the set of a batch is packed when it repeats."""
    monkeypatch.setattr("atmm.gains_from_copies", lambda *_: True)
    replica.check(Mode.UNMERGED)
    linears = replica.recorded.engine.parts.device.hf_model.language_linears

    def packed() -> set[str]:
        groups = [linear.site.group for linear in linears.values() if linear.site.group is not None]
        keys = {key for group in groups if group.packed is not None for key in group.packed.layout.keys}
        return {key.rpartition("@")[0] for key in keys}

    assert packed() == set(replica.reference.adapters)
    replica.check(Mode.MIXED, "wide8")
    replica.recorded.engine.unload_adapter("narrow4")
    assert not packed()
    replica.recorded.engine.load_adapter("narrow4", replica.reference.adapters["narrow4"])
    replica.check(Mode.UNMERGED)


@on(("qwen2_vl", 1), ("qwen2_vl", 2))
def test_an_adapter_s_status_shows_its_sharding(replica: TensorParallelEngine) -> None:
    found = {status.name: status.sharding for status in replica.recorded.engine.adapters()}
    kinds = {"narrow4": "replicated", "blocks4": "bd"}
    assert found == {
        name: None if replica.size == 1 else kinds.get(name, "slora") for name in replica.reference.adapters
    }


@on(("llava", 2))
def test_in_place_switching_on_several_ranks(family: Family, replica: TensorParallelEngine) -> None:
    in_place = TensorParallelEngine(family, replica.size, switching="in_place")
    try:
        for mode, merged in ((Mode.MERGED, "wide8"), (Mode.MIXED, "blocks4"), (Mode.MERGED, None)):
            in_place.check(mode, merged)
    finally:
        in_place.recorded.engine.close()


@on(("qwen2_vl", 2))
def test_adapters_are_loaded_moved_and_evicted_in_a_tiny_arena(replica: TensorParallelEngine) -> None:
    """Every adapter under two names; the largest do not fit at the same time. Threads read and load them, and all
    movable pages move between steps.
    """
    reference = replica.reference
    twice = copy.copy(reference)
    twice.adapters = {f"{name}-{i}": path for i in (0, 1) for name, path in reference.adapters.items()}
    recorded = RecordingEngine(
        twice,
        FixedModes(Mode.MIXED, "wide8-1"),
        checkpoint=reference.checkpoint,
        scarce_memory=True,
        background=True,
        tensor_parallel=replica.size,
        sharding=tuple(f"{name}-1=slora" for name in reference.adapters),
        threads=1,
    )
    moved = shuffled(recorded)
    cases = [(name and f"{name}-{i}", prompt) for i in (0, 1) for name, prompt in reference.cases]
    answers = recorded.answer(cases, NUM_TOKENS)
    stats = recorded.engine.stats()
    recorded.engine.close()
    assert stats.num_adapter_loads >= len(twice.adapters) > stats.num_resident_adapters
    assert sum(moved) > len(moved)
    reference.expect(answers, 2 * reference.cases)


@on(("qwen2_vl", 2), ("qwen3_vl", 4))
def test_a_head_reads_the_hidden_states_of_one_rank(replica: TensorParallelEngine) -> None:
    """The head's rows are two of the output head's, so the reference's logits determine its answer."""
    case = replica.reference.of("wide8")[0]
    _, logits = replica.reference.answer(*case, num_tokens=NUM_TOKENS)
    for mode in (Mode.UNMERGED, Mode.MERGED):
        replica.recorded.engine.parts.scheduler.policy = FixedModes(mode, "wide8" if mode is Mode.MERGED else None)
        answer = replica.recorded.local.run([ask(case[1], "h", "wide8", head="kind")])["h"][-1].head
        assert answer is not None
        expected = logits[0, list(HEAD_ROWS)].softmax(0)
        torch.testing.assert_close(torch.tensor(answer.scores), expected, atol=TOLERANCE, rtol=0)
