"""Counts of the engine's device operations on the simulated device, with upper limits.

Run by `test_oracle.py` with the oracle tests of one family. The limits are today's counts, and may only become
smaller; the goals are those of the GPU path. A count above its limit fails with the call sites.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
from transformers import Qwen2VLConfig

import atmm
from tests.harness import FixedModes
from tests.simulated_cuda import Counts, Kind, counting
from tests.simulated_cuda.counts import HOST_WAITS, SERVING
from tests.simulated_cuda.install import uncomputed_kernels
from tests.simulated_cuda.streams import Event
from vlora.bench.dummy import language_shapes, small_config, write_adapter
from vlora.bench.timed_engine import TimedEngine
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.lora.adapted_linear import AdaptedLinear
from vlora.memory.host_to_device import Inline
from vlora.models.loading import dummy_model
from vlora.types import Mode, Request, SamplingParams

NUM_REQUESTS = 4
LAYERS = (2, 4)
"""Launches a layer are the difference of two models' counts, divided by the difference of their layers."""

MERGED = (Mode.MERGED, "a0")
UNMERGED = (Mode.UNMERGED, None)
MIXED = (Mode.MIXED, "a0")


class Case(NamedTuple):
    """A decode step of `NUM_REQUESTS` requests: their adapters, the mode and the merged adapter."""

    adapters: tuple[str | None, ...]
    mode: tuple[Mode, str | None]
    temperature: float = 0.0


CASES = {
    "base": Case((None,) * NUM_REQUESTS, UNMERGED),
    "merged": Case(("a0",) * NUM_REQUESTS, MERGED),
    "unmerged": Case(("a0", "a1", "a2", "a3"), UNMERGED),
    "mixed": Case(("a0", "a0", "a1", None), MIXED),
    "sampled": Case(("a0",) * NUM_REQUESTS, MERGED, temperature=0.7),
}


LAUNCHES = "launches a layer"
KINDS = {
    "blocking copies to the device": Kind.H2D_BLOCKING,
    "asynchronous copies to the device": Kind.H2D_ASYNC,
    "blocking copies to the host": Kind.D2H,
    "asynchronous copies to the host": Kind.D2H_ASYNC,
    "values read by .item()": Kind.ITEM,
    "results of unknown size": Kind.NONZERO,
    "boolean indices": Kind.BOOLEAN_INDEX,
    "synchronizations": Kind.SYNCHRONIZE,
}

# Counts of today by case, in the order of CASES, and the goal.
LIMITS: dict[str, tuple[tuple[float, ...], str]] = {
    LAUNCHES: ((13, 13, 21, 21, 13), "13, with adapters 21"),
    "blocking copies to the device": ((0, 0, 0, 0, 0), "0"),
    "asynchronous copies to the device": ((1, 1, 1, 1, 1), "at most 1"),
    "blocking copies to the host": ((0, 0, 0, 0, 0), "0"),
    "asynchronous copies to the host": ((1, 1, 1, 1, 1), "1"),
    "values read by .item()": ((0, 0, 0, 0, 0), "0"),
    "results of unknown size": ((0, 0, 0, 0, 0), "0"),
    "boolean indices": ((0, 0, 0, 0, 0), "0"),
    "synchronizations": ((1, 1, 1, 1, 1), "1, for the tokens"),
}
ROUNDING_LAUNCHES = 4
"""Additional launches of a layer with eight-bit weights: one for each different input. The goal is 4."""
GRAPH_LAUNCHES = (3, 3, 3, 3, 18)
"""Of a decode step as a CUDA graph, by case: the graph, and the draw of the tokens."""

LOADING_LAUNCHES = LOADING_WAITS = 0
"""Of loading an adapter, on the stream of the steps. The goal is 0."""


