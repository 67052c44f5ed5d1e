"""The official `openai` client, unchanged, against the embedded model behind the HTTP API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoModelForImageTextToText

from fusion.embedded import checkpoint_path
from tests.processes import until
from tests.server.api import Api, image_part, running_api
from tests.server.running import png
from tests.server.test_security import ADMIN, TOKENS, USER
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.models.processing import InputProcessor

QUESTION = "what is in the picture ?"
LINEARS = r".*language_model.*\.(q|v)_proj"


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForImageTextToText.from_pretrained(checkpoint_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def processor() -> InputProcessor:
    return InputProcessor.from_pretrained(str(checkpoint_path()))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """The model with its adapter, and the adapter's folder."""
    base = AutoModelForImageTextToText.from_pretrained(checkpoint_path(), dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=64, target_modules=LINEARS, init_lora_weights=False)
    torch.manual_seed(0)
    made = get_peft_model(base, config).eval()
    made.save_pretrained(folder := str(tmp_path_factory.mktemp("openai")))
    return made, folder


@pytest.fixture(scope="module")
def api(adapted: tuple[Any, str], processor: InputProcessor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    engine = LocalEngine(EngineConfig(model=str(checkpoint_path()), dtype="float32", arena_bytes=128 * 2**20))
    engine.engine.load_adapter("streets", adapted[1])
    files = str(tmp_path_factory.mktemp("files"))
    with running_api(engine, processor, "embedded", tokens=TOKENS, file_folder=files) as made:
        yield made
        made.on_loop(engine.close())


@pytest.fixture(scope="module")
def client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key=USER, max_retries=0, timeout=30) as made:
        yield made


def content(*colors: int) -> list[dict[str, Any]]:
    return [{"type": "text", "text": QUESTION}, *(image_part(png(color, (96, 96))) for color in colors)]


