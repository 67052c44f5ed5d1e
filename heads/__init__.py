"""Task heads: trainable linear layers that answer a vision task in one pass, stored beside their adapter."""

from heads.detection import Box
from heads.spec import HeadSpec, TaskHead
from heads.storage import load_heads, save_heads
from heads.tasks import TASKS, Decision, Task

__all__ = ["TASKS", "Box", "Decision", "HeadSpec", "Task", "TaskHead", "load_heads", "save_heads"]
