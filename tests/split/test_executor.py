"""The executor's products, the choice of layers, and virtual layers by themselves."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.split.running import MODELS, Serving, example, serving, tiny
from vlora.errors import BadConfig
from vlora.split import connect
from vlora.split.executor import BaseExecutor
from vlora.split.frames import Direction, LayerInfo
from vlora.split.layers import bias_of, frozen_layers, groups_of
from vlora.split.virtual_linear import VirtualGroup


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("qwen2_vl")


@pytest.fixture(scope="module")
def served(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(model, tmp_path_factory.mktemp("base")) as found:
        yield found


@pytest.mark.parametrize("family", MODELS)
def test_products_equal_autograd(family: str) -> None:
    model = tiny(family)
    layers = frozen_layers(model)
    executor = BaseExecutor(layers)
    for index, group in enumerate(executor.groups):
        x = torch.randn(5, group[0].d_in, requires_grad=True)
        outputs = [layers[info.name](x) for info in group]
        grads = [torch.randn_like(y) for y in outputs]
        torch.autograd.backward(outputs, grads)
        mask = (1 << len(group)) - 1
        made = executor.compute(Direction.FORWARD, index, mask, [x.detach()])
        for y, ours, info in zip(outputs, made, group, strict=True):
            torch.testing.assert_close(ours, y.detach(), rtol=1e-5, atol=1e-5)
            linear = executor.compute(Direction.WITHOUT_BIAS, index, 1 << group.index(info), [x.detach()])[0]
            bias = bias_of(layers[info.name])
            torch.testing.assert_close(linear + (0 if bias is None else bias), y.detach(), rtol=1e-5, atol=1e-5)
        (dx,) = executor.compute(Direction.BACKWARD, index, mask, grads)
        torch.testing.assert_close(dx, x.grad, rtol=1e-5, atol=1e-5)


def test_every_linear_layer_is_served_except_tied_heads() -> None:
    model = tiny("gpt2")
    names = set(frozen_layers(model))
    assert names == {n for n, m in model.named_modules() if isinstance(m, Conv1D)} and len(names) == 12
    untied = tiny("qwen2_vl")
    assert "lm_head" in frozen_layers(untied)
    assert set(frozen_layers(untied)) == {n for n, m in untied.named_modules() if type(m) is nn.Linear}


def test_layers_of_one_input_are_one_group() -> None:
    names = ("a.q_proj", "a.o_proj", "a.k_proj", "b.v_proj", "b.up_proj", "head")
    assert groups_of(names) == [
        ("a.q_proj", "a.k_proj"),
        ("a.o_proj",),
        ("b.v_proj",),
        ("b.up_proj",),
        ("head",),
    ]


def test_one_call_for_layers_of_one_input(model: Any, served: Serving) -> None:
    arguments = example("qwen2_vl", model, 0, num_images=0)
    before = served.server.num_calls
    with connect(served.unix) as base:
        base.wrap(copy.deepcopy(model))(**arguments)
    assert served.server.num_calls - before == 4 * len(model.model.language_model.layers) + 1  # qkv, o, gate-up, down


def test_rows_of_several_clients_do_not_mix(model: Any) -> None:
    executor = BaseExecutor(frozen_layers(model))
    rows = torch.randn(6, executor.groups[0][0].d_in)
    rows[2] = torch.nan
    (joined,) = executor.compute(Direction.FORWARD, 0, 1, [rows])
    (alone,) = executor.compute(Direction.FORWARD, 0, 1, [rows[3:]])
    assert joined[2].isnan().all() and not joined[[0, 1, 3, 4, 5]].isnan().any()
    torch.testing.assert_close(joined[3:], alone, rtol=1e-6, atol=1e-6)


def test_weights_in_bfloat16(tmp_path: Path) -> None:
    model = tiny("qwen2_vl").to(torch.bfloat16)
    arguments = example("qwen2_vl", model, 0, num_images=0)
    with torch.no_grad():
        plain = model(**arguments).logits.float()
        with serving(model, tmp_path) as served, connect(served.tcp) as base:
            assert base.calls.dtype == torch.bfloat16
            ours = base.wrap(copy.deepcopy(model))(**arguments).logits.float()
            # A client may compute in float32 with the base's weights in bfloat16.
            wide = base.wrap(copy.deepcopy(model).float())(**arguments).logits
    assert (ours - plain).norm() < 0.02 * plain.norm()
    assert (wide - plain).norm() < 0.1 * plain.norm()


# -- a client with another model --------------------------------------------------------------------------------------


def test_a_client_with_other_weights_is_refused(model: Any, served: Serving) -> None:
    for change in ("weight", "bias"):
        other = copy.deepcopy(model)
        with torch.no_grad():
            getattr(other.model.language_model.layers[2].self_attn.k_proj, change)[0] += 1e-3
        with connect(served.unix) as base, pytest.raises(BadConfig, match="k_proj' has other weights"):
            base.wrap(other)
        assert type(other.model.language_model.layers[0].self_attn.q_proj) is nn.Linear, "it was changed anyway"


def test_a_client_with_other_layers_is_refused(served: Serving) -> None:
    with connect(served.unix) as base:
        with pytest.raises(BadConfig, match="that this model lacks"):
            base.wrap(tiny("gpt2"))
        wider = tiny("qwen2_vl")
        wider.model.language_model.layers[1].mlp.down_proj = nn.Linear(130, 64, bias=False)
        with pytest.raises(BadConfig, match=r"shape \[64, 128\]; this model's has \[64, 130\]"):
            base.wrap(wider)


# -- virtual layers ---------------------------------------------------------------------------------------------------


def test_virtual_layers_hold_no_weights(model: Any, served: Serving) -> None:
    with connect(served.unix) as base:
        wrapped = base.wrap(copy.deepcopy(model))
        wrapped.to(torch.float64).to(torch.float32)
        stored = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in wrapped.parameters()}
        layers = [m for m in wrapped.modules() if isinstance(m, nn.Linear)]
        assert sum(m.weight.untyped_storage().nbytes() for m in layers) == 4 * len(layers)
        assert layers[0].weight.shape == next(m for m in model.modules() if isinstance(m, nn.Linear)).weight.shape
        assert sum(stored.values()) < sum(p.nbytes for p in model.parameters()) - served.executor.num_bytes + 1000
        assert not any("q_proj" in name for name in wrapped.state_dict())


@pytest.mark.parametrize(
    "settings", [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"modules_to_save": ["lm_head"]}], ids=str
)
def test_adapters_that_need_the_weights_are_refused(settings: dict[str, Any], model: Any, served: Serving) -> None:
    with connect(served.unix) as base, pytest.raises(BadConfig, match="keep"):
        get_peft_model(base.wrap(copy.deepcopy(model)), LoraConfig(target_modules=["q_proj"], **settings))


def test_kept_layers_can_have_such_adapters(model: Any, served: Serving) -> None:
    arguments = example("qwen2_vl", model, 0)
    config = LoraConfig(target_modules=["q_proj"], use_dora=True, modules_to_save=["lm_head"], init_lora_weights=True)
    torch.manual_seed(0)
    plain = get_peft_model(copy.deepcopy(model), config)(**arguments, labels=arguments["input_ids"]).loss
    with connect(served.unix) as base:
        torch.manual_seed(0)
        ours = get_peft_model(base.wrap(copy.deepcopy(model), keep=["q_proj", "lm_head"]), config)
        loss = ours(**arguments, labels=arguments["input_ids"]).loss
        loss.backward()
    assert abs(float(loss.detach()) - float(plain.detach())) < 1e-5
    assert all(p.grad is not None for p in ours.parameters() if p.requires_grad)


def test_the_outputs_of_a_group_follow_its_input(model: Any, served: Serving) -> None:
    """A layer of a group may be called with an input of its own, or with one that was changed in place."""
    with connect(served.unix) as base:
        attention = base.wrap(copy.deepcopy(model)).model.language_model.layers[0].self_attn
        plain = model.model.language_model.layers[0].self_attn
        x, other = torch.randn(1, 3, 64), torch.randn(1, 3, 64)
        torch.testing.assert_close(attention.q_proj(x), plain.q_proj(x))
        torch.testing.assert_close(attention.k_proj(other), plain.k_proj(other))
        torch.testing.assert_close(attention.v_proj(x), plain.v_proj(x))
        torch.testing.assert_close(attention.q_proj(x), plain.q_proj(x))
        x += 1
        torch.testing.assert_close(attention.k_proj(x), plain.k_proj(x))
        torch.testing.assert_close(attention.k_proj(x), plain.k_proj(x))
        assert attention.q_proj(x[:, :0]).shape == (1, 0, 64)


class Doubling:
    """Calls that can be copied and saved."""

    dtype = torch.float32
    groups = (tuple(LayerInfo(name, 1, 1, 0, 1, b"") for name in "qk"),)

    def call(
        self, direction: Direction, group: int, mask: int, inputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        return [inputs[0] * 2] * mask.bit_count()

    def close(self) -> None:
        pass


def test_threads_that_share_a_model_get_their_own_values() -> None:
    """Of one group, a thread must not get the q of its own input with the k of another thread's."""
    group = VirtualGroup(Doubling(), 0, (0, 1))
    wrong: list[str] = []
    deadline = time.monotonic() + 1.5

    def compute(value: float) -> None:
        while time.monotonic() < deadline and not wrong:
            x = torch.full((1, 1), value)
            try:
                found = [float(group.output(place, x)) for place in (0, 1)]
            except KeyError as error:
                wrong.append(repr(error))
            else:
                wrong.extend(f"{each} for {value}" for each in found if each != 2 * value)

    threads = [threading.Thread(target=compute, args=(value,)) for value in (1.0, 10.0, 100.0)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_groups_can_be_copied_and_saved_without_outputs() -> None:
    group, x = VirtualGroup(Doubling(), 0, (0, 1)), torch.ones(1, 1)
    assert group.output(0, x) == 2
    for other in (copy.copy(group), copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert (other.index, other.places) == (0, (0, 1))
        x.data.fill_(3.0)  # without a new version: an output that was held would still be 2
        assert other.output(1, x) == 6
        x.data.fill_(1.0)
    assert group.output(1, x) == 2


def test_models_without_such_layers_are_refused() -> None:
    with pytest.raises(BadConfig, match="no linear layers"):
        BaseExecutor(frozen_layers(nn.Sequential(nn.LayerNorm(4))), name="norms")
    with pytest.raises(BadConfig, match="bfloat16, float32"):
        BaseExecutor(frozen_layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())), name="mixed")
