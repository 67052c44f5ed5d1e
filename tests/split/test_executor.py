"""The executor's products, the choice of layers, virtual layers, and noise against an executor that watches."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.processes import until
from tests.split.running import Serving, example, serving, tiny
from vlora.errors import BadConfig
from vlora.split import Noise, connect
from vlora.split.client import VirtualGroup
from vlora.split.executor import BaseExecutor
from vlora.split.frames import Direction, LayerInfo
from vlora.split.layers import bias_of, frozen_layers, groups_of
from vlora.split.noise import NoisyCalls


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("qwen2_vl")


@pytest.fixture(scope="module")
def served(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(model, tmp_path_factory.mktemp("base")) as found:
        yield found


@pytest.mark.parametrize("family", ["qwen2_vl", "gpt2", pytest.param("llava", marks=pytest.mark.exhaustive)])
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


def test_the_layers_that_are_served_and_their_groups(model: Any, served: Serving) -> None:
    """Every linear layer except tied heads; those of one input in one call."""
    gpt2 = tiny("gpt2")
    names = set(frozen_layers(gpt2))
    assert names == {n for n, m in gpt2.named_modules() if isinstance(m, Conv1D)} and len(names) == 12
    assert "lm_head" in frozen_layers(model)
    assert set(frozen_layers(model)) == {n for n, m in model.named_modules() if type(m) is nn.Linear}
    assert groups_of(("a.q_proj", "a.o_proj", "a.k_proj", "b.v_proj", "b.up_proj", "head")) == [
        ("a.q_proj", "a.k_proj"),
        *((name,) for name in ("a.o_proj", "b.v_proj", "b.up_proj", "head")),
    ]
    before = served.server.num_calls
    with connect(served.unix) as base:
        base.wrap(copy.deepcopy(model))(**example("qwen2_vl", model, 0, num_images=0))
    assert served.server.num_calls - before == 4 * len(model.model.language_model.layers) + 1  # qkv, o, gate-up, down
    with pytest.raises(BadConfig, match="no linear layers"):
        BaseExecutor(frozen_layers(nn.Sequential(nn.LayerNorm(4))), name="norms")
    with pytest.raises(BadConfig, match="bfloat16, float32"):
        BaseExecutor(frozen_layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())), name="mixed")


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


def test_a_client_with_another_model_is_refused(model: Any, served: Serving) -> None:
    with connect(served.unix) as base:
        for change in ("weight", "bias"):
            other = copy.deepcopy(model)
            with torch.no_grad():
                getattr(other.model.language_model.layers[2].self_attn.k_proj, change)[0] += 1e-3
            with pytest.raises(BadConfig, match="k_proj' has other weights"):
                base.wrap(other)
            assert type(other.model.language_model.layers[0].self_attn.q_proj) is nn.Linear, "it was changed anyway"
        with pytest.raises(BadConfig, match="that this model lacks"):
            base.wrap(tiny("gpt2"))
        wider = copy.deepcopy(model)
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


def test_adapters_that_need_the_weights_are_for_kept_layers(model: Any, served: Serving) -> None:
    needs: tuple[dict[str, Any], ...] = (
        {"use_dora": True},
        {"init_lora_weights": "pissa"},
        {"modules_to_save": ["lm_head"]},
    )
    arguments = example("qwen2_vl", model, 0)
    config = LoraConfig(target_modules=["q_proj"], use_dora=True, modules_to_save=["lm_head"], init_lora_weights=True)
    torch.manual_seed(0)
    plain = get_peft_model(copy.deepcopy(model), config)(**arguments, labels=arguments["input_ids"]).loss
    with connect(served.unix) as base:
        for settings in needs:
            with pytest.raises(BadConfig, match="keep"):
                get_peft_model(base.wrap(copy.deepcopy(model)), LoraConfig(target_modules=["q_proj"], **settings))
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
    groups: Sequence[tuple[LayerInfo, ...]] = (tuple(LayerInfo(name, 1, 1, 0, 1, b"") for name in "qk"),)

    def call(
        self, direction: Direction, group: int, mask: int, inputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        return [inputs[0] * 2] * mask.bit_count()

    def close(self) -> None:
        pass


def test_threads_that_share_a_model_get_their_own_values() -> None:
    """Of one group, a thread must not get the q of its own input with the k of another thread's."""
    group = VirtualGroup(Doubling(), 0, (0, 1))

    def compute(value: float) -> set[float]:
        inputs = (torch.full((1, 1), value) for _ in range(2000))
        return {float(group.output(place, x)) for x in inputs for place in (0, 1)}

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(compute, (1.0, 10.0, 100.0))) == [{2.0}, {20.0}, {200.0}]
    finally:
        sys.setswitchinterval(interval)


