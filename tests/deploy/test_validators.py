"""The files pass the validators of the programs that read them, where these are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.files import DEPLOY, DOCKERFILE, RULES, UNIT

KUBERNETES = DEPLOY / "kubernetes" / "vlora.yaml"
SCRIPT = DEPLOY / "cluster" / "ssh.sh"


def check(*command: str) -> None:
    """Raises AssertionError with the program's output; skips if it is not installed."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["vlora", "vlora-head", "vlora-node"])
def test_systemd_accepts_the_unit(name: str, tmp_path: Path) -> None:
    unit = tmp_path / f"{name}.service"
    # The check requires an existing program.
    unit.write_text(UNIT.with_name(unit.name).read_text().replace("/opt/vlora/bin/vlora", "/bin/echo"))
    drop_ins = tmp_path / f"{name}.service.d"
    drop_ins.mkdir()
    for file in ("gpu.conf", "cluster.conf"):
        shutil.copy(DEPLOY / "systemd" / file, drop_ins)
    check("systemd-analyze", "verify", "--man=no", str(unit))


def test_promtool_accepts_the_rules() -> None:
    check("promtool", "check", "rules", str(RULES))


def test_promtool_accepts_the_configuration() -> None:
    check("promtool", "check", "config", "--syntax-only", str(RULES.with_name("prometheus.yml")))


def test_alerts_fire_and_resolve() -> None:
    check("promtool", "test", "rules", str(Path(__file__).with_name("alerts.yml")))


def test_hadolint_accepts_the_dockerfile() -> None:
    check("hadolint", str(DOCKERFILE))


def test_bash_and_shellcheck_accept_the_script() -> None:
    check("bash", "-n", str(SCRIPT))
    check("shellcheck", str(SCRIPT))


@pytest.mark.parametrize("validator", ["kubeconform", "kubernetes-validate"])
def test_kubernetes_accepts_the_manifest(validator: str) -> None:
    check(validator, *(["-strict"] if validator == "kubeconform" else []), str(KUBERNETES))
