"""The folders of tests that a change needs follow from the import law."""

from __future__ import annotations

import pytest

from tests import touched


@pytest.mark.parametrize(
    ("file", "first", "among"),
    [
        ("atmm/triton/kernels.py", "tests/simulated_cuda", "tests/engine"),
        ("tests/atmm/test_triton.py", "tests/simulated_cuda", "tests/atmm"),
        ("tests/qwen_vl/test_adapters.py", "tests/qwen_vl", None),
        ("vlora/models/families.py", "tests/simulated_cuda", "tests/qwen_vl"),
        ("vlora/routing/router.py", "tests/routing", "tests/cluster"),
        ("vlora/config.py", "tests/orchestrator", "tests/server"),
        ("apps/streams.py", "tests/apps", "tests/cli"),
        ("docs/gpu.md", None, None),
    ],
)
def test_a_change_needs_the_tests_of_its_package_and_of_those_above(
    file: str, first: str | None, among: str | None
) -> None:
    folders = touched.folders_for([file])
    assert folders[:1] == ([first] if first else []) and (among is None or among in folders)
