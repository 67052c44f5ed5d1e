"""Names of domains in place of adapters' at each entrance, and whether a head or words answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

import vlora.cli
from tests.server.api import Api, data_url, events, image_part, running_api
from tests.server.running import png
from tests.server.scripted import write_adapter
from tests.server.test_grammars import STOP
from tests.server.wires import WIRES
from vlora.cli.train import replacing_served
from vlora.client import Client, TextQuestion
from vlora.errors import BadAdapter, BadConfig
from vlora.types.composition import MAX_NAME

BRIGHT = png(250)
DIGITS = {"name": "digits", "question": "which digit is this ?", "head": "digits", "answer": "head"}
LETTERS = {"name": "letters", "question": "which letter is this ?", "head": "letters", "answer": "words"}
SCENES = {"name": "scenes", "question": "say:street"}
OTHERS = {"name": "others", "question": "what else ?"}


def written(folder: Path, *domains: dict[str, str]) -> str:
    """An adapter's folder, as fusing writes it."""
    write_adapter(folder, {each["head"]: 1 for each in domains if "head" in each}, domains)
    (folder / "domains.json").write_text(json.dumps({"domains": domains}))
    return str(folder)


def load(api: Api, folder: Path, name: str, *domains: dict[str, str]) -> None:
    api.on_loop(api.front_end.adapters.load(name, written(folder / f"{name}-{len(domains)}", *domains)))


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with running_api() as made:
        load(made, tmp_path, "fused-1", DIGITS, LETTERS, SCENES)
        load(made, tmp_path, "fused-2", OTHERS)
        yield made


class Found(NamedTuple):
    """An answer. adapter: its own name."""

    text: str
    by: str
    adapter: str | None


def chat(api: Api, text: str = "", images: int = 1, **fields: Any) -> tuple[int, Any]:
    parts = [{"type": "text", "text": text}] if text else []
    return api.chat([*parts, *[image_part(BRIGHT)] * images], **{"model": "digits", **fields})


def asked(wire: str, stream: bool = False) -> Callable[[Api], Found]:
    def ask(api: Api) -> Found:
        for question in ("Which digit is this?", ""):
            found = WIRES[wire](api).ask(question, [BRIGHT], stream=stream, adapter="digits")
        return Found(found.text, found.by, found.adapter)

    return ask


def command(api: Api, *args: object) -> Any:
    """The only line of a command's output, which is JSON."""
    words = [*map(str, args), "--json", "--server", f"127.0.0.1:{api.port}"]
    done = CliRunner().invoke(vlora.cli.cli, words)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def queried(api: Api, folder: Path) -> Found:
    found = command(api, "query", folder / "a.png", "WHICH digit is this", "-a", "digits")
    return Found(found["text"], found["answered_by"], found["adapter"])


def in_batch(api: Api, folder: Path) -> Found:
    found = command(api, "batch", folder / "a.png", "-a", "digits")
    assert found["confidence"] > 0.9
    return Found(found["text"], found["answered_by"], found["answer"]["adapter"])


def analysed(api: Api, folder: Path) -> Found:
    found = command(api, "stream", folder, "-a", "digits", "--head", "digits")
    return Found(found["label"], "head", found["answer"]["adapter"])


def asked_heads(api: Api) -> Found:
    with api.client() as client:
        one, other = client.ask_heads([BRIGHT], [("digits", "digits"), ("digits", None)])
        alone = client.ask_head([BRIGHT], "digits")
    assert one.answer is not None and other.answer is not None
    assert one.answer.label == other.answer.label == alone.label and alone.adapter == one.answer.adapter
    return Found(one.answer.label, "head", one.answer.adapter)


def heads_over_http(api: Api) -> Found:
    status, one = api.call("POST", "/v1/heads/digits/digits", {"images": [data_url(BRIGHT)]})
    body = {"images": [data_url(BRIGHT)], "heads": [{"adapter": "digits"}]}
    assert status == 200 and api.call("POST", "/v1/heads", body)[1]["data"][0]["label"] == one["label"]
    return Found(one["label"], "head", one["adapter"])


