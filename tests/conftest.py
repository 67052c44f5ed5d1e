"""Shared fixtures and options.

`pytest --device cuda -m gpu` runs the engine's oracle tests on a GPU, `--device simulated-cuda` on a simulated one
(`tests/simulated_cuda`); the default device is the CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import logging
import os
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import psutil
import pytest

from tests import device

_WORKER_BYTES = 3 * 2**30  # one worker, including the processes that its tests start


def _cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Workers (pytest-xdist) share the cores; processes that tests start inherit the setting. Set before importing torch.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    os.environ["OMP_NUM_THREADS"] = str(max(1, _cores() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))

if TYPE_CHECKING:
    from tests.references import CaseReference, Reference
    from tests.server.running import Running
    from vlora.client import Client

# The examples are the same in every run and have no deadline, so results do not depend on the machine. `make test` and
# `make test-fast` draw fewer (`pytest_configure`). `pytest --hypothesis-profile explore` searches for new examples.
_UNHURRIED = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("steady", _UNHURRIED, derandomize=True, database=None)
hypothesis.settings.register_profile("usual", _UNHURRIED, derandomize=True, database=None, max_examples=40)
hypothesis.settings.register_profile("fast", _UNHURRIED, derandomize=True, database=None, max_examples=20)
hypothesis.settings.register_profile("explore", _UNHURRIED, print_blob=True)
hypothesis.settings.load_profile("steady")

# Tests do not access a model hub. Set before transformers is imported anywhere.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A server started by a test does not use the tokens of the user's environment.
for name in ("VLORA_TOKEN", "VLORA_ADMIN_TOKEN"):
    os.environ.pop(name, None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: one more worker than usable cores, as workers often wait for processes; limited by memory.

    pytest-xdist counts the machine's physical cores, which is wrong in a container and on virtual processors.
    """
    if requested := os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return int(requested)
    workers = min(_cores() + 1, psutil.virtual_memory().available // _WORKER_BYTES)
    return workers if workers > 1 else 0


_TIERS = ("exhaustive", "gpu_sim")
"""Marks of tests that `make test` leaves out. A test with both needs both options."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device of the oracle tests: cpu, cuda or simulated-cuda")
    for tier in _TIERS:
        option = f"--{tier.replace('_', '-')}"
        parser.addoption(option, action="store_true", help=f"also run the tests that are marked as {tier}")
    parser.addoption("--stop-after", type=float, metavar="SECONDS", help="skip tests that begin later after the first")


def pytest_configure(config: pytest.Config) -> None:
    """Set the device of the oracle tests, and the number of hypothesis examples."""
    if config.getoption("--hypothesis-profile", None) is None and not config.option.exhaustive:
        hypothesis.settings.load_profile("fast" if "not slow" in config.option.markexpr else "usual")
    name = config.getoption("--device")
    if name == "simulated-cuda":
        name = "cuda"
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
        from tests.simulated_cuda import simulated_cuda

        simulation = contextlib.ExitStack()
        simulation.enter_context(simulated_cuda())
        config.add_cleanup(simulation.close)
    device.use(name)
    if device.name.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.exit(f"--device {device.name} was requested, but torch finds no CUDA device", returncode=2)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, import only the test modules with GPU tests: a GPU machine may lack what the others import."""
    if config.option.markexpr != "gpu":
        return None
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else (collection_path,)
    return None if any("mark.gpu" in file.read_text() for file in files) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that repeat others for more model families, and leave out those of tiers that are not asked for."""
    cells: dict[tuple[Path, str], dict[str, pytest.Item]] = {}  # an oracle test and its other parameters: its families
    first_is_fast: set[tuple[Path, str]] = set()
    for item in items:
        family, in_turn = _family_of(item), item.get_closest_marker("slow") is not None
        if family is None:
            continue
        cell = (item.path, item.name.replace(family, ""))
        if family != _FIRST_FAMILY:
            item.add_marker(pytest.mark.slow)
            in_turn = True
        elif not in_turn:
            first_is_fast.add(cell)
        oracle = item.nodeid.startswith("tests/engine/") and device.name == "cpu"
        if oracle and in_turn and not item.get_closest_marker("exhaustive"):
            cells.setdefault(cell, {})[family] = item
    # Of an oracle test one family runs. Families take turns within a module, three tests each, which share a reference.
    # Where the first family is fast it runs each test, and the family whose turn it is one of the three.
    turns: Counter[Path] = Counter()
    for cell, families in cells.items():
        turn = zlib.crc32(cell[0].name.encode()) + turns[cell[0]] // 3
        repeats = cell in first_is_fast and turns[cell[0]] % 3 > 0
        turns[cell[0]] += 1
        for place, item in enumerate(families.values()):
            if repeats or place != turn % len(families):
                item.add_marker(pytest.mark.exhaustive)
    for tier in _TIERS:
        if not config.getoption(tier):
            left_out = [item for item in items if item.get_closest_marker(tier)]
            items[:] = [item for item in items if not item.get_closest_marker(tier)]
            config.hook.pytest_deselected(items=left_out)


_FIRST_FAMILY = "qwen2_vl"


def _family_of(item: pytest.Item) -> str | None:
    """The model family among a test's parameters."""
    families = sys.modules.get("tests.families")  # imports transformers; not every run collects tests that need it
    call = getattr(item, "callspec", None)
    if families is None or call is None:
        return None
    return next((word for word in re.findall(r"\w+", call.id) if word in families.FAMILIES), None)


def pytest_collection_finish() -> None:
    """Exclude what collecting has imported from later garbage collections, which would visit millions of objects."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # extension modules report what is not collected at the end as leaks


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests after `--stop-after`, so that a run of as many tests as possible has a bound.

    It counts from the first test on: collecting would otherwise use up the time of a slow machine.
    """
    began_s = item.config.stash.setdefault(_BEGAN_S, time.monotonic())
    limit_s = item.config.option.stop_after
    if limit_s is not None and time.monotonic() - began_s > limit_s:
        pytest.skip("left to a full run by --stop-after")


_BEGAN_S = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Return freed memory after each module: glibc keeps hundreds of megabytes between the tensors that are left."""
    yield
    if _trim is not None and (nextitem is None or nextitem.path != item.path):
        gc.collect()
        _trim(0)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc only


@pytest.fixture(scope="session", autouse=True)
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep tests, and processes that they start, from reading or writing the user's tables."""
    os.environ["XDG_DATA_HOME"] = str(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def no_exception_in_a_callback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail the test when a callback of an event loop raised an exception, which asyncio only logs.

    Other errors of asyncio are logged by the garbage collector, during any later test. Excluded are connections of
    stream servers that the end of `asyncio.run` cancels, which Python 3.11 logs as exceptions too.
    """
    yield
    for record in (*caplog.get_records("setup"), *caplog.get_records("call")):
        if record.name == "asyncio" and record.message.startswith("Exception in callback"):
            cancelled = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
            assert cancelled, logging.Formatter().format(record)


@pytest.fixture(autouse=True)
def no_choices_of_emulated_processors() -> None:
    """Forget choices of matrix products, which tests make for processors that they emulate."""
    if (matmul := sys.modules.get("atmm.matmul")) is not None:
        matmul.forget_choices()


@pytest.fixture
def no_kv_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit requests as if they needed no KV blocks, so that they preempt each other."""
    from vlora.orchestrator.admission import kv_admission

    monkeypatch.setattr(kv_admission, "peak_blocks", lambda needs, block_size: 0)


# Imports inside of fixtures keep the start short: not every run needs torch, transformers and PEFT.


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """The model, adapters and on-demand reference answers of a family, built once per session."""
    from tests.references import Reference

    return functools.cache(lambda family: Reference(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def case_references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], CaseReference]:
    """The fixed cases of a family with their reference answers, built once per session."""
    from tests.references import CaseReference

    return functools.cache(lambda family: CaseReference.of(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="session")
def adapters_of_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """The oracle's adapter folders of a family by name, written once per session."""
    from tests.families import build_model
    from tests.oracle import Oracle

    return functools.cache(lambda family: Oracle(family, build_model(family)).save(tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def adapter_folders(
    request: pytest.FixtureRequest, adapters_of_family: Callable[[str], dict[str, str]]
) -> dict[str, str]:
    """The oracle's adapter folders of the test module's `FAMILY`. A test that changes one changes a copy."""
    return dict(adapters_of_family(request.module.FAMILY))


@pytest.fixture
def client(server: Running) -> Iterator[Client]:
    """A client of the module's `server`."""
    from vlora.client import Client

    with Client(port=server.port) as connected:
        yield connected
