"""Compositions follow their adapters: new weights, unloading, memory, and bad requests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from peft import IA3Config, LoraConfig
from safetensors.torch import load_file, save_file

from heads import save_heads
from tests.engine.asking import ask, finish, tokens
from tests.engine.forms import PARTS
from tests.engine.test_heads import heads_of
from tests.families import build_model, make_prompt
from tests.oracle import save_adapter
from vlora.config import EngineConfig
from vlora.engine import LocalEngine
from vlora.engine.compositions import MAX_UNUSED, MAX_USED
from vlora.errors import Aborted, BadAdapter, BadRequest, OverCapacity, UnknownAdapter, UnknownHead, VLoraError
from vlora.memory.arena import PAGE_BYTES
from vlora.memory.host_to_device import Inline
from vlora.types import Request, RequestOutput, adapter_name

FAMILY = "llava"
QUERIES = r".*language_model.*\.q_proj"


@pytest.fixture(scope="module")
def folders(adapter_folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapters by name, some of which cannot be composed; `wide8` has a head."""
    folder = tmp_path_factory.mktemp("composed")
    wide = shutil.copytree(adapter_folders["wide8"], folder / "wide8")
    save_heads(wide, {"classification": heads_of(0)["classification"]})
    model = build_model(FAMILY)
    configs = {
        "dora": LoraConfig(r=4, use_dora=True, target_modules=QUERIES),
        "biased": LoraConfig(r=4, lora_bias=True, target_modules=QUERIES),
        "own_head": LoraConfig(r=4, target_modules=QUERIES, modules_to_save=["lm_head"]),
        "activated": LoraConfig(r=4, target_modules=QUERIES, alora_invocation_tokens=[5], task_type="CAUSAL_LM"),
        "ia3": IA3Config(target_modules=QUERIES, feedforward_modules=[]),
    }
    others = {name: save_adapter(model, config, folder / name) for name, config in configs.items()}
    return {**adapter_folders, "wide8": str(wide), **others}


def engine(folders: dict[str, str], num_pages: int = 400, **names: str) -> LocalEngine:
    """names: The folder of each adapter, by the name under which it is loaded."""
    config = EngineConfig(model=FAMILY, block_size=8, arena_bytes=num_pages * PAGE_BYTES, max_context=256)
    local = LocalEngine(config, model=build_model(FAMILY), executor=Inline())
    for name, folder in names.items():
        local.engine.load_adapter(name, folders[folder])
    return local


PROMPT = make_prompt(FAMILY, build_model(FAMILY), 0, num_images=1)


def request(adapter: str, request_id: str = "r", num_tokens: int = 6, head: str | None = None) -> Request:
    return ask(PROMPT, request_id, adapter, num_tokens, head=head)


def answer(local: LocalEngine, adapter: str, running: list[RequestOutput] | None = None) -> tuple[list[int], int]:
    """The tokens of the answer, and the cached tokens of its prompt. Outputs of others go to `running`."""
    local.engine.add(request(adapter, "asked"))
    outputs = finish(local.engine)
    own = [output for output in outputs if output.request_id == "asked"]
    if running is not None:
        running += outputs
    assert own[-1].finish_reason == "length" and own[-1].timings is not None, own[-1]
    return tokens(own), own[-1].timings.num_cached_tokens


def num_known(local: LocalEngine) -> int:
    return local.engine.parts.registry.num_known


def test_an_order_or_a_spelling_is_the_same_composition(folders: dict[str, str]) -> None:
    assert [adapter_name(weights) for weights in PARTS.values()] == list(PARTS)
    local = engine(folders, a="narrow4", b="wide8")
    first, cached = answer(local, "a+b")
    assert cached == 0
    for name in ("b+a", "1*a+1.0*b", " a + b "):
        again, cached = answer(local, name)
        assert again == first and cached > 0
    assert num_known(local) == 3 and answer(local, "1.0*a") == answer(engine(folders, a="narrow4"), "a")
    other, cached = answer(local, "a+2*b")
    assert other != first and cached == 0


