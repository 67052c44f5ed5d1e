"""Task heads on Qwen-VL: a head over the last token as defined, and one over image tokens refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from heads import HeadSpec, TaskHead, save_heads
from tests.harness import RecordingEngine
from tests.qwen_vl import checkpoint as small
from tests.qwen_vl import literal
from tests.qwen_vl.published import CONFIGS, make_adapter
from tests.qwen_vl.test_adapters import Published, prompt_of
from tests.qwen_vl.test_model import pixels
from vlora.errors import BadRequest
from vlora.types import Request

LABELS = ("cat", "dog", "bird")


@dataclasses.dataclass
class Headed:
    """An engine with an adapter for the published code and its heads, and the weights that they are read from."""

    recorded: RecordingEngine
    weights: dict[str, torch.Tensor]
    heads: dict[str, TaskHead]

    def request(self, head: str) -> Request:
        prompt = prompt_of(3, 1)
        return Request(request_id="r", prompt_ids=prompt.prompt_ids, vision=prompt.vision, adapter="tuned", head=head)


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Headed:
    folder: Path = tmp_path_factory.mktemp("headed")
    weights = make_adapter(small.write_checkpoint(folder / "model"), CONFIGS["everywhere"], folder / "tuned")
    heads = {}
    for task in ("classification", "detection"):
        spec = HeadSpec(name=task, task=task, labels=LABELS, prompt="what ?", num_frames=1, hidden_size=small.HIDDEN)
        count = spec.make_task().num_outputs
        weight = torch.randn(count, small.HIDDEN, generator=torch.Generator().manual_seed(0)) / 8
        heads[task] = TaskHead(spec, weight, torch.zeros(count))
    save_heads(folder / "tuned", heads)
    served = Published(folder / "model", "qwen_vl", {"tuned": str(folder / "tuned")}, [], [], [])
    return Headed(RecordingEngine(served, None, checkpoint=str(served.folder)), weights, heads)


def test_a_head_reads_the_hidden_state_of_the_last_token(headed: Headed) -> None:
    request = headed.request("classification")
    answer = headed.recorded.local.run([request])["r"][-1].head
    assert answer is not None
    last = literal.hidden_states(headed.weights, request.prompt_ids, [pixels(3)])[-1]
    scores = torch.softmax(headed.heads["classification"].weight.double() @ last, 0)
    torch.testing.assert_close(torch.tensor(answer.scores, dtype=torch.float64), scores, rtol=0, atol=1e-4)
    assert float(scores.max()) < 0.999  # not decided by the largest value alone


def test_detection_is_refused_because_queries_form_no_grid(headed: Headed) -> None:
    reason = "reads image tokens as a grid, and qwen_vl reduces an image to learned queries"
    with pytest.raises(BadRequest, match=reason):
        headed.recorded.engine.add(headed.request("detection"))
