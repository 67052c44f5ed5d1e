"""ONNX detectors as teachers: every output layout against a literal decoding, and on pictures with drawn boxes."""

from __future__ import annotations

import importlib
import itertools
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from fusion.data.samples import NamedBox
from fusion.teachers import Teacher
from fusion.teachers.onnx_detector import Output, place, raw_boxes
from tests.fusion.made import open_plans_teacher
from vlora.errors import BadPlan

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

LABELS = ("car", "van", "bus")
LAYOUTS = ("anchor_free", "objectness", "end_to_end", "separate", "detr")
SIDE = 64


def constant_model(
    file: Path,
    outputs: Mapping[str, np.ndarray],
    shape: Sequence[int | str] | None = (1, 3, SIDE, SIDE),
    elements: int = onnx.TensorProto.FLOAT,
    names: str = "",
) -> Path:
    """A model that returns the same outputs for every picture. shape: of its input; None for no input."""
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    nodes = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(values))
        for name, values in outputs.items()
    ]
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(values.dtype), values.shape)
        for name, values in outputs.items()
    ]
    inputs = [] if shape is None else [helper.make_tensor_value_info("images", elements, shape)]
    graph = helper.make_graph(nodes, "constant", inputs, infos)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    if names:
        helper.set_model_props(model, {"names": names, "task": "detect"})
    onnx.save(model, str(file))
    return file


def opened(file: Path, task: str = "detection", **fields: Any) -> Teacher:
    return open_plans_teacher({"kind": "onnx_detector", "file": str(file), "labels": LABELS, **fields}, task)


def refused(file: Path, **fields: Any) -> str:
    with pytest.raises(BadPlan) as caught:
        opened(file, **fields)
    return str(caught.value)


def boxes(teacher: Teacher, frame: np.ndarray) -> list[NamedBox]:
    return list(cast(tuple[NamedBox, ...], teacher.label([[frame]])[0].answer))


# -- a literal decoding as the oracle ---------------------------------------------------------------------------------


def drawn_outputs(layout: str, seed: int) -> dict[str, np.ndarray]:
    """Random outputs with groups of overlapping boxes, as a detector gives around an object."""
    rng = np.random.default_rng(seed)
    centers = rng.uniform(8, SIDE - 8, (5, 2)).repeat(6, 0) + rng.normal(0, 1.5, (30, 2))
    sizes = rng.uniform(8, 24, (5, 2)).repeat(6, 0) * rng.uniform(0.9, 1.1, (30, 2))
    boxes, scores = np.concatenate([centers, sizes], 1), rng.uniform(0, 1, (30, 3)) ** 2
    if layout == "anchor_free":
        return {"output0": np.concatenate([boxes, scores], 1).T[None].astype(np.float32)}
    if layout == "objectness":
        return {"output": np.concatenate([boxes, rng.uniform(0, 1, (30, 1)), scores], 1)[None].astype(np.float32)}
    if layout == "detr":
        return {"output0": np.concatenate([boxes / SIDE, scores], 1)[None].astype(np.float32)}
    edges = np.concatenate([centers - sizes / 2, centers + sizes / 2], 1).astype(np.float32)
    classes, best = scores.argmax(1), scores.max(1).astype(np.float32)
    if layout == "end_to_end":
        return {"output0": np.concatenate([edges, best[:, None], classes[:, None]], 1)[None].astype(np.float32)}
    return {"boxes": edges, "labels": classes.astype(np.int64), "scores": best}


