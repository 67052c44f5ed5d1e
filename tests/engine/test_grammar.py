"""Answers under a grammar match it, for any model output and any other requests in the batch."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fusion.embedded import checkpoint_path
from tests.engine.asking import tokens
from tests.example_counts import scaled
from tests.families import VOCAB, build_model
from tests.queued_executor import QueuedExecutor
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.engine.grammar_cache import GrammarCache
from vlora.errors import BadRequest
from vlora.memory.arena import PAGE_BYTES
from vlora.memory.host_to_device import Inline
from vlora.models.grammar import Cursor, Grammar, GrammarCompiler
from vlora.server.http.tools import Tool, ToolCallParser, call_grammar, json_grammar
from vlora.types import Request, RequestOutput, SamplingParams

pytestmark = pytest.mark.slow

EOS = 2
BYTES = LLTokenizer("byte")
JSON = ['{"', '":', ' "', '",']
LONGER = (*JSON, *("tr", "ue", "true", "al", "se", "12", "34", "123", "aa", "ab", "ba", "aba", "na", "me", "name"))
FAMILY = "qwen2_vl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer of the tiny models' 200 tokens: printable ASCII, newline, and longer combinations of these."""
    letters = {chr(code): chr(code) for code in range(33, 127)} | {" ": "\u0120", "\n": "\u010a"}
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": EOS}
    for text in [*letters, *LONGER]:
        vocab["".join(letters[letter] for letter in text)] = len(vocab)
    merges = []
    for token in list(vocab)[3 + len(letters) :]:
        cut = max(cut for cut in range(1, len(token)) if token[:cut] in vocab and token[cut:] in vocab)
        merges.append((token[:cut], token[cut:]))
    assert len(vocab) < 190
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>")
    made = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(str(made))
    return str(made)


@pytest.fixture(scope="module")
def tokenizer(folder: str) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def engine(folder: str, *, pages: int = 2048, executor: Executor | None = None, **fields: Any) -> LocalEngine:
    config = EngineConfig(
        model=folder,
        dtype="float32",
        max_batch_size=16,
        block_size=8,
        arena_bytes=pages * PAGE_BYTES,
        merge_fidelity_floor=0.0,
        **fields,
    )
    return LocalEngine(config, model=build_model(FAMILY), executor=executor)


@pytest.fixture(scope="module")
def local(folder: str) -> LocalEngine:
    return engine(folder)


@pytest.fixture(scope="module")
def compiler(folder: str) -> GrammarCompiler:
    return GrammarCompiler(folder, VOCAB, [EOS])


def schema_grammar(schema: Any) -> str:
    grammar = json_grammar("json_schema", {"name": "it", "schema": schema})
    assert grammar is not None
    return grammar


def ask(name: str, grammar: str | None, *, seed: int = 0, temperature: float = 1.0, **fields: Any) -> Request:
    ids = torch.randint(3, 180, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
    sampling = SamplingParams(
        max_tokens=fields.pop("max_tokens", 700), temperature=temperature, seed=seed, grammar=grammar, **fields
    )
    return Request(request_id=name, prompt_ids=tuple(ids), sampling=sampling)


def text_of(tokenizer: Any, outputs: Sequence[RequestOutput]) -> str:
    assert outputs[-1].error is None, outputs[-1].error
    return str(tokenizer.decode(tokens(outputs), skip_special_tokens=True))


# -- schemas ----------------------------------------------------------------------------------------------------------

WORDS = st.text(alphabet="abnme12_", min_size=1, max_size=6)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], data: Any) -> dict[str, Any]:
        required = [name for name, wanted in zip(properties, data, strict=False) if wanted]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(build, st.dictionaries(WORDS, inner, max_size=3), st.lists(st.booleans(), min_size=3, max_size=3))


SCALARS = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.tuples(st.integers(-40, 40), st.integers(0, 500)).map(
        lambda two: {"type": "integer", "minimum": two[0], "maximum": two[0] + two[1]}
    ),
    st.tuples(st.integers(0, 3), st.integers(0, 5)).map(
        lambda two: {"type": "string", "minLength": two[0], "maxLength": two[0] + two[1]}
    ),
    st.sampled_from(["^[ab]{2,5}$", "^x(12|34)+y$", "^a?b?c?$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 12}
    ),
    st.lists(WORDS | st.integers(-99, 99) | st.booleans() | st.none(), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    WORDS.map(lambda word: {"const": word}),
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda of: {"type": "array", "items": of[0], "minItems": of[1], "maxItems": of[1] + of[2]}
        ),
        objects(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
    ),
    max_leaves=5,
)


