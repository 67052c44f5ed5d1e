"""Image features on disk: memory does not grow with the number of samples."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fusion.data.samples import Sample, Splits, held_back
from fusion.plan.schema import DomainPlan
from fusion.progress import Progress
from fusion.training import steps
from fusion.training.features import FeatureCache
from fusion.training.frozen_base import Domain, FrozenBase, load_frozen_base, round_base
from fusion.training.scoring import Evaluator
from heads import Box
from heads.answer import into_windows, out_of_windows
from tests.families import build_model
from tests.fusion.small import COLORS, colors, plan_of, trainer_of, write_base
from vlora.config import EngineConfig, Quantize
from vlora.engine.local import LocalEngine
from vlora.errors import BadConfig
from vlora.memory.arena import PAGE_BYTES
from vlora.models.loading import load_model
from vlora.models.processing import InputProcessor, shown_region
from vlora.models.vision.encoder import VisionEncoder
from vlora.server.execution import in_pixels
from vlora.types import FoundBox, HeadAnswer

_AT_ONCE = 8


def test_a_stored_picture_is_not_computed_again_unless_its_file_is_cut(tmp_path: Path) -> None:
    """Pictures of a sample come back together, for each tower."""
    cache, computed = FeatureCache(tmp_path, "tower"), list[list[int]]()

    def compute(missing: Sequence[int]) -> list[torch.Tensor]:
        computed.append([*missing])
        return [torch.full((1, 2), float(len(computed)))] * len(missing)

    cache.get([["b"]], compute)
    found = cache.get([["a", "b"], ["a"], ["c"]], compute)
    assert computed == [[0], [2, 3]] and [one.rows()[:, 0].tolist() for one in found] == [[2, 1], [2], [2]]
    cut = cache.file("a")
    cut.write_bytes(cut.read_bytes()[:-1])
    found = cache.get([["a", "b"]], compute)
    assert found[0].rows()[:, 0].tolist() == [3, 1], "a cut file is written again"
    assert FeatureCache(tmp_path, "another tower").get([["b"]], compute)[0].rows()[0, 0] == 4


def change_epsilon(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((base / "config.json").read_text())
    config["vision_config"]["layer_norm_eps"] = 0.1  # in no weight
    (base / "config.json").write_text(json.dumps(config))


ENCODERS: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "config": change_epsilon,
    "torch": lambda base, monkeypatch: monkeypatch.setattr(torch, "__version__", f"{torch.__version__}.1"),
    "transformers": lambda base, monkeypatch: monkeypatch.setattr(transformers, "__version__", "99.1"),
    "format": lambda base, monkeypatch: monkeypatch.setattr("fusion.training.frozen_base.FEATURES_FORMAT", 0),
}


@pytest.mark.parametrize("changed", ENCODERS)
def test_features_of_another_encoder_are_not_used(changed: str, tmp_path: Path) -> None:
    plan = plan_of(write_base(tmp_path / "base"), ("colors",))

    def features() -> set[Path]:
        base = load_frozen_base(plan, "cpu", Progress(), features=tmp_path / "features")
        assert base.features is not None
        base.encode_samples("what color ?", Splits("classification", COLORS, [], [], [], real=False), colors(2, 0))
        before = set((tmp_path / "features").iterdir())
        base.features.keep_only()
        return before

    first = features()
    assert features() == first and len(first) == 2
    with pytest.MonkeyPatch.context() as monkeypatch:
        ENCODERS[changed](tmp_path / "base", monkeypatch)
        both = features()
        assert both > first and len(both) == 4 and features() == both - first, "one tower's features stay"


@pytest.mark.parametrize("number", [16, 48])
def test_features_held_do_not_grow_with_samples(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak bytes of features in memory while samples are prepared, trained and scored."""
    alive: dict[int, int] = {}
    most = 0
    shape: list[int] = []

    def watch(made: Sequence[torch.Tensor]) -> None:
        nonlocal most
        for rows in made:
            alive[id(rows)] = rows.nbytes
            weakref.finalize(rows, alive.pop, id(rows), None)
            shape[:] = rows.shape
        most = max(most, sum(alive.values()))

    encode, features = VisionEncoder.encode, FrozenBase.features_of

    def encoded(self: VisionEncoder, tasks: Sequence[object]) -> object:
        found = encode(self, tasks)  # type: ignore[arg-type]
        watch([one.rows for one in found])
        return found

    def read(self: FrozenBase, batch: Sequence[object]) -> list[torch.Tensor]:
        found = features(self, batch)  # type: ignore[arg-type]
        watch(found)
        return found

    monkeypatch.setattr(VisionEncoder, "encode", encoded)
    monkeypatch.setattr(FrozenBase, "features_of", read)
    monkeypatch.setattr("fusion.training.frozen_base.ENCODE_AT_ONCE", _AT_ONCE)
    monkeypatch.setattr("fusion.training.scoring.SCORE_AT_ONCE", _AT_ONCE)
    torch.set_num_threads(1)
    plan = plan_of(write_base(tmp_path / "base"), ("colors",), steps=2, batch_size=_AT_ONCE)
    train, validation, test = (colors(count, seed) for seed, count in enumerate((number, number, 4)))
    splits = Splits("classification", COLORS, train, validation, test, real=False)
    trainer = trainer_of(plan, {"colors": splits}, tmp_path / "features")
    assert not alive
    trainer.adapter.reset()
    trainer.train("colors", ())
    trainer.evaluator.score("colors", trainer.domains["colors"].validation)
    assert not alive
    one = shape[0] * shape[1] * 4
    assert one <= most <= 2 * _AT_ONCE * one


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_the_base_has_the_weights_that_are_served(quantize: Quantize) -> None:
    model = build_model("qwen2_vl")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    engine = LocalEngine(
        EngineConfig(model="tiny", quantize=quantize, arena_bytes=256 * PAGE_BYTES), model=build_model("qwen2_vl")
    ).engine
    served = {
        f"{name}.weight": linear.quantized.float()
        for name, linear in engine.parts.device.hf_model.language_linears.items()
        if linear.quantized is not None
    }
    round_base(model, quantize)
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == served.keys()
    for name, weight in served.items():
        torch.testing.assert_close(model.get_parameter(name), weight, rtol=0, atol=0)


