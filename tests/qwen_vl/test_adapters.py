"""Adapters made for Qwen-VL's published code answer in every mode as the model with their weights merged by PEFT."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from heads import HeadSpec, TaskHead, save_heads
from tests.engine.asking import ask
from tests.families import Prompt
from tests.harness import FixedModes, RecordingEngine, Run, run_engine
from tests.oracle import save_adapter
from tests.qwen_vl import checkpoint as small
from tests.qwen_vl import literal
from tests.qwen_vl.test_model import pixels, prompt_ids
from tests.references import Answer, assert_same
from vlora.errors import BadAdapter, BadRequest
from vlora.lora.peft_settings import fused_sites, resolve
from vlora.models.processing import vision_input
from vlora.types import Mode

# As finetune.py of the published repository.
_FINETUNED = ["c_attn", "attn.c_proj", "w1", "w2"]
_LANGUAGE = r".*transformer\.h\.\d+\.(attn\.(c_attn|c_proj)|mlp\.(w1|w2|c_proj))"
_VISION = (
    r".*transformer\.visual\.(transformer\.resblocks\.\d+\.(attn\.(in_proj|out_proj)|mlp\.(c_fc|c_proj))"
    r"|attn_pool\.(kv_proj|attn\.out_proj))"
)
_SECOND = r"transformer.h.1.attn.c_attn"

CONFIGS: Mapping[str, PeftConfig] = {
    "finetuned": LoraConfig(r=8, lora_alpha=4, target_modules=_FINETUNED),
    "everywhere": LoraConfig(
        r=12,
        lora_alpha=16,
        use_rslora=True,
        target_modules=f"({_LANGUAGE}|{_VISION})",
        rank_pattern={_SECOND: 5},
        alpha_pattern={_SECOND: 20},
    ),
    "dora": LoraConfig(r=4, use_dora=True, target_modules=["c_attn", "w2"]),
    "biased": LoraConfig(r=4, bias="lora_only", target_modules=["c_attn", "mlp.c_proj"]),
    "saved": LoraConfig(r=4, target_modules=["c_attn"], modules_to_save=["wte", "lm_head"]),
    "ia3": IA3Config(
        target_modules=r".*transformer\.h\.\d+\.(attn\.(c_attn|c_proj)|mlp\.(w1|c_proj))",
        feedforward_modules=r".*transformer\.h\.\d+\.mlp\.c_proj",
    ),
}


def published_modules(weights: Mapping[str, Tensor]) -> nn.Module:
    """Modules with the published names and types, without a forward. PEFT makes and merges adapters on them."""
    root = nn.Module()
    for name, tensor in weights.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and tensor.ndim == 2:
            made: nn.Module = nn.Embedding(*tensor.shape) if path.endswith("wte") else nn.Linear(*tensor.shape[::-1])
            if isinstance(made, nn.Linear) and f"{path}.bias" not in weights:
                made.bias = None  # type: ignore[assignment]
            at, _, own = path.rpartition(".")
            _module(root, at).add_module(own, made)
    for name, tensor in weights.items():
        path, _, leaf = name.rpartition(".")
        if (found := getattr(_module(root, path), leaf, None)) is not None:
            found.data = tensor.clone()
        else:
            setattr(_module(root, path), leaf, nn.Parameter(tensor.clone()))
    return root


def _module(root: nn.Module, path: str) -> nn.Module:
    for part in path.split(".") if path else ():
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    return root


def make_adapter(weights: Mapping[str, Tensor], config: PeftConfig, folder: Path) -> dict[str, Tensor]:
    """Write an adapter with random values. Returns the model's weights with the adapter merged, by PEFT."""
    base = published_modules(weights)
    save_adapter(base, config, folder)
    with torch.no_grad():
        merged = PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).merge_and_unload()
    found: dict[str, Tensor] = merged.state_dict()
    assert found.keys() == weights.keys() and len(found["lm_head.weight"]) == small.VOCAB
    return found


NUM_TOKENS = 5
CASES = (("finetuned", 1), (None, 1), ("everywhere", 1), ("dora", 1), ("biased", 0), ("saved", 1), ("ia3", 1))


