"""In-place switching restores the checkpoint's bytes, which are verified to equal the loaded weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families import FAMILIES, build_model
from vlora.config import EngineConfig
from vlora.errors import BadConfig
from vlora.lora.base_weights import CheckpointBaseWeights, CopiedBaseWeights, checkpoint_files
from vlora.lora.weight_slabs import WeightSlabs
from vlora.models.hf_model import HFModel
from vlora.models.loading import load_model


def saved(folder: Path, family: str = "qwen2_vl", **how: object) -> str:
    build_model(family).save_pretrained(str(folder), **how)
    return str(folder)


def loaded(folder: str, dtype: str = "auto") -> WeightSlabs:
    return WeightSlabs(HFModel(load_model(EngineConfig(model=folder, dtype=dtype))).language_linears)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_every_family_are_found_under_any_name(family: str, dtype: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, family)
    slabs = loaded(folder, dtype)
    names = set(load_file(checkpoint_files(folder)[0]))
    assert any(f"{name}.weight" in names for name in slabs.slots) == (family == "qwen3_vl"), (
        "the other families rename their tensors"
    )
    base_weights = CheckpointBaseWeights(checkpoint_files(folder), slabs)
    for name in slabs.slots:
        found = base_weights.weight(name)
        assert found.dtype == slabs.entry(name).dtype and torch.equal(found, slabs.entry(name))
        assert found.data_ptr() != slabs.entry(name).data_ptr()


def test_shards_are_found_and_mapped_not_read(tmp_path: Path) -> None:
    folder = saved(tmp_path, max_shard_size="100KB")
    files = checkpoint_files(folder)
    assert len(files) > 2
    slabs = loaded(folder)
    base_weights = CheckpointBaseWeights(files, slabs)
    addresses = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(".safetensors")
    ]
    for name in slabs.slots:
        assert any(low <= base_weights.weight(name).data_ptr() < high for low, high in addresses), name


def test_a_checkpoint_with_other_weights_is_refused_by_layer_name(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    slabs = loaded(folder)
    (file,) = checkpoint_files(folder)
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    changed = next(name for name in tensors if name.endswith("layers.2.mlp.up_proj.weight"))
    tensors[changed][3, 4] += 1e-3
    os.remove(file)
    save_file(tensors, file)
    with pytest.raises(BadConfig, match=r"layers\.2\.mlp\.up_proj\.weight .* choose switching shadow"):
        CheckpointBaseWeights([file], slabs)
    del tensors[changed]
    os.remove(file)
    save_file(tensors, file)
    with pytest.raises(BadConfig, match=r"layers\.2\.mlp\.up_proj\.weight .* none of the 0 tensors"):
        CheckpointBaseWeights([file], slabs)


def test_files_that_cannot_be_mapped_are_named(tmp_path: Path) -> None:
    slabs = loaded(saved(tmp_path))
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no")
    for file in (broken, tmp_path / "gone.safetensors"):
        with pytest.raises(BadConfig, match=file.name):
            CheckpointBaseWeights([str(file)], slabs)


def test_a_model_without_such_files_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    assert checkpoint_files(str(tmp_path)) == []


def test_a_copy_is_exact_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    slabs = WeightSlabs(HFModel(build_model("qwen2_vl", torch.bfloat16)).language_linears)
    base_weights = CopiedBaseWeights(slabs)
    assert list(tmp_path.iterdir()) == []
    before = {name: slabs.entry(name).clone() for name in slabs.slots}
    for slab in slabs.base:
        slab.zero_()
    assert all(torch.equal(base_weights.weight(name), before[name]) for name in before)


def test_a_full_disk_is_reported_before_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    slabs = WeightSlabs(HFModel(build_model("qwen2_vl")).language_linears)
    with pytest.raises(BadConfig, match="No space left on device; set TMPDIR"):
        CopiedBaseWeights(slabs)
