"""The report's charts as SVG: packing over time (V-LoRA figure 10), and accuracy by number of domains (figure 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from xml.etree import ElementTree

from markupsafe import Markup

from fusion.report.report import StepReport

# Colour-blind safe: Okabe and Ito's palette, and two of Tol's colours. They repeat after ten domains.
COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#b8860b",
    "#56b4e9",
    "#882255",
    "#44aa99",
    "#666666",
    "#e69f00",
)
_WIDTH = 960
_LEFT = 96
_LANE = 62
_TOP = 8
_LETTER = 6.6  # approximate width of a letter in pixels


def lanes_of(steps: Sequence[StepReport], adapters: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """For each training, the index of the adapter that it went into or was rolled back from. For domains that did not
    fit when trained jointly: the adapter that holds most of them."""

    def lane(step: StepReport) -> int:
        names = set(step.into or step.domains)
        return max(range(len(adapters)), key=lambda number: len(names & set(adapters[number])))

    return tuple(map(lane, steps))


def timeline_chart(
    steps: Sequence[StepReport], adapters: Sequence[Sequence[str]], thresholds: Mapping[str, float]
) -> Markup:
    """A lane for each adapter, a block for each training, over seconds of training time."""
    lanes = lanes_of(steps, adapters)
    bottom = _TOP + _LANE * len(adapters)
    svg = _svg(bottom + 40, "Packing step by step")
    total = steps[-1].begin + steps[-1].seconds

    def x_of(seconds: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 10) * seconds / total

    for lane in range(len(adapters)):
        y = _TOP + lane * _LANE
        _add(svg, "line", "grid", x1=_LEFT, x2=_WIDTH - 10, y1=y + _LANE - 8, y2=y + _LANE - 8)
        _text(svg, 0, y + 28, f"adapter {lane + 1}", "name")
    for number, (step, lane) in enumerate(zip(steps, lanes, strict=True), 1):
        left, right, y = x_of(step.begin), x_of(step.begin + step.seconds), _TOP + lane * _LANE
        outcome = outcome_of(step)
        group = _add(svg, "g", outcome.replace(" ", "-"))
        values = ", ".join(f"{name} {value:.3f}" for name, value in step.values.items())
        ElementTree.SubElement(
            group, "title"
        ).text = f"{number}. {', '.join(step.domains)}: {values}; {step.seconds:.1f} s"
        _add(group, "rect", "block", x=left + 1, y=y, width=max(2.0, right - left - 2), height=_LANE - 16, rx=4)
        low = [name for name, bound in step.bounds.items() if bound < thresholds[name]]
        lines = (
            f"{number}. {', '.join(step.domains)}",
            f"{outcome}: {', '.join(low)} too low" if low else outcome,
        )
        for place, line in enumerate(lines):
            room = int((right - left - 10) / _LETTER)
            shown = line if len(line) <= room else f"{line[: room - 1]}…" if room > 3 else ""
            _text(group, left + 7, y + 19 + 17 * place, shown, "first" if place == 0 else "second")
    for seconds in _ticks(total):
        _text(svg, x_of(seconds), bottom + 16, f"{seconds:g} s", "tick")
    return _markup(svg)


def outcome_of(step: StepReport) -> str:
    """In words, whether a training was kept."""
    if not step.kept:
        return "rolled back"
    return "partly kept" if step.removed else "kept"


class CapacityPoint(NamedTuple):
    """A domain's value in an adapter with this number of domains."""

    domains: int
    value: float
    kept: bool


def capacity_points(steps: Sequence[StepReport]) -> dict[str, list[CapacityPoint]]:
    """Points by domain, in the order of the steps."""
    points: dict[str, list[CapacityPoint]] = {}
    for step in steps:
        for name, value in step.values.items():
            kept = step.kept and name not in step.removed
            points.setdefault(name, []).append(CapacityPoint(len(step.into) + len(step.domains), value, kept))
    return points


def capacity_chart(steps: Sequence[StepReport]) -> Markup:
    """Each domain's value against the number of domains in its adapter; open circles were rolled back."""
    points = capacity_points(steps)
    height, top = max(340, 22 * len(points) + 20), 16
    svg = _svg(height + 48, "Accuracy against domains in the adapter")
    everything = [point for own in points.values() for point in own]
    most = max(point.domains for point in everything)
    floor = max(0.0, int(min(point.value for point in everything) * 10 - 0.5) / 10)

    def x_of(count: float) -> float:
        return _LEFT / 2 + (_WIDTH - _LEFT / 2 - 170) * (count - 0.7) / max(1.0, most - 0.4)

    def y_of(value: float) -> float:
        return top + (height - top) * (1 - value) / (1 - floor)

    for tenth in range(round(floor * 10), 11):
        y = y_of(tenth / 10)
        _add(svg, "line", "grid", x1=_LEFT / 2, x2=_WIDTH - 150, y1=y, y2=y)
        _text(svg, 0, y + 4, f"{tenth / 10:.1f}", "tick")
    for count in range(1, most + 1):
        _text(svg, x_of(count) - 4, height + 20, str(count), "tick")
    _text(svg, _LEFT / 2, height + 42, "domains in the adapter", "tick")
    for place, (name, own) in enumerate(points.items()):
        color = COLORS[place % len(COLORS)]
        kept = [point for point in own if point.kept]
        if len(kept) > 1:
            path = " ".join(f"{x_of(p.domains):.1f},{y_of(p.value):.1f}" for p in kept)
            _add(svg, "polyline", "curve", points=path, stroke=color)
        for point in own:
            fill = color if point.kept else "none"
            dot = _add(svg, "circle", "dot", cx=x_of(point.domains), cy=y_of(point.value), r=4, stroke=color, fill=fill)
            text = f"{name}: {point.value:.3f} among {point.domains}{'' if point.kept else ', rolled back'}"
            ElementTree.SubElement(dot, "title").text = text
        _add(svg, "circle", "dot", cx=_WIDTH - 132, cy=top + 14 + 22 * place, r=5, stroke=color, fill=color)
        _text(svg, _WIDTH - 120, top + 19 + 22 * place, name, "name")
    return _markup(svg)


def _ticks(total: float) -> list[float]:
    """At most about eight round numbers from 0 to a length."""
    step = next(size * 10.0**power for power in range(-3, 9) for size in (1, 2, 5) if total / (size * 10.0**power) <= 8)
    return [place * step for place in range(int(total / step) + 1)]


def _svg(height: float, title: str) -> ElementTree.Element:
    return ElementTree.Element("svg", {"viewBox": f"0 0 {_WIDTH} {height:g}", "role": "img", "aria-label": title})


def _add(parent: ElementTree.Element, tag: str, kind: str, **attributes: float | str) -> ElementTree.Element:
    text = {name: value if isinstance(value, str) else f"{value:.1f}" for name, value in attributes.items()}
    return ElementTree.SubElement(parent, tag, {"class": kind, **text})


def _text(parent: ElementTree.Element, x: float, y: float, words: str, kind: str) -> None:
    _add(parent, "text", kind, x=x, y=y).text = words


def _markup(svg: ElementTree.Element) -> Markup:
    return Markup(ElementTree.tostring(svg, encoding="unicode"))  # ElementTree escapes all text
