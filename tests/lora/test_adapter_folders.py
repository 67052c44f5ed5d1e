"""Adapter folders as trainers, hubs and volumes leave them: read as PEFT reads them, or refused with the reason.

`ROWS` is the table in docs/adapters.md, and each of its rows a test. `python -m tests.lora.test_adapter_folders` prints
it.
"""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

from tests.families import build_model
from tests.lora.made_adapters import factors_of
from tests.oracle import save_adapter
from vlora.adapter_files import other_weights
from vlora.cluster.adapter_sender import AdapterSender, ShippingLimits
from vlora.errors import BadAdapter, BadPlan
from vlora.learning.versions import VersionFolder
from vlora.lora.dense_to_lora import convert
from vlora.lora.peft_format import read_header
from vlora.lora.peft_target import SiteShape
from vlora.lora.registry import AdapterRegistry
from vlora.models.hf_model import HFModel
from vlora.training.adapter import LoraSettings, read_start

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
BESIDE = "has weights that PEFT does not load with the adapter"
UNREADABLE = "cannot be read as safetensors"

Tensors = dict[str, torch.Tensor]
Deltas = dict[str, torch.Tensor]


class Row(NamedTuple):
    """One kind of folder.

    what: in the table. make: turns a plain adapter of PEFT into it; a returned path is the folder to load. peft: PEFT
    reads all of the adapter, a part or nothing, or ends with an error. refused: part of our error; None: all is served.
    """

    what: str
    make: Callable[[Path], Path | None]
    peft: str = "all"
    refused: str | None = None


def add(*names: str, body: bytes = b"PK") -> Callable[[Path], None]:
    """Further files, and folders for names with a slash at the end."""

    def make(folder: Path) -> None:
        for name in names:
            if name.endswith("/"):
                (folder / name).mkdir(parents=True)
            else:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(body)

    return make


def rename(change: Callable[[str], str]) -> Callable[[Path], None]:
    return tensors(lambda found: {change(name): value for name, value in found.items()})


def tensors(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})

    return make


