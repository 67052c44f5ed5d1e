"""A fusion report as one self-contained HTML page: embedded pictures, no network access, no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from fusion.report.charts import capacity_chart, lanes_of, timeline_chart
from fusion.report.examples import Example
from fusion.report.report import FusionReport

_PALE, _DEEP = (247, 251, 255), (8, 81, 156)


def page(report: FusionReport, examples: Mapping[str, Sequence[Example]]) -> str:
    """Render the page; its links to adapters are relative to its folder. examples: by domain."""
    environment = Environment(
        loader=PackageLoader("fusion.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    values = [value for step in report.timeline for value in step.values.values()]
    low = min(values, default=0.0)
    thresholds = {domain.name: domain.threshold for domain in report.domains}
    adapters = [adapter.domains for adapter in report.adapters]
    return environment.get_template("report.html.j2").render(
        report=report,
        thresholds=thresholds,
        rules={domain["name"]: _rule(domain["threshold"]) for domain in report.plan["domains"]},
        lanes=lanes_of(report.timeline, adapters),
        timeline=timeline_chart(report.timeline, adapters, thresholds),
        capacity=capacity_chart(report.timeline),
        examples=examples,
        shade=lambda value: shade((value - low) / (1 - low or 1)),
        share=shade,
    )


def shade(share: float) -> str:
    """A cell's style: a background from pale (0) to deep (1), with readable text."""
    mixed = [round(pale + (deep - pale) * min(1.0, max(0.0, share))) for pale, deep in zip(_PALE, _DEEP, strict=True)]
    ink = "#fff" if share > 0.55 else "#1a1d21"
    return f"background:rgb({mixed[0]},{mixed[1]},{mixed[2]});color:{ink}"


def _rule(threshold: object) -> str:
    """The rule that set a threshold."""
    if not isinstance(threshold, Mapping):
        return "given"
    rule = str(threshold["relative_to"])
    return f"{rule} minus {threshold['minus']:g}" if threshold["minus"] else rule
