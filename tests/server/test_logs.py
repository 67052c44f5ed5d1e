"""The server's log on stderr: quiet by default, one line per event, as text or JSON, without secrets."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator

import pytest

from tests.server.api import running_api
from vlora import logging_format
from vlora.config import Token


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("vlora", "uvicorn", "asyncio")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_nothing_is_logged_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    logging_format.configure({})
    with running_api() as api:
        assert api.chat("say:x")[0] == 200
    assert capsys.readouterr().err == ""
    logging.getLogger("vlora.server").warning("odd %s", "thing")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 warning vlora\.server: odd thing\n", capsys.readouterr().err
    )
    logging_format.configure({logging_format.LEVEL_VARIABLE: "shouting"})
    assert logging.getLogger("vlora").level == logging.WARNING


def test_a_log_line_for_each_request_without_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    logging_format.configure({logging_format.LEVEL_VARIABLE: "info"})
    token = "a-token-of-somebody"
    with running_api(tokens=(Token(name="u", secret=token),)) as api:
        mine = api._replace(token=token)
        assert mine.chat("say:private")[0] == 200
        assert mine.chat("")[0] == 400
    written = capsys.readouterr().err
    first, second = [line for line in written.splitlines() if "vlora.server.frontend" in line]
    assert re.search(r"info vlora\.server\.frontend: a request ended outcome=ok seconds=\d\S* choices=1$", first)
    assert "outcome=bad_request" in second
    assert "private" not in written and token not in written


def test_json_lines_carry_fields_and_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    logging_format.configure({logging_format.LEVEL_VARIABLE: "info", logging_format.JSON_VARIABLE: "1"})
    log = logging.getLogger("vlora.engine")
    log.info("loaded", extra={"fields": {"adapter": 'a"b', "seconds": 0.5}})
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError:
        log.exception("failed")
    loaded, failed = map(json.loads, capsys.readouterr().err.splitlines())
    assert {name: loaded[name] for name in ("level", "logger", "message", "adapter", "seconds")} == {
        "level": "info",
        "logger": "vlora.engine",
        "message": "loaded",
        "adapter": 'a"b',
        "seconds": 0.5,
    }
    assert failed["level"] == "error" and "RuntimeError: two\nlines" in failed["traceback"]


def test_internal_errors_are_json_lines_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logging_format.configure({logging_format.JSON_VARIABLE: "1"})
    with running_api() as api:
        monkeypatch.setattr(api.front_end, "read_metrics", None)
        status, answer = api.call("GET", "/metrics")
        assert status == 500 and answer["error"]["message"].startswith("internal server error (TypeError)")
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["level"], line["logger"]) == ("error", "uvicorn.error") and "TypeError" in line["traceback"]