def ask(client: openai.OpenAI, *colors: int, model: str = "embedded", **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": content(*colors)}]
    return client.chat.completions.create(model=model, messages=messages, **{"max_tokens": 8, **fields})


@torch.no_grad()
def plain_logits(
    model: Any, processor: InputProcessor, colors: tuple[int, ...], num_tokens: int, question: str = QUESTION
) -> torch.Tensor:
    """[num_tokens, vocab] of greedy decoding by transformers alone."""
    images = [Image.new("RGB", (96, 96), (color,) * 3) for color in colors]
    prompt = processor.encode(processor.chat(question, len(images)), images)
    pixels = processor.image_processor(images, return_tensors="pt")["pixel_values"]
    ids = torch.tensor([prompt.prompt_ids])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=pixels,
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack([step[0] for step in out.logits])


def test_answers_and_log_probabilities_are_those_of_plain_transformers(
    client: openai.OpenAI, model: Any, processor: InputProcessor
) -> None:
    for colors in ((200,), (30, 220)):
        answer = ask(client, *colors, logprobs=True, top_logprobs=4)
        (choice,) = answer.choices
        logits = plain_logits(model, processor, colors, 8).log_softmax(-1)
        ids = logits.argmax(-1).tolist()
        assert choice.message.role == "assistant" and choice.message.content == processor.decode(ids)
        scores = choice.logprobs.content
        assert [score.token for score in scores] == [processor.token_text(token) for token in ids[: len(scores)]]
        for score, token, row in zip(scores, ids, logits, strict=False):
            values, top = row.topk(4)
            assert score.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert bytes(score.bytes).decode() == score.token
            assert [other.token for other in score.top_logprobs] == [processor.token_text(int(each)) for each in top]
            assert [other.logprob for other in score.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)
        assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens
    assert ask(client, 200).choices[0].logprobs is None


DRAWN = {"temperature": 2.0, "seed": 5}


STREAMED: list[dict[str, Any]] = [
    *({}, {"n": 3, **DRAWN}, {"logprobs": True, "top_logprobs": 3}),
    {"n": 2, "logprobs": True, "max_tokens": 3, **DRAWN},
    {"stop": ["a", "e"], "max_tokens": 12, **DRAWN},
    {"n": 2, "stop": " ", "logprobs": True, **DRAWN},
]


@pytest.mark.parametrize("fields", STREAMED, ids=lambda fields: ",".join(fields) or "plain")
def test_every_choice_of_a_stream_is_that_of_the_whole_answer(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    whole = ask(client, 90, **fields)
    chunks = list(ask(client, 90, stream=True, stream_options={"include_usage": True}, **fields))
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and chunks[-1].choices == []
    parts = [chunk.choices[0] for chunk in chunks[:-1]]
    for expected in whole.choices:
        mine = [part for part in parts if part.index == expected.index]
        assert "".join(part.delta.content or "" for part in mine) == expected.message.content
        assert [part.finish_reason for part in mine if part.finish_reason] == [expected.finish_reason]
        scores = [score for part in mine if part.logprobs for score in part.logprobs.content]
        wanted = expected.logprobs.content if expected.logprobs else []
        assert [score.token for score in scores] == [score.token for score in wanted]
        for score, want in zip(scores, wanted, strict=True):
            assert score.logprob == pytest.approx(want.logprob, abs=1e-4)
            assert [other.token for other in score.top_logprobs] == [other.token for other in want.top_logprobs]
    # Tokens after a stop string count if they came in one message with it, which depends on the clock.
    for name in ("prompt_tokens",) if "stop" in fields else ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(chunks[-1].usage, name) == getattr(whole.usage, name)


def test_text_is_continued_without_the_template(client: openai.OpenAI, model: Any, processor: InputProcessor) -> None:
    texts = ["what is in", "the picture shows a"]
    answer = client.completions.create(model="embedded", prompt=texts, max_tokens=5)
    tokens = client.completions.create(
        model="embedded", prompt=[list(processor.encode(text).prompt_ids) for text in texts], max_tokens=5
    )
    for text, choice, same in zip(texts, answer.choices, tokens.choices, strict=True):
        ids = torch.tensor([processor.encode(text).prompt_ids])
        whole = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        assert choice.text == processor.decode(whole[0, ids.shape[1] :].tolist()) == same.text
    stream = client.completions.create(model="embedded", prompt=texts[0], max_tokens=5, stream=True, logprobs=2)
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == answer.choices[0].text
    assert chunks[-1].finish_reason == answer.choices[0].finish_reason
    scores = [chunk.logprobs for chunk in chunks if chunk.logprobs and chunk.logprobs.tokens]
    assert "".join(token for each in scores for token in each.tokens or ()).strip() == answer.choices[0].text
    assert all(len(top) == 2 for each in scores for top in each.top_logprobs or ())


@torch.no_grad()
def embedded(model: Any, prompt: Any, image: Image.Image | None, processor: InputProcessor, pooling: str) -> Any:
    """The pooled last states of plain transformers."""
    ids = torch.tensor([prompt.prompt_ids])
    pixels = None if image is None else processor.image_processor([image], return_tensors="pt")["pixel_values"]
    found = model(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True, pixel_values=pixels)
    states = found.hidden_states[-1][0]
    return pytest.approx(F.normalize(states[-1] if pooling == "last" else states.mean(0), dim=0).tolist(), abs=1e-5)


def test_embeddings_are_the_last_states_of_plain_transformers(
    api: Api, client: openai.OpenAI, model: Any, processor: InputProcessor, adapted: tuple[Any, str]
) -> None:
    texts, image = ["what is in the picture ?", "a red car"], Image.new("RGB", (96, 96), (200,) * 3)
    prompts = [processor.encode(text) for text in texts]
    ids: list[Any] = [list(each.prompt_ids) for each in prompts]
    for name, its in (("embedded", model), ("streets", adapted[0])):
        for pooling, fields in (
            ("last", {"input": texts, "encoding_format": "float"}),
            ("last", {"input": ids}),  # as base64
            ("mean", {"input": texts, "extra_body": {"pooling": "mean"}}),
        ):
            answer = client.embeddings.create(model=name, **fields)
            for one, prompt in zip(answer.data, prompts, strict=True):
                assert one.embedding == embedded(its, prompt, None, processor, pooling)
            assert answer.usage.prompt_tokens == sum(map(len, ids))
    turn = {"role": "user", "content": [{"type": "image"}]}
    want = embedded(
        adapted[0], processor.encode(processor.template([turn], (), False), [image]), image, processor, "last"
    )
    body = {"model": "streets", "messages": [{"role": "user", "content": content(200)[1:]}]}
    found: Any = client.post("/embeddings", body=body, cast_to=object)
    with api._replace(token=USER).client() as rpyc:
        (values,) = rpyc.embed([[png(200, (96, 96))]], "streets")
    assert found["data"][0]["embedding"] == want == list(values)


def test_scores_and_token_ids_of_a_real_model(
    api: Api, client: openai.OpenAI, model: Any, processor: InputProcessor
) -> None:
    part, asked, user = content(200)[1], "Is there a circle?", api._replace(token=USER)
    prompt = processor.encode(processor.chat(asked, 1), [Image.new("RGB", (96, 96), (200,) * 3)])
    yes = plain_logits(model, processor, (200,), 1, asked)[0].softmax(-1)[processor.encode("yes").prompt_ids[-1]]
    body = {"model": "embedded", "text_1": "a circle", "text_2": {"content": [part]}}
    found: Any = client.post("/score", body=body, cast_to=object)
    assert found["data"][0]["score"] == pytest.approx(float(yes), abs=1e-5) and 0.5 < yes < 0.55
    with user.client() as rpyc:
        assert rpyc.score(asked, [[png(200, (96, 96))]]) == (pytest.approx(float(yes), abs=1e-5),)
        assert rpyc.tokenize(asked, [png(200, (96, 96))]) == prompt.prompt_ids
    ids = list(processor.encode("a car").prompt_ids)
    plain = user.call("POST", "/tokenize", {"prompt": "a car", "add_special_tokens": False, "return_token_strs": True})[
        1
    ]
    assert user.call("POST", "/tokenize", {"prompt": "a car"})[1]["tokens"] == ids and plain["count"] == len(ids)
    assert plain["token_strs"] == [processor.token_text(token) for token in ids]
    assert user.call("POST", "/detokenize", {"tokens": ids})[1] == {"prompt": processor.tokenizer.decode(ids)}


def test_models_and_errors_are_those_of_the_openai_client(client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["embedded", "streets"]
    assert client.models.retrieve("streets").owned_by == "vlora"
    with pytest.raises(openai.NotFoundError, match="no model named 'absent'; available: embedded, streets"):
        client.models.retrieve("absent")
    bad = openai.BadRequestError
    rows: list[tuple[dict[str, Any], type[openai.APIStatusError], str, str]] = [
        ({"model": "absent"}, openai.NotFoundError, "unknown_adapter", "no adapter named 'absent'; registered: s"),
        ({"temperature": -1}, bad, "bad_request", "temperature is -1"),
        ({"modalities": ["text", "audio"]}, bad, "bad_request", "modalities: this field is not supported; answers are"),
        ({"logit_bias": {"1000000": 1}}, bad, "bad_request", "logit_bias has token id 1000000; this model's ids"),
    ]
    for fields, kind, code, message in rows:
        with pytest.raises(kind, match=message) as caught:
            ask(client, 90, **fields)
        assert caught.value.code == code
    with pytest.raises(openai.AuthenticationError, match="not valid on this server"):
        ask(client.with_options(api_key="wrong-token-0123456789"), 90)
    with pytest.raises(openai.PermissionDeniedError, match="an admin token"):
        client.post("/adapters", cast_to=object)
    listed: Any = client.with_options(api_key=ADMIN).get("/adapters", cast_to=object)
    assert [each["name"] for each in listed["data"]] == ["streets"]


def test_a_conversation_continues_with_its_answers(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "developer", "content": "answer briefly"}, {"role": "user", "content": content(90)}]
    first = client.chat.completions.create(model="embedded", messages=messages, max_tokens=4)
    messages += [first.choices[0].message, {"role": "user", "content": "what color ?"}]
    second = client.chat.completions.create(model="embedded", messages=messages, max_tokens=4)
    assert first.usage is not None and second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    details = second.usage.prompt_tokens_details
    assert details is not None and details.cached_tokens is not None
    assert details.cached_tokens >= first.usage.prompt_tokens // 16 * 16 > 0


def test_metrics_of_a_real_engine(api: Api, client: openai.OpenAI) -> None:
    for _ in range(2):
        ask(client, 90, model="streets")
    _, text = api._replace(token=USER).call("GET", "/metrics")
    values = {key: float(value) for key, value in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")}
    assert values['vlora_adapters{state="registered"}'] == 1
    assert values['vlora_arena_bytes{use="kv"}'] == 0  # no request is active
    for name in (
        *("vlora_prefix_cache_blocks", 'vlora_vision_cache_total{result="hit"}'),
        *(f'vlora_arena_bytes{{use="{use}"}}' for use in ("adapters", "free", "cached")),
        *(f'vlora_engine_prompt_tokens_total{{source="{source}"}}' for source in ("computed", "reused")),
    ):
        assert values[name] > 0, name
    assert USER not in text and ADMIN not in text


NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 4}


def in_form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}


@pytest.mark.parametrize("model", ["embedded", "streets"])
def test_answers_follow_their_grammar_whole_and_streamed(client: openai.OpenAI, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "response_format": in_form(NUMBERS), "max_tokens": 120}
    fields |= {"temperature": 1.0, "seed": 5, "logprobs": True}
    whole = ask(client, 120, n=3, **fields)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1 and {choice.finish_reason for choice in whole.choices} == {"stop"}
    for choice in whole.choices:
        jsonschema.validate(json.loads(choice.message.content), NUMBERS)
        assert len(choice.logprobs.content) >= 2
    streamed = ["", "", ""]
    for chunk in ask(client, 120, n=3, stream=True, **fields):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    (cut,) = ask(client, 120, stop=",", **fields).choices
    assert cut.message.content == texts[0].partition(",")[0]


def test_an_invalid_response_format_is_a_400(client: openai.OpenAI) -> None:
    for form, reason in (
        (in_form({"type": "blah"}), "Invalid type: blah"),
        (in_form({"const": "yes"}), "no token of this model fits"),
        ({"type": "json_schema", "json_schema": {"name": "no schema"}}, "requires {'json_schema'"),
    ):
        with pytest.raises(openai.BadRequestError, match=reason):
            ask(client, 120, response_format=form, max_tokens=100)
        # A stream may have begun already; then its last event has the error.
        with pytest.raises(openai.APIError, match=reason):
            list(ask(client, 120, response_format=form, stream=True, max_tokens=100))


def test_responses_and_batches_have_the_answers_of_chats(client: openai.OpenAI) -> None:
    chat = ask(client, 200).choices[0].message.content
    picture = content(200)[1]["image_url"]
    said: Any = [{"type": "input_text", "text": QUESTION}, {"type": "input_image", "image_url": picture["url"]}]
    asked: Any = {"model": "embedded", "input": [{"role": "user", "content": said}], "max_output_tokens": 8}
    assert client.responses.create(**asked).output_text == chat
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(deltas) == chat
    vector = client.embeddings.create(model="embedded", input="a", encoding_format="float").data[0].embedding
    for url, body in (("/v1/responses", asked), ("/v1/embeddings", {"model": "embedded", "input": "a"})):
        line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
        file = client.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")  # type: ignore[arg-type]
        until(lambda name=batch.id: client.batches.retrieve(name).status == "completed")  # type: ignore[misc]
        output = client.batches.retrieve(batch.id).output_file_id
        assert output is not None
        found = json.loads(client.files.content(output).text)["response"]["body"]
        texts = [part["text"] for item in found.get("output", ()) for part in item["content"]]
        assert texts == [chat] or found["data"][0]["embedding"] == pytest.approx(vector, abs=1e-5)
        assert {file.id, output} <= {each.id for each in client.files.list()} and client.files.delete(file.id).deleted