def test_groups_can_be_copied_and_saved_without_outputs() -> None:
    group, x = VirtualGroup(Doubling(), 0, (0, 1)), torch.ones(1, 1)
    assert group.output(0, x) == 2
    for other in (copy.copy(group), copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert (other.index, other.places) == (0, (0, 1))
        x.data.fill_(3.0)  # without a new version: an output that was held would still be 2
        assert other.output(1, x) == 6
        x.data.fill_(1.0)
    assert group.output(1, x) == 2


# -- noise ------------------------------------------------------------------------------------------------------------

ATTEMPTS = 20
ROWS = 24


class Watching(Doubling):
    """An executor that computes correctly and records all that it sees."""

    def __init__(self, executor: BaseExecutor) -> None:
        self.dtype, self.groups = executor.dtype, executor.groups
        self.seen: list[tuple[Direction, torch.Tensor]] = []
        self._executor = executor

    def call(
        self, direction: Direction, group: int, mask: int, inputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        self.seen.append((direction, inputs[0].clone()))
        return self._executor.compute(direction, group, mask, inputs)


@pytest.fixture(scope="module")
def executor(model: Any) -> BaseExecutor:
    return BaseExecutor(frozen_layers(model))


@pytest.fixture
def two(model: Any, tmp_path: Path) -> Iterator[tuple[Serving, Serving]]:
    (tmp_path / "second").mkdir()
    with serving(model, tmp_path) as first, serving(model, tmp_path / "second") as second:
        yield first, second


def activations(executor: BaseExecutor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    width = executor.groups[0][0].d_in
    return torch.randn(ROWS, width, generator=generator) * (1 + 3 * torch.rand(width, generator=generator))


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "pool"])
def test_noise_is_exact_after_removal(fresh: bool, direction: Direction, executor: BaseExecutor) -> None:
    noise = Noise(scale=10.0, second="other:1") if fresh else Noise(scale=10.0, pool=4)
    calls = NoisyCalls(Watching(executor), noise, Watching(executor) if fresh else None)
    for index, group in enumerate(executor.groups):
        mask = (1 << len(group)) - 1
        widths = [layer.width for layer in group] if direction == Direction.BACKWARD else [group[0].d_in]
        inputs = [torch.randn(ROWS, width) for width in widths]
        for plain, ours in zip(
            executor.compute(direction, index, mask, inputs), calls.call(direction, index, mask, inputs), strict=True
        ):
            assert (plain - ours).norm() < 2e-5 * plain.norm()


def attack(base: Watching, truth: torch.Tensor) -> float:
    """Error of the base's best guess: the last tensor that it received, minus each noise that it knows."""
    _, sent = base.seen[-1]
    noises = [seen for direction, seen in base.seen if direction == Direction.WITHOUT_BIAS] or [torch.zeros_like(sent)]
    guess = min((sent - noise for noise in noises), key=lambda rest: float(rest.norm()))
    return float((guess - truth).norm() / truth.norm())


@pytest.mark.parametrize("pool", [2, 16, 256, None])
def test_a_base_that_watches_recovers_activations_of_any_pool(executor: BaseExecutor, pool: int | None) -> None:
    """The negative result of section 3.8: the base has computed the effect of each noise of a pool, so it knows all.

    The same attack fails on fresh noise (None) unless both executors collude.
    """
    base, second = Watching(executor), Watching(executor)
    noise = Noise(scale=10.0, second="other:1") if pool is None else Noise(scale=10.0, pool=pool)
    calls = NoisyCalls(base, noise, None if pool else second)
    shared: list[float] = []
    for attempt in range(ATTEMPTS):
        x = activations(executor, attempt)
        calls.call(Direction.FORWARD, 0, 1, [x])
        error = attack(base, x)
        assert error < 1e-5 if pool else error > 5, attempt
        seen = base.seen[-1][1]
        if pool is None:
            assert (seen - second.seen[-1][1] - x).norm() < 1e-5 * x.norm(), "together they recover everything"
        shared.append(float(torch.corrcoef(torch.stack([seen.flatten(), x.flatten()]))[0, 1]))
    # The bound: with noise of 10 times the size, the best linear guess explains 1 / 101 of the variance.
    assert pool or sum(shared) / ATTEMPTS < 0.15, "their mean is 0.1, with a deviation of 0.01"
    assert all(direction == Direction.WITHOUT_BIAS for direction, _ in second.seen)
    assert len({float(noise.sum()) for _, noise in second.seen}) == (0 if pool else ATTEMPTS), "a noise was used twice"


def test_settings_of_noise_without_a_meaning(executor: BaseExecutor, caplog: pytest.LogCaptureFixture) -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {},
        {"second": "a:1", "pool": 2},
        {"pool": -1},
        {"scale": 0.0, "pool": 2},
        {"scale": 1e9, "pool": 2},
    )
    for settings in wrong:
        with pytest.raises(BadConfig, match="noise"):
            Noise(**settings)
    narrow = Watching(executor)
    narrow.dtype = torch.bfloat16
    with pytest.raises(BadConfig, match="noise scale is 10; for a base in bfloat16 it is at most 1"):
        NoisyCalls(narrow, Noise(scale=10.0, second="other:1"), narrow)
    NoisyCalls(narrow, Noise(scale=1.0, second="other:1"), narrow)
    with caplog.at_level(logging.WARNING):
        NoisyCalls(Watching(executor), Noise(pool=2), None)
    assert "does not hide activations from the base executor" in caplog.text


