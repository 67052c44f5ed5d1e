"""Task heads: trainable linear layers that answer a vision task in one forward pass, stored with their adapter."""

from heads.boxes import Box
from heads.calibration import expected_calibration_error
from heads.spec import HeadSpec, TaskHead
from heads.storage import load_heads, save_heads
from heads.task import LESS_IS_BETTER, Answer, Grid, Task, Value
from heads.tasks import TASKS, make_task

__all__ = [
    "LESS_IS_BETTER",
    "TASKS",
    "Answer",
    "Box",
    "Grid",
    "HeadSpec",
    "Task",
    "TaskHead",
    "Value",
    "expected_calibration_error",
    "load_heads",
    "make_task",
    "save_heads",
]
