"""`vlora bench paper`: the figures of V-LoRA, S-LoRA, Punica, BD-LoRA and Symbiosis, each drawn beside the paper's
numbers.

Reading order: `figures.yaml` (all figures), `figure.py` (the setting, and what its rows mean); then the measurements:
`benches.py`, `operators.py`, `steps.py`, `simulations.py`.
"""

from __future__ import annotations

import json
import os
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from benchmarks import plots
from benchmarks.paper import simulations
from benchmarks.paper.figure import FORM, PAPERS, Figure, Found, Measuring, Setting, read_figures
from vlora.bench.harness import Bench, Measured, Results, Store, joined
from vlora.bench.report import Row, environment
from vlora.bench.timing import threads
from vlora.errors import BadConfig

FIGURES, ELSEWHERE = read_figures(Path(__file__).with_name("figures.yaml"))

Case = tuple[str, bool]
"""A figure's key, and whether the run is quick."""


def chosen(keys: Sequence[str]) -> list[Figure]:
    """The figures with these keys, such as "v-lora:fig14", in the order of the page; all without keys.

    Raises:
        BadConfig: A key is unknown, or the figure needs another machine.
    """
    known = {figure.key: figure for figure in FIGURES}
    others = {each.key: each for each in ELSEWHERE}
    for key in keys:
        if key in others:
            each = others[key]
            raise BadConfig(f"{key} ({each.title}) is not drawn by this command; it needs {each.needs}")
        if key not in known:
            raise BadConfig(f"no figure {key!r}; choose among {', '.join(known)}")
    return [figure for figure in FIGURES if not keys or figure.key in keys]


def cases(quick: bool, figures: Sequence[str] = ()) -> dict[str, Case]:
    """The longest figures first, so that processes end together."""
    return {each.stored: (each.key, quick) for each in sorted(chosen(figures), key=lambda each: -each.minutes)}


def runs_alone(case: Case) -> bool:
    key, quick = case
    return chosen([key])[0].runs_alone(Setting.here(quick))


def find(
    measuring: Measuring,
    *,
    call: str,
    share: str | None = None,
    of: Mapping[str, Any] | None = None,
    quick: Mapping[str, Any] = {},
    **arguments: Any,
) -> Found:
    """Make a measurement, or read it.

    Args:
        measuring: The setting, and what is stored.
        call: A function of this package's modules, "MODULE.NAME", that returns rows or `Found`.
        share: Its name in the store, for measurements of several figures.
        of: Another one, whose rows are its argument.
        quick: Arguments in a quick run.
        arguments: All others.
    """
    if measuring.setting.quick:
        arguments |= quick
    if of is not None:
        arguments["rows"] = find(measuring, **of)["rows"]

    def make() -> Found:
        found = pkgutil.resolve_name(f"{__name__}.{call}")(measuring, **arguments)
        return found if isinstance(found, dict) else {"rows": found}

    return make() if share is None else measuring.once(f"{share}-{FORM}", make)  # type: ignore[no-any-return]


def measure(case: Case, store: Store) -> Measured:
    key, quick = case
    (figure,), setting = chosen([key]), Setting.here(quick)
    measuring, load = Measuring(setting, store), os.getloadavg()[0]
    with threads(figure.num_threads(setting, torch.get_num_threads())):
        value = json.loads(json.dumps(find(measuring, **figure.measure)))
    about = {
        "value": value,
        "device": figure.device_words(setting),
        "load": round(load, 2),
        "used": sorted({*measuring.used}),
    }
    return Measured(rows(figure, value), {key: about}, figure.goals_of(value))


def rows(figure: Figure, value: Found) -> list[Row]:
    """Each of the paper's numbers beside the one measured here."""
    here = figure.here(value)
    return [
        {
            "figure": figure.key,
            "quantity": fact.quantity,
            "unit": fact.unit,
            "paper": fact.value,
            "here": here.get(fact.quantity),
            "simulated": figure.simulated,
            "source": fact.source,
        }
        for fact in figure.facts
    ]


def combine(results: Results) -> Measured:
    """In the order of the page, without the values that are drawn."""
    whole = joined({each.stored: results[each.stored] for each in FIGURES if each.stored in results})
    about = {key: {"device": each["device"], "load": each["load"]} for key, each in whole.found.items()}
    found = {"measured": about, "elsewhere": {each.key: each.needs for each in ELSEWHERE}}
    return whole._replace(found=found)


def paint(store: Store, folder: Path) -> None:
    """Draw every figure that is stored, also by earlier runs, and write the page, and costs for `vlora simulate`."""
    quick, env = store.folder.name == "quick", environment()
    setting = Setting.here(quick)
    drawn = []
    for figure in FIGURES:
        stored = store.read(figure.stored)
        if stored is None:
            continue
        about, picture = stored["found"][figure.key], f"{figure.paper}-{figure.number}.png"
        value = about["value"]
        figure.picture(value, setting).save(folder / picture)
        used = {name: found for name in (figure.stored, *about["used"]) if (found := store.read(name)) is not None}
        commits = {name: each["origin"]["commit"] for name, each in used.items()}
        others = {name: commit for name, commit in commits.items() if commit != env["commit"]}
        drawn.append(
            {
                "figure": figure,
                "picture": picture,
                "about": about,
                "seconds": stored["spent"]["wall s"],
                "rows": rows(figure, value),
                "goals": figure.goals_of(value),
                "others": others,  # the commits of its measurements, by name, if they are not this one
            }
        )
    if store.read("costs") is not None:
        simulations.write_costs(Measuring(setting, store))
    templates = Environment(
        loader=PackageLoader("benchmarks.paper", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    templates.filters["number"] = lambda value: "n/a" if value is None else plots.short(value)
    templates.filters["commit"] = lambda commit: (commit or "unknown")[:12]
    page = templates.get_template("page.html.j2")
    known = {"papers": PAPERS, "elsewhere": ELSEWHERE, "env": env, "model": setting.model.name, "quick": quick}
    (folder / "index.html").write_text(page.render(drawn=drawn, **known))


BENCH = Bench(
    name="paper",
    cases=cases,
    measure=measure,
    combine=combine,
    paint=paint,
    options=frozenset({"figures"}),
    parts=True,
    same=("machine", "gpu", "versions"),
    jobs=True,
    alone=runs_alone,
    in_all=False,
)
