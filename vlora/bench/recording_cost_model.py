"""A cost model that also records the sizes of an engine's steps, for benches that time single steps."""

from __future__ import annotations

from vlora.orchestrator import CostModel, StepSize


class RecordingCostModel(CostModel):
    """Records the size of the last step and the number of encoded patches. Both may be reset from outside.

    Attributes:
        last_step: Size of the last step that computed tokens; None before the first.
        num_patches: Patches encoded so far.
    """

    last_step: StepSize | None = None
    num_patches = 0.0

    def observe_step(self, size: StepSize, seconds: float) -> None:
        self.last_step = size
        super().observe_step(size, seconds)

    def observe_encoding(self, num_patches: float, seconds: float) -> None:
        self.num_patches += num_patches
        super().observe_encoding(num_patches, seconds)
