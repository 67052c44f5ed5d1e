"""Embeddings, scores and token ids with a scripted engine (`embedding_of`); `test_openai_client.py` has a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.apps.scripted import answer_of
from tests.server.api import Api, image_part, running_api
from tests.server.running import png
from vlora.errors import BadRequest, StepFailed
from vlora.server import embeddings

EMBED, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
PICTURE = image_part(png())
TURN = [{"role": "user", "content": [PICTURE]}]


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with running_api(adapters={"cam": {"night": 1}, "learned": {"night": 1}}, max_requests=4) as made:
        yield made


@pytest.fixture
def asked(api: Api, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The texts of the prompts that are encoded. Each one's score is a tenth of its length."""
    seen: list[str] = []
    encode = api.front_end.processor.encode_processed

    def encoded(prompt: str, *others: Any) -> Any:
        seen.append(prompt.replace("\0", "[image]"))
        return encode(prompt, *others)

    monkeypatch.setattr(api.front_end.processor, "encode_processed", encoded)
    monkeypatch.setattr(embeddings, "yes_probability", lambda answer: answer.num_prompt_tokens / 10)
    yield seen
    assert api.idle() and api.front_end.num_active == 0


def call(api: Api, path: str, **body: Any) -> Any:
    status, answer = api.call("POST", path, {"model": "base", **body})
    assert status in (200, 400, 404), answer
    return answer


def test_embeddings_of_many_inputs_and_of_a_picture_alone(api: Api) -> None:
    answer = call(api, EMBED, input=["abc", "  "], model="cam", user="me", dimensions=3)
    data = [{"object": "embedding", "index": i, "embedding": [length, 0, 0]} for i, length in enumerate((3, 2))]
    assert answer["data"] == data and (answer["model"], answer["usage"]["total_tokens"]) == ("cam", 5)
    for given, lengths in (([7, 8], [2]), ([[7], [8, 9]], [1, 2]), (["x" * n for n in range(1, 40)], range(1, 40))):
        assert [each["embedding"][0] for each in call(api, EMBED, input=given)["data"]] == list(lengths)
    for begins, length in ((False, 2), (True, 1)):
        (one,) = call(api, EMBED, messages=TURN, add_generation_prompt=begins)["data"]
        assert one["embedding"] == [length, 1, 0]


def test_documents_are_asked_about_and_ordered_by_their_scores(api: Api, asked: list[str]) -> None:
    documents, about = ["a", {"content": [PICTURE]}, "ccc"], "Is this about q?"
    answer = call(api, RERANK, query="q", documents=documents, top_n=2, max_latency_s=30, priority=-1)
    scores = [(r["index"], r["relevance_score"], r.get("document")) for r in answer["results"]]
    assert scores == [(2, 2.0, {"text": "ccc"}), (0, 1.8, {"text": "a"})] and answer["usage"]["total_tokens"] == 50
    assert sorted(asked) == ["[image]Is there q?", f"a\n{about}", f"ccc\n{about}"]
    results = call(api, RERANK, query="q", documents=documents, return_documents=False)["results"]
    assert [(each["index"], "document" in each) for each in results] == [(2, False), (0, False), (1, False)]
    asked.clear()
    found = call(api, SCORE, text_1=["cats", "dogs"], text_2=["x", "yy"], question="{}?")["data"]
    assert [each["score"] for each in found] == [0.7, 0.8] and asked == ["x\ncats?", "yy\ndogs?"]


def test_the_score_is_the_probability_of_yes() -> None:
    for top, yes in (
        ([("Yes", 0.5), (" yes", 0.25), ("No", 0.1)], 0.75),
        ([("no", 0.9), ("yesterday", 0.1)], 0),
        ([], 0),
    ):
        assert embeddings.yes_probability(answer_of("Yes", *top)) == pytest.approx(yes)


def test_the_same_calls_over_rpyc(api: Api, asked: list[str]) -> None:
    with api.client() as client:
        assert client.embed(["abc", [png(), png(9)]], "cam", pooling="mean") == ((3, 0, 1), (3, 2, 1))
        assert client.score("day?", ["dark", [png()]], "0.5*cam+0.5*learned") == (0.9, 0.5)
        assert client.tokenize("ab") == (97, 98) == client.tokenize("ab", chat=True)
        assert client.tokenize("a", [png()]) == (257, 97) and client.detokenize([97, 256]) == "a<eos>"
        for documents, kind in (("abc", BadRequest), (["a", ""], BadRequest), (["never", "fail", "never"], StepFailed)):
            with pytest.raises(kind):
                client.embed(documents)


ERRORS: list[tuple[str, dict[str, Any], str | None, str]] = [
    (EMBED, {"input": ["a"] * 1025}, "input", "input has 1025 entries; send 1 to 1024"),
    (EMBED, {"input": "a", "dimensions": 2}, "dimensions", "dimensions is 2; this model's embeddings have 3"),
    (EMBED, {"input": "a", "model": "absent"}, "model", "no adapter named 'absent'; registered: "),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "text_1 has 2 queries and text_2 1 documents; send one"),
    (SCORE, {"text_1": "a", "text_2": {"content": [{"type": "a"}]}}, "text_2.0.content.0", "has type 'a'; choose one"),
    (RERANK, {"query": " ", "documents": ["b"]}, "query", "the query is empty"),
    ("/tokenize", {"messages": TURN, "add_special_tokens": True}, "add_special_tokens", "the chat template adds"),
    ("/detokenize", {"tokens": [258]}, "tokens", "tokens has the id 258; this model's ids run from 0 to 257"),
]


def test_bad_input_is_refused_with_its_problem(api: Api) -> None:
    for path, body, param, message in ERRORS:
        error = call(api, path, **body)["error"]
        assert message in error["message"] and param in (None, error["param"]), (body, error)
