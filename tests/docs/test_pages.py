"""What pages say is so: links, named files, functions, fields, extras, and values of runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest
from pydantic import BaseModel

import atmm
import heads
import vlora.client
import vlora.engine
import vlora.types
from examples import tour
from fusion.plan.data_formats import DataPlan
from fusion.plan.schema import METRICS, TASKS, DomainPlan, LoraPlan, Plan, TrainingPlan, read_plan_file
from fusion.plan.teacher_kinds import TeacherPlan
from tests.core_size import ROOT
from tests.test_prose import listed
from vlora.bench.harness import modules
from vlora.models.families import FAMILIES
from vlora.orchestrator.policies.registry import POLICIES

DOCS = [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if not {"results", "reference"} & {*page.relative_to(ROOT).parts}
]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS)
PLAN_GUIDE = (ROOT / "docs" / "plan.md").read_text()
TOUR = tour.PAGE.read_text()


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings() -> None:
    for page in PAGES:
        targets = re.findall(r"\]\((?!\w+:)([^)\s]+)\)", without_code(page))
        targets += re.findall(r"""(?:src|href)=["'](?!\w+:)([^"']+)["']""", without_code(page))
        for target in targets:
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists() and (not anchor or file.suffix != ".md" or anchor in anchors(file)), (page, target)


def test_records_have_numbers_of_their_own_and_are_listed() -> None:
    records = [page for page in DOCS if page.parent.name == "decisions" and page.name != "README.md"]
    numbers = [page.name[:4] for page in records]
    listing = (ROOT / "docs" / "decisions" / "README.md").read_text()
    assert len(set(numbers)) == len(numbers)
    assert [page.name for page in records if f"]({page.name})" not in listing] == []
    assert [page.name for page in records if not page.read_text().startswith(f"# {page.name[:4]}: ")] == []


def test_files_that_pages_name_exist() -> None:
    """A path of this repository begins with a folder of it, or is the end of one's. Others are of a user, who has no
    Python or C++ files here but two."""
    tops = [f"{folder.name}/" for folder in ROOT.iterdir() if folder.is_dir()]
    files = [file.relative_to(ROOT) for file in listed()]
    known = {f"/{path}" for file in files for path in (file, *file.parents)}
    missing = []
    for page in PAGES:
        for name in set(re.findall(r"`([a-z.][\w./-]*)`", without_code(page))) - {"zero_to_fp32.py", "finetune.py"}:
            path = f"/{name.rstrip('/')}"
            if name.startswith(tuple(tops)):
                missing += [] if path in known else [(page.name, name)]
            elif name.endswith((".py", ".cpp")) or ("/" in name and name.endswith((".md", ".yaml"))):
                missing += [] if any(each.endswith(path) for each in known) else [(page.name, name)]
    assert missing == []


def test_the_files_of_the_picture_exist() -> None:
    """A name without a folder follows a path, and is beside it: `vlora/server/rpyc, http`."""
    paths: list[str] = []
    for text in ElementTree.parse(ROOT / "docs" / "architecture.svg").iter("{http://www.w3.org/2000/svg}text"):
        if text.get("class") == "file":
            for name in re.findall(r"[\w/.]+", (text.text or "").rpartition(": ")[2]):
                paths.append(("" if "/" in name else paths[-1].rpartition("/")[0] + "/") + name)
    assert len(paths) >= 10 and "vlora/server/http" in paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_commands_and_extras_are_named_as_they_are() -> None:
    from vlora.cli import cli

    shown = "".join((ROOT / file).read_text() for file in ("README.md", "docs/guide.md", "docs/api.md"))
    unnamed = [name for name in cli.commands if f"vlora {name}" not in shown and name != "model"]
    assert unnamed == [], "name these commands in README.md, docs/guide.md or docs/api.md"
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    named = [found for page in PAGES for found in re.findall(r"'(?:vlora|\.)\[([\w,]+)\]'", page.read_text())]
    assert {"serve", "fuse", "video"} <= set(named)
    assert {extra for each in named for extra in each.split(",")} <= extras


def test_every_family_policy_head_and_benchmark_is_in_the_table_of_its_page() -> None:
    tables = {
        "README.md": set(FAMILIES),
        "docs/architecture.md": {*POLICIES, *heads.TASKS},
        "docs/bench.md": set(modules()),
    }
    for file, names in tables.items():
        page = (ROOT / file).read_text()
        missing = {name for name in names if not re.search(rf"^\| [^|]*`{name}`", page, re.MULTILINE)}
        assert not missing, f"add a row for each to a table of {file}"


def test_the_reference_has_every_public_name_and_imports_nothing_of_ours(tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; import make_reference\n"
    script += "for file, text in make_reference.pages().items(): (Path(sys.argv[1]) / file.name).write_text(text)\n"
    script += "assert not {'vlora', 'atmm', 'heads', 'fusion', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT / "docs", check=True)
    for module in (vlora.client, vlora.engine, vlora.types, atmm, heads):
        page = (tmp_path / f"{module.__name__}.md").read_text()
        assert [name for name in module.__all__ if f"## `{name}`" not in page] == []


# -- docs/plan.md -----------------------------------------------------------------------------------------------------


def test_the_example_of_a_plan_can_be_read_and_its_defaults_are_right(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", PLAN_GUIDE, re.MULTILINE | re.DOTALL)
    (tmp_path / "plan.yaml").write_text(example)
    assert [domain.name for domain in read_plan_file(tmp_path / "plan.yaml").plan.domains] == ["signs", "lots", "gates"]
    stated: dict[tuple[str, str], str] = {}
    for names, defaults in re.findall(r"^\| (`[\w.`, ]+`) \| ([^|]+) \|", PLAN_GUIDE, re.MULTILINE):
        section = ""
        for name, default in zip(re.findall(r"`([\w.]+)`", names), defaults.split(", "), strict=False):
            *before, field = name.split(".")
            section = section if before == [""] else ".".join(before)
            stated[section, field] = default.strip(" `")
    for section, model in (("", Plan), ("lora", LoraPlan), ("training", TrainingPlan)):
        for name in model.model_fields.keys() - {"lora", "training", "domains"}:
            default = model.model_fields[name].default
            default = default[0] if isinstance(default, tuple) else default
            assert stated[section, name] in (("none", "all") if default is None else (str(default).lower(),)), name


def test_every_field_task_format_and_teacher_of_a_plan_is_named() -> None:
    for model in (Plan, LoraPlan, TrainingPlan, DomainPlan):
        assert issubclass(model, BaseModel)
        for field in model.model_fields:
            assert re.search(rf"`[\w.\[\]]*{field}\b", PLAN_GUIDE), field
    for union, key in ((DataPlan, "format"), (TeacherPlan, "kind")):
        for form in get_args(get_args(union)[0]):
            (name,) = get_args(form.model_fields[key].annotation)
            assert f"`{name}`" in PLAN_GUIDE, name
            for field in set(form.model_fields) - {key, "allow_code"}:
                assert f"`{field}" in PLAN_GUIDE or f"{field}:" in PLAN_GUIDE, f"{name}.{field}"
    assert [task for task in TASKS if f"`{task}`" not in PLAN_GUIDE] == [], "add a row to docs/plan.md for these tasks"
    for task, metrics in METRICS.items():
        row = next(line for line in PLAN_GUIDE.splitlines() if line.startswith("| `") and f"`{task}`" in line)
        assert all(metric in row for metric in metrics if metric != "accuracy" or "words" not in row), task


# -- docs/tour.md -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_tour_has_the_values_of_a_run() -> None:
    values = tour.collect()
    assert [name for _, name in tour.BLOCK.findall(TOUR)] == list(values)
    assert tour.with_values(TOUR, values) == TOUR, "run `python examples/tour.py`: the page is out of date"


def test_the_tour_has_eight_stops_and_names_what_exists() -> None:
    assert re.findall(r"^## (\d)\. ", TOUR, re.MULTILINE) == list("12345678")
    named = re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)\)", TOUR)
    assert len(named) > 30
    assert [f"{path}: {name}" for name, path in named if name not in definitions(path)] == []


def definitions(path: str) -> set[str]:
    """The classes and functions of a file, and methods as `Class.method`."""
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {node.name, *(f"{node.name}.{method.name}" for method in methods)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return found
