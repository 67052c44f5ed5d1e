"""Activated adapters (aLoRA) begin at their invocation tokens, as in PEFT; the tokens before are the base model's."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from peft import LoraConfig, get_peft_model

from heads import save_heads
from tests import device
from tests.engine.test_heads import head_request, heads_of
from tests.engine.test_reuse import continued, words
from tests.families import FAMILIES, LANGUAGE_LINEARS, Prompt, build_model, make_prompt
from tests.harness import FixedModes, RecordingEngine, run_engine
from tests.queued_executor import QueuedExecutor
from tests.references import Answer, assert_same
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.engine.request_checks import CheckedRequest, RequestChecks
from vlora.errors import BadRequest
from vlora.memory.arena import PAGE_BYTES
from vlora.orchestrator import make_policy
from vlora.types import Mode, Request, RequestOutput

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

NUM_TOKENS = 8
INVOCATIONS = {"wide8": [150, 151], "narrow4": [160, 161, 162]}
ADAPTERS = (*INVOCATIONS, "ordinary8")
MODES = {
    "unmerged": FixedModes(Mode.UNMERGED),
    "merged": make_policy("merged_only"),
    "by cost": make_policy("cost_based"),
    "mixed with an activated one merged": FixedModes(Mode.MIXED, "wide8"),
    "mixed with an ordinary one merged": FixedModes(Mode.MIXED, "ordinary8"),
    "changing": FixedModes(Mode.UNMERGED, plan=[(Mode.MIXED, "wide8"), (Mode.UNMERGED, None), (Mode.MIXED, "narrow4")]),
}

Case = tuple[str | None, Prompt]


class ActivatedReference:
    """A model with two activated adapters and an ordinary one, and PEFT's answers."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.model = build_model(family)
        model = copy.deepcopy(self.model)
        for name in ADAPTERS:
            config = LoraConfig(
                r=int("".join(filter(str.isdigit, name))),
                lora_alpha=16,
                target_modules=LANGUAGE_LINEARS,
                task_type="CAUSAL_LM",
                alora_invocation_tokens=INVOCATIONS.get(name),
                init_lora_weights=False,
            )
            if name == ADAPTERS[0]:
                self._peft = get_peft_model(model, config, adapter_name=name)
            else:
                self._peft.add_adapter(name, config)
        with torch.no_grad():
            for name, parameter in self._peft.named_parameters():
                if "lora_" in name:
                    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2 / parameter.shape[1] ** 0.5)
        self._peft.eval().save_pretrained(str(folder))
        self.adapters = {name: str(folder / name) for name in ADAPTERS}
        heads = heads_of(0)
        self._head = heads["classification"]
        save_heads(self.adapters["wide8"], {name: heads[name] for name in ("classification", "detection")})
        self._answers: dict[tuple[str | None, tuple[int, ...]], Answer] = {}

    def prompt(self, seed: int, *parts: Sequence[int], num_images: int = 1) -> Prompt:
        """Images after some text, then the parts."""
        picture = make_prompt(self.family, self.model, seed, num_images=num_images, text=(5, 6))
        return continued(picture, [token for part in parts for token in part]) if parts else picture

    @torch.no_grad()
    def answer(self, adapter: str | None, prompt: Prompt) -> Answer:
        key = (adapter, prompt.prompt_ids)
        if key not in self._answers:
            arguments = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "return_dict_in_generate": True}
            if adapter is None:
                with self._peft.disable_adapter():
                    out = self._peft.generate(**prompt.kwargs, **arguments, output_logits=True)
            else:
                self._peft.set_adapter(adapter)
                out = self._peft.generate(**prompt.kwargs, **arguments, output_logits=True)
            logits = torch.stack([step[0] for step in out.logits]).float()
            self._answers[key] = logits.argmax(-1).tolist(), logits
        return self._answers[key]

    @torch.no_grad()
    def probabilities(self, adapter: str, prompt: Prompt) -> torch.Tensor:
        """Of the head `classification` over the last hidden state."""
        self._peft.set_adapter(adapter)
        hidden = self._peft(**prompt.kwargs, output_hidden_states=True).hidden_states[-1][0, -1]
        return torch.softmax(self._head.weight @ hidden + self._head.bias, 0)

    def expect(self, got: Answer, adapter: str | None, prompt: Prompt) -> None:
        assert_same(got, self.answer(adapter, prompt))


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ActivatedReference:
    return ActivatedReference(request.param, tmp_path_factory.mktemp("activated"))


