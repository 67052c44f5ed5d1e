"""Image processors with a centre crop, such as LLaVA 1.5's: training boxes are relative to the crop, and answers are
scored relative to the whole picture."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.data.samples import Sample, Splits
from fusion.plan.schema import DomainPlan
from fusion.training.domain import Domain
from fusion.training.frozen_base import FrozenBase
from heads import Box
from heads.boxes import into_windows, out_of_windows
from tests.fusion.small import write_base
from vlora.config import EngineConfig
from vlora.models import InputProcessor
from vlora.models.loading import load_model
from vlora.models.processing import shown_region
from vlora.server.head_results import in_pixels
from vlora.types import FoundBox, HeadAnswer

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
