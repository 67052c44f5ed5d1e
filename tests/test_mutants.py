"""The mutants (`tests/mutants`): each patch applies to this tree and names its fault and tests."""

from __future__ import annotations

import pytest

from tests.mutants.__main__ import ROOT, Mutant, applies, mutants


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="patches are applied by git, in a clone")
def test_each_mutant_applies_and_names_its_fault_and_tests() -> None:
    found = mutants()
    assert all(mutant.fault and mutant.tests for mutant in found)
    assert [mutant.path.name for mutant in found if not applies(mutant, check=True)] == []
    assert not applies(Mutant(ROOT / "README.md", "no patch", ()), check=True)
