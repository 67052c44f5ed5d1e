"""Numbers of hypothesis examples that follow the profile: `make test` draws 40 % of those of `make test-all`.

`make test-fast` draws 20 %.
"""

from __future__ import annotations

import hypothesis

_FULL = 100  # hypothesis' own default, which the full tier keeps


def scaled(number: int) -> int:
    """`number` in the full tier, and the profile's share of it elsewhere; at least 5."""
    profile = hypothesis.settings.default
    assert profile is not None
    return max(5, number * profile.max_examples // _FULL)
