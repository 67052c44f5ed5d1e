"""The launches that compile a search's kernels, in the interpreter."""

from __future__ import annotations

from atmm.tuning.search import Case, Shape, kernel_samples, launch


def test_every_sample_can_be_launched() -> None:
    samples = kernel_samples([Case(Shape(48, (40, 16)), rank, "float32", 1, 2, True) for rank in (8, 64)])
    assert launch(samples[::8], "cpu") == len(samples[::8]) >= 3