def prompt_of(seed: int, num_images: int) -> Prompt:
    images = [
        vision_input("image", {"pixel_values": pixels(seed + i)[None]}, small.NUM_QUERIES) for i in range(num_images)
    ]
    return Prompt({}, tuple(prompt_ids(seed, num_images, text=6 + 2 * seed)), tuple(images))


@dataclasses.dataclass
class Published:
    """A checkpoint, adapters for its published code, cases, and the answers of the literal implementation.

    Attributes:
        weights: The model's weights with each adapter merged.
        unadapted: The answers of the base model to the same prompts.
    """

    checkpoint: str
    adapters: dict[str, str]
    weights: dict[str | None, dict[str, torch.Tensor]]
    cases: list[tuple[str | None, Prompt]]
    answers: list[Answer]
    unadapted: list[Answer]
    family: str = "qwen_vl"

    def run(self, policy: FixedModes, adapter: str | None = None, **settings: Any) -> Run:
        """Answer all cases, or those of an adapter, as defined."""
        own = [i for i, case in enumerate(CASES) if adapter in (None, case[0])]
        run = run_engine(self, policy, NUM_TOKENS, only=own, checkpoint=self.checkpoint, **settings)
        for got, case in zip(run.answers, own, strict=True):
            assert_same(got, self.answers[case])
        return run


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    folder = tmp_path_factory.mktemp("published")
    base = small.write_checkpoint(folder / "model")
    weights: dict[str | None, dict[str, torch.Tensor]] = {None: base}
    for name, config in CONFIGS.items():
        weights[name] = make_adapter(base, config, folder / name)
    cases = [(adapter, prompt_of(seed, images)) for seed, (adapter, images) in enumerate(CASES)]
    answers, unadapted = (
        [
            literal.generate(own[adapter], prompt.prompt_ids, [pixels(seed)] * len(prompt.vision), NUM_TOKENS)
            for seed, (adapter, prompt) in enumerate(cases)
        ]
        for own in (weights, dict.fromkeys(weights, base))
    )
    adapters = {name: str(folder / name) for name in CONFIGS}
    return Published(str(folder / "model"), adapters, weights, cases, answers, unadapted)


@pytest.mark.exhaustive
def test_the_adapters_change_every_answer(published: Published) -> None:
    for (adapter, _), (_, own), (_, base) in zip(published.cases, published.answers, published.unadapted, strict=True):
        changed = float((own[0] - base[0]).abs().max())
        assert changed > 0.01 if adapter else changed == 0, (adapter, changed)


@pytest.mark.parametrize(("mode", "merged"), [(Mode.UNMERGED, None), (Mode.MIXED, "everywhere"), (Mode.MERGED, "dora")])
def test_answers_are_those_of_the_definition(published: Published, mode: Mode, merged: str | None) -> None:
    adapter = merged if mode is Mode.MERGED else None
    assert mode in published.run(FixedModes(mode, merged), adapter, encode_share=1e9).modes


def test_in_place_switching_restores_the_split_weights(published: Published) -> None:
    plan: list[tuple[Mode, str | None]] = [(Mode.MIXED, "finetuned"), (Mode.UNMERGED, None), (Mode.MIXED, "everywhere")]
    run = published.run(FixedModes(*plan[0], plan=plan), switching="in_place", max_step_tokens=96)
    assert run.num_switches > 3


@pytest.mark.slow
def test_two_ranks_have_their_part_of_every_layer(published: Published) -> None:
    """c_attn is cut into layers first, and each of these over the ranks. Biases of mlp.c_proj need a single rank."""
    served = {name: path for name, path in published.adapters.items() if name not in ("biased", "ia3")}
    recorded = RecordingEngine(
        dataclasses.replace(published, adapters=served),
        FixedModes(Mode.MIXED, "finetuned"),
        checkpoint=published.checkpoint,
        tensor_parallel=2,
        sharding=("finetuned=slora", "*=replicated"),
        threads=1,
        encode_share=1e9,
    )
    try:
        own = [i for i, (adapter, _) in enumerate(CASES) if adapter is None or adapter in served]
        answers = recorded.answer([published.cases[i] for i in own], NUM_TOKENS)
        assert Mode.MIXED in recorded.modes
        for got, case in zip(answers, own, strict=True):
            assert_same(got, published.answers[case])
    finally:
        recorded.engine.close()


