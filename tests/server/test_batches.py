"""`/v1/files` and `/v1/batches` over a scripted engine: the records, their limits, and every request answered once."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.processes import until
from tests.server.api import Api, running_api
from tests.server.scripted import ScriptedInterface
from tests.server.test_security import ADMIN, TOKENS, USER
from vlora.config import ServerConfig, Token
from vlora.errors import BadConfig, BadRequest, OverCapacity, UnknownFile
from vlora.server.batches import runner
from vlora.server.batches.store import FileStore, StoredBatch, StoredFile

CHAT = "/v1/chat/completions"


def line(name: str, text: str, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"model": "base", "messages": [{"role": "user", "content": text}], **fields}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def upload(url: str, content: bytes, token: str | None = None, **fields: Any) -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    data = {"purpose": "batch", **fields}
    return httpx.post(f"{url}/v1/files", files={"file": ("r.jsonl", content)}, data=data, headers=headers, timeout=60)


def create(api: Api, lines: Sequence[Any], **fields: Any) -> Any:
    data = b"\n".join(one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines)
    answer = upload(api.url, data, api.token)
    body = {"input_file_id": answer.json()["id"], "endpoint": CHAT, "completion_window": "24h", **fields}
    return api.call("POST", "/v1/batches", body)[1]


def get(api: Api, batch: Any) -> Any:
    return api.call("GET", f"/v1/batches/{batch['id']}")[1]


def when(api: Api, batch: Any, *statuses: str) -> Any:
    until(lambda: get(api, batch)["status"] in statuses)
    return get(api, batch)


def results(api: Api, batch: Any, kind: str = "output") -> dict[str, str]:
    """The answers, or codes of errors, by id; each occurs once."""
    found: dict[str, str] = {}
    for text in httpx.get(f"{api.url}/v1/files/{batch[f'{kind}_file_id']}/content").text.splitlines():
        one = json.loads(text)
        body = one["response"]["body"]
        assert one["custom_id"] not in found and (one["response"]["status_code"] == 200) == (kind == "output")
        found[one["custom_id"]] = (
            body["choices"][0]["message"]["content"] if kind == "output" else body["error"]["code"]
        )
    return found


def test_a_batch_has_answers_and_errors_in_files(tmp_path: Path) -> None:
    with running_api(file_folder=str(tmp_path / "files")) as api:
        lines = [*(line(f"r{number}", f"say:{number}") for number in range(40)), b"", line("bad", "x", temperature=-1)]
        batch = create(api, [*lines, line("gone", "x", model="gone")], metadata={"night": "1"})
        assert batch["status"] == "validating" and batch["object"] == "batch" and batch["metadata"] == {"night": "1"}
        batch = when(api, batch, "completed")
        assert batch["request_counts"] == {"total": 42, "completed": 40, "failed": 2} and batch["errors"] is None
        assert results(api, batch) == {f"r{number}": str(number) for number in range(40)}
        assert results(api, batch, "error") == {"bad": "bad_request", "gone": "unknown_adapter"}
        listed = api.call("GET", "/v1/files?limit=2")[1]
        rest = api.call("GET", f"/v1/files?after={listed['data'][-1]['id']}")[1]
        names = {each["filename"] for each in listed["data"] + rest["data"]}
        assert names == {"r.jsonl", f"{batch['id']}_output.jsonl", f"{batch['id']}_error.jsonl"}
        assert [each["id"] for each in api.call("GET", "/v1/batches")[1]["data"]] == [batch["id"]]
        assert listed["has_more"] and len(api.call("GET", "/v1/files?purpose=batch")[1]["data"]) == 1
        assert all(
            api.call("DELETE", f"/v1/files/{each['id']}")[1]["deleted"] for each in listed["data"] + rest["data"]
        )
        assert not list((tmp_path / "files").glob("file-*"))


def test_a_batch_waits_for_the_quota_of_its_token(tmp_path: Path) -> None:
    token = Token(name="me", secret=USER, requests_per_minute=60)
    with running_api(file_folder=str(tmp_path / "files"), tokens=(token,)) as api:
        api = api._replace(token=USER)
        now_s = time.monotonic()
        api.front_end.quotas.clock = lambda: now_s
        for _ in range(58):
            api.front_end.quotas.count_request("me")

        def num_limited() -> int:
            found = re.findall(r'vlora_requests_total\{.*"rate_limited"\} (\d+)', api.call("GET", "/metrics")[1])
            return sum(map(int, found))

        batch = create(api, [line(f"r{number}", "say:x") for number in range(3)])
        until(lambda: num_limited() > 0)
        api.front_end.quotas.clock = time.monotonic
        assert when(api, batch, "completed")["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        assert num_limited() <= 3, "it asks again when Retry-After says"


PROBLEMS: list[tuple[Sequence[Any], list[tuple[int | None, str | None, str]]]] = [
    ([], [(None, None, "the file has no requests")]),
    ([b"{", line("a", "x"), b"\xff"], [(1, None, "the line is not JSON"), (3, None, "the line is n")]),
    ([b"[1]"], [(1, None, "")]),
    ([line("a", "x"), line("a", "x")], [(2, "custom_id", "custom_id 'a' occurs twice")]),
    ([line("a", "x", "/v1/completions")], [(1, "url", "url is '/v1/completions'; the batch is for /v1/chat/")]),
    ([{**line("a", "x"), "method": "GET"}], [(1, "method", "method is 'GET'")]),
    ([{"custom_id": "a"}], [(1, "method", "method is missing")]),
    ([line("a", "x", stream=True)], [(1, "stream", "stream: the answers of a batch are not streamed")]),
    ([line("a", "x", best_of=2)], [(1, "best_of", "best_of: this field is not supported; use n")]),
    ([line("\ud800", "x")], [(1, "custom_id", "custom_id")]),
    ([b"[" * 18_000], [(1, None, "the line is not JSON")]),
    ([line("a", "x" * 20_000)], [(1, None, "the line has 201")]),
]


def test_a_file_is_checked_line_by_line(tmp_path: Path) -> None:
    with running_api(file_folder=str(tmp_path), max_message_bytes=300_000) as api:
        for lines, expected in PROBLEMS:
            batch = when(api, create(api, lines), "failed", "completed")
            assert batch["status"] == "failed" and batch["output_file_id"] is None
            found = [(each["line"], each["param"], each["message"]) for each in batch["errors"]["data"]]
            assert len(found) == len(expected), found
            for (number, param, message), (at, field, begin) in zip(found, expected, strict=True):
                assert (number, param) == (at, field) and message.startswith(begin), found


def test_what_is_refused(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"max_message_bytes": 200_000, "max_held_bytes": 10**6, "max_file_bytes": 150_000}
    with running_api(file_folder=str(tmp_path), **limits) as api:
        name = upload(api.url, b"x" * 100_000, purpose="user_data").json()["id"]
        batch = {"input_file_id": name, "endpoint": CHAT, "completion_window": "24h"}
        for answer, status, message in (
            (upload(api.url, b"x" * 100_000), 429, "no room for 100000 bytes: this server keeps 1 files and batches"),
            (upload(api.url, b"x" * 250_000), 413, "the body exceeds this server's limit of 200000 bytes"),
            (upload(api.url, b"x", purpose="fine-tune"), 400, "purpose is 'fine-tune'"),
            (upload(api.url, b"x", **{"expires_after[seconds]": "60"}), 400, "expires_after[seconds] is '60'; it m"),
            (httpx.post(f"{api.url}/v1/files", json={}), 400, "file is missing"),
            (httpx.post(f"{api.url}/v1/batches", json=batch), 400, f"file '{name}' has purpose 'user_data'"),
            (httpx.post(f"{api.url}/v1/batches", json={**batch, "endpoint": "/v1/x"}), 400, "endpoint is '/v1/x'"),
            (httpx.post(f"{api.url}/v1/batches", json={**batch, "input_file_id": "../x"}), 404, "there is no file"),
            (httpx.get(f"{api.url}/v1/batches?after=x"), 404, "after is 'x', which is not in the list"),
        ):
            assert answer.status_code == status and answer.json()["error"]["message"].startswith(message), answer.text
        assert api.call("GET", f"/v1/files/{name}/content")[1] == "x" * 100_000
    with running_api() as api:
        assert "this server keeps no files; start it with" in api.call("GET", "/v1/files")[1]["error"]["message"]


def test_files_belong_to_their_token(tmp_path: Path) -> None:
    other = Token(name="shop", secret="other-token-0123456789")
    with running_api(file_folder=str(tmp_path), tokens=(*TOKENS, other)) as api:
        mine = api._replace(token=USER)
        batch = when(mine, create(mine, [line("a", "say:a")]), "completed")
        for path in (f"files/{batch['output_file_id']}/content", f"batches/{batch['id']}"):
            statuses = [api._replace(token=each).call("GET", f"/v1/{path}")[0] for each in (USER, ADMIN, other.secret)]
            assert statuses == [200, 200, 404]
        assert api._replace(token=other.secret).call("GET", "/v1/files")[1]["data"] == []


def test_a_token_has_half_of_the_store_and_expired_files_go_without_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "EXPIRY_S", 0.01)
    now = [1000.0]
    monkeypatch.setattr(FileStore.__init__, "__defaults__", (lambda: now[0],))
    with running_api(file_folder=str(tmp_path), tokens=TOKENS, max_file_bytes=1000) as api:
        assert upload(api.url, b"x" * 400, USER).status_code == 200
        refused = upload(api.url, b"x" * 101, USER)
        assert refused.status_code == 429 and "this token keeps 1 files and batches with 400 bytes" in refused.text
        assert upload(api.url, b"x" * 500, ADMIN).status_code == 200
        refused = upload(api.url, b"x" * 101, ADMIN)
        assert refused.status_code == 429 and "this server keeps 2 files and batches with 900 bytes" in refused.text
        assert len([*tmp_path.glob("file-*")]) == 4
        now[0] += 30 * 24 * 3600
        until(lambda: not [*tmp_path.glob("file-*")])


def test_the_room_of_a_file_that_is_being_written_is_taken(tmp_path: Path) -> None:
    store = FileStore(tmp_path, ServerConfig(max_file_bytes=10))
    with store.room(3, None), store.room(4, "shop"):
        for size, who in ((4, "this server keeps 2"), (2, "this token keeps 1")):
            with pytest.raises(OverCapacity, match=f"{who} files and batches with"):
                store.check_room(size, "shop")
        store.check_room(3, "other")
    store.check_room(5, "shop")
    store.close()


def test_a_batch_continues_after_a_restart_with_what_is_missing(tmp_path: Path) -> None:
    """Also after a line of results that was cut."""
    texts = {f"r{number}": "x" * (1 + number % 40) for number in range(60)}
    slow = ScriptedInterface()
    with running_api(slow, file_folder=str(tmp_path)) as api:
        slow.engine.step_s = 0.02
        batch = create(api, [line(name, f"say:{text}") for name, text in texts.items()])
        until(lambda: get(api, batch)["request_counts"]["completed"] >= 5)
        with pytest.raises(BadConfig, match="is in use by process"):
            FileStore(tmp_path, ServerConfig())
    (output,) = tmp_path.glob("file-*-output")
    output.write_bytes(output.read_bytes()[:-9])
    (tmp_path / "file-left").write_bytes(b"an upload that was cut")
    with running_api(file_folder=str(tmp_path)) as api:
        batch = when(api, batch, "completed")
        assert batch["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
        assert results(api, batch) == texts
    assert not (tmp_path / "file-left").exists()


def test_a_dead_engine_is_waited_for_and_a_request_that_kills_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PAUSE_S", 0.01)
    engine = ScriptedInterface()
    with running_api(engine, file_folder=str(tmp_path)) as api:
        engine.dead = "killed"
        batch = when(api, create(api, [line("a", "say:a")]), "completed")
        assert results(api, batch, "error") == {"a": "engine_dead"}


def test_a_batch_is_cancelled_or_expires_with_the_answers_that_it_has(tmp_path: Path) -> None:
    with running_api(file_folder=str(tmp_path)) as api:
        lines = [*(line(f"r{number}", f"say:{number}") for number in range(5)), line("hangs", "never")]
        batch = create(api, lines)
        until(lambda: get(api, batch)["request_counts"]["completed"] == 5)
        status, answer = api.call("DELETE", f"/v1/files/{batch['input_file_id']}")
        assert status == 400 and "cancel it, or wait" in answer["error"]["message"]
        assert api.call("POST", f"/v1/batches/{batch['id']}/cancel")[1]["status"] == "cancelling"
        batch = when(api, batch, "cancelled")
        assert len(results(api, batch)) == 5 and batch["error_file_id"] is None and api.idle()
        late = create(api, lines)
        when(api, late, "in_progress")
    (record,) = tmp_path.glob(f"{late['id']}.json")
    record.write_text(re.sub(r'"expires_at":\d+', f'"expires_at":{late["created_at"]}', record.read_text()))
    with running_api(file_folder=str(tmp_path)) as api:
        assert when(api, late, "expired")["expired_at"] and api.idle()


def test_records_expire_and_broken_ones_are_named(tmp_path: Path) -> None:
    now = [1000.0]
    store = FileStore(tmp_path, ServerConfig(max_file_bytes=10), clock=lambda: now[0])
    (tmp_path / "file-a").write_bytes(b"12345678")
    store.add("file-a", filename="a", purpose="batch")
    batch = store.create_batch(endpoint=CHAT, input_file_id="file-a")
    store.check_room(2)
    with pytest.raises(OverCapacity, match="no room for 3 bytes"):
        store.check_room(3)
    now[0] += 30 * 24 * 3600
    with pytest.raises(BadRequest, match="reads file 'file-a'"):
        store.delete(store.find(StoredFile, "file-a", None))
    store.enter(batch, "cancelled")
    with pytest.raises(UnknownFile):
        store.find(StoredFile, "file-a", None)
    assert store.all(StoredBatch) == [batch] and not (tmp_path / "file-a").exists()
    now[0] += 24 * 3600
    with pytest.raises(UnknownFile):
        store.find(StoredBatch, batch.id, None)
    store.close()
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(BadConfig, match=r"x\.json is not the record of a file or a batch"):
        FileStore(tmp_path, ServerConfig())
