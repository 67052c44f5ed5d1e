"""Several ranks give the answers of plain transformers + PEFT: in every mode, for every form and sharding of adapters,
in less precision, and under the load of a busy server.
"""

from __future__ import annotations

import copy
import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import IA3Config, PeftConfig
from peft.tuners.lora.config import BdLoraConfig

from heads import HeadSpec, TaskHead, save_heads
from tests.engine.asking import ask, tokens
from tests.engine.forms import BLOCKS, BOTH, FIRST, FORMS, INVOCATIONS, Form, FormReference, lora
from tests.engine.moves import shuffled
from tests.families import HIDDEN, LANGUAGE_LINEARS, LAYERS, build_model, make_prompt, vision_linears
from tests.harness import FixedModes, RecordingEngine
from tests.oracle import Oracle, adapter_configs, peft_answer, save_adapter
from tests.references import TOLERANCE, assert_same
from vlora.engine import LocalEngine
from vlora.engine.tensor_parallel.coordinator import TensorParallelRunner
from vlora.errors import BadAdapter
from vlora.types import Mode, RequestOutput

NUM_TOKENS = 5
HEAD_ROWS = (10, 20)
TOKEN = 7


def columns(family: str) -> Mapping[str, PeftConfig]:
    """Forms with further rows need layers whose inputs are whole on every rank."""
    whole = f"({LANGUAGE_LINEARS.replace('|o', '').replace('|down', '')}|{vision_linears(family)})"
    invoked: dict[str, Any] = {"task_type": "CAUSAL_LM", "alora_invocation_tokens": INVOCATIONS["wide8"]}
    return {
        "plain": lora(8),
        "dora": lora(8, whole, use_dora=True),
        "bias": lora(4, whole, lora_bias=True),
        "head": lora(4, ["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
        "ia3": IA3Config(target_modules=["k_proj", "v_proj", "up_proj"], feedforward_modules=[]),
        "tokens": lora(4, ["v_proj"], trainable_token_indices=FIRST),
        "token": lora(4, ["v_proj"], trainable_token_indices=[TOKEN]),
        "activated": lora(8, **invoked),
    }


FORMS_OF_RANKS = {
    # In patterned16, layer 1's q has rank 5, which no number of ranks divides.
    "ranks": Form(
        lambda family: {
            **adapter_configs(family),
            "blocks4": lora(8, lora_alpha=16, use_rslora=True, use_bdlora=BLOCKS),
        },
        (
            *(("everywhere64", 1), (None, 0), ("wide8", 1), ("blocks4", 1), ("narrow4", 2), ("patterned16", 0)),
            *(("blocks4", 0), (None, 1)),
        ),
        ("wide8", "blocks4", "patterned16"),
        {},
    ),
    "columns": Form(
        columns,
        (
            *(("dora", 1), ("plain", 1), (None, 0), ("bias", 1), ("head", 0), ("dora", 0), ("ia3", 1), ("tokens", 1)),
            ("token", 0, [TOKEN, 31]),
            *(("activated", 1, [*INVOCATIONS["wide8"], last, 31]) for last in (10, 11)),
        ),
        ("plain", "activated", "tokens"),
        {},
    ),
    "composed": FORMS["composed"],
}
SHARDING = {
    "ranks": ("wide8=slora", "everywhere64=slora", "patterned16=slora", "*=replicated"),
    "columns": ("dora=slora", "head=slora", "tokens=slora", "token=slora", "*=replicated"),
    "composed": ("wide8=slora", "*=replicated"),
}


class Family(FormReference):
    """A form's adapters for a family; wide8 has a head whose rows are two of the output head's."""

    def __init__(self, family: str, folder: Path, form: str = "ranks") -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(FORMS, form, FORMS_OF_RANKS[form])
            super().__init__(form, family, folder)
        if form == "ranks":
            labels = ("a", "b")
            spec = HeadSpec(
                name="kind", task="classification", labels=labels, prompt="which", num_frames=1, hidden_size=HIDDEN
            )
            rows = self.model.get_output_embeddings().weight[list(HEAD_ROWS)].detach().clone()
            save_heads(self.adapters["wide8"], {"kind": TaskHead(spec, rows, torch.zeros(2))})


class TensorParallelEngine:
    """A family's model on several ranks."""

    def __init__(self, family: Family, size: int, policy: FixedModes | None = None, **settings: Any) -> None:
        self.reference, self.size = family, size
        fields = {"tensor_parallel": size, "sharding": SHARDING[family.name], "threads": 1, **settings}
        self.recorded = RecordingEngine(family, policy, checkpoint=family.checkpoint, **fields)
        self.engine = self.recorded.engine

    def use(self, mode: Mode, merged: str | None = None) -> None:
        self.recorded.modes.clear()
        self.engine.parts.scheduler.policy = FixedModes(mode, merged)

    def check(self, mode: Mode, merged: str | None = None) -> None:
        self.use(mode, merged)
        own = self.reference.of(merged) if mode is Mode.MERGED else self.reference.cases
        self.reference.expect(self.recorded.answer(own, NUM_TOKENS), own)
        assert mode in self.recorded.modes


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    name, _, form = request.param.partition(" ")
    return Family(name, tmp_path_factory.mktemp(name), form or "ranks")


@pytest.fixture(scope="module")
def replica(request: pytest.FixtureRequest, family: Family) -> Iterator[TensorParallelEngine]:
    made = TensorParallelEngine(family, request.param)
    yield made
    made.engine.close()


@pytest.fixture
def replicas() -> Iterator[Callable[..., TensorParallelEngine]]:
    """Further replicas of a test."""
    made: list[TensorParallelEngine] = []

    def start(*given: Any, **settings: Any) -> TensorParallelEngine:
        made.append(TensorParallelEngine(*given, **settings))
        return made[-1]

    yield start
    for each in made:
        each.engine.close()


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


LLAVA = pytest.mark.parametrize("family", ["llava"], indirect=True, scope="module")


@on(
    ("qwen2_vl", 1),
    *((family, size) for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava") for size in (2, 4)),
)
def test_unmerged_mixed_and_merged(replica: TensorParallelEngine) -> None:
    replica.check(Mode.UNMERGED)
    for merged in ("wide8", "blocks4", "patterned16") if replica.size < 4 else ("blocks4", "wide8"):
        replica.check(Mode.MIXED, merged)
        replica.check(Mode.MERGED, merged)
    replica.check(Mode.MERGED, None)


@on(("qwen2_vl", 2))
def test_collectives_match_the_formulas(replica: TensorParallelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Base model: two sums per layer. Replicated and block-diagonal adapters: nothing more. S-LoRA: two gathers and
    two sums per layer, for any number of adapters. And one broadcast per step.
    """
    coordinator = replica.engine.parts.coordinator
    assert coordinator is not None and coordinator.group is not None
    group = coordinator.group
    totals: dict[tuple[str, str], tuple[int, int]] = {}

    def counted(kind: str, perform: Callable[..., Any]) -> Callable[..., Any]:
        def call(sent: Any, *cause: str) -> Any:
            key = kind, cause[0] if cause else "orders"
            calls, num_bytes = totals.get(key, (0, 0))
            totals[key] = calls + 1, num_bytes + (sent.nbytes if cause else len(sent))
            return perform(sent, *cause)

        return call

    for kind in ("all_reduce", "all_gather", "broadcast"):
        monkeypatch.setattr(group, kind, counted(kind, getattr(group, kind)))
    for case, (adapters, ranks) in enumerate(
        [((None,), ()), (("narrow4", "blocks4", None), ()), (("wide8",), (8,)), (("wide8", "everywhere64"), (8, 64))]
    ):
        family, model = replica.reference.family, replica.reference.model
        cases = [(name, make_prompt(family, model, 50 + 10 * case + i)) for i, name in enumerate(adapters)]
        replica.use(Mode.UNMERGED)
        replica.recorded.answer([(None, make_prompt(family, model, 99 + case))], 1)  # flushes pending orders
        for name, _ in cases:
            if name is not None:
                replica.engine.pin_adapter(name, True)
        totals.clear()
        replica.recorded.answer(cases, NUM_TOKENS)
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
            gathered = 4 * (5 * hidden + 3 * prompts) // replica.size
            expected["all_gather", "slora"] = (2 * LAYERS * NUM_TOKENS + 1, gathered)
            expected["all_reduce", "slora"] = (2 * LAYERS * NUM_TOKENS, 4 * 2 * hidden)
        assert totals == expected


@on(("qwen2_vl", 2))
def test_packed_copies_on_all_ranks(replica: TensorParallelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if decoding could not read adapters in place: the set of a batch is packed when it repeats."""
    monkeypatch.setattr("atmm.gains_from_copies", lambda *_: True)
    replica.check(Mode.UNMERGED)
    linears = replica.engine.parts.device.hf_model.language_linears

    def packed() -> set[str]:
        groups = [linear.site.group for linear in linears.values() if linear.site.group is not None]
        keys = {key for group in groups if group.packed is not None for key in group.packed.layout.keys}
        return {key.rpartition("@")[0] for key in keys}

    assert packed() == set(replica.reference.adapters)
    replica.check(Mode.MIXED, "wide8")
    replica.engine.unload_adapter("narrow4")
    assert not packed()
    replica.engine.load_adapter("narrow4", replica.reference.adapters["narrow4"])
    replica.check(Mode.UNMERGED)


@on(("qwen2_vl", 1), ("qwen2_vl", 2))
def test_an_adapter_s_status_shows_its_sharding(replica: TensorParallelEngine) -> None:
    found = {status.name: status.sharding for status in replica.engine.adapters()}
    kinds = {"narrow4": "replicated", "blocks4": "bd"}
    assert found == {
        name: None if replica.size == 1 else kinds.get(name, "slora") for name in replica.reference.adapters
    }


@on(("qwen2_vl", 2), ("qwen3_vl", 4))
def test_a_head_reads_the_hidden_states_of_one_rank(replica: TensorParallelEngine) -> None:
    """The head's rows are two of the output head's, so the reference's logits determine its answer."""
    case = replica.reference.of("wide8")[0]
    _, logits = replica.reference.answer(*case, num_tokens=NUM_TOKENS)
    for mode, merged in ((Mode.UNMERGED, None), (Mode.MERGED, "wide8")):
        replica.use(mode, merged)
        answer = replica.recorded.local.run([ask(case[1], "h", "wide8", head="kind")])["h"][-1].head
        assert answer is not None
        expected = logits[0, list(HEAD_ROWS)].softmax(0)
        torch.testing.assert_close(torch.tensor(answer.scores), expected, atol=TOLERANCE, rtol=0)


@on(("qwen2_vl", 2))
def test_adapters_are_loaded_moved_and_evicted_in_a_tiny_arena(
    replica: TensorParallelEngine, replicas: Callable[..., TensorParallelEngine]
) -> None:
    """Every adapter under two names; the largest do not fit at the same time. Threads read and load them, and all
    movable pages move between steps.
    """
    reference = replica.reference
    twice = copy.copy(reference)
    twice.adapters = {f"{name}-{i}": path for i in (0, 1) for name, path in reference.adapters.items()}
    sharding = tuple(f"{name}-1=slora" for name in reference.adapters)
    settings = {"sharding": sharding, "scarce_memory": True, "background": True}
    recorded = replicas(twice, replica.size, FixedModes(Mode.MIXED, "wide8-1"), **settings).recorded
    moved = shuffled(recorded)
    cases = [(name and f"{name}-{i}", prompt) for i in (0, 1) for name, prompt in reference.cases]
    answers = recorded.answer(cases, NUM_TOKENS)
    stats = recorded.engine.stats()
    assert stats.num_adapter_loads >= len(twice.adapters) > stats.num_resident_adapters
    assert sum(moved) > len(moved)
    reference.expect(answers, 2 * reference.cases)


@LLAVA
def test_in_place_switching_on_several_ranks(family: Family, replicas: Callable[..., TensorParallelEngine]) -> None:
    in_place = replicas(family, 2, switching="in_place")
    for mode, merged in ((Mode.MERGED, "wide8"), (Mode.MIXED, "blocks4"), (Mode.MERGED, None)):
        in_place.check(mode, merged)


@on(("qwen2_vl columns", 2))
def test_every_form_on_two_ranks(replica: TensorParallelEngine, tmp_path: Path) -> None:
    """The tokens before an invocation are the base model's on every rank: both share blocks of a prompt."""
    for mode, merged in ((Mode.UNMERGED, None), *((Mode.MIXED, name) for name in replica.reference.form.merged)):
        replica.check(mode, merged)
    unmergeable = {status.name for status in replica.engine.adapters() if not status.mergeable}
    assert unmergeable == {"dora", "bias", "ia3"}, "scales of other ranks are unknown"
    replica.use(Mode.UNMERGED)
    _, prompt = replica.reference.cases[-1]
    cases = [(None, prompt), ("activated", prompt)]
    base, activated = replica.recorded.answer(cases, NUM_TOKENS)
    assert float((base[1][0] - activated[1][0]).abs().max()) > 100 * TOLERANCE
    replica.reference.expect([base, activated], cases)
    assert replica.recorded.cached_tokens[1] >= 8
    folder = save_adapter(build_model("qwen2_vl"), lora(4, ["down_proj"], use_dora=True), tmp_path / "down")
    with pytest.raises(BadAdapter, match=r"use_dora is not supported .* tensor_parallel = 2"):
        replica.engine.load_adapter("down", folder)


@on(("qwen2_5_vl composed", 2))
def test_compositions_on_two_ranks(replica: TensorParallelEngine) -> None:
    replica.check(Mode.UNMERGED)
    replica.check(Mode.MIXED, BOTH)


@pytest.mark.slow
def test_blocks_cut_by_ranks_are_served_dense_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three blocks on four ranks: neither divides the other."""
    sizes = {"hidden_size": 48, "head_dim": 12, "num_key_value_heads": 4, "intermediate_size": 96}
    model = build_model("llava", text_settings=sizes)
    model.save_pretrained(tmp_path / "model")
    blocks = BdLoraConfig(BLOCKS.target_modules_bd_a, BLOCKS.target_modules_bd_b, nblocks=3)
    path = save_adapter(model, lora(6, use_bdlora=blocks), tmp_path / "three")
    reference = SimpleNamespace(family="llava", adapters={"three": path})
    prompts = [make_prompt("llava", model, seed) for seed in range(2)]
    settings: dict[str, Any] = {"checkpoint": str(tmp_path / "model"), "tensor_parallel": 4, "threads": 1}
    with caplog.at_level(logging.WARNING, "vlora.engine.tensor_parallel.coordinator"):
        recorded = RecordingEngine(reference, FixedModes(Mode.UNMERGED), **settings)
    try:
        answers = recorded.answer([("three", prompt) for prompt in prompts], NUM_TOKENS)
        assert [status.sharding for status in recorded.engine.adapters()] == ["replicated"]
    finally:
        recorded.engine.close()
    assert [record.getMessage() for record in caplog.records] == [
        "adapter 'three' has 3 blocks, which 4 ranks do not divide evenly; it is served dense, including zeros"
    ]
    for prompt, answer in zip(prompts, answers, strict=True):
        expected, without = (peft_answer(model, folder, prompt, NUM_TOKENS) for folder in (path, None))
        assert (expected[1][0] - without[1][0]).abs().max() > 0.1, "the adapter has no effect"
        assert_same(answer, expected)


# -- bfloat16 and eight bits ------------------------------------------------------------------------------------------


def distance(one: list[torch.Tensor], other: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """Relative RMS of the first token's logits."""
    error = sum(float((a - b).square().sum()) for a, b in zip(one, other, strict=True))
    return (error / sum(float(logits.square().sum()) for logits in truth)) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["none", "fp8"])
def test_two_ranks_are_as_close_to_the_truth_as_one(quantize: str, tmp_path: Path) -> None:
    """The truth is float32. Sums cut in two may be rounded twice; ranks scale their own parts of quantized rows.
    Weights are rounded to bfloat16 once and shared.
    """
    rounded = build_model("qwen2_vl", torch.bfloat16).float()
    rounded.save_pretrained(tmp_path / "model")
    oracle = Oracle("qwen2_vl", rounded, scale=0.1)  # deltas of about a tenth of the weight, as after training
    reference = SimpleNamespace(family="qwen2_vl", adapters=oracle.save(tmp_path / "adapters"))
    names = ("wide8", "everywhere64", "narrow4", None)
    cases = [(names[i % 4], make_prompt("qwen2_vl", rounded, i, num_images=i % 2, text=(12, 12))) for i in range(32)]
    truth = [oracle.generate(prompt, adapter, 1)[1] for adapter, prompt in cases]
    found: dict[tuple[int, Mode], list[torch.Tensor]] = {}
    for size in (1, 2):
        settings: dict[str, Any] = {"tensor_parallel": size, "threads": 1, "sharding": ("wide8=slora", "*=replicated")}
        settings |= {"dtype": torch.bfloat16, "quantize": quantize, "checkpoint": str(tmp_path / "model")}
        recorded = RecordingEngine(reference, None, **settings)
        try:
            for mode in (Mode.UNMERGED, Mode.MIXED):
                recorded.modes.clear()
                recorded.engine.parts.scheduler.policy = FixedModes(mode, "wide8" if mode is Mode.MIXED else None)
                found[size, mode] = [logits.float() for _, logits in recorded.answer(cases, 1)]
                assert mode in recorded.modes
        finally:
            recorded.engine.close()
    for mode in (Mode.UNMERGED, Mode.MIXED):
        one, two = (distance(found[size, mode], truth, truth) for size in (1, 2))
        assert 1e-4 < one < 0.1
        assert two <= 1.25 * one
        assert distance(found[1, mode], found[2, mode], truth) <= 1.5 * one


# -- the life of a server ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@LLAVA
def test_every_rank_reads_adapters_while_steps_run(
    family: Family, replicas: Callable[..., TensorParallelEngine], tmp_path: Path
) -> None:
    """A failed pin ends no replica."""
    folders, prompt = family.adapters, family.of("wide8")[0][1]
    empty = copy.copy(family)
    empty.adapters = {}
    local: LocalEngine = replicas(empty, 2).recorded.local
    engine = local.engine

    def ended(call: Any) -> Any:
        while not call.done():
            engine.step()
        return call.result()

    engine.load_adapter("mine", folders["narrow4"])
    engine.add(ask(prompt, "beside", "mine"))
    calls = [engine.load_in_background("mine", folders["wide8"]), engine.pin_in_background("mine")]
    assert [ended(call).loaded for call in calls] == [True, True]
    assert calls[1].result().pinned and calls[1].result().resident
    while engine.has_work:
        engine.step()
    with pytest.raises(BadAdapter):
        ended(engine.load_in_background("mine2", str(tmp_path / "nothing")))
    # Rank 0 has read it; the files change before another rank reads them.
    broken = shutil.copytree(folders["patterned16"], tmp_path / "broken")
    ended(engine.load_in_background("broken", str(broken)))
    settings = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps({**settings, "revision": "another"}))
    with pytest.raises(BadAdapter, match=r"rank 1: .* its content is \w+, but \w+ was registered"):
        ended(engine.pin_in_background("broken"))
    assert not any(status.resident for status in engine.adapters() if status.name == "broken")
    found = tokens(local.run([ask(prompt, "after", "mine", NUM_TOKENS)])["after"])
    assert found == family.answer("wide8", prompt, NUM_TOKENS)[0]


BUSY = [(Mode.MIXED, "wide8"), (Mode.UNMERGED, None), (Mode.MIXED, "blocks4"), (Mode.MIXED, "patterned16")]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.usefixtures("no_kv_admission")
@LLAVA
def test_finished_answers_are_correct_under_mixed_load(
    family: Family, replicas: Callable[..., TensorParallelEngine]
) -> None:
    """Requests are cancelled between steps, adapters unloaded while in use or being loaded; preemption, prompt reuse,
    chunked prompts and switches.
    """
    draws, num_requests, num_tokens = random.Random(4), 28, 60
    settings = {"max_step_tokens": 48, "scarce_memory": True, "background": True}
    # Requests that start one after the other rarely fill the memory together.
    engine = replicas(copy.copy(family), 2, FixedModes(*BUSY[0], plan=BUSY), encode_share=1e9, **settings).engine
    cases_of: dict[str, int] = {}  # case by request
    outputs: dict[str, list[RequestOutput]] = {}
    num_cancelled = num_unloaded = 0

    def take(new: tuple[RequestOutput, ...]) -> None:
        for output in new:
            outputs[output.request_id].append(output)

    def is_over(name: str) -> bool:
        return bool(outputs[name]) and outputs[name][-1].finished

    while engine.has_work or len(cases_of) < num_requests:
        for _ in range(draws.choice((1, 2, 3)) if len(cases_of) < num_requests else 0):
            name, case = f"r{len(cases_of)}", draws.randrange(len(family.cases))
            adapter, prompt = family.cases[case]
            cases_of[name], outputs[name] = case, []
            engine.add(ask(prompt, name, adapter, num_tokens))
        living = [name for name in cases_of if not is_over(name)]
        if living and draws.random() < 0.02:
            num_cancelled += 1
            output = engine.cancel(draws.choice(living))
            assert output is not None
            take((output,))
        if draws.random() < 0.015:
            num_unloaded += 1
            name = draws.choice(list(family.adapters))
            take(engine.unload_adapter(name))
            engine.register_adapters({name: family.adapters[name]})
        take(engine.step())
        engine.check_integrity()

    answered = 0
    for name, case in cases_of.items():
        assert is_over(name)
        if outputs[name][-1].finish_reason == "length":
            answered += 1
            assert tokens(outputs[name]) == family.answer(*family.cases[case], num_tokens)[0]
        else:
            error = outputs[name][-1].error  # cancelled, or its adapter was unloaded: no other error
            assert error is not None and error.code in ("cancelled", "aborted"), error
    stats = engine.stats()
    cached = [out[-1].timings.num_cached_tokens for out in outputs.values() if out[-1].timings is not None]
    assert answered > num_requests // 3 and num_cancelled > 1 and num_unloaded > 1
    assert stats.num_switches > 0 and stats.num_preemptions > 0 and any(cached)
    assert isinstance(engine.parts.runner, TensorParallelRunner)
    assert engine.parts.runner.num_requests == 0, "other ranks keep finished requests"
