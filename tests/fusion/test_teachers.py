"""Built-in teachers learn their task from the training part alone."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import cv2
import joblib
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fusion.data.load import DomainData
from fusion.data.samples import NamedBox, Sample, Splits
from fusion.synthetic.sources import load_source
from fusion.teachers import classify
from fusion.teachers.built_in import TEACHERS, SmallNetwork
from fusion.teachers.labelling import restrict_answers
from fusion.teachers.opening import FromBoxes, UserFunction
from fusion.training.objectives import objective_of
from heads import Box
from tests.fusion.made import load_plan, open_plans_teacher, video, write_plan
from vlora.errors import BadPlan


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "sklearn-digits",
        pytest.param("lfw-faces", marks=pytest.mark.exhaustive),
        pytest.param("drawn-actions", marks=pytest.mark.exhaustive),
    ],
)
def test_a_built_in_teacher_answers_test_samples_correctly(source: str) -> None:
    splits = load_source(source, 0)
    teacher = TEACHERS[source](splits)
    test = splits.test[:120]
    assert objective_of(splits).metric(teacher.answers(test), [sample.target for sample in test]) > 0.95


def dots(count: int, seed: int, task: str) -> list[Sample]:
    """One bright square, left or right."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        frame = rng.integers(0, 40, (96, 96, 3)).astype(np.uint8)
        label, top = int(rng.integers(2)), int(rng.integers(8, 60))
        left = 8 + 48 * label + int(rng.integers(8))
        frame[top : top + 24, left : left + 24, label] = 220
        box = Box(label, left / 96, top / 96, (left + 24) / 96, (top + 24) / 96)
        samples.append(Sample((frame,), (box,) if task == "detection" else label))
    return samples


@pytest.mark.slow
@pytest.mark.parametrize("task", [pytest.param("classification", marks=pytest.mark.exhaustive), "detection"])
def test_the_small_network_learns_in_seconds(task: str) -> None:
    torch.set_num_threads(1)
    splits = Splits(task, ("left", "right"), dots(320, 0, task), (), dots(60, 1, task), real=False)
    teacher = SmallNetwork(splits)
    score = objective_of(splits).metric(teacher.answers(splits.test), [sample.target for sample in splits.test])
    assert score > (0.95 if task == "classification" else 0.6)
    blind = [() if task == "detection" else 0 for _ in splits.test]
    assert objective_of(splits).metric(blind, [sample.target for sample in splits.test]) < 0.7


DARK, BRIGHT = 30, 220
PLAN = "data: {format: unlabelled, path: pictures}\n"


def shades(folder: Path, count: int = 10) -> None:
    """Pictures of one grey each, half of them dark; the file name gives the shade."""
    folder.mkdir()
    for number in range(count):
        for shade in (DARK + number, BRIGHT - number):
            cv2.imwrite(str(folder / f"{shade}.png"), np.full((40, 40, 3), shade, np.uint8))


def teach(tmp_path: Path, teacher: str, task: str = "classification", more: str = "") -> DomainData:
    if not (tmp_path / "pictures").exists():
        shades(tmp_path / "pictures")
    plan = write_plan(tmp_path, f"{PLAN}task: {task}\nteacher: {teacher}{more}")
    (data,) = load_plan(plan).values()
    return data


def refused(tmp_path: Path, teacher: str, task: str = "classification") -> str:
    with pytest.raises(BadPlan) as caught:
        teach(tmp_path, teacher, task)
    return str(caught.value)


def all_right(data: DomainData, num: int = 20) -> bool:
    samples = [sample for part in data.splits.parts.values() for sample in part]
    answers = {sample.frames.file.stem: data.splits.labels[sample.target] for sample in samples}  # type: ignore[attr-defined, index]
    return len(answers) == num and all(
        (label == "bright") == (int(stem) > 127) and label in ("bright", "dark") for stem, label in answers.items()
    )


