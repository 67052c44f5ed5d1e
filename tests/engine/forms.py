"""Every form of adapters: PEFT's configurations, requests for them, and a part of the engine without which answers are
wrong. `reference` has the answers of transformers + PEFT.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, TrainableTokensConfig
from peft.tuners.lora.config import BdLoraConfig

from tests.families import LANGUAGE_LINEARS, Prompt, build_model, make_prompt, vision_linears
from tests.harness import FixedModes, Run, run_engine
from tests.oracle import adapter_configs, save_adapter
from tests.references import CASES, TOLERANCE, Answer, assert_same
from vlora.engine.request_checks import CheckedRequest, RequestChecks
from vlora.lora import adapted_linear, composition, peft_format, registry
from vlora.lora.own_layers import OwnLayer, ReplacedOutputs
from vlora.types import Mode

NUM_TOKENS = 8
Case = tuple[str | None, Prompt]
QUERIES = r".*language_model.*\.(q_proj|v_proj)"
BLOCKS = BdLoraConfig(
    target_modules_bd_a=["o_proj", "down_proj"],
    target_modules_bd_b=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
    nblocks=4,
)
FIRST, SECOND = list(range(90, 4, -2)), list(range(3, 60, 3))
"""Tokens with weights of their own."""
INVOCATIONS = {"wide8": [150, 151], "narrow4": [160, 161, 162]}


@dataclasses.dataclass(frozen=True)
class Left:
    """A part of the engine to leave out, and an adapter whose answers are wrong without it."""

    owner: Any
    name: str
    adapter: str
    without: Callable[..., Any] = lambda *_: None
    mode: Mode = Mode.UNMERGED
    merged: str | None = None


@dataclasses.dataclass(frozen=True)
class Form:
    """Adapters of one form and requests for them.

    Attributes:
        configs: The adapters by name, for a family.
        cases: The adapter of each request, its number of images, and words at its end.
        merged: Adapters that are merged while modes change.
        left_out: Parts of the engine, each with an adapter that needs it.
        tied: The output head is the token embedding.
    """

    configs: Callable[[str], Mapping[str, PeftConfig]]
    cases: Sequence[tuple[str | None, int] | tuple[str | None, int, Sequence[int]]]
    merged: Sequence[str]
    left_out: Mapping[str, Left]
    tied: bool = False


def lora(rank: int, targets: str | list[str] = LANGUAGE_LINEARS, **settings: Any) -> LoraConfig:
    return LoraConfig(r=rank, target_modules=targets, **settings)


def _everywhere(family: str) -> str:
    return f"({LANGUAGE_LINEARS}|{vision_linears(family)})"


def _dora(family: str) -> Mapping[str, PeftConfig]:
    return {
        "dora8": lora(8, lora_alpha=16, use_dora=True),
        "wide8": lora(8, lora_alpha=16),
        "narrow_dora": lora(4, QUERIES, use_dora=True),
        "dora_everywhere": lora(8, _everywhere(family), use_rslora=True, use_dora=True),
    }


def _ia3(family: str) -> Mapping[str, PeftConfig]:
    language = r".*language_model.*(q_proj|k_proj|v_proj|up_proj|down_proj|o_proj)"
    inputs = r".*language_model.*(down_proj|o_proj)"
    return {
        "plain": lora(8),
        "dora": lora(8, use_dora=True),
        "ia3": IA3Config(target_modules=language, feedforward_modules=inputs),
        "vision_ia3": IA3Config(target_modules=f"({language}|{vision_linears(family)})", feedforward_modules=inputs),
    }


def _biases(family: str) -> Mapping[str, PeftConfig]:
    return {
        "plain": lora(8),
        "own_bias": lora(4, _everywhere(family), lora_alpha=12, lora_bias=True),
        "base_bias": lora(8, _everywhere(family), bias="lora_only"),
        "dora_bias": lora(4, _everywhere(family), bias="lora_only", use_dora=True),
    }


def _own_layers(family: str) -> Mapping[str, PeftConfig]:
    projector = ["linear_1", "linear_2"] if family.startswith("llava") else ["attn.proj"]
    if family == "qwen_vl":
        projector = ["visual.proj", "attn_pool.kv_proj"]
    return {
        "plain": lora(8),
        "head": lora(4, ["q_proj", "v_proj"], modules_to_save=["lm_head"]),
        "both": lora(4, ["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
        "factors": lora(8, ["q_proj", "lm_head", "embed_tokens"], lora_alpha=24),
        "projector": lora(4, ["q_proj"], modules_to_save=projector),
    }


def _tokens(_: str) -> Mapping[str, PeftConfig]:
    return {
        "plain": lora(8),
        "tokens": lora(4, ["q_proj", "v_proj"], trainable_token_indices=FIRST),
        "both": lora(8, ["q_proj"], trainable_token_indices={"embed_tokens": FIRST, "lm_head": SECOND}),
        "head": lora(4, ["v_proj"], trainable_token_indices={"lm_head": FIRST}),
        "alone": TrainableTokensConfig(token_indices=SECOND),
    }


def _composed(family: str) -> Mapping[str, PeftConfig]:
    return {
        "narrow4": lora(4, QUERIES, lora_alpha=8),
        "wide8": lora(8, lora_alpha=12),
        "everywhere16": lora(16, _everywhere(family), lora_alpha=16, rank_pattern={"0.mlp.up_proj": 5}),
        "rs6": lora(6, r".*language_model.*\.(o_proj|down_proj)", use_rslora=True),
        "blocks8": lora(8, use_rslora=True, use_bdlora=BLOCKS),
        "words4": lora(4, r".*(lm_head|embed_tokens|q_proj)"),
    }


def _activated(_: str) -> Mapping[str, PeftConfig]:
    named = {"wide8": 8, "narrow4": 4, "ordinary8": 8}
    return {
        name: lora(rank, lora_alpha=16, task_type="CAUSAL_LM", alora_invocation_tokens=INVOCATIONS.get(name))
        for name, rank in named.items()
    }


PARTS: Mapping[str, Mapping[str, float]] = {
    "narrow4+wide8": {"narrow4": 1, "wide8": 1},
    "0.7*everywhere16+-0.3*narrow4": {"narrow4": -0.3, "everywhere16": 0.7},
    "everywhere16+1.5*rs6+wide8": {"everywhere16": 1, "wide8": 1, "rs6": 1.5},
    "0.5*wide8": {"wide8": 0.5},
    "wide8+words4": {"wide8": 1, "words4": 1},
    "blocks8+rs6": {"blocks8": 1, "rs6": 1},
}
"""Compositions: canonical name -> weights."""
BOTH, WEIGHTED, THREE, ONE, WORDS, SUM = PARTS
_COMPOSE = composition.compose


def _without_weights(key: str, parts: Any, *others: Any) -> Any:
    return _COMPOSE(key, [(adapter, 1.0) for adapter, _ in parts], *others)


def _without_a_part(key: str, parts: Any, *others: Any) -> Any:
    return _COMPOSE(key, parts[1:] or parts, *others)


_CHECK = RequestChecks.check


def _begins(at: Callable[[int, int], int]) -> Left:
    """at: the place where the adapter begins, by the right one and the prompt's length."""

    def check(self: RequestChecks, request: Any) -> CheckedRequest:
        checked = _CHECK(self, request)
        place = at(checked.request.adapter_from, len(request.prompt_ids))
        return checked._replace(request=msgspec.structs.replace(checked.request, adapter_from=place))

    return Left(RequestChecks, "check", "wide8", check)


