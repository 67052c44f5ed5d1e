"""On a processor with slow bfloat16 products, neither requests nor a training beside them use any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from atmm import processor
from tests.atmm.test_cpu import needs_compiler
from tests.training.beside import Case, request, settle
from vlora.bench.dummy import language_shapes, write_adapter
from vlora.models.loading import load_model


class _Products(TorchDispatchMode):
    """Torch's matrix products, by name and type."""

    NAMES = frozenset(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear", "addbmm"))

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if name.rstrip("_") in self.NAMES:
            self.found |= {(name, each.dtype) for each in args if isinstance(each, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@needs_compiler
@pytest.mark.parametrize("fast", (True, False))
def test_products_are_in_float32_where_bfloat16_is_slow(
    tmp_path: Path, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: fast)
    case = Case.make(tmp_path / "case")
    engine = case.engine(case.plan("results", ["first"]), dtype="bfloat16", policy="unmerged_only")
    shapes = language_shapes(load_model(case.config(dtype="bfloat16")))
    for rank in (4, 40):
        engine.load_adapter(f"rank{rank}", write_adapter(tmp_path / f"rank{rank}", shapes, rank, seed=rank))
    for number in range(4):
        adapter = f"rank{(4, 40)[number % 2]}"
        engine.add(request(f"r{number}", adapter, num_prompt=40))
    with _Products() as products:
        settle(engine.parts.trainings, engine)
        while engine.has_work:
            engine.step()
    engine.close()
    assert {dtype for _, dtype in products.found} == {torch.bfloat16 if fast else torch.float32}, products.found
