"""The report as a page: packing over time (V-LoRA figure 10), and accuracy by number of domains (figure 5) as SVG."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from fusion.report.examples import Example
from fusion.report.report import FusionReport, StepReport

# Colour-blind safe: Okabe and Ito's palette, and two of Tol's colours.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#882255", "#44aa99", "#666666", "#e69f00")
_WIDTH, _HEIGHT, _LEFT = 640, 320, 48  # of the chart in report.html.j2


def lanes_of(steps: Sequence[StepReport], adapters: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """For each training, the index of the adapter that it went into or was rolled back from. For domains that did not
    fit when trained jointly: the adapter that holds most of them."""

    def lane(step: StepReport) -> int:
        names = set(step.into or step.domains)
        return max(range(len(adapters)), key=lambda number: len(names & set(adapters[number])))

    return tuple(map(lane, steps))


def outcome_of(step: StepReport, thresholds: Mapping[str, float]) -> tuple[str, tuple[str, ...]]:
    """In words, whether a training was kept, and the domains with bounds below their thresholds."""
    low = tuple(name for name, bound in step.bounds.items() if bound < thresholds[name])
    if not step.kept:
        return "rolled back", low
    return "partly kept" if step.removed else "missed" if low else "kept", low


class CapacityPoint(NamedTuple):
    """A domain's value in an adapter with this number of domains."""

    domains: int
    value: float
    kept: bool


def capacity_points(steps: Sequence[StepReport]) -> dict[str, list[CapacityPoint]]:
    points: dict[str, list[CapacityPoint]] = {}
    for step in steps:
        for name, value in step.values.items():
            kept = step.kept and name not in step.removed
            points.setdefault(name, []).append(CapacityPoint(len(step.into) + len(step.domains), value, kept))
    return points


def curves_of(names: Iterable[str]) -> tuple[tuple[str, str, str], ...]:
    """For each domain of the capacity chart its name, colour and dashes; the colours repeat with dashes."""
    return tuple(
        (name, COLORS[place % len(COLORS)], "6 4" if place // len(COLORS) % 2 else "")
        for place, name in enumerate(names)
    )


class ChartSize(NamedTuple):
    """The capacity chart's axes and their places in the SVG. most: domains in an adapter. floor: the lowest value."""

    most: int
    floor: float

    def x_of(self, count: int) -> float:
        return round(_LEFT + (_WIDTH - _LEFT) * (count - 0.7) / max(1.0, self.most - 0.4), 1)

    def y_of(self, value: float) -> float:
        return round(16 + (_HEIGHT - 16) * (1 - value) / (1 - self.floor), 1)


def chart_size(points: Mapping[str, Sequence[CapacityPoint]]) -> ChartSize:
    everything = [point for own in points.values() for point in own]
    floor = max(0.0, int(min((point.value for point in everything), default=0.0) * 10 - 0.5) / 10)
    return ChartSize(max((point.domains for point in everything), default=1), floor)


def ticks_of(total: float) -> list[float]:
    """At most about eight round numbers from 0 to a length."""
    step = next(size * 10.0**power for power in range(-3, 9) for size in (1, 2, 5) if total / (size * 10.0**power) <= 8)
    return [place * step for place in range(int(total / step) + 1)]


def page(report: FusionReport, examples: Mapping[str, Sequence[Example]]) -> str:
    """Render the page; its links to adapters are relative to its folder. examples: by domain."""
    environment = Environment(
        loader=PackageLoader("fusion.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    thresholds = {domain.name: domain.threshold for domain in report.domains}
    points = capacity_points(report.timeline)
    total = max((step.begin + step.seconds for step in report.timeline), default=1.0)
    return environment.get_template("report.html.j2").render(
        report=report,
        rules={domain["name"]: _rule(domain["threshold"]) for domain in report.plan["domains"]},
        lanes=lanes_of(report.timeline, [adapter.domains for adapter in report.adapters]),
        outcome_of=functools.partial(outcome_of, thresholds=thresholds),
        total=total,
        ticks=ticks_of(total),
        lowest=min((value for step in report.timeline for value in step.values.values()), default=0.0),
        points=points,
        chart=chart_size(points),
        curves=curves_of(points),
        examples=examples,
    )


def _rule(threshold: object) -> str:
    if not isinstance(threshold, Mapping):
        return "given"
    rule = str(threshold["relative_to"])
    return f"{rule} minus {threshold['minus']:g}" if threshold["minus"] else rule
