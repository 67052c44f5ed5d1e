"""DoRA's scales in memory and in merged weights, and biases, of whole layers and of a rank's part of one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from torch import nn

from atmm.formats import Fp8, Int8
from atmm.quantized import QuantizedWeight, WeightFormat, quantized_empty
from tests.families import build_model
from tests.oracle import Oracle
from vlora.errors import BadAdapter
from vlora.lora.adapted_linear import LaneScope, adapt
from vlora.lora.layout import HostFactors
from vlora.lora.merge_fidelity import MergeFidelity
from vlora.lora.output_changes import merge_rescaled, row_norms
from vlora.lora.peft_format import read_header
from vlora.lora.peft_target import SiteShape
from vlora.lora.weight_slabs import WeightSlabs
from vlora.models.hf_model import HFModel
from vlora.parallel.layer_sharding import LinearShard, Span

FAMILY = "qwen2_vl"
QUERY = "model.language_model.layers.0.self_attn.q_proj"
DOWN = "model.language_model.layers.0.mlp.down_proj"


class Base:
    """A model's sites and layers, and a folder with an adapter on two layers."""

    def __init__(self, folder: Path) -> None:
        model = build_model(FAMILY)
        config = LoraConfig(r=4, use_dora=True, target_modules=[QUERY, DOWN])
        self.folder = Path(Oracle(FAMILY, model, configs={"dora": config}).save(folder)["dora"])
        linears = HFModel(model).language_linears
        targets = {name: linears[name] for name in (QUERY, DOWN)}
        self.sites = {name: SiteShape(it.in_features, it.out_features, False) for name, it in targets.items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(tmp_path_factory.mktemp("dora"))


def test_a_layer_with_inputs_on_several_ranks_is_refused(base: Base) -> None:
    down = base.sites[DOWN]
    shard = LinearShard(1, 2, down.d_in, down.d_out, Span(0, down.d_in // 2), Span(0, down.d_out))
    sites = {**base.sites, DOWN: dataclasses.replace(down, shard=shard)}
    with pytest.raises(BadAdapter, match=r"use_dora is not supported for .*down_proj.* tensor_parallel = 2"):
        read_header(base.folder, sites, 64)


def test_activated_adapters_may_have_plain_factors_only(base: Base, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base.folder, tmp_path / "activated"))
    file = folder / "adapter_config.json"
    settings = {"alora_invocation_tokens": [5, 6], "task_type": "CAUSAL_LM"}
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    with pytest.raises(BadAdapter, match=r"alora_invocation_tokens beside DoRA"):
        read_header(folder, base.sites, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    w0, a, bt = (torch.randn(size, generator=generator).to(dtype) for size in ((2, 1100, 40), (2, 3, 40), (2, 4, 1100)))
    out = torch.empty_like(w0)
    merge_rescaled(out, w0, a, bt)
    delta = bt[:, :-1].double().transpose(1, 2) @ a.double()
    wanted = (1 + bt[:, -1].double())[..., None] * (w0.double() + delta)
    if dtype is torch.float32:
        assert torch.allclose(out.double(), wanted, rtol=1e-5, atol=1e-5)
    else:
        assert float((out == wanted.to(dtype)).float().mean()) > 0.999  # float32 arithmetic is not exact at ties


@pytest.mark.parametrize("kind", [Fp8(), Int8()], ids=["fp8", "int8"])
def test_merged_weights_are_rounded_as_the_quantized_base(kind: WeightFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    w0, a, bt = (torch.randn(size, generator=generator) for size in ((2, 1100, 48), (2, 3, 48), (2, 4, 1100)))
    allocate = quantized_empty(kind, torch.device("cpu"), lambda size, dtype, _: torch.empty(*size, dtype=dtype))
    base, out = (allocate(w0.shape, torch.float32, w0.device) for _ in range(2))
    assert isinstance(base, QuantizedWeight) and isinstance(out, QuantizedWeight)
    base.copy_(w0)
    merge_rescaled(out, base, a, bt)
    delta = bt[:, :-1].transpose(1, 2) @ a
    wanted = out.rounded((1 + bt[:, -1])[..., None] * (base.float() + delta))
    assert float((out.float() == wanted).float().mean()) > 0.999  # sums in another order may round differently
    norms = row_norms(base[0], a[0], bt[0, :3].t())
    assert torch.allclose(norms, (base.float()[0] + delta[0]).norm(dim=1), rtol=1e-5)


def test_merge_fidelity_includes_the_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(64, 48, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    slabs = WeightSlabs({"layers.0.q_proj": adapt(linear, "layers.0.q_proj", LaneScope())})
    a, bt = (0.05 * torch.randn(size, generator=generator).bfloat16() for size in ((4, 64), (5, 48)))
    weight, delta = linear.weight.double(), bt[:-1].double().t() @ a.double()
    change = (1 + bt[-1].double())[:, None] * (weight + delta) - weight
    lost = (weight + change).bfloat16().double() - weight - change
    wanted = 1 - float(lost.norm() / change.norm())
    assert MergeFidelity(slabs)({"layers.0.q_proj": HostFactors(a, bt)}) == pytest.approx(wanted, abs=1e-3)
    assert wanted < 0.99
