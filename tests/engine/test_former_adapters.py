"""An answer continues with the content that its adapter had, although the name has other content by now."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.embedded_cases import config, text, tokens_of, write_adapters
from vlora.engine import LocalEngine
from vlora.errors import BadAdapter
from vlora.types import Request, RequestOutput

pytestmark = pytest.mark.slow

CUT = 12
SINGLE = text("single", adapter="north", max_tokens=24)
COMPOSED = text("composed", adapter="0.5*north+south", max_tokens=24)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def shared() -> LocalEngine:
    return LocalEngine(config())


@pytest.fixture
def local(shared: LocalEngine, folders: dict[str, str], tmp_path: Path) -> Iterator[tuple[LocalEngine, Path]]:
    """An engine with "north", from a folder that a test may overwrite, and "south"."""
    folder = tmp_path / "north"
    shutil.copytree(folders["north"], folder)
    shared.engine.load_adapter("north", str(folder))
    shared.engine.load_adapter("south", folders["south"])
    yield shared, folder
    for status in shared.engine.adapters():
        shared.engine.unload_adapter(status.name)
    shared.engine.keep_adapters({})
    assert shared.engine.parts.registry.num_known == len(shared.engine.parts.registry.compositions) == 0


def version_of(local: LocalEngine, name: str) -> str:
    return next(status.version for status in local.engine.adapters() if status.name == name)


def resumed(request: Request, tokens: tuple[int, ...], version: str) -> Request:
    return replace(request, request_id=f"{request.request_id}#2", answered=tokens[:CUT], adapter_version=version)


def last_of(local: LocalEngine, request: Request) -> list[RequestOutput]:
    return local.run([request])[request.request_id]


def composed_of(local: LocalEngine, request: Request) -> str:
    """The version of a composition in use."""
    local.engine.add(replace(request, request_id="probe"))
    while local.engine.version_of("probe") is None:
        local.engine.step()
    version = local.engine.version_of("probe")
    local.engine.cancel("probe")
    assert version is not None
    return version


@pytest.mark.parametrize("unloaded", [False, True])
def test_kept_content_continues_an_answer(
    local: tuple[LocalEngine, Path], folders: dict[str, str], unloaded: bool
) -> None:
    engine, folder = local
    want = {request.request_id: tokens_of(last_of(engine, request)) for request in (SINGLE, COMPOSED)}
    first, composed = version_of(engine, "north"), composed_of(engine, COMPOSED)
    engine.engine.keep_adapters({"north": (first,)})
    shutil.copytree(folders["east"], folder, dirs_exist_ok=True)  # no file has the first content any more
    if unloaded:
        engine.engine.unload_adapter("north", drain=True)
    else:
        engine.engine.load_adapter("north", str(folder))
        assert version_of(engine, "north") != first
        assert tokens_of(last_of(engine, SINGLE)) != want["single"]  # otherwise the comparison would show nothing
    for request, version in ((SINGLE, first), (COMPOSED, composed)):
        tokens = want[request.request_id]
        assert tokens_of(last_of(engine, resumed(request, tokens, version))) == tokens[CUT:]
    engine.engine.keep_adapters({})
    assert engine.engine.parts.registry.compositions == ()
    error = last_of(engine, resumed(SINGLE, want["single"], first))[-1].error
    assert error is not None and error.code == ("unknown_adapter" if unloaded else "adapter_changed")


def test_kept_content_becomes_current_again_without_its_files(
    local: tuple[LocalEngine, Path], folders: dict[str, str]
) -> None:
    engine, folder = local
    want, first = tokens_of(last_of(engine, SINGLE)), version_of(engine, "north")
    engine.engine.keep_adapters({"north": (first,)})
    shutil.copytree(folders["east"], folder, dirs_exist_ok=True)
    engine.engine.load_adapter("north", str(folder))
    engine.engine.register_adapters({"north": str(folder)}, {"north": first})
    assert version_of(engine, "north") == first and tokens_of(last_of(engine, SINGLE)) == want


def test_a_folder_with_other_content_than_named_is_refused(
    local: tuple[LocalEngine, Path], folders: dict[str, str]
) -> None:
    engine, _ = local
    first, east = version_of(engine, "north"), folders["east"]
    loading = engine.engine.load_in_background("north", east, first)
    while not loading.done():
        engine.engine.step()
    with pytest.raises(BadAdapter, match=f"but {first} was registered; copy the files"):
        loading.result()
    assert version_of(engine, "north") == first
    # One that was registered by its header fails at its first use.
    engine.engine.register_adapters({"lazy": east}, {"lazy": first})
    error = last_of(engine, text("lazy", adapter="lazy"))[-1].error
    assert error is not None and error.code == "bad_adapter" and f"but {first} was registered" in error.message
    # The content that a registration must have may also be named after it.
    engine.engine.register_adapters({"late": folders["south"]})
    engine.engine.register_adapters({"late": folders["south"]}, {"late": first})
    error = last_of(engine, text("late", adapter="late"))[-1].error
    assert error is not None and error.code == "bad_adapter"


def test_a_registration_that_fails_changes_no_other_name(
    local: tuple[LocalEngine, Path], folders: dict[str, str]
) -> None:
    engine, folder = local
    first, south = version_of(engine, "north"), folders["south"]
    engine.engine.register_adapters({"unread": south})
    with pytest.raises(BadAdapter, match="no adapter_config"):
        engine.engine.register_adapters({"unread": south, "none": str(folder / "none")}, {"unread": first})
    assert last_of(engine, text("unread", adapter="unread"))[-1].error is None


def test_an_engine_names_the_contents_that_it_has(local: tuple[LocalEngine, Path], folders: dict[str, str]) -> None:
    engine, _ = local
    first = version_of(engine, "north")
    assert engine.engine.keep_adapters({"north": (first, "other"), "none": (first,)}) == {"north": (first,), "none": ()}
    engine.engine.load_adapter("north", folders["east"])
    second = version_of(engine, "north")
    assert engine.engine.keep_adapters({"north": (first, second)}) == {"north": (second, first)}
    assert engine.engine.keep_adapters({}) == {}
    assert engine.engine.keep_adapters({"north": (first,)}) == {"north": ()}