def test_a_plan_rounds_its_base(tmp_path: Path) -> None:
    path = write_base(tmp_path)
    plain, rounded = (
        load_frozen_base(plan_of(path, ("a",)).model_copy(update={"quantize": quantize}), "cpu", Progress())
        for quantize in ("none", "int8")
    )
    assert plain.weights != rounded.weights, "a run cannot be resumed with another format"


def test_a_layer_that_the_format_cannot_store_is_named() -> None:
    model = build_model("qwen2_vl")
    model.model.language_model.layers[0].mlp.down_proj = nn.Linear(40, 32)
    message = "quantize int4 needs layers with inputs in multiples of 32; .*mlp.down_proj has 40; set another format"
    with pytest.raises(BadConfig, match=message):
        round_base(model, "int4")


CPU = torch.device("cpu")


@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_bfloat16_only_where_it_is_allowed_and_faster(
    wanted: bool, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "multiplies_bfloat16", lambda: faster)
    with steps.mixed_precision(CPU, wanted):
        product = torch.ones(2, 3) @ torch.ones(3, 2)
    assert product.dtype == (torch.bfloat16 if wanted and faster else torch.float32)


FRAME = (np.zeros((1, 1, 3), np.uint8),)


@given(st.lists(st.integers(0, 12), max_size=150))
def test_groups_are_kept_whole(numbers: list[int]) -> None:
    """Group 0 means no group: independent samples."""
    samples = [Sample(FRAME, 0, group=str(number or "")) for number in numbers]
    kept = held_back(samples)
    inside = {samples[place].group for place in kept} - {""}
    outside = {sample.group for place, sample in enumerate(samples) if place not in kept}
    assert not inside & outside
    assert len(kept) <= len(samples) // 10 and list(kept) == sorted(set(kept))


def test_samples_that_stand_alone_are_the_first_tenth() -> None:
    samples = [Sample(FRAME, 0) for _ in range(1000)]
    for count, kept in ((59, 5), (1000, 64), (9, 0)):
        assert held_back(samples[:count]) == tuple(range(kept))
    large = [Sample(FRAME, 0, group="long")] * 18  # too large to hold back
    assert held_back([*large, Sample(FRAME, 0, group="short"), Sample(FRAME, 0, group="short")]) == (18, 19)
    assert held_back(large) == ()