def decoded(layout: str, outputs: Mapping[str, np.ndarray], height: int, width: int, floor: float) -> set[Any]:
    """Written out step by step: rows to scores, sorted suppression per label, the letterbox undone, clipping."""
    rows = []
    if layout == "anchor_free":
        for anchor in range(outputs["output0"].shape[2]):
            x, y, w, h, *scores = outputs["output0"][0, :, anchor].tolist()
            label = max(range(3), key=lambda each: scores[each])
            rows.append((scores[label], label, x - w / 2, y - h / 2, x + w / 2, y + h / 2))
    elif layout == "objectness":
        for x, y, w, h, sure, *scores in outputs["output"][0].tolist():
            label = max(range(3), key=lambda each: scores[each])
            rows.append((sure * scores[label], label, x - w / 2, y - h / 2, x + w / 2, y + h / 2))
    elif layout == "detr":
        for x, y, w, h, *scores in outputs["output0"][0].tolist():
            label = max(range(3), key=lambda each: scores[each])
            rows.append((scores[label], label, *(SIDE * v for v in (x - w / 2, y - h / 2, x + w / 2, y + h / 2))))
    elif layout == "end_to_end":
        rows = [(score, int(label), *edges) for *edges, score, label in outputs["output0"][0].tolist()]
    else:
        triples = zip(outputs["boxes"].tolist(), outputs["labels"].tolist(), outputs["scores"].tolist(), strict=True)
        rows = [(score, label, *edges) for edges, label, score in triples]
    kept: list[Any] = []
    for row in sorted((row for row in rows if row[0] >= floor), reverse=True):
        if all(other[1] != row[1] or overlap(other[2:], row[2:]) <= 0.45 for other in kept):
            kept.append(row)
    # Padding as of Ultralytics' letterbox; the scale is that of the resized picture, which has whole pixels.
    gain = min(SIDE / height, SIDE / width)
    inner = (round(width * gain), round(height * gain))
    across, down = (round((SIDE - extent) / 2 - 0.1) for extent in inner)
    whole = set()
    for score, label, left, top, right, bottom in kept:
        edges = [left - across, top - down, right - across, bottom - down]
        edges = [min(1.0, max(0.0, edge / extent)) for edge, extent in zip(edges, inner * 2, strict=True)]
        if edges[0] < edges[2] and edges[1] < edges[3]:
            whole.add((LABELS[label], *(round(edge, 4) for edge in edges), round(score, 4)))
    return whole


def overlap(one: Sequence[float], other: Sequence[float]) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(0.0, width) * max(0.0, height)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return shared / (sum(areas) - shared)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("height", "width"), [(64, 64), (40, 80), (160, 64)])
def test_every_layout_is_decoded_as_written_out(tmp_path: Path, layout: str, height: int, width: int) -> None:
    for seed in range(4):
        outputs = drawn_outputs(layout, seed)
        file = constant_model(tmp_path / f"{seed}.onnx", outputs)
        teacher = opened(file, min_confidence=0.3)
        assert layout in teacher.name
        found = {
            (label, *(round(edge, 4) for edge in edges), round(score, 4))
            for label, *edges, score in boxes(teacher, np.zeros((height, width, 3), np.uint8))
        }
        expected = decoded(layout, outputs, height, width, 0.3)
        assert len(expected) > 3 and found == expected
    # Negative control for the oracle: without suppression there are more boxes.
    frame = np.zeros((height, width, 3), np.uint8)
    few, many = (len(boxes(opened(file, min_confidence=0.1, overlap=each), frame)) for each in (0.1, 0.99))
    assert few < many


# -- drawn boxes ------------------------------------------------------------------------------------------------------


class Painted(nn.Module):
    """Measures the edges of the red and the green pixels in its input; scores 0.9 if there are any, else 0."""

    def forward(self, pixels: torch.Tensor) -> Any:
        planes, rows = pixels.reshape(3, SIDE, SIDE), []
        at = torch.arange(SIDE, dtype=torch.float32)
        for color in (0, 1):
            mask = (planes[color] - planes[1 - color] > 0.4).float()
            across, down = mask.amax(0), mask.amax(1)
            low = [(at + 1000 * (1 - line)).amin() for line in (across, down)]
            high = [(at * line).amax() + 1 for line in (across, down)]
            rows.append(torch.stack([*low, *high, 0.9 * mask.amax(), torch.tensor(float(color))]))
        return torch.stack(rows)[None]


