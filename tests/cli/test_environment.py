"""Environment variables that no command reads."""

from __future__ import annotations

import pytest

import vlora.cli
from vlora.cli.group import refuse_unknown
from vlora.errors import BadConfig


def check(**environ: str) -> None:
    refuse_unknown(vlora.cli.cli, "VLORA", environ)


@pytest.mark.parametrize(
    "name",
    [
        *("VLORA_CONFIG", "VLORA_TOKEN", "VLORA_ADMIN_TOKEN", "VLORA_SERVER", "VLORA_TLS_CA", "VLORA_LOG_LEVEL"),
        *("VLORA_SERVE_HTTP_PORT", "VLORA_SERVE_ADAPTER", "VLORA_STATUS_WAIT_S", "VLORA_FUSE_RESTART"),
        *("VLORA_ADAPTERS_LOAD_SERVER", "VLORA_MODEL_EVAL_CHECKPOINT", "VLORA_CONVERT_BD_BLOCKS"),
        *("PATH", "VLORAX_SERVE", "MY_VLORA_SERVE"),
    ],
)
def test_known_variables_are_accepted(name: str) -> None:
    check(**{name: "1"})


def test_variables_of_kubernetes_services_are_accepted() -> None:
    check(
        VLORA_SERVICE_HOST="10.0.0.7",
        VLORA_SERVICE_PORT="8000",
        VLORA_SERVICE_PORT_HTTP="8000",
        VLORA_PORT="tcp://10.0.0.7:8000",
        VLORA_PORT_8000_TCP="tcp://10.0.0.7:8000",
        VLORA_PORT_8000_TCP_ADDR="10.0.0.7",
        VLORA_SERVER_SERVICE_HOST="10.0.0.7",
        VLORA_SERVER_PORT="tcp://10.0.0.7:18861",
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("VLORA_SERVE_HTPP_PORT", "did you mean VLORA_SERVE_HTTP_PORT?"),
        ("VLORA_TOKENS", "did you mean VLORA_TOKEN?"),
        ("VLORA_QZX", "; unset it"),
    ],
)
def test_unknown_variables_are_refused_with_the_closest_known_one(name: str, meant: str) -> None:
    with pytest.raises(BadConfig, match=f"no command reads the environment variable {name}") as refused:
        check(**{name: "8000"})
    assert meant in str(refused.value)
