"""Small single-task models: they label unlabelled data and serve as a reference for adapters."""

from fusion.teachers.built_in import TEACHERS, SmallNetwork

__all__ = ["TEACHERS", "SmallNetwork"]