def test_drawn_boxes_are_found_where_they_were_drawn(tmp_path: Path) -> None:
    file = tmp_path / "painted.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(Painted(), (torch.zeros(1, 3, SIDE, SIDE),), file, output_names=["output0"], dynamo=False)  # type: ignore[arg-type]
    teacher = opened(file, labels=("red", "green"))
    drawn = {"red": (30, 20, 110, 60), "green": (120, 40, 190, 90)}
    frame = np.full((100, 200, 3), 128, np.uint8)
    for number, (left, top, right, bottom) in enumerate(drawn.values()):
        color = [230 if channel == number else 20 for channel in range(3)]
        cv2.rectangle(frame, (left, top), (right - 1, bottom - 1), color, -1)
    found = {box.label: box for box in boxes(teacher, frame)}
    assert set(found) == set(drawn)
    for label, (left, top, right, bottom) in drawn.items():
        edges = np.array(found[label][1:5]) * [200, 100, 200, 100]
        assert np.abs(edges - [left, top, right, bottom]).max() < 4, (label, edges)  # a pixel of the input is 3.1
    assert boxes(teacher, np.full((100, 200, 3), 128, np.uint8)) == []  # negative control


def test_letterboxed_pictures_keep_their_shape_in_the_middle() -> None:
    frame = np.full((10, 20, 3), 250, np.uint8)
    placed = place(frame, 33, 40, "letterbox")
    assert (placed.left, placed.top, placed.width, placed.height) == (0, 6, 40, 20)
    assert (placed.pixels[6:26] == 250).all() and (placed.pixels[:6] == 114).all() and (placed.pixels[26:] == 114).all()
    stretched = place(frame, 33, 40, "stretch")
    assert (stretched.pixels == 250).all() and stretched.shares(np.array([[20, 0, 40, 33]])).tolist() == [
        [0.5, 0, 1, 1]
    ]