def cases(reference: ActivatedReference) -> list[Case]:
    first, second = INVOCATIONS["wide8"], INVOCATIONS["narrow4"]
    return [
        ("wide8", reference.prompt(0, first, words(0, 4))),
        ("narrow4", reference.prompt(0, words(1, 9), second)),
        (None, reference.prompt(0, first)),
        ("ordinary8", reference.prompt(1, first, words(2, 3))),
        ("wide8", reference.prompt(2, first, words(3, 7), first, words(4, 5), num_images=0)),  # the last one counts
        ("wide8", reference.prompt(1, words(5, 4))),  # not invoked: the base model answers
        ("wide8", reference.prompt(1, second, words(6, 2))),
        ("narrow4", reference.prompt(3, first, second, words(7, 1))),
    ]


@pytest.mark.parametrize("mode", MODES)
def test_each_answer_is_that_of_peft(reference: ActivatedReference, mode: str) -> None:
    run = run_engine(reference, MODES[mode], NUM_TOKENS, cases=cases(reference))
    for got, case in zip(run.answers, cases(reference), strict=True):
        reference.expect(got, *case)


@pytest.mark.parametrize("budget", [9, 11, 40])
def test_chunks_end_where_the_adapter_begins(reference: ActivatedReference, budget: int) -> None:
    engine = RecordingEngine(reference, MODES["changing"], max_step_tokens=budget)
    for _ in range(2):  # the second time with cached prefixes
        for got, case in zip(engine.answer(cases(reference), NUM_TOKENS), cases(reference), strict=True):
            reference.expect(got, *case)
    assert all(engine.cached_tokens)


@pytest.mark.usefixtures("no_kv_admission")
def test_preempted_answers(reference: ActivatedReference) -> None:
    # Eight requests of eight blocks each leave fewer than eight, and each of them needs one more.
    long: list[Case] = []
    for seed, name in enumerate(("wide8", "narrow4") * 4):
        text = reference.prompt(seed, num_images=0)
        parts = [*words(seed, 40), *INVOCATIONS[name]]
        long.append((name, continued(text, [*parts, *words(seed, 62 - len(text.prompt_ids) - len(parts))])))
    run = run_engine(reference, FixedModes(Mode.UNMERGED), NUM_TOKENS, cases=long, scarce_memory=True)
    assert run.num_preemptions > 0
    for got, case in zip(run.answers, long, strict=True):
        reference.expect(got, *case)


