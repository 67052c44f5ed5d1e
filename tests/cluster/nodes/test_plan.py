"""The plan of a cluster of several machines: every error has its line and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlora.cluster.door import Address
from vlora.cluster.nodes.head import facts_of
from vlora.cluster.nodes.plan import absolute_adapters, read_cluster_plan
from vlora.errors import BadConfig, BadPlan

PLAN = """\
head: 10.0.0.1:18870
token_file: token
ray_ports: 21000-21199
door_ports: 21200-21299
model: embedded
adapters: {signs: adapters/signs}
replicas: {number: 2, most: 4, cpus: 8, gpus: 1, memory_gib: 16.5}
"""


def written(tmp_path: Path, text: str) -> Path:
    (file := tmp_path / "cluster.yaml").write_text(text)
    return file


def test_a_plan_is_read_with_paths_relative_to_its_folder(tmp_path: Path) -> None:
    plan = read_cluster_plan(written(tmp_path, PLAN))
    assert plan.head == Address("10.0.0.1", 18870) and plan.token_file == tmp_path / "token"
    assert (str(plan.ray_ports), str(plan.door_ports)) == ("21000-21199", "21200-21299")
    assert absolute_adapters(plan) == {"signs": str(tmp_path / "adapters" / "signs")}
    found = plan.replicas
    assert (found.number, found.limit, found.cpus, found.gpus, found.memory_gib) == (2, 4, 8, 1, 16.5)


def test_a_short_plan_has_defaults(tmp_path: Path) -> None:
    text = "head: localhost:1\ntoken_file: t\nreplicas: {number: 3}\n"
    plan = read_cluster_plan(written(tmp_path, text))
    assert (plan.model, plan.adapters, plan.replicas.limit, plan.replicas.cpus) == ("embedded", {}, 3, 1)
    other = tmp_path / "other"
    other.mkdir()
    assert read_cluster_plan(written(other, text)).digest == plan.digest  # whatever the token file's place
    assert read_cluster_plan(written(other, text.replace("3", "4"))).digest != plan.digest


def test_adapters_of_the_plan_may_be_sent(tmp_path: Path) -> None:
    """Then they need not be on the head's machine, and machines that join are not asked for them."""
    plan = read_cluster_plan(written(tmp_path, PLAN))
    assert not plan.ship_adapters
    with pytest.raises(BadConfig, match=r"adapter 'signs' of the plan: .*/adapters/signs has no adapter_config.json"):
        facts_of(plan, "embedded", "10.0.0.1", lambda model: model)
    sent = read_cluster_plan(written(tmp_path, PLAN + "ship_adapters: true\nshipped_gib: 2\n"))
    assert sent.ship_adapters and sent.shipping == (2 << 30, 2 << 30) and sent.digest != plan.digest
    assert plan.shipping == (4 << 30, 20 << 30)
    assert facts_of(sent, "embedded", "10.0.0.1", lambda model: model).adapters == {}


@pytest.mark.parametrize(
    ("before", "after", "line", "field", "message"),
    [
        ("number: 2", "number: 0", 7, "replicas.number", "must be at least 1"),
        ("number: 2", "number: true", 7, "replicas.number", "must be a number"),
        ("most: 4", "most: 1", 7, "replicas", "`most` is 1, and `number` 2"),
        ("cpus: 8", "cpus: 0", 7, "replicas.cpus", "must be at least 1"),
        ("cpus: 8", "cores: 8", 7, "replicas.cores", "is not a known field"),
        ("10.0.0.1:18870", "10.0.0.1", 1, "head", "is '10.0.0.1'; write HOST:PORT"),
        ("10.0.0.1:18870", "10.0.0.1:99999", 1, "head", "with a port from 1 to 65535"),
        ("10.0.0.1:18870", "0.0.0.0:18870", 1, "head", "is '0.0.0.0:18870', which other machines cannot reach"),
        ("21000-21199", "21000", 3, "ray_ports", "write FIRST-LAST"),
        ("21000-21199", "21199-21000", 3, "ray_ports", "in ascending order"),
        ("21000-21199", "80-21000", 3, "ray_ports", "ports from 1024"),
        ("21000-21199", "21000-21010", 1, "plan", "`ray_ports` are 11 ports; 4 replicas need 84"),
        ("21200-21299", "21100-21299", 1, "plan", "overlap"),
        ("10.0.0.1:18870", "10.0.0.1:21250", 1, "plan", "one of `door_ports`"),
        ("token_file: token\n", "", 1, "token_file", "missing"),
        ("adapters:", "ship_adapters: 1\nadapters:", 6, "ship_adapters", "must be true or false"),
        ("adapters:", "shipped_gib: 0\nadapters:", 6, "shipped_gib", "must be above 0"),
        (
            "adapters:",
            "shipped_adapter_gib: 30\nadapters:",
            1,
            "plan",
            "is 30, above the limit `shipped_gib` of all, 20",
        ),
    ],
)
def test_an_invalid_plan_is_refused_with_line_and_field(
    before: str, after: str, line: int, field: str, message: str, tmp_path: Path
) -> None:
    file = written(tmp_path, PLAN.replace(before, after))
    with pytest.raises(BadPlan) as caught:
        read_cluster_plan(file)
    assert str(caught.value).startswith(f"{file}, line {line}, field `{field}`: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)
