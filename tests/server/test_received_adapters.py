"""Adapters of sources, loaded by the first request that names them, and adapters that are uploaded."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants, snapshot_download

from tests.server.api import Api, running_api
from tests.server.scripted import ScriptedInterface, write_adapter
from tests.server.test_security import ADMIN, TOKENS, USER
from tests.sites import Page, site
from vlora.cluster.adapter_sender import ShippingLimits
from vlora.errors import BadAdapter
from vlora.operations import PinAdapter
from vlora.server.operations import perform
from vlora.server.received_adapters import NOT_FOUND_S, ReceivedAdapters

CONFIG = b'{"heads": {"rain": 1}}'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "shelf"
    for name in "abcd":
        write_adapter(folder / name, {name: 1})
    return folder


def ask(api: Api, name: str) -> tuple[int, str]:
    """The status of a request, and its answer or error."""
    status, answer = api.chat("say:x", model=name)
    return status, answer["choices"][0]["message"]["content"] if status == 200 else answer["error"]["message"]


def receive(
    api: Api,
    limits: ShippingLimits | None = None,
    folder: Path | None = None,
    **options: Any,
) -> None:
    """Have a server receive adapters within other limits, or into a folder."""
    assert api.front_end.received is not None
    api.front_end.received.close()
    used = limits or ShippingLimits()
    api.front_end.received = ReceivedAdapters(api.front_end.config, used, folder, api.front_end.adapters, **options)


def listed(api: Api) -> list[str]:
    return [each["id"] for each in api.call("GET", "/v1/models")[1]["data"] if each["parent"] == "base"][:9]


class Counting(ScriptedInterface):
    """Counts the loads by name; they take a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []

    async def load_adapter(self, name: str, path: str, version: str = "") -> Any:
        self.loads.append(name)
        await asyncio.sleep(0.05)
        return await super().load_adapter(name, path, version)


def test_the_first_request_loads_an_adapter_once_for_all(source: Path) -> None:
    engine = Counting()
    with running_api(engine, adapter_source=(str(source),)) as api, ThreadPoolExecutor(20) as pool:
        assert listed(api) == []
        assert [*pool.map(lambda _: ask(api, "a"), range(20))] == [(200, "x")] * 20
        assert ask(api, "0.5*a+b") == (200, "x")
        assert engine.loads == ["a", "b"] and listed(api) == ["a", "b"]
        with api.client() as client:
            assert client.generate("say:y", adapter="c").text == "y"  # over RPyC, too
        assert engine.loads == ["a", "b", "c"]


def test_an_unknown_name_is_not_looked_for_again_at_once(source: Path) -> None:
    now = [0.0]
    with running_api(adapter_source=(str(source),)) as api:
        receive(api, clock=lambda: now[0])
        status, answer = api.chat("x", model="new")
        assert status == 404 and answer["error"] == {
            "message": "no adapter named 'new'; registered: none; looked for at folder shelf",
            "type": "invalid_request_error",
            "code": "unknown_adapter",
            "param": "model",
        }
        write_adapter(source / "new")
        assert ask(api, "new")[0] == 404
        now[0] += NOT_FOUND_S
        assert ask(api, "new") == (200, "x")


