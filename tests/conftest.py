"""Shared fixtures and options.

`pytest --device cuda -m gpu` runs the engine's oracle tests on a GPU; the default device is the CPU.
"""

from __future__ import annotations

import os

import hypothesis
import psutil
import pytest

_WORKER_BYTES = 3 * 2**30  # one worker, including the processes that its tests start


def _cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Workers (pytest-xdist) share the cores; processes that tests start inherit the setting. Set before importing torch.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    os.environ["OMP_NUM_THREADS"] = str(max(1, _cores() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))

import torch  # noqa: E402

from vlora.orchestrator.kv_admission import KvAdmission  # noqa: E402

# The examples are the same in every run and have no deadline, so results do not depend on the machine. `pytest
# --hypothesis-profile explore` searches for new examples.
_UNHURRIED = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("steady", _UNHURRIED, derandomize=True, database=None)
hypothesis.settings.register_profile("explore", _UNHURRIED, print_blob=True)
hypothesis.settings.load_profile("steady")

# Tests do not access a model hub. Set before transformers is imported anywhere.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A server started by a test does not use the tokens of the user's environment.
for name in ("VLORA_TOKEN", "VLORA_ADMIN_TOKEN"):
    os.environ.pop(name, None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: one worker per usable core, limited by memory; 0, which is one process, for a single core.

    pytest-xdist counts the machine's physical cores, which is wrong in a container and on virtual processors.
    """
    asked = os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS")
    if asked:
        return int(asked)
    workers = min(_cores(), psutil.virtual_memory().available // _WORKER_BYTES)
    return workers if workers > 1 else 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device of the oracle tests: cpu or cuda")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that run once per model family as slow for all families except one."""
    if "slow" not in config.option.markexpr:
        return
    from tests.families import FAMILIES  # imports transformers

    others = set(FAMILIES) - {"qwen2_vl"}
    for item in items:
        call = getattr(item, "callspec", None)
        if call is not None and others.intersection(call.id.split("-")):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def device(request: pytest.FixtureRequest) -> str:
    """The device of the oracle tests' engines; the oracle itself runs on the CPU."""
    name: str = request.config.getoption("--device")
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.exit(f"--device {name} was requested, but torch finds no CUDA device", returncode=2)
    from tests import harness

    harness.DEVICE = name
    return name


@pytest.fixture(scope="session", autouse=True)
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep tests, and processes that they start, from reading or writing the user's tables."""
    os.environ["XDG_DATA_HOME"] = str(tmp_path_factory.mktemp("data"))


@pytest.fixture
def no_kv_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit requests as if they needed no KV blocks, so that they preempt each other."""
    monkeypatch.setattr(KvAdmission, "_peak", lambda self, needs: 0)
