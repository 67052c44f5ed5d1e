"""The files for replicas on Ray agree with `vlora serve` and with each other."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from tests.deploy.files import DEPLOY, DOCKERFILE, UNIT
from vlora.cli import cli
from vlora.config import ServerConfig

MANIFEST = DEPLOY / "kubernetes" / "cluster.yaml"


def documents() -> dict[tuple[str, str], Any]:
    """Kubernetes objects by kind and name."""
    found = list(yaml.safe_load_all(MANIFEST.read_text()))
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


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


def served() -> dict[str, Any]:
    """The parameters of the front end."""
    command, (script,) = only_container("front end")["command"], only_container("front end")["args"]
    assert command == ["/bin/bash", "-c"]
    _, _, serve = script.partition("exec vlora ")
    return parsed(shlex.split(serve))


def test_commands_are_accepted_by_the_command_line() -> None:
    assert served()["ray"] == "auto"
    rules = (DEPLOY / "prometheus" / "vlora.rules.yml").read_text()
    for line in re.findall(r"`vlora (cluster [^`]*)`", rules):
        assert parsed(shlex.split(line.replace(" N", " 2"))) is not None
    for words in (["cluster", "up", "f"], ["serve", "--cluster", "f"]):
        with pytest.raises(click.UsageError):
            parsed(words)


def test_pods_have_room_for_the_replicas() -> None:
    cluster, found = documents()["RayCluster", "vlora-cluster"]["spec"], served()
    (workers,) = cluster["workerGroupSpecs"]
    cores = int(workers["rayStartParams"]["num-cpus"])
    assert str(cores) == only_container("worker")["resources"]["limits"]["cpu"] and cores >= found["replica_cpus"]
    each = cores // int(found["replica_cpus"])
    least, most = map(int, found["replicas"].split(":"))
    assert workers["minReplicas"] * each >= least and workers["maxReplicas"] * each >= most
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    (script,) = only_container("front end")["args"]
    assert "--num-cpus=0" in script and "--address=vlora-cluster-head-svc:6379" in script
    head, worker = only_container("head"), only_container("worker")
    assert {head[f"{kind}Probe"]["tcpSocket"]["port"] for kind in ("readiness", "liveness")} == {"gcs"}
    ports = {worker[f"{kind}Probe"]["tcpSocket"]["port"] for kind in ("readiness", "liveness")}
    assert {str(port) for port in ports} == {workers["rayStartParams"]["node-manager-port"]}


def test_ray_keeps_its_state_and_its_token() -> None:
    cluster = documents()["RayCluster", "vlora-cluster"]["spec"]
    assert cluster["gcsFaultToleranceOptions"]["redisAddress"]
    given = {each["name"]: each for each in only_container("front end")["env"]}
    assert given["RAY_gcs_rpc_server_reconnect_timeout_s"]["value"] == "600"
    secret = given["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": secret["name"]}
    assert "Secret" not in {kind for kind, _ in documents()}
    # A commented build makes their image.
    images = {each["image"] for pod in pods().values() for each in pod["containers"]}
    assert images == {"vlora:cluster"} and "EXTRAS=cluster,grammar -t vlora:cluster" in DOCKERFILE.read_text()


def test_the_network_policies_open_the_front_end_only() -> None:
    (rule,) = documents()["NetworkPolicy", "vlora-cluster"]["spec"]["ingress"]
    everywhere = rule["from"][0]["podSelector"]["matchLabels"]
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


def test_validators_accept_all_but_kuberays_own_kind(tmp_path: Path) -> None:
    if shutil.which("kubernetes-validate") is None:
        pytest.skip("kubernetes-validate is not installed")
    others = [each for (kind, _), each in documents().items() if kind != "RayCluster"]
    (file := tmp_path / "others.yaml").write_text(yaml.safe_dump_all(others))
    done = subprocess.run(["kubernetes-validate", file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_unit_can_use_a_ray_of_its_user() -> None:
    lines = UNIT.with_name("ray.conf").read_text().splitlines()
    [variables] = [line.removeprefix("Environment=") for line in lines if line.startswith("Environment=")]
    names = [each.partition("=")[0].removeprefix("VLORA_SERVE_").lower() for each in variables.split()]
    assert {*names} <= {*parsed(["serve"])} and "PrivateTmp=no" in lines