def test_a_head_reads_the_last_token_and_none_reads_queries(published: Published, tmp_path: Path) -> None:
    """Learned queries form no grid of image tokens, which detection needs."""
    folder = shutil.copytree(published.adapters["everywhere"], tmp_path / "tuned")
    heads = {}
    for task in ("classification", "detection"):
        labels = ("cat", "dog", "bird")
        spec = HeadSpec(name=task, task=task, labels=labels, prompt="what ?", num_frames=1, hidden_size=small.HIDDEN)
        count = spec.make_task().num_outputs
        weight = torch.randn(count, small.HIDDEN, generator=torch.Generator().manual_seed(0)) / 8
        heads[task] = TaskHead(spec, weight, torch.zeros(count))
    save_heads(folder, heads)
    headed = dataclasses.replace(published, adapters={"tuned": str(folder)})
    recorded = RecordingEngine(headed, None, checkpoint=published.checkpoint)
    prompt = prompt_of(3, 1)
    answer = recorded.local.run([ask(prompt, "r", "tuned", head="classification")])["r"][-1].head
    assert answer is not None
    last = literal.hidden_states(published.weights["everywhere"], prompt.prompt_ids, [pixels(3)])[-1]
    scores = torch.softmax(heads["classification"].weight.double() @ last, 0)
    torch.testing.assert_close(torch.tensor(answer.scores, dtype=torch.float64), scores, rtol=0, atol=1e-4)
    assert float(scores.max()) < 0.999  # not decided by the largest value alone
    reason = "reads image tokens as a grid, and qwen_vl reduces an image to learned queries"
    with pytest.raises(BadRequest, match=reason):
        recorded.engine.add(ask(prompt, "r", "tuned", head="detection"))


def test_names_of_qwen_s_text_models_stay_unknown_to_other_families() -> None:
    """Their sizes may be those of another decoder, which must not get their adapters."""
    layers = "model.language_model.layers.0"
    other = {f"{layers}.mlp.up_proj", *(f"{layers}.self_attn.{side}_proj" for side in "qkvo")}
    names = ("transformer.h.0.mlp.w1", "transformer.h.0.attn.c_proj", "transformer.h.0.attn.c_attn")
    assert all(resolve(name, other) is None and fused_sites(name, other) == () for name in names)
    own = {*other, "model.visual.attn_pool.attn.q_proj"}
    assert resolve(names[0], own) == f"{layers}.mlp.up_proj" and len(fused_sites(names[2], own)) == 3


@pytest.mark.parametrize(
    ("changed_b", "settings", "why"),
    [
        (lambda b: torch.cat([b, b[:3]]), {}, "has 768 outputs; the adapter was made for another model"),
        (
            lambda b: b[:, :4],
            {"use_bdlora": {"nblocks": 2, "target_modules_bd_b": ["c_attn"]}},
            "use_bdlora is not supported for 'transformer.h.0.attn.c_attn'",
        ),
    ],
    ids=["another width", "blocks over the outputs of three layers"],
)
def test_other_factors_of_c_attn_are_refused(
    published: Published,
    tmp_path: Path,
    changed_b: Callable[[torch.Tensor], torch.Tensor],
    settings: dict[str, Any],
    why: str,
) -> None:
    folder = shutil.copytree(published.adapters["finetuned"], tmp_path / "changed")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    tensors = load_file(folder / "adapter_model.safetensors")
    made = {name: changed_b(t).contiguous() if "c_attn.lora_B" in name else t for name, t in tensors.items()}
    save_file(made, folder / "adapter_model.safetensors")
    recorded = RecordingEngine(dataclasses.replace(published, adapters={}), None, checkpoint=published.checkpoint)
    with pytest.raises(BadAdapter, match=why) as raised:
        recorded.engine.load_adapter("changed", str(folder))
    assert "\n" not in str(raised.value)