class Brightness(nn.Module):
    """Logits of dark and bright from pictures [n, 3, h, w] of 0 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([[-4.0] * 3, [4.0] * 3]))
            self.linear.bias.copy_(torch.tensor([6.0, -6.0]))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.linear(pixels.mean((2, 3)))


# -- code execution ---------------------------------------------------------------------------------------------------


def explode(*_: object) -> None:
    raise AssertionError("code was run without permission")


class Trap:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return explode, ("now",)


HERE = "tests.fusion.test_teachers"


def function(name: str, more: str = "") -> str:
    return f"{{kind: callable, function: '{HERE}:{name}', allow_code: true{more}}}"


@pytest.mark.parametrize(
    ("teacher", "field"),
    [
        ("{kind: sklearn, file: trap, size: 8}", "file"),
        ("{kind: torch, file: trap, labels: [a, b], size: 8}", "file"),
        (f"{{kind: torch, file: trap, labels: [a, b], size: 8, module: '{HERE}:explode'}}", "file"),
        (f"{{kind: callable, function: '{HERE}:explode'}}", "function"),
    ],
)
def test_code_is_refused_unless_allowed(tmp_path: Path, teacher: str, field: str) -> None:
    (tmp_path / "trap").write_bytes(pickle.dumps(Trap()))
    message = refused(tmp_path, teacher)
    assert f"line 7, field `domains[0].teacher.{field}`" in message and "set `allow_code: true`" in message
    if "sklearn" in teacher:  # negative control: the pickle does run code
        assert "code was run" in refused(tmp_path, teacher.replace("}", ", allow_code: true}"))


def test_pretrained_weights_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    folder = image_classifier(tmp_path / "vit")
    state = {name: value for name, value in vit().state_dict().items()}
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    assert "field `domains[0].teacher.path`" in refused(tmp_path, "{kind: transformers, path: vit}")
    allowed = teach(tmp_path, "{kind: transformers, path: vit, allow_code: true}", "captioning")
    assert {sample.target for sample in allowed.splits.train} <= {"LABEL_A", "LABEL_B"}


# -- one of each ------------------------------------------------------------------------------------------------------


@pytest.fixture
def forest(tmp_path: Path) -> Any:
    from sklearn.tree import DecisionTreeClassifier

    rng = np.random.default_rng(0)
    shades = rng.random((200, 1)).repeat(16, 1)
    return DecisionTreeClassifier(max_depth=1).fit(shades, np.where(shades[:, 0] > 0.5, "bright", "dark"))


@pytest.mark.slow
def test_an_estimator(tmp_path: Path, forest: Any) -> None:
    """In a pickle, and in a file that cannot run code."""
    joblib.dump(forest, tmp_path / "tree.joblib")
    data = teach(tmp_path, "{kind: sklearn, file: tree.joblib, size: 4, allow_code: true}")
    assert all_right(data) and data.teacher_result is not None and data.teacher_result.score == 1
    message = refused(tmp_path, "{kind: sklearn, file: tree.joblib, size: 5, allow_code: true}")
    assert "takes 16 features, but size 5 makes 25" in message
    skops = pytest.importorskip("skops.io")
    from sklearn.linear_model import LogisticRegression

    shades = np.linspace(0, 1, 50)[:, None].repeat(16, 1)
    linear = LogisticRegression(C=100).fit(shades, np.where(shades[:, 0] > 0.5, "bright", "dark"))
    skops.dump(linear, tmp_path / "linear.skops")
    assert all_right(teach(tmp_path, "{kind: sklearn, file: linear.skops, size: 4}"))
    # skops warns that a crafted file with trees could crash the process.
    skops.dump(forest, tmp_path / "tree.skops")
    assert "allow_code" in refused(tmp_path, "{kind: sklearn, file: tree.skops, size: 4}")
    assert all_right(teach(tmp_path, "{kind: sklearn, file: tree.skops, size: 4, allow_code: true}"))


@pytest.mark.slow
@pytest.mark.parametrize("form", ("script", "export", "weights"))
def test_a_torch_module(tmp_path: Path, form: str) -> None:
    module, example = Brightness().eval(), torch.zeros(1, 3, 16, 16)
    file = {"script": "net", "export": "net.pt2", "weights": "net.safetensors"}[form]
    if form == "script":
        torch.jit.trace(module, example).save(str(tmp_path / file))
    elif form == "export":
        torch.export.save(torch.export.export(module, (example,)), tmp_path / file)
    else:
        save_file(module.state_dict(), tmp_path / file)
    builder = f", module: '{HERE}:Brightness'" if form == "weights" else ""
    lines = f"{{kind: torch, file: {file}, size: 16, labels: [dark, bright], allow_code: true{builder}}}"
    assert all_right(teach(tmp_path, lines))
    message = refused(tmp_path, lines.replace("[dark, bright]", "[dark, grey, bright]"))
    assert "outputs of the shape (1, 2) for 3 labels" in message


def test_an_onnx_model(tmp_path: Path) -> None:
    """Mean over the picture, then a linear layer, written node by node without an exporter."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    weight = np.array([[-4.0] * 3, [4.0] * 3], np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("GlobalAveragePool", ["x"], ["mean"]),
            helper.make_node("Flatten", ["mean"], ["flat"], axis=1),
            helper.make_node("Gemm", ["flat", "w", "b"], ["y"], transB=1),
        ],
        "brightness",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.array([6.0, -6.0], np.float32), "b")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]), str(tmp_path / "net.onnx"))
    assert all_right(teach(tmp_path, "{kind: onnx, file: net.onnx, size: 16, labels: [dark, bright]}"))
    message = refused(tmp_path, "{kind: onnx, file: net.onnx, size: 16, labels: [dark, grey, bright]}")
    assert "outputs of the shape (2,) for 3 labels" in message
    (tmp_path / "net.onnx").write_bytes(b"nothing of the kind")
    message = refused(tmp_path, "{kind: onnx, file: net.onnx, size: 16, labels: [dark, bright]}")
    assert "field `domains[0].teacher.file`" in message and "cannot be run by OpenCV" in message