class Served:
    """An engine with adapters of rank 16 on all language layers, on the simulated device."""

    def __init__(
        self,
        num_layers: int,
        folder: Path,
        *,
        quantize: Literal["none", "fp8"] = "none",
        cuda_graphs: bool = False,
    ) -> None:
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
        config = Qwen2VLConfig(
            text_config={
                "vocab_size": 512,
                "hidden_size": 256,
                "intermediate_size": 512,
                "num_hidden_layers": num_layers,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 1024,
                "rope_parameters": rope,
                "bos_token_id": 0,
                "eos_token_id": 1,
            },
            vision_config={"depth": 1, "embed_dim": 64, "hidden_size": 256, "num_heads": 2, "mlp_ratio": 2},
            vision_start_token_id=500,
            vision_end_token_id=501,
            image_token_id=503,
            video_token_id=504,
        )
        model = dummy_model(config, "bfloat16", torch.device("cuda:0"), 0)
        shapes = language_shapes(model)
        self.folders = {f"a{i}": write_adapter(folder / f"a{i}", shapes, 16, seed=i) for i in range(5)}
        settings = EngineConfig(
            model="dummy",
            device="cuda",
            load_format="dummy",
            dtype="bfloat16",
            max_batch_size=16,
            arena_bytes=64 * 2**20,
            merge_fidelity_floor=0.0,
            prefix_cache=False,
            quantize=quantize,
            cuda_graphs=cuda_graphs,
        )
        self.engine = LocalEngine(settings, model=model, executor=Inline()).engine
        for name in list(self.folders)[:4]:
            self.engine.load_adapter(name, self.folders[name])

    def decode_step(self, case: Case, num_ended: int = 0) -> Counts:
        """The counts of a decode step in a case's mode, after the batch has decoded for some steps.

        num_ended: requests that end before this step.
        """
        engine = self.engine
        engine.parts.scheduler.policy = FixedModes(*case.mode)
        ids = [f"r{index}" for index in range(len(case.adapters))]
        for index, (name, adapter) in enumerate(zip(ids, case.adapters, strict=True)):
            sampling = SamplingParams(max_tokens=64, ignore_eos=True, temperature=case.temperature, seed=index)
            prompt = tuple(3 + (7 * place + index) % 400 for place in range(40 + index))
            engine.add(Request(request_id=name, prompt_ids=prompt, adapter=adapter, sampling=sampling))
        answering: set[str] = set()
        while len(answering) < len(ids):
            answering.update(output.request_id for output in engine.step())
        for _ in range(8):
            engine.step()
        for name in ids[:num_ended]:
            engine.cancel(name)
        with counting() as counts:
            assert len({output.request_id for output in engine.step()}) == len(ids) - num_ended
        for name in ids:
            engine.cancel(name)
        return counts


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Served]]:
    with uncomputed_kernels():
        yield {num_layers: Served(num_layers, tmp_path_factory.mktemp(f"layers{num_layers}")) for num_layers in LAYERS}


def exceeded(served: dict[int, Served], name: str) -> list[str]:
    """For each count of a decode step above its limit, the numbers and the call sites."""
    few, many = (served[num_layers].decode_step(CASES[name]) for num_layers in LAYERS)
    difference = many.total(Kind.LAUNCH) - few.total(Kind.LAUNCH)
    return above_limits(name, many, {LAUNCHES: difference / (LAYERS[1] - LAYERS[0])})


def above_limits(name: str, many: Counts, others: dict[str, float]) -> list[str]:
    """`exceeded` for the counts of one step and other values."""
    measured = others | {key: many.total(kind) for key, kind in KINDS.items()}
    print(f"{name}: {measured}")
    found = []
    for quantity, value in measured.items():
        limits, goal = LIMITS[quantity]
        limit = limits[list(CASES).index(name)]
        if value > limit:
            sites = many.report(KINDS.get(quantity, Kind.LAUNCH))
            found.append(f"{quantity}: {value:g}, limit {limit:g}, goal {goal}\n{sites}")
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_decode_step(served: dict[int, Served], name: str) -> None:
    found = exceeded(served, name)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", CASES)
def test_a_decode_step_on_eight_bit_weights(name: str, tmp_path: Path) -> None:
    with uncomputed_kernels():
        few, many = (
            Served(layers, tmp_path / str(layers), quantize="fp8").decode_step(CASES[name]) for layers in LAYERS
        )
    launches = (many.total(Kind.LAUNCH) - few.total(Kind.LAUNCH)) / (LAYERS[1] - LAYERS[0])
    print(f"{name}: {launches} launches a layer")
    plain = LIMITS[LAUNCHES][0][list(CASES).index(name)]
    assert launches <= plain + ROUNDING_LAUNCHES, many.report(Kind.LAUNCH)
    for quantity, kind in KINDS.items():
        limit = LIMITS[quantity][0][list(CASES).index(name)]
        assert many.total(kind) <= limit, f"{quantity}:\n{many.report(kind)}"


def test_a_merge_into_eight_bit_weights_launches_once_for_all_layers(tmp_path: Path) -> None:
    launches = []
    with uncomputed_kernels():
        for layers in LAYERS:
            served = Served(layers, tmp_path / str(layers), quantize="fp8")
            served.decode_step(CASES["merged"])
            switcher = served.engine.parts.device.switcher
            key = switcher.merged_key
            assert key is not None
            switcher.forget(key)
            with counting() as counts:
                assert switcher.switch(key)
            launches.append(counts.total(Kind.LAUNCH))
            assert not counts.total(*HOST_WAITS), counts.report(*HOST_WAITS)
    assert launches == [7, 7], "one for each kind of layer"


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with uncomputed_kernels():
        yield Served(LAYERS[0], tmp_path_factory.mktemp("graphs"), cuda_graphs=True)