@pytest.mark.parametrize("used", [False, True], ids=["unused", "in use"])
def test_a_replaced_part_changes_the_next_answer(folders: dict[str, str], used: bool) -> None:
    """Running requests finish with the weights that they began with."""
    local = engine(folders, a="narrow4", b="wide8")
    before, _ = answer(local, "a+b")
    alone, _ = answer(local, "b")
    running = ("a+b", "b") if used else ()
    for name in running:
        local.engine.add(request(name, name))
    outputs = list(local.engine.step())
    local.engine.load_adapter("b", folders["patterned16"])
    after, cached = answer(local, "a+b", outputs)
    assert cached == 0 and after != before
    assert (after, 0) == answer(engine(folders, a="narrow4", b="patterned16"), "a+b")
    for name, want in zip(running, (before, alone), strict=False):
        assert tokens(outputs, name) == want
    assert num_known(local) == 3


def test_unloading_a_part_cancels_its_compositions(folders: dict[str, str]) -> None:
    local = engine(folders, a="narrow4", b="wide8", c="patterned16")
    answer(local, "b+c")
    for name in ("a+b", "a+c"):
        local.engine.add(request(name, name))
    local.engine.step()
    (ended,) = local.engine.unload_adapter("b")
    assert ended.request_id == "a+b" and ended.error is not None
    assert isinstance(ended.error.to_exception(), Aborted) and "adapter 'b' was unloaded" in ended.error.message
    assert num_known(local) == 3  # a, c and a+c
    with pytest.raises(UnknownAdapter, match="no adapter named 'b'; registered: a, c"):
        local.engine.add(request("a+b", "late"))
    outputs = finish(local.engine)
    assert outputs[-1].request_id == "a+c" and outputs[-1].finish_reason == "length"
    for name in "ac":
        local.engine.unload_adapter(name)
    assert num_known(local) == 0 and local.engine.stats().adapter_bytes == 0
    assert local.engine.stats().host_adapter_bytes == 0


def test_requests_for_a_composition_finish_when_a_part_drains(folders: dict[str, str]) -> None:
    local = engine(folders, a="narrow4", b="wide8")
    want, _ = answer(local, "a+b")
    local.engine.add(request("a+b"))
    outputs = list(local.engine.step())
    assert local.engine.unload_adapter("b", drain=True) == ()
    assert tokens([*outputs, *finish(local.engine)]) == want and num_known(local) == 1


def test_compositions_that_no_request_uses_are_bounded(folders: dict[str, str]) -> None:
    local = engine(folders, a="narrow4", b="wide8")
    names = [f"{weight}*a+b" for weight in range(2, 3 * MAX_UNUSED)]
    for name in names:
        answer(local, name)
    assert num_known(local) == 2 + MAX_UNUSED + 1
    assert [bool(answer(local, name)[1]) for name in (names[-1], names[-MAX_UNUSED], names[0])] == [True, True, False]
    assert [status.name for status in local.engine.adapters()] == ["a", "b"]
    assert local.engine.stats().num_adapters == 2


def test_compositions_in_use_are_bounded(folders: dict[str, str]) -> None:
    local = engine(folders, a="narrow4", b="wide8")
    for weight in range(2, 2 + MAX_USED):
        local.engine.add(request(f"{weight}*a+b", str(weight), num_tokens=1))
    with pytest.raises(OverCapacity, match=r"requests use 64 other compositions of adapters, .*; try again later"):
        local.engine.add(request("1.5*a+b"))
    local.engine.add(request("b+2*a", "shared", num_tokens=1))
    local.engine.add(request("a", "alone", num_tokens=1))
    finish(local.engine)
    answer(local, "1.5*a+b")


def test_a_snapshot_shows_compositions_on_the_device(folders: dict[str, str]) -> None:
    local = engine(folders, a="narrow4", b="wide8")
    answer(local, "b+0.5*a")
    shown = {load.name: (load.place, load.rank, load.rate > 0) for load in local.engine.snapshot().adapters}
    assert shown == {"0.5*a+b": ("device", 12, False), "a": ("host", 4, True), "b": ("host", 8, True)}


