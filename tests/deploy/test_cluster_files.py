"""The files for several machines agree with `vlora cluster`: plans, commands, ports. The script is run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tests.deploy.files import DEPLOY, DOCKERFILE, UNIT
from vlora.cli import cli
from vlora.cli.cluster import REPLACED
from vlora.cluster.nodes.plan import ClusterPlan, read_cluster_plan
from vlora.config import ServerConfig

MANIFEST = DEPLOY / "kubernetes" / "cluster.yaml"
SCRIPT = DEPLOY / "cluster" / "ssh.sh"
PLAN = DEPLOY / "cluster" / "cluster.yaml"


def documents() -> dict[tuple[str, str], Any]:
    """Kubernetes objects by kind and name."""
    found = list(yaml.safe_load_all(MANIFEST.read_text()))
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def manifest_plan(tmp_path: Path) -> ClusterPlan:
    (file := tmp_path / "cluster.yaml").write_text(documents()["ConfigMap", "vlora-cluster"]["data"]["cluster.yaml"])
    return read_cluster_plan(file)


def pods() -> dict[str, Any]:
    """The specifications of pods: head, worker, front end."""
    cluster = documents()["RayCluster", "vlora-cluster"]["spec"]
    (workers,) = cluster["workerGroupSpecs"]
    return {
        "head": cluster["headGroupSpec"]["template"]["spec"],
        "worker": workers["template"]["spec"],
        "front end": documents()["Deployment", "vlora-cluster-front-end"]["spec"]["template"]["spec"],
    }


def only_container(pod: str) -> Any:
    (container,) = pods()[pod]["containers"]
    return container


def parsed(words: list[str]) -> dict[str, Any]:
    """The parameters of a `vlora` command line. Raises click.UsageError for unknown commands and options."""
    command: click.Command = cli
    context = click.Context(cli, info_name="vlora")
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(context, name)
        if found is None:
            raise click.UsageError(f"no command {name}")
        command = found
    return command.make_context(command.name, words).params


def commands() -> Iterator[tuple[str, list[str]]]:
    """(where, words after `vlora`) of every command in the files."""
    for name in ("vlora-head", "vlora-node"):
        (line,) = re.findall(
            r"^ExecStart=/opt/vlora/bin/vlora (.*)$", UNIT.with_name(f"{name}.service").read_text(), re.M
        )
        yield name, shlex.split(line)
    for pod in pods():
        container = only_container(pod)
        words = container.get("command", ["vlora", *container.get("args", [])])
        assert words[0] == "vlora"
        yield pod, words[1:]
    for line in re.findall(r'"?\$VLORA"? ((?:cluster|serve).*)$', SCRIPT.read_text(), re.M):
        yield "script", shlex.split(line)
    for line in re.findall(r"`vlora (cluster [^`]*)`", (DEPLOY / "prometheus" / "vlora.rules.yml").read_text()):
        yield "rules", shlex.split(line.replace(" N", " 2")) if " N" in line else shlex.split(line)


def test_commands_are_accepted_by_the_command_line() -> None:
    found = [(where, words) for where, words in commands() if words[-1] != "join" or where != "rules"]
    assert len(found) >= 10 and all(parsed(words) is not None for _, words in found)
    for words in (["cluster", "ups", "f"], ["cluster", "up", "f", "--cpu", "2"], ["cluster", "join", "1.2.3.4:5"]):
        with pytest.raises(click.UsageError):
            parsed(words)


def test_the_plans_are_valid_and_used(tmp_path: Path) -> None:
    plan = read_cluster_plan(PLAN)
    assert (plan.head.port, str(plan.token_file)) == (18870, "/etc/vlora/cluster-token")
    commented = re.sub(r"^( *)#(?=\w+: )", r"\1", PLAN.read_text(), flags=re.M)
    assert commented.count("#") < PLAN.read_text().count("#")
    (file := tmp_path / "all.yaml").write_text(commented)
    assert read_cluster_plan(file).adapters and read_cluster_plan(file).replicas.gpus == 1
    assert manifest_plan(tmp_path).replicas.limit == 4
    # The script and the units use its files.
    assert f"PORT:-{plan.head.port}" in SCRIPT.read_text() and f"TOKEN:-{plan.token_file}" in SCRIPT.read_text()
    assert str(plan.token_file) in UNIT.with_name("vlora-node.service").read_text()


def test_units_that_wait_for_a_head_are_started_again() -> None:
    """Exit code 2 is that of an address without a head, too."""
    for name in ("vlora-node.service", "cluster.conf"):
        lines = UNIT.with_name(name).read_text().splitlines()
        assert "StartLimitIntervalSec=0" in lines and "RestartPreventExitStatus=2" not in lines
    assert "RestartPreventExitStatus=" in lines and "RestartPreventExitStatus=2" in UNIT.read_text()
    assert f"Environment=VLORA_SERVE_CLUSTER=/etc/vlora/{PLAN.name}" in lines
    given = {line.partition("=")[0] for line in UNIT.with_name("vlora.env").read_text().splitlines()}
    decided = given & {f"VLORA_SERVE_{name.upper()}" for name in REPLACED}
    assert decided and f"UnsetEnvironment={' '.join(sorted(decided))}" in lines


def test_pods_agree_with_their_plan(tmp_path: Path) -> None:
    plan = manifest_plan(tmp_path)
    cluster = documents()["RayCluster", "vlora-cluster"]
    assert plan.head.host == f"{cluster['metadata']['name']}-head-svc"
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["port"] == str(plan.ray_ports.first)
    assert f"{plan.head}" in only_container("worker")["command"]
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    container = only_container("worker")
    cores = int(container["command"][container["command"].index("--cpus") + 1])
    assert str(cores) == container["resources"]["limits"]["cpu"] and cores >= plan.replicas.cpus
    assert workers["replicas"] * (cores // plan.replicas.cpus) >= plan.replicas.number
    assert workers["maxReplicas"] * (cores // plan.replicas.cpus) >= plan.replicas.limit
    head, worker = only_container("head"), only_container("worker")
    probes = {probe["tcpSocket"]["port"] for each in (head, worker) for key, probe in each.items() if "Probe" in key}
    # Not the head's own port: a connection without a proof is logged there.
    assert probes == {plan.ray_ports.first, plan.ray_ports.first + 1}


def test_pods_get_the_token_for_their_user_only(tmp_path: Path) -> None:
    token = str(manifest_plan(tmp_path).token_file)
    for pod in pods().values():
        (init,), (container,) = pod["initContainers"], pod["containers"]
        assert init["command"][:3] == ["install", "-m", "600"] and init["command"][-1] == token
        (secret,) = [each for each in pod["volumes"] if "secret" in each]
        mounted = {each["name"]: each["mountPath"] for each in init["volumeMounts"]}
        assert init["command"][3] == f"{mounted[secret['name']]}/token"
        assert secret["name"] not in {each["name"] for each in container["volumeMounts"]}
        names = {each["name"] for each in pod["volumes"]}
        assert {each["name"] for each in (*init["volumeMounts"], *container["volumeMounts"])} == names
    assert "Secret" not in {kind for kind, _ in documents()}
    # A commented build makes their image.
    images = {each["image"] for pod in pods().values() for each in (*pod["initContainers"], *pod["containers"])}
    assert images == {"vlora:cluster"} and "EXTRAS=cluster,grammar -t vlora:cluster" in DOCKERFILE.read_text()


def test_the_network_policies_open_the_ports_of_the_plan_only(tmp_path: Path) -> None:
    plan = manifest_plan(tmp_path)
    (rule,) = documents()["NetworkPolicy", "vlora-cluster"]["spec"]["ingress"]
    (peers,) = rule["from"]
    everywhere = peers["podSelector"]["matchLabels"]
    opened = {(port["port"], port.get("endPort", port["port"])) for port in rule["ports"]}
    assert opened == {(plan.head.port,) * 2, (plan.ray_ports.first, plan.door_ports.last)}
    assert plan.ray_ports.last + 1 == plan.door_ports.first
    cluster = documents()["RayCluster", "vlora-cluster"]["spec"]
    (workers,) = cluster["workerGroupSpecs"]
    front_end = documents()["Deployment", "vlora-cluster-front-end"]["spec"]["template"]
    for template in (cluster["headGroupSpec"]["template"], workers["template"], front_end):
        assert everywhere.items() <= template["metadata"]["labels"].items()
    (rule,) = documents()["NetworkPolicy", "vlora-cluster-front-end"]["spec"]["ingress"]
    service = {each["port"] for each in documents()["Service", "vlora-cluster-front-end"]["spec"]["ports"]}
    assert {each["port"] for each in rule["ports"]} == service == {8000, ServerConfig.rpyc_port}
    (selector,) = {
        tuple(found.items())
        for found in (
            documents()["NetworkPolicy", "vlora-cluster-front-end"]["spec"]["podSelector"]["matchLabels"],
            documents()["Service", "vlora-cluster-front-end"]["spec"]["selector"],
        )
    }
    assert dict(selector).items() <= front_end["metadata"]["labels"].items()


SSH = """#!/usr/bin/env bash
host=$1; shift
mkdir -p "$ROOT/$host" && cd "$ROOT/$host" && exec bash -c "$*"
"""
SCP = """#!/usr/bin/env bash
target=${*: -1}
mkdir -p "$ROOT/${target%%:*}" && cp "${@: -2:1}" "$ROOT/${target%%:*}/${target#*:}"
"""
VLORA = """#!/usr/bin/env bash
echo "$(basename "$PWD"): $*" >> "$ROOT/commands"
case "$1 $2" in
  "cluster up") echo "other machines join with: vlora cluster join" ;;
  "cluster join") [[ -n ${FAILS-} ]] && { echo "error: no such head"; exit 2; }; echo "10.0.0.2 has joined the head" ;;
  "serve --cluster") echo "ready: rpyc" ;;
