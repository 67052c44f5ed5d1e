"""Every mode on a quantized base gives the answers of plain transformers + PEFT on the restored weights.

Merged weights are quantized again, so in merged and mixed mode the oracle has the restored merged weights; requests of
other adapters are then computed with the merged adapter subtracted, as PEFT does with a negative scale.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch import nn

from atmm.formats import FP8_CAPABILITY, Fp8, Int8, multiplies_int8
from atmm.grouped import Grouped
from tests import device
from tests.families import FAMILIES, LANGUAGE_LINEARS, Prompt, build_model
from tests.harness import FixedModes, RecordingEngine, Run, run_engine
from tests.oracle import Oracle
from tests.references import TOLERANCE, Answer, assert_same, prompts_of
from vlora.engine import quantize
from vlora.types import Mode

NUM_TOKENS = 8
MERGED = "wide8"
CASES = (("everywhere64", 1), (None, 0), (MERGED, 1), ("narrow4", 2), ("patterned16", 0), (MERGED, 0))


class ExactInputs:
    """Products without the rounding of inputs.

    An input that differs by the order of a sum may round to another eight-bit value, which is a visible difference.
    """

    decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def product(
        self, x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return F.linear(x, self.decode(values, scales).to(x.dtype), bias)


class ExactFp8(ExactInputs, Fp8):
    """Steps are an eighth of a value, or of the smallest normal one."""

    def step(self, values: torch.Tensor) -> torch.Tensor:
        return values.abs() / 8 + 2**-9 * values.abs().amax(1, keepdim=True) / self.largest


class ExactInt8(ExactInputs, Int8):
    """Steps are equal in a row."""

    def step(self, values: torch.Tensor) -> torch.Tensor:
        return values.abs().amax(1, keepdim=True).mul(1.01) / self.largest


class ExactInt4(ExactInputs, Grouped):
    """Steps are equal in a group."""

    def step(self, values: torch.Tensor) -> torch.Tensor:
        largest = values.unflatten(1, (-1, 32)).abs().amax(2, keepdim=True)
        return largest.mul(1.01 / 8).expand(-1, -1, 32).flatten(1)


EXACT: Mapping[str, Any] = {"fp8": ExactFp8(), "int8": ExactInt8(), "int4": ExactInt4(4, 32, symmetric=True)}
Quantize = Literal["fp8", "int8", "int4"]


class InputsRounded(nn.Linear):
    """A layer with a product that rounds each token as the format does; its adapters read the token itself."""

    quantize: Quantize

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.quantize == "int4":
            rounded = restored("int8", x.unflatten(-1, (-1, 32))).flatten(-2)
        else:
            rounded = restored(self.quantize, x)
        return F.linear(rounded, self.weight, self.bias)


def restored(quantize: Quantize, weights: torch.Tensor) -> torch.Tensor:
    exact: torch.Tensor = EXACT[quantize].decode(*EXACT[quantize].encode(weights))
    return exact.to(weights.dtype)


def language_linears(model: Any) -> dict[str, nn.Linear]:
    named = model.model.language_model.named_modules()
    return {name: module for name, module in named if type(module) is nn.Linear}


def restored_model(quantize: Quantize, model: Any, kind: type[nn.Linear] = nn.Linear) -> Any:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for linear in language_linears(model).values():
            linear.weight.copy_(restored(quantize, linear.weight))
            linear.__class__ = kind
            if isinstance(linear, InputsRounded):
                linear.quantize = quantize
    return model


class Reference:
    """Transformers + PEFT on restored weights: W0, and W0 with one adapter merged."""

    def __init__(self, quantize: Quantize, family: str, folder: Path) -> None:
        self.quantize, self.family, self.model = quantize, family, build_model(family)
        self.oracle = Oracle(family, restored_model(quantize, self.model))
        self.adapters = self.oracle.save(folder)
        self.cases = prompts_of(family, self.model, CASES)
        self.answers = [self.oracle.generate(prompt, adapter, NUM_TOKENS) for adapter, prompt in self.cases]
        self._merged = Oracle(family, restored_model(quantize, self.model))
        self._layers: dict[str, Any] = {}
        assert self._merged.peft is not None
        for name, layer in self._merged.peft.named_modules():
            if "language_model" in name and MERGED in getattr(layer, "lora_A", {}):
                self._layers[name.removeprefix("base_model.model.")] = layer
                layer.scaling[MERGED] *= -1
        self._sums = {
            name: layer.base_layer.weight - layer.get_delta_weight(MERGED) for name, layer in self._layers.items()
        }

    def run(self, mode: Mode, num_tokens: int = NUM_TOKENS, **settings: Any) -> Run:
        """All cases, or in merged mode those of the merged adapter."""
        cases = [case for case in self.cases if mode is not Mode.MERGED or case[0] == MERGED]
        policy = FixedModes(mode, None if mode is Mode.UNMERGED else MERGED)
        return run_engine(self, policy, num_tokens, cases=cases, quantize=self.quantize, **settings)

    def use(self, merged: Mapping[str, torch.Tensor]) -> None:
        """Take an engine's merged weights, which may differ from the oracle's where the sum is between two values."""
        assert merged.keys() == self._layers.keys()
        with torch.no_grad():
            for name, layer in self._layers.items():
                want = restored(self.quantize, self._sums[name])
                differences = (merged[name] - want).abs()
                assert (differences > 1e-5 * want.abs()).float().mean() < 1e-3, name
                assert (differences <= EXACT[self.quantize].step(want)).all(), name
                layer.base_layer.weight.copy_(merged[name])

    def mixed(self, prompt: Prompt, adapter: str | None) -> Answer:
        """The answer while `MERGED` is merged."""
        peft: Any = self._merged.peft
        if adapter == MERGED:
            return self._merged.generate(prompt, None, NUM_TOKENS)
        with pytest.MonkeyPatch.context() as patch:
            both = [MERGED] if adapter is None else [MERGED, adapter]
            patch.setattr(peft, "set_adapter", lambda name: peft.base_model.set_adapter(both))
            return self._merged.generate(prompt, MERGED, NUM_TOKENS)


FORMATS = [("fp8", family) for family in FAMILIES]
FORMATS += [("int8", "qwen2_vl"), ("int8", "llava"), ("int4", "qwen2_5_vl"), ("int4", "llava_onevision")]


@pytest.fixture(scope="module", params=FORMATS, ids="-".join)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    chosen, family = request.param
    return Reference(chosen, family, tmp_path_factory.mktemp(family))


@pytest.fixture
def exact_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "FORMATS", EXACT)


@pytest.mark.usefixtures("exact_inputs")
@pytest.mark.parametrize("max_step_tokens", [512, 24])
def test_unmerged_requests(reference: Reference, max_step_tokens: int) -> None:
    run = reference.run(Mode.UNMERGED, max_step_tokens=max_step_tokens)
    assert Mode.UNMERGED in run.modes
    for got, want in zip(run.answers, reference.answers, strict=True):
        assert_same(got, want)


@pytest.mark.usefixtures("exact_inputs")
@pytest.mark.parametrize("mode", [Mode.MERGED, Mode.MIXED])
def test_merged_and_mixed_requests(reference: Reference, mode: Mode) -> None:
    cases = reference.cases if mode is Mode.MIXED else [case for case in reference.cases if case[0] == MERGED]
    # All images first: in every step a request uses the merged adapter.
    recorded = RecordingEngine(reference, FixedModes(mode, MERGED), quantize=reference.quantize, encode_share=1e9)
    answers = recorded.answer(cases, NUM_TOKENS)
    assert recorded.modes == {mode}
    linears = recorded.engine.parts.device.slabs.linears
    reference.use({name: linear.stored.float().cpu() for name, linear in linears.items()})
    for got, (adapter, prompt) in zip(answers, cases, strict=True):
        assert_same(got, reference.mixed(prompt, adapter))


@pytest.mark.usefixtures("exact_inputs")
def test_a_quantized_head(reference: Reference) -> None:
    """The embeddings stay as loaded, also where they are tied to the head."""
    model = restored_model(reference.quantize, reference.model)
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(restored(reference.quantize, head.weight.data), requires_grad=False)
    oracle = Oracle(reference.family, model)
    run = reference.run(Mode.UNMERGED, 4, quantize_head=True)
    for got, (adapter, prompt) in zip(run.answers, reference.cases, strict=True):
        assert_same(got, oracle.generate(prompt, adapter, 4))


@pytest.mark.usefixtures("exact_inputs")
def test_dora_takes_the_norms_of_the_quantized_weights(reference: Reference, tmp_path: Path) -> None:
    configs = {"dora8": LoraConfig(r=8, use_dora=True, target_modules=LANGUAGE_LINEARS)}
    oracle = Oracle(reference.family, restored_model(reference.quantize, reference.model), configs=configs)
    own, prompt = copy.copy(reference), reference.cases[0][1]
    own.adapters, own.cases = oracle.save(tmp_path), [("dora8", prompt)]
    assert_same(own.run(Mode.UNMERGED, 4).answers[0], oracle.generate(prompt, "dora8", 4))


@pytest.mark.usefixtures("exact_inputs")
def test_answers_without_the_scales_are_wrong(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    kind = type(EXACT[reference.quantize])
    decode = kind.decode
    monkeypatch.setattr(
        kind, "decode", lambda own, values, scales: decode(own, values, scales.abs().mean().expand_as(scales))
    )
    for (_, got), (_, want) in zip(reference.run(Mode.UNMERGED, 1).answers, reference.answers, strict=True):
        assert (got[0] - want[0]).abs().max() > 100 * TOLERANCE


def test_rounded_inputs(reference: Reference) -> None:
    """Logits are near the oracle's; an input between two eight-bit values changes the tokens behind it."""
    if reference.quantize == "int4" and not multiplies_int8():
        pytest.skip("inputs are rounded only by products of bytes, which this processor lacks")
    oracle = Oracle(reference.family, restored_model(reference.quantize, reference.model, InputsRounded))
    pairs = zip(reference.run(Mode.UNMERGED, 1).answers, reference.cases, strict=True)
    found = [(got - oracle.generate(prompt, adapter, 1)[1]).abs().max() for (_, got), (adapter, prompt) in pairs]
    assert torch.stack(found).median() < 10 * TOLERANCE and min(found) < TOLERANCE and max(found) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "limit"), [(Mode.UNMERGED, 0.15), (Mode.MIXED, 0.3)])
def test_bfloat16_on_the_device(reference: Reference, mode: Mode, limit: float) -> None:
    """On a GPU by products of eight-bit floats, or of integers with inputs that are not rounded.

    The reference has neither rounded inputs nor rounded merged weights.

    Both errors are large, because models and adapters are random. Measured on a CPU: at most 0.07, and 0.21 if mixed.
    """
    on_cuda = device.name.startswith("cuda") and reference.quantize == "fp8"
    if on_cuda and torch.cuda.get_device_capability(device.name) < FP8_CAPABILITY:
        pytest.skip("this GPU has no products of eight-bit floats")
    if reference.quantize == "int4" and mode is Mode.MIXED:
        pytest.skip("merged weights in four bits are far from the reference's")
    # Requests of the merged adapter run until all have begun.
    run = reference.run(mode, 8, dtype=torch.bfloat16, encode_share=1e9)
    assert run.modes == {mode}
    pairs = [(got[0], want[0]) for (_, got), (_, want) in zip(run.answers, reference.answers, strict=True)]
    errors = [float((got - want).norm() / want.norm()) for got, want in pairs]
    assert statistics.mean(errors) < limit, errors
