"""Readers for the files of deploy/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "vlora.service"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
RULES = DEPLOY / "prometheus" / "vlora.rules.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "vlora.json"


def read_yaml(path: str) -> Any:
    """The only document of a file in deploy/."""
    return yaml.safe_load((DEPLOY / path).read_text())


def manifests() -> dict[str, Any]:
    """Kubernetes objects by kind."""
    documents = yaml.safe_load_all((DEPLOY / "kubernetes" / "vlora.yaml").read_text())
    return {document["kind"]: document for document in documents}


def compose() -> dict[str, Any]:
    services: dict[str, Any] = read_yaml("docker/compose.yaml")
    return services


def dashboard() -> dict[str, Any]:
    panels: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return panels


def env_file(path: str) -> tuple[dict[str, str], dict[str, str]]:
    """Variables of a file in deploy/: the active ones, and the commented ones."""
    set_here: dict[str, str] = {}
    commented: dict[str, str] = {}
    for line in (DEPLOY / path).read_text().splitlines():
        name, equals, value = line.removeprefix("#").partition("=")
        if equals and name.isupper() and " " not in name:
            (commented if line.startswith("#") else set_here)[name] = value
    return set_here, commented


def unit_settings() -> list[tuple[str, str]]:
    """(key, value) of the systemd unit, in order; a key may occur several times."""
    lines = UNIT.read_text().splitlines()
    return [(key, value) for key, equals, value in (line.partition("=") for line in lines) if equals and key.isalnum()]