# As small as the pretrained models' configurations allow.
TINY: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def labelled(*labels: str) -> dict[str, Any]:
    return {
        **TINY,
        "patch_size": 8,
        "id2label": dict(enumerate(labels)),
        "label2id": {n: i for i, n in enumerate(labels)},
    }


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(**labelled("LABEL_A", "LABEL_B"), image_size=16)).eval()


def image_classifier(folder: Path) -> Path:
    vit().save_pretrained(folder)
    preprocessor(folder, "ViTImageProcessor", size={"height": 16, "width": 16})
    return folder


def preprocessor(folder: Path, kind: str, **settings: object) -> None:
    """As in published folders: without the name of the preprocessing library."""
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind, **settings}))


def test_a_pretrained_image_classifier(tmp_path: Path) -> None:
    image_classifier(tmp_path / "vit")
    data = teach(tmp_path, "{kind: transformers, path: vit, rename: {LABEL_A: dark, LABEL_B: bright}}", "captioning")
    # The model's own forward is the oracle for the labels.
    model = vit()
    for sample in data.splits.train:
        pixels = torch.from_numpy(cv2.resize(sample.frames[0], (16, 16))).permute(2, 0, 1).float() / 127.5 - 1
        want = ("dark", "bright")[int(model(pixels[None]).logits.argmax())]
        assert sample.target == want
    assert "a classifier, and `only`" in refused(tmp_path, "{kind: transformers, path: vit, only: [LABEL_A]}")
    assert "renames LABEL_X" in refused(tmp_path, "{kind: transformers, path: vit, rename: {LABEL_X: dark}}")


def test_a_pretrained_video_classifier(tmp_path: Path) -> None:
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    torch.manual_seed(0)
    config = VideoMAEConfig(**labelled("walks", "runs"), image_size=16, num_frames=4, tubelet_size=2)
    VideoMAEForVideoClassification(config).save_pretrained(tmp_path / "mae")
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    preprocessor(tmp_path / "mae", "VideoMAEImageProcessor", **sizes)
    for number in range(6):
        video(tmp_path / "pictures" / f"{number}.avi", number)
    data = teach(tmp_path, "{kind: transformers, path: mae}", "captioning")
    assert {sample.target for sample in data.splits.train} <= {"walks", "runs"} and data.splits.num_frames == 4


