"""Replacing the classes of a model's layers by ones that compute the same with this project's kernels."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def change_classes(model: nn.Module, target_of: Callable[[nn.Module], type | None]) -> int:
    """Give modules of a model another class, in place.

    Args:
        target_of: The class to use instead of a module's own; None to keep it. Called once per class.

    Returns:
        The number of changed modules.
    """
    targets: dict[type, type | None] = {}
    number = 0
    for module in model.modules():
        kind = type(module)
        if kind not in targets:
            targets[kind] = target_of(module)
        target = targets[kind]
        if target is not None:
            module.__class__ = target
            number += 1
    return number