@given(schemas=st.lists(SCHEMAS, min_size=3, max_size=6), seed=st.integers(0, 2**20))
@settings(max_examples=scaled(25), suppress_health_check=list(HealthCheck))
def test_answers_of_a_random_model_match_their_schema(
    local: LocalEngine, tokenizer: Any, schemas: list[Any], seed: int
) -> None:
    answers = local.run(ask(f"r{i}", schema_grammar(schema), seed=seed + i) for i, schema in enumerate(schemas))
    for i, schema in enumerate(schemas):
        assert answers[f"r{i}"][-1].finish_reason == "stop", (schema, text_of(tokenizer, answers[f"r{i}"]))
        jsonschema.validate(json.loads(text_of(tokenizer, answers[f"r{i}"])), schema)


def test_json_is_on_one_line_with_single_spaces(local: LocalEngine, tokenizer: Any) -> None:
    """A random model writes whitespace without end if it is allowed. Also without a schema."""
    entries = {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "minItems": 3, "maxItems": 3}
    schema = {"type": "object", "properties": {"aa": entries, "ab": entries}, "required": ["aa", "ab"]}
    grammars = schema_grammar({**schema, "additionalProperties": False}), json_grammar("json_object", None)
    asked = [ask(f"{kind} {seed}", grammars[kind], seed=seed, temperature=3.0) for seed in range(8) for kind in (0, 1)]
    asked += [ask(f"1 {seed}", grammars[1], seed=seed, top_p=0.5) for seed in range(8, 20)]
    finished: Counter[str] = Counter()
    for name, outputs in local.run(asked).items():
        text = text_of(tokenizer, outputs)
        if outputs[-1].finish_reason == "stop":
            finished[name[0]] += 1
            assert "  " not in text and isinstance(json.loads(text), dict)
            assert name[0] == "1" or text.replace(" ", "") == json.dumps(json.loads(text), separators=(",", ":"))
    assert finished["0"] == 8 and finished["1"] > 0


def test_a_random_model_calls_tools_as_declared(local: LocalEngine, tokenizer: Any) -> None:
    entries = {"type": "string", "pattern": "^[ab]{1,4}$"}
    schemas: dict[str, dict[str, Any]] = {
        "name": {"type": "object", "properties": {"aa": entries}, "required": ["aa"], "additionalProperties": False},
        "aba": {"type": "object", "properties": {}, "additionalProperties": False},
    }
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": schema}})
        for name, schema in schemas.items()
    ]
    grammar = call_grammar(tools, "required", True)
    found = []
    for outputs in local.run(ask(f"r{seed}", grammar, seed=seed) for seed in range(12)).values():
        assert outputs[-1].finish_reason == "stop"
        reader = ToolCallParser()
        around, calls = reader.feed(text_of(tokenizer, outputs))
        assert calls and not (around + reader.finish()).strip()
        found += calls
    for call in found:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    assert {call.name for call in found} == set(schemas)


# -- against a naive implementation -----------------------------------------------------------------------------------


def parsed(grammar: str, text: str) -> LLMatcher | None:
    """The parser after a text, byte by byte without a model's tokens; None if it is no prefix of the grammar."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher if all(matcher.consume_token(byte) for byte in text.encode()) else None


@torch.no_grad()
def naive(model: Any, tokenizer: Any, prompt_ids: Sequence[int], grammar: str, max_tokens: int) -> list[int]:
    """Greedy: the likeliest token that keeps the text a prefix of the grammar."""
    found: list[int] = []
    while len(found) < max_tokens:
        ids = torch.tensor([[*prompt_ids, *found]])
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
        text = tokenizer.decode(found)
        for token in logits.argsort(descending=True).tolist():
            ended = parsed(grammar, text) if token == EOS else None
            if ended is not None and ended.is_accepting():
                return [*found, EOS]
            if 2 < token < len(tokenizer) and parsed(grammar, text + tokenizer.decode([token])):
                found.append(token)
                break
        else:
            raise AssertionError("nothing fits")
    return found


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["aba", "ab", "name", "12"]},
        {"type": "array", "items": {"type": "integer", "maximum": 400, "minimum": -5}, "minItems": 1, "maxItems": 3},
        {"type": "string", "pattern": "^(ab|ba|aba){3}$"},
    ],
    ids=lambda schema: next(iter(schema.values())) if isinstance(schema, dict) else "",
)
def test_greedy_answers_equal_those_of_the_naive_search(folder: str, tokenizer: Any, schema: Any) -> None:
    # Where only one text can follow, the library otherwise forces the token that the tokenizer would produce.
    grammar = '%llguidance {"no_forcing": true}\n' + schema_grammar(schema)
    local, model = engine(folder), build_model(FAMILY).eval()
    requests = [ask(f"r{seed}", grammar, seed=seed, temperature=0.0, max_tokens=24) for seed in range(3)]
    for request, outputs in zip(requests, local.run(requests).values(), strict=True):
        assert tokens(outputs) == naive(model, tokenizer, request.prompt_ids, grammar, 24)


# -- batches, preemption, modes ---------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "aa": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "aa"],
    "additionalProperties": False,
}


def test_requests_of_a_batch_do_not_change_each_other(local: LocalEngine) -> None:
    requests = [
        ask(f"r{i}", schema_grammar(PERSON) if i % 2 else None, seed=i, max_tokens=40, logprobs=2) for i in range(6)
    ]
    together = local.run(requests)
    for request in requests:
        (alone,) = local.run([request]).values()
        assert tokens(alone) == tokens(together[request.request_id])
        both = alone, together[request.request_id]
        scores = [[score.logprob for part in parts for score in part.scores] for parts in both]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3)


def test_scores_are_those_of_the_model_without_a_grammar(local: LocalEngine) -> None:
    """The log probability of a forced token is the model's own, so it may be low."""
    (outputs,) = local.run([ask("r", schema_grammar({"const": "zz"}), logprobs=1)]).values()
    scores = [score for output in outputs for score in output.scores]
    assert len(scores) == len(tokens(outputs)) and any(s.logprob < s.top[0][1] for s in scores)


