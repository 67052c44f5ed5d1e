"""What `vlora check` calls complete answers as transformers and PEFT do; the rest is refused by name, by serve too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.hub.checkpoints import NAMES, SavedBy, savers
from tests.hub.law import EQUAL, KINDS, Served
from vlora.errors import UnsupportedModel
from vlora.models.loading import load_model

pytestmark = pytest.mark.slow

# A template for text beside the one for pictures, none beside it, refused, other layouts. Other default tests compare
# answers of weights in groups (tests/models/test_stored_groups.py), and of LLaVA and LLaVA-OneVision
# (tests/hub/test_parts.py, tests/engine, tests/models/test_processing.py).
_DEFAULT = {
    ("Qwen2.5-VL-7B-bnb", "hub"),
    ("Qwen3-VL-2B", "5.23"),
    ("Qwen3-VL-30B-A3B", "hub"),
    ("llava-v1.6-mistral-7b", "4.49"),
}
EACH = [
    pytest.param(name, by, marks=() if (name, by) in _DEFAULT else pytest.mark.exhaustive)
    for name in NAMES
    for by in savers(name)
]
REFUSED = {"Qwen2.5-VL-7B-bnb": "'bitsandbytes'", "Qwen3-VL-30B-A3B": "mixture of experts"}
_ONE_TURN = r"refused: .*Qwen-VL is no chat model; send one user message, or use Qwen-VL-Chat"


def expected(name: str, kind: str) -> str:
    """A pattern of the outcome."""
    if name == "llava-v1.6-vicuna-7b" and kind == "video":
        return "refused: .* over this model's context of 4096; .*"  # four pictures of 1,200 tokens
    if name == "Qwen-VL" and kind in ("chat", "tools", "typed", "typed in tools"):
        return _ONE_TURN
    return EQUAL


@pytest.mark.parametrize(("name", "saved_by"), EACH)
def test_what_is_complete_answers_as_transformers_does(name: str, saved_by: SavedBy, tmp_path: Path) -> None:
    served = Served.make(name, saved_by, tmp_path)
    if name in REFUSED:
        for refused in (served.check, lambda: load_model(served.config())):
            with pytest.raises(UnsupportedModel, match=REFUSED[name]):
                refused()
        return
    assert served.check().problems == ()
    outcomes = {kind: served.answer(kind) for kind in KINDS}
    wrong = {kind: text for kind, text in outcomes.items() if not re.fullmatch(expected(name, kind), text, re.DOTALL)}
    assert not wrong
