"""The only call of transformers' `from_pretrained`. Code that comes with a checkpoint is never run."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging

from vlora.adapter_files import is_pointer
from vlora.errors import BadConfig

# Module and name in `vlora.models.qwen_vl`, by `model_type` and class of transformers: a checkpoint as published, and
# as this project saves it, with files that transformers reads.
_SAVED = {
    "AutoConfig": ("config", "QwenVLConfig"),
    "AutoModelForImageTextToText": ("model", "QwenVLForConditionalGeneration"),
}
_PUBLISHED = {
    **_SAVED,
    "AutoTokenizer": ("tokenizer", "QwenVLTokenizer"),
    "AutoImageProcessor": ("config", "QwenVLImageProcessor"),
}
_QWEN_VL = {"qwen": _PUBLISHED, "qwen_vl": _SAVED}

_READ = frozenset((".json", ".jinja", ".model", ".txt", ".tiktoken"))


def from_pretrained(kind: Any, model: str | Path | None, **options: Any) -> Any:
    """Load an object from a folder or hub name.

    Args:
        model: The folder or hub name. None if the options have all tensors.

    Raises:
        BadConfig: The checkpoint needs custom code. Errors of `kind` are raised too.
    """
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # for terminals only
    if model is not None:
        _refuse_pointers(Path(model))
        kind = _own_class(kind, model)
    try:
        # Always explicit: by default transformers prompts on the terminal and runs the code if the user agrees.
        return kind.from_pretrained(model, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise BadConfig(
            f"{str(model)!r} needs custom code (auto_map) for {kind.__name__}, and code from a checkpoint is never "
            "run here; use a checkpoint that transformers supports itself"
        ) from error


def _refuse_pointers(folder: Path) -> None:
    """Raises BadConfig for a clone without files that Git LFS stores, of which some would be read as others.

    Pointers of weights, which a folder may have in several forms, are found when they are read.
    """
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.suffix in _READ and file.is_file() and is_pointer(file):
            raise BadConfig(f"{file} is a pointer of Git LFS, not the file; run `git lfs pull` in its folder")


def load_complete(kind: Any, model: str | Path | None, **options: Any) -> Any:
    """Load a model as `from_pretrained`, but not with random weights in the place of missing or other ones.

    Raises:
        BadConfig: Tensors of the model are missing, for which transformers only warns, or have other shapes; or as
            `from_pretrained`.
    """
    name = str(options["config"].name_or_path if model is None else model)
    loaded, found = from_pretrained(kind, model, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    wrong = [
        *(f"lack {tensor}" for tensor in sorted(found["missing_keys"])),
        *(
            f"have {tensor} with the shape {list(stored)}, the configuration has {list(own)}"
            for tensor, stored, own in sorted(found["mismatched_keys"])
        ),
    ]
    if wrong:
        more = f" and {len(wrong) - 1} other faults of this kind" * (len(wrong) > 1)
        raise BadConfig(
            f"cannot load the weights of {name!r}: its files {wrong[0]}{more}; the checkpoint is "
            "incomplete, or its config.json is of another model: copy or download it again"
        )
    return loaded


def _own_class(kind: Any, model: str | Path) -> Any:
    """The class of this project that reads a checkpoint in the place of `kind`, or `kind` if transformers reads it."""
    with contextlib.suppress(OSError, ValueError):  # an unreadable config.json is reported by `kind`
        stored, _ = PreTrainedConfig.get_config_dict(model)
        model_type = stored.get("model_type") if isinstance(stored, dict) else None
        own = _QWEN_VL.get(str(model_type), {}).get(kind.__name__)
        if own is not None:
            module, name = own
            return getattr(importlib.import_module(f"vlora.models.qwen_vl.{module}"), name)
    return kind
