"""The base weights W0 as memory-mapped files, from which in-place switching restores the model's weights.

The system can reclaim mapped pages at any time, since their content is read again from the file.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import os
import pickle
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.hub import get_checkpoint_shard_files

from vlora.adapter_files import is_pointer
from vlora.errors import BadConfig, EngineDead
from vlora.lora.peft_settings import decoder_layers
from vlora.lora.weight_slabs import WeightSlabs


class BaseWeights(Protocol):
    """Bit-exact W0 of each target layer, independent of the current content of the slabs."""

    def weight(self, name: str) -> torch.Tensor:
        """W0 of a layer, [out, in], on the CPU in the model's dtype. Read-only."""


def copy_mapped(model: nn.Module) -> None:
    """Copy parameters and buffers in mapped files into memory of the process, so that they do not follow the files."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, where = line.split(maxsplit=5)
        if where.startswith("/"):
            first, stop = addresses.split("-")
            ranges.append((int(first, 16), int(stop, 16)))
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.device.type != "cpu":
            continue
        place = bisect.bisect_right(ranges, (tensor.data_ptr(), math.inf)) - 1
        if place >= 0 and tensor.data_ptr() < ranges[place][1]:
            tensor.data = tensor.data.clone()


class _Stamp(NamedTuple):
    """A file's identity and the state of its content."""

    file: str
    place: tuple[int, int]
    content: tuple[int, int]

    @classmethod
    def of(cls, file: str) -> _Stamp:
        found = os.stat(file)
        return cls(file, (found.st_dev, found.st_ino), (found.st_size, found.st_mtime_ns))

    def check(self) -> None:
        """Raises EngineDead if the mapped file was written to. A removed or replaced one remains mapped."""
        with contextlib.suppress(OSError):
            now = _Stamp.of(self.file)
            if now.place == self.place and now.content != self.content:
                raise EngineDead(
                    f"{self.file} was written to or touched (its size or modification time changed), and in_place "
                    "switching restores weights from it; start again with the file restored, and replace files of a "
                    "served checkpoint by renaming others over them"
                )


class CheckpointBaseWeights:
    """W0 in the checkpoint's safetensors files, in the files' dtype.

    A library version may load a tensor under a different name than the file's. A layer's tensor is therefore found by
    the tail of its name, and accepted only if its bytes, rounded to the model's dtype, equal the loaded weights. The
    restored weights are then exact for any renaming rule.
    """

    def __init__(self, files: Sequence[str], slabs: WeightSlabs) -> None:
        """Find the tensor of every layer.

        Raises:
            BadConfig: No tensor of the files equals a layer's weights. The message names the layer.
        """
        by_tail: dict[str, list[torch.Tensor]] = {}
        for name, tensor in _mapped(files):
            by_tail.setdefault(tail(name), []).append(tensor)
        self._stamps = [_Stamp.of(file) for file in files]  # before the comparison with the loaded weights
        self._dtype = slabs.base[0].dtype
        self._tensors: dict[str, torch.Tensor] = {}
        for name in slabs.slots:
            loaded = slabs.entry(name).cpu()
            candidates = by_tail.get(tail(f"{name}.weight"), [])
            found = next((tensor for tensor in candidates if _same_bits(tensor.to(self._dtype), loaded)), None)
            if found is None:
                raise BadConfig(
                    f"switching in_place needs {name}.weight with its loaded values, but none of the {len(candidates)} "
                    f"tensors of that name in {', '.join(map(os.path.basename, files))} equals it; "
                    "choose switching shadow"
                )
            self._tensors[name] = found

    def weight(self, name: str) -> torch.Tensor:
        for stamp in self._stamps:
            stamp.check()
        return self._tensors[name].to(self._dtype)