def settings(**changes: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        file = folder / CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return make


def only(*names: str) -> Callable[[Path], None]:
    """A configuration with no other settings than these."""

    def make(folder: Path) -> None:
        file = folder / CONFIG
        found = json.loads(file.read_text())
        file.write_text(json.dumps({name: found[name] for name in names}))

    return make


def content(name: str, body: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).write_bytes(body)

    return make


def both(*makers: Callable[[Path], Any]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for each in makers:
            each(folder)

    return make


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def sharded(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model-00001-of-00001.safetensors")


def within(*folders: str) -> Callable[[Path], None]:
    """Move the adapter into a folder of the folder."""

    def make(folder: Path) -> None:
        for name in folders:
            (folder / name).mkdir()
            for file in (WEIGHTS, CONFIG):
                shutil.copy(folder / file, folder / name / file)
        for file in (WEIGHTS, CONFIG):
            (folder / file).unlink()

    return make


def beside(*folders: str) -> Callable[[Path], None]:
    """Further adapters in folders of the folder."""

    def make(folder: Path) -> None:
        for name in folders:
            (folder / name).mkdir()
            (folder / name / CONFIG).write_text("{}")
            (folder / name / WEIGHTS).write_bytes(b"")

    return make


def in_hub_cache(folder: Path) -> Path:
    """Links of a snapshot to blobs, named by their content."""
    snapshot, blobs = folder / "snapshots" / "3f2a", folder / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for place, name in enumerate((WEIGHTS, CONFIG)):
        (folder / name).rename(blobs / f"{place:040}")
        (snapshot / name).symlink_to(f"../../blobs/{place:040}")
    return snapshot


def in_volume(folder: Path) -> None:
    """Links of a Kubernetes volume to the folder of its present content."""
    (folder / "..2026_11_28").mkdir()
    for name in (WEIGHTS, CONFIG):
        (folder / name).rename(folder / "..2026_11_28" / name)
        (folder / name).symlink_to(f"..data/{name}")
    (folder / "..data").symlink_to("..2026_11_28")


def dangling(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to("../../blobs/gone")

    return make


def folder_at(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return make


def merged(folder: Path) -> None:
    for name in (WEIGHTS, CONFIG):
        (folder / name).unlink()
    save_file({"model.language_model.norm.weight": torch.ones(4)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")


def twice(found: Tensors) -> Tensors:
    name = next(name for name in found if "lora_B" in name)
    return found | {f"module.{name}": found[name] + 1}


def old_and_new(found: Tensors) -> Tensors:
    return found | {
        name.replace("model.language_model.layers", "model.layers"): each.clone() for name, each in found.items()
    }


def of_two(found: Tensors) -> Tensors:
    return {
        name.replace(".weight", f".{adapter}.weight"): each + 1 * (adapter == "signs")
        for name, each in found.items()
        for adapter in ("default", "signs")
    }


TRAINER = (
    *("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_1.pth", "training_args.bin"),
    *("trainer_state.json", "README.md", "all_results.json", "trainer_log.jsonl", "runs/events.out"),
)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1000\n"
PEFT_03 = (
    *("base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern"),
    *("layers_to_transform", "lora_alpha", "lora_dropout", "modules_to_save", "peft_type", "r", "revision"),
    *("target_modules", "task_type"),
)

ROWS = (
    Row("`save_pretrained` of PEFT", lambda _: None),
    Row("the same with `safe_serialization=False`", pickled, refused="pickled weights (.bin) are not supported"),
    Row("`adapter_model.bin` beside `adapter_model.safetensors`", add("adapter_model.bin")),
    Row("several adapters: the first in the folder, others in folders of their names", beside("signs", "cams")),
    Row(
        "several adapters, each in a folder of its name", within("cams", "signs"), "error", "one of them (cams, signs)"
    ),
    Row("weights in several files (`adapter_model-00001-of-…`)", sharded, "error", BESIDE),
    Row(
        "a configuration of PEFT 0.3, with its settings only",
        both(only(*PEFT_03), settings(merge_weights=False, enable_lora=None)),
    ),
    Row("a setting of a later version of PEFT, in use", settings(later="on"), refused="later = 'on' is not supported"),
    Row("a setting of a later version of PEFT, null or false", settings(later=None, latest=False)),
    Row(
        "Unsloth: `unsloth_fixed` in `auto_mapping`, `target_modules` as a pattern",
        settings(
            auto_mapping={"base_model_class": "A", "parent_library": "b", "unsloth_fixed": True},
            target_modules=r"(?:.*?(?:language).*?(?:q_proj|v_proj|down_proj))",
        ),
    ),
    Row("`checkpoint-500` of transformers or LLaMA-Factory, with the trainer's state", add(*TRAINER)),
    Row("a folder of LLaMA-Factory with further checkpoints in it", both(add(*TRAINER), beside("checkpoint-500"))),
    Row("a copy of the base model's tokenizer and processor", add(*TOKENIZER, "preprocessor_config.json")),
    Row(
        "`value_head.safetensors`, `v_head.bin` of TRL and LLaMA-Factory", add("value_head.safetensors"), refused=BESIDE
    ),
    Row("ms-swift: `args.json`, `additional_config.json`", add("args.json", "additional_config.json", "logging.jsonl")),
    Row("ms-swift with a trained vision tower (`vit.safetensors`)", add("vit.safetensors"), refused=BESIDE),
    Row("LLaVA's trainer: `config.json`", add("config.json", "generation_config.json", body=b"{}")),
    Row("the same with its projector (`non_lora_trainables.bin`)", add("non_lora_trainables.bin"), refused=BESIDE),
    Row("other weights: `mm_projector.bin`, `ema.pth`, `model.safetensors`, …", add("EMA.PTH"), refused=BESIDE),
    Row(
        "FSDP: `pytorch_model_fsdp_0/`, `optimizer_0/`",
        add("pytorch_model_fsdp_0/a.distcp", "optimizer_0/a.distcp", "pytorch_model_fsdp.bin", "optimizer.bin"),
    ),
    Row(
        "DeepSpeed: `global_step100/`, `latest`, `zero_to_fp32.py`",
        add("global_step100/mp_rank_00_model_states.pt", "latest", "zero_to_fp32.py", "random_states_0.pkl"),
    ),
    Row(
        "DeepSpeed ZeRO-3 without its gathered weights: empty tensors",
        tensors(lambda found: {name: torch.zeros(0) for name in found}),
        "error",
        "have shapes (0,) and (0,)",
    ),
    Row("names of DDP (`module.base_model.…`)", rename("module.{}".format), "nothing"),
    Row("names of a compiled model (`_orig_mod.base_model.…`)", rename("_orig_mod.{}".format), "nothing"),
    Row(
        "the same within (`….layers.0._orig_mod.…`)",
        rename(lambda name: name.replace(".mlp", "._orig_mod.mlp")),
        "part",
    ),
    Row(
        "names of FSDP and of activation checkpoints, one within the other",
        rename(lambda name: name.replace("layers.1.", "layers.1._fsdp_wrapped_module._checkpoint_wrapped_module.")),
        "part",
    ),
    Row("one tensor under two of these names", tensors(twice), refused="are the same tensor of"),
    Row(
        "a model's `state_dict`, with the adapter's name (`lora_A.default.weight`)",
        rename(lambda name: name.replace(".weight", ".default.weight")),
    ),
    Row(
        "the same with another name than `default`",
        rename(lambda name: name.replace(".weight", ".signs.weight")),
        "nothing",
    ),
    Row("the same of two adapters", tensors(of_two), refused="are the same tensor of"),
    Row("one layer under its present name and one of before transformers 5", tensors(old_and_new), "all", "same layer"),
    Row(
        "a tensor that is of no adapter",
        tensors(lambda found: found | {"visual.proj": torch.zeros(2)}),
        refused="tensor 'visual.proj' is not a LoRA factor",
    ),
    Row("the hub's cache: links to `blobs/`", in_hub_cache),
    Row("a Kubernetes volume: links by `..data`", in_volume),
    Row("`lost+found`, hidden files and folders", add("lost+found/", ".cache/huggingface/a.bin", "._vit.safetensors")),
    Row("a link to weights that are not there", dangling(WEIGHTS), "error", "blobs/gone, which does not exist"),
    Row("a link to a configuration that is not there", dangling(CONFIG), "error", "blobs/gone, which does not exist"),
    Row("a pointer of Git LFS in place of the weights", content(WEIGHTS, LFS), "error", "run `git lfs pull`"),
    Row("a pointer of Git LFS in place of the configuration", content(CONFIG, LFS), "error", "run `git lfs pull`"),
    Row("an empty file of weights", content(WEIGHTS, b""), "error", UNREADABLE),
    Row("an empty configuration", content(CONFIG, b""), "error", "is not JSON"),
    Row("a folder in place of the weights", folder_at(WEIGHTS), "error", f"{WEIGHTS}: is not a file"),
    Row("a folder in place of the configuration", folder_at(CONFIG), "error", f"{CONFIG}: is not a file"),
    Row("a merged model in place of an adapter", merged, "error", "serve it with --model"),
    Row("no such folder", lambda folder: shutil.rmtree(folder), "error", "no such folder"),
    Row("a file in place of the folder", lambda folder: folder / WEIGHTS, "error", "it is a file"),
)


def table() -> str:
    """The rows as they are in docs/adapters.md."""
    here = ("served" if row.refused is None else f"rejected: “{row.refused}”" for row in ROWS)
    lines = [f"| {row.what} | {row.peft} | {each} |" for row, each in zip(ROWS, here, strict=True)]
    return "\n".join(("| folder | PEFT reads | V-LoRA |", "|---|---|---|", *lines))


class World:
    """A small model, an adapter of it, and its deltas as PEFT computes them."""

    def __init__(self, root: Path) -> None:
        self.model = build_model("qwen2_vl")
        targets = ["q_proj", "v_proj", "down_proj"]
        config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
        self.plain = Path(save_adapter(self.model, config, root / "plain"))
        config_file = self.plain / CONFIG  # PEFT begins with a delta of zero where it finds no tensors
        config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"init_lora_weights": True}))
        linears = HFModel(build_model("qwen2_vl")).language_linears
        self.sites = {
            name: SiteShape(linear.in_features, linear.out_features, vision=False) for name, linear in linears.items()
        }
        self.deltas = self.of_peft(self.plain)

    def of_peft(self, folder: Path) -> Deltas:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = PeftModel.from_pretrained(copy.deepcopy(self.model), str(folder))
        return {
            name.removeprefix("base_model.model."): layer.get_delta_weight("default")  # type: ignore[attr-defined]
            for name, layer in loaded.named_modules()
            if isinstance(layer, LoraLayer)
        }

    def of_ours(self, folder: Path) -> Deltas:
        registry = AdapterRegistry(self.sites, torch.float32, 64)
        adapter = registry.read_folder("a", str(folder)).content
        return {site: factors.bt.t() @ factors.a for site, factors in factors_of(adapter).items()}

    def share(self, deltas: Mapping[str, torch.Tensor]) -> str:
        """How much of the adapter these deltas are."""
        same = [torch.allclose(deltas[name], want, atol=1e-6) for name, want in self.deltas.items() if name in deltas]
        return "all" if sum(same) == len(self.deltas) else "part" if any(same) else "nothing"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("folders"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_a_folder_is_read_as_peft_does_or_refused_with_the_reason(row: Row, world: World, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(world.plain, tmp_path / "adapter"))
    folder = row.make(folder) or folder
    try:
        found = world.share(world.of_peft(folder))
    except Exception:  # of many kinds
        found = "error"
    assert found == row.peft
    if row.refused is None:
        assert world.share(world.of_ours(folder)) == "all"
        targets = read_header(folder, world.sites, 64).targets
        assert {*load_file(folder / WEIGHTS)} == {name for each in targets for name in (each.tensor_a, each.tensor_b)}
    else:
        with pytest.raises(BadAdapter) as caught:
            world.of_ours(folder)
        assert row.refused in str(caught.value) and str(folder) in str(caught.value)


OTHER_WEIGHTS = (
    *("v_head.bin", "mm_projector.bin", "resampler.pt", "ema_weights.pth", "Vit.Safetensors", "a.ckpt"),
    *("model.safetensors", "pytorch_model.bin", "model-00001-of-00002.safetensors", "ft-model-00001.safetensors"),
    *("adapters.safetensors", "adapter_0.pt", "flax_model.msgpack", "patch_predictor.pt", "tf_model.h5"),
)
NO_WEIGHTS = (
    *("optimizer.pt", "optimizer.bin", "optimizer_1.bin", "scheduler.pt", "lr_scheduler.bin", "scaler.pt"),
    *("sampler.bin", "rng_state.pth", "rng_state_7.pth", "random_states_0.pkl", "custom_checkpoint_0.pkl"),
    *("training_args.bin", "training_state.pt", "pytorch_model_fsdp.bin", "pytorch_model_fsdp_rank0.bin"),
    *("zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt", "recipe_state.pt", "latest"),
    *("adapter_model.bin", "adapter_model.pt", "heads.safetensors", ".hidden.bin", "vocab.json", "tokenizer.model"),
    *("dl_state_dict.bin", "metrics.pkl", "predictions.npz", "adapter.gguf"),  # results, a copy for another engine
)


def test_names_tell_other_weights_from_the_state_of_a_training(tmp_path: Path) -> None:
    for name in (*OTHER_WEIGHTS, *NO_WEIGHTS):
        (folder := tmp_path / f"with-{name}").mkdir()
        (folder / name).touch()
        (folder / f"folder-{name}").mkdir()
        assert other_weights(folder).startswith(f"{name} has weights") == (name in OTHER_WEIGHTS), name


def converted(world: World, folder: Path) -> None:
    convert(folder, folder.with_name("out"), 4)


def registered(world: World, folder: Path) -> None:
    AdapterRegistry(world.sites, torch.float32, 64).register({"a": str(folder)})


def sent(world: World, folder: Path) -> None:
    asyncio.run(AdapterSender(ShippingLimits()).content_of(str(folder)))


def learning(world: World, folder: Path) -> None:
    VersionFolder(folder.with_name("versions")).add(folder)


def trained_on(world: World, folder: Path) -> None:
    read_start(folder, LoraSettings(), "a")


@pytest.mark.parametrize("read", [converted, registered, sent, learning, trained_on])
def test_other_weights_are_refused_wherever_a_folder_is_read(
    read: Callable[[World, Path], None], world: World, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(world.plain, tmp_path / "adapter"))
    add("vit.safetensors")(folder)
    with pytest.raises((BadAdapter, BadPlan), match=rf"{folder}.*vit\.safetensors {BESIDE}"):
        read(world, folder)


def test_the_page_has_the_table() -> None:
    found = PAGE.read_text().partition("| folder | PEFT reads ")
    assert "".join(found[1:]).partition("\n\n")[0] == table()


if __name__ == "__main__":
    print(table())
