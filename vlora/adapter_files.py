"""The files of an adapter's folder: those that engines read, the hash of their content, and other weights beside them.

Loads without torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
HEAD_FILES = ("heads.json", "heads.safetensors")
DOMAINS_FILE = "domains.json"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, *HEAD_FILES, DOMAINS_FILE)  # in the order of the hash

_WEIGHTS = re.compile(r".+\.(safetensors|bin|pt|pth|ckpt|h5|msgpack)", re.IGNORECASE)
# Of transformers, accelerate, DeepSpeed and torchtune; `pytorch_model_fsdp` is a copy of the adapter too.
_TRAINING_STATE = re.compile(
    r"(optim|(lr_)?scheduler|(grad_)?scaler|sampler|dl_state_dict|rng_state|random_states|custom_checkpoint|recipe_state"
    r"|train(ing|er)_(args|state)|pytorch_model_fsdp|.*_(optim|model)_states\.).*"
)
_POINTER = b"version https://git-lfs"
_OWN = frozenset((*ADAPTER_FILES, "adapter_model.bin", "adapter_model.pt"))  # the latter: copies of the first


def other_weights(folder: Path) -> str:
    """As `unread_weights`, of a folder; folders in it are ignored. Raises OSError."""
    return unread_weights(name for name in os.listdir(folder) if not (folder / name).is_dir())


def unread_weights(names: Iterable[str]) -> str:
    """The reason to refuse files with weights that neither PEFT nor an engine loads; empty if there are none.

    Ignored are the state of the training and hidden files.
    """
    for name in sorted(name for name in names if _WEIGHTS.fullmatch(name) and name not in _OWN):
        if name[0] != "." and not _TRAINING_STATE.match(name):
            return (
                f"{name} has weights that PEFT does not load with the adapter, whose answers would lack them; merge "
                "them into the base model, or remove the file if the adapter was trained without them"
            )
    return ""


def why_unreadable(error: OSError) -> str:
    """Why a file cannot be read; without permission, whose it is."""
    if not isinstance(error, PermissionError) or not os.path.exists(error.filename):
        return error.strerror or str(error)
    status = os.stat(error.filename)
    return (
        f"permission denied to user {os.geteuid()}: it belongs to user {status.st_uid}, with mode "
        f"{stat.S_IMODE(status.st_mode):04o}; let others read it (chmod a+r), or serve as its owner"
    )


def is_pointer(file: Path) -> bool:
    """Whether a file is a pointer of Git LFS, which stands in a clone in place of the file. Raises OSError."""
    with file.open("rb") as stream:
        return stream.read(len(_POINTER)) == _POINTER


@contextlib.contextmanager
def private_copy(file: Path) -> Iterator[Path]:
    """A copy of a file in memory. Mapping a file that another process truncates would end this process (SIGBUS)."""
    with open(os.memfd_create(file.name), "w+b") as copy:
        with file.open("rb") as source:
            shutil.copyfileobj(source, copy, 2**20)
        copy.flush()
        yield Path(f"/proc/self/fd/{copy.fileno()}")


def content_hash(folder: Path, weights: Path | None = None) -> str:
    """The version of an adapter's content: the hash of its files. weights: a copy of its weights. Raises OSError."""
    digest = hashlib.blake2b(digest_size=16)
    for file in (folder / name for name in ADAPTER_FILES):
        if file.exists():
            digest.update(file.name.encode())
            with (weights if weights is not None and file.name == WEIGHTS_FILE else file).open("rb") as stream:
                while piece := stream.read(2**20):
                    digest.update(piece)
    return digest.hexdigest()