@pytest.mark.usefixtures("no_kv_admission")
def test_a_preempted_answer_continues_its_grammar(folder: str) -> None:
    requests = [ask(f"r{i}", schema_grammar(PERSON), seed=i, max_tokens=60) for i in range(8)]
    roomy, scarce = engine(folder, prefix_cache=False), engine(folder, pages=26, prefix_cache=False)
    expected, got = roomy.run(requests), scarce.run(requests)
    assert scarce.engine.stats().num_preemptions > 0 == roomy.engine.stats().num_preemptions
    assert {name: tokens(each) for name, each in got.items()} == {name: tokens(each) for name, each in expected.items()}


# -- errors -----------------------------------------------------------------------------------------------------------

TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "blah"}, "Invalid type: blah"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": TEXT}} for j in range(4)]} for i in range(10)]}, "large"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_unsupported_schema_fails_its_request_with_the_reason(local: LocalEngine, schema: Any, reason: str) -> None:
    good = ask("good", schema_grammar({"type": "boolean"}))
    answers = local.run([ask("bad", schema_grammar(schema)), good])
    (refused,) = answers["bad"]
    assert refused.error is not None and refused.error.code == "bad_request" and reason in refused.error.message
    assert "\n" not in refused.error.message and answers["good"][-1].finish_reason == "stop"


def test_a_long_chain_of_rules_needs_no_deep_stack_of_the_engine(local: LocalEngine) -> None:
    """In the default stack of a thread the library overflows, which ends the process."""
    rules = "\n".join(f"r{number}: r{number + 1}" for number in range(4500))
    (*_, output) = local.run([ask("chain", f'start: r0\n{rules}\nr4500: "a"')])["chain"]
    assert output.error is None and output.finish_reason == "stop"


def test_other_threads_have_stacks_of_the_usual_size(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*_args: Any, **_named: Any) -> None:
        raise RuntimeError("can't start new thread")

    before = threading.stack_size()
    compiler.compile('start: "a"')
    assert threading.stack_size() == before
    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor.submit", no_thread)
    with pytest.raises(RuntimeError, match="can't start"):
        compiler.compile('start: "a"')
    assert threading.stack_size() == before


def test_a_text_that_the_tokenizer_cannot_write_is_refused(tokenizer: Any) -> None:
    """The embedded model's tokenizer has words: it puts a space before each word, and before a quote."""
    words = AutoTokenizer.from_pretrained(checkpoint_path())
    compiler = GrammarCompiler(str(checkpoint_path()), 480, [words.eos_token_id])
    random = np.random.default_rng(0)

    def say(schema: Any) -> str:
        cursor, tokens = compiler.compile(schema_grammar(schema)).begin(), []
        while True:
            tokens.append(int(random.choice(np.flatnonzero(cursor.allowed()))))
            if tokens[-1] == words.eos_token_id:
                return str(words.decode(tokens, skip_special_tokens=True))
            cursor.advance(tokens[-1])

    for _ in range(20):
        schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4}
        jsonschema.validate(json.loads(say(schema)), schema)
        text = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}
        jsonschema.validate(json.loads(say(text)), text)
        # No prefix exists at the top: a continuation piece would keep its marker.
        number = {"type": "integer", "minimum": 0, "maximum": 999}
        jsonschema.validate(json.loads(say(number)), number)
    with pytest.raises(BadRequest, match="no token of this model fits"):
        say({"const": "yes"})


