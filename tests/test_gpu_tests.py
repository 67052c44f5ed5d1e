"""The GPU tests need the engine's libraries only, and compare with the oracle without reduced precision."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import device

ROOT = Path(__file__).parent.parent

# Libraries of the server, of bench pages and of other tests. A machine with a GPU often has only torch, transformers,
# PEFT and what the engine itself imports.
_MISSING = (
    "fastapi", "jsonschema", "llguidance", "matplotlib", "onnx", "openai", "playwright", "prometheus_client",
    "pydantic", "rpyc", "schemathesis", "scipy", "skimage", "sklearn", "skops", "starlette", "trustme", "uvicorn",
)  # fmt: skip
_COLLECT = """
import sys
sys.modules.update(dict.fromkeys({missing}))  # a None there makes an import fail
import pytest
sys.exit(pytest.main(["-m", {marker!r}, "--collect-only", "-q", *sys.argv[1:]]))
"""


def collect(marker: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = _COLLECT.format(missing=_MISSING, marker=marker)
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # schemathesis has a plugin for pytest
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.gpu_sim
@pytest.mark.slow
def test_gpu_tests_collect_without_the_libraries_of_the_server_and_others_do_not() -> None:
    found = collect("gpu")
    assert found.returncode == 0, found.stdout
    for name in ("engine/test_answers", "engine/test_heads", "atmm/test_merge", "atmm/test_add_delta"):
        assert f"tests/{name}.py::" in found.stdout
    without = collect("not gpu", "tests/server/test_http.py")
    assert without.returncode != 0, "they are missing in the subprocess"
    assert "ModuleNotFoundError" in without.stdout + without.stderr


@pytest.fixture
def restored_settings() -> Iterator[None]:
    name, convolutions = device.name, torch.backends.cudnn.allow_tf32
    products = torch.backends.cuda.matmul.allow_tf32
    yield
    device.name, torch.backends.cudnn.allow_tf32 = name, convolutions
    torch.backends.cuda.matmul.allow_tf32 = products


@pytest.mark.parametrize(("name", "allowed"), [("cuda", False), ("cuda:1", False), ("cpu", True)])
def test_oracle_tests_on_a_gpu_compute_in_full_float32(restored_settings: None, name: str, allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    device.use(name)
    assert device.name == name
    assert torch.backends.cudnn.allow_tf32 is torch.backends.cuda.matmul.allow_tf32 is allowed