def test_a_pretrained_detector(tmp_path: Path) -> None:
    from transformers import YolosConfig, YolosForObjectDetection

    torch.manual_seed(0)
    config = YolosConfig(**labelled("car", "van"), image_size=[32, 32], num_detection_tokens=5)
    YolosForObjectDetection(config).save_pretrained(tmp_path / "yolos")
    preprocessor(tmp_path / "yolos", "YolosImageProcessor", size={"height": 32, "width": 32}, do_pad=False)
    data = teach(tmp_path, "{kind: transformers, path: yolos, only: [car, van]}", "counting")
    assert {sample.target for sample in data.splits.train} == {5}
    strict = teach(tmp_path, "{kind: transformers, path: yolos, only: [car, van], min_confidence: 1.0}", "counting")
    assert strict.teacher_result is not None and strict.teacher_result.dropped_boxes == 100
    assert {sample.target for sample in strict.splits.train} == {0}
    assert "would count boxes of all labels" in refused(tmp_path, "{kind: transformers, path: yolos}", "counting")


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "teacher.path`" in refused(tmp_path, "{kind: transformers, path: empty}")
    assert "there is no " in refused(tmp_path, "{kind: transformers, path: gone}")
    assert "there is no " in refused(tmp_path, f"{{kind: transformers, path: {'x' * 5000}}}")
    (tmp_path / "empty" / "config.json").write_text(
        json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]})
    )
    assert "its architecture is BertForMaskedLM" in refused(tmp_path, "{kind: transformers, path: empty}")


# -- functions --------------------------------------------------------------------------------------------------------


def by_mean(frames: Sequence[np.ndarray]) -> tuple[str, float]:
    mean = float(frames[0].mean())
    return ("bright" if mean > 127 else "dark"), abs(mean - 127) / 128


def by_luck(frames: Sequence[np.ndarray]) -> str:
    return "bright"


def test_a_function(tmp_path: Path) -> None:
    assert all_right(teach(tmp_path, function("by_mean")))
    # (220 - 127) / 128 = 0.727 and less; (127 - 30) / 128 = 0.758 and less, 8 of 10 of them above 0.7.
    sure = teach(tmp_path, function("by_mean", ", min_confidence: 0.7"))
    left = [sample.frames.file.stem for part in sure.splits.parts.values() for sample in part]  # type: ignore[attr-defined]
    assert sorted(map(int, left)) == [30, 31, 32, 33, 34, 35, 36, 37, 217, 218, 219, 220]
    assert sure.teacher_result is not None and sure.teacher_result.dropped == 8
    for teacher, message in (
        (function("by_mean", ", min_confidence: 0.9"), "no sample is left"),
        (function("by_luck"), "expected (answer, confidence)"),
        (function("explode"), "code was run"),
        (function("nobody"), "has no function nobody"),
        (function("leave"), "it ended the process, with 3"),
        (function("x").replace(f"{HERE}:x", "no.such:thing"), "importing no.such failed"),
    ):
        assert message in refused(tmp_path, teacher)


def leave(frames: Sequence[np.ndarray]) -> None:
    sys.exit(3)


# -- teachers with more labels than the domain ------------------------------------------------------------------------


def by_three(frames: Sequence[np.ndarray]) -> tuple[str, float]:
    """Dark, bright, and a third label in between."""
    mean = float(frames[0].mean())
    return "grey" if 36 <= mean <= 39 else by_mean(frames)[0], 1.0


def things(frames: Sequence[np.ndarray]) -> tuple[list[tuple[Any, ...]], float]:
    tree = ("tree", 0.5, 0.5, 1.0, 1.0)
    return [("car", 0.0, 0.0, 0.5, 0.5), tree] if frames[0].mean() > 127 else [tree], 1.0


def test_labels_outside_the_plans_are_dropped(tmp_path: Path) -> None:
    three = function("by_three")
    assert teach(tmp_path, three).splits.labels == ("bright", "dark", "grey")
    restricted = teach(tmp_path, three, more="\nlabels: [dark, bright]")
    result = restricted.teacher_result
    assert restricted.splits.labels == ("dark", "bright") and all_right(restricted, 16)
    assert result is not None and (result.dropped, result.beyond) == (0, 4)
    found = teach(tmp_path, function("things"), "detection", "\nlabels: [car]")
    counts = [len(sample.target) for part in found.splits.parts.values() for sample in part]  # type: ignore[arg-type]
    assert found.splits.labels == ("car",) and sorted(counts) == [0] * 10 + [1] * 10
    assert found.teacher_result is not None and found.teacher_result.beyond == 20
    answers = f"{HERE}:by_three: it answers dark, grey and has no label for black"
    assert f"domains[0].teacher`: {answers}" in refused(tmp_path, f"{three}\nlabels: [black, bright]")


