"""Alert rules and dashboard use only metrics, labels and values that /metrics has."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.files import ROOT, RULES, dashboard
from tests.server.api import running_api
from vlora.config import Token
from vlora.server.metrics import MAX_ADAPTERS, MAX_TENANTS, Families, Metrics, camera_families, cluster_families
from vlora.types.camera import CameraHealth, CameraStatus
from vlora.types.replicas import SERVING, ClusterStatus, ReplicaStatus

OF_PROMETHEUS = {"instance", "job"}  # labels that a scrape adds to every series
OPEN = {"adapter", "camera", "replica", "tenant", *OF_PROMETHEUS}  # labels with values set by the operator
SELECTOR = re.compile(r"\b(?P<name>(?:vlora_\w+|up))(?:\{(?P<matchers>[^}]*)\})?")
MATCHER = re.compile(r'(?P<label>\w+)\s*(?:=~|!~|!=|=)\s*"(?P<value>[^"]*)"')
BY = re.compile(r"\bby\s*\((?P<labels>[^)]*)\)")

Series = dict[str, dict[str, set[str]]]


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of every rule, panel and variable."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"]


def with_replicas() -> CollectorRegistry:
    """The metrics that a server with replicas and cameras also has."""
    replica = ReplicaStatus(name="replica-0", state=SERVING, cause="", num_requests=1)
    status = ClusterStatus(replicas=(replica,), num_waiting=0, num_deaths=0, num_resubmitted=0, num_moves=0)
    registry = CollectorRegistry()
    registry.register(Families(lambda: cluster_families(status)))
    gate = CameraStatus(name="gate", source="0", tasks=(), state="running", health=CameraHealth(age_s=0.1))
    registry.register(Families(lambda: [each for each in camera_families((gate,)) if each.name != "vlora_cameras"]))
    return registry


@pytest.fixture(scope="module")
def series() -> Series:
    """The labels of each sample, and the values of each label, in the metrics of a server after one answer."""
    secret = "0123456789abcdef"
    with running_api(tokens=(Token(name="cameras", secret=secret),)) as api:
        caller = api._replace(token=secret)
        assert caller.chat("say:four")[0] == 200
        text = caller.call("GET", "/metrics")[1]
    text += generate_latest(with_replicas()).decode()
    found: Series = {"up": {}}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def problems(expression: str, series: Series) -> list[str]:
    """The parts of an expression that no server provides."""
    found = []
    grouped = set(OF_PROMETHEUS)
    for selector in SELECTOR.finditer(expression):
        labels = series.get(selector["name"])
        if labels is None:
            found.append(f"no metric {selector['name']}")
            continue
        grouped |= set(labels)
        for matcher in MATCHER.finditer(selector["matchers"] or ""):
            if matcher["label"] not in labels.keys() | OF_PROMETHEUS:
                found.append(f"{selector['name']} has no label {matcher['label']}")
            elif matcher["label"] not in OPEN:
                unknown = set(matcher["value"].split("|")) - labels[matcher["label"]]
                found += [f"{selector['name']} has no {matcher['label']} {value}" for value in sorted(unknown)]
    for by in BY.finditer(expression):
        found += [f"no label {label}" for label in re.split(r"\s*,\s*", by["labels"].strip()) if label not in grouped]
    return found


def test_expressions_are_promql() -> None:
    promql_parser = pytest.importorskip("promql_parser")
    for where, text in expressions():
        # Variables of Grafana are no PromQL.
        known = re.sub(r"label_values\((.*), \w+\)", r"\1", text.replace("$__rate_interval", "5m"))
        try:
            promql_parser.parse(known)
        except ValueError as error:
            pytest.fail(f"{where}: {known}: {error}")
    with pytest.raises(ValueError):
        promql_parser.parse("sum by (state (vlora_replicas)")


def test_expressions_use_existing_metrics_and_labels(series: Series) -> None:
    found_expressions = list(expressions())
    assert len(found_expressions) > 40
    assert [(where, found) for where, text in found_expressions if (found := problems(text, series))] == []
    for expression, problem in (
        ("rate(vlora_requests[5m])", "no metric vlora_requests"),
        ('vlora_requests_total{outcom="ok"}', "vlora_requests_total has no label outcom"),
        ('vlora_requests_total{outcome=~"ok|fine"}', "vlora_requests_total has no outcome fine"),
        ("sum by (tenant) (vlora_requests_total)", "no label tenant"),
    ):
        assert problems(expression, series) == [problem]


def test_legends_and_annotations_use_labels_of_the_expression() -> None:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                kept = BY.search(target["expr"])
                assert label == "instance" if kept is None else label in kept["labels"], panel["title"]
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            for label in re.findall(r"\$labels\.(\w+)", str(rule["annotations"])):
                kept = BY.search(rule["expr"])
                assert label in OF_PROMETHEUS if kept is None else label in kept["labels"], rule["alert"]


def test_the_guide_states_the_number_of_series_and_every_alert() -> None:
    lines = Metrics().render(None).decode().splitlines()
    per_adapter = round(sum('adapter="base"' in line for line in lines), -1)
    guide = (ROOT / "docs" / "deployment.md").read_text()
    assert f"at most {MAX_ADAPTERS} adapters by name and {MAX_TENANTS} tenants" in guide
    assert f"about {per_adapter} series per adapter" in guide
    alerts = [rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    listed = re.findall(r"^\| `(VLora\w+)` \|", guide, re.MULTILINE)
    assert listed == alerts