_A, _B = INVOCATIONS["wide8"], INVOCATIONS["narrow4"]
FORMS: dict[str, Form] = {
    "lora": Form(adapter_configs, CASES, ("wide8", "everywhere64", "patterned16", "narrow4"), {}),
    "dora": Form(
        _dora,
        (("dora8", 1), ("wide8", 1), (None, 1), ("narrow_dora", 0), ("dora_everywhere", 2), ("dora8", 0)),
        ("dora8", "dora_everywhere", "wide8", "narrow_dora"),
        {
            "apply": Left(adapted_linear, "apply_changes", "narrow_dora", mode=Mode.MIXED, merged="dora8"),
            "undo": Left(adapted_linear, "undo_changes", "wide8", mode=Mode.MIXED, merged="dora8"),
        },
    ),
    "ia3": Form(
        _ia3,
        (("ia3", 1), ("plain", 1), (None, 1), ("dora", 0), ("vision_ia3", 1), ("ia3", 0)),
        ("dora", "plain"),
        {
            "outputs": Left(adapted_linear, "apply_changes", "ia3"),
            "inputs": Left(adapted_linear, "changed_inputs", "ia3", lambda x, *_: x),
        },
    ),
    "biases": Form(
        _biases,
        (("own_bias", 1), ("plain", 1), (None, 1), ("base_bias", 0), ("dora_bias", 1), ("own_bias", 0)),
        ("plain",),
        {"biases": Left(adapted_linear, "apply_changes", "own_bias")},
    ),
    "own_layers": Form(
        _own_layers,
        (("head", 1), ("both", 1), (None, 1), ("plain", 0), ("factors", 1), ("head", 0), ("projector", 1)),
        ("head", "both", "factors", "projector"),
        {
            "head": Left(OwnLayer, "multiply", "head"),
            "embedding": Left(OwnLayer, "look_up", "both"),
            "projector": Left(ReplacedOutputs, "add", "projector"),
        },
    ),
    "tokens": Form(
        _tokens,
        (("tokens", 1), ("plain", 0), ("both", 1), (None, 1), ("alone", 0), ("tokens", 0), ("head", 1), ("alone", 1)),
        ("tokens", "both", "head", "alone"),
        {"head": Left(OwnLayer, "multiply", "head"), "embedding": Left(OwnLayer, "look_up", "tokens")},
    ),
    "tied": Form(
        _tokens,
        (("tokens", 1), ("both", 1), (None, 1), ("alone", 0), ("tokens", 0), ("head", 1)),
        ("tokens", "both"),
        {"head": Left(peft_format, "with_tied_tokens", "tokens", lambda targets, _: targets)},
        tied=True,
    ),
    "composed": Form(
        _composed,
        ((BOTH, 1), ("wide8", 1), (WEIGHTED, 2), (None, 1), (THREE, 1), (ONE, 0), (WORDS, 1), (BOTH, 0), (SUM, 1)),
        (BOTH, THREE, WORDS, "wide8"),
        {
            "weights": Left(registry, "compose", WEIGHTED, _without_weights),
            "a part": Left(registry, "compose", BOTH, _without_a_part),
        },
    ),
    "activated": Form(
        _activated,
        (
            ("wide8", 1, [*_A, 9, 8, 7, 6]),
            ("narrow4", 1, [*range(11, 20), *_B]),
            (None, 1, _A),
            ("ordinary8", 1, [*_A, 21, 22, 23]),
            ("wide8", 0, [*_A, *range(31, 38), *_A, 41, 42]),  # the last one counts
            ("wide8", 1, [51, 52, 53]),  # not invoked: the base model answers
            ("wide8", 1, [*_B, 61]),
            ("narrow4", 1, [*_A, *_B, 71]),
        ),
        ("wide8", "ordinary8"),
        {
            "a token before": _begins(lambda right, _: right - 1),
            "a token later": _begins(lambda right, _: right + 1),
            "with the prompt": _begins(lambda *_: 0),
            "with the answer": _begins(lambda _, length: length),
        },
    ),
}