@pytest.mark.parametrize("begin", ["a token before", "a token later", "with the answer", "with the prompt"])
def test_another_place_gives_other_logits(
    reference: ActivatedReference, begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison fails if the adapter begins anywhere else."""
    inner = RequestChecks.check

    def moved(self: RequestChecks, request: Request) -> CheckedRequest:
        checked = inner(self, request)
        start = checked.request.adapter_from
        places = {"a token before": start - 1, "a token later": start + 1, "with the prompt": 0}
        place = places.get(begin, len(request.prompt_ids))
        return checked._replace(request=msgspec.structs.replace(checked.request, adapter_from=place))

    monkeypatch.setattr(RequestChecks, "check", moved)
    case = cases(reference)[0]
    run = run_engine(reference, MODES["unmerged"], NUM_TOKENS, cases=[case])
    with pytest.raises(AssertionError):
        reference.expect(run.answers[0], *case)


def test_tokens_before_the_invocation_are_shared(reference: ActivatedReference) -> None:
    """The second and third request find the base model's KV of the picture, the fourth finds no other adapter's."""
    first, second = INVOCATIONS["wide8"], INVOCATIONS["narrow4"]
    shared = reference.prompt(5)
    found = {}
    engine = RecordingEngine(reference, MODES["unmerged"])
    for name, case in {
        "base": (None, continued(shared, words(8, 20))),
        "first": ("wide8", continued(shared, [*first, *words(9, 20)])),
        "second": ("narrow4", continued(shared, [*second, *words(9, 20)])),
        "first again": ("wide8", continued(shared, [*first, *words(9, 20)])),
        "base on its text": (None, continued(shared, [*first, *words(9, 20)])),
    }.items():
        (got,) = engine.answer([case], NUM_TOKENS)
        reference.expect(got, *case)
        (found[name],) = engine.cached_tokens
    blocks = len(shared.prompt_ids) // 8 * 8
    assert found == {
        "base": 0,
        "first": blocks,
        "second": blocks,
        "first again": (len(shared.prompt_ids) + 21) // 8 * 8,
        "base on its text": blocks,
    }


@pytest.mark.parametrize("budget", [12, 512])
def test_heads_read_activated_hidden_states(reference: ActivatedReference, budget: int) -> None:
    engine = RecordingEngine(reference, FixedModes(Mode.MIXED, "wide8"), max_step_tokens=budget)
    prompt = reference.prompt(0, INVOCATIONS["wide8"], words(0, 4))
    outputs = engine.local.run(
        [head_request("asked", prompt, "wide8", "classification"), head_request("words", prompt, "wide8")]
    )
    answer, timings = outputs["asked"][-1].head, outputs["asked"][-1].timings
    assert answer is not None and timings is not None
    assert answer.scores == pytest.approx(reference.probabilities("wide8", prompt).tolist(), abs=1e-4)
    assert timings.num_adapter_tokens == 6
    with pytest.raises(
        BadRequest, match=r"head .classification. needs the invocation tokens of adapter 'wide8' .* 150, 151"
    ):
        engine.engine.add(head_request("not invoked", reference.prompt(0, words(0, 4)), "wide8", "classification"))
    off = engine.local.run([head_request("off", reference.prompt(0, words(0, 4)), "wide8")])["off"][-1].timings
    assert off is not None and off.num_adapter_tokens == 0


@pytest.mark.parametrize("head", ["classification", "detection"])
def test_a_head_asked_before_its_adapter_is_loaded(reference: ActivatedReference, head: str) -> None:
    prompt = reference.prompt(0, INVOCATIONS["wide8"], words(0, 4), num_images=2)
    loaded = RecordingEngine(reference, None)
    if head == "detection" and reference.family in ("llava_next", "llava_onevision", "qwen_vl"):
        with pytest.raises(BadRequest, match="as a grid"):
            loaded.engine.add(head_request("asked", prompt, "wide8", head))
        return
    expected = loaded.local.run([head_request("asked", prompt, "wide8", head)])["asked"][-1].head
    files = QueuedExecutor()
    config = EngineConfig(model=reference.family, device=device.name, block_size=8, arena_bytes=1024 * PAGE_BYTES)
    engine = LocalEngine(config, model=build_model(reference.family).to(device.name), executor=files).engine
    engine.register_adapters(reference.adapters)
    engine.add(head_request("asked", prompt, "wide8", head))
    engine.add(head_request("of the base model", prompt, None))
    outputs: list[RequestOutput] = []
    while not outputs or not outputs[-1].finished:
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {"of the base model"} and outputs[-1].error is None
    while engine.has_work:
        files.run()
        outputs += engine.step()
    answer = outputs[-1].head
    assert answer is not None and expected is not None, outputs[-1]
    assert answer.label == expected.label and answer.scores == pytest.approx(expected.scores, abs=1e-4)
    assert len(answer.boxes) == len(expected.boxes)