class CopiedBaseWeights:
    """W0 in an unlinked temporary file, for a model that was not loaded from files."""

    def __init__(self, slabs: WeightSlabs) -> None:
        """Copy the weights.

        Raises:
            BadConfig: The temporary folder has too little free space.
        """
        self._slots = slabs.slots
        self._slabs: list[torch.Tensor] = []
        for slab in slabs.base:
            num_bytes = slab.numel() * slab.element_size()
            with tempfile.NamedTemporaryFile(prefix="vlora-originals-") as file:
                try:
                    # Allocated now: writing to a sparse mapping while the disk is full would kill the process.
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                except OSError as error:
                    raise BadConfig(
                        f"switching in_place keeps a copy of the weights in {tempfile.gettempdir()}, which needs "
                        f"{slabs.num_bytes} bytes: {error.strerror}; set TMPDIR to a disk with enough free space"
                    ) from error
                # The mapping outlives the file's name.
                mapped = torch.from_file(file.name, shared=True, size=slab.numel(), dtype=slab.dtype)
            self._slabs.append(mapped.view_as(slab).copy_(slab))

    def weight(self, name: str) -> torch.Tensor:
        slab, index = self._slots[name]
        return self._slabs[slab][index]


def checkpoint_files(model: str) -> list[str]:
    """The safetensors files from which transformers loads `model` (a folder or hub name); empty if it has none."""
    return _files(model, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)


def pickled_files(model: str) -> list[str]:
    """As `checkpoint_files`, the files that torch.save has written. transformers reads tensors from them, no code."""
    return _files(model, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


def broken_files(files: Iterable[str]) -> list[str]:
    """A line for each of a checkpoint's files that is missing or has no readable header."""
    problems: list[str] = []
    for file in files:
        try:
            stored_tensors(file)
        except FileNotFoundError:
            problems.append(f"{os.path.basename(file)}, a file of its weights, is missing; download it")
        except (OSError, ValueError, SafetensorError) as error:
            pointer = os.path.exists(file) and is_pointer(Path(file))
            why = "it is a pointer of Git LFS; run `git lfs pull`" if pointer else f"{error}; download it again"
            problems.append(f"{os.path.basename(file)}, a file of its weights, cannot be read: {why}")
    return problems


def stored_tensors(file: str) -> dict[str, torch.Tensor]:
    """The tensors of a file by name, mapped: values are read on access. Raises OSError, ValueError, SafetensorError."""
    if file.endswith(".safetensors"):
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (FileNotFoundError, PermissionError):
        raise
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:  # with advice for torch's callers
        raise ValueError("it is truncated, or torch.save has not written it") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError("it holds no tensors by name")
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


def floating_dtype(files: Iterable[str]) -> torch.dtype:
    """The type of the first tensor in floating point of at least 16 bits, as transformers determines a dtype without
    one in config.json; float32 if there is none."""
    for file in files:
        with suppress(OSError, ValueError, SafetensorError):
            for tensor in stored_tensors(file).values():
                if tensor.is_floating_point() and tensor.dtype.itemsize >= 2:
                    return tensor.dtype
    return torch.float32


def _files(model: str, whole: str, index: str) -> list[str]:
    for name in (whole, index):
        file = cached_file(
            model,
            name,
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if file is not None:
            if name == whole:
                return [file]
            shards, _ = get_checkpoint_shard_files(model, file, local_files_only=True)
            return list(shards)
    return []


def _mapped(files: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the files with its name, as a view of the mapped file.

    One that is several of the model's layers, or one by another name, is also given as these.
    """
    with ExitStack() as opened:
        for file in files:
            try:
                tensors = opened.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise BadConfig(
                    f"cannot map {file} for in_place switching: {error}; choose switching shadow"
                ) from error
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                tensor = tensors.get_tensor(name)
                yield name, tensor
                layers = decoder_layers(name.removesuffix(".weight"))
                for layer, part in zip(layers, tensor.chunk(max(1, len(layers))), strict=False):
                    yield f"{layer}.weight", part


def tail(name: str) -> str:
    """'model.language_model.layers.7.self_attn.q_proj.weight' -> 'layers.7.self_attn.q_proj.weight'.

    The prefix before the layer's number names the part of the model, and differs between files and library versions.
    """
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[max(0, number - 1) :])


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
