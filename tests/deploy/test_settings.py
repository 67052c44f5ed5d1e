"""The settings in deploy/ are valid for `vlora serve` and for the validators of the programs that read them."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from tests.deploy.files import (
    DEPLOY,
    DOCKERFILE,
    ROOT,
    RULES,
    UNIT,
    compose,
    env_file,
    manifests,
    read_yaml,
    unit_settings,
)
from tests.server.api import running_api
from vlora.cli import cli
from vlora.cli.group import refuse_unknown
from vlora.cli.options import long_flag
from vlora.config import EngineConfig, ServerConfig, Token
from vlora.logging_format import JSON_VARIABLE

TOKENS = (Token(name="VLORA_TOKEN", secret="0123456789abcdef"),)
OURS = re.compile(r"\bVLORA_[A-Z_]+\b")


def image_environment() -> dict[str, str]:
    """Variables of the Dockerfile's ENV instructions."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    return dict(pair.split("=", 1) for line in re.findall(r"^ENV (.*)$", text, re.MULTILINE) for pair in line.split())


def compose_environment() -> dict[str, str]:
    """The server's environment, with the defaults of compose.yaml; required variables get a token."""
    values = compose()["services"]["server"]["environment"]
    found = {}
    for name, value in values.items():
        variable = re.fullmatch(r"\$\{\w+(?::-(?P<default>[^}]*)|:\?[^}]*)\}", value)
        found[name] = value if variable is None else variable["default"]
        if found[name] is None:
            found[name] = TOKENS[0].secret
    return image_environment() | found


def environments() -> Iterator[tuple[str, Mapping[str, str]]]:
    """Every environment that these files pass to `vlora serve`, including commented settings."""
    yield "image", image_environment()
    yield "compose", compose_environment()
    yield "compose, CUDA", read_yaml("docker/compose.cuda.yaml")["services"]["server"]["environment"]
    for file in ("systemd/vlora.env", "docker/example.env"):
        set_here, commented = env_file(file)
        yield file, set_here
        yield f"{file}, comments", set_here | commented
    yield "Kubernetes", image_environment() | manifests()["ConfigMap"]["data"]


ENVIRONMENTS = dict(environments())


@pytest.mark.parametrize("where", ENVIRONMENTS)
def test_serve_accepts_the_environment(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {name: value for name, value in ENVIRONMENTS[where].items() if name.startswith("VLORA_")}
    assert environment
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refuse_unknown(cli, "VLORA", environment)
    command = cli.commands["serve"]
    settings = command.make_context("serve", [], auto_envvar_prefix="VLORA_SERVE").params
    parameters = {
        long_flag(option).replace("-", "_"): option.name
        for option in command.params
        if isinstance(option, click.Option)
    }
    for name, value in environment.items():
        if name.startswith("VLORA_SERVE_") and value:
            parameter = parameters[name.removeprefix("VLORA_SERVE_").lower()]
            assert parameter is not None and str(settings[parameter]) == value
    assert settings["log_json"] == (environment.get(JSON_VARIABLE) == "1")
    made: dict[Any, dict[str, Any]] = {EngineConfig: {}, ServerConfig: {"tokens": TOKENS}}
    for config, more in made.items():
        names = {field.name for field in dataclasses.fields(config)} & settings.keys()
        config(**{name: settings[name] for name in names - more.keys() - {"serve_base"}}, **more)


def test_named_variables_flags_and_commands_exist() -> None:
    text = "\n".join(file.read_text() for file in DEPLOY.rglob("*") if file.is_file())
    text += (ROOT / "docs" / "deployment.md").read_text()
    named = {name for name in OURS.findall(text) if not name.endswith("_")}
    assert {"VLORA_TOKEN", "VLORA_SERVE_MODEL"} <= named
    refuse_unknown(cli, "VLORA", dict.fromkeys(named, "1"))
    flags = {flag for option in cli.commands["serve"].params for flag in (*option.opts, *option.secondary_opts)}
    for file in ("prometheus/vlora.rules.yml", "systemd/vlora.env", "systemd/vlora.service"):
        found = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (DEPLOY / file).read_text()))
        assert found <= flags | {"--help"}, file
    (command,) = (value for key, value in unit_settings() if key == "ExecStart")
    program, *arguments = command.split()
    assert program.endswith("/bin/vlora") and arguments[0] in cli.commands
    assert 'ENTRYPOINT ["vlora"]' in DOCKERFILE.read_text() and 'CMD ["serve"]' in DOCKERFILE.read_text()
    (container,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] in cli.commands


