"""Through a base executor, training and inference equal plain PEFT and transformers; so do the files of Trainer."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, PrefixTuningConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from tests.split.running import Serving, example, serving, tiny
from vlora.errors import BadConfig, Disconnected
from vlora.split import connect
from vlora.split.admission import Limits

NUM_STEPS = 13
WITHIN = 1e-5
LINEARS: dict[str, tuple[Any, Any, Any]] = {
    "gpt2": (["c_attn", "c_proj", "c_fc"], ["c_attn", "mlp.c_proj"], ["mlp.c_proj"]),
    "others": (
        r".*\.(q_proj|k_proj|v_proj|o_proj|qkv|fc1|gate_proj|up_proj|down_proj)",
        r".*language_model.*\.(k_proj|v_proj|down_proj)",
        r".*language_model.*\.down_proj",
    ),
}
DRAWING = threading.Lock()  # threads share torch's generator
METHODS = ("lora", "ia3", "prefix", "checkpointing")


@pytest.fixture(scope="module", params=["qwen2_vl", "gpt2", pytest.param("llava", marks=pytest.mark.exhaustive)])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    return tiny(family)


@pytest.fixture(scope="module")
def served(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(model, tmp_path_factory.mktemp("base")) as found:
        yield found


def config_of(method: str, family: str) -> PeftConfig:
    lora, ia3, feedforward = LINEARS.get(family, LINEARS["others"])
    if method == "ia3":
        return IA3Config(target_modules=ia3, feedforward_modules=feedforward)
    if method == "prefix":
        return PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return LoraConfig(r=4, lora_alpha=8, target_modules=lora)


def losses(method: str, family: str, model: Any, num_steps: int = NUM_STEPS, seed: int = 0) -> list[float]:
    """Losses of a training, with images where the model takes them."""
    with DRAWING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        peft: Any = get_peft_model(model, config_of(method, family))
    if method == "checkpointing":
        peft.enable_input_require_grads()
        peft.gradient_checkpointing_enable({"use_reentrant": False})
    peft.train()
    optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], 5e-3)
    found = []
    for step in range(num_steps):
        arguments = example(family, model, seed + step % 3, num_images=0 if method == "prefix" else 1)
        if method == "prefix":
            arguments.pop("mm_token_type_ids", None)
        loss = peft(**arguments, labels=arguments["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_losses_equal_plain_peft(method: str, family: str, model: Any, served: Serving) -> None:
    plain = losses(method, family, copy.deepcopy(model))
    with connect(served.unix) as base:
        assert apart(losses(method, family, base.wrap(copy.deepcopy(model))), plain) < WITHIN
    assert plain[-1] < plain[0], "the training does not learn"  # of the same example
    assert apart(losses(method, family, copy.deepcopy(model), seed=1), plain) > 100 * WITHIN, "any losses are equal"


@torch.no_grad()
def logits(family: str, model: Any) -> torch.Tensor:
    """Logits of a prompt and of greedy decoding after it."""
    arguments = example(family, model, 7)
    made = model.generate(
        **arguments, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    return torch.stack(made.logits)


def test_inference_while_others_train_and_die(family: str, model: Any, served: Serving) -> None:
    plain = logits(family, copy.deepcopy(model))
    expected = losses("lora", family, copy.deepcopy(model))
    found: dict[str, Any] = {}

    def train(name: str, address: str, dies_after: int | None) -> None:
        base = connect(address)
        wrapped = base.wrap(copy.deepcopy(model))
        if dies_after is not None:
            layer = dict(wrapped.named_modules())[base.calls.groups[dies_after][0].name]
            layer.register_forward_hook(lambda *_: base.close())
        try:
            found[name] = losses("lora", family, wrapped)
        except Disconnected as error:
            found[name] = error
        base.close()

    threads = [
        threading.Thread(target=train, args=("steady", served.tcp, None)),
        threading.Thread(target=train, args=("dying", served.unix, 3)),
    ]
    for thread in threads:
        thread.start()
    with connect(served.unix) as base:
        wrapped = base.wrap(copy.deepcopy(model))
        while True:
            assert (logits(family, wrapped) - plain).abs().max() < WITHIN
            if not any(thread.is_alive() for thread in threads):
                break
    for thread in threads:
        thread.join()
    assert apart(found["steady"], expected) < WITHIN
    assert isinstance(found["dying"], Disconnected), "it did not die"


def test_shards_equal_one_executor(family: str, model: Any, tmp_path: Path) -> None:
    plain = losses("lora", family, copy.deepcopy(model))
    with serving(model, tmp_path, shard=(0, 2)) as first, serving(model, tmp_path, shard=(1, 2)) as second:
        assert first.executor.num_bytes + second.executor.num_bytes < 1.01 * sum(
            p.nbytes for p in model.parameters() if p.ndim < 3
        )
        with connect(second.unix, first.tcp) as base:
            assert apart(losses("lora", family, base.wrap(copy.deepcopy(model))), plain) < WITHIN
        for addresses in ((first.unix,), (first.unix, first.tcp)):
            with pytest.raises(BadConfig, match="give the addresses of all shards"):
                connect(*addresses)


def test_large_calls_are_divided(family: str, model: Any, tmp_path: Path) -> None:
    plain = losses("lora", family, copy.deepcopy(model), 4)
    with serving(model, tmp_path, limits=Limits(max_rows=7, half_bytes=8192)) as served:
        for address in (served.unix, served.tcp):
            with connect(address) as base:
                assert apart(losses("lora", family, base.wrap(copy.deepcopy(model)), 4), plain) < WITHIN


def train(model: Any, folder: Path) -> tuple[list[float], Any]:
    """Losses, and the trained model; its adapter is saved in the folder."""
    torch.manual_seed(0)
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn", "c_fc"], task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 180, (16,), generator=generator) for _ in range(12)]
    arguments = TrainingArguments(
        str(folder / "checkpoints"),
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(peft, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train()
    peft.save_pretrained(str(folder / "adapter"))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], peft.eval()


@pytest.mark.slow
def test_trainer_and_files_are_those_of_plain_peft(tmp_path: Path) -> None:
    model = tiny("gpt2")
    wanted_losses, plain = train(copy.deepcopy(model), tmp_path / "plain")
    ids = torch.tensor([[5, 6, 7, 8]])
    wanted = plain.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    with serving(model, tmp_path) as served, connect(served.unix) as base:
        ours, trained = train(base.wrap(copy.deepcopy(model)), tmp_path / "split")
        assert max(abs(a - b) for a, b in zip(wanted_losses, ours, strict=True)) < 1e-4  # Trainer rounds what it logs
        assert torch.equal(trained.generate(input_ids=ids, max_new_tokens=8, do_sample=False), wanted)
        split = PeftModel.from_pretrained(base.wrap(copy.deepcopy(model)), str(tmp_path / "plain" / "adapter"))
        assert torch.equal(split.generate(input_ids=ids, max_new_tokens=8, do_sample=False), wanted)
    # The adapter that was trained through the base works on a full copy, and the other way round.
    loaded = PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path / "split" / "adapter"))
    assert torch.equal(loaded.generate(input_ids=ids, max_new_tokens=8, do_sample=False), wanted)
    saved = (tmp_path / "split" / "checkpoints" / "checkpoint-6" / "adapter_model.safetensors").stat().st_size
    assert saved < 100_000
