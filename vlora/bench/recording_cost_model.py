"""A cost model that also records the sizes of an engine's steps, for benches that time single steps."""

from __future__ import annotations

from vlora.orchestrator import CostModel, StepSize


class RecordingCostModel(CostModel):
    """Records the sizes of steps and the number of encoded patches. All may be reset from outside.

    Attributes:
        last_step: Size of the last step that computed tokens; None before the first.
        sizes: Sizes of all steps that computed tokens.
        num_patches: Patches encoded so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last_step: StepSize | None = None
        self.sizes: list[StepSize] = []
        self.num_patches = 0.0

    def observe_step(self, size: StepSize, seconds: float) -> None:
        self.last_step = size
        self.sizes.append(size)
        super().observe_step(size, seconds)

    def observe_encoding(self, num_patches: float, seconds: float) -> None:
        self.num_patches += num_patches
        super().observe_encoding(num_patches, seconds)
