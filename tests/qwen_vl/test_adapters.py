"""Adapters made for Qwen-VL's published code answer in every mode as the model with their weights merged by PEFT."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families import Prompt
from tests.harness import FixedModes, RecordingEngine, run_engine
from tests.qwen_vl import checkpoint as small
from tests.qwen_vl import literal
from tests.qwen_vl.published import CONFIGS, make_adapter
from tests.qwen_vl.test_model import pixels, prompt_ids
from tests.references import Answer, assert_same
from vlora.errors import BadAdapter
from vlora.lora.legacy_names import fused_sites, resolve
from vlora.models.processing import vision_input
from vlora.types import Mode

NUM_TOKENS = 5
CASES = (("finetuned", 1), (None, 1), ("everywhere", 1), ("dora", 1), ("biased", 0), ("saved", 1), ("ia3", 1))


def prompt_of(seed: int, num_images: int) -> Prompt:
    images = [
        vision_input("image", {"pixel_values": pixels(seed + i)[None]}, small.NUM_QUERIES) for i in range(num_images)
    ]
    return Prompt({}, tuple(prompt_ids(seed, num_images, text=6 + 2 * seed)), tuple(images))


@dataclasses.dataclass
class Published:
    """A checkpoint, adapters for its published code, cases, and the answers of the literal implementation."""

    folder: Path
    family: str
    adapters: dict[str, str]
    cases: list[tuple[str | None, Prompt]]
    answers: list[Answer]
    unadapted: list[Answer]


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
    return Published(folder / "model", "qwen_vl", adapters, cases, answers, unadapted)


@pytest.mark.exhaustive
def test_the_adapters_change_every_answer(published: Published) -> None:
    for (adapter, _), (_, with_it), (_, without) in zip(
        published.cases, published.answers, published.unadapted, strict=True
    ):
        changed = float((with_it[0] - without[0]).abs().max())
        assert changed > 0.01 if adapter else changed == 0, (adapter, changed)


@pytest.mark.parametrize(
    ("mode", "merged"), [(Mode.UNMERGED, None), (Mode.MIXED, "finetuned"), (Mode.MIXED, "everywhere")]
)
def test_batch_of_all_adapters(published: Published, mode: Mode, merged: str | None) -> None:
    run = run_engine(
        published, FixedModes(mode, merged), NUM_TOKENS, checkpoint=str(published.folder), encode_share=1e9
    )
    assert mode in run.modes
    for got, want in zip(run.answers, published.answers, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("merged", ["finetuned", "dora"])
def test_merged_batch(published: Published, merged: str) -> None:
    own = [i for i, (adapter, _) in enumerate(CASES) if adapter == merged]
    run = run_engine(published, FixedModes(Mode.MERGED, merged), NUM_TOKENS, only=own, checkpoint=str(published.folder))
    assert run.modes == {Mode.MERGED}
    assert_same(run.answers[0], published.answers[own[0]])


def test_in_place_switching_restores_the_split_weights(published: Published) -> None:
    plan: list[tuple[Mode, str | None]] = [(Mode.MIXED, "finetuned"), (Mode.UNMERGED, None), (Mode.MIXED, "everywhere")]
    run = run_engine(
        published,
        FixedModes(*plan[0], plan=plan),
        NUM_TOKENS,
        checkpoint=str(published.folder),
        switching="in_place",
        max_step_tokens=96,
    )
    assert run.num_switches > 3
    for got, want in zip(run.answers, published.answers, strict=True):
        assert_same(got, want)


def test_prompts_run_in_chunks_and_prefixes_are_reused(published: Published) -> None:
    recorded = RecordingEngine(published, None, max_step_tokens=40, checkpoint=str(published.folder))
    for again in (False, True):
        answers = recorded.answer(published.cases[:3], NUM_TOKENS)
        for got, want in zip(answers, published.answers, strict=False):
            assert_same(got, want)
        assert all((cached > 240) == again for cached in recorded.cached_tokens)


@pytest.mark.slow
def test_two_ranks_have_their_part_of_every_layer(published: Published) -> None:
    """c_attn is cut into layers first, and each of these over the ranks. Biases of mlp.c_proj need a single rank."""
    served = [name for name in published.adapters if name not in ("biased", "ia3")]
    replica = dataclasses.replace(published, adapters={name: published.adapters[name] for name in served})
    recorded = RecordingEngine(
        replica,
        FixedModes(Mode.MIXED, "finetuned"),
        checkpoint=str(published.folder),
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


def test_names_of_qwen_s_text_models_stay_unknown_to_other_families() -> None:
    """Their sizes may be those of another decoder, which must not get their adapters."""
    layers = "model.language_model.layers.0"
    other = {f"{layers}.mlp.up_proj", *(f"{layers}.self_attn.{side}_proj" for side in "qkvo")}
    names = ("transformer.h.0.mlp.w1", "transformer.h.0.attn.c_proj", "transformer.h.0.attn.c_attn")
    assert all(resolve(name, other) is None and fused_sites(name, other) == () for name in names)
    own = {*other, "model.visual.attn_pool.attn.q_proj"}
    assert resolve(names[0], own) == f"{layers}.mlp.up_proj" and len(fused_sites(names[2], own)) == 3


class TestRefused:
    """Each error is one line with the reason."""

    @pytest.fixture
    def changed(self, published: Published, tmp_path: Path) -> functools.partial[str]:
        return functools.partial(self._load, published, tmp_path / "changed")

    @staticmethod
    def _load(
        published: Published, folder: Path, changed_b: Callable[[torch.Tensor], torch.Tensor], **settings: object
    ) -> str:
        """The error of an adapter with other settings, and other factors B of c_attn."""
        shutil.copytree(published.adapters["finetuned"], folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
        tensors = load_file(folder / "adapter_model.safetensors")
        made = {name: changed_b(t).contiguous() if "c_attn.lora_B" in name else t for name, t in tensors.items()}
        save_file(made, folder / "adapter_model.safetensors")
        recorded = RecordingEngine(dataclasses.replace(published, adapters={}), None, checkpoint=str(published.folder))
        with pytest.raises(BadAdapter) as raised:
            recorded.engine.load_adapter("changed", str(folder))
        assert "\n" not in str(raised.value)
        return str(raised.value)

    def test_another_width(self, changed: functools.partial[str]) -> None:
        error = changed(lambda b: torch.cat([b, b[:3]]))
        assert "has 768 outputs; the adapter was made for another model" in error

    def test_blocks_over_the_outputs_of_three_layers(self, changed: functools.partial[str]) -> None:
        error = changed(lambda b: b[:, :4], use_bdlora={"nblocks": 2, "target_modules_bd_b": ["c_attn"]})
        assert "use_bdlora is not supported for 'transformer.h.0.attn.c_attn'" in error
