"""Several ranks give the answers of plain transformers + PEFT, in every mode and for every sharding of adapters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.config import BdLoraConfig

from heads import HeadSpec, TaskHead, save_heads
from tests.engine.test_relocation import shuffled
from tests.families import HIDDEN, LANGUAGE_LINEARS, LAYERS, Prompt, build_model, make_prompt
from tests.harness import FixedModes, RecordingEngine
from tests.oracle import Oracle
from vlora.types import Mode, Request

NUM_TOKENS = 5
TOLERANCE = 2e-5  # two ranks add in another order: 1.05e-5 on Zen 5
CASES = (
    ("everywhere64", 1),
    (None, 0),
    ("wide8", 1),
    ("blocks4", 1),
    ("narrow4", 2),
    ("patterned16", 0),
    ("blocks4", 0),
    (None, 1),
)
# Adapters of every kind: the others are replicated; in patterned16, layer 1's q has rank 5, which no number of ranks
# divides.
HEAD_ROWS = (10, 20)
SHARDING = ("wide8=slora", "everywhere64=slora", "patterned16=slora", "*=replicated")


def add_blocks(oracle: Oracle, name: str, num_blocks: int) -> None:
    """Give the oracle a block-diagonal adapter of every language layer, created and computed by PEFT."""
    assert oracle.peft is not None
    blocks = BdLoraConfig(
        target_modules_bd_a=["o_proj", "down_proj"],
        target_modules_bd_b=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
        nblocks=num_blocks,
    )
    oracle.peft.add_adapter(
        name, LoraConfig(r=8, lora_alpha=16, use_rslora=True, target_modules=LANGUAGE_LINEARS, use_bdlora=blocks)
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter_name, parameter in oracle.peft.named_parameters():
            if f".{name}." in parameter_name:
                # As large as the oracle's other adapters, with factors as wide as these without zeros.
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    oracle.peft.eval()


class Family:
    """A family's model and adapters on disk, and reference answers."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        model = build_model(family)
        self.checkpoint = str(folder / "model")
        model.save_pretrained(self.checkpoint)
        self.oracle = oracle = Oracle(family, model)
        add_blocks(oracle, "blocks4", 4)
        spec = HeadSpec(
            name="kind", task="classification", labels=("a", "b"), prompt="which", num_frames=1, hidden_size=HIDDEN
        )
        head = TaskHead(spec, model.get_output_embeddings().weight[list(HEAD_ROWS)].detach().clone(), torch.zeros(2))
        self.adapters = {**oracle.save(folder / "adapters"), "blocks4": str(folder / "adapters" / "blocks4")}
        save_heads(self.adapters["wide8"], {"kind": head})
        self.cases: list[tuple[str | None, Prompt]] = [
            (adapter, make_prompt(family, model, seed, num_images=images))
            for seed, (adapter, images) in enumerate(CASES)
        ]
        self.answers = [oracle.generate(prompt, adapter, NUM_TOKENS) for adapter, prompt in self.cases]


class TensorParallelEngine:
    """A family's model on several ranks."""

    def __init__(self, family: Family, size: int, **settings: Any) -> None:
        self.family, self.adapters, self.checkpoint = family.family, family.adapters, family.checkpoint
        self.cases, self.answers = family.cases, family.answers
        self.size = size
        self.recorded = RecordingEngine(
            self,
            FixedModes(Mode.UNMERGED),
            checkpoint=self.checkpoint,
            tensor_parallel=size,
            sharding=SHARDING,
            threads=1,
            **settings,
        )

    def check(self, mode: Mode, merged: str | None = None) -> None:
        self.recorded.modes.clear()
        self.recorded.engine.parts.scheduler.policy = FixedModes(mode, merged)
        own = [i for i, (adapter, _) in enumerate(self.cases) if mode is not Mode.MERGED or adapter == merged]
        answers = self.recorded.answer([self.cases[i] for i in own], NUM_TOKENS)
        assert mode in self.recorded.modes
        for i, (tokens, logits) in zip(own, answers, strict=True):
            want_tokens, want_logits = self.answers[i]
            assert tokens == want_tokens
            assert float((logits - want_logits).abs().max()) < TOLERANCE


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def replica(request: pytest.FixtureRequest, family: Family) -> Iterator[TensorParallelEngine]:
    made = TensorParallelEngine(family, request.param)
    yield made
    made.recorded.engine.close()


