"""Names that adapters may have, at every entry: those that are confused with others are refused with the reason."""

from __future__ import annotations

import asyncio
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fusion.plan.schema import DomainPlan
from vlora.cli.serve import named_adapters
from vlora.cluster.nodes.plan import ClusterPlan
from vlora.cluster.summary import failed_status
from vlora.config import Token
from vlora.errors import BadAdapter, BadConfig
from vlora.learning.plan import LearningSettings
from vlora.lora import AdapterRegistry
from vlora.plan_files.fields import PlanModel
from vlora.server import adapter_catalog
from vlora.server.adapter_catalog import AdapterCatalog
from vlora.server.metrics import Metrics
from vlora.training.plan import TrainingPlan
from vlora.types import AdapterStatus
from vlora.types.composition import name_problem

FORM = "a name has 1 to 128 printable characters, no @, +, * or slash"
LABEL = "metrics count other requests under the label"
APART = "it has letters and accents as separate characters ("

LABELS = ("base", "other", "composed", "unknown")
NAMES: dict[str, str | None] = {
    **dict.fromkeys(LABELS, LABEL),
    **dict.fromkeys(("", " ", " a", "a ", "x" * 129, ".", "..", ".hidden", "..data", "a/b", "../a", "a\\b"), FORM),
    **dict.fromkeys(("a@b", "a+b", "0.5*a", "*", "a\nb", "a\x00", "a\ud800"), FORM),
    "a\u200bb": FORM,  # without width
    "\u202eab": FORM,  # written from right to left
    "a\u00a0b": FORM,  # a space that does not break
    "cafe\u0301": APART,  # as macOS writes names of files
    "\uff42ase": None,  # a wide b, as of Chinese keyboards
    "Base": None,  # labels of metrics have a case
    **dict.fromkeys(("x" * 128, "\u533b\u7597\uff08v2\uff09", "\u00b5-net", "caf\u00e9", "\u8eca", "default", "none")),
    **dict.fromkeys(("lost", "a b", "a:b", "a=b", "0.7", "-", "checkpoint-500")),
}


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_each_name_is_accepted_or_refused_with_its_reason(name: str) -> None:
    problem, want = name_problem(name), NAMES[name]
    assert (problem is None) == (want is None) and (want or "") in (problem or "")
    if want == APART:
        assert problem is not None and ascii(unicodedata.normalize("NFC", name)) in problem


def in_catalog(name: str, folder: Path) -> None:
    catalog = AdapterCatalog(None, Metrics(), "model", None)  # type: ignore[arg-type]
    asyncio.run(catalog.load(name, str(folder)))


def in_registry(name: str, folder: Path) -> None:
    AdapterRegistry({}, None, 64).register({name: str(folder)})  # type: ignore[arg-type]


def on_command_line(name: str, folder: Path) -> None:
    named_adapters((f"{name}={folder}",), None)


def in_folder(name: str, folder: Path) -> None:
    (folder / name).mkdir()
    (folder / name / "adapter_config.json").write_text("{}")
    named_adapters((), folder)


def in_plans(name: str, folder: Path) -> None:
    named = {"name": name}
    plans: list[tuple[type[PlanModel], dict[str, Any]]] = [
        (DomainPlan, named),
        (TrainingPlan, named),
        (LearningSettings, named),
        (ClusterPlan, {"adapters": {name: "folder"}}),
    ]
    reasons = []
    for plan, fields in plans:
        with pytest.raises(ValidationError) as caught:  # of this and of the missing fields
            plan.model_validate(fields)
        reasons += [str(error["msg"]) for error in caught.value.errors() if name in (*error["loc"], error["input"])]
    assert len(reasons) == len(plans) and len(set(reasons)) == 1
    raise BadAdapter(reasons[0])


@pytest.mark.parametrize("entry", [in_catalog, in_registry, on_command_line, in_folder, in_plans])
@pytest.mark.parametrize("name", LABELS)
def test_labels_of_metrics_are_refused_at_every_entry(
    entry: Callable[[str, Path], None], name: str, tmp_path: Path
) -> None:
    with pytest.raises(BadAdapter, match=re.escape(f"{LABEL} {name!r}")):
        entry(name, tmp_path)


def test_a_token_is_not_named_as_all_others_in_metrics() -> None:
    with pytest.raises(BadConfig, match="token 'other' has the label of all other tokens in metrics"):
        Token(name="other", secret="0123456789abcdef")


class Listing:
    """An engine with one adapter, which has failed."""

    def __init__(self) -> None:
        self.num_lists = 0
        self.error = "broken"

    async def adapters(self) -> tuple[AdapterStatus, ...]:
        self.num_lists += 1
        return (failed_status("signs", self.error),)


async def test_requests_of_a_failed_adapter_do_not_list_all_adapters_each(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Listing()
    catalog = AdapterCatalog(engine, Metrics(), "base", None)  # type: ignore[arg-type]
    monkeypatch.setattr(adapter_catalog, "ERROR_S", 1000.0)
    for _ in range(100):
        assert (await catalog.get("signs")).error == "broken"
    assert engine.num_lists == 1
    monkeypatch.setattr(adapter_catalog, "ERROR_S", 0.0)
    engine.error = "other"
    assert (await catalog.get("signs")).error == "other"
