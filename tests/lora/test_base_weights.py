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
from vlora.lora.base_weights import CheckpointOriginals, CopiedOriginals, checkpoint_files
from vlora.lora.weight_slabs import WeightSlabs
from vlora.models.hf_adapter import Seam
from vlora.models.loading import load_model


def saved(folder: Path, family: str = "qwen2_vl", **how: object) -> str:
    build_model(family).save_pretrained(str(folder), **how)
    return str(folder)


def loaded(folder: str, dtype: str = "auto") -> WeightSlabs:
    return WeightSlabs(Seam(load_model(EngineConfig(model=folder, dtype=dtype))).language_linears)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_s_weights_are_found_whatever_their_names(family: str, dtype: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, family)
    slabs = loaded(folder, dtype)
    names = set(load_file(checkpoint_files(folder)[0]))
    assert any(f"{name}.weight" in names for name in slabs.slots) == (family == "qwen3_vl"), (
        "the other families rename their tensors"
    )
    originals = CheckpointOriginals(checkpoint_files(folder), slabs)
    for name in slabs.slots:
        found = originals.weight(name)
        assert found.dtype == slabs.entry(name).dtype and torch.equal(found, slabs.entry(name))
        assert found.data_ptr() != slabs.entry(name).data_ptr()


def test_shards_are_found_and_mapped_not_read(tmp_path: Path) -> None:
    folder = saved(tmp_path, max_shard_size="100KB")
    files = checkpoint_files(folder)
    assert len(files) > 2
    slabs = loaded(folder)
    originals = CheckpointOriginals(files, slabs)
    addresses = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(".safetensors")
    ]
    for name in slabs.slots:
        assert any(low <= originals.weight(name).data_ptr() < high for low, high in addresses), name


def test_a_checkpoint_that_is_not_what_was_loaded_is_refused_by_name(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    slabs = loaded(folder)
    (file,) = checkpoint_files(folder)
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    changed = next(name for name in tensors if name.endswith("layers.2.mlp.up_proj.weight"))
    tensors[changed][3, 4] += 1e-3
    os.remove(file)
    save_file(tensors, file)
    with pytest.raises(BadConfig, match=r"layers\.2\.mlp\.up_proj\.weight .* choose switching shadow"):
        CheckpointOriginals([file], slabs)
    del tensors[changed]
    os.remove(file)
    save_file(tensors, file)
    with pytest.raises(BadConfig, match=r"layers\.2\.mlp\.up_proj\.weight .* none of the 0 tensors"):
        CheckpointOriginals([file], slabs)


def test_files_that_cannot_be_mapped_are_named(tmp_path: Path) -> None:
    slabs = loaded(saved(tmp_path))
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no")
    for file in (broken, tmp_path / "gone.safetensors"):
        with pytest.raises(BadConfig, match=file.name):
            CheckpointOriginals([str(file)], slabs)


def test_a_model_without_such_files_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    assert checkpoint_files(str(tmp_path)) == []


def test_a_copy_is_exact_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    slabs = WeightSlabs(Seam(build_model("qwen2_vl", torch.bfloat16)).language_linears)
    originals = CopiedOriginals(slabs)
    assert list(tmp_path.iterdir()) == []
    before = {name: slabs.entry(name).clone() for name in slabs.slots}
    for slab in slabs.base.values():
        slab.zero_()
    assert all(torch.equal(originals.weight(name), before[name]) for name in before)


def test_a_full_disk_is_told_before_it_can_hurt(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    slabs = WeightSlabs(Seam(build_model("qwen2_vl")).language_linears)
    with pytest.raises(BadConfig, match="No space left on device; set TMPDIR"):
        CopiedOriginals(slabs)