@pytest.mark.parametrize("decides", [True, False])
def test_a_calibration_that_changes_answers_is_independent_of_validation(decides: bool) -> None:
    """Validation samples would decide the answers by which they are scored."""
    parts = {name: [SimpleNamespace(learned=name)] * 3 for name in ("held_back", "validation")}
    task = SimpleNamespace(calibration_decides=decides, calibrated=lambda batches, head, learned: set(learned))
    adapter: Any = SimpleNamespace(
        domains={"a": SimpleNamespace(task=task, **parts)}, heads={}, forward=lambda batch: None
    )
    used: Any = Evaluator(adapter, None, Progress()).calibrated("a")
    assert used == {"held_back" if decides else "validation"}


edges = st.floats(0, 1)


@given(edges, edges, edges, edges, st.floats(0, 0.5), st.floats(0, 0.5))
def test_visible_boxes_survive_the_way_into_windows_and_back(
    a: float, b: float, c: float, d: float, left: float, top: float
) -> None:
    box = Box(2, min(a, b), min(c, d), max(a, b), max(c, d), 0.7)
    window = (left, top, 1 - 2 * left + 1e-3, 1 - 2 * top + 1e-3)
    seen = into_windows([box], [window])
    across = min(box.right, window[0] + window[2]) - max(box.left, window[0])
    down = min(box.bottom, window[1] + window[3]) - max(box.top, window[1])
    if not seen:
        assert across <= 1e-9 or down <= 1e-9
        return
    (back,) = out_of_windows(seen, [window])
    assert (back.label, back.score) == (2, 0.7)
    assert (back.right - back.left, back.bottom - back.top) == pytest.approx((across, down), abs=1e-9)
    assert back.left >= box.left - 1e-9 and back.bottom <= box.bottom + 1e-9


def test_boxes_are_learned_where_serving_finds_them(tmp_path: Path) -> None:
    """A picture of 200 x 100 pixels, of which the model sees the central 100 x 100."""
    path = write_base(tmp_path)
    processor = InputProcessor.from_pretrained(path)
    image_processor = processor.image_processor
    side = dict(image_processor.size)["height"]
    image_processor.size = {"shortest_edge": side}
    image_processor.do_center_crop, image_processor.crop_size = True, {"height": side, "width": side}
    base = FrozenBase(load_model(EngineConfig(model=path)), processor)
    frame = np.random.default_rng(0).integers(0, 256, (100, 200, 3)).astype(np.uint8)
    inside, cut, outside = Box(0, 0.3, 0.2, 0.5, 0.6), Box(1, 0.1, 0.0, 0.5, 1.0), Box(0, 0.8, 0.1, 0.95, 0.4)
    samples = [Sample((frame,), (inside, cut, outside))]
    splits = Splits("detection", ("car", "bus"), samples, samples, samples, real=True)
    plan = DomainPlan(name="cars", source="made", question="where are cars ?", threshold=0.5)
    domain = Domain(plan, splits, base)
    (sample,) = domain.train
    first, second = cast(tuple[Box, ...], sample.learned)
    assert first[1:5] == pytest.approx((0.1, 0.2, 0.5, 0.6)) and second[1:5] == pytest.approx((0, 0, 0.5, 1))
    assert sample.target == (inside, cut, outside)  # invisible boxes count as missed
    _, left, top, right, bottom, _, _ = first
    found = FoundBox(label_id=0, label="car", score=1.0, image=0, left=left, top=top, right=right, bottom=bottom)
    answer = HeadAnswer(task="detection", label="1 car", labels=("car", "bus"), confidence=1.0, boxes=(found,))
    served = in_pixels(answer, [shown_region(image_processor, 200, 100)])
    (box,) = served.boxes
    assert (box.left, box.top, box.right, box.bottom) == pytest.approx((60, 20, 100, 60))
    (judged,) = cast(tuple[Box, ...], sample.of_whole_pictures((first,)))
    assert judged[1:5] == pytest.approx(inside[1:5])