def on(*replicas: tuple[str, int]) -> pytest.MarkDecorator:
    """Families and numbers of ranks; a family's reference is computed once for consecutive tests."""
    params = [
        pytest.param(family, size, id=f"{family}-{size}", marks=pytest.mark.slow if size == 4 else ())
        for family, size in replicas
    ]
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
        model = build_model(replica.family)
        cases = [(name, make_prompt(replica.family, model, 50 + 10 * case + i)) for i, name in enumerate(adapters)]
        replica.recorded.engine.parts.scheduler.policy = FixedModes(Mode.UNMERGED)
        replica.recorded.answer([(None, make_prompt(replica.family, model, 99 + case))], 1)  # flushes pending orders
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

    assert packed() == set(replica.adapters)
    replica.check(Mode.MIXED, "wide8")
    replica.recorded.engine.unload_adapter("narrow4")
    assert not packed()
    replica.recorded.engine.load_adapter("narrow4", replica.adapters["narrow4"])
    replica.check(Mode.UNMERGED)


@on(("qwen2_vl", 1), ("qwen2_vl", 2))
def test_an_adapter_s_status_shows_its_sharding(replica: TensorParallelEngine) -> None:
    found = {status.name: status.sharding for status in replica.recorded.engine.adapters()}
    kinds = {"narrow4": "replicated", "blocks4": "bd"}
    assert found == {name: None if replica.size == 1 else kinds.get(name, "slora") for name in replica.adapters}


@on(("llava", 2))
def test_in_place_switching_on_several_ranks(family: Family, replica: TensorParallelEngine) -> None:
    in_place = TensorParallelEngine(family, replica.size, switching="in_place")
    try:
        for mode, merged in ((Mode.MERGED, "wide8"), (Mode.MIXED, "blocks4"), (Mode.MERGED, None)):
            in_place.check(mode, merged)
    finally:
        in_place.recorded.engine.close()


@on(("llava", 2))
def test_adapters_are_loaded_moved_and_evicted_in_a_tiny_arena(replica: TensorParallelEngine) -> None:
    """Every adapter under two names; the largest do not fit at the same time. Threads read and load them, and all
    movable pages move between steps.
    """
    twice = copy.copy(replica)
    twice.adapters = {f"{name}-{i}": path for i in (0, 1) for name, path in replica.adapters.items()}
    recorded = RecordingEngine(
        twice,
        FixedModes(Mode.MIXED, "wide8-1"),
        checkpoint=replica.checkpoint,
        scarce_memory=True,
        background=True,
        tensor_parallel=replica.size,
        sharding=tuple(f"{name}-1=slora" for name in replica.adapters),
        threads=1,
    )
    moved = shuffled(recorded)
    cases = [(name and f"{name}-{i}", prompt) for i in (0, 1) for name, prompt in replica.cases]
    answers = recorded.answer(cases, NUM_TOKENS)
    stats = recorded.engine.stats()
    recorded.engine.close()
    assert stats.num_adapter_loads >= len(twice.adapters) > stats.num_resident_adapters
    assert sum(moved) > len(moved)
    for (tokens, logits), (want_tokens, want_logits) in zip(answers, 2 * replica.answers, strict=True):
        assert tokens == want_tokens
        assert float((logits - want_logits).abs().max()) < TOLERANCE


@on(("qwen2_vl", 2), ("qwen3_vl", 4))
def test_a_head_reads_the_hidden_states_of_one_rank(replica: TensorParallelEngine) -> None:
    """The head's rows are two of the output head's, so the reference's logits determine its answer."""
    case = next(case for case, (adapter, _) in enumerate(replica.cases) if adapter == "wide8")
    prompt, (_, logits) = replica.cases[case][1], replica.answers[case]
    for mode in (Mode.UNMERGED, Mode.MERGED):
        replica.recorded.engine.parts.scheduler.policy = FixedModes(mode, "wide8" if mode is Mode.MERGED else None)
        outputs = replica.recorded.local.run(
            [Request(request_id="h", prompt_ids=prompt.prompt_ids, vision=prompt.vision, adapter="wide8", head="kind")]
        )
        answer = outputs["h"][-1].head
        assert answer is not None
        expected = logits[0, list(HEAD_ROWS)].softmax(0)
        torch.testing.assert_close(torch.tensor(answer.scores), expected, atol=TOLERANCE, rtol=0)
