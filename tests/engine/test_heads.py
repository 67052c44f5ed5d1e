"""Heads of every task against plain transformers + PEFT + nn.Linear: equal logits in every mode, with chunked prompts
and prefix caching, and with several adapters' heads and language-model rows in one batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from heads import Grid, HeadSpec, TaskHead, save_heads
from tests import device
from tests.engine.asking import ask, tokens
from tests.engine.forms import INVOCATIONS, FormReference, continued, words
from tests.engine.test_reuse import BLOCK, MODES
from tests.families import HIDDEN, IMAGE, VIDEO, Prompt, build_model, make_prompt
from tests.harness import FixedModes, RecordingEngine
from tests.queued_executor import QueuedExecutor
from tests.references import Reference
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.errors import BadRequest
from vlora.lora.adapter_pool import AdapterPool
from vlora.memory.arena import PAGE_BYTES
from vlora.models import runner
from vlora.models.forward_batch import ForwardBatch
from vlora.models.head_reading import read_heads
from vlora.models.vision.token_grids import image_grids
from vlora.orchestrator.policies.base import Candidate, Decision, PolicyState
from vlora.types import HeadAnswer, Mode, Request, RequestOutput, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TOLERANCE = 1e-4
NUM_TOKENS = 6
HEADED = ("wide8", "everywhere64")
LABELS = ("cat", "dog", "bird")
TASKS: dict[str, dict[str, Any]] = {
    "classification": {"labels": LABELS},
    "action": {"labels": LABELS, "num_frames": 2},
    "binary": {"labels": ("no", "yes"), "parameters": {"threshold": 0.3}},
    "counting": {"labels": ("0", "1", "2", "3")},
    "multi_label": {"labels": LABELS},
    "regression": {
        "labels": ("speed", "distance"),
        "parameters": {"offset": (1, 2), "scale": (3, 4), "tolerance": (1, 1), "deviations": (1, 2)},
    },
    "detection": {"labels": LABELS, "num_frames": 2},
    "inputs": {"task": "detection", "labels": LABELS, "num_frames": 2, "reads": "inputs", "hidden_units": 12},
}


def heads_of(seed: int) -> dict[str, TaskHead]:
    """A head of every task, with rows large enough that every part of the hidden state has an effect."""
    generator = torch.Generator().manual_seed(seed)
    heads = {}
    for task, fields in TASKS.items():
        spec = HeadSpec(
            **{"name": task, "task": task, "prompt": "what ?", "num_frames": 1, "hidden_size": HIDDEN, **fields}
        )
        count = spec.make_task().num_outputs
        weight = torch.randn(count, HIDDEN, generator=generator) / 3
        bias = torch.randn(count, generator=generator) / 3
        hidden = None
        if spec.hidden_units:
            weight = weight[:, : spec.hidden_units]
            hidden = (torch.randn(spec.hidden_units, HIDDEN, generator=generator), torch.ones(spec.hidden_units))
        heads[task] = TaskHead(spec, weight, bias, hidden)
    return heads


class Headed(Reference):
    """A reference with adapters that have heads of every task."""

    def __init__(self, family: str, folder: Path) -> None:
        super().__init__(family, folder)
        self.heads = {name: heads_of(seed) for seed, name in enumerate(HEADED)}
        for name, own in self.heads.items():
            save_heads(self.adapters[name], own)

    @torch.no_grad()
    def logits(self, prompt: Prompt, adapter: str, task: str) -> torch.Tensor:
        """Logits of the tokens that the head reads [tokens, outputs]."""
        assert self.oracle.peft is not None
        self.oracle.peft.set_adapter(adapter)
        base: Any = self.oracle.peft.get_base_model()
        inputs: list[torch.Tensor] = []
        hook = base.model.language_model.register_forward_pre_hook(
            lambda _, args, given: inputs.append(given["inputs_embeds"][0].clone()), with_kwargs=True
        )
        hidden = base.model(**prompt.kwargs).last_hidden_state[0]
        hook.remove()
        head = self.heads[adapter][task]
        if head.hidden is not None:
            scale = inputs[0].square().mean(1, keepdim=True).sqrt()
            weight, bias = head.hidden
            hidden = nn.functional.gelu(inputs[0] / scale @ weight.T + bias)
        linear = nn.Linear(head.weight.shape[1], len(head.weight))
        linear.weight.copy_(head.weight)
        linear.bias.copy_(head.bias)
        if not head.task.reads_images:
            return linear(hidden[-1:])
        ids = prompt.kwargs["input_ids"][0]
        return linear(hidden[torch.isin(ids, torch.tensor([IMAGE, VIDEO]))])


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_vl", "llava"])
def headed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Headed:
    return Headed(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Headed:
    return Headed("qwen2_vl", tmp_path_factory.mktemp("qwen2_vl"))


@pytest.fixture
def read_logits(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The logits of each head request, by request id."""
    seen: dict[str, torch.Tensor] = {}

    def recording(packed: ForwardBatch, *others: Any) -> Any:
        results = read_heads(packed, *others)
        for row in packed.head_rows:
            if row.answers:
                assert row.state.head_logits is not None
                seen[row.state.request.request_id] = row.state.head_logits.clone()
        return results

    monkeypatch.setattr(runner, "read_heads", recording)
    return seen