KEYWORDS = st.sampled_from(
    ["type", "properties", "items", "enum", "anyOf", "allOf", "oneOf", "$ref", "pattern", "minimum", "maxLength", "a"]
)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["#", "^a+$"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS, inner, max_size=3),
    max_leaves=8,
)


@given(schema=st.dictionaries(KEYWORDS, JUNK, max_size=4))
@settings(max_examples=scaled(300), suppress_health_check=list(HealthCheck))
def test_any_schema_compiles_or_is_refused(compiler: GrammarCompiler, schema: Any) -> None:
    try:
        cursor = compiler.compile(schema_grammar(schema)).begin()
        for _ in range(8):
            _advance(cursor)
    except BadRequest as error:
        assert len(str(error)) < 500


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    (answer,) = engine(str(tmp_path)).run([ask("r", schema_grammar({}))]).values()
    assert answer[-1].error is not None and "this model does not support grammars" in answer[-1].error.message


# -- compilation in the background ------------------------------------------------------------------------------------


def test_steps_continue_while_a_grammar_is_compiled(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    later = QueuedExecutor()
    monkeypatch.setattr("vlora.engine.build.GrammarCache", lambda compiler, executor: GrammarCache(compiler, later))
    inner = engine(folder).engine
    for name in ("held", "other", "cancelled", "late"):
        sampling = SamplingParams(max_tokens=5, grammar=None if name == "other" else schema_grammar({"const": "aba"}))
        late = 0.05 if name == "late" else None
        inner.add(Request(request_id=name, prompt_ids=(5, 6, 7), sampling=sampling, max_latency_s=late))
    assert len(later.waiting) == 1, "one grammar is compiled once"
    ended: dict[str, RequestOutput] = {}
    while len(ended) < 2:
        ended |= {output.request_id: output for output in inner.step() if output.finished}
    assert ended["other"].finish_reason == "length"
    assert ended["late"].error is not None and ended["late"].error.code == "deadline_missed"
    assert inner.cancel("cancelled") is not None and inner.has_work
    threading.Timer(0.05, later.run).start()
    outputs: list[RequestOutput] = []
    while inner.has_work:
        outputs += inner.step()
        inner.check_integrity()
    assert {output.request_id for output in outputs} == {"held"} and outputs[-1].finish_reason == "stop"
    assert not inner.parts.grammars.pending


class Compiled:
    """A compiler that records its grammars, and waits for `gate` if there is one."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.grammars: list[str] = []
        self._gate = gate

    def compile(self, grammar: str) -> Grammar:
        self.grammars.append(grammar)
        assert self._gate is None or self._gate.wait(60)
        if grammar == "wrong":
            raise BadRequest("wrong")
        if grammar == "trip":
            raise RuntimeError("tripped")
        return Grammar(None, 1)


def test_sixteen_grammars_are_kept_and_an_invalid_one_is_not_recompiled() -> None:
    compiled = Compiled()
    grammars = GrammarCache(compiled, Inline())  # type: ignore[arg-type]
    for number, grammar in enumerate(["wrong", "trip", "wrong", *map(str, range(14)), "wrong", *map(str, range(14))]):
        grammars.compile_for(f"r{number}", grammar)
    found = dict(grammars.collect())
    assert compiled.grammars == ["wrong", "trip", *map(str, range(14))]
    assert isinstance(found["r0"], BadRequest) and isinstance(found["r3"], Grammar)
    assert isinstance(found["r1"], BadRequest) and "RuntimeError: tripped" in str(found["r1"])
    grammars.compile_for("more", "14")
    grammars.compile_for("again", "trip")
    assert compiled.grammars[-2:] == ["14", "trip"], "the least recently used one was evicted"


def test_an_abandoned_grammar_does_not_delay_others() -> None:
    gate = threading.Event()
    compiled = Compiled(gate)
    grammars = GrammarCache(compiled)  # type: ignore[arg-type]
    grammars.compile_for("first", "a")
    for number in range(100):
        grammars.compile_for(f"r{number}", str(number))
        grammars.forget(f"r{number}")
    for name, grammar in (("gone", "b"), ("there", "b"), ("again", "99")):
        grammars.compile_for(name, grammar)
    grammars.forget("gone")
    gate.set()
    collected: dict[str, object] = {}
    while len(collected) < 3:
        collected |= dict(grammars.collect())
    grammars.close()
    assert collected.keys() == {"first", "there", "again"} and compiled.grammars == ["a", "b", "99"]


def _advance(cursor: Cursor) -> None:
    cursor.advance(int(np.flatnonzero(cursor.allowed())[0]))