esac
"""


def run_script(tmp_path: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run it with machines that are folders."""
    programs = tmp_path / "programs"
    programs.mkdir(exist_ok=True)
    for name, text in (("ssh", SSH), ("scp", SCP), ("vlora", VLORA)):
        (file := programs / name).write_text(text)
        file.chmod(0o755)
    (tmp_path / "token").write_text("the token")
    given = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "ROOT": str(tmp_path),
        "VLORA": str(programs / "vlora"),
        "TOKEN": str(tmp_path / "token"),
        "PAUSE_S": "0.05",
    }
    return subprocess.run([SCRIPT, *args], env=given | environ, capture_output=True, text=True, timeout=60)


def test_the_script_starts_and_ends_a_cluster_in_order(tmp_path: Path) -> None:
    done = run_script(tmp_path, "up", str(PLAN), "one", "two", "three")
    assert done.returncode == 0 and done.stdout.startswith("ready on one"), done.stderr
    assert (tmp_path / "one" / "cluster.yaml").read_text() == PLAN.read_text()
    for host in ("two", "three"):
        token = tmp_path / host / "vlora-cluster-token"
        assert token.read_text() == "the token" and token.stat().st_mode & 0o777 == 0o600
    node = "{0}: cluster join one:18870 --token-file vlora-cluster-token --host {0}"
    up = [
        "one: cluster up cluster.yaml",
        node.format("two"),
        node.format("three"),
        "one: serve --cluster cluster.yaml --http-port 8000",
    ]
    assert (tmp_path / "commands").read_text().splitlines() == up
    done = run_script(tmp_path, "down", str(PLAN), "one", "two", "three")
    assert done.returncode == 0, done.stderr
    down = [f"{host}: cluster down" for host in ("one", "two", "three")]
    assert (tmp_path / "commands").read_text().splitlines() == up + down


def test_the_script_stops_at_the_first_error_and_shows_its_usage(tmp_path: Path) -> None:
    for args in ((), ("up", "plan"), ("restart", "plan", "one")):
        done = run_script(tmp_path, *args)
        assert done.returncode == 2 and "./ssh.sh up" in done.stdout and not (tmp_path / "commands").exists()
    done = run_script(tmp_path, "up", str(PLAN), "one", "two", "three", FAILS="1")
    assert done.returncode == 1 and "error: no such head" in done.stdout
    assert len((tmp_path / "commands").read_text().splitlines()) == 2