def test_answers_outside_the_labels_count_as_wrong_in_comparisons(tmp_path: Path) -> None:
    for number in range(10):
        for shade, label in ((DARK + number, "dark"), (BRIGHT - number, "bright")):
            (tmp_path / "message" / label).mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(tmp_path / "message" / label / f"{shade}.png"), np.full((40, 40, 3), shade, np.uint8))
    split = "{validation: 0.6, test: 0.2}"
    lines = f"data: {{format: image_folder, path: message, split: {split}}}\nteacher: {function('by_three')}"
    (data,) = load_plan(write_plan(tmp_path, lines)).values()
    wrong = sum(36 <= float(sample.frames[0].mean()) <= 39 for sample in data.splits.validation)
    assert wrong and data.teacher_result is not None and data.teacher_result.beyond == wrong
    assert data.teacher_result.score == pytest.approx(1 - wrong / len(data.splits.validation))


def test_a_teachers_label_set_shows_whether_names_differ() -> None:
    """A known label that never occurs is allowed; a label that the teacher lacks is refused."""
    answers = ["tench", "cat", "tench"]
    assert restrict_answers("classification", ("cat", "dog"), answers, ("tench", "cat", "dog")) == (
        [None, "cat", None],
        2,
    )
    for knows in ((), ("tench", "cat")):
        with pytest.raises(ValueError, match="it answers tench and has no label for dog"):
            restrict_answers("classification", ("cat", "dog"), answers, knows)
    assert restrict_answers("classification", ("cat", "dog"), ["cat"], ()).beyond == 0  # no answer was unknown
    assert restrict_answers("multi_label", ("a", "b"), [("a", "c"), ("b",)], ()) == ([("a",), ("b",)], 1)
    assert restrict_answers("binary", ("no", "yes"), ["true", "0", "maybe"], ()) == (["true", "0", None], 1)
    assert restrict_answers("counting", ("0", "1"), ["7"], ()) == (["7"], 0)


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        (True, "yes"),
        (3, "3"),
        (np.bool_(False), "no"),
        (np.int64(3), "3"),
        (np.float32(0.5), "0.5"),
        (["a", "b"], ("a", "b")),
        ([("car", 0.1, 0.2, 0.3, 0.4)], (NamedBox("car", 0.1, 0.2, 0.3, 0.4),)),
        ([("car", 0.1, 0.2, 0.3, 0.4, np.float32(0.5))], (NamedBox("car", 0.1, 0.2, 0.3, 0.4, 0.5),)),
        ([("car", 0.3, 0.2, 0.1, 0.4)], None),
        ([(2, 0.1, 0.2, 0.3, 0.4)], None),
        ([("", 0.1, 0.2, 0.3, 0.4)], None),
        ([("car", 0.1, 0.2, 0.3, 0.4, 90)], None),
        ([("car", 0.1, 0.2, 0.3, 0.4, float("nan"))], None),
        ([("car", 0.1, 0.2, 0.3, 0.4, "0.9")], None),
        ({"a": 1}, None),
    ],
)
def test_answers_that_a_function_may_return(monkeypatch: pytest.MonkeyPatch, answer: object, want: object) -> None:
    monkeypatch.setattr(sys.modules[__name__], "by_luck", lambda frames: (answer, np.float32(0.5)))
    teacher = UserFunction(f"{__name__}:by_luck")
    if want is None:
        with pytest.raises(ValueError, match="expected"):
            teacher.label([[]])
    else:
        assert teacher.label([[]])[0].answer == want


# -- detectors --------------------------------------------------------------------------------------------------------


def face() -> np.ndarray:
    """A real photograph with one face (scikit-image's astronaut)."""
    from skimage.data import astronaut

    return np.asarray(astronaut())


def test_a_cascade_finds_a_face() -> None:
    (found,) = open_plans_teacher({"kind": "cascade", "min_confidence": 0.9}, "detection").label([[face()]])
    ((label, left, top, right, bottom, confidence),) = cast(tuple[NamedBox, ...], found.answer)
    # The face is at about (177 to 270, 70 to 170) of 512 x 512 pixels.
    assert label == "face" and left < 0.4 < 0.46 < right and top < 0.18 < 0.28 < bottom
    assert confidence == found.confidence > 0.9
    with pytest.raises(BadPlan, match="not captioning"):
        open_plans_teacher({"kind": "cascade"}, "captioning")


