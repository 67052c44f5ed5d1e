"""`pytest --device cuda -m gpu` runs the engine's oracle tests on a GPU; without the option everything runs on the
CPU."""

from __future__ import annotations

import os

import pytest
import torch

# No test may look for a model hub; set before transformers is imported anywhere.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Nor may a server started by a test take the tokens of who runs it.
for name in ("VLORA_TOKEN", "VLORA_ADMIN_TOKEN"):
    os.environ.pop(name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device of the oracle tests: cpu or cuda")


@pytest.fixture(scope="session", autouse=True)
def device(request: pytest.FixtureRequest) -> str:
    """The device engines of the oracle tests run on; the oracle itself stays on the CPU."""
    name: str = request.config.getoption("--device")
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.exit(f"--device {name} was asked for, but torch sees no CUDA device here", returncode=2)
    from tests import harness

    harness.DEVICE = name
    return name
