"""`pytest --device cuda -m gpu` runs the engine's oracle tests on a GPU; without the option everything runs on the
CPU."""

from __future__ import annotations

import os

import hypothesis
import psutil
import pytest

_WORKER_BYTES = 3 * 2**30  # a worker, with the processes that its tests start


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Workers (pytest-xdist) share the cores; processes that tests start inherit it. Set before torch is imported.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    os.environ["OMP_NUM_THREADS"] = str(max(1, _cores() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))

import torch  # noqa: E402

from vlora.orchestrator.kv_admission import KvAdmission  # noqa: E402

# The same examples every time, however slow the machine: a change that is right stays green. `pytest
# --hypothesis-profile explore` looks for new ones.
_UNHURRIED = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("steady", _UNHURRIED, derandomize=True, database=None)
hypothesis.settings.register_profile("explore", _UNHURRIED, print_blob=True)
hypothesis.settings.load_profile("steady")

# No test may look for a model hub; set before transformers is imported anywhere.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Nor may a server started by a test take the tokens of who runs it.
for name in ("VLORA_TOKEN", "VLORA_ADMIN_TOKEN"):
    os.environ.pop(name, None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: one worker per usable core, as far as memory allows; 0, which is one process, for a single core.

    pytest-xdist counts physical cores of the machine, which is wrong in a container and on virtual processors.
    """
    asked = os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS")
    if asked:
        return int(asked)
    workers = min(_cores(), psutil.virtual_memory().available // _WORKER_BYTES)
    return workers if workers > 1 else 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device of the oracle tests: cpu or cuda")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that run once per model family are slow for all families but one."""
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
    """The device engines of the oracle tests run on; the oracle itself stays on the CPU."""
    name: str = request.config.getoption("--device")
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.exit(f"--device {name} was asked for, but torch sees no CUDA device here", returncode=2)
    from tests import harness

    harness.DEVICE = name
    return name


@pytest.fixture(scope="session", autouse=True)
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test, and no process that one starts, reads or writes the user's own tables."""
    os.environ["XDG_DATA_HOME"] = str(tmp_path_factory.mktemp("data"))


@pytest.fixture
def no_kv_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests enter as if they needed no KV room, so that they preempt each other."""
    monkeypatch.setattr(KvAdmission, "_peak", lambda self, needs: 0)
