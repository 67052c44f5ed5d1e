"""All figures, in the order of the page."""

from __future__ import annotations

from collections.abc import Sequence

from vlora.bench.paper.figure import PAPERS, Figure
from vlora.bench.paper.figures import (
    punica_operator,
    slora_serving,
    symbiosis,
    tensor_parallel,
    throughput,
    vlora_accuracy,
    vlora_operator,
    vlora_serving,
    vlora_steps,
)
from vlora.bench.paper.figures.elsewhere import ELSEWHERE
from vlora.errors import BadConfig

__all__ = ["ELSEWHERE", "FIGURES", "chosen"]


def _order(figure: Figure) -> tuple[int, bool, int]:
    """By paper, figures before tables, then by number."""
    digits = figure.number.lstrip("figtable")
    return list(PAPERS).index(figure.paper), figure.number.startswith("table"), int(digits)


_MODULES = (
    punica_operator,
    slora_serving,
    symbiosis,
    tensor_parallel,
    throughput,
    vlora_accuracy,
    vlora_operator,
    vlora_serving,
    vlora_steps,
)
FIGURES: Sequence[Figure] = sorted((figure for module in _MODULES for figure in module.FIGURES), key=_order)


def chosen(keys: Sequence[str]) -> list[Figure]:
    """The figures with these keys in the order of the page.

    Args:
        keys: Keys of figures, such as "v-lora:fig14"; none for all.

    Raises:
        BadConfig: A key is unknown, or the figure needs another machine.
    """
    known = {figure.key: figure for figure in FIGURES}
    others = {each.key: each for each in ELSEWHERE}
    for key in keys:
        if key in others:
            each = others[key]
            raise BadConfig(f"{key} ({each.title}) is not drawn by this command; it needs {each.needs}")
        if key not in known:
            raise BadConfig(f"no figure {key!r}; choose among {', '.join(known)}")
    return [figure for figure in FIGURES if not keys or figure.key in keys]