def test_the_people_detector_finds_a_person() -> None:
    """An upright figure in one uniform shade, which suits the detector's histograms."""
    frame = np.full((300, 200, 3), 200, np.uint8)
    cv2.ellipse(frame, (100, 75), (14, 18), 0, 0, 360, (40, 40, 40), -1)
    cv2.ellipse(frame, (100, 135), (26, 48), 0, 0, 360, (40, 40, 40), -1)
    for x in (88, 112):
        cv2.line(frame, (x, 170), (x, 245), (40, 40, 40), 18)
    (found,) = open_plans_teacher({"kind": "hog"}, "detection").label([[frame]])
    assert found.answer and all(isinstance(box, NamedBox) and box.label == "person" for box in found.answer)
    box = found.answer[0]
    assert isinstance(box, NamedBox) and box.left < 0.5 < box.right and box.top < 0.45 < box.bottom
    for size in ((96, 96), (127, 64), (128, 63), (1, 1)):  # too small for a person
        (none,) = open_plans_teacher({"kind": "hog"}, "detection").label([[np.zeros((*size, 3), np.uint8)]])
        assert none.answer == ()


class Two:
    """A detector that finds one box of each of its labels."""

    name = "two"
    labels: tuple[str, ...] = ("a", "b")

    def find(self, frame: np.ndarray) -> list[NamedBox]:
        return [NamedBox("a", 0, 0, 1, 1, 0.4), NamedBox("b", 0, 0, 1, 1, 0.8)]


FRAME = [[np.zeros((1, 1, 3), np.uint8)]]


@pytest.mark.parametrize(
    ("task", "answer"),
    [("counting", "1"), ("binary", "yes"), ("multi_label", ("a",)), ("classification", "a")],
)
def test_only_the_labels_that_count_are_counted(task: str, answer: object) -> None:
    teacher = FromBoxes(Two(), task, 0.1, "", ("a",))
    (found,) = teacher.label(FRAME)
    assert found.answer == answer and found.confidence == 0.4 and "b" not in teacher.labels
    with pytest.raises(ValueError, match="`only` names c, which two lacks; it has a, b"):
        FromBoxes(Two(), task, 0.1, "", ("a", "c"))
    if task in ("counting", "binary"):
        with pytest.raises(
            ValueError, match=rf"{task} would count boxes of all labels of two \(a, b\); .*`only: \[a\]`"
        ):
            FromBoxes(Two(), task, 0.1, "")
    (none,) = FromBoxes(Two(), task, 0.9, "empty street", ("a",)).label(FRAME)
    empty = {"counting": "0", "binary": "no", "multi_label": (), "classification": "empty street"}
    assert none.answer == empty[task] and none.confidence == 1.0
    (found,) = FromBoxes(Two(), "detection", 0.5, "").label(FRAME)  # unsure boxes are dropped and counted
    assert found.answer == (NamedBox("b", 0, 0, 1, 1, 0.8),) and found.num_dropped == 1 and found.confidence == 0.8


# -- teachers as a reference ------------------------------------------------------------------------------------------


def test_logits_and_probabilities_mean_the_same() -> None:
    logits = np.array([[1.0, 3.0], [2.0, 0.5]])
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert classify(logits, "ab").answer == classify(probabilities, "ab").answer == "b"
    assert classify(logits, "ab").confidence == pytest.approx(float(probabilities.mean(0).max()))


@pytest.mark.slow
def test_a_teacher_is_scored_on_labelled_data(tmp_path: Path) -> None:
    def faces(teacher: str) -> DomainData:
        (data,) = load_plan(write_plan(tmp_path, f"source: lfw-faces\n{teacher}")).values()
        return data

    found = faces("threshold: {relative_to: teacher, minus: 0.05}").teacher_result
    assert found is not None and found.name == "Haar cascade" and found.score > 0.9
    found = faces("teacher: {kind: cascade, label: a face, absent: no face}").teacher_result
    assert found is not None and 0.4 < found.score <= 1
    with pytest.raises(BadPlan, match="it answers face and has no label for a face; use the same names in both"):
        faces("teacher: {kind: cascade, absent: no face}")
    with pytest.raises(BadPlan, match="only these sources have"):
        load_plan(write_plan(tmp_path, "source: drawn-traffic-captions\nteacher: {kind: built_in}"))
    assert "only with a built-in source" in refused(tmp_path, "{kind: built_in}")
