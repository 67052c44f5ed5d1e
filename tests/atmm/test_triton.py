"""The Triton kernels: in the interpreter on any machine, and compiled without a GPU."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


INTERPRETED = {"TRITON_INTERPRET": "1"}  # it is selected for a whole process when the kernels are imported
# One check of each kind of kernel, which `make test` runs.
_SAMPLE = (
    "test_add_delta.py::test_every_strategy_agrees_with_the_reference[tiled-odd-torch.float32]",
    "test_add_delta.py::test_every_strategy_agrees_with_the_reference[tiled m32 n128 k64 s0 p2-equal-torch.bfloat16]",
    "interpreted/check_tiled.py::test_factors_are_read_in_place_at_every_layer[None-decode-torch.float32]",
    "test_merge.py::test_merge_agrees_with_the_reference[triton, -torch.float32-8-70-40]",
    "interpreted/check_tiled.py::test_a_merge_into_eight_bits_rounds_the_exact_sum[torch.float32-8-70-40]",
    "interpreted/check_decode.py::test_a_padding_row_reads_one_token_only",
    "interpreted/check_decode.py::test_every_grouping_length_block_and_number_of_splits[4-2-16-lengths12-8-None-torch.float32]",
    "test_pointwise.py::test_norms_equal_those_of_eager_torch[3-128-torch.float32]",
    "test_pointwise.py::test_rotations_equal_those_of_eager_torch_in_place[5-14-2-64-torch.bfloat16]",
    "test_pointwise.py::test_gates[3-1024-torch.float16]",
    "test_pointwise.py::test_writes_to_the_cache[4-128-torch.int32-torch.float32]",
    "test_pointwise.py::test_rounding_to_eight_bits[3-1024-torch.float32]",
    "interpreted/check_products.py::test_products[int4-32-symmetric-5-130-4-torch.float32]",
    "interpreted/check_products.py::test_merges_round_the_exact_sum[int4-32-symmetric-24-torch.bfloat16-70-160]",
)


def test_one_kernel_of_each_kind_agrees_with_the_reference_in_the_interpreter() -> None:
    _passes(_SAMPLE, INTERPRETED)


@pytest.mark.gpu_sim
@pytest.mark.timeout(1200)  # for a busy machine; an idle one takes about a minute
@pytest.mark.parametrize(
    "checks",
    (
        ("test_add_delta.py", "test_merge.py", "test_pointwise.py", "check_tiled.py", "check_decode.py"),
        ("check_products.py",),
        ("check_styles.py", "check_engine.py"),
    ),
    ids=("kernels", "products", "bench and engine"),
)
def test_kernels_agree_with_the_reference_in_the_interpreter(checks: tuple[str, ...]) -> None:
    """Checks share a process, which takes seconds to start."""
    _passes([f"interpreted/{check}" if check.startswith("check") else check for check in checks], INTERPRETED)


@pytest.mark.gpu_sim
def test_compiled_kernels_are_launched_without_recompiling() -> None:
    # A process has one driver, and the driver of this test has no GPU.
    _passes(["check_handles.py"], {})


def _passes(checks: Sequence[str], environment: Mapping[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/atmm/{check}" for check in checks)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.gpu_sim
@pytest.mark.timeout(1200)  # for a busy machine
@pytest.mark.parametrize("capability", (80, 86, 87, 89, 90, 100, 120))
def test_kernels_compile_ahead_without_spilling_and_larger_ones_are_found(capability: int) -> None:
    from atmm.triton.tiling import Tiling
    from tests.atmm.kernel_lint import compilations, inspect, kernels_of, sample

    for kernel, target in compilations(sample()):
        if target == capability:
            facts = inspect(kernel, capability)
            assert not facts.faults, (kernel, facts)
    (shrink, _) = kernels_of(Tiling(64, 128, 256, 1, 4), 64)
    assert any("of shared memory" in fault for fault in inspect(shrink, capability).faults)


@pytest.mark.gpu_sim
@pytest.mark.parametrize(
    ("name", "warps", "itemsize", "capability", "changed", "words"),
    (
        ("shrink", 8, 2, 80, {"BLOCK_M": 128, "BLOCK_R": 16, "BLOCK_K": 64}, "loads of 64 bits, 2 allowed"),
        ("expand", 8, 2, 80, {"BLOCK_M": 128, "BLOCK_R": 16, "MAX_RANK": 16, "BLOCK_N": 64}, "loads of 64 bits"),
        ("expand", 4, 2, 80, {"LINE": 1}, "loads of 16 bits"),
        ("expand", 4, 4, 80, {"BLOCK_M": 64, "LINE": 4}, "bytes spilled"),
        ("decode_part", None, 4, 90, {"TILE": 128}, "bytes spilled"),
        ("decode_part", None, 2, 90, {"HEAD": 256}, "registers, 168 allowed"),
        ("decode_part", None, 4, 80, {"BLOCK": 1}, "loads of 32 bits, 5 allowed"),  # a table entry per token
    ),
)
def test_kernels_with_narrow_loads_or_spills_are_found(
    name: str, warps: int | None, itemsize: int, capability: int, changed: dict[str, int], words: str
) -> None:
    from atmm.triton.tiling import Tiling
    from tests.atmm.kernel_lint import Kernel, decoding, inspect, kernels_of

    if warps is None:
        (sound, _) = decoding(7, 4, 128, 8, itemsize=itemsize)
        kernel = dataclasses.replace(sound, sizes={**sound.sizes, **changed})
    else:
        (sound,) = (each for each in kernels_of(Tiling(16, 128, 128, 1, 3), 64) if each.name == name)
        kernel = Kernel(name, {**sound.sizes, **changed}, warps, itemsize=itemsize)
    facts = inspect(kernel, capability)
    assert any(words in fault for fault in facts.faults), facts