def requests_of(headed: Headed) -> tuple[list[Request], Mapping[str, Prompt]]:
    """Every head of every adapter on two images and some text, and text requests of other adapters in between."""
    prompts: dict[str, Prompt] = {}
    requests = []
    for number, adapter in enumerate(HEADED):
        for task in TASKS:
            prompt = continued(headed.picture(number, num_images=2), words(number, 5))
            prompts[f"{adapter} {task}"] = prompt
            requests.append(ask(prompt, f"{adapter} {task}", adapter, head=task))
        for speaker in (None, "patterned16", adapter):
            prompt = continued(headed.picture(7 + number), words(9 + number, 4))
            prompts[f"{number} {speaker} says"] = prompt
            requests.append(ask(prompt, f"{number} {speaker} says", speaker))
    return requests, prompts


def check(headed: Headed, prompts: Mapping[str, Prompt], outputs: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    for request_id, prompt in prompts.items():
        output: RequestOutput = outputs[request_id][-1]
        assert output.error is None, output.error
        adapter, task = request_id.split(" ", 1)
        if task.endswith("says"):
            speaker = task.removesuffix(" says")
            expected, _ = headed.oracle.generate(prompt, None if speaker == "None" else speaker, NUM_TOKENS)
            assert tokens(outputs[request_id]) == expected
            continue
        want = headed.logits(prompt, adapter, task)
        assert read[request_id].shape == want.shape
        assert float((read[request_id] - want).abs().max()) < TOLERANCE
        assert output.head is not None and output.head.task == headed.heads[adapter][task].spec.task
        same(output.head, headed.heads[adapter][task], want, image_grids(headed.model.config, prompt.vision))


def same(got: HeadAnswer, head: TaskHead, logits: torch.Tensor, grids: tuple[Grid, ...]) -> None:
    """The answer follows from the reference's logits by the head's task."""
    want = head.decode(logits, grids) if head.task.reads_images else head.decode(logits[0])
    assert (got.label_id, got.count, got.chosen) == (want.label_id, want.count, want.chosen)
    assert got.label == want.label or got.values  # the last digit may be rounded differently
    assert got.labels == head.task.labels and got.confidence == pytest.approx(want.confidence, abs=1e-3)
    assert got.scores == pytest.approx(want.scores, abs=1e-3)
    assert got.values == pytest.approx(want.values, abs=1e-2) and got.deviations == want.deviations
    assert [(box.label_id, box.image) for box in got.boxes] == [(box.label, box.image) for box in want.boxes]
    for box, other in zip(got.boxes, want.boxes, strict=True):
        assert box.label == head.task.labels[other.label]
        edges = (other.left, other.top, other.right, other.bottom, other.score)
        assert (box.left, box.top, box.right, box.bottom, box.score) == pytest.approx(edges, abs=1e-3)


@pytest.mark.parametrize(("mode", "max_step_tokens"), zip(MODES, (512, 512, 11, 11), strict=True))
def test_every_head_of_two_adapters_in_a_batch_with_text(
    headed: Headed, mode: str, max_step_tokens: int, read_logits: dict[str, torch.Tensor]
) -> None:
    recorded = RecordingEngine(headed, MODES[mode], max_step_tokens=max_step_tokens)
    requests, prompts = requests_of(headed)
    if mode == "merged":  # it serves one adapter
        requests = [request for request in requests if request.adapter == "wide8"]
        prompts = {request.request_id: prompts[request.request_id] for request in requests}
    outputs = recorded.local.run(requests)
    check(headed, prompts, outputs, read_logits)
    found = [outputs[request.request_id][-1].head for request in requests if request.head in ("detection", "inputs")]
    assert all({box.image for box in answer.boxes} == {0, 1} for answer in found if answer), "nothing to compare"
    assert recorded.modes >= ({Mode.MIXED, Mode.UNMERGED} if mode == "changing" else {Mode(mode)})


def test_a_head_over_image_tokens_reuses_no_block_after_the_first_image(
    qwen: Headed, read_logits: dict[str, torch.Tensor]
) -> None:
    recorded = RecordingEngine(qwen, MODES["unmerged"], max_step_tokens=13)
    pictures = make_prompt(qwen.family, qwen.model, 5, num_images=2, text=(3 * BLOCK + 2, 0))
    prompt = continued(pictures, words(1, 9))
    first_image = prompt.prompt_ids.index(IMAGE)
    for number in range(2):
        requests = [ask(prompt, f"wide8 {task}", "wide8", head=task) for task in ("classification", "detection")]
        for request in requests:
            outputs = recorded.local.run([request])
            check(qwen, {request.request_id: prompt}, outputs, read_logits)
            timings = outputs[request.request_id][-1].timings
            assert timings is not None
            whole = (len(prompt.prompt_ids) - 1) // BLOCK * BLOCK
            reusable = first_image // BLOCK * BLOCK if request.head == "detection" else whole
            first = number == 0 and request.head == "classification"
            assert timings.num_cached_tokens == (0 if first else reusable)
    assert first_image // BLOCK * BLOCK >= 3 * BLOCK, "a prefix before the image is reused"


class Pausing(FixedModes):
    """The detection head's prompt begins first and pauses until all other requests are answered."""

    def decide(self, ready: Sequence[Candidate], state: PolicyState) -> Decision:
        paused = [c.request_id for c in ready if c.request_id == "wide8 detection"]
        others = [c.request_id for c in ready if c.request_id != "wide8 detection"]
        self.steps += bool(paused)  # before that its image is being encoded
        order = paused if paused and (self.steps <= 2 or not others) else others
        return Decision(Mode.UNMERGED, None, tuple(order[: state.max_batch_size]))


@pytest.mark.usefixtures("no_kv_admission")
def test_rows_gathered_before_a_preemption_are_gathered_again(
    qwen: Headed, read_logits: dict[str, torch.Tensor]
) -> None:
    prompt = continued(qwen.picture(0, num_images=2), words(0, 5))
    recorded = RecordingEngine(qwen, Pausing(Mode.UNMERGED), max_step_tokens=8, scarce_memory=True)
    long = SamplingParams(max_tokens=90, ignore_eos=True)
    speakers = [
        Request(request_id=f"{i}", prompt_ids=tuple(words(i, 9)), adapter="wide8", sampling=long) for i in range(8)
    ]
    outputs = recorded.local.run([ask(prompt, "wide8 detection", "wide8", head="detection"), *speakers])
    timings = outputs["wide8 detection"][-1].timings
    assert timings is not None and timings.num_preemptions > 0
    check(qwen, {"wide8 detection": prompt}, outputs, read_logits)


def test_frames_of_a_video_are_separate_pictures(qwen: Headed, read_logits: dict[str, torch.Tensor]) -> None:
    recorded = RecordingEngine(qwen, MODES["unmerged"], max_step_tokens=16)
    prompt = make_prompt("qwen2_vl", qwen.model, 1, num_videos=1)
    times, rows, columns = prompt.kwargs["video_grid_thw"][0].tolist()
    assert image_grids(qwen.model.config, prompt.vision) == ((rows // 2, columns // 2),) * times
    outputs = recorded.local.run([ask(prompt, "wide8 detection", "wide8", head="detection")])
    check(qwen, {"wide8 detection": prompt}, outputs, read_logits)


def test_requests_that_a_head_over_image_tokens_refuses(tmp_path: Path) -> None:
    """A model without a grid, and a prompt without an image."""
    for family, num_images, text in (("llava_next", 1, "tiles"), ("qwen2_vl", 0, "has no image")):
        headed = Headed(family, tmp_path / family)
        recorded = RecordingEngine(headed, MODES["unmerged"])
        prompt = make_prompt(family, headed.model, 0, num_images=num_images)
        with pytest.raises(BadRequest, match=text):
            recorded.engine.add(ask(prompt, "x", "wide8", head="detection"))
        assert not recorded.engine.has_work
        outputs = recorded.local.run([ask(prompt, "y", "wide8", head="classification")])
        assert outputs["y"][-1].head is not None


def test_a_head_whose_values_overflow_fails_alone(
    qwen: Headed, monkeypatch: pytest.MonkeyPatch, read_logits: dict[str, torch.Tensor]
) -> None:
    recorded = RecordingEngine(qwen, MODES["unmerged"])
    found = AdapterPool.head

    def overflowing(self: AdapterPool, key: str, name: str) -> TaskHead:
        head = found(self, key, name)
        if name == "regression":
            head.bias[0] = torch.inf
        return head

    monkeypatch.setattr(AdapterPool, "head", overflowing)
    requests, prompts = requests_of(qwen)
    outputs = recorded.local.run(requests)
    for request_id in [name for name in prompts if name.endswith("regression")]:
        error = outputs[request_id][-1].error
        assert error is not None and "not finite" in error.message
    check(qwen, {k: v for k, v in prompts.items() if not k.endswith("regression")}, outputs, read_logits)


# -- heads of activated adapters --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def activated(tmp_path_factory: pytest.TempPathFactory) -> FormReference:
    found = FormReference("activated", "qwen2_vl", tmp_path_factory.mktemp("activated"))
    heads = heads_of(0)
    save_heads(found.adapters["wide8"], {name: heads[name] for name in ("classification", "detection")})
    return found


def invoked(reference: FormReference, num_images: int = 1) -> Prompt:
    prompt = make_prompt(reference.family, reference.model, 0, num_images=num_images)
    return continued(prompt, [*INVOCATIONS["wide8"], *words(0, 4)])


@pytest.mark.parametrize("budget", [12, 512])
def test_heads_read_activated_hidden_states(activated: FormReference, budget: int) -> None:
    recorded = RecordingEngine(activated, FixedModes(Mode.MIXED, "wide8"), max_step_tokens=budget)
    prompt, adapter = invoked(activated), "wide8"
    outputs = recorded.local.run([ask(prompt, "asked", adapter, head="classification"), ask(prompt, "text", adapter)])
    answer, timings = outputs["asked"][-1].head, outputs["asked"][-1].timings
    assert answer is not None and timings is not None and timings.num_adapter_tokens == 6
    with torch.no_grad():
        hidden = activated.peft(adapter)(**prompt.kwargs, output_hidden_states=True).hidden_states[-1][0, -1]
    head = heads_of(0)["classification"]
    assert answer.scores == pytest.approx(torch.softmax(head.weight @ hidden + head.bias, 0).tolist(), abs=1e-4)
    off = make_prompt(activated.family, activated.model, 0, num_images=1)
    with pytest.raises(BadRequest, match=r"head .classification. needs the invocation tokens of .*'wide8' .* 150, 151"):
        recorded.engine.add(ask(off, "not invoked", adapter, head="classification"))
    found = recorded.local.run([ask(off, "off", adapter)])["off"][-1].timings
    assert found is not None and found.num_adapter_tokens == 0


@pytest.mark.parametrize("head", ["classification", "detection"])
def test_a_head_asked_before_its_adapter_is_loaded(activated: FormReference, head: str) -> None:
    prompt, files = invoked(activated, 2), QueuedExecutor()
    loaded = RecordingEngine(activated, None)
    expected = loaded.local.run([ask(prompt, "asked", "wide8", head=head)])["asked"][-1].head
    config = EngineConfig(model=activated.family, device=device.name, block_size=8, arena_bytes=1024 * PAGE_BYTES)
    engine = LocalEngine(config, model=build_model(activated.family).to(device.name), executor=files).engine
    engine.register_adapters(activated.adapters)
    engine.add(ask(prompt, "asked", "wide8", head=head))
    engine.add(ask(prompt, "of the base model"))
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
