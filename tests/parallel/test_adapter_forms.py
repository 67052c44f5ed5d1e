"""DoRA, biases, IA3, own output heads and tokens, and activated adapters on several ranks answer as under PEFT."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from peft import IA3Config, LoraConfig

from tests.engine.test_reuse import continued
from tests.families import LANGUAGE_LINEARS, build_model, make_prompt, vision_linears
from tests.harness import FixedModes, RecordingEngine
from tests.oracle import peft_answer, save_adapter
from tests.references import NUM_TOKENS, TOLERANCE, CaseReference, assert_same
from vlora.errors import BadAdapter
from vlora.types import Mode

FAMILY = "qwen2_vl"
CASES = (("dora", 1), ("plain", 1), (None, 0), ("bias", 1), ("head", 0), ("dora", 0), ("ia3", 1), ("tokens", 1))
INVOCATION = [150, 151]
TOKEN = 7


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> CaseReference:
    model, folder = build_model(FAMILY), tmp_path_factory.mktemp("forms")
    columns = f"({LANGUAGE_LINEARS.replace('|o', '').replace('|down', '')}|{vision_linears(FAMILY)})"
    configs = {
        "plain": LoraConfig(r=8, target_modules=LANGUAGE_LINEARS),
        "dora": LoraConfig(r=8, use_dora=True, target_modules=columns),
        "bias": LoraConfig(r=4, lora_bias=True, target_modules=columns),
        "head": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
        "ia3": IA3Config(target_modules=["k_proj", "v_proj", "up_proj"], feedforward_modules=[]),
        "tokens": LoraConfig(r=4, target_modules=["v_proj"], trainable_token_indices=list(range(90, 4, -2))),
        "token": LoraConfig(r=4, target_modules=["v_proj"], trainable_token_indices=[TOKEN]),
        "activated": LoraConfig(
            r=8,
            target_modules=LANGUAGE_LINEARS,
            task_type="CAUSAL_LM",
            alora_invocation_tokens=INVOCATION,
        ),
    }
    model.save_pretrained(folder / "model")
    found = CaseReference.of_configs(FAMILY, model, configs, CASES, folder)
    prompt = continued(make_prompt(FAMILY, model, 3, text=(5, 6)), [TOKEN, 31])
    found.cases.append(("token", prompt))
    found.answers.append(peft_answer(model, found.adapters["token"], prompt, NUM_TOKENS))
    for seed in (1, 2):  # the invocation is in the middle of the prompt, after a picture
        prompt = continued(make_prompt(FAMILY, model, seed, num_images=1, text=(5, 6)), [*INVOCATION, 9 + seed, 31])
        found.cases.append(("activated", prompt))
        found.answers.append(peft_answer(model, found.adapters["activated"], prompt, NUM_TOKENS))
    return found


@pytest.fixture(scope="module")
def recorded(reference: CaseReference) -> Iterator[RecordingEngine]:
    folder = str(reference.adapters["plain"]).removesuffix("plain")
    recorded = RecordingEngine(
        reference,
        None,
        checkpoint=f"{folder}model",
        tensor_parallel=2,
        sharding=("dora=slora", "head=slora", "tokens=slora", "token=slora", "*=replicated"),
        threads=1,
    )
    yield recorded
    recorded.engine.close()


@pytest.mark.parametrize(
    ("mode", "merged"),
    [(Mode.UNMERGED, None), (Mode.MIXED, "plain"), (Mode.MIXED, "activated"), (Mode.MIXED, "tokens")],
    ids=["unmerged", "mixed", "mixed-activated", "mixed-tokens"],
)
def test_batch_of_several_adapters(
    reference: CaseReference, recorded: RecordingEngine, mode: Mode, merged: str | None
) -> None:
    recorded.engine.parts.scheduler.policy = FixedModes(mode, merged)
    answers = recorded.answer(reference.cases, NUM_TOKENS)
    assert mode in recorded.modes
    reference.expect(answers)


def test_scales_of_other_ranks_are_unknown_so_dora_is_never_merged(recorded: RecordingEngine) -> None:
    mergeable = {status.name: status.mergeable for status in recorded.engine.adapters()}
    assert {name for name, may_merge in mergeable.items() if not may_merge} == {"dora", "bias", "ia3"}


def test_the_tokens_before_an_invocation_are_the_base_models_on_every_rank(
    reference: CaseReference, recorded: RecordingEngine
) -> None:
    """Answers of the base model and of the activated adapter to one prompt share blocks, and differ."""
    _, prompt = reference.cases[-1]
    recorded.engine.parts.scheduler.policy = FixedModes(Mode.UNMERGED)
    base, activated = recorded.answer([(None, prompt), ("activated", prompt)], NUM_TOKENS)
    assert float((base[1][0] - activated[1][0]).abs().max()) > 100 * TOLERANCE
    assert_same(activated, reference.answers[-1])
    assert recorded.cached_tokens[1] >= 8


def test_layers_with_inputs_on_several_ranks_are_refused(
    recorded: RecordingEngine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = LoraConfig(r=4, use_dora=True, target_modules=["down_proj"])
    folder = save_adapter(build_model(FAMILY), config, tmp_path_factory.mktemp("down"))
    with pytest.raises(BadAdapter, match=r"use_dora is not supported .* tensor_parallel = 2"):
        recorded.engine.load_adapter("down", folder)
