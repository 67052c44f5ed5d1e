"""Task heads: trainable linear layers that answer a vision task in one forward pass, stored with their adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlora.lazy import attributes

if TYPE_CHECKING:
    from heads.answer import Answer, Box, Grid, Value
    from heads.storage import HeadSpec, TaskHead, load_heads, save_heads
    from heads.task import Task
    from heads.tasks import TASKS

__all__ = ["TASKS", "Answer", "Box", "Grid", "HeadSpec", "Task", "TaskHead", "Value", "load_heads", "save_heads"]

# Readers of training data use boxes and answers without torch.
__getattr__ = attributes(
    __name__,
    TASKS="heads.tasks",
    Answer="heads.answer",
    Box="heads.answer",
    Grid="heads.answer",
    HeadSpec="heads.storage",
    Task="heads.task",
    TaskHead="heads.storage",
    Value="heads.answer",
    load_heads="heads.storage",
    save_heads="heads.storage",
)