def test_a_part_that_cannot_be_read_fails_its_compositions(folders: dict[str, str], tmp_path: Path) -> None:
    broken = shutil.copytree(folders["narrow4"], tmp_path / "broken")
    file = broken / "adapter_model.safetensors"
    factors = load_file(file)
    next(iter(factors.values()))[0, 0] = float("nan")
    save_file(factors, file)
    local = engine(folders, a="wide8")
    local.engine.register_adapters({"broken": str(broken)})
    for _ in range(2):  # the second time it is refused at once
        outputs = local.run([request("a+broken", "composed"), request("a", "alone")])
        error = outputs["composed"][-1].error
        assert error is not None and isinstance(error.to_exception(), BadAdapter) and "not finite" in error.message
        assert outputs["alone"][-1].finish_reason == "length"


BAD_REQUESTS: dict[str, tuple[type[VLoraError], str]] = {
    "a+absent": (UnknownAdapter, "no adapter named 'absent'; registered: a, activated, b, "),
    "a+": (BadRequest, r"'a\+' is invalid: '' is no adapter's name; write a\+b"),  # tests/lora has other names
    "a+dora": (BadRequest, "adapter 'dora' cannot be composed: it has DoRA; compose adapters that have LoRA"),
    "a+biased": (BadRequest, "adapter 'biased' cannot be composed: it has trained biases"),
    "a+own_head": (BadRequest, "adapter 'own_head' cannot be composed: it has modules_to_save"),
    "2*activated": (BadRequest, "adapter 'activated' cannot be composed: it has alora_invocation_tokens"),
    "ia3+a": (BadRequest, "adapter 'ia3' cannot be composed: it has IA3"),
}


@pytest.fixture(scope="module")
def loaded(folders: dict[str, str]) -> LocalEngine:
    local = engine(folders, a="narrow4", b="wide8")
    for name in ("dora", "biased", "own_head", "activated", "ia3"):
        local.engine.load_adapter(name, folders[name])
    return local


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_composition_is_refused_with_the_reason(loaded: LocalEngine, name: str) -> None:
    kind, message = BAD_REQUESTS[name]
    before = num_known(loaded)
    with pytest.raises(kind, match=message):
        loaded.engine.add(request(name))
    assert num_known(loaded) == before and not loaded.engine.has_work
    with pytest.raises(UnknownHead, match=r"adapter 'a\+b' has no head 'classification'; .* belongs to one adapter"):
        loaded.engine.add(request("a+b", head="classification"))


@pytest.mark.parametrize("name", ["a+b", "2*a", "c++"])
def test_no_adapter_can_have_the_name_of_a_composition(loaded: LocalEngine, folders: dict[str, str], name: str) -> None:
    with pytest.raises(BadAdapter, match=r"adapter name .* is invalid: .* no @, \+, \* or slash"):
        loaded.engine.load_adapter(name, folders["narrow4"])
    for call in (lambda: loaded.engine.unload_adapter(name), lambda: loaded.engine.pin_adapter(name, True)):
        with pytest.raises(UnknownAdapter, match="no adapter named"):
            call()


def test_a_composition_needs_contiguous_pages(folders: dict[str, str]) -> None:
    """A pin leaves room for one that is in use."""
    local = engine(folders, 50, a="everywhere64", b="wide8", c="narrow4")  # a+b needs all 25 pages for adapters
    local.engine.add(request("a+b"))
    with pytest.raises(OverCapacity, match=r"pinning adapter 'c' would leave 24 .* adapter 'a\+b' needs 25"):
        local.engine.pin_adapter("c", True)
    finish(local.engine)
    assert local.engine.pin_adapter("c", True).pinned
    with pytest.raises(BadRequest, match=r"'a\+b' has rank 72 and needs 25 contiguous pages .* only .*; compose fewer"):
        local.engine.add(request("a+b"))
