"""Adapters with weights of their own for some tokens answer as under PEFT, in every mode, tied and untied."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
from peft import LoraConfig, TrainableTokensConfig

from tests.engine.test_relocation import shuffled
from tests.families import EXHAUSTIVE_FAMILIES, FAMILIES, LANGUAGE_LINEARS, VOCAB, build_model
from tests.harness import FixedModes, RecordingEngine, run_engine
from tests.oracle import save_adapter
from tests.references import NUM_TOKENS, TOLERANCE, CaseReference, assert_same
from vlora.errors import BadAdapter
from vlora.lora import peft_format
from vlora.lora.own_layers import OwnLayer
from vlora.types import Mode

pytestmark = pytest.mark.gpu

CASES = (("tokens", 1), ("plain", 0), ("both", 1), (None, 1), ("alone", 0), ("tokens", 0), ("head", 1), ("alone", 1))
PLAN = [(Mode.MIXED, "tokens"), (Mode.UNMERGED, None), (Mode.MIXED, "plain"), (Mode.MIXED, "both")]
FIRST, SECOND = list(range(90, 4, -2)), list(range(3, 60, 3))


class TokenReference(NamedTuple):
    answers: CaseReference
    new_model: Callable[[], Any]


def tied_model(family: str) -> Any:
    model = build_model(family)
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = True
    model.tie_weights()
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    return model


def lora_configs() -> dict[str, LoraConfig]:
    of_layers = {"embed_tokens": FIRST, "lm_head": SECOND}
    return {
        "plain": LoraConfig(r=8, target_modules=LANGUAGE_LINEARS),
        "tokens": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], trainable_token_indices=FIRST),
        "both": LoraConfig(r=8, target_modules=["q_proj"], trainable_token_indices=of_layers),
        "head": LoraConfig(r=4, target_modules=["v_proj"], trainable_token_indices={"lm_head": FIRST}),
    }


def cases() -> Iterator[Any]:
    """Families, each with whether its embedding is tied."""
    for family in FAMILIES:
        marks = pytest.mark.exhaustive if family in EXHAUSTIVE_FAMILIES else ()
        yield pytest.param((family, False), marks=marks)
    yield from (("qwen2_vl", True), ("llava", True))


@pytest.fixture(scope="module", params=cases(), ids=str)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TokenReference:
    family, tied = request.param
    new_model = tied_model if tied else build_model
    configs = {**lora_configs(), "alone": TrainableTokensConfig(token_indices=SECOND)}
    folder = tmp_path_factory.mktemp("tokens")
    answers = CaseReference.of_configs(family, new_model(family), configs, CASES, folder)
    return TokenReference(answers, lambda: new_model(family))


@pytest.mark.parametrize(
    ("mode", "merged"),
    [(Mode.UNMERGED, None), (Mode.MIXED, "tokens"), pytest.param(Mode.MIXED, "plain", marks=pytest.mark.slow)],
    ids=["unmerged", "mixed-tokens", "mixed-plain"],
)
def test_batch_of_several_adapters(reference: TokenReference, mode: Mode, merged: str | None) -> None:
    policy = FixedModes(mode, merged)
    run = run_engine(reference.answers, policy, NUM_TOKENS, encode_share=1e9, model=reference.new_model())
    assert mode in run.modes
    reference.answers.expect(run.answers)


@pytest.mark.parametrize("merged", ["tokens", "both", "head", "alone"])
def test_merged_batch_of_one_adapter(reference: TokenReference, merged: str) -> None:
    own = [i for i, (adapter, _) in enumerate(CASES) if adapter == merged]
    policy = FixedModes(Mode.MERGED, merged)
    run = run_engine(reference.answers, policy, NUM_TOKENS, only=own, model=reference.new_model())
    assert run.modes == {Mode.MERGED}
    for got, case in zip(run.answers, own, strict=True):
        assert_same(got, reference.answers.answers[case])


@pytest.mark.slow
@pytest.mark.usefixtures("no_kv_admission")
def test_adapters_move_in_the_arena_between_steps(reference: TokenReference) -> None:
    policy = FixedModes(*PLAN[0], plan=PLAN)
    recorded = RecordingEngine(reference.answers, policy, max_step_tokens=24, model=reference.new_model())
    recorded.answer(reference.answers.cases, 1)  # from now on images are cached, so that all requests start at once
    counts = shuffled(recorded)
    answers = recorded.answer(reference.answers.cases, NUM_TOKENS)
    assert sum(counts) > len(counts)
    reference.answers.expect(answers)


@pytest.mark.parametrize(("left_out", "adapter"), [("multiply", "head"), ("look_up", "tokens")])
def test_without_the_tokens_answers_are_wrong(
    reference: TokenReference, left_out: str, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnLayer, left_out, lambda *_: None)
    assert first_difference(reference, adapter) > 100 * TOLERANCE


@pytest.mark.parametrize("reference", [("qwen2_vl", True)], ids=str, indirect=True)
def test_the_tied_output_head_changes_too(reference: TokenReference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_format, "with_tied_tokens", lambda targets, _: targets)
    assert first_difference(reference, "tokens") > 100 * TOLERANCE


class NoAdapters:
    family = "llava"
    adapters: ClassVar[dict[str, str]] = {}


@pytest.fixture(scope="module")
def loaded() -> RecordingEngine:
    return RecordingEngine(NoAdapters(), None)


def first_difference(reference: TokenReference, adapter: str) -> float:
    case = next(index for index, (name, _) in enumerate(CASES) if name == adapter)
    policy = FixedModes(Mode.UNMERGED)
    run = run_engine(reference.answers, policy, NUM_TOKENS, only=[case], model=reference.new_model())
    return float((run.answers[0][1][0] - reference.answers.answers[case][1][0]).abs().max())


@pytest.mark.parametrize(
    ("adapter", "changes", "why"),
    [
        ("tokens", {"trainable_token_indices": FIRST[1:]}, r"has shape \(43, 64\) for 42 tokens"),
        ("tokens", {"trainable_token_indices": [VOCAB, *FIRST[1:]]}, f"but this base model has {VOCAB} tokens"),
        ("tokens", {"trainable_token_indices": [7, *FIRST[1:-1], 7]}, "must be a list of different token ids"),
        ("tokens", {"trainable_token_indices": [-1, *FIRST[1:]]}, "must be a list of different token ids"),
        ("tokens", {"trainable_token_indices": "1"}, "must be a list of different token ids"),
        ("tokens", {"trainable_token_indices": {"lm_head": FIRST}}, "trainable_token_indices gives null for .*embed"),
        ("tokens", {"trainable_token_indices": None}, "trainable_token_indices gives null"),
        (
            "plain",
            {"trainable_token_indices": FIRST},
            "trainable_token_indices is set, but .* has no weights",
        ),
        ("alone", {"token_indices": FIRST}, r"has shape \(19, 64\) for 43 tokens"),
        ("alone", {"peft_type": "IA3"}, "init_weights = true is not supported"),
        ("plain", {"peft_type": "TRAINABLE_TOKENS", "r": None}, "bias = 'none' is not supported"),
    ],
)
def test_folders_that_are_refused(
    loaded: RecordingEngine, tmp_path: Path, adapter: str, changes: dict[str, Any], why: str
) -> None:
    config = TrainableTokensConfig(token_indices=SECOND) if adapter == "alone" else lora_configs()[adapter]
    folder = Path(save_adapter(build_model("llava"), config, tmp_path / "changed"))
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(BadAdapter, match=why) as refused:
        loaded.engine.load_adapter("changed", str(folder))
    assert "\n" not in str(refused.value)
