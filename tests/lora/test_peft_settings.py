"""Folders that PEFT writes, over all settings of the installed PEFT: served as PEFT does, or refused by name."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from peft import IA3Config, LoraConfig, PeftType, TrainableTokensConfig

from tests.families import build_model, make_prompt
from tests.harness import FixedModes, RecordingEngine
from tests.oracle import peft_answer, save_adapter
from tests.references import TOLERANCE
from vlora.errors import BadAdapter
from vlora.types import Mode

FAMILY = "qwen2_vl"
NUM_TOKENS = 2
NUM_COMBINED = 16

PLAIN: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
WEIGHTS = ["q_proj.weight", "model.language_model.layers.0.mlp.up_proj.weight"]

# Values of every setting of LoraConfig, beside its default. A further setting of a later version fails the test.
VALUES: dict[str, Sequence[Any]] = {
    "task_type": ["CAUSAL_LM"],
    "peft_type": [],  # below
    "auto_mapping": [{"base_model_class": "A", "parent_library": "b"}],
    "peft_version": ["0.1"],
    "base_model_name_or_path": ["some/model"],
    "revision": ["abc"],
    "inference_mode": [True],
    "r": [1, 8],
    "target_modules": [
        ["o_proj"],
        r".*layers\.[13]\.mlp\.(gate|up)_proj",
        "all-linear",
        ["qkv", "fc1"],
        ["lm_head"],
        ["embed_tokens"],
    ],
    "exclude_modules": [["down_proj"], r".*layers\.2\..*"],
    "lora_alpha": [3, 0.5],
    "lora_dropout": [0.5],
    "fan_in_fan_out": [True],
    "bias": ["all", "lora_only"],
    "use_rslora": [True],
    "modules_to_save": [["lm_head"], ["embed_tokens", "lm_head"], ["attn.proj"], ["merger"], ["o_proj"], ["norm"]],
    "init_lora_weights": [
        *(True, "gaussian", "orthogonal", "eva", "mica", "pissa", "pissa_niter_2", "olora", "corda", "loftq"),
        *("lora_ga", "tomorrow"),
    ],
    "layers_to_transform": [[0, 2], 1],
    "layers_pattern": ["layers", ["layers"]],
    "rank_pattern": [{"q_proj": 2}, {r"layers\.1\.self_attn\.q_proj": 7, "v_proj": 3}, {"^model.*q_proj": 5}],
    "alpha_pattern": [{"q_proj": 2}, {"proj": 5, r"layers\.[02]\..*": 30, "q_proj": 40}, {"^model.*v_proj": 9}],
    "megatron_config": [{"a": 1}],
    "megatron_core": ["megatron.core.other"],
    "trainable_token_indices": [[147, 4], {"embed_tokens": [190], "lm_head": [9, 5]}, {"lm_head": [7]}, [1, 9999]],
    "loftq_config": [{"loftq_bits": 4}],
    "eva_config": [{"rho": 1.5}],
    "corda_config": [{"corda_method": "kpm"}],
    "lora_ga_config": [{"direction": "ArBr"}],
    "use_dora": [True],
    "velora_config": [{"num_groups": 2}],
    "alora_invocation_tokens": [[4, 147], [190]],  # in the prompt
    "use_qalora": [True],
    "qalora_group_size": [32],
    "monteclora_config": [{"num_samples": 2}],
    "layer_replication": [[[0, 2], [1, 4]]],
    "runtime_config": [{"ephemeral_gpu_offload": True}],
    "lora_bias": [True],
    "target_parameters": [WEIGHTS, ["embed_tokens.weight"], ["q_proj.bias"], ["experts.gate_up_proj"]],
    "use_bdlora": [
        {"nblocks": 2, "target_modules_bd_a": ["q_proj"], "target_modules_bd_b": ["v_proj"], "match_strict": False}
    ],
    "arrow_config": [{"top_k": 2}],
    "kasa_config": [{"beta": 0.1}],
    "ensure_weight_tying": [True],
}
IA3_PLAIN: dict[str, Any] = {
    "target_modules": ["k_proj", "v_proj", "down_proj"],
    "feedforward_modules": ["down_proj"],
    "init_ia3_weights": False,
}
IA3_VALUES: Sequence[dict[str, Any]] = (
    {},
    {"target_modules": ["o_proj", "qkv", "fc1"], "feedforward_modules": ["o_proj"]},
    {"feedforward_modules": []},
    {"feedforward_modules": ["k_proj"]},
    {"exclude_modules": ["v_proj"]},
    {"fan_in_fan_out": True},
    {"modules_to_save": ["lm_head"]},
    {"init_ia3_weights": True, "modules_to_save": ["attn.proj"]},
)
TOKENS_VALUES: Sequence[dict[str, Any]] = (
    {"token_indices": [190, 4]},
    {"token_indices": [3, 2], "target_modules": ["lm_head"]},
    {"token_indices": [147], "target_modules": ["embed_tokens", "lm_head"], "init_weights": False},
)
# Settings that PEFT accepts only beside others.
BESIDE: dict[str, dict[str, Any]] = {
    "layers_pattern": {"layers_to_transform": [1, 3]},
    "target_parameters": {"target_modules": [], "alpha_pattern": {r"q_proj\.weight": 6, "q_proj": 99}},
    "layer_replication": {"target_modules": ["q_proj"]},
    "alora_invocation_tokens": {"task_type": "CAUSAL_LM"},
}
SHARED_LAYERS = ("lm_head", "embed_tokens")  # named by their tensors
COMBINED = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "exclude_modules", "layers_to_transform"),
    *("use_dora", "bias", "modules_to_save", "trainable_token_indices"),
)


@dataclasses.dataclass(frozen=True)
class Folder:
    """An adapter folder. settings: those that may be named when it is refused."""

    name: str
    path: Path
    settings: tuple[str, ...]


class Generator:
    """Writes adapter folders of one base model."""

    def __init__(self, model: Any, root: Path) -> None:
        self._model = model
        self._root = root
        self._numbers = itertools.count()
        self._plain = self.write({})

    def write(self, settings: dict[str, Any]) -> Folder:
        """A folder with these settings; a plain folder with an edited configuration where PEFT does not build them."""
        name = f"{'-'.join(settings) or 'plain'}-{next(self._numbers)}"
        path = self._root / name
        try:
            save_adapter(self._model, LoraConfig(**{**PLAIN, **settings}), path)
        except (ValueError, TypeError, ImportError, AttributeError, LookupError, RuntimeError, NotImplementedError):
            if not settings:
                raise
            shutil.rmtree(path, ignore_errors=True)
            return self.edit(settings)
        return Folder(name, path, tuple(settings))

    def edit(self, settings: dict[str, Any]) -> Folder:
        """A plain folder with changes of its configuration."""
        name = f"{'-'.join(settings)}-edited-{next(self._numbers)}"
        path = Path(shutil.copytree(self._plain.path, self._root / name))
        file = path / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
        return Folder(name, path, tuple(settings))

    def every_setting(self) -> Iterator[Folder]:
        yield self._plain
        for setting, values in VALUES.items():
            for value in values:
                yield self.write({**BESIDE.get(setting, {}), setting: value})

    def combinations(self) -> Iterator[Folder]:
        draw = random.Random(0)
        for _ in range(NUM_COMBINED):
            chosen = draw.sample(COMBINED, 4)
            yield self.write({setting: draw.choice(VALUES[setting]) for setting in chosen})

    def other_tuners(self) -> Iterator[Folder]:
        configs: list[tuple[dict[str, Any], Any]] = [(each, IA3Config(**IA3_PLAIN | each)) for each in IA3_VALUES]
        for settings, config in [*configs, *((each, TrainableTokensConfig(**each)) for each in TOKENS_VALUES)]:
            path = self._root / f"{type(config).__name__}-{next(self._numbers)}"
            save_adapter(self._model, config, path)
            yield Folder(path.name, path, tuple(settings))

    def other_methods_and_later_versions(self) -> Iterator[Folder]:
        for kind in PeftType:
            if kind not in (PeftType.LORA, PeftType.IA3, PeftType.TRAINABLE_TOKENS):
                yield self.edit({"peft_type": kind.value})
        yield from (self.edit({"setting_of_a_later_version": value}) for value in (True, 1, "on", {"depth": 2}))


class NoAdapters:
    """A reference without adapters."""

    family = FAMILY
    adapters: ClassVar[dict[str, str]] = {}


def test_the_generator_has_values_of_every_setting() -> None:
    assert {field.name for field in dataclasses.fields(LoraConfig) if field.init} <= set(VALUES)


@pytest.mark.slow
def test_each_folder_is_served_as_peft_does_or_refused_by_name(tmp_path: Path) -> None:
    model = build_model(FAMILY)
    prompt = make_prompt(FAMILY, model, 0, num_images=1)
    engine = RecordingEngine(NoAdapters(), FixedModes(Mode.UNMERGED))
    generator = Generator(model, tmp_path)
    served: list[Folder] = []
    counts: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, of settings that it ignores
        for folder in itertools.chain(
            generator.every_setting(),
            generator.combinations(),
            generator.other_tuners(),
            generator.other_methods_and_later_versions(),
        ):
            try:
                engine.engine.load_adapter(folder.name, str(folder.path))
                served.append(folder)
            except BadAdapter as error:
                counts["refused by name"] += 1
                assert any(name in str(error) for name in (*folder.settings, *SHARED_LAYERS)), (folder, error)
        base = engine.answer([(None, prompt)], NUM_TOKENS)[0]
        answers = engine.answer([(folder.name, prompt) for folder in served], NUM_TOKENS)
        for folder, (tokens, logits) in zip(served, answers, strict=True):
            want_tokens, want = peft_answer(model, str(folder.path), prompt, NUM_TOKENS)
            assert tokens == want_tokens and float((logits - want).abs().max()) < TOLERANCE, folder
            assert float((logits[0] - base[1][0]).abs().max()) > 10 * TOLERANCE, f"{folder} has no effect"
            counts["served exactly"] += 1
    print({**counts, "served wrong": 0})
    assert counts["served exactly"] >= 40 and counts["refused by name"] >= 40