def in_frames(api: Api) -> Found:
    questions = [TextQuestion("say:x", "digits")]
    with (
        api.client() as client,
        client.open_stream(adapter="digits", head="digits", questions=questions, drop="none") as frames,
    ):
        frames.send(BRIGHT)
        head, words = next(frames).answers
    assert words.text is not None and (words.text.text, words.text.answered_by) == ("x", "words")
    assert head.answer is not None and head.answer.adapter == words.text.adapter and head.adapter == "digits"
    return Found(head.answer.label, "head", head.answer.adapter)


ENTRANCES: dict[str, Callable[[Api], Found]] = {
    **{wire: asked(wire) for wire in WIRES},
    **{f"{wire}, streamed": asked(wire, stream=True) for wire in WIRES},
    "ask_heads": asked_heads,
    "heads over HTTP": heads_over_http,
    "frames": in_frames,
}
COMMANDS: dict[str, Callable[[Api, Path], Found]] = {"query": queried, "batch": in_batch, "stream": analysed}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (folder := tmp_path / "pictures").mkdir()
    (folder / "a.png").write_bytes(png(250, (64, 64)))
    return folder


@pytest.mark.parametrize("name", [*ENTRANCES, *COMMANDS])
def test_a_domain_s_name_stands_for_its_adapter_also_after_it_moved(
    api: Api, tmp_path: Path, folder: Path, name: str
) -> None:
    def ask() -> Found:
        return ENTRANCES[name](api) if name in ENTRANCES else COMMANDS[name](api, folder)

    assert ask() == ("bright", "head", "fused-1")
    if name in ENTRANCES and name != "frames":  # frames ask for words, too
        # The front end's list of adapters is that of before a change, as of a request that is being prepared.
        for adapter, domains in (("fused-2", (OTHERS, DIGITS)), ("fused-1", (SCENES,))):
            api.engine.engine.load_adapter(adapter, written(tmp_path / f"new-{adapter}", *domains))
        assert ask() == ("bright", "head", "fused-2")
        load(api, tmp_path, "fused-1", DIGITS, LETTERS)
        assert ask() == ("bright", "head", "fused-1")
    load(api, tmp_path, "fused-2", OTHERS, DIGITS)
    assert ask() == ("bright", "head", "fused-2"), "the adapter that was loaded last has the domain"
    load(api, tmp_path, "fused-1", SCENES)
    assert ask() == ("bright", "head", "fused-2")


