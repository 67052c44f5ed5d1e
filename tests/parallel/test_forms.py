"""Every form of adapters, and compositions, on two ranks answer as under PEFT, however the ranks shard them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from peft import IA3Config, PeftConfig

from tests.engine.forms import BOTH, FIRST, FORMS, INVOCATIONS, NUM_TOKENS, Form, FormReference, lora
from tests.families import LANGUAGE_LINEARS, build_model, vision_linears
from tests.harness import FixedModes, RecordingEngine
from tests.oracle import save_adapter
from tests.references import TOLERANCE
from vlora.errors import BadAdapter
from vlora.types import Mode

TOKEN = 7


def configs(family: str) -> Mapping[str, PeftConfig]:
    """Forms with further rows need layers whose inputs are whole on every rank."""
    columns = f"({LANGUAGE_LINEARS.replace('|o', '').replace('|down', '')}|{vision_linears(family)})"
    invoked: dict[str, Any] = {"task_type": "CAUSAL_LM", "alora_invocation_tokens": INVOCATIONS["wide8"]}
    return {
        "plain": lora(8),
        "dora": lora(8, columns, use_dora=True),
        "bias": lora(4, columns, lora_bias=True),
        "head": lora(4, ["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
        "ia3": IA3Config(target_modules=["k_proj", "v_proj", "up_proj"], feedforward_modules=[]),
        "tokens": lora(4, ["v_proj"], trainable_token_indices=FIRST),
        "token": lora(4, ["v_proj"], trainable_token_indices=[TOKEN]),
        "activated": lora(8, **invoked),
    }


CASES: Sequence[Any] = (
    *(("dora", 1), ("plain", 1), (None, 0), ("bias", 1), ("head", 0), ("dora", 0), ("ia3", 1), ("tokens", 1)),
    ("token", 0, [TOKEN, 31]),
    *(("activated", 1, [*INVOCATIONS["wide8"], last, 31]) for last in (10, 11)),
)
SHARDING = {
    "forms": ("dora=slora", "head=slora", "tokens=slora", "token=slora", "*=replicated"),
    "composed": ("wide8=slora", "*=replicated"),
}


class Replica:
    def __init__(self, form: str, family: str, folder: Path) -> None:
        self.reference = FormReference(form, family, folder)
        settings: dict[str, Any] = {"tensor_parallel": 2, "sharding": SHARDING[form], "threads": 1}
        self.recorded = RecordingEngine(self.reference, None, checkpoint=self.reference.checkpoint, **settings)

    def check(self, mode: Mode, merged: str | None) -> None:
        self.recorded.engine.parts.scheduler.policy = FixedModes(mode, merged)
        self.recorded.modes.clear()
        self.reference.expect(self.recorded.answer(self.reference.cases, NUM_TOKENS))
        assert mode in self.recorded.modes


def replica(form: str, family: str, folder: Path) -> Iterator[Replica]:
    made = Replica(form, family, folder)
    yield made
    made.recorded.engine.close()


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FORMS, "forms", Form(configs, CASES, (), {}))
        yield from replica("forms", "qwen2_vl", tmp_path_factory.mktemp("forms"))


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    yield from replica("composed", "qwen2_5_vl", tmp_path_factory.mktemp("composed"))


@pytest.mark.parametrize("merged", [None, "plain", "activated", "tokens"])
def test_batch_of_several_forms(forms: Replica, merged: str | None) -> None:
    forms.check(Mode.MIXED if merged else Mode.UNMERGED, merged)


@pytest.mark.parametrize("merged", [None, BOTH])
def test_batch_of_compositions_and_single_adapters(composed: Replica, merged: str | None) -> None:
    composed.check(Mode.MIXED if merged else Mode.UNMERGED, merged)


def test_scales_of_other_ranks_are_unknown_so_dora_is_never_merged(forms: Replica) -> None:
    statuses = forms.recorded.engine.adapters()
    assert {status.name for status in statuses if not status.mergeable} == {"dora", "bias", "ia3"}


def test_the_tokens_before_an_invocation_are_the_base_models_on_every_rank(forms: Replica) -> None:
    """Answers of the base model and of the activated adapter to one prompt share blocks, and differ."""
    _, prompt = forms.reference.cases[-1]
    forms.recorded.engine.parts.scheduler.policy = FixedModes(Mode.UNMERGED)
    cases = [(None, prompt), ("activated", prompt)]
    base, activated = forms.recorded.answer(cases, NUM_TOKENS)
    assert float((base[1][0] - activated[1][0]).abs().max()) > 100 * TOLERANCE
    forms.reference.expect([base, activated], cases)
    assert forms.recorded.cached_tokens[1] >= 8


def test_layers_with_inputs_on_several_ranks_are_refused(forms: Replica, tmp_path: Path) -> None:
    folder = save_adapter(build_model("qwen2_vl"), lora(4, ["down_proj"], use_dora=True), tmp_path / "down")
    with pytest.raises(BadAdapter, match=r"use_dora is not supported .* tensor_parallel = 2"):
        forms.recorded.engine.load_adapter("down", folder)
