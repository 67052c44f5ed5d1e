"""Plots of `vlora bench fusion` that correspond to figures 5 and 15 of V-LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from fusion.bench.domains import FAMILIES
from fusion.bench.measuring import ALONE, DEFAULT


def draw(
    tables: Sequence[dict[str, Any]],
    curves: Sequence[dict[str, Any]],
    parts: Sequence[dict[str, Any]],
    folder: Path,
) -> None:
    """Write capacity.png (figure 5), small_models.png (figure 15), methods.png (adapters and cost of each method) and
    growth.png (cost by the number of domains; parts: of the suite). Bars: one standard deviation over seeds."""
    folder.mkdir(parents=True, exist_ok=True)
    _capacity(curves, folder / "capacity.png")
    _small_models(tables, folder / "small_models.png")
    _methods(tables, folder / "methods.png")
    _growth(parts, folder / "growth.png")


def _capacity(curves: Sequence[dict[str, Any]], path: Path) -> None:
    """Left: the mean score of all fused domains. Right: the mean difference to each domain's score alone, so adding a
    harder domain does not look like forgetting. It is not a ratio, since some domains score 0 alone."""
    pyplot = _pyplot()
    figure, (scores, gains) = pyplot.subplots(1, 2, figsize=(10, 4))
    for family in FAMILIES:
        own = [found for found in curves if found["family"] == family]
        counts = range(1, len(own[0]["fused"]) + 1)
        scored = [[mean(found["fused"][n - 1].values()) for found in own] for n in counts]
        gained = [[_gained(found, n) for found in own] for n in counts]
        for panel, points in ((scores, scored), (gains, gained)):
            spread = list(map(pstdev, points))
            panel.errorbar(counts, list(map(mean, points)), spread, marker="o", capsize=3, label=family)
    scores.set(xlabel="domains in one adapter", ylabel="test score, mean of its domains")
    gains.set(xlabel="domains in one adapter", ylabel="test score less that of an adapter alone")
    for panel in (scores, gains):
        panel.grid(alpha=0.3)
        panel.xaxis.get_major_locator().set_params(integer=True)
    scores.legend(fontsize=8)
    _save(figure, path)


def _gained(found: dict[str, Any], number: int) -> float:
    return mean(value - found["alone"][name] for name, value in found["fused"][number - 1].items())


def _small_models(tables: Sequence[dict[str, Any]], path: Path) -> None:
    """Scores of each domain's small model, single-domain adapter and packed adapter on the same test data."""
    pyplot = _pyplot()
    names = list(tables[0]["thresholds"])
    bars = {
        "small model": [[found["small models"][name]["test"] for found in tables] for name in names],
        "adapter of its own": [_tested(tables, ALONE, name) for name in names],
        "packed adapter": [_tested(tables, DEFAULT, name) for name in names],
    }
    figure, panel = pyplot.subplots(figsize=(10, 4))
    for place, (label, points) in enumerate(bars.items()):
        at = [number + 0.27 * (place - 1) for number in range(len(names))]
        panel.bar(at, list(map(mean, points)), 0.25, yerr=list(map(pstdev, points)), capsize=3, label=label)
    panel.set_xticks(range(len(names)), names, rotation=30)
    panel.set(ylabel="test score", ylim=(0, 1.12))
    panel.legend(fontsize=8, ncols=3, loc="upper center")
    panel.grid(alpha=0.3, axis="y")
    _save(figure, path)


def _methods(tables: Sequence[dict[str, Any]], path: Path) -> None:
    """Adapters of each method, and its trainings per domain."""
    pyplot = _pyplot()
    names = [name for name in tables[0]["methods"] if all(name in found["methods"] for found in tables)]
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for panel, label, value in (
        (panels[0], "adapters", lambda found, name: found["methods"][name]["adapters"]),
        (
            panels[1],
            "trainings per domain",
            lambda found, name: found["methods"][name]["trainings"] / len(found["thresholds"]),
        ),
    ):
        points = [[value(found, name) for found in tables] for name in names]
        panel.barh(names, list(map(mean, points)), xerr=list(map(pstdev, points)), capsize=3)
        panel.set(xlabel=label)
        panel.grid(alpha=0.3, axis="x")
    panels[0].invert_yaxis()
    _save(figure, path)


def _growth(parts: Sequence[dict[str, Any]], path: Path) -> None:
    """Seconds of the default's trainings and of one adapter per domain, with the number of adapters of the former."""
    pyplot = _pyplot()
    points = [(len(part["domains"]), part["training s"], part["alone s"], part["adapters"]) for part in parts]
    numbers, seconds, of_alone, adapters = zip(*points, strict=True)
    figure, panel = pyplot.subplots(figsize=(6, 4))
    panel.plot(numbers, seconds, marker="o", label="packed by default")
    panel.plot(numbers, of_alone, marker="o", label="one adapter per domain")
    for number, at, count in zip(numbers, seconds, adapters, strict=True):
        panel.annotate(
            f"{count} adapter{'s' * (count > 1)}", (number, at), (-4, 6), textcoords="offset points", ha="right"
        )
    panel.set(xlabel="domains", ylabel="seconds of training", xlim=(0, None), ylim=(0, 1.1 * max(*seconds, *of_alone)))
    panel.set_xticks(numbers)
    panel.legend(fontsize=8)
    panel.grid(alpha=0.3)
    _save(figure, path)


def _tested(tables: Sequence[dict[str, Any]], method: str, name: str) -> list[float]:
    return [found["methods"][method]["test"][name] for found in tables]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)