@pytest.mark.parametrize(("name", "most"), zip(CASES, GRAPH_LAUNCHES, strict=True))
def test_a_decode_step_as_a_graph(captured: Served, name: str, most: int) -> None:
    counts = captured.decode_step(CASES[name])
    found = above_limits(name, counts, {})
    assert not found, "\n".join(found)
    print(f"{name}: {counts.total(Kind.LAUNCH)} launches")
    assert counts.names(Kind.LAUNCH)["graph"] == 1
    assert counts.total(Kind.LAUNCH) <= most, counts.report(Kind.LAUNCH)


def test_lanes_that_change_add_one_copy_to_a_graph(captured: Served) -> None:
    counts = captured.decode_step(CASES["mixed"], num_ended=1)
    assert counts.names(Kind.LAUNCH)["graph"] == 1
    assert counts.total(Kind.H2D_ASYNC) <= 2, counts.report(Kind.H2D_ASYNC)
    assert counts.total(*HOST_WAITS) == counts.total(Kind.SYNCHRONIZE) == 1, counts.report(*HOST_WAITS)


def test_added_operations_exceed_the_limits(served: dict[int, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: what a change of the engine might add to a step is reported with its call site."""
    forward = AdaptedLinear.forward

    def slower(self: AdaptedLinear, x: torch.Tensor) -> torch.Tensor:
        if self.site.name.endswith("down_proj"):
            float((x + torch.zeros(1).to(x.device)).sum())
        return forward(self, x)

    monkeypatch.setattr(AdaptedLinear, "forward", slower)
    found = exceeded(served, "merged")
    for quantity in (LAUNCHES, "blocking copies to the device", "values read by .item()"):
        assert any(line.startswith(f"{quantity}: ") and "check_steps.py:" in line for line in found), found


def test_kernels_read_parts_of_a_joined_product_in_place() -> None:
    with uncomputed_kernels(), torch.inference_mode():
        joined = torch.zeros(1, 3, 4 * 32, dtype=torch.bfloat16, device="cuda:0")
        weight, cos, sin = (joined.new_zeros(*shape) for shape in ((16,), (3, 16), (3, 16)))
        cache, places = joined.new_zeros(8, 32), torch.arange(3, device="cuda:0")
        q, k, v, other = joined.split(32, -1)
        heads = q.view(1, 3, 2, 16)
        with counting() as counts:
            atmm.rms_norm(heads, weight, 1e-6)
            atmm.rotate(heads[0].transpose(0, 1), k.view(3, 2, 16).transpose(0, 1), cos, sin)
            atmm.write_kv(cache, cache, k[0], v[0], places)
            atmm.gate_product(v, other)
    assert counts.total(Kind.LAUNCH) == 4, counts.report(Kind.LAUNCH)


def test_the_time_of_a_step_is_measured_on_its_stream(
    served: dict[int, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Event, "elapsed_time", lambda start, end: 7.0)
    served[LAYERS[0]].decode_step(CASES["merged"])
    last = served[LAYERS[0]].engine.snapshot().steps[-1]
    assert last.step_s == 0.007


def test_benches_get_a_token_of_every_kept_request_from_each_step() -> None:
    with uncomputed_kernels():
        model = dummy_model(small_config(), "bfloat16", torch.device("cuda:0"), 0)
        engine = TimedEngine(model, context=8, longest=64, max_batch_size=4, arena_bytes=2**26)
        step = engine.begin([None] * 4)
        for num_kept in (4, 3, 1):
            engine.keep(num_kept)
            step()  # checks the number of its outputs


def test_loading_an_adapter(served: dict[int, Served]) -> None:
    few = served[LAYERS[0]]
    with counting() as counts:
        few.engine.load_adapter("a4", few.folders["a4"])
    launches, waits = counts.total(Kind.LAUNCH, stream=SERVING), counts.total(*HOST_WAITS, stream=SERVING)
    print(f"loading: {launches} launches, {waits} host waits")
    assert launches <= LOADING_LAUNCHES, counts.report(Kind.LAUNCH, stream=SERVING)
    assert waits <= LOADING_WAITS, counts.report(*HOST_WAITS, stream=SERVING)