HEADED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "without a question": ("", 1, {}),
    "its question": ("which digit is this ?", 1, {}),
    "in another spelling": (" Which  digit is this", 1, {}),
    "greedy, with limits": ("", 1, {"temperature": 0, "max_tokens": 3, "seed": 1}),
    "chosen": ("what is it?", 1, {"answer": "head"}),
    "chosen although words are better": ("", 1, {"model": "letters", "answer": "head"}),
    "of the adapter": ("which digit is this?", 1, {"model": "fused-1"}),
}
WORDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "chosen": ("", 1, {"answer": "words"}),
    "words are better": ("", 1, {"model": "letters"}),
    "no head": ("", 1, {"model": "scenes"}),
    "another question": ("which digit is red ?", 1, {}),
    "the adapter has several domains": ("what is it ?", 1, {"model": "fused-1"}),
    "two images": ("which digit is this ?", 2, {}),
    "several choices": ("", 1, {"n": 2}),
    "sampled": ("", 1, {"temperature": 0.5}),
    "log probabilities": ("", 1, {"logprobs": True}),
    "a format": ("", 1, {"response_format": {"type": "json_object"}}),
    "tools": ("", 1, {"tools": [STOP]}),
    "a system message": ("", 1, {"messages": [{"role": "system", "content": "be brief"}]}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_which_way_answers(api: Api, stream: bool) -> None:
    for by, rows in (("head", HEADED), ("words", WORDS)):
        for name, (text, images, fields) in rows.items():
            if "messages" in fields:
                content = [image_part(BRIGHT)]
                fields = {"messages": [*fields["messages"], {"role": "user", "content": content}]}
            status, answer = chat(api, text, images, stream=stream, **fields)
            assert status == 200, (name, answer)
            choices = events(answer)[-1]["choices"] if stream else answer["choices"]
            assert {each["answered_by"] for each in choices} == {by}, name
            assert by == "words" or choices[0]["confidence"] > 0.9
    assert chat(api, model="scenes")[1]["choices"][0]["message"]["content"] == "street", (
        "the domain's question is asked"
    )


REFUSED: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "the base model": ("", 1, {"model": "base"}, "the base model has no heads"),
    "no head": ("", 1, {"model": "scenes"}, "domain 'scenes' has no head"),
    "several domains": ("what?", 1, {"model": "fused-1"}, "has no single domain for this request; name one"),
    "two images": ("", 2, {}, "head 'digits' reads 1 image per request"),
    "several choices": ("", 1, {"n": 2}, "n is 2, and a head has one answer"),
    "sampled": ("", 1, {"temperature": 0.5}, "temperature applies to words only"),
    "a format": ("", 1, {"response_format": {"type": "json_object"}}, "response_format applies to words only"),
    "a composition": ("what?", 1, {"model": "digits+others"}, "a composition has no heads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_head_that_cannot_answer_is_refused_if_it_is_chosen(api: Api, name: str) -> None:
    text, images, fields, why = REFUSED[name]
    status, answer = chat(api, text, images, answer="head", **fields)
    assert status == 400 and answer["error"]["param"] == "answer"
    assert answer["error"]["message"].startswith("answer is 'head', but ") and why in answer["error"]["message"]


def test_names_of_domains_in_lists_compositions_metrics_and_changes(api: Api, tmp_path: Path) -> None:
    models = {each["id"]: each for each in api.call("GET", "/v1/models")[1]["data"]}
    assert models["fused-1"]["domains"] == ["digits", "letters", "scenes"] and models["fused-1"]["parent"] == "base"
    assert (models["digits"]["parent"], models["digits"]["answer"]) == ("fused-1", "head")
    assert api.call("GET", "/v1/models/letters")[1]["answer"] == "words"
    (first, _) = api.call("GET", "/v1/adapters")[1]["data"]
    assert [each["name"] for each in first["domains"]] == ["digits", "letters", "scenes"]
    with api.client() as client:
        assert client.generate("say:x", adapter={"digits": 0.5, "others": 1}).adapter == "0.5*fused-1+fused-2"
    status, answer = chat(api, "say:x", model="digits+letters")
    assert status == 400 and "digits, letters are of one adapter (fused-1); name it once" in answer["error"]["message"]
    status, answer = chat(api, "say:x", model="nothing")
    assert status == 404 and "; domains: digits, letters, others, scenes" in answer["error"]["message"]
    for method, path in (("PUT", "digits/pin"), ("DELETE", "digits")):
        status, answer = api.call(method, f"/v1/adapters/{path}")
        assert status == 404 and "'digits' is a domain of adapter 'fused-1'" in answer["error"]["message"]
    assert chat(api)[1]["choices"][0]["domain"] == "digits"
    assert 'vlora_requests_total{adapter="fused-1",outcome="ok"}' in api.call("GET", "/metrics")[1]
    assert "digits" not in api.call("GET", "/metrics")[1]
    # An adapter's own name goes before a domain's.
    load(api, tmp_path, "digits", OTHERS)
    assert chat(api, "say:x")[1]["choices"][0]["domain"] is None
    api.on_loop(api.front_end.adapters.unload("digits"))
    assert asked("http")(api) == ("bright", "head", "fused-1")
    # Adapters that were loaded at once: neither is the later one.
    places = {each: write_adapter(tmp_path / each, {"digits": 1}) for each in ("a", "b")}
    api.on_loop(api.front_end.adapters.register(places))
    status, answer = chat(api)
    assert (
        status == 400 and "domain 'digits' belongs to adapters 'a', 'b'; name the adapter" in answer["error"]["message"]
    )


def test_the_client_reads_the_server_s_address(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLORA_SERVER", f"localhost:{api.port}")
    with Client() as client:
        assert client.generate("say:x").text == "x"
    monkeypatch.setenv("VLORA_SERVER", "nowhere")
    with pytest.raises(BadConfig, match="VLORA_SERVER is 'nowhere'; write HOST:PORT"):
        Client()
    with api.client() as client:
        assert client.generate("say:x").text == "x", "an address that is given goes before the environment"


def test_replaced_adapters_are_loaded_before_those_that_lose_a_domain(api: Api, tmp_path: Path) -> None:
    contents = {"fused-1": (LETTERS, SCENES), "fused-2": (OTHERS, DIGITS), "fused-3": ()}
    loaded: list[str] = []
    with api.client() as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "load_adapter", lambda name, path: loaded.append(name))
        with replacing_served(client, tmp_path / "adapters"):
            for name, domains in contents.items():
                written(tmp_path / "adapters" / name, *domains)
    assert loaded == ["fused-2", "fused-3", "fused-1"], "digits move from fused-1 to fused-2"


def exchange(folder: Path, first: str, second: str) -> None:
    """Write the adapters again: "digits" and "others" change places."""
    written(folder / first, OTHERS, LETTERS, SCENES)
    written(folder / second, DIGITS)


def test_domains_that_two_adapters_exchange_have_an_adapter_at_any_moment(api: Api, tmp_path: Path) -> None:
    names: list[list[str]] = []
    with api.client() as client, pytest.MonkeyPatch.context() as patch:
        for change in (client.load_adapter, client.unload_adapter):

            def changed(*args: Any, change: Callable[..., Any] = change, **kwargs: Any) -> None:
                change(*args, **kwargs)
                names.append(sorted(each["id"] for each in api.call("GET", "/v1/models")[1]["data"]))
                for domain in ("digits", "letters", "others"):
                    assert client.generate("say:x", adapter=domain).text == "x", (args, domain)

            patch.setattr(client, change.__name__, changed)
        with replacing_served(client, tmp_path / "adapters"):
            exchange(tmp_path / "adapters", "fused-1", "fused-2")
    assert [sum(name.endswith(".next") for name in each) for each in names] == [1, 1, 1, 0]
    assert {each["name"] for each in api.call("GET", "/v1/adapters")[1]["data"]} == {"fused-1", "fused-2"}


def test_an_extra_adapter_that_a_failure_leaves_is_named_and_removed_by_the_next_run(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with api.client() as client:
        names = lambda: {each.name for each in client.adapters()}  # noqa: E731
        with pytest.MonkeyPatch.context() as patch:
            loading = client.load_adapter

            def failing(name: str, path: Any) -> Any:
                if not name.endswith(".next"):
                    raise BadAdapter(f"{path}: broken")
                return loading(name, path)

            patch.setattr(client, "load_adapter", failing)
            with pytest.raises(BadAdapter), replacing_served(client, tmp_path / "adapters"):
                exchange(tmp_path / "adapters", "fused-1", "fused-2")
        (extra,) = names() - {"fused-1", "fused-2"}
        assert f"left on the server: {extra}; run again, or unload them" in capsys.readouterr().err
        with replacing_served(client, tmp_path / "adapters"):
            pass
        assert names() == {"fused-1", "fused-2"} and "left" not in capsys.readouterr().err


def test_a_name_that_is_too_long_for_an_extra_adapter_is_replaced_without(api: Api, tmp_path: Path) -> None:
    long = "n" * MAX_NAME
    load(api, tmp_path, long, OTHERS)
    with api.client() as client:
        client.unload_adapter("fused-2")
        with replacing_served(client, tmp_path / "adapters"):
            exchange(tmp_path / "adapters", "fused-1", long)
        assert {each.name for each in client.adapters()} == {"fused-1", long}
