"""Corrections and versions over RPyC, HTTP and the command line, by user and admin tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.conftest import Vlora, vlora_command  # noqa: F401  (a fixture)
from tests.learning.learners import trail_of
from tests.learning.scripted_model import write_content
from tests.server.api import running_api
from tests.server.running import png, running_server
from tests.server.test_security import ADMIN, TOKENS, USER
from vlora.adapter_files import content_hash
from vlora.client import Client
from vlora.config import Token
from vlora.errors import BadAdapter, BadRequest, Forbidden, OverCapacity
from vlora.learning.plan import LearningEntry, LearningSettings
from vlora.server.frontend import FrontEnd
from vlora.training.plan import TrainingSettings
from vlora.types import TrainingStatus

OTHER = "other-token-0123456789"
ALL = (*TOKENS, Token(name="second", secret=OTHER))
SETTINGS = LearningSettings(name="signs", training=TrainingSettings(steps=1), train_after=None)


async def learn(front: FrontEnd, engine: Any, folder: Path, names: tuple[str, ...] = ("signs",)) -> None:
    """Let adapters learn, with versions as those of a real engine."""
    engine.engine.version_in = content_hash
    initial = str(write_content(folder / "initial", {}))
    entries = [LearningEntry(SETTINGS.model_copy(update={"name": name}), (), ()) for name in names]
    await front.adapters.register(front.learn(folder, entries, dict.fromkeys(names, initial)))


@contextmanager
def rpyc_server(folder: Path, tokens: tuple[Token, ...] = ALL) -> Iterator[Any]:
    with running_server(tokens=tokens) as server:
        server.on_loop(learn(server.front_end, server.engine, folder))
        yield server


def test_corrections_and_versions_over_rpyc(tmp_path: Path) -> None:
    with (
        rpyc_server(tmp_path) as server,
        Client(port=server.port, token=USER) as user,
        Client(port=server.port, token=OTHER) as other,
        Client(port=server.port, token=ADMIN) as admin,
    ):
        answer = user.generate("which sign ?", [png()], adapter="signs")
        assert answer.text == "yes" and len(answer.request_id) == 32
        for client, corrected, label, message in (
            (other, answer, "no", f"no answer with id '{answer.request_id}' is kept for this token"),
            (user, "absent", "no", "no answer with id 'absent' is kept for this token; corrections are taken"),
            (user, answer, " ", "the label is empty; send the right answer"),
        ):
            with pytest.raises(BadRequest, match=message):
                client.correct(corrected, label)
        done = user.correct(answer, "no")
        assert (done.request_id, done.adapter, done.label) == (answer.request_id, "signs", "no")
        with user.stream("which sign ?", adapter="signs") as stream:
            assert "".join(stream) == "yes" and stream.answer is not None
        admin.correct(stream.answer.request_id, "maybe")
        with pytest.raises(Forbidden):
            user.correct(stream.answer, "no")
        (status,) = admin.learning()
        assert (status.num_records, status.num_corrected) == (2, 2)
        path = write_content(tmp_path / "other", {}, "new")
        first = admin.learning()[0].present
        second = admin.promote("signs", path=path, force=True)
        assert second.present == content_hash(path) != first
        assert [one.origin for one in second.versions] == [f"from {path}", f"from {tmp_path / 'initial'}"]
        assert admin.adapters()[0].version == second.present
        assert admin.roll_back("signs").present == first
        with pytest.raises(BadRequest, match="adapter 'absent' does not learn; learning: signs"):
            admin.promote("absent")
        headed = write_content(tmp_path / "headed", {}, "headed")
        (headed / "heads.json").write_text("{}")  # the next start of the server would refuse a version without them
        with pytest.raises(BadAdapter, match=r"headed has task heads \(heads\.json\), which later versions would lack"):
            admin.promote("signs", path=headed, force=True)
        for call in (user.promote, user.roll_back):
            with pytest.raises(Forbidden):
                call("signs")
        assert [one.origin for one in user.learning()[0].versions] == ["", ""], "they name folders"
        assert admin.promote("signs", version=second.present[:9], force=True).present == second.present
        assert admin.roll_back("signs", first[:9]).present == first
        assert [entry["by"] for entry in trail_of(tmp_path / "signs")] == ["server", *["ops"] * 4]


def test_corrections_and_versions_over_http(tmp_path: Path) -> None:
    with running_api(tokens=ALL) as api:
        api.on_loop(learn(api.front_end, api.engine, tmp_path))
        user, admin = api._replace(token=USER), api._replace(token=ADMIN)
        name = user.chat("which sign ?", model="signs", n=2)[1]["id"]
        body = {"id": name, "label": "no"}
        done = {"request_id": name.removeprefix("chatcmpl-"), "adapter": "signs", "label": "no"}
        assert user.call("POST", "/v1/corrections", body) == (200, done)
        assert user.call("POST", "/v1/corrections", {**body, "choice": 1})[0] == 200
        for change, message in (
            ({"choice": 2}, f"no answer with id '{name[9:]}-2' is kept"),
            ({"id": "chatcmpl-\ud800"}, "is kept for this token"),
            ({"label": "a <|image_pad|> sign"}, "special token"),
        ):
            status, answer = user.call("POST", "/v1/corrections", {**body, **change})
            assert status == 400 and message in answer["error"]["message"]
        assert api._replace(token=OTHER).call("POST", "/v1/corrections", body)[0] == 400
        assert api.call("POST", "/v1/corrections", body)[0] == 401
        (listed,) = admin.call("GET", "/v1/learning")[1]["data"]
        assert listed["num_corrected"] == 2 and str(tmp_path) in str(listed)
        assert str(tmp_path) not in str(user.call("GET", "/v1/learning"))
        path = write_content(tmp_path / "other", {}, "new")
        status, promoted = admin.call("POST", "/v1/learning/signs/promote", {"path": str(path), "force": True})
        assert status == 200 and promoted["present"] == content_hash(path)
        status, back = admin.call("POST", "/v1/learning/signs/rollback", {})
        assert status == 200 and back["present"] == listed["present"]
        status, answer = admin.call("POST", "/v1/learning/signs/rollback", {"version": "zz"})
        assert status == 400 and "no version begins with 'zz'" in answer["error"]["message"]


def test_versions_on_the_command_line(vlora_command: Vlora, tmp_path: Path) -> None:  # noqa: F811
    with rpyc_server(tmp_path, ()) as server:
        at = ("--server", f"127.0.0.1:{server.port}")
        path = write_content(tmp_path / "other", {}, "new")
        code, out, _ = vlora_command("train", "promote", "signs", "--path", str(path), "--force", *at)
        new, old = content_hash(path)[:12], content_hash(tmp_path / "initial")[:12]
        assert code == 0 and out.splitlines() == [
            "signs  serves  0 corrections",
            f"  {new}  present  from {path}",
            f"  {old}  previous  from {tmp_path / 'initial'}",
        ]
        assert vlora_command("train", "rollback", "signs", *at)[1].splitlines()[2].startswith(f"  {old}  present")
        code, out, _ = vlora_command("train", "versions", "signs", "--json", *at)
        assert code == 0 and msgspec.json.decode(out)["present"].startswith(old)
        code, _, err = vlora_command("train", "versions", "absent", *at)
        assert (code, err) == (2, "error: adapter 'absent' does not learn; learning: signs\n")
        code, _, err = vlora_command("train", "rollback", "signs", *at)
        assert (code, err) == (2, "error: adapter 'signs' has no earlier version\n")
        assert trail_of(tmp_path / "signs")[-1]["by"] == "operator"


REASON = "/srv/data.jsonl, line 3: no picture"
FAILED = TrainingStatus(name="signs", state="failed", step=1, num_steps=2, error=REASON, path="/srv/out")
SHOWN = msgspec.structs.replace(FAILED, error="it failed; an admin token shows the reason", path=None)


def test_user_tokens_see_no_paths_of_trainings() -> None:
    with running_api(tokens=ALL) as api:
        api.engine.engine.parts.trainings.statuses = lambda: (FAILED,)
        user, admin = api._replace(token=USER), api._replace(token=ADMIN)
        assert REASON in str(admin.call("GET", "/v1/trainings"))
        (shown,) = user.call("GET", "/v1/trainings")[1]["data"]
        assert (shown["state"], shown["path"]) == ("failed", None)
        assert shown["error"] == "it failed; an admin token shows the reason"
        for path in ("/console/state", "/v1/trainings", "/metrics"):
            assert "/srv" not in str(user.call("GET", path)), path
    with running_server(tokens=ALL) as server:
        server.engine.engine.parts.trainings.statuses = lambda: (FAILED,)
        with Client(port=server.port, token=USER) as one, Client(port=server.port, token=ADMIN) as other:
            assert other.trainings() == (FAILED,) and one.trainings() == (SHOWN,)
            assert "/srv" not in str(one.stats())
    with running_api() as api:  # without tokens, every caller is an operator
        api.engine.engine.parts.trainings.statuses = lambda: (FAILED,)
        assert "/srv/out" in str(api.call("GET", "/v1/trainings"))


def test_a_damaged_store_does_not_stop_other_adapters(tmp_path: Path) -> None:
    with running_server() as server, Client(port=server.port) as client:
        answer = client.generate("which sign ?")
        with pytest.raises(BadRequest, match="no adapter of this server learns; start it with --learn PLAN"):
            client.correct(answer, "no")
        assert client.learning() == ()
        server.on_loop(learn(server.front_end, server.engine, tmp_path, ("bad", "good")))
        answer = client.generate("which sign ?", adapter="good")
        assert client.correct(answer, "no").adapter == "good"
        learning = server.front_end.learning
        assert learning is not None

        def fail(*_: object) -> bool:
            raise OSError("database disk image is malformed")

        learning.learners["bad"].store.correct = fail  # type: ignore[method-assign,assignment]
        assert client.correct(answer, "maybe").adapter == "good"
        with pytest.raises(OverCapacity, match="cannot be written to disk"):
            client.correct("absent", "maybe")