def test_colours_are_normalised_as_the_plan_sets(tmp_path: Path) -> None:
    """The model's score is the mean of its input, so it shows what the model gets."""
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    corner = onnx.numpy_helper.from_array(np.array([[[8, 8, 8, 8]]], np.float32).transpose(0, 2, 1))
    graph = helper.make_graph(
        [
            helper.make_node("GlobalAveragePool", ["x"], ["means"]),
            helper.make_node("ReduceMean", ["means"], ["mean"], axes=[1, 2, 3], keepdims=0),
            helper.make_node("Constant", [], ["shape"], value=onnx.numpy_helper.from_array(np.array([1, 1, 1]))),
            helper.make_node("Reshape", ["mean", "shape"], ["score"]),
            helper.make_node("Constant", [], ["box"], value=corner),
            helper.make_node("Concat", ["box", "score"], ["y"], axis=1),
        ],
        "mean",
        [helper.make_tensor_value_info("x", floats, [1, 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("y", floats, [1, 5, 1])],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(tmp_path / "m.onnx")
    )
    frame = np.zeros((SIDE, SIDE, 3), np.uint8)
    frame[..., 0], frame[..., 1], frame[..., 2] = 255, 102, 51
    fields: dict[str, Any] = {"labels": ("bright",), "min_confidence": 0.01}
    (plain,) = boxes(opened(tmp_path / "m.onnx", **fields), frame)
    assert plain.confidence == pytest.approx((1 + 0.4 + 0.2) / 3, abs=1e-5)
    (normal,) = boxes(opened(tmp_path / "m.onnx", mean=(0.2, 0.2, 0.2), std=(2.0, 1.0, 1.0), **fields), frame)
    assert normal.confidence == pytest.approx((0.4 + 0.2 + 0.0) / 3, abs=1e-5)


# -- files that do not fit --------------------------------------------------------------------------------------------

BLANK = np.zeros((SIDE, SIDE, 3), np.uint8)


CAR = [0.3, 0.4, 0.35, 0.5]  # centre and size; its edges are 0.125, 0.15, 0.475 and 0.65
PIXELS = [24, 27, 40, 37, 0.9, 0]
LOW = [0.0, 0.0, 0.0, 0.0]


def table(*rows: Sequence[float], count: int = 84) -> dict[str, np.ndarray]:
    values = np.zeros((1, count, len(rows[0])), np.float32)
    values[0, : len(rows)] = rows
    return {"rows": values}


def pair(*classes: Sequence[float], box: str = "pred_boxes", scores: str = "logits") -> dict[str, np.ndarray]:
    return {scores: np.array([classes], np.float32), box: np.array([[CAR, *[LOW] * (len(classes) - 1)]], np.float32)}


TWO_ROWS = table([10, 10, 30, 30, 0.9, 0.0], [30, 30, 60, 60, 0.8, 0.0], count=2)
MASKS = {"output0": np.zeros((1, 39, 84), np.float32), "output1": np.zeros((1, 32, 16, 16), np.float32)}
OTHERS = [*itertools.product(LAYOUTS[:2], (("car", "van"), (*LABELS, "tram")))]


@pytest.mark.parametrize(
    ("outputs", "fields", "layout", "expected"),
    [
        (table([*CAR, 0.9, 0.05]), {}, "detr", [("car", 0.9)]),
        (table([*CAR, 0.9, 0.05]), {"boxes": "shares"}, "detr", [("car", 0.9)]),
        (table([*CAR, 0.05, 0.9]), {}, "detr", [("van", 0.9)]),
        (table([*CAR, 2.0, -3.0], [*LOW, -9, -9], count=2), {}, "detr", [("car", 1 / (1 + np.exp(-2)))]),
        (table([*CAR, 0.1, 0.2, 0.7]), {"labels": LABELS}, "detr", [("bus", 0.7)]),
        (
            table([*[64 * edge for edge in CAR], 0.9, 0.05]),
            {"layout": "detr", "boxes": "pixels"},
            "detr",
            [("car", 0.9)],
        ),
        # The last of DETR's classes is no object; RT-DETR has none.
        (pair([3, 1, 0], [0, 0, 9]), {}, "detr", [("car", np.exp(3) / (np.exp(3) + np.exp(1) + 1))]),
        (pair([0, 1, 5], [0, 0, 9]), {}, "detr", []),
        (pair([0.8, 0.1, 0.1], [0, 0, 1]), {}, "detr", [("car", 0.8)]),
        (pair([2, -3], [-9, -9]), {}, "detr", [("car", 1 / (1 + np.exp(-2)))]),
        (
            pair([-9, -9, -9, 2], [-9, -9, -9, -9]),
            {"labels": (*LABELS, "tram")},
            "detr",
            [("tram", 1 / (1 + np.exp(-2)))],
        ),
        (pair([1, -9, -9, 2], [0, 0, 0, 9], box="b", scores="a"), {"labels": LABELS}, "detr", [("car", 0.2689)]),
        # Rows after suppression in the file: one object, whatever the file has left of it.
        (table(PIXELS, [25, 27, 41, 37, 0.85, 0], [24, 28, 40, 38, 0.8, 0]), {}, "end_to_end", [("car", 0.9)]),
        (table(PIXELS, [24, 27, 40, 37, 0.8, 1]), {}, "end_to_end", [("car", 0.9), ("van", 0.8)]),
        (table([0.2, 0.3, 0.4, 0.5, 0.9, 1]), {"layout": "end_to_end"}, "end_to_end", [("van", 0.9)]),
        (table([*LOW, 0, 0]), {}, "end_to_end", []),
        (table([0, 0, 0, 0, -1, -1]), {}, "end_to_end", []),
        (table([*LOW[:2], 20, 20, 0.9, 0.8]), {"labels": ("car",)}, "objectness", [("car", 0.72)]),
        (TWO_ROWS, {"labels": ("car",), "layout": "end_to_end"}, "end_to_end", [("car", 0.9), ("car", 0.8)]),
    ],
)
def test_values_decide_between_layouts_of_one_shape(
    tmp_path: Path, outputs: dict[str, np.ndarray], fields: dict[str, Any], layout: str, expected: list[Any]
) -> None:
    teacher = opened(constant_model(tmp_path / "net.onnx", outputs), **{"labels": LABELS[:2], **fields})
    assert f"({layout}, " in teacher.name
    found = boxes(teacher, np.zeros((SIDE, SIDE, 3), np.uint8))
    assert [box.label for box in found] == [label for label, _ in expected]
    assert [box.confidence for box in found] == pytest.approx([score for _, score in expected], abs=1e-3)
    if layout == "detr" and found:
        assert found[0][1:5] == pytest.approx((0.125, 0.15, 0.475, 0.65), abs=1e-6)


@pytest.mark.parametrize(
    ("outputs", "fields", "message"),
    [
        (table([0.2, 0.3, 0.4, 0.5, 0.9, 1]), {}, "fit end_to_end and detr; set `layout` to one of them"),
        (table([*CAR, 0.9, 0.05]), {"labels": LABELS}, "with 3 labels; they would fit 2 labels as detr"),
        (table([*CAR, 0.9, 0.05]), {"labels": ("car",)}, "with 1 labels; they would fit 2 labels as detr"),
        (table([*CAR, 0.9, 0.05]), {"layout": "end_to_end"}, "do not fit 2 labels in [1, boxes, 6] of edges, score"),
        (table([20, 20, 9, 9, 0.9, 0.05]), {}, "fit no supported layout with 2 labels"),
        (pair([2, 1, 1]), {"labels": ("car", "van", "no-object")}, "`labels` ends with 'no-object'; remove it"),
        (pair([2, 1, 1, 1, 1]), {}, "fit no supported layout with 2 labels"),
        (MASKS, {}, "field `file`: its outputs output0 [1, 39, 84], output1 [1, 32, 16, 16] fit no supported layout"),
        (MASKS, {}, "Supported: anchor_free: [1, 4 + labels, anchors] (YOLOv8, YOLO11); objectness: "),
        (TWO_ROWS, {"labels": ("car",)}, "fit objectness and end_to_end; set `layout` to one of them"),
        *(
            (drawn_outputs(layout, 0), {"labels": labels}, f"{len(labels)} labels; they would fit 3 labels as {layout}")
            for layout, labels in OTHERS
        ),
        *(
            (drawn_outputs(layout, 0), {"labels": labels, "layout": layout}, f"do not fit {len(labels)} labels in [1")
            for layout, labels in OTHERS
        ),
    ],
)
def test_outputs_that_fit_no_layout_or_several_are_refused(
    tmp_path: Path, outputs: dict[str, np.ndarray], fields: dict[str, Any], message: str
) -> None:
    error = refused(constant_model(tmp_path / "net.onnx", outputs), **{"labels": LABELS[:2], **fields})
    assert message in error and "\n" not in error


@pytest.mark.parametrize(("processor", "classes"), [("detr", 4), ("rt_detr", 3)])
def test_queries_are_read_as_by_transformers(processor: str, classes: int) -> None:
    module = importlib.import_module(f"transformers.models.{processor}.image_processing_pil_{processor}")
    name = {"detr": "DetrImageProcessorPil", "rt_detr": "RTDetrImageProcessorPil"}[processor]
    rng = torch.Generator().manual_seed(0)
    logits, edges = torch.randn(1, 40, classes, generator=rng) * 3, torch.rand(1, 40, 4, generator=rng) / 2 + 0.2
    (oracle,) = getattr(module, name)().post_process_object_detection(
        types.SimpleNamespace(logits=logits, pred_boxes=edges), threshold=0.95, target_sizes=torch.ones(1, 2)
    )
    theirs: dict[Any, Any] = {}
    for score, label, box in zip(*(oracle[key].tolist() for key in ("scores", "labels", "boxes")), strict=True):
        key = tuple(np.round(box, 4))
        theirs[key] = max(theirs.get(key, (0.0, 0)), (round(score, 4), label))  # RT-DETR gives a query several labels
    found = raw_boxes("detr", [Output("logits", logits.numpy()), Output("pred_boxes", edges.numpy())], 0.95, 3)
    assert len(found.scores) == len(theirs) > 5 and found.shares
    for score, label, box in zip(found.scores, found.classes, found.edges, strict=True):
        near = min(theirs, key=lambda each: float(np.abs(np.array(each) - box).max()))
        assert near == pytest.approx(tuple(box), abs=2e-4) and theirs[near] == pytest.approx((score, label), abs=2e-4)


@pytest.mark.parametrize(
    ("metadata", "layout"),
    [
        ({"args": "{'batch': 1, 'nms': True}"}, "end_to_end"),
        ({"end2end": "True"}, "end_to_end"),
        ({"description": "Ultralytics RT-DETR-l model"}, "detr"),
    ],
)
def test_metadata_decides_what_values_leave_open(tmp_path: Path, metadata: dict[str, str], layout: str) -> None:
    file = constant_model(tmp_path / "net.onnx", table([0.2, 0.3, 0.4, 0.5, 0.9, 1]))
    model = onnx.load(str(file))
    onnx.helper.set_model_props(model, metadata)
    onnx.save(model, str(file))
    assert f"({layout}, " in opened(file, labels=LABELS[:2]).name


def test_values_that_no_detector_gives_are_errors(tmp_path: Path) -> None:
    anchors = drawn_outputs("anchor_free", 0)
    logits = {"output0": anchors["output0"].copy()}
    logits["output0"][0, 4:] = 8 * logits["output0"][0, 4:] - 4
    shares, pixels = table([0.2, 0.3, 0.4, 0.5, 0.9, 1]), table([9, 9, 30, 30, 0.9, 1])
    sigmoid = r"scores are from -\S+ to \S+; expected 0 to 1: export the model with sigmoid"
    beyond = "a box has class 2, but `labels` has 2: classes 0 to 1"
    cases: list[tuple[dict[str, np.ndarray], dict[str, Any], str]] = [
        *((drawn_outputs(layout, 0), {"labels": LABELS[:2]}, beyond) for layout in LAYOUTS[2:4]),
        (shares, {"boxes": "pixels"}, "which are shares; set `boxes: shares`"),
        (pixels, {"boxes": "shares"}, "which are pixels; set `boxes: pixels`"),
        (logits, {}, sigmoid),
    ]
    for number, (outputs, fields, message) in enumerate(cases):
        teacher = opened(constant_model(tmp_path / f"{number}.onnx", outputs), **fields)
        with pytest.raises(ValueError, match=message):
            boxes(teacher, BLANK)
    anchors["output0"][0, 0, :] = np.nan  # numbers that are not finite are no boxes
    anchors["output0"][0, 4:, 0] = np.nan
    assert boxes(opened(constant_model(tmp_path / "nan.onnx", anchors)), BLANK) == []


def test_files_that_are_no_detectors_are_refused_in_one_line(tmp_path: Path) -> None:
    def message(**fields: Any) -> str:
        found = refused(tmp_path / "net.onnx", **fields)
        assert "field `file`: " in found and "\n" not in found
        return found

    (tmp_path / "net.onnx").write_bytes(b"nothing of the kind")
    assert "net.onnx is not an ONNX model that onnxruntime can run: " in message()
    (tmp_path / "net.onnx").write_bytes(b"")
    assert "net.onnx is not an ONNX model that onnxruntime can run: " in message()
    assert "there is no " in refused(tmp_path / "gone.onnx")
    outputs = drawn_outputs("anchor_free", 0)
    constant_model(tmp_path / "net.onnx", outputs, (1, SIDE, SIDE, 3), onnx.TensorProto.UINT8)
    assert "images tensor(uint8) [1, 64, 64, 3]; supported is one picture" in message()
    constant_model(tmp_path / "net.onnx", outputs, None)
    assert "has the input none; supported is one picture" in message()
    constant_model(tmp_path / "net.onnx", outputs, (8, 3, SIDE, SIDE))
    assert "takes 8 pictures at a time" in message()
    constant_model(tmp_path / "net.onnx", outputs, (1, 3, "height", "width"))
    assert "without a fixed size" in message() and "set `size`" in message()
    assert "64 x 64" in opened(tmp_path / "net.onnx", size=64).name
    constant_model(tmp_path / "net.onnx", outputs)
    assert "takes pictures of 64 x 64, not 32; remove `size`" in message(size=32)
    assert "not captioning" in refused(tmp_path / "net.onnx", task="captioning")


def test_labels_come_from_the_names_that_a_file_stores(tmp_path: Path) -> None:
    outputs = drawn_outputs("anchor_free", 0)
    file = constant_model(tmp_path / "net.onnx", outputs, names="{0: 'car', 1: 'van', 2: 'bus'}")
    assert opened(file, labels=None).labels == LABELS
    for names in ("", "[1, 2]", "{1: 'car'}", "__import__('os').getcwd()"):
        file = constant_model(tmp_path / "net.onnx", outputs, names=names)
        assert "contains no names of labels; set `labels`" in refused(file, labels=None)
