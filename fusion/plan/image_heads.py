"""Training of heads that read features of pictures: by themselves, since a LoRA of the language model does not change
those features."""

from __future__ import annotations

from heads import TASKS

# Such a head is small and needs more steps and samples than a LoRA, at a fraction of their cost.
HEAD_STEPS, HEAD_SAMPLES = 5, 4  # steps and samples per step, by those of the plan


def trains_by_itself(task: str, *, vision: bool) -> bool:
    """Whether domains of this task take no part in the training of the LoRA.

    Args:
        vision: whether the LoRA adapts the vision side, which computes the features.
    """
    return task in TASKS and TASKS[task].reads_images and not vision


def head_training(steps: int, batch_size: int) -> str:
    """Steps and samples of such a head's training, by those of the plan."""
    return f"{HEAD_STEPS * steps} steps of {HEAD_SAMPLES * batch_size} samples"