def continued(prompt: Prompt, more: Sequence[int]) -> Prompt:
    """The prompt with more text appended."""
    kwargs = dict(prompt.kwargs)
    kwargs["input_ids"] = torch.cat([kwargs["input_ids"], torch.tensor([list(more)], dtype=torch.int64)], 1)
    kwargs["attention_mask"] = torch.ones_like(kwargs["input_ids"])
    if (types := kwargs.get("mm_token_type_ids")) is not None:
        kwargs["mm_token_type_ids"] = torch.cat([types, torch.zeros(1, len(more), dtype=torch.int)], 1)
    return dataclasses.replace(prompt, kwargs=kwargs, prompt_ids=(*prompt.prompt_ids, *more))


def words(seed: int, count: int) -> list[int]:
    """Random text."""
    return torch.randint(3, 149, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class FormReference:
    """A form's adapters for a family on disk, its requests, and the answers of transformers + PEFT, each once."""

    def __init__(self, name: str, family: str, folder: Path) -> None:
        self.name, self.family, self.form, self.folder = name, family, FORMS[name], folder
        self.model = self.new_model()
        configs = self.form.configs(family).items()
        self.adapters = {adapter: save_adapter(self.model, config, folder / adapter) for adapter, config in configs}
        self.cases: list[Case] = []
        for seed, (adapter, images, *more) in enumerate(self.form.cases):
            prompt = make_prompt(
                family, self.model, seed, num_images=images, text=(5 + 3 * seed, 4 + 2 * seed) if not more else (5, 6)
            )
            self.cases.append((adapter, continued(prompt, more[0]) if more else prompt))
        self._answers: dict[Any, Answer] = {}
        self.peft = functools.cache(self._peft)

    def new_model(self) -> Any:
        model = build_model(self.family)
        if self.form.tied:
            model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = True
            model.tie_weights()
            assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        return model

    @functools.cached_property
    def checkpoint(self) -> str:
        """The model as a checkpoint on disk."""
        self.model.save_pretrained(self.folder / "model")
        return str(self.folder / "model")

    def _peft(self, adapter: str | None) -> Any:
        """The model with an adapter or a composition. Each part of a composition is active with its weight."""
        model = copy.deepcopy(self.model)
        if adapter is None:
            return model
        weights = PARTS.get(adapter, {adapter: 1.0})
        first, *others = weights
        peft: Any = PeftModel.from_pretrained(model, self.adapters[first], adapter_name=first)
        for name in others:
            peft.load_adapter(self.adapters[name], name)
        if adapter in PARTS:
            layers = [layer for layer in peft.modules() if isinstance(getattr(layer, "scaling", None), dict)]
            for layer, name in itertools.product(layers, weights):
                if name in layer.scaling:
                    layer.scaling[name] *= weights[name]
            peft.base_model.set_adapter(list(weights))
        return peft.eval()

    @torch.no_grad()
    def answer(self, adapter: str | None, prompt: Prompt, num_tokens: int = NUM_TOKENS) -> Answer:
        key = adapter, prompt.prompt_ids, tuple(item.content_hash for item in prompt.vision), num_tokens
        if key not in self._answers:
            given = {"max_new_tokens": num_tokens, "do_sample": False, "return_dict_in_generate": True}
            out = self.peft(adapter).generate(**prompt.kwargs, **given, output_logits=True)
            logits = torch.stack([step[0] for step in out.logits]).float()
            self._answers[key] = logits.argmax(-1).tolist(), logits
        return self._answers[key]

    def run(
        self,
        policy: Any,
        *,
        cases: Sequence[Case] | None = None,
        num_tokens: int = NUM_TOKENS,
        checked: bool = True,
        **settings: Any,
    ) -> Run:
        """Answer requests at the same time; `checked`: as PEFT does."""
        chosen = self.cases if cases is None else cases
        if "checkpoint" not in settings:
            settings["model"] = self.new_model()
        run = run_engine(self, policy, num_tokens, cases=chosen, **settings)
        if checked:
            self.expect(run.answers, chosen)
        return run

    def expect(self, answers: Sequence[Answer], cases: Sequence[Case] | None = None) -> None:
        """Assert that an engine's answers, of any length, are those of PEFT."""
        for got, case in zip(answers, self.cases if cases is None else cases, strict=True):
            assert_same(got, self.answer(*case, num_tokens=len(got[0])))

    def of(self, adapter: str | None) -> list[Case]:
        return [case for case in self.cases if case[0] == adapter]

    def expect_wrong(self, adapter: str | None, policy: FixedModes, **settings: Any) -> None:
        """Assert that an adapter's answers differ by more than rounding, up to their first other token (later inputs
        differ too).
        """
        run, largest = self.run(policy, checked=False, **settings), 0.0
        for (tokens, logits), case in zip(run.answers, self.cases, strict=True):
            want_tokens, want = self.answer(*case)
            same = next((i for i in range(NUM_TOKENS) if tokens[i] != want_tokens[i]), NUM_TOKENS - 1)
            if case[0] == adapter:
                largest = max(largest, float((logits[: same + 1] - want[: same + 1]).abs().max()))
        assert largest > 100 * TOLERANCE