def test_the_second_executor_is_another_one_of_the_same_base(two: tuple[Serving, Serving], tmp_path: Path) -> None:
    port = two[0].tcp.rpartition(":")[2]
    for first, second in (
        (two[0].unix, two[0].unix),
        (two[0].unix, two[0].tcp),
        (two[0].tcp, two[0].unix),
        (two[0].tcp, f"localhost:{port}"),
    ):
        with pytest.raises(BadConfig, match=f"second executor '{second}' is the base itself"):
            connect(first, noise=Noise(second=second))
    until(lambda: two[0].server.num_clients == 0)  # a refusal leaves no connection
    (tmp_path / "third").mkdir()
    with serving(tiny("gpt2"), tmp_path / "third") as third, pytest.raises(BadConfig, match="another base model"):
        connect(two[0].unix, noise=Noise(second=third.unix))


def test_shards_can_have_a_second_executor(model: Any, tmp_path: Path) -> None:
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.language_model.layers[0].self_attn.q_proj.weight[0] += 1
    folders = {name: tmp_path / name for name in ("shards", "second", "changed")}
    for folder in folders.values():
        folder.mkdir()
    with (
        serving(model, folders["shards"], shard=(0, 2)) as first,
        serving(model, folders["shards"], shard=(1, 2)) as last,
        serving(model, folders["second"]) as second,
        serving(changed, folders["changed"]) as other,
    ):
        executor = BaseExecutor(frozen_layers(model))
        with connect(first.unix, last.unix, noise=Noise(scale=10.0, second=second.unix)) as base:
            for index, group in enumerate(base.calls.groups):
                mask, inputs = (1 << len(group)) - 1, [torch.randn(ROWS, group[0].d_in)]
                plain = executor.compute(Direction.FORWARD, index, mask, inputs)
                for expected, ours in zip(plain, base.calls.call(Direction.FORWARD, index, mask, inputs), strict=True):
                    assert (expected - ours).norm() < 2e-5 * expected.norm()
            assert second.server.num_calls == first.server.num_calls == len(base.calls.groups), "there was no noise"
            base.wrap(copy.deepcopy(model))
        # The shards' digests are of other rows than the second executor's; wrapping compares both with the model.
        with (
            connect(first.unix, last.unix, noise=Noise(second=other.unix)) as base,
            pytest.raises(BadConfig, match="q_proj' has other weights"),
        ):
            base.wrap(copy.deepcopy(model))
        for base_of, noise_of, words in (
            ((first.unix, last.unix), first.unix, "is the base itself"),
            ((first.unix, last.unix), last.tcp, "is the base itself"),
            ((second.unix,), other.unix, "serves another base model"),
            ((second.unix,), first.unix, "or one shard of it"),
        ):
            with pytest.raises(BadConfig, match=words):
                connect(*base_of, noise=Noise(second=noise_of))
