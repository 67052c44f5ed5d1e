"""Task heads: trainable linear layers that answer a vision task in one pass, stored beside their adapter."""

from heads.spec import TASKS, Decision, HeadSpec, TaskHead
from heads.storage import load_heads, save_heads

__all__ = ["TASKS", "Decision", "HeadSpec", "TaskHead", "load_heads", "save_heads"]
