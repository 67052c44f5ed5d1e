"""Counts of the engine's device operations on the simulated device, with upper limits.

Run by `test_oracle.py` with the oracle tests of one family. The limits are today's counts, and may only become
smaller; the goals are those of the GPU path. A count above its limit fails with the call sites.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch

import atmm
from tests.harness import FixedModes
from tests.simulated_cuda import Counts, Kind, counting
from tests.simulated_cuda.counts import HOST_WAITS, SERVING
from tests.simulated_cuda.install import uncomputed_kernels
from tests.simulated_cuda.models import qwen2_vl
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
    """A decode step of `NUM_REQUESTS` requests.

    Attributes:
        adapters: Of the requests.
        mode: And the merged adapter.
        launches: Most launches a layer. The goal is 13, with adapters 21.
        of_graph: Most launches of the step as a CUDA graph: the graph, and the draw of the tokens.
    """

    adapters: tuple[str | None, ...]
    mode: tuple[Mode, str | None]
    launches: int
    of_graph: int = 3
    temperature: float = 0.0


CASES = {
    "base": Case((None,) * NUM_REQUESTS, UNMERGED, 13),
    "merged": Case(("a0",) * NUM_REQUESTS, MERGED, 13),
    "unmerged": Case(("a0", "a1", "a2", "a3"), UNMERGED, 21),
    "mixed": Case(("a0", "a0", "a1", None), MIXED, 21),
    "sampled": Case(("a0",) * NUM_REQUESTS, MERGED, 13, of_graph=18, temperature=0.7),
}
ROUNDING_LAUNCHES = 4
"""Additional launches of a layer with eight-bit weights: one for each different input. The goal is 4."""

LIMITS = {kind: 0 for kind in Kind if kind is not Kind.LAUNCH} | {
    Kind.H2D_ASYNC: 1,
    Kind.D2H_ASYNC: 1,
    Kind.SYNCHRONIZE: 1,  # for the tokens
}
"""Of a decode step in every case, which are the goals."""

Quantize = Literal["none", "fp8"]


class Served:
    """An engine with adapters of rank 16 on all language layers, on the simulated device."""

    def __init__(
        self, num_layers: int, folder: Path, *, quantize: Quantize = "none", cuda_graphs: bool = False
    ) -> None:
        config = qwen2_vl(512, 256, num_layers, heads=4, mrope=(8, 12, 12))
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


Engines = Callable[[Quantize, bool], tuple[Served, Served]]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines with few and with many layers, by type of the weights and with or without graphs."""
    made: dict[tuple[Quantize, bool], tuple[Served, Served]] = {}

    def of(quantize: Quantize, cuda_graphs: bool) -> tuple[Served, Served]:
        if (quantize, cuda_graphs) not in made:
            few, many = (
                Served(layers, tmp_path_factory.mktemp("served"), quantize=quantize, cuda_graphs=cuda_graphs)
                for layers in LAYERS
            )
            made[quantize, cuda_graphs] = few, many
        return made[quantize, cuda_graphs]

    with uncomputed_kernels():
        yield of


def exceeded(counts: Counts) -> list[str]:
    """For each count of a decode step above its limit, the numbers and the call sites."""
    return [
        f"{kind}: {counts.total(kind)}, limit {limit}\n{counts.report(kind)}"
        for kind, limit in LIMITS.items()
        if counts.total(kind) > limit
    ]


def layer_launches(few: Served, many: Served, case: Case) -> tuple[float, Counts]:
    """The launches of a layer in a decode step, and the counts of the step."""
    first, counts = few.decode_step(case), many.decode_step(case)
    return (counts.total(Kind.LAUNCH) - first.total(Kind.LAUNCH)) / (LAYERS[1] - LAYERS[0]), counts


@pytest.mark.parametrize("quantize", ["none", "fp8"])
@pytest.mark.parametrize("name", CASES)
def test_a_decode_step(engines: Engines, name: str, quantize: Quantize) -> None:
    launches, counts = layer_launches(*engines(quantize, False), CASES[name])
    assert launches <= CASES[name].launches + ROUNDING_LAUNCHES * (quantize == "fp8"), counts.report(Kind.LAUNCH)
    assert not exceeded(counts), "\n".join(exceeded(counts))


def test_added_operations_exceed_the_limits(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: what a change of the engine might add to a step is reported with its call site."""
    forward = AdaptedLinear.forward

    def slower(self: AdaptedLinear, x: torch.Tensor) -> torch.Tensor:
        if self.site.name.endswith("down_proj"):
            float((x + torch.zeros(1).to(x.device)).sum())
        return forward(self, x)

    monkeypatch.setattr(AdaptedLinear, "forward", slower)
    launches, counts = layer_launches(*engines("none", False), CASES["merged"])
    assert launches > CASES["merged"].launches
    for kind in (Kind.H2D_BLOCKING, Kind.ITEM):
        assert any(line.startswith(f"{kind}: ") and "check_steps.py:" in line for line in exceeded(counts))


@pytest.mark.parametrize("name", CASES)
def test_a_decode_step_as_a_graph(engines: Engines, name: str) -> None:
    counts = engines("none", True)[0].decode_step(CASES[name])
    assert not exceeded(counts), "\n".join(exceeded(counts))
    assert counts.names(Kind.LAUNCH)["graph"] == 1
    assert counts.total(Kind.LAUNCH) <= CASES[name].of_graph, counts.report(Kind.LAUNCH)


def test_lanes_that_change_add_one_copy_to_a_graph(engines: Engines) -> None:
    counts = engines("none", True)[0].decode_step(CASES["mixed"], num_ended=1)
    assert counts.names(Kind.LAUNCH)["graph"] == 1
    assert counts.total(Kind.H2D_ASYNC) <= 2, counts.report(Kind.H2D_ASYNC)
    assert counts.total(*HOST_WAITS) == counts.total(Kind.SYNCHRONIZE) == 1, counts.report(*HOST_WAITS)


def test_a_merge_into_eight_bit_weights_launches_once_for_all_layers(engines: Engines) -> None:
    for served in engines("fp8", False):
        served.decode_step(CASES["merged"])
        switcher = served.engine.parts.device.switcher
        key = switcher.merged_key
        assert key is not None
        switcher.forget(key)
        with counting() as counts:
            assert switcher.switch(key)
        assert counts.total(Kind.LAUNCH) == 7, "one for each kind of layer"
        assert not counts.total(*HOST_WAITS), counts.report(*HOST_WAITS)


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


def test_the_time_of_a_step_is_measured_on_its_stream(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "elapsed_time", lambda start, end: 7.0)
    served = engines("none", False)[0]
    served.decode_step(CASES["merged"])
    assert served.engine.snapshot().steps[-1].step_s == 0.007


def test_benches_get_a_token_of_every_kept_request_from_each_step() -> None:
    with uncomputed_kernels():
        model = dummy_model(small_config(), "bfloat16", torch.device("cuda:0"), 0)
        engine = TimedEngine(model, context=8, longest=64, max_batch_size=4, arena_bytes=2**26)
        step = engine.begin([None] * 4)
        for num_kept in (4, 3, 1):
            engine.keep(num_kept)
            step()  # checks the number of its outputs


def test_loading_an_adapter_adds_nothing_to_the_stream_of_the_steps(engines: Engines) -> None:
    few = engines("none", False)[0]
    with counting() as counts:
        few.engine.load_adapter("a4", few.folders["a4"])
    for kinds in ((Kind.LAUNCH,), HOST_WAITS):
        assert not counts.total(*kinds, stream=SERVING), counts.report(*kinds, stream=SERVING)
