"""Parts that all benches share: journals of interrupted runs, the page of reports, rounds of calls, model shapes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from vlora.bench import finish, page
from vlora.bench.dummy import half_billion_config, language_shapes, served_config, small_config, small_served_config
from vlora.bench.journal import Journal
from vlora.bench.report import Goal, Report, environment
from vlora.bench.scheduling.fit import RANK
from vlora.bench.scheduling.models import MODELS, model_named
from vlora.bench.timing import interleaved
from vlora.errors import BadConfig
from vlora.memory.arena import block_pages, pages_for
from vlora.models.families import family_of

RESULTS = Path(__file__).parents[2] / "docs" / "results"
OF = {"commit": "abc", "quick": False}


def never() -> object:
    raise AssertionError("made twice")


def test_a_journal_computes_nothing_twice_and_mixes_no_runs(tmp_path: Path) -> None:
    path = tmp_path / "results" / "policy.partial"
    first = Journal(path, OF)
    assert first.once("cell 1", lambda: {"ms": (1.5, 2)}) == {"ms": [1.5, 2]}, "as a later run reads it"
    assert first.once("cell 1", never) == Journal(path, OF).once("cell 1", never) == {"ms": [1.5, 2]}
    first.once("cut", lambda: [1, 2, 3])
    path.write_text(path.read_text()[:-4])
    again = Journal(path, OF)
    assert again.once("cell 1", never) == {"ms": [1.5, 2]}
    assert again.once("cut", lambda: "new") == "new" == Journal(path, OF).once("cut", never)
    assert Journal(path, {**OF, "commit": "def"}).once("cell 1", lambda: 2) == 2
    last = Journal(path, OF)
    assert last.once("cell 1", lambda: 3) == 3, "and not the value before that"
    last.close()
    assert not path.exists()
    in_memory = Journal(None, OF)
    assert in_memory.once("cell", lambda: 1) == in_memory.once("cell", never) == 1
    in_memory.close()


def test_saved_reports_are_on_the_page_with_the_origins_of_their_results(tmp_path: Path) -> None:
    finish(Report("first", [], [Goal("speed, x", 2.5, 2, at_most=False)]), None, tmp_path)
    finish(Report("second", [], [Goal("lost", 3, 0, at_most=True), Goal("late", 0, 0, at_most=True)]), None, tmp_path)
    (tmp_path / "costs.json").write_text(json.dumps({"costs": {"base_s": 0.1}}))  # without goals
    written = (tmp_path / "README.md").read_text()
    assert written == page(tmp_path)
    assert written.index("## first: ") < written.index("| speed, x | 2.5 | >= 2 |") < written.index("## second: ")
    assert "| lost | **3** | <= 0 |" in written and "| late | 0 | <= 0 |" in written
    here = {name: environment()[name] for name in ("commit", "machine", "gpu", "versions")}
    found = {"origins": [{**here, "results": ["a"]}, {**here, "commit": "0123456789abcdef", "results": ["b", "c"]}]}
    finish(Report("mixed", [], [Goal("lost", 0, 0, at_most=True)], found=found), None, tmp_path)
    lines = [line for line in page(tmp_path).splitlines() if line.startswith("Measured before")]
    assert lines == [f"Measured before, at commit 0123456789ab, {here['gpu'] or here['machine']}: b, c."]
    finish(Report("no goals", [], []), None, tmp_path / "other")
    assert "##" not in page(tmp_path / "other")


def test_the_published_page_agrees_with_the_published_results() -> None:
    assert (RESULTS / "README.md").read_text() == page(RESULTS), (
        'write it again: python -c "from pathlib import Path; from vlora.bench import write_page; '
        "write_page(Path('docs/results'))\""
    )


@pytest.mark.parametrize(("limit_s", "rounds"), [(math.inf, 4), (100.0, 4), (6.0, 2), (2.0, 1), (0.0, 1)])
def test_no_round_begins_after_the_limit_but_one_counts(limit_s: float, rounds: int) -> None:
    now, calls = [0.0], []

    def call(name: str, seconds: float) -> None:
        calls.append(name)
        now[0] += seconds

    candidates = {"a": lambda: call("a", 1.0), "b": lambda: call("b", 2.0)}
    found = interleaved(candidates, 4, warmup=1, clock=lambda: now[0], limit_s=limit_s)
    assert found == {"a": [1.0] * rounds, "b": [2.0] * rounds}
    assert calls == ["a", "b"] * (1 + rounds)
    now[0] = 0.0  # a long warm-up is cut short
    assert interleaved({"a": lambda: call("a", 5.0)}, 9, warmup=3, clock=lambda: now[0], limit_s=4.0) == {"a": [5.0]}
    assert now[0] == 10.0


def built(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)


def millions(module: Any) -> float:
    return sum(parameter.numel() for parameter in module.parameters()) / 1e6


@pytest.mark.parametrize(
    ("name", "whole", "tower"), [("qwen2-0.5b", 592, 98), ("qwen2-vl-7b", 8290, 676), ("llava-13b", 13350, 304)]
)
def test_models_have_their_shapes_and_arenas_their_capacity(name: str, whole: float, tower: float) -> None:
    model = model_named(name)
    config = model.config()
    family_of(config)
    made = built(config)
    own_tower = made.model.vision_tower if name == "llava-13b" else made.model.visual
    assert (millions(made), millions(own_tower)) == pytest.approx((whole, tower), rel=0.01)
    shapes, text = language_shapes(made), config.text_config
    assert len(shapes) == 7 * text.num_hidden_layers
    adapter = pages_for(sum(2 * RANK * (d_out + d_in) for d_out, d_in in shapes.values()))
    kv_dim = text.num_key_value_heads * text.hidden_size // text.num_attention_heads
    requests = 128 * 3 * block_pages(text.num_hidden_layers, 16, kv_dim, torch.bfloat16)  # at most 45 tokens each
    pages = model.arena_bytes // 2**16
    assert 8 * adapter <= pages // 2 and requests <= pages // 2
    with pytest.raises(BadConfig, match="no model named 'gpt'.*" + ", ".join(MODELS)):
        model_named("gpt")


@pytest.mark.parametrize(
    ("config", "whole", "tower"),
    [
        (half_billion_config(), 592, 98),
        (half_billion_config(vision="none"), 494, 0.4),
        (half_billion_config(8), 297, 41.4),
        (small_config(), 6.0, 0.94),
        (small_config("none"), 5.2, 0.25),
        (served_config(), 515, 98),
        (small_served_config(), 10.9, 0.94),
    ],
)
def test_towers_have_their_family_shape_or_negligible_cost(config: Any, whole: float, tower: float) -> None:
    made = built(config)
    assert (millions(made), millions(made.model.visual)) == pytest.approx((whole, tower), rel=0.05)