def test_probed_paths_and_ports_are_served() -> None:
    (container,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")]
    with running_api() as api:
        for path in {*(probe["path"] for probe in probes), "/metrics"}:
            assert api.call("GET", path)[0] == 200, path
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": int(image_environment()["VLORA_SERVE_HTTP_PORT"]), "rpyc": ServerConfig.rpyc_port}
    assert {probe["port"] for probe in probes} == {"http"}
    exposed = re.search(r"^EXPOSE (.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    published = {port.split(":")[-1] for port in compose()["services"]["server"]["ports"]}
    service = {str(port["port"]) for port in manifests()["Service"]["spec"]["ports"]}
    assert exposed is not None and set(exposed[1].split()) == published == service == set(map(str, ports.values()))
    (job,) = read_yaml("prometheus/prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"server:{ports['http']}"]}] and "metrics_path" not in job


def test_a_drain_ends_before_the_server_is_killed() -> None:
    (stop,) = (value for key, value in unit_settings() if key == "TimeoutStopSec")
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    container = compose()["services"]["server"]["stop_grace_period"]
    assert all(seconds >= 2 * ServerConfig.drain_s for seconds in (int(stop), pod, int(container.removesuffix("s"))))


def test_the_image_is_built_from_files_of_the_build_context() -> None:
    listed = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in listed if line.startswith("!")}
    assert "*" in listed and all((ROOT / path).exists() for path in kept)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {pattern.removesuffix("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages | {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]} <= kept
    copied = {line.split()[1] for line in DOCKERFILE.read_text().splitlines() if line.startswith("COPY ")}
    assert copied - {"."} <= kept
    given = re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE.read_text())
    assert DOCKERFILE.read_text().count("/vlora[${EXTRAS}]") == given.count("serve,grammar") == 2
    assert {extra for extras in given for extra in extras.split(",")} <= set(
        project["project"]["optional-dependencies"]
    )
    (torch,) = set(re.findall(r"^ARG TORCH=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE))
    assert f"torch=={torch}" in (ROOT / "Makefile").read_text()


def test_the_server_can_write_to_its_folders() -> None:
    """The folders of the image, the unit and the pod agree, also with a read-only root."""
    image = image_environment()
    unit = dict(pair.split("=", 1) for key, value in unit_settings() if key == "Environment" for pair in value.split())
    assert unit == {name: image[name] for name in unit} and set(unit) >= {"XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME"}
    written = {f"{image['XDG_DATA_HOME']}/vlora", f"{image['XDG_CACHE_HOME']}/vlora"}
    for name in ("HF_HOME", "TRITON_CACHE_DIR"):
        assert any(image[name].startswith(f"{folder}/") for folder in written)
    kept = {key: value for key, value in unit_settings() if key in ("StateDirectory", "CacheDirectory")}
    assert written == {f"/var/lib/{kept['StateDirectory']}", f"/var/cache/{kept['CacheDirectory']}"}
    (container,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] and mounts == written | {"/tmp"}
    server = compose()["services"]["server"]
    writable = {volume.split(":")[1] for volume in server["volumes"] if not volume.endswith(":ro")}
    assert server["read_only"] and writable | set(server["tmpfs"]) == mounts


def test_the_files_that_compose_mounts_exist_and_none_contains_tokens() -> None:
    folder = DEPLOY / "docker"
    services = compose()["services"]
    mounted = [
        source
        for service in services.values()
        for source, _, _ in (volume.partition(":") for volume in service["volumes"])
        if source.startswith("..")
    ]
    assert len(mounted) == 4 and all((folder / source).exists() for source in mounted)
    rules = read_yaml("prometheus/prometheus.yml")["rule_files"]
    assert [f"../prometheus/{name}" for name in rules] == [source for source in mounted if "rules" in source]
    build = services["server"]["build"]
    assert (folder / build["context"] / build["dockerfile"]).samefile(DOCKERFILE)
    secrets = dict.fromkeys(("VLORA_TOKEN", "VLORA_ADMIN_TOKEN", "GRAFANA_ADMIN_PASSWORD"), "")
    assert env_file("docker/example.env")[0] == {**secrets, "VLORA_SERVE_MODEL": "embedded"}
    assert "Secret" not in manifests()
    (provider,) = read_yaml("grafana/provisioning/dashboards/vlora.yaml")["providers"]
    assert any(volume.split(":")[1] == provider["options"]["path"] for volume in services["grafana"]["volumes"])


def test_the_health_check_reports_the_engine_state() -> None:
    check = [sys.executable, str(DEPLOY / "docker" / "healthcheck.py")]
    with running_api() as api:
        environment = {"VLORA_SERVE_HTTP_PORT": str(api.http_port), "http_proxy": "http://127.0.0.1:9"}
        for dead, expected in ((None, (0, False)), ("killed", (1, True))):
            api.engine.dead = dead
            done = subprocess.run(check, env=environment, capture_output=True, text=True, timeout=60)
            assert (done.returncode, "503" in done.stderr) == expected, done.stderr


KUBERNETES = DEPLOY / "kubernetes" / "vlora.yaml"


def check(*command: str) -> None:
    """Raises AssertionError with the program's output; skips if it is not installed."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    # The check requires an existing program.
    unit.write_text(UNIT.read_text().replace("/opt/vlora/bin/vlora", "/bin/echo"))
    drop_ins = tmp_path / f"{UNIT.name}.d"
    drop_ins.mkdir()
    for file in ("gpu.conf", "ray.conf"):
        shutil.copy(DEPLOY / "systemd" / file, drop_ins)
    check("systemd-analyze", "verify", "--man=no", str(unit))


@pytest.mark.parametrize(
    "command",
    [
        ("promtool", "check", "rules", RULES),
        ("promtool", "check", "config", "--syntax-only", RULES.with_name("prometheus.yml")),
        ("promtool", "test", "rules", Path(__file__).with_name("alerts.yml")),  # alerts fire and resolve
        ("hadolint", DOCKERFILE),
        ("kubeconform", "-strict", KUBERNETES),
        ("kubernetes-validate", KUBERNETES),
    ],
    ids=lambda command: " ".join(command[:-1]),
)
def test_validators_accept_the_files(command: tuple[object, ...]) -> None:
    check(*map(str, command))