def test_only_folders_inside_of_a_source_are_loaded(source: Path, tmp_path: Path) -> None:
    outside = Path(write_adapter(tmp_path / "secret"))
    (source / "linked").symlink_to(outside)
    (source / "file").mkdir()
    (source / "file" / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    (source / "inside").symlink_to(source / "a")
    (source / "large").mkdir()
    (source / "large" / "adapter_config.json").write_bytes(b"{}" + b" " * 2000)
    with running_api(adapter_source=(str(source),)) as api:
        receive(api, ShippingLimits(1000, 5000))
        for name, status, message in (
            ("../secret", 404, "no adapter named '../secret'"),
            (str(outside), 404, "no adapter named"),
            (".", 404, "no adapter named '.'"),
            ("a/../b", 404, "no adapter named"),
            ("linked", 400, "links to files outside of that of `--adapter-source`"),
            ("file", 400, "links to files outside"),
            ("large", 400, "it has 2002 bytes, over the limit of 1000"),
            ("inside", 200, "x"),
        ):
            found = ask(api, name)
            assert found[0] == status and message in found[1], (name, found)


def test_the_adapter_used_longest_ago_makes_room(source: Path) -> None:
    with running_api(adapter_source=(str(source),), max_found_adapters=2) as api:
        write_adapter(source.parent / "own" / "mine")
        api.on_loop(api.front_end.adapters.load("mine", str(source.parent / "own" / "mine")))
        for name in "abac":
            assert ask(api, name) == (200, "x")
        assert listed(api) == ["a", "c", "mine"]
        api.on_loop(perform(api.front_end, PinAdapter("a", True), None, "rpyc x"))
        for name in "bd":
            assert ask(api, name) == (200, "x")
        assert listed(api) == ["a", "d", "mine"]  # a pinned one stays
        api.on_loop(api.front_end.adapters.unload("d"))
        assert ask(api, "d") == (200, "x")
        # As after a restart, with the adapters of the state.
        api.on_loop(perform(api.front_end, PinAdapter("a", False), None, "test"))
        receive(api, given=["a"])
        for name in "bc":
            assert ask(api, name) == (200, "x")
        assert listed(api) == ["a", "b", "c", "mine"]


# -- the hub ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Hub:
    """The hub's API of models and its files, as huggingface_hub asks for them."""

    files: dict[str, dict[str, bytes]]
    asked: list[str] = dataclasses.field(default_factory=list)
    broken: bool = False

    def page(self, path: str) -> Page:
        steps = path.partition("?")[0].strip("/").split("/")
        self.asked.append(path)
        content, headers = None, {"X-Repo-Commit": "0" * 40}
        if steps[:2] == ["api", "models"]:
            repository = "/".join(steps[2:4])
            known = {"acme/moved": "other/a"}.get(repository, repository)
            if known in self.files:
                siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files[known].items()]
                tree = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in self.files[known]]
                info = {"id": known, "sha": "0" * 40, "siblings": siblings}
                content = json.dumps(tree if "tree" in steps else info).encode()
        elif steps[2:3] == ["resolve"]:
            content = self.files.get("/".join(steps[:2]), {}).get("/".join(steps[4:]))
            headers["ETag"] = f'"{hashlib.sha256(content or b"").hexdigest()}"'
        if content is None and not self.broken:
            headers["X-Error-Code"] = "RepoNotFound"
        return Page(content or b"", status=500 if self.broken else 404 if content is None else 200, headers=headers)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    good = {"adapter_config.json": CONFIG, "adapter_model.safetensors": b"x" * 100, "README.md": b"?"}
    files = {
        "acme/a": good | {"heads.json": b"{}"},
        "acme/more": good | {"model.safetensors": b"?"},
        "acme/large": good | {"adapter_model.safetensors": b"x" * 1000},
        "acme/plain": {"config.json": b"{}"},
        "acme/b": good | {"adapter_model.safetensors": b"y" * 800},
        "acme/c": good | {"adapter_model.safetensors": b"z" * 800},
        "other/a": good,
    }
    made = Hub(files)
    with site(made.page) as served:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "ENDPOINT", served.url(""))
        template = served.url("/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield made


def test_adapters_of_an_organisation_of_the_hub(hub: Hub, source: Path, tmp_path: Path) -> None:
    with running_api(adapter_source=("hub:acme", str(source))) as api:
        receive(api, ShippingLimits(900, 1700), tmp_path / "r")
        assert ask(api, "a") == (200, "x") and ask(api, "d") == (200, "x")
        (kept,) = (tmp_path / "r" / "found").glob("[0-9a-f]*[0-9a-f]")
        names = {each.name: each.read_bytes() for each in kept.iterdir()}
        assert names == {name: data for name, data in hub.files["acme/a"].items() if name != "README.md"}
        for name, status, message in (
            ("none", 404, "; looked for at hub:acme, folder shelf"),
            ("moved", 404, "looked for at hub:acme"),
            ("other/a", 404, "no adapter named 'other/a'; registered: a, d"),
            ("no name", 404, "looked for at hub:acme"),
            ("more", 400, "model.safetensors has weights that PEFT does not load with the adapter"),
            ("large", 400, "over the limit of 900"),
            ("plain", 400, "it has no adapter_config.json"),
        ):
            found = ask(api, name)
            assert found[0] == status and message in found[1], (name, found)
        assert not [each for each in hub.asked if "other" in each and "moved" not in each]
        number = len(hub.asked)
        assert ask(api, "none")[0] == 404 and len(hub.asked) == number
        # Both have room together, but not beside the first one.
        assert ask(api, "b") == (200, "x") and ask(api, "c") == (200, "x")
        assert listed(api) == ["b", "c", "d"]
        assert not kept.exists()
        hub.broken = True
        status, message = ask(api, "later")
        assert status == 404 and "looked for at hub:acme (HfHubHTTPError), folder shelf" in message
    assert not [*(tmp_path / "r").glob("unfinished-*")]


def test_offline_only_the_hubs_cache_is_read(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot_download("acme/a", allow_patterns=["adapter_*", "heads*"])
    number = len(hub.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with running_api(adapter_source=("hub:acme",)) as api:
        assert ask(api, "a") == (200, "x")
        assert ask(api, "b")[0] == 404 and len(hub.asked) == number


# -- uploads ----------------------------------------------------------------------------------------------------------


def put(api: Api, name: str, files: Mapping[str, bytes], token: str | None = None) -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    parts = [("files", (each, data)) for each, data in files.items()]
    return httpx.put(f"{api.url}/v1/adapters/{name}", files=parts, headers=headers, timeout=60)


FOLDER = {"adapter_config.json": CONFIG, "adapter_model.safetensors": b"x,y" * 40_000, "README.md": b"hello"}


def test_uploads_are_loaded_as_folders_are(tmp_path: Path) -> None:
    with running_api(tokens=TOKENS) as api:
        assert put(api, "a", FOLDER, USER).status_code == 403 and put(api, "a", FOLDER).status_code == 401
        answer = put(api, "a", FOLDER | {"../heads.json": b"{}", "/heads.json": b"{}"}, ADMIN)
        assert answer.status_code == 200 and answer.json()["heads"][0]["name"] == "rain", answer.text
        for name, data in FOLDER.items():
            (tmp_path / name).write_bytes(data)
        with api.client(token=ADMIN) as client:
            assert client.load_adapter("c", tmp_path, upload=True).heads[0].name == "rain"
            assert len({status.version for status in client.adapters()}) == 1
            with pytest.raises(BadAdapter, match=r"none: cannot read: No such file"):
                client.load_adapter("e", tmp_path / "none", upload=True)
        assert ask(api._replace(token=USER), "c") == (200, "x")


REFUSED: tuple[tuple[str, Mapping[str, bytes], str], ...] = (
    ("a", {"README.md": b"?"}, "adapter 'a': it has no adapter_config.json"),
    ("a", {**FOLDER, "model.bin": b"?"}, "model.bin has weights that PEFT does not load"),
    ("a", {**FOLDER, "heads.safetensors": bytes(300_000)}, "over the limit of 300000"),
    ("base", FOLDER, "is the base model's name"),
    ("x@y", FOLDER, "is invalid"),
)


def test_what_is_refused_of_uploads(tmp_path: Path) -> None:
    with running_api() as api:
        receive(api, ShippingLimits(300_000, 600_000), tmp_path)
        for name, files, message in REFUSED:
            answer = put(api, name, files)
            assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
        assert not [*tmp_path.glob("unfinished-*")] and listed(api) == []


def test_room_of_uploads_in_use_is_not_taken(tmp_path: Path) -> None:
    with running_api() as api:
        receive(api, ShippingLimits(150_000, 260_000), tmp_path)
        assert [put(api, name, FOLDER).status_code for name in "ab"] == [200, 200]  # one content
        other = FOLDER | {"adapter_model.safetensors": b"z" * 130_000}
        assert put(api, "c", other).status_code == 200
        third = FOLDER | {"adapter_model.safetensors": b"y" * 130_000}
        refused = put(api, "d", third)
        assert refused.status_code == 429 and "has no room for" in refused.text
        assert api.call("DELETE", "/v1/adapters/c")[0] == 204 and put(api, "d", third).status_code == 200
